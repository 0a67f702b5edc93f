"""The registry of the verifier's rules, violations, and the graphs to check."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack
from mirrorc.ir.nodes import bucket_of, calls_to, name_of, pack_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.problem import problem


class Scope(enum.Enum):
    PROGRAM = "a program"
    GRAPH = "a program, and a graph of it or the body of a region"
    PASS = "the programs before and after a pass, and what is known of their dataflow"


class Order(enum.IntEnum):
    """Rules that others depend on come first. Last come rules whose violations often follow from another violation."""

    FORM = 0  # graphs are well-formed
    REFERENCES = 1  # references of nodes are valid, and operations have their arguments
    MEANING = 2  # everything else
    OWNERS = 3  # values stay on their replica, a step commits; another rule often explains such a fault better
    TYPES = 4  # another rule often explains a wrong type better, too


@dataclass(frozen=True)
class Rule:
    """A rule of the verifier. The name and docstring of ``check`` are its name and statement.

    Attributes:
        since: the first stage at which it holds; None for every stage.
        is_about_dataflow: passes with ``changes_dataflow`` are exempt.
    """

    check: Callable[..., Any]
    since: Stage | None = None
    scope: Scope = Scope.PROGRAM
    order: Order = Order.MEANING
    is_about_dataflow: bool = False

    @property
    def name(self) -> str:
        return self.check.__name__

    @property
    def statement(self) -> str:
        return " ".join((self.check.__doc__ or "").partition("\n\n")[0].split())

    @property
    def applies(self) -> str:
        """Where the rule applies: ``to every stage``, ``from PACKED on`` or ``to every pass``."""
        if self.scope is Scope.PASS:
            return "to every pass"
        return "to every stage" if self.since is None else f"from {self.since.name} on"

    def holds_at(self, stage: Stage) -> bool:
        return self.since is None or self.since <= stage

    def when(self, program: Program) -> str:
        if self.scope is Scope.PASS:
            return "on passes"
        if self.since is None:
            return "of every stage"
        return f"of stage {self.since.name}" + (" and later" if self.since < program.stage else "")


_RULES: list[Rule] = []  # in the order in which they are checked
_Check = TypeVar("_Check", bound=Callable[..., Any])


def rule(
    *,
    since: Stage | None = None,
    scope: Scope = Scope.PROGRAM,
    order: Order = Order.MEANING,
    is_about_dataflow: bool = False,
) -> Callable[[_Check], _Check]:
    """Registers the decorated function, which yields a `Violation` for each fault.

    Raises:
        ValueError: another rule has this name, or the function has no docstring.
    """

    def register(check: _Check) -> _Check:
        new = Rule(check, since, scope, order, is_about_dataflow)
        if any(other.name == new.name for other in _RULES):
            raise ValueError(f"MC4005: there is a rule {new.name!r} already: give this one another name")
        if not new.statement:
            raise problem(
                ValueError,
                f"MC4005: rule {new.name!r} has no docstring",
                fix="state the rule there, for the users whose programs it refuses",
            )
        bisect.insort(_RULES, new, key=_place)
        return check

    return register


def withdraw(check: Callable[..., Any]) -> None:
    _RULES[:] = [registered for registered in _RULES if registered.check is not check]


def rules() -> list[Rule]:
    """All rules in checking order; rules on passes are last."""
    return list(_RULES)


def _place(rule: Rule) -> tuple[bool, Order, Stage]:
    return rule.scope is Scope.PASS, rule.order, rule.since or Stage.CAPTURED


@dataclass(frozen=True)
class Violation:
    message: str
    node: fx.Node | None = None

    def __str__(self) -> str:
        return self.message


def scopes(program: Program) -> Iterator[tuple[Callable[[int | None], str], fx.Graph, list[int | None]]]:
    """Yields each graph with operations of the IR, its replicas, and a function that names a replica in messages."""
    if program.graph is not None:
        yield lambda replica: str(program.devices[replica or 0]), program.graph, list(range(program.num_replicas))
    for name, module in program.device_graphs.items():
        yield lambda _, name=name: name, module.graph, [None]  # type: ignore[misc]


def calls(program: Program, *targets: Callable[..., Any]) -> Iterator[tuple[Callable[[int | None], str], fx.Node]]:
    """Yields the calls of operations in `scopes`, and the function that names a replica."""
    return ((where, node) for where, graph, _ in scopes(program) for node in calls_to(graph, *targets))


def losses_of(graph: fx.Graph) -> list[fx.Node]:
    """Losses of the replicas with examples; empty in an evaluation."""
    output: Any = graph.output_node().args[0]
    return [loss for loss in (output["losses"] if isinstance(output, dict) else [output]) if loss is not None]


def say(node: fx.Node) -> str:
    pack = f", pack {node.kwargs['pack']}" if node.kwargs.get("pack") is not None else ""
    return f"{name_of(node)} of bucket {bucket_of(node)}{pack}"


def say_pack(bucket: Bucket, *packs: Pack) -> str:
    return f"bucket {bucket.index}" + "".join(f", pack {pack.number}" for pack in packs if bucket.packs)


def last_of_bucket(graph: fx.Graph, bucket: int, replica: int | None) -> fx.Node | None:
    """A replica's last node of a bucket, where a message reports a missing node."""
    last = None
    for node in graph.nodes:
        if node.kwargs.get("bucket") == bucket and (node.target in ops.COLLECTIVES or replica_of(node) == replica):
            last = node
    return last


def tag(node: fx.Node) -> tuple[str, int]:
    return name_of(node), pack_of(node)


def writes_variables(node: fx.Node) -> bool:
    return node.target in ops.WRITERS


def written_buckets(node: fx.Node) -> list[int]:
    if node.target not in ops.UPDATES:
        return []
    return [bucket_of(node)] if "bucket" in node.kwargs else list(node.kwargs["buckets"])  # type: ignore[arg-type]
