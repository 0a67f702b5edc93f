"""Converts symbolic sizes, and the symbols of shape environments, to JSON data and back."""

from __future__ import annotations

from typing import Any

from mirrorc.serialization.plain_data import DataError, expect
from mirrorc.serialization.record_data import decode_record, encode_record
from mirrorc.torch_internals import SavedSizes, SizeSymbol, symbols_of_environment


class EnvironmentWriter:
    """Numbers the shape environments of one program, and converts sizes to data."""

    def __init__(self) -> None:
        self._symbols: list[tuple[SizeSymbol, ...]] = []
        self._sizes: list[SavedSizes] = []  # for each environment, the writer of its sizes
        self._places: dict[int, int | None] = {}  # id of an environment -> its number, or None without symbols

    def of(self, environment: Any) -> tuple[int | None, SavedSizes | None]:
        """The number and size writer of a shape environment; (None, None) if it has no symbols."""
        if id(environment) not in self._places:
            symbols = symbols_of_environment(environment)
            self._places[id(environment)] = len(self._symbols) if symbols else None
            if symbols:
                self._symbols.append(symbols)
                self._sizes.append(SavedSizes(symbols))
        place = self._places[id(environment)]
        return place, self._sizes[place] if place is not None else None

    def encode(self, size: Any) -> list[Any]:
        place, saved = self.of(size.node.shape_env)
        if saved is None:
            raise DataError(f"its value is the number {size}, which follows from values of tensors")
        try:
            return ["size", saved.text(size), place]
        except ValueError as error:
            raise DataError(f"its value is a number of symbols: {error}") from error

    def table(self) -> list[list[Any]]:
        return [
            [encode_record(symbol, SizeSymbol, "a symbol") for symbol in environment_symbols]
            for environment_symbols in self._symbols
        ]


def decode_symbols(data: list[Any], where: str) -> SavedSizes:
    """Inverts an entry of `EnvironmentWriter.table`; raises `DataError` for other data."""
    try:
        return SavedSizes(tuple(decode_record(symbol, SizeSymbol, where) for symbol in data))
    except ValueError as error:
        raise DataError(f"{where}: {error}") from error


def decode_size(text: Any, saved: SavedSizes) -> Any:
    """Raises `DataError` if ``text`` is not a size with the symbols of ``saved``."""
    try:
        return saved.size(expect(text, str, "a size"))
    except ValueError as error:
        raise DataError(str(error)) from error
