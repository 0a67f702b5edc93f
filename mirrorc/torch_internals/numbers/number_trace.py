"""Traces with numbers of Python and numpy as inputs, and records how Python computes other numbers from them.

Dynamo's symbols are exact, so ``t * 0.1 * 3.0`` would be rounded differently. Here each result is a new symbol with the
value that Python computes.
"""

from __future__ import annotations

import contextlib
import math
import operator
import re
import threading
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import torch
from torch import fx

Number = int | float | np.integer[Any] | np.floating[Any]

_LARGEST = 2.0**53
"""The largest integer that floats represent exactly. Larger or non-finite numbers stay constants."""
_LARGEST_FLOAT = 3e38  # the limit of comparisons with float32 tensors

NARROW = (np.float16, np.float32)
"""Types that round Python floats in comparisons."""
_FLOATS = (float, np.float64, *NARROW)
_INTEGERS = (int, np.int8, np.int16, np.int32, np.int64, np.uint8, np.uint16, np.uint32, np.uint64)

_SIGNS = {"add": "+", "sub": "-", "mul": "*", "truediv": "/", "floordiv": "//", "mod": "%", "pow": "**"}
_RELATIONS = {  # of sympy, by the names of their classes: importing sympy takes long
    "Equality": operator.eq,
    "Unequality": operator.ne,
    "StrictLessThan": operator.lt,
    "LessThan": operator.le,
    "StrictGreaterThan": operator.gt,
    "GreaterThan": operator.ge,
}


class NumbersGivenUp(Exception):
    """Raised if numbers cannot be inputs of a graph.

    Attributes:
        words: the user's names of the numbers, if known.
        stack: the frames of a number's random draw, outermost first, if known.
    """

    def __init__(self, names: Collection[str], why: str) -> None:
        super().__init__(why)
        self.names, self.why = frozenset(names), why
        self.words: list[str] = []
        self.stack: Sequence[traceback.FrameSummary] = ()


def is_ordinary(value: Any) -> bool:
    """True for a number that can be an input: not a bool, nan, infinite, or very large."""
    if type(value) in _FLOATS:
        return -_LARGEST_FLOAT < float(value) < _LARGEST_FLOAT
    return type(value) in _INTEGERS and -_LARGEST < int(value) < _LARGEST


def plain_number(value: Number) -> int | float:
    """The Python number of the same value. Operators on tensors treat numpy's numbers like Python's."""
    return value.item() if isinstance(value, np.generic) else value


def is_float(kind: type) -> bool:
    return kind in _FLOATS


def attribute_source(path: Sequence[str], name: str) -> str:
    return "".join(("L['self']", *(f"._modules[{part!r}]" for part in path), f".{name}"))


class Slot(NamedTuple):
    """An argument that is an earlier number, with its index among all numbers."""

    place: int


class HostNumber(NamedTuple):
    """A number that Python reads, or computes from earlier numbers.

    Attributes:
        sources: the expressions from which the number is computed.
        function: computes the number; None for a read.
        args: the function's arguments, with a `Slot` for each number; for a read, the code of the expression.
    """

    kind: type
    sources: tuple[str, ...]
    function: Callable[..., Any] | None
    args: tuple[Any, ...]


def computed(function: Callable[..., Any], args: Sequence[Any], numbers: Sequence[Number]) -> Any:
    return function(*(numbers[arg.place] if isinstance(arg, Slot) else arg for arg in args))


class HostNumbers:
    """The numbers of a trace, in the order in which Python reads and computes them.

    Attributes:
        taken: the indices of numbers that are inputs of the graph.
    """

    def __init__(self) -> None:
        self.numbers: list[HostNumber] = []
        self.values: list[Number] = []
        self.taken: list[int] = []
        self._symbols: list[Any] = []
        self._conditions: list[Any] = []

    def add(self, number: HostNumber, value: Number, symbol: Any) -> int:
        self.numbers.append(number)
        self.values.append(value)
        self._symbols.append(symbol)
        return len(self.numbers) - 1

    def has_symbol_of(self, guard: Any) -> bool:
        return not guard.free_symbols.isdisjoint(self._symbols)

    def add_condition(self, guard: Any) -> None:
        """Raises `NumbersGivenUp` if a guard fails, or depends on more than numbers."""
        try:
            holds = _holds(guard, dict(zip(self._symbols, map(plain_number, self.values), strict=True)))
        except NotImplementedError as error:
            why = f"it is compared in a way that cannot be followed ({error})"
            raise NumbersGivenUp(self.sources, why) from error
        if not holds:
            raise NumbersGivenUp(self.sources, f"{guard} is not what Python finds")
        self._conditions.append(guard)

    @property
    def sources(self) -> list[str]:
        return [number.sources[0] for number in self.numbers if number.function is None]

    def read(self, scope: dict[str, Any]) -> bool:
        """Reads the numbers again. False if a number cannot be read, has another type, or breaks a guard."""
        values: list[Any] = []
        for kind, _, function, args in self.numbers:
            try:
                value = computed(function, args, values) if function is not None else eval(args[0], scope)
            except Exception:  # noqa: BLE001 - no input; the next trace says why
                return False
            if type(value) is not kind or not is_ordinary(value):
                return False
            values.append(value)
        value_of = dict(zip(self._symbols, map(plain_number, values), strict=True)) if self._conditions else {}
        if not all(_holds(condition, value_of) for condition in self._conditions):
            return False
        self.values = values
        return True

    def text(self, index: int, words: Callable[[str], str] = str, *, is_operand: bool = False) -> str:
        _, sources, function, args = self.numbers[index]
        if function is None:
            return words(sources[0])
        name = getattr(function, "__name__", "a function").strip("_")
        sign = _SIGNS.get(name, "") if len(args) == 2 else ""
        texts = [self.text(a.place, words, is_operand=bool(sign)) if isinstance(a, Slot) else repr(a) for a in args]
        if not sign:
            return f"{name}({', '.join(texts)})"
        text = f"{texts[0]} {sign} {texts[1]}"
        return f"({text})" if is_operand else text


def _holds(expr: Any, value_of: Mapping[Any, int | float]) -> bool:
    """Evaluates all parts of a guard, without short circuits, to find unsupported parts."""
    import sympy  # type: ignore[import-untyped]

    if expr in (True, False):
        return bool(expr)
    if isinstance(expr, sympy.Not | sympy.And | sympy.Or):
        parts = [_holds(arg, value_of) for arg in expr.args]
        return not parts[0] if isinstance(expr, sympy.Not) else (all if isinstance(expr, sympy.And) else any)(parts)
    if isinstance(expr, sympy.core.relational.Relational) and type(expr).__name__ in _RELATIONS:
        left, right = (_term(arg, value_of) for arg in expr.args)
        return bool(_RELATIONS[type(expr).__name__](left, right))
    raise NotImplementedError(str(expr))


def _term(expr: Any, value_of: Mapping[Any, int | float]) -> int | float:
    import sympy

    if type(expr).__name__ == "ToFloat":  # Python compares int and float without rounding
        expr = expr.args[0]
    if expr in value_of:
        return value_of[expr]
    if isinstance(expr, sympy.Integer | sympy.Float):
        return int(expr) if isinstance(expr, sympy.Integer) else float(expr)
    raise NotImplementedError(str(expr))


_OF_PYTHON: dict[Any, Any] = {torch.sym_min: min, torch.sym_max: max, torch.sym_int: int, torch.sym_float: float}
_PYTHONS_MODULES = ("_operator", "math", "builtins")
_MATH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    *("erf", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sqrt"),
)


class NumberTrace:
    """The numbers of one trace in this thread.

    Attributes:
        names: the expressions of Python numbers that become inputs.
        constants: the expressions of numpy's numbers that stay constants; None for all.
        index_of: the index in ``inputs`` of each node that is a number.
        flags: the nodes of bools computed from numbers.
    """

    def __init__(self, names: Collection[str], constants: Collection[str] | None) -> None:
        self.names, self._thread = frozenset(names), threading.get_ident()
        self.constants = frozenset(constants) if constants is not None else None
        self.refusal: NumbersGivenUp | None = None
        self.of_numpy: set[str] = set()
        self._begin(None, None)

    def _begin(self, environment: Any, fake_mode: Any) -> None:
        self.inputs = HostNumbers()
        self.index_of: dict[fx.Node, int] = {}
        self.flags: set[fx.Node] = set()
        self._environment, self.fake_mode = environment, fake_mode

    @property
    def is_here(self) -> bool:
        return threading.get_ident() == self._thread

    def take(self, tx: Any, source: Any, value: Number) -> Any:
        from torch._dynamo.variables.builder import GraphArg
        from torch._dynamo.variables.tensor import SymNodeVariable

        known, name = tx.output.unspec_variable_map, str(source.name)
        if name in known:
            return known[name]
        if self._environment is not tx.output.shape_env:  # a new attempt of Dynamo
            self._begin(tx.output.shape_env, tx.fake_mode)
        symbol, example = self._symbol(value, name, source)
        tracer = tx.output.root_tracer
        proxy = tracer.create_graph_input("number_" + re.sub(r"\W", "_", name), type(example), example, source=source)
        tracer.bound_symbols[symbol] = proxy
        proxy.node.meta["grapharg"] = GraphArg(
            source, example, pass_arg_as_tensor=False, fake_tensor=None, is_tensor=False, example_strong_ref=example
        )
        number = HostNumber(type(value), (name,), None, (compile(name, "<number>", "eval"),))
        self.index_of[proxy.node] = self.inputs.add(number, value, symbol)
        known[name] = SymNodeVariable.create(tx, proxy, example, source=source)
        return known[name]

    def follow(self, node: fx.Node, result: Any) -> Any:
        """The example value of a node: a new symbol if it is a number computed from numbers, else ``result``."""
        numbers = [source for source in node.all_input_nodes if source in self.index_of or source in self.flags]
        if not numbers or node in self.index_of:
            return result
        if isinstance(result, torch.SymBool | bool):
            if not self._compares_alike(node):
                self.refusal = NumbersGivenUp(self.names_at(numbers), "numpy rounds what it is compared with")
                raise self.refusal
            self.flags.add(node)
            return result
        function = self._function_of(node)
        args = tuple(Slot(self.index_of[a]) if isinstance(a, fx.Node) and a in self.index_of else a for a in node.args)
        if function is None or node.kwargs or any(isinstance(arg, fx.Node) for arg in args):
            return result  # not a known number; its users give the numbers up
        why = "what is computed of it is no usual number"
        try:
            value = computed(function, args, self.inputs.values)
        except Exception as error:  # noqa: BLE001 - the number is given up
            value, why = None, f"Python cannot compute with it ({error})"
        if not is_ordinary(value):
            self.refusal = NumbersGivenUp(self.names_at(numbers), why)
            raise self.refusal
        symbol, example = self._symbol(value, f"number_{len(self.inputs.numbers)}")
        number = HostNumber(type(value), tuple(self.names_at(numbers)), function, args)
        self.index_of[node] = self.inputs.add(number, value, symbol)
        return example

    def kind_of(self, node: Any) -> type | None:
        return self.inputs.numbers[self.index_of[node]].kind if node in self.index_of else None

    def _compares_alike(self, node: fx.Node) -> bool:
        """False if numpy first converts Python's numbers to a narrower type."""
        narrow = [kind for kind in map(self.kind_of, node.all_input_nodes) if kind in NARROW]
        if not narrow:
            return True
        if any(self.kind_of(source) in (int, float) for source in node.all_input_nodes):
            return False
        constants = [arg for arg in node.args if not isinstance(arg, fx.Node)]
        return all(isinstance(n, int | float) and float(kind(n)) == float(n) for kind in narrow for n in constants)

    def _function_of(self, node: fx.Node) -> Callable[..., Any] | None:
        target: Any = node.target
        if node.op == "call_method":
            index = self.index_of.get(node.args[0])  # type: ignore[arg-type]
            return getattr(self.inputs.numbers[index].kind, target, None) if index is not None else None
        if target in _OF_PYTHON or isinstance(target, np.ufunc):
            return _OF_PYTHON.get(target, target)
        is_pythons = getattr(target, "__module__", None) in _PYTHONS_MODULES
        return getattr(target, "mirrorc_host", target if is_pythons else None)

    def _symbol(self, value: Number, name: str, source: Any = None) -> tuple[Any, Any]:
        from torch._dynamo.source import ConstantSource
        from torch.fx.experimental.symbolic_shapes import DimDynamic

        source, environment = source if source is not None else ConstantSource(name), self._environment
        value = plain_number(value)
        symbol = environment.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
        make = environment.create_symfloatnode if type(value) is float else environment.create_symintnode
        return symbol, make(symbol, hint=value, source=source)

    def names_at(self, nodes: Collection[fx.Node]) -> list[str]:
        """Expressions that numbers are computed from; all expressions of the trace if a node is not a number."""
        if not all(node in self.index_of for node in nodes):
            return self.inputs.sources
        numbers = (self.inputs.numbers[self.index_of[node]] for node in nodes)
        return list(dict.fromkeys(source for number in numbers for source in number.sources))

    def inputs_at(self, nodes: Collection[fx.Node]) -> HostNumbers:
        """The numbers to compute on the CPU. Those at ``nodes`` are inputs of the graph.

        Guards on numbers are removed from the trace's environment; guards on sizes stay.

        Raises:
            NumbersGivenUp: a guard on numbers cannot be checked on the CPU.
        """
        on_numbers: list[Any] = []
        others: list[Any] = []
        for guard in self._environment.guards:
            (on_numbers if self.inputs.has_symbol_of(guard.expr) else others).append(guard)
        for guard in on_numbers:
            self.inputs.add_condition(guard.expr)
        self._environment.guards[:] = others
        self.inputs.taken = [self.index_of[node] for node in nodes]
        return self.inputs


@contextlib.contextmanager
def traced_numbers(names: Collection[str], constants: Collection[str] | None = None) -> Iterator[NumberTrace]:
    """Makes ordinary numbers inputs of Dynamo's traces in this thread.

    These are Python's numbers in ``names``, and numpy's numbers except ``constants``. Dynamo treats numpy's numbers as
    arrays, and so gets other dtypes of results.
    """
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.tensor import SymNodeVariable

    trace, wrap, initialize = NumberTrace(names, constants), VariableBuilder._wrap, SymNodeVariable.__init__

    def wrap_number(self: Any, value: Any) -> Any:
        number = _wrapped(trace, self, value) if trace.is_here and is_ordinary(value) else None
        return number if number is not None else wrap(self, value)

    def initialize_followed(self: Any, proxy: Any, sym_num: Any, *args: Any, **kwargs: Any) -> None:
        if trace.is_here and (example := trace.follow(proxy.node, sym_num)) is not sym_num:
            proxy.node.meta["example_value"] = sym_num = example
        initialize(self, proxy, sym_num, *args, **kwargs)

    of_math: dict[str, Any] = {f"_sym_{name}": _function_of_math(trace, name) for name in _MATH}
    try:
        with (
            patch.object(VariableBuilder, "_wrap", wrap_number),
            patch.object(SymNodeVariable, "__init__", initialize_followed),
            patch.multiple(torch, create=True, **of_math),
            _numpys_numbers(trace),
        ):
            yield trace
    except NumbersGivenUp:
        raise
    except Exception as error:
        if trace.refusal is not None:  # in place of Dynamo's own error
            raise trace.refusal from error
        if trace.of_numpy:
            raise NumbersGivenUp(trace.of_numpy, "the capture fails if it may be another number") from error
        raise


def _wrapped(trace: NumberTrace, builder: Any, value: Number) -> Any:
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import install_guard
    from torch._dynamo.variables.constant import ConstantVariable

    name, is_numpys = str(builder.source.name), isinstance(value, np.generic)
    if is_numpys and (trace.constants is None or name in trace.constants):
        if type(value) is not np.int64:
            return None
        install_guard(builder.source.make_guard(GuardBuilder.EQUALS_MATCH))  # such as a size
        return ConstantVariable.create(int(value), source=builder.source)
    if not is_numpys and name not in trace.names:
        return None
    if is_numpys:
        trace.of_numpy.add(name)
    if name not in builder.tx.output.unspec_variable_map:
        install_guard(builder.source.make_guard(GuardBuilder.TYPE_MATCH))
    return trace.take(builder.tx, builder.source, value)


@contextlib.contextmanager
def _numpys_numbers(trace: NumberTrace) -> Iterator[None]:
    from torch._dynamo.variables.misc import NumpyVariable
    from torch._dynamo.variables.tensor import SymNodeVariable

    python_type, call_method, call = (
        SymNodeVariable.python_type,
        SymNodeVariable.call_method,
        NumpyVariable.call_function,
    )

    def type_of(self: Any) -> type:
        kind = trace.kind_of(self.proxy.node) if trace.is_here else None
        return python_type(self) if kind is None else kind

    def call_item(self: Any, tx: Any, name: str, args: Any, kwargs: Any) -> Any:
        if name != "item" or args or not issubclass(type_of(self), np.generic):
            return call_method(self, tx, name, args, kwargs)
        convert = torch.sym_float if issubclass(type_of(self), np.floating) else torch.sym_int
        return SymNodeVariable.create(tx, tx.output.create_proxy("call_function", convert, (self.as_proxy(),), {}))

    def call_numpy(self: Any, tx: Any, args: Any, kwargs: Any) -> Any:
        args = [arg.realize() for arg in args]
        numbers = [arg for arg in args if isinstance(arg, SymNodeVariable) and arg.proxy.node in trace.index_of]
        known = all(arg in numbers or arg.is_python_constant() for arg in args)
        if not (trace.is_here and numbers and known) or kwargs or not isinstance(self.value, np.ufunc):
            return call(self, tx, args, kwargs)
        proxy = tx.output.create_proxy("call_function", self.value, tuple(arg.as_proxy() for arg in args), {})
        # any value will do: `NumberTrace.follow` gives the result a new symbol
        return SymNodeVariable.create(tx, proxy, torch.sym_float(numbers[0].sym_num))

    with (
        patch.object(SymNodeVariable, "python_type", type_of),
        patch.object(SymNodeVariable, "call_method", call_item),
        patch.object(NumpyVariable, "call_function", call_numpy),
    ):
        yield


def _function_of_math(trace: NumberTrace, name: str) -> Callable[..., Any]:
    host = getattr(math, name)
    otherwise = getattr(torch, f"_sym_{name}", host)

    def call(*args: Any) -> Any:
        if not trace.is_here or not trace.index_of:
            return otherwise(*args)
        # any value will do: `NumberTrace.follow` gives the result a new symbol
        return torch.sym_float(next(arg for arg in args if isinstance(arg, torch.SymInt | torch.SymFloat)))

    call.__name__ = f"_sym_{name}"
    call.mirrorc_host = host  # type: ignore[attr-defined]
    return call
