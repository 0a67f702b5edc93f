"""Numbers the first columns of padded products, which are the products of what was padded."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import fx

from mirrorc.analysis.padded_products import FACTORS, columns_before_padding, first_columns, has_columns
from mirrorc.verifier.numbered_rows import Number


class NumberedColumns:
    """Remembers which values are padded, and what their first columns are.

    Args:
        number: gives the number of what an operator makes of arguments, in which numbers stand for values.
    """

    def __init__(self, number: Callable[[Any, tuple[Any, ...]], int]) -> None:
        self._number = number
        self._first: dict[int, tuple[Any, int]] = {}  # for a padded value: how many first columns, and their number

    def note(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        """Looks at a node that has its number, if it pads a value or makes a product of padded ones."""
        if node.target in FACTORS:
            self._note_product(node, numbered)
        elif (columns := columns_before_padding(node)) is not None:
            self._first[numbered[node]] = (columns, numbered[node.args[0]])  # type: ignore[index]

    def first_columns(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
        """The number of a product, if the node takes those columns of a padded one that are its own."""
        columns = first_columns(node)
        known, number = (
            self._first.get(numbered.get(node.args[0]), (None, None)) if columns is not None else (None, None)
        )  # type: ignore[arg-type]
        return number if known is not None and known == columns else None

    def _note_product(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        x, weight = (node.args[place] for place in FACTORS[node.target])
        columns, _ = self._first.get(numbered[weight], (None, None))  # type: ignore[index]
        if columns is None or node.kwargs:
            return
        own: list[Any] = []
        for given in node.args:
            if given is not x and has_columns(given, node.meta["val"].shape[1]):  # type: ignore[arg-type]
                known, number = self._first.get(numbered[given], (None, None))  # type: ignore[index]
                if known != columns:
                    return  # of a bias that was not padded, the first columns have no number
                own.append(Number(number))
            else:
                own.append(Number(numbered[given]))  # type: ignore[index]
        self._first[numbered[node]] = (columns, self._number(node.target, tuple(own)))
