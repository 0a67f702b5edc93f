"""Loops of workers around `step.gradients`, and the same in one process by plain PyTorch."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Any

import torch
import worker_training
from torch import nn
from torch.nn import functional as F
from worker_training import asked, batch, made, values_of, whole

import mirrorc
from mirrorc.options.table import grouped

Compute = Callable[[int, list[int]], torch.Tensor]


def _gradients_of(model: nn.Module) -> dict[str, list[float]]:
    named = model.named_parameters()
    return {name: p.grad.to_dense().flatten().tolist() for name, p in named if p.grad is not None}


def _call(model: nn.Module, optimizer: torch.optim.Optimizer, call: list[Any], number: int, compute: Compute) -> float:
    """One call of a case: ``gradients``, those behind which the user ``updates``, clipped, or the ``closure`` of LBFGS."""
    kind, sizes = call[0], call[1]
    if kind == "closure":
        lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

        def closure() -> torch.Tensor:
            lbfgs.zero_grad()
            return compute(number, sizes)

        loss = lbfgs.step(closure)  # type: ignore[arg-type]
        lbfgs.zero_grad()
        return float(loss)
    loss = compute(number, sizes)
    if kind == "updates":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def _frozen(given: Mapping[str, Any]) -> nn.Module:
    """The module that the outputs go through, such as a discriminator; without one, nothing."""
    return made(given["behind"], "SGD", seed=7)[0].requires_grad_(False) if "behind" in given else nn.Identity()


def train(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Makes the ``calls`` of a case as one of the workers; an error of a call is told, and the next call made."""
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=rank)
    own = {"optimizer": optimizer} if given.get("has_optimizer", True) else {}
    devices, options = given["devices"][rank], grouped(asked(given))
    step: Any = None
    if given.get("is_module"):
        step = mirrorc.data_parallel(model, devices, **options)
    else:
        step = mirrorc.compile(model, devices, loss_fn=F.cross_entropy, **options, **own)

    behind: Any = _frozen(given)
    if "behind" in given:
        behind = mirrorc.data_parallel(behind, devices, **options)

    def compute(number: int, sizes: list[int]) -> torch.Tensor:
        x, y = batch(number, rank, sizes[rank])
        if not given.get("is_module"):
            return step.gradients(x, y)
        loss = F.cross_entropy(behind(step(x)), y)
        loss.backward()
        return loss.detach()

    found: dict[str, Any] = {"losses": [], "gradients": [], "errors": [], "compilations": []}
    with contextlib.closing(step):
        for number, (kind, *call) in enumerate(given["calls"]):
            kind = call.pop()[rank] if kind == "unlike" else kind
            try:
                if kind == "step":
                    found["losses"].append(step(*batch(number, rank, call[0][rank])).item())
                elif kind == "accumulate":
                    found["losses"].append(step.accumulate(*batch(number, rank, call[0][rank])).item())
                elif kind == "fails":  # in forward on the last worker
                    worker_training._is_full = rank == len(given["devices"]) - 1
                    compute(number, *call)
                elif kind == "misshapen":  # the batch of the last worker, whose forward cannot be captured
                    x, _ = batch(number, rank, call[0][rank])
                    step(x[:, :3] if rank == len(given["devices"]) - 1 else x)
                elif kind == "evaluates":
                    with torch.no_grad():
                        step(batch(number, rank, call[0][rank])[0])
                elif kind == "frozen":  # the batch gets a gradient
                    model.requires_grad_(False)
                    step(batch(number, rank, call[0][rank])[0].requires_grad_()).sum().backward()
                    model.requires_grad_(True)
                elif kind == "joined":
                    with step.join():
                        compute(number, *call)
                else:
                    found["losses"].append(_call(model, optimizer, [kind, *call], number, compute))
            except Exception as error:  # noqa: BLE001 - the test looks at it
                found["errors"].append(str(error))
                worker_training._is_full = False
            found["gradients"].append(_gradients_of(model))
            if given.get("is_module"):
                found["compilations"].append(step._calls._specializer.num_compilations.total())
        found["values"] = values_of(model)
        if given.get("is_module"):
            buckets = step.programs[1].buckets
            found["as_factors"] = [s.variable for b in buckets if b.is_sent_as_factors for s in b.slots]
    return found


def reference(given: Mapping[str, Any], skips: int | None = None) -> dict[str, Any]:
    """What all workers of `train` have, where no call fails, or the one with the number ``skips`` is not among the calls."""
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=0)

    behind = _frozen(given)

    def compute(number: int, sizes: list[int]) -> torch.Tensor:
        x, y = whole(number, sizes)
        loss = F.cross_entropy(behind(model(x)), y)
        loss.backward()
        return loss.detach()

    losses, gradients = [], []
    numbers = [number for number in range(len(given["calls"]) + 1) if number != skips]
    for number, call in zip(numbers, given["calls"], strict=False):
        if call[0] == "step":
            optimizer.zero_grad()
            losses.append(compute(number, call[1]).item())
            optimizer.step()
            optimizer.zero_grad()
        elif call[0] in ("evaluates", "frozen"):
            with torch.no_grad():
                model(whole(number, call[1])[0])
        else:
            losses.append(_call(model, optimizer, call, number, compute))
        gradients.append(_gradients_of(model))
    return {"losses": losses, "gradients": gradients, "values": values_of(model)}
