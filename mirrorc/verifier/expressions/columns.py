"""Numbers the first columns of padded products, which are the products of what was padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from mirrorc.analysis.graph.padded_products import FACTORS, columns_before_padding, first_columns, places_of_columns
from mirrorc.verifier.expressions.rows import Number


class NumberedColumns:
    """Remembers which values are padded, and what their first columns are.

    Args:
        number: gives the number of what an operator makes of arguments, in which numbers stand for values.
    """

    def __init__(self, number: Callable[[Any, tuple[Any, ...]], int]) -> None:
        self._number = number
        self._first: dict[Any, tuple[Any, Any]] = {}  # for a padded value: how many first columns, and their number

    def note(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        """Looks at a node that has its number, if it pads a value or makes a product of padded ones."""
        if node.target in FACTORS:
            self._note_product(node, numbered)
        elif (columns := columns_before_padding(node)) is not None:
            self._first[numbered[node]] = (columns, numbered[node.args[0]])  # type: ignore[index]

    def first_columns(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
        """The number of a product, if the node takes those columns of a padded one that are its own."""
        wanted = first_columns(node)
        if wanted is None:
            return None
        columns, number = self._of(node.args[0], numbered)
        return number if columns is not None and columns == wanted else None

    def _of(self, value: Any, numbered: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
        return self._first.get(numbered[value], (None, None)) if isinstance(value, fx.Node) else (None, None)

    def _note_product(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        places = places_of_columns(node)
        found = {place: self._of(node.args[place], numbered) for place in places}
        columns = found[places[-1]][0]
        if columns is None or node.kwargs or any(known != columns for known, _ in found.values()):
            return  # the first columns of what was not padded have no number
        given = [found[i][1] if i in found else numbered[one] for i, one in enumerate(node.args)]  # type: ignore[index]
        self._first[numbered[node]] = (columns, self._number(node.target, tuple(map(Number, given))))
