"""Events in which the user steps, with this optimizer or another one, or changes what a step of the optimizer does."""

from random import Random
from types import MethodType
from typing import Any

import torch

from fuzzed_training.comparison import Side
from fuzzed_training.events import draw_batch, event
from fuzzed_training.optimizer_events import FUSED, draw_is_one
from fuzzed_training.pair import Pair


@event
def train_by_hand(pair: Pair, draw: Random) -> None:
    """The user makes a step of their own, with the same optimizer; every second time fused."""
    if any(group.get("amsgrad") and not had for group, had in _maxima(pair.twin)):
        return  # it was turned on when there was state already: PyTorch's own step fails
    batch, is_fused = draw_batch(pair, draw), draw.random() < 0.5
    is_fused = is_fused and not _has_some_momenta(pair.twin)
    for side in pair.sides:
        groups = side.optimizer.param_groups
        is_fused = is_fused and type(side.optimizer) in FUSED and not any(group.get("foreach") for group in groups)
        before = [group.get("fused") for group in groups]
        _backward(pair, side, batch)
        for group in groups if is_fused else ():
            group["fused"] = True
        side.optimizer.step()
        for group, value in zip(groups, before, strict=True) if is_fused else ():
            group["fused"] = value
        side.model.zero_grad()


@event
def train_by_gradients_of_the_step(pair: Pair, draw: Random) -> None:
    """The user steps, with this optimizer or another one, with the gradients of one or two calls of the step."""
    distribution = pair.distribution
    if distribution.max_grad_norm is not None or distribution.max_grad_value is not None:
        return  # these calls are refused
    if any(group.get("amsgrad") and not had for group, had in _maxima(pair.twin)):
        return  # as in `train_by_hand`
    for side in pair.sides:
        pair.drop_accumulated(side)
    for _ in range(draw.choice((1, 1, 2))):
        pair.leave_gradients(draw_batch(pair, draw))
    is_another = draw.random() < 0.3
    for side in pair.sides:
        optimizer = torch.optim.SGD(side.model.parameters(), lr=0.05) if is_another else side.optimizer
        optimizer.step()
        side.model.zero_grad()


@event
def train_with_another_optimizer(pair: Pair, draw: Random) -> None:
    """The user makes a step with another optimizer, whose fused kernel counts no version."""
    batch, is_fused = draw_batch(pair, draw), draw.random() < 0.7
    for side in pair.sides:
        _backward(pair, side, batch)
        torch.optim.SGD(side.model.parameters(), lr=0.05, fused=is_fused).step()
        if draw_is_one(len(batch["x"])):  # type: ignore[arg-type]
            side.model.zero_grad()


def _maxima(side: Side) -> list[tuple[dict[str, Any], bool]]:
    """The groups, and whether the state that there is has what amsgrad needs."""
    optimizer = side.optimizer
    return [
        (group, all("max_exp_avg_sq" in optimizer.state[p] for p in group["params"] if optimizer.state.get(p)))
        for group in optimizer.param_groups
    ]


def _has_some_momenta(side: Side) -> bool:
    """Whether some parameters have a momentum and others have none: there PyTorch's fused SGD raises a TypeError."""
    state = side.optimizer.state
    has = {state.get(p, {}).get("momentum_buffer") is not None for p in side.model.parameters()}
    return isinstance(side.optimizer, torch.optim.SGD) and len(has) > 1


def _backward(pair: Pair, side: Side, batch: dict[str, Any]) -> None:
    pair.drop_accumulated(side)
    arguments = dict(batch)
    target = arguments.pop("target")
    with torch.random.fork_rng(devices=()):  # dropout draws the same numbers on both sides
        loss = pair.loss_fn(side.model(**arguments), target)
    if loss.requires_grad:  # something is left to train
        loss.backward()


@event
def patch_step(pair: Pair, draw: Random) -> None:
    for side in pair.sides:
        optimizer = side.optimizer
        if getattr(optimizer.step, "clamps", False) and not side.schedulers:
            optimizer.step = optimizer.step.inner  # type: ignore[method-assign,attr-defined]
        else:
            optimizer.step = _clamping(optimizer)  # type: ignore[method-assign]


def _clamping(optimizer: torch.optim.Optimizer) -> Any:
    inner = optimizer.step

    def step(self: torch.optim.Optimizer, closure: None = None) -> None:
        inner()
        with torch.no_grad():
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    parameter.clamp_(-0.3, 0.3)

    step.inner, step.clamps = inner, True  # type: ignore[attr-defined]
    return MethodType(step, optimizer)  # schedulers wrap methods


@event
def hook_the_step(pair: Pair, draw: Random) -> None:
    is_added = draw.random() < 0.6
    for side in pair.sides:
        if is_added:
            side.optimizer.register_step_post_hook(_shrink)
        else:
            side.optimizer._optimizer_step_post_hooks.clear()


@torch.no_grad()
def _shrink(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.mul_(0.99)
