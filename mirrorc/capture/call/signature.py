"""The arguments of a step: those of forward, and the target of the loss; the fewest examples of a shard."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from mirrorc.capture.call.call_arguments import Call, flatten_call
from mirrorc.capture.call.shards import Shards, split_call
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import forward_signature

_MANY = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)


class Signature:
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        num_replicas: int,
        *,
        microbatches: int = 1,
        are_several: bool = False,
        is_module: bool = False,
    ) -> None:
        self._name, self._roots = type(model).__name__, (model, loss_fn)
        self._num_replicas, self._takes_target = num_replicas, loss_fn is not None
        self._microbatches, self._are_several, self._is_module = microbatches, are_several, is_module
        self._of_forward = forward_signature(model)
        parameters = self._of_forward.parameters.values()
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool = True) -> tuple[Call, Shards]:
        call = self.call_of(args, kwargs, trains=trains)
        return call, self.shards_of(call, trains=trains)

    def call_of(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool = True) -> Call:
        if self._takes_target and "target" not in kwargs:
            args, kwargs = self._with_target(args, kwargs, trains=trains)
        of_model = {k: v for k, v in kwargs.items() if k != "target" or not self._takes_target}
        why = self._why_not_bound(args, of_model)
        if why:
            raise problem(
                TypeError,
                f"MC1301: {self._name}.forward{self._of_forward} cannot be called with these arguments",
                why,
                self._unpacked(args, kwargs, trains=trains) or self._spelled(trains=trains),
            )
        return replace(flatten_call(self._names, args, kwargs), unpacked=self._unpacked(args, kwargs, trains=trains))

    def shards_of(self, call: Call, *, trains: bool = True) -> Shards:
        parts = self._microbatches if trains else 1
        split = functools.partial(
            split_call, call, self._num_replicas, microbatches=parts, may_be_empty=trains and self._are_several
        )
        shards = split()
        if self._num_replicas * parts > 1 and shards.fewest_examples < 2:  # otherwise BatchNorm does not matter
            shards = split(fewest=fewest_examples(*self._roots))
        return shards

    def _with_target(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool
    ) -> tuple[tuple[Any, ...], Mapping[str, Any]]:
        leaves_input = len(args) > 1 or (bool(args) and bool(kwargs))  # a model takes at least one argument
        is_target = leaves_input and not self._why_not_bound(args[:-1], kwargs)
        is_input = not self._why_not_bound(args, kwargs)
        if is_target and (trains or not is_input):
            return args[:-1], {**kwargs, "target": args[-1]}
        if is_target:
            raise problem(
                TypeError,
                f"MC1301: is the last argument the target, or one of {self._name}.forward{self._of_forward}?",
                "both are possible in an evaluation",
                ("step.evaluate(x, target=y), for the target", "name=value, with the name that forward has for it"),
            )
        if trains and is_input:
            raise problem(
                TypeError,
                "MC1301: target is missing: the step has a loss_fn",
                "the loss_fn gets the outputs, then the target",
                (self._unpacked(args, kwargs, trains=trains) or "step(x, y)", "step(x, target=y)"),
            )
        return args, kwargs

    def _why_not_bound(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> str:
        try:
            self._of_forward.bind(*args, **kwargs)
        except TypeError as error:
            return str(error)
        return ""

    def _unpacked(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool) -> str:
        if len(args) != 1 or kwargs:
            return ""
        call = self._callee(trains=trains)
        if isinstance(args[0], Mapping):
            lacks_target = trains and self._takes_target and "target" not in args[0]
            return "" if lacks_target else f"{call}(**batch)"
        return f"{call}(*batch)" if isinstance(args[0], tuple | list) else ""

    def _spelled(self, *, trains: bool) -> str:
        needed = [p for p in self._of_forward.parameters.values() if p.default is p.empty]
        names = [p.name if p.kind is not p.KEYWORD_ONLY else f"{p.name}=..." for p in needed if p.kind not in _MANY]
        names += ["target=y"] if trains and self._takes_target else []
        return f"{self._callee(trains=trains)}({', '.join(names)})"

    def _callee(self, *, trains: bool) -> str:
        return "model" if self._is_module else "step" if trains else "step.evaluate"


_NORMALIZATIONS = nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d


def fewest_examples(*roots: Any) -> int:
    """The fewest examples of a shard: 2 if a BatchNorm uses batch statistics in forward, else 1."""
    modules = (module for root in roots if isinstance(root, nn.Module) for module in root.modules())
    return 2 if any(isinstance(m, _NORMALIZATIONS) and (m.training or m.running_mean is None) for m in modules) else 1
