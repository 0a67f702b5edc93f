"""Types of values as text: ``f32[2, 3]``, ``pending f32[8]``, ``(f32[2], size[s0])``, ``value(3)``.

Braces have the differences from a dense tensor on the CPU: ``f32[4, 3]{strides=(1, 4), offset=2, device="cuda:0"}``.
For symbolic sizes see `SavedSizes.text`; ``symbols=1`` is the number of their table, if it is not the first.
"""

from __future__ import annotations

import ast
import contextlib
import re
from typing import Any

import torch

from mirrorc.ir.value_types import Pending, contiguous_strides
from mirrorc.printing.printed_values import dtype_name
from mirrorc.serialization.literals import (
    DTYPES,
    TextError,
    argument_of,
    argument_text,
    expression,
    keywords_of,
    no_value,
)
from mirrorc.torch_internals import (
    FakeTensor,
    FakeTensorMode,
    SavedSizes,
    SizeSymbol,
    is_symbolic,
    lazily_negative,
    size_now,
    symbols_of_environment,
)

_CPU = torch.device("cpu")
_DENSE = re.compile(r"(\w+)\[((?:\d{1,18}(?:, \d{1,18})*)?)\]")
_TENSOR = re.compile(r"(\w+)\[(.*?)\](?:\{(.*)\})?")
_STRING_OR_MARK = re.compile(r'"(?:\\.|[^"\\])*(?:"|\\?$)|[()[\]{},]')
_FACTS = ("strides", "offset", "device", "is_conjugated", "is_negated")


class TypePrinter:
    """Prints the types of a program's values, and numbers the shape environments of its symbols."""

    def __init__(self) -> None:
        self.symbols: list[tuple[SizeSymbol, ...]] = []
        self._sizes: list[SavedSizes] = []
        self._places: dict[int, int | None] = {}  # id of an environment -> its number; None without symbols
        self._texts: dict[int, str] = {}  # id of a fake tensor -> its text

    def text(self, value: Any) -> str:
        if isinstance(value, FakeTensor):
            if id(value) not in self._texts:
                self._texts[id(value)] = self._tensor(value)
            return self._texts[id(value)]
        if isinstance(value, Pending):
            return f"pending {self.text(value.value)}"
        if is_symbolic(value):
            place = self._place(value.node.shape_env)
            if place is None:
                raise TextError(f"its value is the number {value}, which follows from values of tensors")
            return f"size[{self._size(value, place)}]" + (f"{{symbols={place}}}" if place else "")
        if isinstance(value, list | tuple):
            brackets = "()" if isinstance(value, tuple) else "[]"
            return f"{brackets[0]}{', '.join(map(self.text, value))}{brackets[1]}"
        text = f"value({argument_text(value, _refused)})"
        if " = " in text:
            raise TextError(f"its value is {text:.60}, which cannot be read back")
        return text

    def _tensor(self, tensor: torch.Tensor) -> str:
        if tensor.layout is not torch.strided:
            raise TextError(f"its value has the layout {tensor.layout}, and only strided tensors can be saved")
        extents = (*tensor.shape, *tensor.stride(), tensor.storage_offset())
        found = self._place(tensor.fake_mode.shape_env)  # type: ignore[attr-defined]
        is_countable = all(type(size_now(extent)) is int for extent in extents)
        if any(map(is_symbolic, extents)) and (found is None or not is_countable):
            raise TextError(f"its value has the symbolic shape {tuple(tensor.shape)}, of sizes that follow from values")
        place = found or 0
        texts = [self._size(extent, place) for extent in extents]
        rank = tensor.dim()
        facts = []
        if texts[rank:-1] != [self._size(stride, place) for stride in contiguous_strides(tensor.shape)]:
            facts.append(f"strides=({', '.join(texts[rank:-1])}{',' if rank == 1 else ''})")
        facts += [f"offset={texts[-1]}"] if texts[-1] != "0" else []
        facts += [f'device="{tensor.device}"'] if tensor.device != _CPU else []
        facts += ["is_conjugated=True"] if tensor.is_conj() else []
        facts += ["is_negated=True"] if tensor.is_neg() else []
        facts += [f"symbols={place}"] if place else []
        return f"{dtype_name(tensor.dtype)}[{', '.join(texts[:rank])}]" + (f"{{{', '.join(facts)}}}" if facts else "")

    def _size(self, size: Any, place: int) -> str:
        if not is_symbolic(size):
            return str(size)
        try:
            return self._sizes[place].text(size)
        except ValueError as error:
            raise TextError(f"its value has the size {size}: {error}") from error

    def _place(self, environment: Any) -> int | None:
        if id(environment) not in self._places:
            symbols = symbols_of_environment(environment)
            self._places[id(environment)] = len(self.symbols) if symbols else None
            if symbols:
                self.symbols.append(symbols)
                self._sizes.append(SavedSizes(symbols))
        return self._places[id(environment)]


def _refused(value: Any) -> str:
    raise TextError(f"its value is of type {type(value).__name__}, which cannot be saved")


class TypeReader:
    """Makes values from types. Fake tensors without symbols share one fake mode; functions share them, to save time."""

    def __init__(self, symbols: tuple[tuple[SizeSymbol, ...], ...]) -> None:
        self._fake_mode = FakeTensorMode(allow_non_fake_inputs=True)  # as capture's: Inductor mixes constants in
        self._made_before: dict[str, list[Any]] = {}
        self._num_used: dict[str, int] = {}  # by the present function, which has each tensor once
        try:
            self._sizes = [SavedSizes(of_environment) for of_environment in symbols]
        except ValueError as error:
            raise TextError(f"symbols: {error}") from error

    def begin_function(self) -> None:
        self._num_used.clear()

    def value(self, text: str) -> Any:
        """Inverts `TypePrinter.text`."""
        number, made = self._num_used.get(text, 0), self._made_before.setdefault(text, [])
        self._num_used[text] = number + 1
        if number >= len(made):
            try:
                made.append(self._new_value(text))
            except TextError as error:
                raise TextError(str(error)) from None  # its place is that of the whole type
        return made[number]

    def _new_value(self, text: str) -> Any:
        if text.startswith("pending "):
            return Pending(self.value(text.removeprefix("pending ")))
        if text[:1] + text[-1:] in ("()", "[]"):
            values = [self.value(part) for part in split_at_commas(text[1:-1])]
            return tuple(values) if text[0] == "(" else values
        dense, match = _DENSE.fullmatch(text), _TENSOR.fullmatch(text)
        if dense is not None and dense[1] in DTYPES:
            return self._tensor(text, DTYPES[dense[1]], [int(size) for size in dense[2].split(", ") if size], {}, 0)
        if text.startswith("value(") and len(arguments := _call(text).args) == 1:
            return argument_of(arguments[0], no_value)
        if match is None or (match[1] not in DTYPES and match[1] != "size"):
            raise TextError(f"{text!r:.60} is no type, such as f32[2, 3]")
        given = keywords_of(_call(f"f({match[3] or ''})"))
        place = argument_of(given.pop("symbols"), no_value) if "symbols" in given else 0
        sizes = [self._size(size, place) for size in _call(f"f({match[2]})").args]
        facts = {key: self._fact(key, node, place) for key, node in given.items()}
        if match[1] != "size":
            return self._tensor(text, DTYPES[match[1]], sizes, facts, place)
        if len(sizes) != 1 or not is_symbolic(sizes[0]) or facts:
            raise TextError(f"{text!r:.60} is no size of symbols")
        return sizes[0]

    def _fact(self, key: str, node: ast.expr, place: Any) -> Any:
        if key not in _FACTS:
            raise TextError(f"{key} is nothing that a type has in braces: {', '.join(_FACTS)}")
        if key == "strides" and isinstance(node, ast.Tuple):
            return [self._size(part, place) for part in node.elts]
        return self._size(node, place) if key == "offset" else argument_of(node, no_value)

    def _size(self, node: ast.expr, place: Any) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return node.value
        if type(place) is not int or not 0 <= place < len(self._sizes):
            raise TextError(f"there is no table {place!r:.60} of symbols")
        try:
            return self._sizes[place].size(ast.unparse(node))
        except ValueError as error:
            raise TextError(str(error)) from error

    def _tensor(
        self, text: str, dtype: torch.dtype, shape: list[Any], facts: dict[str, Any], place: Any
    ) -> torch.Tensor:
        try:
            return _tensor(self._sizes[place].fake_mode if self._sizes else self._fake_mode, dtype, shape, **facts)
        except Exception as error:
            raise TextError(f"there is no tensor {text:.80}") from error


def _tensor(
    fake_mode: FakeTensorMode,
    dtype: torch.dtype,
    shape: list[Any],
    strides: Any = None,
    offset: Any = 0,
    device: str = "cpu",
    is_conjugated: bool = False,
    is_negated: bool = False,
) -> torch.Tensor:
    """Without symbols, bypasses the fake mode's slow dispatcher."""
    strides = contiguous_strides(shape) if strides is None else strides
    is_fast = not any(map(is_symbolic, (*shape, *strides, offset)))
    memory = torch.device("meta" if is_fast else device)
    with contextlib.nullcontext() if is_fast else fake_mode:
        if type(offset) is int and not offset:
            tensor = torch.empty_strided(shape, strides, dtype=dtype, device=memory)
        else:
            extent: Any = sum(((size - 1) * stride for size, stride in zip(shape, strides, strict=True)), start=1)
            num_elements = offset + (max(extent, 0) if is_fast else extent)
            tensor = torch.empty(num_elements, dtype=dtype, device=memory).as_strided(shape, strides, offset)
        tensor = tensor.conj() if is_conjugated else tensor
        tensor = lazily_negative(tensor) if is_negated else tensor
    return FakeTensor(fake_mode, tensor, torch.device(device)) if is_fast else tensor


def split_at_commas(text: str) -> list[str]:
    """Items may contain lists and strings."""
    if not any(bracket in text for bracket in '([{"'):
        return text.split(", ") if text else []
    depth, start, items = 0, 0, []
    for token in _STRING_OR_MARK.finditer(text):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(token[0], 0)
        if token[0] == "," and not depth:
            items.append(text[start : token.start()].strip())
            start = token.end()
    return [*items, text[start:].strip()]


def _call(text: str) -> ast.Call:
    call = expression(text)
    if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
        raise TextError(f"{text!r:.60} is no type")
    return call
