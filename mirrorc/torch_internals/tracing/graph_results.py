"""What a graph of Dynamo's export gives: Python objects of the user's kinds, which hold the graph's values."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx


class StandIns:
    """Tensors that stand for the values of a graph's output, and live as long as something else holds them."""

    def __init__(self, values: Sequence[object]) -> None:
        self._own = [torch.empty(0, device="meta") for _ in values]
        self._known = [(weakref.ref(own), node) for own, node in zip(self._own, values, strict=True)]

    def give(self) -> tuple[torch.Tensor, ...]:
        """The tensors, which this no longer holds."""
        given, self._own = tuple(self._own), []
        return given

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        """The value that a tensor stands for; None if it stands for none."""
        found = (node for own, node in self._known if own() is tensor and isinstance(node, fx.Node))
        return next(found, None)

    def any_held_beyond(self, met: Collection[int]) -> bool:
        """Whether any is still held that is not among these, which are given by their ids."""
        if self._held() - set(met):
            gc.collect()  # takes a second where many objects live: only where circles of objects may hold one
        return bool(self._held() - set(met))

    def _held(self) -> set[int]:
        return {id(own) for ref, _ in self._known if (own := ref()) is not None}


def results_with_stand_ins(traced: fx.GraphModule, leaves: Sequence[torch.Tensor]) -> tuple[Any, StandIns]:
    """What the traced forward returns, with a tensor of its own in the place of each value of the graph.

    Nothing of the user's runs: the objects are put together as torch.compile puts them together after its graph has run, without
    what forward changes in other objects. Objects that were there before are the very same; so are tensors that were passed or
    read, but for what is computed of them without an operator, such as ``x.T``.

    Args:
        traced: the result of `mirrorc.torch_internals.trace_full_graph`.
        leaves: the arguments that it was traced with.

    Raises:
        RuntimeError, NotImplementedError, TypeError: what is returned has Python numbers or arrays that are made of values.
    """
    values = traced.graph.output_node().args[0]
    assert isinstance(values, tuple | list)
    stand_ins = StandIns(values)
    unflatten: Any = traced._dynamo_bytecode_unflatten
    return unflatten(stand_ins.give(), tuple(leaves)), stand_ins


def give_values(traced: fx.GraphModule, values: Sequence[fx.Node]) -> None:
    """Has a graph of Dynamo's export give these of its values, as a tuple, in place of the user's objects."""
    codegen: Any = traced.graph._codegen
    module: Any = traced
    traced.graph.output_node().args = (tuple(values),)
    codegen.dynamo_bytecode_unflatten = module._dynamo_bytecode_unflatten = _as_they_are
    traced.recompile()


def _as_they_are(values: Sequence[object], inputs: Sequence[object]) -> tuple[object, ...]:
    return tuple(values)
