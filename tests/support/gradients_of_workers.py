"""The gradients that workers have before each update, made in one process by plain PyTorch."""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from worker_training import batch

Gradients = dict[str, torch.Tensor]


def gradients_of_updates(case: Mapping[str, Any], model: nn.Module) -> Iterator[list[Gradients]]:
    """For each update of a case of `worker_training.train` that takes place: each worker's part of the mean's gradients, by
    parameter. The model is to be updated before the next one is asked for."""
    parameters, failed = dict(model.named_parameters()), [step for step, _, _ in case.get("faults", ())]
    sums, count = _zeros(case, parameters), 0
    for number in range(case.get("steps", 4)):
        if number in failed:
            continue
        sizes = case["sizes"][number % len(case["sizes"])]
        for worker, size in enumerate(sizes):
            x, y = batch(number % case.get("batches", number + 1), worker, size)
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
            for name, own in zip(parameters, torch.autograd.grad(loss, list(parameters.values())), strict=True):
                sums[worker][name] += own
        count += sum(sizes)
        if number not in case.get("accumulates", ()):
            yield [{name: own / count for name, own in of_worker.items()} for of_worker in sums]
            sums, count = _zeros(case, parameters), 0


def _zeros(case: Mapping[str, Any], parameters: Mapping[str, torch.Tensor]) -> list[Gradients]:
    return [{name: torch.zeros_like(own) for name, own in parameters.items()} for _ in case["devices"]]
