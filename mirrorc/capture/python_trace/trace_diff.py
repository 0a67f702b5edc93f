"""Compares two traces of one call: whether Python has led both to the same graph, or where they part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.messages.source_lines import source_line
from mirrorc.torch_internals import JointGraph

_LONGEST = 100  # characters of a line


@dataclass(frozen=True)
class GraphListing:
    """What a graph does, line by line.

    Attributes:
        lines: an operator, with its arguments and the types of what it gives, or a result of the graph.
        places: the user's line that each comes from; empty if unknown.
        constants: the tensors in it that are no variables, in the order of its lines.
    """

    lines: tuple[str, ...]
    places: tuple[str, ...]
    constants: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, joint: JointGraph) -> GraphListing:
        """That of a graph."""
        nodes = list(joint.graph_module.graph.nodes)
        lines, places = [], []
        numbers = {node: place for place, node in enumerate(nodes)}
        results = set(joint.variable_of) | set(joint.leaf_of)

        def reference(node: fx.Node) -> Any:
            return _Reference(numbers[node])

        for node in nodes:
            if node.op in ("placeholder", "get_attr"):
                what = joint.variable_of.get(node, joint.leaf_of.get(node, "")) if node in results else ""
                lines.append(f"{node.op} {'constant' if node.op == 'get_attr' else what} {_type_of(node)}")
            elif node.op != "output":
                args: Any = fx.node.map_arg((node.args, dict(node.kwargs)), reference)
                lines.append(f"{node.target}{args} {_type_of(node)}")
            else:
                continue
            places.append(source_line(node) if node.op == "call_function" else "")
        for text in _results(joint, numbers):
            lines.append(text)
            places.append("")
        constants = tuple(joint.constant(node) for node in nodes if node.op == "get_attr")
        return cls(tuple(lines), tuple(places), constants)

    def difference(self, other: GraphListing) -> str:
        """Where the other differs first, in words; empty if both do the same."""
        for place, (own, its) in enumerate(zip(self.lines, other.lines, strict=False)):
            if own != its:
                where = other.places[place] or self.places[place]
                return f"{_short(its)}{f' at {where}' if where else ''} in place of {_short(own)}"
        if len(self.lines) != len(other.lines):
            return f"{len(other.lines)} operators and results in place of {len(self.lines)}"
        for one, another in zip(self.constants, other.constants, strict=True):
            if one is not another and not _is_same(one, another):
                return f"other values in a tensor of shape {list(one.shape)} that forward makes"
        return ""


@dataclass(frozen=True)
class _Reference:
    """A value, by the number of its line."""

    place: int

    def __repr__(self) -> str:
        return f"%{self.place}"


def _results(joint: JointGraph, numbers: dict[fx.Node, int]) -> Iterator[str]:
    """What the graph gives."""
    named: list[tuple[str, dict[str, Any]]] = [
        ("loss", {"": joint.loss} if joint.loss is not None else {}),
        ("gradient of", joint.gradients),
        ("write to", joint.buffer_writes),
        ("output", joint.outputs),
    ]
    for what, found in named:
        for name, node in found.items():
            yield f"{what} {name}: %{numbers[node] if node is not None else None}"


def _type_of(node: fx.Node) -> str:
    value = node.meta.get("val")
    values = value if isinstance(value, list | tuple) else [value]
    return str([(one.dtype, tuple(one.shape), one.stride()) for one in values if isinstance(one, torch.Tensor)])


def _is_same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.shape == other.shape and one.dtype == other.dtype and torch.equal(one, other)


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST - 3]}..."
