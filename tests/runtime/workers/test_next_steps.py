"""Steps that return with buckets in flight: bit for bit as without, whatever is done between them, and what failures leave."""

from __future__ import annotations

import re
from typing import Any

import pytest
from selections import slow_but
from worker_processes import LazyOutcomes, free_port, told
from worker_training import reference

_USES = [
    [1, "calls_the_model"],
    [2, "saves_the_model"],
    [2, "evaluates"],
    [3, "saves_the_optimizer"],
    [4, "accumulates"],
]
_WRITES = [[1, "loads"], [2, "calls_a_part"], [3, "writes_when_synchronized"], [4, "looks_at_variables"]]
CASES: dict[str, dict[str, Any]] = {
    "2 x 1": {"model": "mlp", "devices": [1, 1], "sizes": [[4, 4]]},
    "uneven, used": {
        "model": "random",
        "devices": [1, 1],
        "sizes": [[4, 4], [4, 4], [4, 2]],
        "between": _USES,
        "steps": 8,
    },
    "written": {"model": "mlp", "devices": [1, 1], "sizes": [[4, 3]], "between": _WRITES, "steps": 7},
    "2 x 2": {"model": "random", "devices": [2, 2], "sizes": [[4, 6]], "between": [[3, "saves_the_model"]]},
    "unfrozen": {  # what is left tells that parameters of one bucket were not updated equally often
        "model": "mlp",
        "devices": [2, 2],
        "sizes": [[4, 4]],
        "between": [[1, "freezes"], [2, "unfreezes"]],
        "options": {"bucket_cap_mb": 4.0, "first_bucket_mb": 1.0},
    },
    "a worker fails": {"model": "mlp", "devices": [1, 1], "sizes": [[4, 4]], "between": [[2, "raises_here"]]},
    "a worker fails in forward": {
        "model": "mlp",
        "devices": [1, 1],
        "sizes": [[4, 4]],
        "between": [[2, "raises_in_forward"]],
    },
    "two parts of a batch": {
        "model": "mlp",
        "devices": [1, 2],
        "sizes": [[4, 8]],
        "optimizer": "SGD",
        "options": {"microbatches": 2},
    },
    "(1, 2, 1)": {
        "model": "random",
        "devices": [1, 2, 1],
        "sizes": [[3, 5, 2], [3, 5, 2], [2, 4, 2]],
        "between": _USES,
    },
    "experts": {
        "model": "mixture",
        "devices": [1, 2],
        "sizes": [[1, 2]],
        "steps": 8,
        "options": {"capture": "autograd", "bucket_cap_mb": 3e-4},
    },
    "Inductor": {
        "model": "wide",
        "devices": [1, 1],
        "sizes": [[4, 4]],
        "options": {"backend": "inductor", "bucket_cap_mb": 0.3},
    },
    "dealt out": {
        "model": "mlp",
        "devices": [1, 1],
        "sizes": [[4, 3]],
        "between": [[1, "calls_the_model"], [2, "saves_the_model"], [3, "evaluates"], [4, "accumulates"]],
        "options": {"shard_optimizer": True},
    },
    "dealt out, (1, 2, 1)": {
        "model": "random",
        "devices": [1, 2, 1],
        "sizes": [[3, 5, 2], [2, 4, 2]],
        "between": [[2, "saves_the_model"], [3, "evaluates"]],
        "options": {"shard_optimizer": True, "exchange": "auto"},
    },
    "dealt out, written": {
        "model": "mlp",
        "devices": [2, 1],
        "sizes": [[4, 3]],
        "between": _WRITES[1:],
        "options": {"shard_optimizer": True},
        "steps": 7,
    },
    "a large layer in two packs": {"model": "words", "devices": [1, 1], "sizes": [[4, 4], [4, 2]], "between": _USES},
    "several devices beside a large layer": {
        "model": "words",
        "devices": [2, 2],
        "sizes": [[4, 6]],
        "between": [[2, "saves_the_model"], [4, "accumulates"]],
        "options": {"microbatches": 2, "bucket_cap_mb": 0.001},
    },
    "several gradients in a bucket of three workers": {
        "model": "words",
        "devices": [1, 2, 1],
        "sizes": [[3, 5, 2], [2, 4, 2]],
        "between": [[3, "evaluates"]],
        "options": {"bucket_cap_mb": 0.001},
    },
    "factors": {"model": "table", "devices": [1, 1], "sizes": [[4, 5]], "options": {"exchange": "factors"}},
}
FAST = ("2 x 1", "a large layer in two packs", "written", "a worker fails in forward", "dealt out")
REFUSED = {
    "refused": {
        "model": "mlp",
        "devices": [1, 1],
        "sizes": [[4, 4]],
        "between": [[2, "writes_in_flight"], [3, "copies"], [4, "writes_state_in_flight"]],
    }
}


def each(size: int, **given: Any) -> list[Any]:
    """How each of three processes runs a case of so many workers."""
    port = free_port()
    return [*({"variables": told(rank, size, port), **given} for rank in range(size)), *[None] * (3 - size)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> LazyOutcomes:
    """What training gives, by case and way: overlapped, again, and without."""
    given: dict[str, list[dict[str, Any] | None]] = {}
    for case, own in {**CASES, **REFUSED}.items():
        ways = ("on", "again", "off") if case == "2 x 1" else ("on", "off") if case in CASES else ("on",)
        for way in ways:
            given[f"{case} {way}"] = each(len(own["devices"]), overlap={**own, "overlaps": way != "off"})
    fast = [name for name in given if name.rpartition(" ")[0] in (*FAST, *REFUSED)]
    return LazyOutcomes(tmp_path_factory.mktemp, given, fast, limit_seconds=150)


def _with_bits(own: dict[str, Any]) -> dict[str, Any]:
    return {key: own[key] for key in ("losses", "values", "state", "counts")}


@pytest.mark.parametrize("case", slow_but(FAST, CASES))
def test_the_bits_are_those_of_steps_that_wait(trained: LazyOutcomes, case: str) -> None:
    for overlapped, waiting in zip(trained[f"{case} on"], trained[f"{case} off"], strict=True):
        if overlapped is not None:
            assert _with_bits(overlapped) == _with_bits(waiting)
            if not case.startswith("a worker fails"):
                assert overlapped["found"] == waiting["found"]
            if case == "factors":  # all that comes last is sent as factors
                assert not any(overlapped["in_flight"])
                continue
            assert "hand_over()" in overlapped["program"] and "hand_over()" not in waiting["program"]
            assert overlapped["in_flight"][0] is False  # the first step makes the optimizer's state
            assert any(overlapped["in_flight"]) and not any(waiting["in_flight"])


def test_two_runs_have_the_same_bits(trained: LazyOutcomes) -> None:
    for one, other in zip(trained["2 x 1 on"], trained["2 x 1 again"], strict=True):
        assert one is None or _with_bits(one) == _with_bits(other)


@pytest.mark.slow
def test_what_fails_on_one_worker_leaves_what_is_in_flight_alone(trained: LazyOutcomes) -> None:
    other, culprit = (own["found"][0] for own in trained["a worker fails on"][:2])
    assert "target" in culprit or "ValueError" in culprit
    assert other.startswith("CommunicationError: training call 4 has failed: worker 1 (")
    assert other.endswith("No parameter was changed. The step may be called again, on all workers.")


def test_a_call_that_fails_in_forward_leaves_counts_and_rates_of_all_buckets_alike(trained: LazyOutcomes) -> None:
    """Some buckets were updated in that call, and others when it had failed; the rate has changed since the call before."""
    for own in trained["a worker fails in forward on"][:2]:
        (refusal, counts) = own["found"][0]
        assert "out of bounds" in refusal and "No parameter was changed" in refusal
        assert counts == [3.0]


def test_explain_tells_what_the_step_before_has_left(trained: LazyOutcomes) -> None:
    (explained, waiting) = (trained[f"2 x 1 {way}"][0]["explained"] for way in ("on", "off"))
    assert "before: in what the step before has left" in " ".join(explained.split())
    assert "before: in what" not in " ".join(waiting.split())


def test_writes_and_copies_while_buckets_are_in_flight_are_refused(trained: LazyOutcomes) -> None:
    for own in trained["refused on"][:2]:
        in_flight, (copied, _), state = own["found"]
        for refusal in (in_flight, state):
            assert refusal.startswith(
                "ExecutionError: parameters or the optimizer's state were written while buckets of the last step were in flight"
            )
            assert "write them again, and from now on call step.synchronize() before you write" in refusal
        assert copied.startswith(
            "ExecutionError: the model was copied or saved while buckets of the last step are in flight"
        )
        assert own["counts"] == [6.0] * len(own["counts"])  # the refused call has made no step


SOON = {"timeout_seconds": 20.0}  # where a worker waits for one that does not come
FAILURES: dict[str, dict[str, Any]] = {
    "step": {"devices": [1, 1], "sizes": [[4, 3]], "culprit": 1, "strikes": "cut", "uses": ["step", "synchronize"]},
    "state_dict": {
        "devices": [1, 1],
        "sizes": [[4, 3]],
        "culprit": 0,
        "strikes": "cut",
        "uses": ["state_dict", "step"],
        "options": SOON,
    },
    "update": {"devices": [1, 1], "sizes": [[4, 3]], "culprit": 1, "strikes": "update", "uses": ["step", "step"]},
    "close": {
        "devices": [1, 1],
        "sizes": [[4, 3]],
        "culprit": 1,
        "strikes": "cut",
        "uses": ["step", "close"],
        "options": SOON,
    },
    "2 x 2": {
        "devices": [2, 2],
        "sizes": [[4, 6]],
        "culprit": 1,
        "strikes": "cut",
        "uses": ["optimizer", "step"],
        "options": SOON,
    },
    "dealt out": {
        "devices": [1, 2],
        "sizes": [[4, 6]],
        "culprit": 1,
        "strikes": "cut",
        "uses": ["step", "state_dict"],
        "options": {"shard_optimizer": True, **SOON},
    },
    "one of two packs": {
        "model": "words",
        "devices": [1, 1],
        "sizes": [[4, 3]],
        "culprit": 1,
        "strikes": "cut",
        "uses": ["step", "step"],
        "options": SOON,
    },
}
FAILURES = {name: {"model": "mlp", **given} for name, given in FAILURES.items()}


FAST_FAILURES = ("step", "update")


@pytest.fixture(scope="module")
def failed(tmp_path_factory: pytest.TempPathFactory) -> LazyOutcomes:
    """What came of each failure in each process."""
    given: dict[str, list[dict[str, Any] | None]] = {}
    for name, own in FAILURES.items():
        folder = str(tmp_path_factory.mktemp("case"))
        given[name] = each(len(own["devices"]), in_flight={**own, "folder": folder})
    return LazyOutcomes(tmp_path_factory.mktemp, given, FAST_FAILURES, limit_seconds=150)


@pytest.mark.parametrize("case", slow_but(FAST_FAILURES, FAILURES))
def test_a_failure_in_flight_surfaces_at_the_next_use_and_leaves_parameters_between_two_steps(
    failed: LazyOutcomes, case: str
) -> None:
    own = failed[case][FAILURES[case]["culprit"]]
    number = 4 if case == "dealt out" else 3  # the optimizer's state was gathered in a call, too
    assert own["failed"].startswith(
        f"CommunicationError: training call {number} has failed when it had returned and its last buckets were in flight: "
    )
    assert "Parameters are between those before and those after that call: bucket" in own["failed"]
    if FAILURES[case]["strikes"] == "cut":
        what = rf"pack {own['lost']} of bucket 0" if case == "one of two packs" else r"bucket \d"
        assert re.search(rf"\({what} could not be exchanged with the other workers: the cable is cut", own["failed"])
    else:
        assert (
            "worker 1 (" in own["failed"]
            and "failed in await_update > update: MemoryError: there is none" in own["failed"]
        )
    if FAILURES[case]["uses"][FAILURES[case]["culprit"]] != "close":
        assert own["failed"].endswith(
            "Load a checkpoint into model and optimizer on all workers, and call the step again."
        )
    assert "parameters are between those before and those after a step" in own["refused"][0]


@pytest.mark.slow
def test_a_bucket_of_which_one_pack_has_arrived_and_the_other_is_lost_is_not_updated(failed: LazyOutcomes) -> None:
    for own in failed["one of two packs"][:2]:
        arrived, lost = own["packs"]["0"]
        assert arrived < lost == own["lost"]
        assert f"pack {lost} of bucket 0 could not be exchanged" in own["failed"]
        assert (
            "Parameters are between those before and those after that call: buckets 1, 2 and 3 of 4 were"
            in own["failed"]
        )


@pytest.mark.parametrize("case", slow_but(FAST_FAILURES, [case for case in FAILURES if case != "close"]))
def test_training_goes_on_from_what_was_restored(failed: LazyOutcomes, case: str) -> None:
    losses, values = reference(FAILURES[case], (0, 1, 2, 3))
    for own in failed[case][:2]:
        assert own["failed"].startswith("CommunicationError: training call ")
        assert own["losses"][-2:] == pytest.approx(losses[-2:], rel=1e-12)
        for name, value in values.items():
            assert own["values"][name] == pytest.approx(value, rel=1e-9, abs=1e-11), name
