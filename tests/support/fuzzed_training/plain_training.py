"""A training step as its contract says, in plain PyTorch: one shard after the other, then one update."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from fuzzed_training.models import FunctionalNorm

Loss = Callable[[Any, Any], torch.Tensor]


class PlainTraining:
    """Trains a model as a step on several devices must train it.

    Each replica has values of its own of the buffers that forward writes while training; the model shows their mean, or
    replica 0's where they are integers. A replica without a shard, of a small batch, keeps its own, which do not count then.
    What the user writes between steps is every replica's. In eval mode a replica reads what the model shows.

    Args:
        model, optimizer: in float64.
        num_replicas: the number of shards of a batch.
        is_mean: whether the loss is a mean over examples, otherwise it is a sum.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, num_replicas: int, is_mean: bool) -> None:
        self.model, self.optimizer = model, optimizer
        self.num_replicas, self.is_mean = num_replicas, is_mean
        self._own: dict[str, list[torch.Tensor]] = {}
        self._shown: dict[str, tuple[int, torch.Tensor]] = {}  # version and value after the last step

    def step(self, batch: Mapping[str, Any], loss_fn: Loss) -> float:
        """Trains on one batch; returns its loss. If it raises, the model and the optimizer are as before."""
        buffers = dict(self._buffers())
        self._take_over(buffers)
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        self.optimizer.zero_grad()
        own, total = {name: list(values) for name, values in self._own.items()}, 0.0
        try:
            shards = self._shards(batch)
            for replica, shard in enumerate(shards):
                total += self._run_replica(replica, shard, len(batch["target"]), loss_fn, buffers, own)
        except Exception:
            for name, buffer in buffers.items():
                buffer.detach().copy_(before[name])
            self.optimizer.zero_grad()
            raise
        self.optimizer.step()
        self.optimizer.zero_grad()
        self._own = own
        self._show(buffers, len(shards))
        return total

    def close(self) -> None:
        """Nothing is to be ended."""

    def _buffers(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The buffers of modules in training mode; the others' are not written."""
        for prefix, module in self.model.named_modules():
            if module.training:
                for name, buffer in module.named_buffers(recurse=False):
                    yield f"{prefix}.{name}".removeprefix("."), buffer

    def _take_over(self, buffers: Mapping[str, torch.Tensor]) -> None:
        for name, buffer in buffers.items():
            version, value = self._shown.get(name, (-1, buffer))
            if version != buffer._version or not torch.equal(value, buffer):
                self._own[name] = [buffer.clone() for _ in range(self.num_replicas)]

    def _shards(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        """The batch of each replica that has examples: where they are normalized together, each has two or more."""
        is_together = any(isinstance(m, nn.BatchNorm1d | FunctionalNorm) and m.training for m in self.model.modules())
        number = min(self.num_replicas, len(batch["target"]) // (2 if is_together else 1))
        split = {k: v.tensor_split(number) if isinstance(v, torch.Tensor) else [v] * number for k, v in batch.items()}
        return [{key: values[i] for key, values in split.items()} for i in range(number)]

    def _run_replica(
        self,
        replica: int,
        shard: dict[str, Any],
        num_examples: int,
        loss_fn: Loss,
        buffers: Mapping[str, torch.Tensor],
        own: Mapping[str, list[torch.Tensor]],
    ) -> float:
        """Forward and backward of a shard; returns its part of the loss."""
        for name, buffer in buffers.items():
            buffer.copy_(own[name][replica])
        target = shard.pop("target")
        weight = len(target) / num_examples if self.is_mean else 1.0
        loss = loss_fn(self.model(**shard), target) * weight
        loss.backward()
        for name, buffer in buffers.items():
            own[name][replica] = buffer.clone()
        return loss.item()

    def _show(self, buffers: Mapping[str, torch.Tensor], num_shards: int) -> None:
        for name, buffer in buffers.items():
            values = self._own[name][:num_shards]
            buffer.copy_(torch.stack(values).mean(0) if buffer.is_floating_point() else values[0])
            self._shown[name] = buffer._version, buffer.clone()
