"""The arguments of a step: those of forward, and the target of the loss."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from torch import nn

from mirrorc.capture.call.batch_norm import fewest_examples
from mirrorc.capture.call.call_arguments import Call, flatten_call
from mirrorc.capture.call.shards import Shards, split_call
from mirrorc.torch_internals import forward_signature


class Signature:
    def __init__(
        self,
        model: nn.Module,
        loss_fn: Any,
        num_replicas: int,
        *,
        microbatches: int = 1,
        are_several: bool = False,
    ) -> None:
        self._name, self._roots = type(model).__name__, (model, loss_fn)
        self._num_replicas, self._takes_target = num_replicas, loss_fn is not None
        self._microbatches, self._are_several = microbatches, are_several
        self._of_forward = forward_signature(model)
        parameters = self._of_forward.parameters.values()
        self._names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, trains: bool = True) -> tuple[Call, Shards]:
        if trains and self._takes_target and "target" not in kwargs:
            raise TypeError(
                "target is missing: with a loss_fn, call step(x, target=y); y is what the loss_fn gets second"
            )
        of_model = {k: v for k, v in kwargs.items() if k != "target" or not self._takes_target}
        try:
            self._of_forward.bind(*args, **of_model)
        except TypeError as error:
            raise TypeError(
                f"{self._name}.forward{self._of_forward} cannot be called with these arguments: {error}"
            ) from None
        call = flatten_call(self._names, args, kwargs)
        parts = self._microbatches if trains else 1
        split = functools.partial(
            split_call, call, self._num_replicas, microbatches=parts, may_be_empty=trains and self._are_several
        )
        shards = split()
        if self._num_replicas * parts > 1 and shards.fewest_examples < 2:  # only then does BatchNorm matter
            shards = split(fewest=fewest_examples(*self._roots))
        return call, shards
