"""Has Dynamo trace chosen Python numbers as inputs, and keeps what Python computes and asks of them, to do it again on the host.

Dynamo knows such a number as a symbol: its type is that of the number, and a branch on it is noted as a condition. Dynamo
computes with symbols as with real numbers, so each result becomes a symbol of its own here: its value is what Python computes, in
Python's order, and a condition compares such values alone.
"""

from __future__ import annotations

import contextlib
import math
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.torch_internals.numbers.host_numbers import (
    Number,
    NumberInputs,
    NumbersGivenUp,
    Slot,
    fill,
    filled,
    is_ordinary,
)
from mirrorc.torch_internals.numbers.number_conditions import NoCondition, condition_of

_OF_PYTHON: dict[Any, Callable[..., Any]] = {
    torch.sym_min: min,
    torch.sym_max: max,
    torch.sym_int: int,
    torch.sym_float: float,
}
_PYTHONS_MODULES = ("_operator", "math", "builtins")
_MATH = (
    *("acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh"),
    *("erf", "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sqrt"),
)


class NumberTrace:
    """The numbers of one trace.

    Args:
        names: the expressions that read numbers which are to be inputs.

    Attributes:
        slot_of: the nodes of Dynamo's graph that are numbers, and where each is kept.
        flags: the nodes that are truth values made of numbers.
        fake_mode: the mode of the trace's fake tensors.
        given_up: why the trace was ended, if it was because of a number.
    """

    def __init__(self, names: Collection[str]) -> None:
        self.names = frozenset(names)
        self.given_up: NumbersGivenUp | None = None
        self._begin()

    def _begin(self) -> None:
        self.slot_of: dict[fx.Node, int] = {}
        self.flags: set[fx.Node] = set()
        self._sources: list[tuple[str, Any]] = []
        self._made: list[Any] = []  # by slot: None for a source, else what is computed
        self._values: list[Any] = []
        self._slot_of_symbol: dict[Any, int] = {}
        self._env: Any = None
        self.fake_mode: Any = None

    def add_source(self, name: str, value: Number, symbol: Any, node: fx.Node, tx: Any) -> None:
        """Notes a number that Python has read."""
        if self._env is not tx.output.shape_env:  # Dynamo begins anew
            self._begin()
        self._env, self.fake_mode = tx.output.shape_env, tx.fake_mode
        self._note(node, symbol, value, None)
        self._sources.append((name, len(self._made) - 1))

    def _note(self, node: fx.Node, symbol: Any, value: Number, made: Any) -> None:
        self.slot_of[node] = self._slot_of_symbol[symbol] = len(self._made)
        self._made.append(made)
        self._values.append(value)

    def follow(self, node: fx.Node, sym_num: Any) -> Any:
        """What stands for the result of a node of numbers: a symbol of its own. Other results stay as they are."""
        if not self._uses_numbers(node) or node in self.slot_of:
            return sym_num
        if isinstance(sym_num, torch.SymBool | bool):
            self.flags.add(node)
            return sym_num
        function = _function_of(node)
        args = tuple(self._as_slot(arg) for arg in node.args)
        kwargs = {key: self._as_slot(arg) for key, arg in node.kwargs.items()}
        if function is None or any(isinstance(arg, fx.Node) for arg in (*args, *kwargs.values())):
            return sym_num  # found out when the graph is rewritten: the node is no number that is known
        try:
            value = function(
                *filled(args, self._values), **{key: fill(arg, self._values) for key, arg in kwargs.items()}
            )
        except Exception as error:
            raise self._giving_up(node, f"Python cannot compute with it ({error})") from error
        if not is_ordinary(value):
            raise self._giving_up(node, "what is computed of it is no usual number")
        symbol, own = _new_symbol(self._env, value, f"number_{len(self._made)}")
        self._note(node, symbol, value, (function, args, kwargs))
        return own

    def _as_slot(self, arg: Any) -> Any:
        return Slot(self.slot_of[arg]) if isinstance(arg, fx.Node) and arg in self.slot_of else arg

    def _uses_numbers(self, node: fx.Node) -> bool:
        return any(source in self.slot_of or source in self.flags for source in node.all_input_nodes)

    def names_at(self, nodes: Collection[fx.Node]) -> list[str]:
        """The expressions that read the numbers at some nodes; all of them where it is not known which."""
        slots = [self.slot_of[node] for node in nodes if node in self.slot_of]
        if len(slots) < len(nodes):
            return [name for name, _ in self._sources]
        return list(dict.fromkeys(name for slot in slots for name in self._names_of_slot(slot)))

    def _giving_up(self, node: fx.Node, why: str) -> NumbersGivenUp:
        sources = [n for n in node.all_input_nodes if n in self.slot_of or n in self.flags]
        self.given_up = NumbersGivenUp(self.names_at(sources), why)
        return self.given_up

    def _names_of_slot(self, slot: int) -> Iterator[str]:
        if self._made[slot] is None:
            yield from (name for name, own in self._sources if own == slot)
            return
        _, args, kwargs = self._made[slot]
        for arg in (*args, *kwargs.values()):
            if isinstance(arg, Slot):
                yield from self._names_of_slot(arg.index)

    def value_at(self, node: fx.Node) -> Number:
        """The number at a node, in this trace."""
        value: Number = self._values[self.slot_of[node]]
        return value

    def inputs(self, given: Sequence[fx.Node]) -> NumberInputs:
        """How the numbers at some nodes follow from what Python reads.

        Raises:
            NumbersGivenUp: a condition was noted that cannot be asked again.
        """
        order = [slot for _, slot in self._sources]
        order += [slot for slot, made in enumerate(self._made) if made is not None]
        place = {slot: i for i, slot in enumerate(order)}
        inputs = NumberInputs([name for name, _ in self._sources], [type(self._values[slot]) for slot in order])
        for slot in order[len(self._sources) :]:
            function, args, kwargs = self._made[slot]
            placed = tuple(Slot(place[a.index]) if isinstance(a, Slot) else a for a in args)
            kept = {key: Slot(place[a.index]) if isinstance(a, Slot) else a for key, a in kwargs.items()}
            inputs.computed.append((function, placed, kept))
        places = {symbol: place[slot] for symbol, slot in self._slot_of_symbol.items()}
        inputs.given = [place[self.slot_of[node]] for node in given]
        for guard in self._env.guards if self._env is not None else ():
            try:
                condition = condition_of(guard.expr, places)
            except NoCondition as error:
                raise NumbersGivenUp(
                    inputs.sources, f"it is compared in a way that cannot be followed ({error})"
                ) from error
            inputs.conditions.append(condition)
            if not condition([self._values[slot] for slot in order]):
                raise NumbersGivenUp(inputs.sources, f"{guard.expr} is not what Python finds")
        return inputs


def _function_of(node: fx.Node) -> Callable[..., Any] | None:
    """What computes a node of numbers on numbers of Python; None if that is not known."""
    if node.op == "call_method":
        return _method(str(node.target))
    if node.op != "call_function":
        return None
    target: Any = node.target
    if target in _OF_PYTHON:
        return _OF_PYTHON[target]
    host: Callable[..., Any] | None = getattr(target, "mirrorc_host", None)
    if host is not None:
        return host
    return target if getattr(target, "__module__", "") in _PYTHONS_MODULES else None


def _method(name: str) -> Callable[..., Any]:
    def call(number: Any, *args: Any) -> Any:
        return getattr(number, name)(*args)

    call.__name__ = name.strip("_")
    return call


def _new_symbol(env: Any, value: Number, name: str, source: Any = None) -> tuple[Any, Any]:
    """A symbol for a number: the symbol, and what stands for it in Python."""
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = source if source is not None else ConstantSource(name)
    symbol = env.create_unspecified_symbol(value, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    make = env.create_symfloatnode if type(value) is float else env.create_symintnode
    return symbol, make(symbol, hint=value, source=source)


@contextlib.contextmanager
def traced_numbers(names: Collection[str]) -> Iterator[NumberTrace]:
    """While Dynamo traces in this thread, numbers that these expressions read are inputs of the graph, if they are ordinary.

    Args:
        names: expressions as Dynamo writes them, see `mirrorc.torch_internals.DynamoGuards.names`.
    """
    trace = NumberTrace(names)
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.tensor import SymNodeVariable

    builder, variable = _replaced_builder(trace), _replaced_variable(trace)
    of_math = {name: getattr(torch, name, None) for name in (f"_sym_{name}" for name in _MATH)}
    before = VariableBuilder._wrap, SymNodeVariable.__init__
    try:
        VariableBuilder._wrap, SymNodeVariable.__init__ = builder, variable  # type: ignore[method-assign]
        for name in of_math:
            setattr(torch, name, _function_of_math(trace, name.removeprefix("_sym_"), of_math[name]))
        yield trace
    except Exception as error:
        if trace.given_up is not None:  # Dynamo raises an error of its own
            raise trace.given_up from error
        raise
    finally:
        VariableBuilder._wrap, SymNodeVariable.__init__ = before  # type: ignore[method-assign]
        for name, function in of_math.items():
            if function is None:
                delattr(torch, name)
            else:
                setattr(torch, name, function)


def _replaced_builder(trace: NumberTrace) -> Callable[..., Any]:
    from torch._dynamo.guards import GuardBuilder
    from torch._dynamo.variables.builder import VariableBuilder, install_guard

    wrap, thread = VariableBuilder._wrap, threading.get_ident()

    if not trace.names:
        return wrap

    def wrap_number(self: Any, value: Any) -> Any:
        name = str(self.source.name)
        if name not in trace.names or not is_ordinary(value) or threading.get_ident() != thread:
            return wrap(self, value)
        if name not in self.tx.output.unspec_variable_map:
            install_guard(self.source.make_guard(GuardBuilder.TYPE_MATCH))
        return number_input(trace, self.tx, self.source, value)

    return wrap_number


def number_input(trace: NumberTrace, tx: Any, source: Any, value: Number) -> Any:
    """A tracer's variable for a number that a source of Dynamo reads, as an input of the graph."""
    from torch._dynamo.variables.builder import GraphArg
    from torch._dynamo.variables.tensor import SymNodeVariable

    known: dict[str, Any] = tx.output.unspec_variable_map
    name = str(source.name)
    if name in known:
        return known[name]
    symbol, own = _new_symbol(tx.output.shape_env, value, name, source)
    tracer = tx.output.root_tracer
    proxy = tracer.create_graph_input(
        "number_" + "".join(c if c.isalnum() else "_" for c in name), type(own), own, source=source
    )
    tracer.bound_symbols[symbol] = proxy
    proxy.node.meta["grapharg"] = GraphArg(
        source, own, pass_arg_as_tensor=False, fake_tensor=None, is_tensor=False, example_strong_ref=own
    )
    trace.add_source(name, value, symbol, proxy.node, tx)
    known[name] = SymNodeVariable.create(tx, proxy, own, source=source)
    return known[name]


def _replaced_variable(trace: NumberTrace) -> Callable[..., None]:
    from torch._dynamo.variables.tensor import SymNodeVariable

    init, thread = SymNodeVariable.__init__, threading.get_ident()

    def initialize(self: Any, proxy: Any, sym_num: Any, *args: Any, **kwargs: Any) -> None:
        if threading.get_ident() == thread:
            own = trace.follow(proxy.node, sym_num)
            if own is not sym_num:
                proxy.node.meta["example_value"] = sym_num = own
        init(self, proxy, sym_num, *args, **kwargs)

    return initialize


def _function_of_math(trace: NumberTrace, name: str, otherwise: Callable[..., Any] | None) -> Callable[..., Any]:
    """A function that Dynamo calls on symbols in the place of one of ``math``: the result is a symbol, too."""
    host, thread = getattr(math, name, None), threading.get_ident()

    def call(*args: Any) -> Any:
        if threading.get_ident() != thread or not trace.slot_of:
            return (otherwise or host)(*args)  # type: ignore[misc]
        symbolic = next(arg for arg in args if isinstance(arg, torch.SymInt | torch.SymFloat))
        # any value will do: the variable of the result gets a symbol of its own, see `NumberTrace.follow`
        return torch.sym_float(symbolic)

    call.__name__ = f"_sym_{name}"
    call.mirrorc_host = host  # type: ignore[attr-defined]
    return call
