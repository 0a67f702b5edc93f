"""Dynamo's guards: what they watch, what is left out, and how they read in words."""

import functools
import gc
import logging
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo import utils
from torch._logging._internal import trace_log
from traced_graphs import Small

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.tracing.dynamo_guards import TracedMethods, guards_not_timed, metrics_if_heard

factor = 2.0
chosen = torch.ones(3)


class Call(nn.Module):
    """As `mirrorc.capture.call.traced_loss.TracedLoss` calls a model: with leaves."""

    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3))
        self.config = types.SimpleNamespace(offset=0.0)

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return (self.model(leaves[0]) * factor * chosen + self.config.offset).sum()


@pytest.fixture
def call() -> Iterator[Call]:
    values = {name: globals()[name] for name in ("factor", "chosen")}
    yield Call()
    globals().update(values)


def guards_of(call: Call) -> internals.DynamoGuards:
    return internals.guards_of(internals.trace_full_graph(call, (torch.ones(2, 3),)))


def test_guards_hold_until_something_that_was_read_changes(call: Call) -> None:
    guards = guards_of(call)
    gc.collect()  # nothing that they need goes with the trace
    internals.trace_full_graph(call, (torch.ones(4, 3),))  # nor is it replaced by that of another one
    assert guards.hold()
    globals()["factor"] = 3.0
    assert not guards.hold()
    assert guards.broken().startswith("factor == 2.0, read at ") and "test_dynamo_guards.py:" in guards.broken()
    globals()["factor"] = 2.0
    assert guards.hold()


@pytest.mark.slow
def test_new_guards_are_not_timed(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    timed = []
    monkeypatch.setattr(torch._dynamo.guards, "profile_guard_manager", lambda *_: timed.append(1) or 1.0)
    torch.compile(call, backend="eager")(torch.ones(2, 3))
    assert timed, "Dynamo times its guards elsewhere now"
    timed.clear()
    assert guards_of(call).hold()
    assert not timed


def test_a_tensor_from_elsewhere_must_be_the_same_one(call: Call) -> None:
    guards = guards_of(call)
    globals()["chosen"] = torch.ones(3)
    assert not guards.hold() and "chosen" in guards.broken()


def test_the_sign_of_a_zero_is_seen(call: Call) -> None:
    guards = guards_of(call)
    call.config.offset = -0.0
    assert not guards.hold()
    assert guards.broken() == "the sign of a zero" or guards.broken().startswith("config.offset == 0.0"), (
        "torch 2.15 sees it"
    )


def test_methods_are_seen_with_their_code(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    guards = guards_of(call)
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear, "forward", lambda self, x: x)
        assert not guards.hold() and guards.broken() == "Linear.forward was replaced"
    assert guards.hold()
    with monkeypatch.context() as patch:
        patch.setattr(nn.Linear.forward, "__code__", (lambda self, input: input).__code__)
        assert not guards.hold()
    assert guards.hold()


def test_what_others_watch_is_left_out(call: Call) -> None:
    guards = guards_of(call)
    threads = torch.get_num_threads()
    try:
        torch.set_num_threads(threads + 1)
        with torch.no_grad():
            assert guards.hold()
    finally:
        torch.set_num_threads(threads)
    call.model[0].weight.data = torch.zeros(3, 6)[:, ::2]
    call.model[0].weight.requires_grad_(False)
    assert guards.hold()


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    found: list[object] = []
    monkeypatch.setattr(utils.get_metrics_context(), "_on_exit", lambda *given: found.append(given))
    return found


@pytest.fixture
def reader() -> Iterator[None]:
    handler = logging.NullHandler()
    trace_log.addHandler(handler)
    yield
    trace_log.removeHandler(handler)


def take() -> None:
    with utils.get_metrics_context():
        pass


def test_metrics_are_told_where_nobody_keeps_them_back(told: list[object]) -> None:
    take()
    with metrics_if_heard():
        pass
    take()
    assert len(told) == 2


def test_a_trace_and_its_guards_tell_nothing(told: list[object]) -> None:
    assert internals.trace_full_graph(Small(), (torch.ones(2, 3), torch.ones(1))) is not None
    assert told == []


def test_where_torch_writes_a_structured_trace_both_tell_theirs(told: list[object], reader: None) -> None:
    internals.trace_full_graph(Small(), (torch.ones(2, 3), torch.ones(1)))
    assert len(told) == 2


def test_errors_put_back_who_tells_and_who_logs(told: list[object]) -> None:
    logger = logging.getLogger("torch._dynamo.metrics_context")
    with pytest.raises(KeyError), metrics_if_heard():
        assert logger.disabled
        raise KeyError
    take()
    assert len(told) == 1 and not logger.disabled


def test_new_guards_are_not_timed_meanwhile() -> None:
    measure = torch._dynamo.guards.profile_guard_manager
    with guards_not_timed():
        assert torch._dynamo.guards.profile_guard_manager(None, {}, 1) == 0.0
    assert torch._dynamo.guards.profile_guard_manager is measure


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
