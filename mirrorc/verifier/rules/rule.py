"""The registry of the verifier's rules."""

from __future__ import annotations

import bisect
import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

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
