"""Models that ask the replicas of all workers for values train as one device does on the batches of all workers."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import selections
from torch import nn
from worker_processes import LazyOutcomes, outcome, workers
from worker_training import assert_training, assert_values, made, reference, training, values_of, whole

from mirrorc.packing import EqualPacks

pytestmark = pytest.mark.slow

EVEN: dict[str, Any] = training([2, 2], [[6, 1], [6, 0]], model="coupled", optimizer="SGD")
CASES: dict[str, dict[str, Any]] = {
    "2 x 1": training([1, 1], [[4, 3]], model="coupled", optimizer="SGD"),
    "2 x 2": EVEN,
    "3 x (1, 2, 1)": training([1, 2, 1], [[3, 5, 2], [0, 1, 3]], model="coupled", optimizer="SGD", evaluates=True),
    "synchronized": training([1, 2], [[3, 5], [0, 4]], model="synchronized", optimizer="SGD"),
    "bound, packs": {**EVEN, "options": {"clip_grad_norm": 0.1, "buckets": EqualPacks(3)}},
    "factors": {**EVEN, "options": {"exchange": "factors"}},
    "autocast": {**EVEN, "devices": [1, 1], "autocast": "bfloat16"},  # which leaves 64 bits as they are
    "dealt": {**EVEN, "options": {"shard_optimizer": True}},
    "inductor": {**EVEN, "options": {"backend": "inductor"}},
}
CASES = {name: {"steps": 5, **given} for name, given in CASES.items()}
AGAIN = {"again": CASES["2 x 2"]}
FAULTS: dict[str, dict[str, Any]] = {
    "recovers": training(
        [1, 2], [[4, 4]], model="coupled", optimizer="SGD", steps=3, faults=[[0, 1, "operator"], [1, 0, "operator"]]
    )
}
JOINS: dict[str, dict[str, Any]] = {
    "left": training([1, 1], [[3, 5], [3, 0], [3, 0]], more=[[3, 5]]),
    "the chief leaves": training([2, 1], [[3, 5], [0, 4]]),
}
JOINS = {name: {**given, "model": "coupled", "optimizer": "SGD", "decay": 0.7} for name, given in JOINS.items()}
ACCUMULATES: dict[str, dict[str, Any]] = {
    "accumulates": training(
        [1, 2], model="coupled", optimizer="SGD", calls=[["accumulate", [2, 3]], ["step", [4, 2]], ["step", [4, 0]]]
    )
}
EXACTLY = (1e-12, 1e-12)  # relative and absolute
FAST = ("2 x 1", "recovers", "left")
SELDOM = ("autocast", "dealt", "inductor")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("train", given) for name, given in (CASES | AGAIN | FAULTS).items()}
    cases |= {name: workers("join", given) for name, given in JOINS.items()}
    cases |= {name: workers("calls", given) for name, given in ACCUMULATES.items()}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST, seldom=SELDOM)


@pytest.mark.parametrize(
    "case",
    [
        *(case for case in CASES if case not in SELDOM),
        *selections.exhaustive(*((case,) for case in SELDOM)),
    ],
)
def test_steps_are_those_of_one_device(found: Mapping[str, Any], case: str) -> None:
    given = CASES[case]
    plain = {"synchronized": "statistics"}.get(given["model"], given["model"])
    losses, values = reference({**given, "model": plain}, range(given["steps"]))
    everyone = found[case][: len(given["devices"])]
    for own in everyone:
        assert_training(own, losses, values, *EXACTLY)
        assert own["values"] == everyone[0]["values"], "all have the same bits"
        assert own["schedule"] == everyone[0]["schedule"]


def test_two_runs_have_the_same_bits(found: Mapping[str, Any]) -> None:
    for own, other in zip(found["2 x 2"][:2], found["again"][:2], strict=True):
        assert (own["values"], own["losses"]) == (other["values"], other["losses"])


def test_a_worker_that_fails_wakes_those_that_wait_for_its_values(found: Mapping[str, Any]) -> None:
    losses, values = reference({**FAULTS["recovers"]}, [2])
    first, second = found["recovers"][:2]
    assert "OSError: the disk is full" in second["losses"][0] and "OSError: the disk is full" in first["losses"][1]
    for own, number, rank in ((first, 0, 1), (second, 1, 0)):
        assert f"training call {number + 1} has failed\n  why:  worker {rank} (" in own["losses"][number]
        assert "No parameter was changed\n  fix:  make the call again" in own["losses"][number]
    for own in (first, second):
        assert own["losses"][2] == pytest.approx(losses[0], rel=1e-12)
        assert_values(own["values"], values, *EXACTLY)


@pytest.mark.parametrize("case", [*JOINS])
def test_workers_that_have_left_take_part(found: Mapping[str, Any], case: str) -> None:
    given = JOINS[case]
    losses, values = reference(given, range(len(given["sizes"])))
    everyone = found[case][: len(given["devices"])]
    for rank, own in enumerate(everyone):
        assert_training(own, losses[: sum(sizes[rank] > 0 for sizes in given["sizes"])], values, *EXACTLY)
        assert own["last"] == everyone[0]["last"]


def test_calls_that_accumulate_ask_all_replicas_of_their_own(found: Mapping[str, Any]) -> None:
    model, optimizer = made("coupled", "SGD", seed=0)
    kept = 0
    for number, (what, sizes) in enumerate(ACCUMULATES["accumulates"]["calls"]):
        x, y = whole(number, sizes)
        (nn.functional.cross_entropy(model(x), y) * len(y)).backward()
        kept += len(y)
        if what == "step":
            for parameter in model.parameters():
                parameter.grad /= kept
            optimizer.step()
            optimizer.zero_grad()
            kept = 0
    for own in found["accumulates"][:2]:
        assert_values(own["values"], values_of(model), *EXACTLY)


@pytest.mark.parametrize("fault", ["kill in forward", "stop"])
def test_a_worker_that_is_gone_is_named(tmp_path: Any, fault: str) -> None:
    given = training(
        [1, 1, 1],
        [[4, 4, 4]],
        model="coupled",
        faults=[[2, 2, fault]],
        ends=True,
        options={"timeout": 10.0 if fault == "stop" else 60.0},
    )
    for own in outcome(tmp_path, workers("train", given), num_ended=1)[:2]:
        assert re.search(
            r"(?s)training call 3 has failed\n  why:  worker 2 \(.*No parameter was changed", own["losses"][2]
        )
