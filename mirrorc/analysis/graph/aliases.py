"""Values that may be views of other values, or of variables."""

from __future__ import annotations

import functools
import operator
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import is_compute, is_computed, is_region_call, region_of
from mirrorc.ir.program import Program
from mirrorc.ir.rearrangements import SAME_MEMORY
from mirrorc.torch_internals import is_composite, schema_of

_UNDECLARED = frozenset(
    {
        torch.ops.aten._unsafe_view.default,
        torch.ops.aten.unsafe_split.Tensor,
        torch.ops.aten.unsafe_split_with_sizes.default,
        torch.ops.aten.lift.default,
        torch.ops.aten.set.source_Tensor,
        torch.ops.prims.device_put.default,
    }
)
"""Operators whose results may alias an argument, although their schemas do not say so.

Composite operators such as ``dropout`` need not be listed: `_may_give_any` includes them.
"""


@functools.cache
def _declared(target: Any) -> frozenset[str]:
    schema = schema_of(target)
    if all(result.alias_info is None for result in schema.returns):
        return frozenset()
    return frozenset(argument.name for argument in schema.arguments if argument.alias_info is not None)


@functools.cache
def _may_give_any(target: Any) -> bool:
    return target in _UNDECLARED or (not _declared(target) and is_composite(target))


def shared_by(value: fx.Node) -> list[fx.Node]:
    while value.target is operator.getitem and isinstance(value.args[0], fx.Node):
        value = value.args[0]
    if not is_computed(value):
        return []
    if not is_compute(value) or _may_give_any(value.target):
        return value.all_input_nodes
    declared: Any = _declared(value.target)
    return [node for name in declared for node in _nodes_in_argument(value, name)] if declared else []


def _nodes_in_argument(node: fx.Node, name: str) -> list[fx.Node]:
    names = [argument.name for argument in schema_of(node.target).arguments]
    place = names.index(name)
    value: Any = node.args[place] if place < len(node.args) else node.kwargs.get(name)
    return [source for source in (value if isinstance(value, list | tuple) else [value]) if isinstance(source, fx.Node)]


def viewed(value: fx.Node) -> fx.Node | None:
    """The node that ``value`` is a view of; None if ``value`` may own its memory."""
    made: Any = value
    while made.target is operator.getitem:
        made = made.args[0]
    is_view = is_compute(made) and (
        made.target in SAME_MEMORY or (bool(_declared(made.target)) and not is_composite(made.target))
    )
    sources = shared_by(made) if is_view else []
    return sources[0] if len(sources) == 1 else None


def origins(value: fx.Node) -> set[fx.Node]:
    """The nodes that may own a value's memory; the value itself if it is not a view."""
    owners: set[fx.Node] = set()
    waiting, seen = [value], {value}
    while waiting:
        node = waiting.pop()
        sources = shared_by(node)
        if not sources:
            owners.add(node)
        waiting += (source for source in sources if source not in seen)
        seen.update(sources)
    return owners


class ViewedVariables:
    """Finds variables, and other owners of memory, that values outside of regions may view."""

    def __init__(self, program: Program) -> None:
        self._program = program
        self._shared: dict[str, dict[int, set[int]]] = {}

    def of(self, value: fx.Node) -> set[str]:
        return {str(owner.kwargs["variable"]) for owner in self.owners(value) if owner.target is ops.read}

    def owners(self, value: fx.Node) -> set[fx.Node]:
        """The nodes that may own a value's memory. Unlike `origins`, follows views through regions."""
        owners: set[fx.Node] = set()
        waiting, seen = [value], {value}
        while waiting:
            for origin in origins(waiting.pop()):
                owners.add(origin)
                arguments = [node for node in self._shared_by_part(origin) if node not in seen]
                seen.update(arguments)
                waiting += arguments
        return owners

    def _shared_by_part(self, part: fx.Node) -> list[fx.Node]:
        call: Any = part.args[0] if part.target is operator.getitem else None
        if not isinstance(call, fx.Node) or not is_region_call(call):
            return []
        places = self._shared_arguments(region_of(call)).get(part.args[1], set())  # type: ignore[arg-type]
        return [argument for i in sorted(places) if isinstance(argument := call.args[i], fx.Node)]

    def _shared_arguments(self, region: str) -> dict[int, set[int]]:
        if region not in self._shared:
            body = self._program.regions[region].graph_module.graph
            results: Any = body.output_node().args[0]
            places = {node: i for i, node in enumerate(body.find_nodes(op="placeholder"))}
            self._shared[region] = {
                i: {places[origin] for origin in origins(result) if origin in places}
                for i, result in enumerate(results)
                if isinstance(result, fx.Node)
            }
        return self._shared[region]
