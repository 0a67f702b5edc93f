"""Equal numbers for reads of rows and for the versions of `graph.one_hot_rows`, by one element of each row."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.one_hot_rows import ROW_MAKERS, Made, by_elements
from mirrorc.torch_internals import sizes_key


@dataclass(frozen=True)
class Number:
    """The number of an expression, wrapped to distinguish it from numbers that are arguments of operators."""

    number: int


class NumberedRows:
    """The shape and dtype of each expression of a program, and the origin of rows."""

    def __init__(self, number_application: Callable[[Any, tuple[Any, ...]], int]) -> None:
        self._number_application = number_application
        self._made: dict[int, Made[Number] | fx.Node] = {}

    def note(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        number = numbered[node]
        if isinstance(number, int) and number not in self._made:
            is_of_rows = node.target in ROW_MAKERS
            self._made[number] = _made(node, numbered) if is_of_rows else node

    def by_elements(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
        """The number of a node's value, if it depends on one element of each row alone."""
        element = by_elements(self, _made(node, numbered))
        return element.number if element is not None else None

    def made(self, value: Any) -> Made[Number] | None:
        """The operator, arguments, shape and dtype of an expression; None if unknown."""
        maker = self._made.get(value.number) if isinstance(value, Number) else None
        if not isinstance(maker, fx.Node):
            return maker
        tensor = maker.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return None
        return Made(None, (), {}, sizes_key(tensor.shape), tensor.dtype)

    def apply(self, target: Any, args: tuple[Any, ...]) -> Number:
        return Number(self._number_application(target, args))


def _made(node: fx.Node, numbered: Mapping[fx.Node, Any]) -> Made[Number]:
    def number(source: fx.Node) -> Any:
        return Number(numbered[source])

    args: Any = fx.node.map_arg(node.args, number)
    kwargs: Any = fx.node.map_arg(node.kwargs, number)
    value = node.meta["val"]
    return Made(node.target, args, kwargs, sizes_key(value.shape), value.dtype)
