"""Workers whose data ends at different times: those that have left take part until all have, and all are as one process."""

from collections.abc import Mapping
from typing import Any

import pytest
import selections
import torch
from two_steps import adversaries_on_one_device
from worker_processes import LazyOutcomes, outcome, workers
from worker_training import assert_training, reference, training

CASES: dict[str, dict[str, Any]] = {
    "uneven": training([1, 2, 1], [[3, 5, 2], [3, 5, 2], [3, 5, 0], [3, 0, 0], [3, 0, 0]], decay=0.7, more=[[3, 5, 2]]),
    "the chief leaves": training([1, 1], [[3, 5], [0, 5], [0, 5]], decay=0.7),
    "factors": training([1, 1], [[3, 5], [0, 5], [0, 5]], model="table", decay=0.7, options={"exchange": "factors"}),
    "factors, prepared": training([1, 1], [[3, 0], [3, 0]], decay=0.7, prepares=True, options={"exchange": "factors"}),
    "statistics": training([1, 1], [[4, 6], [4, 0], [4, 0]], model="random", decay=1.0),
    "late": training([1, 1], [[3, 2], [3, 0]], decay=0.7, pause=5.0, options={"timeout": 2.0}),
    "late, prepared": training([1, 1], [[3, 0]], decay=0.7, pause=3.5, prepares=True, options={"timeout": 1.0}),
    "raises": training([1, 1], [[3, 5], [3, 0], [3, 0]], decay=0.7, fault=[0, 2, "raise"]),
    "never": training([1, 1], [[3, 0], [3, 0]], decay=0.7),
    "prepared": training([1, 1], [[3, 0], [3, 0]], decay=0.7, prepares=True),
}
TWO = ("together", "other", "gone", "nested", "within", "gathers", "in turn", "closed")  # see `two_steps`

PARITY = ("uneven", "the chief leaves", "late", "late, prepared", "prepared", "factors", "factors, prepared")
SLOW = ("factors, prepared", "late", "late, prepared", "within", "gathers", "in turn", "closed")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("join", given) for name, given in CASES.items()}
    cases |= {how: workers("two", how, size=2) for how in TWO}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, cases.keys() - set(SLOW))


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but(set(PARITY) - set(SLOW), PARITY))
def test_workers_that_have_left_make_the_updates_of_all(found: Mapping[str, Any], case: str) -> None:
    given = CASES[case]
    losses, values = reference(given, range(len(given["sizes"])))
    for rank, own in enumerate(found[case][: len(given["devices"])]):
        num_own = sum(sizes[rank] > 0 for sizes in given["sizes"])
        assert_training(own, losses[:num_own], values)
        assert own["rate"] == pytest.approx(0.05 * 0.7**num_own), "its scheduler stands still"


@pytest.mark.slow
def test_all_go_on_together_after_the_block(found: Mapping[str, Any]) -> None:
    first, *others = found["uneven"]
    for own in others:
        assert own["later"] == first["later"] and own["last"] == first["last"]


def test_workers_that_have_left_do_not_count_in_buffers(found: Mapping[str, Any]) -> None:
    one, other = found["statistics"][:2]
    assert one["values"] == other["values"] and one["values"]["1.num_batches_tracked"] == [3.0]


def test_an_error_in_the_loop_of_one_worker_ends_those_that_have_left(found: Mapping[str, Any]) -> None:
    one, other = found["raises"][:2]
    assert one["error"] == "OSError: the data is gone" and len(one["losses"]) == 2
    assert other["error"].startswith("CommunicationError: MC6201: training call 3 has failed\n  why:  worker 0 (")
    assert "it raised OSError: the data is gone\n  now:  No parameter was changed" in other["error"]


def test_a_worker_that_has_never_called_the_step_is_named(found: Mapping[str, Any]) -> None:
    one, other = found["never"][:2]
    assert other["error"].startswith(
        "ExecutionError: MC6302: this worker has left step.join() without any call of the step"
    )
    assert "worker 1 (" in one["error"] and "without any call of the step" in one["error"]


@pytest.mark.parametrize(
    ("case", "what"),
    [
        ("nested", "ExecutionError: MC6302: step.join() was entered"),
        *selections.slow(
            ("within", "ExecutionError: MC6302: a step was called"),
            ("gathers", "ExecutionError: MC6302: step.gather_optimizer_state() was called"),
        ),
    ],
)
def test_two_steps_in_the_block_of_one_are_refused_at_once_on_all_workers(
    found: Mapping[str, Any], case: str, what: str
) -> None:
    one, other = found[case][:2]
    assert one["refused"] == other["refused"] and one["refused"].startswith(what)
    assert "inside of step.join() of another step" in one["refused"] and "mirrorc.join(" in one["refused"]
    assert one["weights"] == other["weights"], "blocks in turn train both"


def test_two_steps_in_one_block_are_as_in_one_process(found: Mapping[str, Any]) -> None:
    one, other = found["together"][:2]
    assert one["weights"] == other["weights"]
    for own, expected in zip(one["weights"], adversaries_on_one_device(), strict=True):
        assert torch.allclose(torch.tensor(own), torch.tensor(expected), rtol=1e-9, atol=1e-11)


def test_workers_that_call_different_steps_of_a_block_are_told_so(found: Mapping[str, Any]) -> None:
    one, other = found["other"][:2]
    assert one["refused"] == other["refused"]
    assert "workers differ in which step of mirrorc.join() they call\n  why:  worker 0 " in one["refused"]
    assert "the step: number 0 of those" in one["refused"] and "the step: number 1 of those" in one["refused"]
    assert one["weights"] == other["weights"], "blocks in turn train both"


def test_an_error_in_a_block_of_two_steps_ends_the_part_of_those_that_have_left(found: Mapping[str, Any]) -> None:
    one, other = found["gone"][:2]
    assert other["refused"] == "MirrorcError: the data is gone"
    assert one["refused"].startswith("CommunicationError: MC6201: training call ") and "worker 1 (" in one["refused"]
    assert "it raised MirrorcError: the data is gone\n  now:  No parameter was changed" in one["refused"]
    assert one["weights"] == other["weights"], "blocks in turn train both"


@pytest.mark.slow
def test_blocks_of_two_steps_in_turn_train_both(found: Mapping[str, Any]) -> None:
    one, other = found["in turn"][:2]
    assert "refused" not in one and one["weights"] == other["weights"]


@pytest.mark.slow
def test_a_worker_that_has_closed_its_prepared_step_is_not_waited_for(found: Mapping[str, Any]) -> None:
    one = found["closed"][0]
    assert one["refused"].startswith("CommunicationError: MC6201: training call 1 has failed\n  why:  worker 1 (")
    assert "it has closed its step" in one["refused"]


@pytest.mark.slow
def test_a_worker_that_is_killed_ends_those_that_have_left(tmp_path: Any) -> None:
    given = training([1, 1], [[3, 5], [0, 5], [0, 5]], decay=0.7, fault=[1, 2, "kill"])
    one = outcome(tmp_path, workers("join", given, num_processes=2), num_ended=1)[0]
    assert "training call 3 has failed\n  why:  worker 1 (" in one["error"]
    assert "No parameter was changed\n  fix:  end all workers" in one["error"]


@pytest.mark.slow
def test_a_worker_that_is_killed_in_a_block_of_two_steps_ends_those_that_have_left_it(tmp_path: Any) -> None:
    one = outcome(tmp_path, workers("two", "killed", 2, num_processes=2), num_ended=1)[0]
    assert (
        one["refused"].startswith("CommunicationError: MC6201: training call ")
        and " has failed\n  why:  worker 1 (" in one["refused"]
    )
    assert "No parameter was changed\n  fix:  end all workers" in one["refused"]
