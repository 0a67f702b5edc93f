"""Symbols for sizes of arguments: their names, guards on them, and their text in saved programs."""

from __future__ import annotations

import ast
import contextlib
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

Size = Any
"""An int, or a `torch.SymInt` in a fake tensor."""

_NUMBERS = (torch.SymInt, torch.SymFloat, torch.SymBool)  # `isinstance` is faster with a tuple than a union


_PLAIN = (fx.Node, int, float, bool, str, type(None))  # most arguments of nodes; no symbols


class SizesGivenUp(Exception):
    """Raised if sizes cannot be symbols; the text gives the reason."""


def mark_symbolic(tensor: torch.Tensor, dims: Sequence[int]) -> None:
    """Marks dimensions that become symbols, unless the trace needs their values."""
    for dim in dims:
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


def is_marked(tensor: torch.Tensor) -> bool:
    return bool(getattr(tensor, "_dynamo_weak_dynamic_indices", None))


def dims_marked_by_user(tensor: torch.Tensor) -> frozenset[int]:
    names = ("_dynamo_dynamic_indices", "_dynamo_weak_dynamic_indices")
    marked = {int(dim) for name in names for dim in getattr(tensor, name, None) or ()}
    return frozenset(dim % tensor.dim() for dim in marked if tensor.dim())


@contextlib.contextmanager
def raw_sizes_allowed() -> Iterator[None]:
    """Silences torch's warning about symbolic sizes as arguments of nodes; they become inputs later."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Raw SymInt value")
        yield


def symbols_dispatched(*values: Any) -> contextlib.AbstractContextManager[None]:
    """Enables the Python kernels that some operators need for symbolic sizes."""
    if not any(map(has_symbols, values)):
        return contextlib.nullcontext()
    from torch._dispatch.python import enable_python_dispatcher

    return enable_python_dispatcher()


def is_symbolic(value: Any) -> bool:
    return isinstance(value, _NUMBERS)


def has_symbols(value: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return any(map(is_symbolic, (*value.shape, *value.stride(), value.storage_offset())))
    return is_symbolic(value)


def environment_of(value: Any) -> int:
    owner: Any = value
    return id((owner.fake_mode if isinstance(value, torch.Tensor) else owner.node).shape_env)


def size_key(size: Size) -> Any:
    """A hashable key whose comparison adds no guard: a number, or an expression of symbols."""
    if not is_symbolic(size):
        return size
    expression = size.node.expr
    return (int(expression) if expression.is_Integer else expression) if hasattr(expression, "is_Integer") else size


def sizes_key(sizes: Sequence[Size]) -> tuple[Any, ...]:
    return tuple([size if type(size) is int else size_key(size) for size in sizes])


def size_of_key(key: Any, fake_mode: Any) -> Size:
    if isinstance(key, int):
        return key
    environment = fake_mode.shape_env
    make = environment.create_symintnode if key.is_integer else environment.create_symfloatnode
    return make(key, hint=None)


def text_of_size(size: Size) -> str:
    """The printed form of a size: ``8``, ``s0``, ``2*s0``."""
    key = size_key(size)
    if isinstance(key, int):
        return str(key)
    return _code(key)


def size_now(size: Size) -> Any:
    """A size's number at capture. Functions named ``..._now`` add no guards."""
    return size.node.hint if is_symbolic(size) else size


def sizes_now(tensor: torch.Tensor) -> torch.Size:
    return torch.Size([size_now(size) for size in tensor.shape])


def with_sizes_now(tensor: torch.Tensor) -> torch.Tensor:
    if not has_symbols(tensor):
        return tensor
    shape, strides = (tuple(map(size_now, sizes)) for sizes in (tensor.shape, tensor.stride()))
    with tensor.fake_mode:  # type: ignore[attr-defined]
        return torch.empty_strided(shape, strides, dtype=tensor.dtype, device=tensor.device)


def num_elements_now(tensor: torch.Tensor) -> int:
    count = 1
    for size in tensor.shape:
        count *= size_now(size)
    return count


def num_bytes_now(value: Any) -> int:
    return num_elements_now(value) * value.dtype.itemsize if isinstance(value, torch.Tensor) else 0


def storage_bytes_now(tensor: torch.Tensor) -> int:
    return int(size_now(tensor.untyped_storage().nbytes()))


def symbols_in(value: Any) -> frozenset[Any]:
    if isinstance(value, list | tuple):
        return frozenset().union(*map(symbols_in, value)) if value else frozenset()
    if isinstance(value, torch.Tensor):
        if not value._has_symbolic_sizes_strides:  # the fast path, as passes check each node
            return frozenset()
        return symbols_in([s for s in (*value.shape, *value.stride(), value.storage_offset()) if is_symbolic(s)])
    return frozenset(value.node.expr.free_symbols) if is_symbolic(value) else frozenset()


def raw_symbols(value: Any) -> list[Any]:
    if isinstance(value, _NUMBERS):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return [symbol for item in items if type(item) not in _PLAIN for symbol in raw_symbols(item)]


class SizesOfArguments:
    """The symbols of a graph, their positions in its arguments, numbers computed from them, and guards.

    Raises:
        SizesGivenUp: torch has a guard on a value other than a size of an argument.
    """

    def __init__(self, fake_mode: Any, leaves: Sequence[torch.Tensor | None]) -> None:
        self._fake_mode = fake_mode
        self._leaves = {f"t{leaf}": tensor for leaf, tensor in enumerate(leaves) if tensor is not None}
        self._count = len(leaves)
        self._places: dict[Any, tuple[str, str, int]] = {}
        for leaf, tensor in self._leaves.items():
            for kind, sizes in (("shape", tensor.shape), ("stride()", tensor.stride())):
                for dim, size in enumerate(sizes):
                    key = size.node._expr if is_symbolic(size) else size  # type: ignore[attr-defined]
                    if getattr(key, "is_Symbol", False):
                        self._places.setdefault(key, (leaf, kind, dim))
        self._numbers: dict[Any, Any] = {}  # by expression
        self._check: Callable[..., Any] | None = None
        unknown = {s for guard in fake_mode.shape_env.guards for s in guard.expr.free_symbols} - self._places.keys()
        if unknown:
            raise SizesGivenUp("Python looks at the size of an argument that the graph does not take")

    @property
    def symbols(self) -> list[Any]:
        replaced = self._fake_mode.shape_env.replacements
        return [symbol for symbol in self._places if symbol not in replaced]

    def add(self, value: Any) -> Any:
        """Registers a numeric argument of the graph. Returns its key, or the number itself if it is constant.

        Raises:
            SizesGivenUp: the number depends on values other than sizes of arguments.
        """
        key = size_key(value)
        if not hasattr(key, "free_symbols"):
            return key
        if not key.free_symbols:
            return int(key) if isinstance(value, torch.SymInt) else float(key)
        self.check_symbols(value)
        self._numbers.setdefault(key, value)
        return key

    def check_symbols(self, value: Any) -> None:
        """Raises `SizesGivenUp` for booleans and data-dependent sizes, as of nonzero()."""
        others = symbols_in(value) - self._places.keys()
        if others:
            raise SizesGivenUp(f"the size {sorted(map(str, others))[0]} follows from the values of tensors")
        if isinstance(value, torch.SymBool):
            raise SizesGivenUp("a truth value that is computed of sizes is used as one")

    @property
    def numbers(self) -> Mapping[Any, Any]:
        return self._numbers

    def known(self, key: Any) -> Any:
        return self._numbers[key] if key in self._numbers else size_of_key(key, self._fake_mode)

    def numbers_for(self, tensors: Sequence[torch.Tensor], keys: Sequence[Any]) -> tuple[int | float, ...] | None:
        """The number for each key (0 for None). None if the arguments do not fit the graph.

        The graph must be final: torch adds guards while it compiles.
        """
        if self._check is None:
            self._check = self._made_check(keys)
        try:
            return self._check(*tensors)
        except ArithmeticError:  # division by a size of zero
            return None

    def _made_check(self, keys: Sequence[Any]) -> Callable[..., Any]:
        ranks = [f"len({name}.shape) != {tensor.dim()}" for name, tensor in self._leaves.items()]
        lines = [f"    if {' or '.join(ranks)}: return None", *self._assignments()]
        conditions = list(dict.fromkeys(self._guards()))
        scope: dict[str, Any] = {}
        for name, tensor in self._leaves.items():
            scope[f"{name}_dtype"] = tensor.dtype
            conditions += [f"{name}.dtype is {name}_dtype"]
            conditions += [f"{name}.shape == {_tuple(tensor.shape)}", f"{name}.stride() == {_tuple(tensor.stride())}"]
        lines.append(f"    if not ({' and '.join(conditions)}): return None")
        if {s for guard in self._fake_mode.shape_env.guards for s in guard.expr.free_symbols} - self._places.keys():
            return lambda *_: None
        return self._function([*lines, _returned(keys)], scope)

    def sizes_for(self, sizes: Sequence[Size]) -> Callable[..., tuple[int, ...]]:
        """A function that computes sizes of the graph's values from its arguments."""
        return self._function([*self._assignments(), _returned([size_key(size) for size in sizes])], {})

    def _assignments(self) -> list[str]:
        return [f"    {symbol} = {name}.{kind}[{dim}]" for symbol, (name, kind, dim) in self._places.items()]

    def _function(self, lines: Sequence[str], scope: dict[str, Any]) -> Callable[..., Any]:
        from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP

        head = f"def function({', '.join(f't{leaf}' for leaf in range(self._count))}):"
        scope |= SYMPY_INTERP
        exec("\n".join([head, *lines]), scope)  # from torch's expressions of sizes
        made: Callable[..., Any] = scope["function"]
        return made

    def _guards(self) -> Iterator[str]:
        environment = self._fake_mode.shape_env
        for symbol in self._places:
            known = environment.var_to_range.get(symbol)
            for bound, sign in ((known.lower, ">="), (known.upper, "<=")) if known is not None else ():
                if bound.is_Integer:
                    yield f"{symbol} {sign} {bound}"
        for guard in environment.guards:
            yield f"({_code(guard.expr)})"


def _returned(keys: Sequence[Any]) -> str:
    return f"    return ({' '.join(f'{0 if key is None else _code(key)},' for key in keys)})"


def _code(key: Any) -> str:
    from torch.utils._sympy.printers import PythonPrinter

    return str(PythonPrinter().doprint(key))


def _tuple(sizes: Sequence[Size]) -> str:
    return f"({' '.join(f'{text_of_size(size)},' for size in sizes)})"


def knowledge_of(tensor: Any) -> tuple[Any, tuple[int, int]]:
    """A tensor's shape environment, and a version that changes with each guard."""
    environment = tensor.fake_mode.shape_env
    return environment, (len(environment.guards), len(environment.replacements))


def assume_num_elements(tensors: Sequence[torch.Tensor], *, least: float = 0, most: float = math.inf) -> None:
    """Adds a guard for each bound on the total number of elements."""
    symbolic = [tensor for tensor in tensors if has_symbols(tensor)]
    rest = sum(num_elements_now(tensor) for tensor in tensors if not has_symbols(tensor))
    if symbolic:
        count: Any = rest + sum(math.prod(tensor.shape) for tensor in symbolic)
        for holds in (count >= math.floor(least), most == math.inf or count <= math.floor(most)):
            bool(holds)  # adds a guard, unless it is known


@contextlib.contextmanager
def symbols_by_number() -> Iterator[None]:
    """Names a trace's symbols ``s0``, ``s1``, ... in the order of the arguments; equal sizes get different symbols.

    By default, Dynamo names symbols by a hash, and gives equal sizes one symbol.
    """
    from torch.fx.experimental import _config

    with numbered_by(None), _config.patch(use_duck_shape=False):  # type: ignore[attr-defined]
        yield


@contextlib.contextmanager
def numbered_by(number: Callable[[], int] | None) -> Iterator[None]:
    """Numbers new symbols by ``number()``; from 0 if ``number`` is None."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def next_id(self: Any, source_name: str) -> int:
        new_id = len(self.unique_ids) if number is None else number()
        self.unique_ids.add(new_id)
        return new_id

    if not hasattr(ShapeEnv, "_generate_unique_id"):
        yield
        return
    with patch.object(ShapeEnv, "_generate_unique_id", next_id):
        yield


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
        """Reads a size that `text` has written."""
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
_FUNCTIONS = (
    *_OF_SYMPY,
    *("FloorDiv", "CleanDiv", "ModularIndexing", "Mod", "PythonMod", "CeilDiv", "Max", "Min", "Identity"),
    *("IntTrueDiv", "FloatTrueDiv", "ToFloat", "CeilToInt", "FloorToInt", "TruncToInt", "TruncToFloat", "RoundToInt"),
    *("PowByNatural", "FloatPow", "LShift", "RShift", "OpaqueUnaryFn_sqrt"),
)


def _function(name: str) -> Any:
    import sympy  # type: ignore[import-untyped]
    from torch.utils._sympy import functions

    return getattr(sympy if name in (*_OF_SYMPY, "Integer", "Float") else functions, name)


def _text_of(key: Any) -> str:
    if key.is_Symbol or key.is_Integer or key.is_Float:
        return str(key) if not key.is_Float else repr(float(key))
    if key.is_Rational:
        return f"Rational({key.numerator}, {key.denominator})"
    name = type(key).__name__
    if name not in _FUNCTIONS:
        raise ValueError(f"the size {key} is computed by {name}")
    return f"{name}({', '.join(map(_text_of, key.args))})"
