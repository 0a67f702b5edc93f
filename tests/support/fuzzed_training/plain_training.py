"""A training step as its contract says, in plain PyTorch: one shard after the other, then one update."""

import copy
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from fuzzed_training.models import FunctionalNorm
from fuzzed_training.settings import Distribution

Loss = Callable[[Any, Any], torch.Tensor]


class PlainTraining:
    """Trains a model, in float64, as a step on several devices must train it.

    Each replica has values of its own of the buffers that forward writes while training; the model shows their mean, or
    replica 0's where they are integers. A replica without a shard, of a small batch, keeps its own, which do not count then.
    What the user writes between steps is every replica's. In eval mode a replica reads what the model shows.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, distribution: Distribution, is_mean: bool
    ) -> None:
        self.model, self.optimizer = model, optimizer
        self.distribution, self.is_mean = distribution, is_mean
        self.num_accumulated = 0
        self.grad_norm = math.nan
        self._kept: dict[nn.Parameter, torch.Tensor] = {}  # the gradients of a sum over examples
        self._own: dict[str, list[torch.Tensor]] = {}
        self._shown: dict[str, tuple[int, torch.Tensor]] = {}  # version and value after the last step

    def step(self, batch: Mapping[str, Any], loss_fn: Loss) -> float:
        """Trains on one batch; returns its loss. If it raises, the model and the optimizer are as before."""
        loss, own = self._run(batch, loss_fn), len(batch["target"])
        together = own + self.num_accumulated if self.is_mean else 1
        for parameter in self._held() if self.num_accumulated else ():
            if parameter.grad is None and parameter.requires_grad and parameter in self._kept:
                parameter.grad = torch.zeros_like(parameter)  # this batch has not used it, an earlier one has
            if parameter.grad is not None:
                parameter.grad.mul_(own / together if self.is_mean else 1.0)
                parameter.grad.add_(self._kept.get(parameter, torch.zeros_like(parameter)) / together)
        self._clip()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.drop_all()
        return loss

    def accumulate(self, batch: Mapping[str, Any], loss_fn: Loss) -> float:
        loss, own = self._run(batch, loss_fn), len(batch["target"])
        for parameter in self._held():
            if parameter.grad is not None:
                weighted = parameter.grad * (own if self.is_mean else 1)
                self._kept[parameter] = weighted + self._kept.get(parameter, torch.zeros_like(parameter))
        self.num_accumulated += own
        self.optimizer.zero_grad()
        return loss

    def gradients(self, batch: Mapping[str, Any], loss_fn: Loss) -> float:
        before = {parameter: parameter.grad for parameter in self.model.parameters()}
        for parameter in before:
            parameter.grad = None
        loss = self._run(batch, loss_fn)
        for parameter, gradient in before.items():
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad
        return loss

    def evaluate(self, batch: Mapping[str, Any], loss_fn: Loss) -> float:
        with torch.no_grad():
            return self._run(batch, loss_fn)

    def kept(self) -> Collection[nn.Parameter]:
        return self._kept

    def drop(self, parameters: Collection[nn.Parameter]) -> None:
        self._kept = {kept: value for kept, value in self._kept.items() if all(kept is not p for p in parameters)}
        if not self._kept:
            self.num_accumulated = 0

    def drop_all(self) -> None:
        self.drop(list(self._kept))

    def close(self) -> None:
        pass

    def _held(self) -> list[nn.Parameter]:
        return list(dict.fromkeys(p for group in self.optimizer.param_groups for p in group["params"]))

    def _clip(self) -> None:
        own = [parameter for parameter in self._held() if parameter.grad is not None]
        most, bound = self.distribution.max_grad_norm, self.distribution.max_grad_value
        if most is not None:
            self.grad_norm = torch.nn.utils.clip_grad_norm_(own, most).item()
        if bound is not None:
            torch.nn.utils.clip_grad_value_(own, bound)

    def _run(self, batch: Mapping[str, Any], loss_fn: Loss) -> float:
        buffers = dict(self._buffers())
        self._take_over(buffers)
        before = {name: buffer.clone() for name, buffer in buffers.items()}
        self.optimizer.zero_grad()
        own, total = {name: list(values) for name, values in self._own.items()}, 0.0
        kept = {key: copy.copy(value) for key, value in self.model.kept.items()}
        try:
            shards = self._shards(batch)
            for replica, shard in enumerate(shards):
                total += self._run_replica(kept, replica, shard, len(batch["target"]), loss_fn, buffers, own)
        except Exception:
            for name, buffer in buffers.items():
                buffer.detach().copy_(before[name])
            self.model.kept.update(kept)
            self.optimizer.zero_grad()
            raise
        self._own = own
        self._show(buffers, len(shards))
        return total

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
                self._own[name] = [buffer.clone() for _ in range(self.distribution.num_devices)]

    def _fewest(self) -> int:
        """The fewest examples of a shard, or of a part of one: two where examples are normalized together."""
        modules = self.model.modules()
        return 2 if any(isinstance(m, nn.BatchNorm1d | FunctionalNorm) and m.training for m in modules) else 1

    def _shards(self, batch: Mapping[str, Any]) -> list[dict[str, Any]]:
        return _split(batch, min(self.distribution.num_devices, len(batch["target"]) // self._fewest()))

    def _run_replica(
        self,
        kept: Mapping[str, Any],
        replica: int,
        shard: dict[str, Any],
        num_examples: int,
        loss_fn: Loss,
        buffers: Mapping[str, torch.Tensor],
        own: Mapping[str, list[torch.Tensor]],
    ) -> float:
        for name, buffer in buffers.items():
            buffer.copy_(own[name][replica])
        most = self.distribution.microbatches if torch.is_grad_enabled() else 1
        total = 0.0
        for part in _split(shard, max(1, min(most, len(shard["target"]) // self._fewest()))):
            target = part.pop("target")
            self.model.kept.update(
                {key: copy.copy(value) for key, value in kept.items()}
            )  # each forward of a step goes on from the last step
            weight = len(target) / num_examples if self.is_mean else 1.0
            loss = loss_fn(self.model(**part), target) * weight
            if torch.is_grad_enabled():
                loss.backward()
            total += loss.item()
        for name, buffer in buffers.items():
            own[name][replica] = buffer.clone()
        return total

    def _show(self, buffers: Mapping[str, torch.Tensor], num_shards: int) -> None:
        for name, buffer in buffers.items():
            values = self._own[name][:num_shards]
            buffer.copy_(torch.stack(values).mean(0) if buffer.is_floating_point() else values[0])
            self._shown[name] = buffer._version, buffer.clone()


def _split(batch: Mapping[str, Any], number: int) -> list[dict[str, Any]]:
    """The tensors of a batch in so many parts, whose sizes differ by at most one; all else in each of them."""
    split = {key: _parts(value, number) for key, value in batch.items()}
    return [{key: values[i] for key, values in split.items()} for i in range(number)]


def _parts(value: Any, number: int) -> Sequence[Any]:
    if isinstance(value, torch.Tensor):
        return value.tensor_split(number)
    if isinstance(value, list):
        return [[value[i] for i in places] for places in torch.arange(len(value)).tensor_split(number)]
    return [value] * number
