"""Rebuilds the results of an exported graph as the user's Python objects."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import fx


class StandIns:
    """Tensors in place of a graph's output values. After `give`, only weak references remain."""

    def __init__(self, values: Sequence[object]) -> None:
        self._tensors = [torch.empty(0, device="meta") for _ in values]
        self._known = [(weakref.ref(tensor), node) for tensor, node in zip(self._tensors, values, strict=True)]

    def give(self) -> tuple[torch.Tensor, ...]:
        tensors, self._tensors = tuple(self._tensors), []
        return tensors

    def node_of(self, tensor: torch.Tensor) -> fx.Node | None:
        nodes = (node for reference, node in self._known if reference() is tensor and isinstance(node, fx.Node))
        return next(nodes, None)

    def any_held_beyond(self, met: Collection[int]) -> bool:
        if self._held() - set(met):
            gc.collect()  # takes a second with many objects: only for reference cycles
        return bool(self._held() - set(met))

    def _held(self) -> set[int]:
        return {id(tensor) for ref, _ in self._known if (tensor := ref()) is not None}


def results_with_stand_ins(traced: fx.GraphModule, leaves: Sequence[torch.Tensor]) -> tuple[Any, StandIns]:
    """The result of the traced forward, with a stand-in tensor for each value of the graph.

    torch.compile's code builds the objects, without forward's side effects.

    Raises:
        RuntimeError, NotImplementedError, TypeError: the result has Python numbers or arrays computed from tensors.
    """
    values = traced.graph.output_node().args[0]
    assert isinstance(values, tuple | list)
    stand_ins = StandIns(values)
    unflatten: Any = traced._dynamo_bytecode_unflatten
    return unflatten(stand_ins.give(), tuple(leaves)), stand_ins


def give_values(traced: fx.GraphModule, values: Sequence[fx.Node]) -> None:
    codegen: Any = traced.graph._codegen
    module: Any = traced
    traced.graph.output_node().args = (tuple(values),)
    codegen.dynamo_bytecode_unflatten = module._dynamo_bytecode_unflatten = _as_they_are
    traced.recompile()


def _as_they_are(values: Sequence[object], inputs: Sequence[object]) -> tuple[object, ...]:
    return tuple(values)
