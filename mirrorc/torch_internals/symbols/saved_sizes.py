"""Writes symbolic sizes of saved programs as text, and reads them."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Any

from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.torch_internals.symbols.symbolic_sizes import Size, numbered_by, size_key, size_of_key, text_of_size

_LEAST = 2  # sizes of 0 and 1 are numbers


@dataclass(frozen=True)
class SizeSymbol:
    """A symbol such as ``s0``, with its size at capture and the smallest size that it may have."""

    name: str
    value: int
    least: int


def symbols_of_environment(environment: Any) -> tuple[SizeSymbol, ...]:
    """A shape environment's symbols for sizes of at least 2, in the order of their numbers."""
    if environment is None:
        return ()
    values = getattr(environment, "backed_var_to_val", None)
    values = environment.var_to_val if values is None else values  # before torch 2.13
    symbols = [
        SizeSymbol(str(symbol), int(value), max(int(bounds.lower), 0))
        for symbol, value in values.items()
        if _number_in(str(symbol)) is not None
        and value >= _LEAST
        and (bounds := environment.var_to_range.get(symbol)) is not None
        and bounds.lower.is_Integer
    ]
    return tuple(sorted(symbols, key=lambda symbol: _number_in(symbol.name) or 0))


def _number_in(name: str) -> int | None:
    return int(name[1:]) if name[:1] == "s" and name[1:].isdecimal() else None


class SavedSizes:
    """A new shape environment with given symbols. Reads and writes its sizes as text."""

    def __init__(self, symbols: tuple[SizeSymbol, ...]) -> None:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StrictMinMaxConstraint
        from torch.utils._sympy.numbers import int_oo
        from torch.utils._sympy.value_ranges import ValueRanges

        environment = ShapeEnv()
        self._sizes: dict[str, Size] = {}
        for saved in symbols:
            number = _number_in(saved.name)
            if number is None or saved.value < max(saved.least, _LEAST) or saved.name in self._sizes:
                raise ValueError(f"{saved} is no symbol for a size")
            source = ConstantSource(saved.name)
            bounds = StrictMinMaxConstraint(vr=ValueRanges(saved.least, int_oo), warn_only=False)
            with numbered_by(lambda number=number: number):  # type: ignore[misc]
                symbol = environment.create_symbol(saved.value, source, DimDynamic.DYNAMIC, bounds)
            self._sizes[saved.name] = environment.create_symintnode(symbol, hint=saved.value, source=source)
        self.fake_mode = FakeTensorMode(shape_env=environment, allow_non_fake_inputs=True)

    def size(self, text: str) -> Size:
        """Reads a size that `text` has written.

        Raises:
            ValueError: the text is not an expression of the symbols.
        """
        try:
            expression = self._expression(ast.parse(text, mode="eval").body)
            return int(expression) if expression.is_Integer else size_of_key(expression, self.fake_mode)
        except (SyntaxError, LookupError, TypeError, AttributeError, RecursionError, ArithmeticError) as error:
            raise ValueError(f"{text!r:.60} is no size") from error

    def text(self, size: Size) -> str:
        """Writes a size: ``Add(FloorDiv(s0, 2), 1)``.

        Raises:
            ValueError: an operation of the size has no text, or the text is read as another size.
        """
        key = size_key(size)
        if isinstance(key, int):
            return str(key)
        text = _text_of(key)
        again = self.size(text)
        if size_key(again) != key and str(size_key(again)) != str(key):
            raise ValueError(f"the size {text_of_size(size)} is not the same when it is read again")
        return text

    def _expression(self, node: ast.expr) -> Any:
        if isinstance(node, ast.Constant) and type(node.value) is int:
            return _function("Integer")(node.value)
        if isinstance(node, ast.Constant) and type(node.value) is float:
            return _function("Float")(node.value)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            return -self._expression(node.operand)
        if isinstance(node, ast.Name):
            return size_key(self._sizes[node.id])
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in _FUNCTIONS:
            arguments = [self._expression(argument) for argument in node.args]
            if node.func.id in _POWERS and any(
                part.is_number and abs(part) > most for part, most in zip(arguments, _LARGEST, strict=False)
            ):
                raise TypeError("sympy would compute all digits of such a power")
            return _function(node.func.id)(*arguments)
        raise TypeError(type(node).__name__)


_POWERS = ("Pow", "PowByNatural", "FloatPow", "LShift")
_LARGEST = (2**63, 64)  # numbers in a power: of the base, and of the exponent
_OF_SYMPY = ("Add", "Mul", "Pow", "Rational")
_NUMBERS = ("Integer", "Float")
_FUNCTIONS = (
    *_OF_SYMPY,
    *("FloorDiv", "CleanDiv", "ModularIndexing", "Mod", "PythonMod", "CeilDiv", "Max", "Min", "Identity"),
    *("IntTrueDiv", "FloatTrueDiv", "ToFloat", "CeilToInt", "FloorToInt", "TruncToInt", "TruncToFloat", "RoundToInt"),
    *("PowByNatural", "FloatPow", "LShift", "RShift", "OpaqueUnaryFn_sqrt"),
)


def _function(name: str) -> Any:
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy import functions

    return getattr(sympy if name in _OF_SYMPY + _NUMBERS else functions, name)


def _text_of(key: Any) -> str:
    if key.is_Symbol or key.is_Integer or key.is_Float:
        return str(key) if not key.is_Float else repr(float(key))
    if key.is_Rational:
        return f"Rational({key.numerator}, {key.denominator})"
    name = type(key).__name__
    if name not in _FUNCTIONS:
        raise ValueError(f"the size {key} is computed by {name}")
    return f"{name}({', '.join(map(_text_of, key.args))})"
