"""Gradients of several calls over several workers: the update is that of one process on all examples of all of them."""

from collections.abc import Mapping
from typing import Any

import pytest
from worker_habits import reference
from worker_processes import LazyOutcomes, workers
from worker_training import assert_values, training

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "2 x 1": training(
        [1, 1],
        calls=[
            *(["accumulate", [4, 2]], ["accumulate", [1, 2]], ["step", [1, 4]], ["step", [1, 4]]),
            *(["accumulate", [0, 2]], ["zero_grad", [1, 4]], ["accumulate", [4, 0]], ["step", [1, 4]]),
        ],
    ),
    "2 x 2, factors": training(
        [2, 2],
        model="table",
        calls=[
            *(["step", [4, 3]], ["accumulate", [4, 5]], ["step", [4, 3]]),
            *(["step", [4, 3]], ["accumulate", [4, 5]], ["step", [4, 3]]),
        ],
        options={"exchange": "factors", "clip_grad_norm": 0.1},
    ),
    "3 x (1, 2, 1)": training(
        [1, 2, 1],
        optimizer="SGD",
        calls=[["accumulate", [3, 5, 2]], ["accumulate", [0, 1, 4]], ["step", [1, 2, 3]], ["step", [1, 2, 3]]],
    ),
    "dealt out": training(
        [1, 2, 1],
        calls=[["step", [3, 2, 4]], ["accumulate", [3, 5, 2]], ["step", [1, 2, 3]], ["step", [1, 2, 3]]],
        options={"shard_optimizer": True, "check_replicas_every": 1},
    ),
    "sum": training([1, 1], optimizer="SGD", calls=[["accumulate", [1, 2]], ["step", [2, 1]]], is_sum=True),
    "dropped by one": training(
        [1, 1],
        calls=[
            *(["accumulate", [4, 2]], ["nothing", [1, 1], [0, "zero_grad"]], ["step", [2, 5]], ["accumulate", [4, 2]]),
            *(["nothing", [1, 1], [1, "zero_grad"]], ["accumulate", [3, 1]], ["step", [2, 5]]),
        ],
        options={"exchange": "factors"},
    ),  # others keep gradients, also of more calls
    "left": training(
        [1, 2, 1],
        calls=[
            *(["accumulate", [3, 4, 2]], ["accumulate", [3, 4, 0]], ["step", [3, 4, 0]], ["accumulate", [3, 4, 0]]),
            *(["step", [3, 0, 0]], ["step", [3, 0, 0]], ["accumulate", [3, 0, 0]], ["step", [3, 0, 0]]),
        ],
        joins=True,
    ),
    "recovers": training(
        [1, 1],
        calls=[
            *(["accumulate", [4, 2]], ["accumulate", [4, 2], [1, "fails"]], ["accumulate", [4, 2]]),
            *(["step", [2, 5], [0, "fails"]], ["step", [2, 5]]),
        ],
    ),
}
FAST = ("2 x 1", "left", "recovers", "alone")
ALONE: dict[str, Any] = training(
    [1, 1],
    calls=[
        *(["step", [2, 2], [1, "accumulate"]], ["step", [2, 2]], ["accumulate", [2, 3]]),
        *(["accumulate", [2, 3], [0, "step"]], ["step", [2, 2]]),
    ],
    options={"exchange": "factors"},
)  # the first call is one in which all tell each other what they may send as factors


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("calls", given) for name, given in (CASES | {"alone": ALONE}).items()}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST)


def assert_as_in_one_process(outcomes: list[Any], given: dict[str, Any]) -> None:
    losses, values = reference(given)
    for rank, own in enumerate(outcomes):
        calls = zip(own["losses"], losses, strict=False)  # one that has left makes fewer
        for loss, expected in calls:
            assert expected is None or loss == pytest.approx(expected, rel=1e-9), rank
        assert_values(own["values"], values)
        assert own["values"] == outcomes[0]["values"]


@pytest.mark.parametrize("case", [*CASES])
def test_updates_are_those_of_one_process_on_all_examples(found: Mapping[str, Any], case: str) -> None:
    assert_as_in_one_process(found[case][: len(CASES[case]["devices"])], CASES[case])


def test_each_worker_counts_its_own_examples(found: Mapping[str, Any]) -> None:
    assert found["2 x 1"][0]["kept"] == [4, 5, 0, 0, 0, 0, 4, 0]
    assert found["2 x 1"][1]["kept"] == [2, 4, 0, 0, 2, 0, 0, 0]


def test_a_call_that_fails_on_one_worker_leaves_the_sums_of_all(found: Mapping[str, Any]) -> None:
    for rank, own in enumerate(found["recovers"][:2]):
        assert all("OSError: the disk is full" in own["losses"][number] for number in (1, 3))
        assert own["kept"] == [[4, 4, 8, 8, 0], [2, 2, 4, 4, 0]][rank]


def test_an_accumulation_on_one_worker_alone_is_refused_by_all(found: Mapping[str, Any]) -> None:
    one, other = found["alone"][:2]
    for number, kept in ((0, [0, 0]), (3, [2, 3])):
        assert one["losses"][number] == other["losses"][number]
        assert one["losses"][number].startswith(
            "CommunicationError: MC6301: workers differ in what they call\n  why:  worker 0 ("
        )
        assert "step.accumulate()" in one["losses"][number] and "the step itself" in one["losses"][number]
        assert [one["kept"][number], other["kept"][number]] == kept
    assert_as_in_one_process([one, other], ALONE)
