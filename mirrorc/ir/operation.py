r"""Declares the operations of the IR. All tables of operations are derived from these declarations.

Only the signature and the docstring of a declaring function are used::

    @operation(Kind.COMPUTE, since=Stage.REPLICATED, gives=type_of_operand)
    def scale_bucket(value: Any, *, factor: float, replica: int | None = None) -> Any:
        \"\"\"Multiplies a bucket by a number.\"\"\"

The decorator returns the target of ``call_function`` nodes.
"""

from __future__ import annotations

import enum
import functools
import inspect
import weakref
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any, Generic, NoReturn, TypeVar

from torch import fx

from mirrorc.ir.program import Program, Stage
from mirrorc.ir.value_types import ValueType

Symbol = Callable[..., Any]
TypeRule = Callable[[Program, fx.Node], ValueType]
"""Infers the type of a node's value, or raises TypeError."""


class Kind(enum.Enum):
    SOURCE = "source"  # returns an existing value: an argument, a variable, a slot
    REGION = "region"  # runs a region
    CHECK = "check"  # stops the step unless a value is true
    GATHER = "gather"  # returns a value to the step's caller
    COMPUTE = "operator"  # computes a value from others without effects, as an operator of torch does
    FACTORED = "factored"  # returns a gradient as factors
    PACK = "pack"  # fills a bucket
    LAUNCH = "launch"  # begins communication
    WAIT = "wait"  # ends communication
    UPDATE = "update"  # writes parameters or their gradients, or accumulates gradients
    WRITE = "write"  # writes other variables


class Effect(enum.Enum):
    CHECKS = "stops the step unless its value is true"
    GATHERS = "hands its value to the step's caller"
    TELLS = "tells the step's caller a number"
    LAUNCHES = "gives a pending value"
    JOINS = "takes a value of every replica and belongs to none"
    SUMS = "adds up the replicas' values"
    SCATTERS = "gives each replica its share alone"
    EXCHANGES = "adds up the workers' sums"
    SPREADS = "gives all workers what each has updated"
    SENDS = "gives a value to another replica"
    RECEIVES = "takes a value from another replica"
    WAITS = "waits for a pending value"
    MEETS = "waits for a value of every replica that has examples"
    ATTENDS = "meets the replicas of other workers without a value of its own"
    COMMITS = "decides with all other replicas that the step takes place"
    UPDATES = "writes the parameters of its buckets"
    ACCUMULATES = "adds gradients to those that are kept for a later update"
    LEAVES = "adds gradients to those of the user's parameters"
    WRITES = "writes a variable"


class Printed(enum.Enum):
    LINE = "on a line of its own"
    WHERE_USED = "where its value is used"
    TOGETHER = "on one line with all others of its replica"


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation of the IR; ``symbol`` is the target of its FX nodes.

    Attributes:
        since, until: the first and the last stage with this operation.
        gives: the type rule; None if the type is recorded on the node.
        operands: how many; None for any number; or the keyword whose list has an item per operand.
        keywords: the required ones, except ``replica``.
        stem, called, awaited: see `mirrorc.ir.names`.
        value: see `mirrorc.printing.printed_values`.
    """

    name: str
    symbol: Symbol
    kind: Kind
    since: Stage
    until: Stage
    effects: frozenset[Effect]
    gives: TypeRule | None
    operands: int | str | None
    keywords: tuple[str, ...]
    shown: tuple[str, ...]
    stem: str
    value: str
    called: str
    awaited: str
    printed: Printed
    summary: str

    @functools.cached_property
    def required(self) -> frozenset[str]:
        return frozenset(self.keywords)


_BY_NAME: dict[str, Operation] = {}
_BY_SYMBOL: dict[Any, Operation] = {}
_HANDLERS: list[Handlers[Any]] = []
_SELECTIONS: weakref.WeakSet[Selection] = weakref.WeakSet()


def operation(
    kind: Kind,
    *,
    since: Stage,
    until: Stage = Stage.LOWERED,
    effects: Collection[Effect] = (),
    gives: TypeRule | None,
    operands_for: str = "",
    hidden: Collection[str] = (),
    stem: str = "",
    value: str = "saved",
    called: str = "",
    awaited: str = "",
    printed: Printed = Printed.LINE,
) -> Callable[[Callable[..., Any]], Symbol]:
    """Declares an operation by a function's name, signature and docstring.

    Args:
        operands_for: the keyword whose list has an item per operand.
        hidden: keywords that are not printed.
    """

    def declare(function: Callable[..., Any]) -> Symbol:
        parameters = inspect.signature(function).parameters.values()
        named = [p for p in parameters if p.kind is p.KEYWORD_ONLY and p.name != "replica"]
        takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)
        num_operands = sum(p.kind is p.POSITIONAL_OR_KEYWORD for p in parameters)
        record = Operation(
            name=function.__name__,
            symbol=_symbol(function),
            kind=kind,
            since=since,
            until=until,
            effects=frozenset(effects),
            gives=gives,
            operands=operands_for or (None if takes_any else num_operands),
            keywords=tuple(p.name for p in named if p.default is p.empty),
            shown=tuple(p.name for p in named if p.name != "bucket" and p.name not in hidden),
            stem=stem,
            value=value,
            called=called,
            awaited=awaited,
            printed=printed,
            summary=" ".join((function.__doc__ or "").partition("\n\n")[0].split()),
        )
        _register(record)
        return fx.has_side_effect(record.symbol) if effects else record.symbol

    return declare


def _register(record: Operation) -> None:
    if record.name in _BY_NAME:
        raise ValueError(f"MC4005: operation {record.name!r} is declared already: give this one another name")
    _BY_NAME[record.name] = _BY_SYMBOL[record.symbol] = record
    for selection in _SELECTIONS:
        selection.refresh()


def _symbol(function: Callable[..., Any]) -> Symbol:
    name = function.__name__

    def symbol(*args: object, **kwargs: object) -> NoReturn:
        raise TypeError(f"MC4005: {name} is an operation of the IR: only mirrorc's runtime can run it")

    symbol.__name__ = symbol.__qualname__ = name
    symbol.__doc__ = function.__doc__
    symbol.__module__ = function.__module__
    symbol.__signature__ = inspect.signature(function)  # type: ignore[attr-defined]
    return symbol


def withdraw(symbol: Symbol) -> None:
    del _BY_NAME[_BY_SYMBOL.pop(symbol).name]
    for selection in _SELECTIONS:
        selection.refresh()
    for handlers in _HANDLERS:
        handlers.forget(symbol)


def operations() -> tuple[Operation, ...]:
    return tuple(_BY_NAME.values())


def operation_named(name: str) -> Operation | None:
    return _BY_NAME.get(name)


def operation_of(target: Any) -> Operation | None:
    return _BY_SYMBOL.get(target) if type(target) is FunctionType else None


class Selection(Collection[Symbol]):
    """The symbols of all operations that satisfy a condition, including operations declared later."""

    def __init__(self, condition: Callable[[Operation], bool]) -> None:
        self._condition = condition
        _SELECTIONS.add(self)

    def __contains__(self, target: object) -> bool:
        return type(target) is FunctionType and target in self._symbols  # operators of torch take long to hash

    def __iter__(self) -> Iterator[Symbol]:
        return iter(self._symbols)

    def __len__(self) -> int:
        return len(self._symbols)

    @functools.cached_property
    def _symbols(self) -> dict[Symbol, None]:
        return {record.symbol: None for record in operations() if self._condition(record)}

    def refresh(self) -> None:
        self.__dict__.pop("_symbols", None)


Handler = TypeVar("Handler", bound=Callable[..., Any])


class Handlers(Generic[Handler]):
    def __init__(self, part: str) -> None:
        self.part = part
        self._by_symbol: dict[Symbol, Handler] = {}
        self._by_selection: list[tuple[Selection, Handler]] = []
        _HANDLERS.append(self)

    def __call__(self, *targets: Symbol | Selection) -> Callable[[Handler], Handler]:
        """A handler of an operation takes precedence over a handler of a selection."""

        def register(handler: Handler) -> Handler:
            for item in targets:
                if isinstance(item, Selection):
                    self._by_selection.append((item, handler))
                else:
                    self._by_symbol[item] = handler
            return handler

        return register

    def of(self, target: Any) -> Handler:
        if (handler := self._find(target)) is None:
            name = getattr(target, "__name__", target)
            raise LookupError(
                f"MC4005: nothing is registered to {self.part} the operation {name}: decorate a function for it"
            )
        return handler

    def forget(self, symbol: Symbol) -> None:
        self._by_symbol.pop(symbol, None)

    def __contains__(self, target: Any) -> bool:
        return self._find(target) is not None

    def _find(self, target: Any) -> Handler | None:
        of_selections = (handler for selection, handler in self._by_selection if target in selection)
        return self._by_symbol.get(target) or next(of_selections, None)
