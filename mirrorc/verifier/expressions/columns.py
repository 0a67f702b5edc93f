"""Value numbers of padded products: their first columns are the product of the values before padding."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from mirrorc.analysis.graph.padded_products import FACTORS, columns_before_padding, first_columns, places_of_columns
from mirrorc.verifier.expressions.rows import Number


class NumberedColumns:
    """The padded values of a program, with the numbers of their first columns."""

    def __init__(self, number: Callable[[Any, tuple[Any, ...]], int]) -> None:
        self._number = number
        self._first: dict[Any, tuple[Any, Any]] = {}  # for a padded value: how many first columns, and their number

    def note(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        """Records a numbered node that pads a value or multiplies padded ones."""
        if node.target in FACTORS:
            self._note_product(node, numbered)
        elif (columns := columns_before_padding(node)) is not None:
            self._first[numbered[node]] = (columns, numbered[node.args[0]])  # type: ignore[index]

    def first_columns(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
        """The number of a product, if the node takes the original columns of a padded one."""
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
