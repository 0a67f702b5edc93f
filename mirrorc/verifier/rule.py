"""What a rule of the verifier is, and which there are: each registers itself, by a decorator that says from when it holds."""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from mirrorc.ir.program import Program, Stage


class Scope(enum.Enum):
    """What a rule is given."""

    PROGRAM = "a program"
    GRAPH = "a program, and a graph of it or the body of a region"
    PASS = "the programs before and after a pass, and what is known of their dataflow"


class Order(enum.IntEnum):
    """When a rule is checked: first what others stand on, last what a better message often explains."""

    FORM = 0  # graphs are graphs
    REFERENCES = 1  # what nodes name is there, and operations have their arguments
    MEANING = 2  # everything else
    OWNERS = (
        3  # values stay on their replica: what breaks it often breaks another rule, which says better what is wrong
    )
    TYPES = 4  # so does a wrong type


@dataclass(frozen=True)
class Rule:
    """A rule of the verifier.

    Attributes:
        check: yields what breaks the rule; its name and docstring are the rule's name and statement.
        since: the stage from which it holds; None if it holds at every stage.
        scope: what ``check`` is given.
        order: when it is checked.
        is_about_dataflow: whether a pass that says that it changes what is computed need not keep it.
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
        """What the rule demands, in a sentence: the first paragraph of its docstring."""
        return " ".join((self.check.__doc__ or "").partition("\n\n")[0].split())

    def holds_at(self, stage: Stage) -> bool:
        """Whether programs of this stage must keep the rule."""
        return self.since is None or self.since <= stage

    def when(self, program: Program) -> str:
        """When it holds, for a message."""
        if self.scope is Scope.PASS:
            return "on passes"
        if self.since is None:
            return "of every stage"
        return f"of stage {self.since.name}" + (" and later" if self.since < program.stage else "")


_RULES: list[Rule] = []
_Check = TypeVar("_Check", bound=Callable[..., Any])


def rule(
    *,
    since: Stage | None = None,
    scope: Scope = Scope.PROGRAM,
    order: Order = Order.MEANING,
    is_about_dataflow: bool = False,
) -> Callable[[_Check], _Check]:
    """Registers the decorated function as a rule, see `Rule`; it yields a `Violation` for all that breaks the rule.

    Raises:
        ValueError: another rule has this name, or the function does not state the rule in its docstring.
    """

    def register(check: _Check) -> _Check:
        new = Rule(check, since, scope, order, is_about_dataflow)
        if any(other.name == new.name for other in _RULES):
            raise ValueError(f"there is a rule {new.name!r} already: give this one another name")
        if not new.statement:
            raise ValueError(f"rule {new.name!r} has no docstring, which states it to whom it refuses a program")
        _RULES.append(new)
        return check

    return register


def withdraw(check: Callable[..., Any]) -> None:
    """Takes back the registration of a rule: for tests, which must leave nothing behind."""
    _RULES[:] = [found for found in _RULES if found.check is not check]


def rules() -> list[Rule]:
    """All rules in the order in which they are checked: those on passes last, else by order and by stage."""
    return sorted(_RULES, key=lambda r: (r.scope is Scope.PASS, r.order, r.since or Stage.CAPTURED))
