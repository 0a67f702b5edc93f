import logging

import pytest

from mirrorc.errors import CommunicationError
from mirrorc.runtime.state.shared import in_flight_step
from mirrorc.runtime.state.shared.in_flight_step import UnfinishedStep, finish_steps


def test_whoever_uses_a_parameter_has_the_step_finished() -> None:
    made: list[str] = []

    def finish(name: str, step: list[UnfinishedStep]) -> None:
        made.append(name)
        step[0].end()

    one: list[UnfinishedStep] = []
    other: list[UnfinishedStep] = []
    one.append(UnfinishedStep([1, 2], [3], lambda: finish("one", one)))
    other.append(UnfinishedStep([5], [0], lambda: finish("other", other)))
    finish_steps([7])
    finish_steps([2], besides=one[0])
    assert made == []
    finish_steps([2, 9])
    finish_steps([2, 9])
    assert made == ["one"]
    in_flight_step._finish_all()
    assert made == ["one", "other"]
    in_flight_step._finish_all()
    assert made == ["one", "other"]


def test_at_exit_a_failure_is_told_and_the_others_are_finished(caplog: pytest.LogCaptureFixture) -> None:
    made: list[UnfinishedStep] = []

    def fail() -> None:
        raise CommunicationError("the cable is cut")

    failing = UnfinishedStep([1], [0], fail)
    other = UnfinishedStep([2], [0], lambda: made.append(other))
    try:
        with caplog.at_level(logging.WARNING):
            in_flight_step._finish_all()
        assert made == [other]
        assert "the last step was not finished when the process ended: the cable is cut" in caplog.text
    finally:
        failing.end()
        other.end()


def test_a_forked_process_leaves_the_steps_of_its_parent_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    step = UnfinishedStep([1], [0], lambda: pytest.fail("it is the parent's"))
    try:
        monkeypatch.setattr(in_flight_step.os, "getpid", lambda: -1)
        finish_steps([1])
        in_flight_step._finish_all()
    finally:
        step.end()
