"""Calls of many kinds that workers make in tests, and the same in plain PyTorch in one process, to compare."""

import contextlib
import os
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import worker_training
from torch import nn

import mirrorc
from mirrorc.options.table import grouped


def call(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Makes calls as one of the workers, and tells of what it was warned.

    ``calls`` are lists of what is called, ``"accumulate"``, ``"step"`` or ``"zero_grad"``, and the sizes of all workers' batches.
    More items are lists of a rank and what it does otherwise: one of the former, ``"fails"``, or what is written before the call,
    see `_write`; or ``"evaluates"`` the batch first, or ``"looks"`` at the variables. With ``joins``, it is in ``step.join()``
    until a batch has no examples.
    """
    model, optimizer = worker_training.made(given["model"], given.get("optimizer", "AdamW"), seed=rank)
    options = {"backend": "eager", "timeout": 100.0, **given.get("options", {})}
    reduction = "sum" if given.get("is_sum") else "mean"
    loss_fn = nn.CrossEntropyLoss(reduction=reduction)
    found: dict[str, Any] = {"losses": [], "kept": [], "skipped": [], "norms": []}
    torch.manual_seed(5 if rank == 0 else 6)  # the chief's stream is that of all
    with (
        warnings.catch_warnings(record=True) as warned,
        mirrorc.compile(
            model,
            given["devices"][rank],
            optimizer=optimizer,
            loss_fn=loss_fn,
            loss_reduction=reduction,
            **grouped(options),
        ) as step,
    ):
        warnings.simplefilter("always")
        with step.join() if given.get("joins") else contextlib.nullcontext():
            for number, (what, sizes, *others) in enumerate(given["calls"]):
                if given.get("joins") and not sizes[rank]:
                    break
                own = [does for who, does in others if who == rank]
                x, y = worker_training.batch(number, rank, sizes[rank])
                _write(own, model, optimizer, x)
                if "evaluates" in own:
                    step.evaluate(x, target=y)
                if "looks" in own:
                    assert step.variables
                worker_training._is_full = "fails" in own
                try:
                    found["losses"].append(_called(step, next((w for w in own if w in CALLED), what), x, y))
                except (mirrorc.MirrorcError, ValueError) as error:
                    found["losses"].append(f"{type(error).__name__}: {error}")
                finally:
                    worker_training._is_full = False
                found["kept"].append(step.num_accumulated)
                found["skipped"].append(step.num_skipped)
                is_bound = "clip_grad_norm" in options and isinstance(found["losses"][-1], float)
                found["norms"].append(float(step.grad_norm) if is_bound else None)
        found["drawn"] = float(torch.rand(()))
        if options.get("shard_optimizer"):
            step.gather_optimizer_state()
        found["state"] = {
            f"{index} {key}": value.double().flatten().tolist()
            for index, own in optimizer.state_dict()["state"].items()
            for key, value in own.items()
            if isinstance(value, torch.Tensor)
        }
        step.zero_grad()  # what is kept at the end is kept on purpose
    found["warned"] = [str(one.message) for one in warned]
    return {**found, "values": worker_training.values_of(model)}


CALLED = ("accumulate", "step", "zero_grad", "nothing")


def _called(step: Any, what: str, x: torch.Tensor, y: torch.Tensor) -> float | None:
    if what == "zero_grad":
        step.zero_grad()
    return {"accumulate": step.accumulate, "step": step}[what](x, target=y).item() if what in CALLED[:2] else None


class Kept:
    """What an optimizer may keep: a number, and a tensor that is too long for its text."""

    def __init__(self) -> None:
        self.num_steps, self.sums = 0, torch.zeros(3000)


class Keeping(torch.optim.SGD):
    """Keeps objects, and lists of tensors, of which one drifts on one worker."""

    def __init__(self, parameters: Any, drifts_at: int = -1) -> None:
        super().__init__(parameters, lr=0.05)
        self.drifts_at = drifts_at

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            kept = state.setdefault("kept", Kept())
            state.setdefault("sums", [torch.zeros(3000), {"names": {"one", "two", "three"}}])
            kept.num_steps += 1
            if kept.num_steps == self.drifts_at:
                kept.sums[1500] += int(os.environ.get("RANK", "0"))


def _write(own: Sequence[str], model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor) -> None:
    """Writes nan into a batch; into a parameter or its state; or one bit there where the step does not see it."""
    if "nan" in own:
        x[0, 0] = float("nan")
    first = next(model.parameters())
    with torch.no_grad():
        for factor, name in ((0.5, "halve"), (2.0, "double")):
            if name in own:
                first *= factor
            if f"{name} exp_avg" in own:
                optimizer.state[first]["exp_avg"] *= factor
    for name, tensor in (
        ("flip parameter", first),
        *((f"flip {key}", value) for key, value in optimizer.state[first].items()),
    ):
        if name in own:
            tensor.detach().reshape(-1).numpy().view("int64")[1] ^= 1 << 40


def reference(given: dict[str, Any]) -> tuple[list[float | None], dict[str, list[float]]]:
    """The losses and values of plain PyTorch, in one process, on the batches of all workers, for calls that all make, with what
    the chief writes."""
    model, optimizer = worker_training.made(given["model"], given.get("optimizer", "AdamW"), seed=0)
    torch.manual_seed(5)
    bound, is_sum = given.get("options", {}).get("clip_grad_norm"), given.get("is_sum", False)
    parameters = list(model.parameters())
    num_workers = len(given["devices"])
    sums = [[torch.zeros_like(p) for p in parameters] for _ in range(num_workers)]
    counts, losses = [0] * num_workers, []
    for number, (what, sizes, *others) in enumerate(given["calls"]):
        faults = [does for _, does in others]
        _write([does for who, does in others if who == 0 and does != "nan"], model, optimizer, torch.empty(0))
        if {"fails", "accumulate", "step", "nan"} & set(faults):  # no worker makes it
            losses.append(None)
            continue
        for rank in range(num_workers):
            if what == "zero_grad" or [rank, "zero_grad"] in others:
                sums[rank], counts[rank] = [torch.zeros_like(p) for p in parameters], 0
        if what == "zero_grad" or "zero_grad" in faults:
            losses.append(None)
            continue
        total = 0.0
        for rank, size in enumerate(sizes):
            if size:
                x, y = worker_training.batch(number, rank, size)
                loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
                total += loss.item()
                for own, gradient in zip(sums[rank], torch.autograd.grad(loss, parameters), strict=True):
                    own += gradient
                counts[rank] += size
        losses.append(total if is_sum else total / sum(sizes))
        if what == "step":
            for p, *own in zip(parameters, *sums, strict=True):
                p.grad = sum(own) / (1 if is_sum else sum(counts))
            if bound is not None:
                nn.utils.clip_grad_norm_(parameters, bound)
            optimizer.step()
            sums = [[torch.zeros_like(p) for p in parameters] for _ in range(num_workers)]
            counts = [0] * num_workers
    return losses, worker_training.values_of(model)


class Whole(torch.optim.Optimizer):
    """Steps along the momentum's direction, so that each element depends on all of its parameter.

    ``drift`` is what this process adds to each parameter, as another machine may; ``noise``, that of random numbers.
    """

    def __init__(self, parameters: Any, noise: float = 0.0, drift: float = 0.0) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.noise, self.drift = noise, drift

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                momentum.mul_(0.9).add_(parameter.grad)
                parameter -= self.param_groups[0]["lr"] * momentum / (momentum.norm() + 1e-12)
                if self.noise:
                    parameter += self.noise * torch.randn_like(parameter)
                parameter += self.drift


worker_training.OPTIMIZERS |= {
    "whole": Whole,
    "noisy": lambda parameters: Whole(parameters, noise=0.01),
    "drifts": lambda parameters: Whole(parameters, drift=1e-9 * int(os.environ.get("RANK", "0"))),
    "keeps": Keeping,
    "keeps what drifts": lambda parameters: Keeping(parameters, drifts_at=1),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=0.01),
}
