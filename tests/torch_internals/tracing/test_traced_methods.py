"""Methods that a trace has entered: each way of replacing one is seen, whatever it is decorated with."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from mirrorc.torch_internals.tracing.traced_methods import TracedMethods


def number() -> int:
    return 1


class Classes:
    """Classes of their own for each case, and what is watched of them."""

    def __init__(self) -> None:
        class Inner:
            def method(self) -> int:
                return 1

        class Base:
            def by_super(self) -> int:
                return 1

        class Kind(Base):
            def method(self) -> Any:
                return Inner

            def by_super(self) -> int:
                return super().by_super()

            @torch.no_grad()
            def decorated(self) -> int:
                return 1

            @functools.lru_cache  # noqa: B019 - the class is gone before the cache
            def cached(self) -> int:
                return 1

            @functools.cached_property
            def once(self) -> int:
                return 1

            @property
            def attribute(self) -> int:
                return 1

            @staticmethod
            def static() -> int:
                return 1

            @classmethod
            def of_class(cls) -> int:
                return 1

            by_partial = functools.partialmethod(by_super)

            def unread(self) -> int:
                return 1

        def exchange_inner() -> None:
            nonlocal Inner
            Inner = Base  # type: ignore[assignment, misc]

        self.base, self.kind, self.inner, self.exchange_inner = Base, Kind, Inner, exchange_inner
        entered = [Inner.method, Base.by_super, Kind.method, Kind.by_super, Kind.decorated.__wrapped__, number]
        entered += [Kind.cached.__wrapped__, Kind.once.func, Kind.attribute.fget, Kind.static, Kind.of_class.__func__]
        self.watched = TracedMethods([Kind(), number], [function.__code__ for function in entered])


def replacing(name: str, value: Any = None) -> Callable[[Classes], None]:
    return lambda classes: setattr(classes.kind, name, value)


NAMES = ("method", "by_super", "decorated", "cached", "once", "attribute", "static", "of_class", "by_partial")

CHANGES: dict[str, Callable[[Classes], None]] = {name: replacing(name) for name in NAMES} | {
    "a method of a base": lambda c: setattr(c.base, "by_super", None),
    "no method of a base": lambda c: delattr(c.base, "by_super"),
    "a method of a class in a closure": lambda c: setattr(c.inner, "method", None),
    "another class in a closure": lambda c: c.exchange_inner(),
    "other code": lambda c: setattr(c.kind.static, "__code__", (lambda: 2).__code__),
    "other code of what is decorated": lambda c: setattr(
        c.kind.decorated.__wrapped__, "__code__", (lambda self: 2).__code__
    ),
}


def test_every_way_of_replacing_a_method_is_seen_and_said() -> None:
    unseen = []
    for what, change in CHANGES.items():
        classes = Classes()
        assert classes.watched.hold() and not classes.watched.broken()
        change(classes)
        if classes.watched.hold() or "was replaced" not in classes.watched.broken():
            unseen.append(what)
    assert not unseen


def test_what_was_not_entered_may_change() -> None:
    classes = Classes()
    replacing("unread")(classes)
    replacing("new")(classes)
    assert classes.watched.hold()
