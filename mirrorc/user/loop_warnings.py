"""Warns of calls without effect beside a compiled step, such as clipping and backward, and of modes of the caller's thread."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch

from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.torch_internals import (
    dispatch_modes,
    has_hooks_on_saved_tensors,
    no_torch_function,
    observe_clipping,
    observe_zero_grad,
)
from mirrorc.user.optimizer_groups import OptimizerGroups

_HOOK = "optimizer.register_step_pre_hook(hook), once, for anything else to be done to gradients before the update"
_SCALER = "mirrorc.compile(..., scaler=scaler), for a GradScaler"
_DONE = "when mirrorc's step returns, it has made its update already, and it leaves no gradients"


class GradientHabits:
    """Warns once of each call in the training loop that has no effect beside a compiled step.

    Attributes:
        has_trained: the step has run; no warnings come before.
        pending: the gradients accumulated for the next update. ``first_of(ids)`` names the first that has one.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], groups: OptimizerGroups, pending: Any) -> None:
        self.has_trained = False
        self.pending = pending
        self._parameters = {id(parameter): parameter for parameter in parameters}
        self._groups = groups
        self._with_gradients: list[torch.Tensor] = []
        self._warned: set[str] = set()
        _watching.add(self)
        observe_clipping(_warn_of_clipping)
        observe_zero_grad(_tell_of_zeroed)

    def refuse_gradients_of_others(self) -> None:
        ids = {id(p) for group in self._groups.hyperparameters for p in group["params"]}
        if self._first_of_others(ids) is not None:
            gc.collect()  # gradients of unreachable steps do not count
        name = self._first_of_others(ids)
        if name is not None:
            raise problem(
                ValueError,
                f"MC3206: accumulate() of another step keeps a gradient of {name!r}, which this step's update would leave out",
                "an update uses what its own step has accumulated",
                (
                    "other_step(x, y) first, which makes its update",
                    "other_step.zero_grad(), which drops what it keeps",
                    "to train on the sum of two losses, compile one step whose loss_fn adds them",
                ),
            )

    def _first_of_others(self, ids: Collection[int]) -> str | None:
        names = (other.pending.first_of(ids) for other in list(_watching) if other is not self)
        return next((name for name in names if name is not None), None)

    def look_for_gradients(self, *, are_used: bool) -> None:
        """Warns if the step drops gradients of the user's own backward. An optimizer's own step may use them."""
        groups = self._groups.hyperparameters
        self._with_gradients = [p for group in groups for p in group["params"] if p.grad is not None]
        if self._with_gradients and not are_used:
            self._warn(
                "gradients",
                f"MC3204: {len(self._with_gradients)} parameters had gradients from a backward() or step.gradients() "
                "of yours, and the step dropped them",
                "it trains on the gradients of its own batch alone",
                ("put the other loss into loss_fn or into the model", "optimizer.zero_grad() before the step"),
            )

    def note_step(self) -> None:
        for parameter in self._with_gradients:
            parameter.grad = None
        self._with_gradients = []
        self.has_trained = True

    def warn_of_idle_step(self) -> bool:
        """Called after the user's ``optimizer.step()`` without gradients. True if a compiled step has run."""
        if self.pending.has_any:
            self._warn(
                "kept",
                "MC3202: optimizer.step() found no gradients and did nothing: step.accumulate() keeps them",
                "the next call of the step updates with them",
                "leave optimizer.step() out, and end the accumulation with step(...) on its last batch",
            )
        else:
            fixes = ("leave optimizer.step() out, or the loop that makes it", _SCALER, _HOOK)
            self._warn("step", "MC3202: optimizer.step() found no gradients and did nothing", _DONE, fixes)
        return self.has_trained

    def warn_of_clipping(self, function: str, parameters: Sequence[torch.Tensor]) -> None:
        if any(id(parameter) in self._parameters and parameter.requires_grad for parameter in parameters):
            fixes = ("mirrorc.compile(..., clip_grad_norm=1.0) or clip_grad_value=, in its place", _HOOK)
            self._warn("clipping", f"MC3203: {function}() found no gradients and did nothing", _DONE, fixes)

    def _warn(self, kind: str, *parts: Any) -> None:
        if self.has_trained and kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message(*parts), stacklevel=users_stack_level())

    def close(self) -> None:
        _watching.discard(self)


_watching: weakref.WeakSet[GradientHabits] = weakref.WeakSet()


def _tell_of_zeroed(parameters: Sequence[torch.Tensor]) -> None:
    for habits in list(_watching):
        if habits.pending.has_any:
            habits.pending.drop({id(parameter) for parameter in parameters})


def _warn_of_clipping(function: str, parameters: Sequence[torch.Tensor]) -> None:
    if any(parameter.grad is not None for parameter in parameters):
        return
    for habits in list(_watching):
        habits.warn_of_clipping(function, parameters)


class CallersModes:
    """Warns of modes of the caller's thread. ``captures``: the step runs a captured backward, not one of plain PyTorch."""

    def __init__(self, *, captures: bool) -> None:
        self._captures = captures
        self._warned: set[str] = set()

    def look(self, *, trains: bool) -> None:
        """``trains``: the step saves values for backward."""
        for kind in dispatch_modes():
            self._warn(
                kind,
                f"{kind}, a TorchDispatchMode, which does not see what devices run",
                "a mode belongs to a thread, and each device has its own",
                "use the mode around the plain model, on one device",
            )
        if trains and has_hooks_on_saved_tensors():
            self._warn(
                "hooks",
                "saved_tensors_hooks, or save_on_cpu, which get nothing of it",
                "devices keep values for backward in threads of their own",
                (
                    "enter them in forward, which then runs as plain PyTorch",
                    "memory=mirrorc.Memory(activations='50%') of mirrorc.compile, for a step that keeps less",
                ),
            )
        if trains and self._captures and torch.is_anomaly_enabled():
            self._warn(
                "anomalies",
                "detect_anomaly, which sees nothing of its backward",
                "devices run a program, not autograd's functions",
                (
                    "mirrorc.compile(..., check_finite=True), which names the gradient that is not finite",
                    "compiler=mirrorc.Compiler(capture='autograd'), whose backward it sees",
                ),
            )

    def _warn(self, kind: str, mode: str, *parts: Any) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            text = message(f"MC3208: a compiled call was made within {mode}", *parts)
            warnings.warn(text, stacklevel=users_stack_level())


class TrainedLoss(torch.Tensor):
    """A loss whose backward the step has already run: ``loss.backward()`` only warns.

    Products and quotients with a number, as for accumulation in libraries, are a `TrainedLoss`, too. All other results,
    copies and saved values are plain tensors.
    """

    __torch_function__ = no_torch_function  # type: ignore[assignment]

    def backward(self, *args: Any, **kwargs: Any) -> None:
        if self.requires_grad:  # something was added in place
            super().backward(*args, **kwargs)
            return
        warnings.warn(
            message(
                "MC3201: loss.backward() did nothing",
                "the call that returned it has run backward by itself",
                "leave loss.backward() out",
            ),
            stacklevel=users_stack_level(),
        )

    def __mul__(self, factor: Any) -> torch.Tensor:
        return _kept(self.as_subclass(torch.Tensor) * factor, factor)

    def __truediv__(self, divisor: Any) -> torch.Tensor:
        return _kept(self.as_subclass(torch.Tensor) / divisor, divisor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self.as_subclass(torch.Tensor))

    def __format__(self, spec: str) -> str:
        return format(self.as_subclass(torch.Tensor), spec)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_subclass(torch.Tensor).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        return self.as_subclass(torch.Tensor).__deepcopy__(memo)


def _kept(scaled: torch.Tensor, factor: Any) -> torch.Tensor:
    return scaled.as_subclass(TrainedLoss) if isinstance(factor, int | float) else scaled
