"""Gives rewritten row reads (`graph.one_hot_rows`) and padded products (`graph.padded_products`) the numbers of the
originals.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.one_hot_rows import ROW_MAKERS, ValueOp, by_elements
from mirrorc.analysis.graph.padded_products import FACTORS, columns_before_padding, first_columns, places_of_columns
from mirrorc.torch_internals import sizes_key


@dataclass(frozen=True)
class Number:
    """Wraps an expression's number, to distinguish it from a numeric argument."""

    number: int


class NumberedRows:
    """Notes each expression's shape and dtype, and the operators that make rows."""

    def __init__(self, number_application: Callable[[Any, tuple[Any, ...]], int]) -> None:
        self._number_application = number_application
        self._op_of: dict[int, ValueOp[Number] | fx.Node] = {}

    def note(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        number = numbered[node]
        if isinstance(number, int) and number not in self._op_of:
            is_of_rows = node.target in ROW_MAKERS
            self._op_of[number] = _op_of(node, numbered) if is_of_rows else node

    def by_elements(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
        """The row element's number; None if the value depends on more than one element of a row."""
        element = by_elements(self, _op_of(node, numbered))
        return element.number if element is not None else None

    def op_of(self, value: Any) -> ValueOp[Number] | None:
        maker = self._op_of.get(value.number) if isinstance(value, Number) else None
        if not isinstance(maker, fx.Node):
            return maker
        tensor = maker.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return None
        return ValueOp(None, (), {}, sizes_key(tensor.shape), tensor.dtype)

    def apply(self, target: Any, args: tuple[Any, ...]) -> Number:
        return Number(self._number_application(target, args))


def _op_of(node: fx.Node, numbered: Mapping[fx.Node, Any]) -> ValueOp[Number]:
    def number(source: fx.Node) -> Any:
        return Number(numbered[source])

    args: Any = fx.node.map_arg(node.args, number)
    kwargs: Any = fx.node.map_arg(node.kwargs, number)
    value = node.meta["val"]
    return ValueOp(node.target, args, kwargs, sizes_key(value.shape), value.dtype)


class NumberedColumns:
    """The value numbers of padded values before padding, and their numbers of columns."""

    def __init__(self, number: Callable[[Any, tuple[Any, ...]], int]) -> None:
        self._number = number
        self._first: dict[Any, tuple[Any, Any]] = {}  # by number of the padded value

    def note(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        if node.target in FACTORS:
            self._note_product(node, numbered)
        elif (columns := columns_before_padding(node)) is not None:
            self._first[numbered[node]] = (columns, numbered[node.args[0]])  # type: ignore[index]

    def first_columns(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
        """The unpadded value's number, if the node slices off exactly the padding; else None."""
        wanted = first_columns(node)
        if wanted is None:
            return None
        columns, number = self._of(node.args[0], numbered)
        return number if columns is not None and columns == wanted else None

    def _of(self, value: Any, numbered: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
        return self._first.get(numbered[value], (None, None)) if isinstance(value, fx.Node) else (None, None)

    def _note_product(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        places = places_of_columns(node)
        known_columns = {place: self._of(node.args[place], numbered) for place in places}
        columns = known_columns[places[-1]][0]
        if columns is None or node.kwargs or any(known != columns for known, _ in known_columns.values()):
            return  # not padded
        operands = [known_columns[i][1] if i in known_columns else numbered[a] for i, a in enumerate(node.args)]  # type: ignore[index]
        self._first[numbered[node]] = (columns, self._number(node.target, tuple(map(Number, operands))))
