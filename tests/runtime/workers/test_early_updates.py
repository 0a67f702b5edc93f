"""Buckets that are updated while others are in flight: a failure in between leaves parameters between two steps, and says so."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
from worker_processes import LazyOutcomes, outcomes, workers
from worker_training import assert_values, reference, training

from mirrorc.packing import ByBytes

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "2 x 1": training([1, 1], [[4, 3]], culprit=1),
    "2 x 2, the chief": training([2, 2], [[4, 3]], culprit=0, optimizer="SGD"),
    "(1, 2, 1)": training([1, 2, 1], [[3, 4, 2]], culprit=1),
}

DEALT: dict[str, dict[str, Any]] = {  # new parameters are lost, and not sums
    "dealt out, 2 x 1": training([1, 1], [[4, 3]], culprit=1, options={"shard_optimizer": True}),
    "dealt out, clipped, (1, 2, 1)": training(
        [1, 2, 1], [[3, 4, 2]], culprit=1, options={"shard_optimizer": True, "clip_grad_norm": 0.1}
    ),
}
LOST = CASES | DEALT
FAST = ("2 x 2, the chief", "dealt out, 2 x 1", "update")


def cases(folder: Any, strikes: str, given: dict[str, dict[str, Any]]) -> dict[str, list[Any]]:
    found = {}
    for number, (name, own) in enumerate(given.items()):
        own_folder = folder / f"case-{number}"
        own_folder.mkdir()
        found[name] = workers("lose", {**own, "strikes": strikes, "folder": str(own_folder)})
    return found


SMALL = {"buckets": ByBytes(0.0005, 0.0005)}
TRAINED: dict[str, dict[str, Any]] = {
    "2 x 1": training([1, 1], [[4, 4], [5, 2]]),
    "2 x 2": training([2, 2], [[6, 1]], optimizer="SGD"),
    "(1, 2, 1)": training([1, 2, 1], [[3, 5, 2], [1, 2, 4]], model="random"),
    "factors, 2 x 2": training([2, 2], [[4, 3]], options={"exchange": "factors"}),
}


FAST_TRAINED = ("2 x 2", "factors, 2 x 2")


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What training gives, with and without early updates; losses and values, by case and whether they are early."""
    given = {}
    for case, own in TRAINED.items():
        for early in (True, False):
            options = {"exchange": "dense", **SMALL, **own.get("options", {}), "early_update": early}  # "auto" measures
            given[f"{case} {early}"] = workers("train", {**own, "options": options})
    fast = [name for name in given if name.rpartition(" ")[0] in FAST_TRAINED]
    return LazyOutcomes(tmp_path_factory.mktemp, given, fast)


@pytest.mark.parametrize("case", [*TRAINED])
def test_early_updates_give_the_same_bits(trained: Mapping[str, Any], case: str) -> None:
    for early, late in zip(trained[f"{case} True"], trained[f"{case} False"], strict=True):
        if early is not None:
            assert early["losses"] == late["losses"] and early["values"] == late["values"]
            assert "update each bucket when its sum is there" in early["program"]
            assert "all sums are waited for before the commit, because another worker may be gone" in late["program"]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder, other = tmp_path_factory.mktemp("cut"), tmp_path_factory.mktemp("update")
    given = cases(folder, "cut", LOST) | {"update": cases(other, "update", {"it": CASES["2 x 1"]})["it"]}
    return LazyOutcomes(tmp_path_factory.mktemp, given, FAST)


@pytest.fixture
def failed_update(found: Mapping[str, Any]) -> list[Any]:
    own: list[Any] = found["update"]
    return own


def test_an_update_that_fails_on_one_worker_leaves_it_alone_between_two_steps(failed_update: list[Any]) -> None:
    other, culprit = failed_update[:2]
    assert "MemoryError: there is none" in culprit["failed"] and "bucket 0 of " in culprit["failed"]
    assert "Parameters are between those before and those after this step: bucket" in culprit["failed"]
    assert (
        "MC6201: training call 3 has failed\n  why:  worker 1 (" in other["failed"] and "MemoryError" in other["failed"]
    )
    assert (
        "The update was made here: parameters are those after this step\n  fix:  load a checkpoint" in other["failed"]
    )
    assert "some parameters are new, others old" in culprit["refused"]["evaluate"]
    said = other["refused"].pop("step")
    assert (
        "it raised ExecutionError: MC5010: a step has failed in the middle of its update" in said
        or "the connection" in said
    )
    assert set(other["refused"].values()) == {"nothing"}
    losses, values = reference(CASES["2 x 1"], range(4))
    for own in (other, culprit):
        assert own["losses"] == pytest.approx(losses, rel=1e-12)
        assert_values(own["values"], values)


@pytest.mark.parametrize("case", [*CASES])
def test_a_connection_that_is_lost_between_updates_leaves_parameters_between_two_steps(
    found: Mapping[str, Any], case: str
) -> None:
    for own in found[case][: len(CASES[case]["devices"])]:
        assert own["failed"].startswith("CommunicationError: MC6201: training call 3 has failed\n  why:  ")
        assert (
            "The update had begun: parameters are between those before and those after this step: bucket 0 of "
            in own["failed"]
        )
        assert own["failed"].endswith(
            " was updated\n  fix:  load a checkpoint into model and optimizer on all workers, and go on"
        )
        assert "the cable is cut" in own["failed"]


@pytest.mark.parametrize("case", [*DEALT])
def test_a_connection_that_is_lost_between_gathers_leaves_parameters_between_two_steps(
    found: Mapping[str, Any], case: str
) -> None:
    for own in found[case][: len(DEALT[case]["devices"])]:
        assert own["failed"].startswith(
            "CommunicationError: MC6201: training call 4 has failed\n  why:  "
        )  # the third gathers the state
        assert "the cable is cut" in own["failed"]
        assert re.search(
            r"The update had begun: parameters are between those before and those after this step: bucket (\d) of (\d) was "
            r"updated, buckets 0.* in part\n  fix:  load a checkpoint into model and optimizer on all workers, and go on$",
            own["failed"],
        )


@pytest.mark.parametrize("case", [*LOST])
def test_nothing_uses_shows_or_saves_them_until_all_is_restored(found: Mapping[str, Any], case: str) -> None:
    for own in found[case][: len(LOST[case]["devices"])]:
        for use, error in own["refused"].items():
            assert "some parameters are new, others old" in error, use
            assert use == "step" or error.startswith("ExecutionError: "), use
        assert (
            "still to be restored: 6 parameters (0.weight, 0.bias, 2.weight and 3 more) and the state of"
            in (own["refused"]["evaluate"])
        )
        assert f"still to be restored: the state of {LOST[case].get('optimizer', 'AdamW')}\n  fix:" in own["half"]
        assert set(own["restored"].values()) == {"nothing"}


@pytest.mark.parametrize("case", [*LOST])
def test_training_goes_on_from_what_was_restored(found: Mapping[str, Any], case: str) -> None:
    losses, values = reference(LOST[case], range(4))
    for own in found[case][: len(LOST[case]["devices"])]:
        assert own["losses"] == pytest.approx(losses, rel=1e-12)
        assert_values(own["values"], values)


def test_the_survivors_of_a_killed_worker_say_what_was_updated(tmp_path: Any) -> None:
    given = {"it": training([1, 2, 1], [[3, 4, 2]], culprit=2)}
    own = outcomes(tmp_path, cases(tmp_path, "kill", given), num_ended=1)["it"]
    for survivor in own[:2]:
        assert survivor["failed"].startswith(
            "CommunicationError: MC6201: training call 3 has failed\n  why:  worker 2 ("
        )
        assert "bucket 0 of " in survivor["failed"]
        assert survivor["failed"].endswith("end all workers, and start them again from a checkpoint")
        assert "some parameters are new, others old" in survivor["refused"]["model"]
        assert set(survivor["restored"].values()) == {"nothing"}
        assert "these workers can make no further call\n  why:  worker 2 (" in survivor["over"]
        assert survivor["seconds"] < 30
