"""Metrics that nobody reads are neither taken nor told."""

import logging
from collections.abc import Iterator

import pytest
import torch
from torch._dynamo import utils
from torch._logging._internal import trace_log
from traced_graphs import Small

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.tracing.metrics import guards_not_timed, metrics_if_heard


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
