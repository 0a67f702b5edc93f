"""`step.gradients` over several workers: each gets the gradient that one process has of all examples of all of them."""

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
import selections
from worker_gradients import reference
from worker_processes import LazyOutcomes, workers
from worker_training import assert_values, training

ALONE = {"has_optimizer": False}
CASES: dict[str, dict[str, Any]] = {
    "2 x 1": training(
        [1, 1],
        calls=[
            *(["gradients", [4, 2]], ["updates", [1, 5]], ["closure", [3, 3]], ["updates", [0, 4]]),
            *(["updates", [4, 2]], ["updates", [4, 2]]),
        ],
        **ALONE,
    ),
    "3 x (1, 2, 1)": training(
        [1, 2, 1],
        calls=[["updates", [3, 5, 2]], ["step", [2, 3, 4]], ["updates", [1, 1, 1]], ["step", [2, 3, 4]]],
        options={"check_finite": True, "check_replicas_every": 1},
    ),
    "factors": training(
        [2, 2],
        model="table",
        optimizer="SGD",
        calls=[["step", [4, 3]], ["updates", [4, 5]], ["step", [4, 3]], ["updates", [4, 5]]],
        options={"exchange": "factors"},
    ),
    "rows": training(
        [1, 2], model="rows", optimizer="SGD", calls=[["gradients", [4, 3]], ["gradients", [3, 5]]], **ALONE
    ),
    "branching": training([1, 1], model="branching", calls=[["updates", [4, 3]], ["updates", [3, 5]]], **ALONE),
    "unused": training([1, 2], model="mixture", calls=[["gradients", [1, 2]], ["gradients", [3, 1]]], **ALONE),
    "compressed": training(
        [1, 1], calls=[["gradients", [4, 3]], ["gradients", [3, 5]]], options={"compression": "bfloat16"}
    ),
    "dealt out": training(
        [1, 1],
        optimizer="SGD",
        calls=[["gradients", [4, 3]], ["step", [4, 3]], ["gradients", [3, 5]]],
        options={"shard_optimizer": True},
    ),
}
MODULES: dict[str, dict[str, Any]] = {
    "module": training(
        [1, 2],
        calls=[
            *(
                ["gradients", [4, 2]],
                ["updates", [1, 5]],
                ["updates", [4, 2]],
                ["gradients", [2, 3]],
                ["updates", [0, 3]],
            ),
            *(["closure", [3, 3]], ["updates", [4, 2]]),
        ],
        is_module=True,
    ),
    "plain module": training(
        [1, 2],
        model="branching",
        calls=[["updates", [4, 3]], ["gradients", [3, 5]], ["updates", [2, 4]]],
        is_module=True,
    ),
    "plain module with branches": training(
        [1, 1], model="mixture", calls=[["updates", [1, 2]], ["gradients", [3, 1]], ["updates", [2, 2]]], is_module=True
    ),
    "module of factors": training(
        [1, 1],
        model="table",
        calls=[["gradients", [4, 2]], ["updates", [1, 5]], ["updates", [0, 4]], ["updates", [4, 2]]],
        options={"exchange": "factors"},
        is_module=True,
    ),
    "module of factors on more devices": training(
        [2, 2],
        model="table",
        optimizer="SGD",
        calls=[["gradients", [4, 3]], ["updates", [4, 5]], ["updates", [4, 3]]],
        options={"exchange": "factors"},
        is_module=True,
    ),
    "module frozen first": training(
        [1, 1],
        calls=[["frozen", [4, 2]], ["updates", [4, 2]], ["frozen", [3, 3]], ["frozen", [3, 3]], ["updates", [4, 2]]],
        options={"exchange": "factors"},
        is_module=True,
    ),
    "module that meets": training(
        [1, 2],
        model="synchronized",
        optimizer="SGD",  # Adam's first steps are as long where a gradient is zero but for rounding
        calls=[
            ["updates", [4, 2]],
            ["updates", [1, 5]],
            ["evaluates", [0, 3]],
            ["updates", [0, 5]],
            ["gradients", [3, 3]],
        ],
        is_module=True,
    ),
    "chain": training(
        [1, 2],
        model="twins",
        optimizer="SGD",
        behind="synchronized",
        calls=[["updates", [4, 2]], ["updates", [0, 5]], ["gradients", [3, 3]]],
        is_module=True,
    ),
    "module that gathers": training(
        [2, 1],
        model="coupled",
        optimizer="SGD",
        calls=[
            *(["fails", [3, 3]], ["updates", [4, 2]], ["updates", [4, 2]], ["gradients", [3, 3]]),
            ["misshapen", [3, 3]],
        ],
        is_module=True,
    ),
    "module with a norm": training(
        [1, 1], model="statistics", calls=[["updates", [4, 4]], ["updates", [4, 4]]], is_module=True
    ),
    "module that evaluates first": training(
        [1, 1], calls=[["evaluates", [3, 3]], ["updates", [4, 2]], ["updates", [3, 3]]], is_module=True
    ),
}
UNLIKE: dict[str, Any] = training(
    [1, 1],
    calls=[
        *(
            ["gradients", [2, 2]],
            ["unlike", [2, 2], ["gradients", "step"]],
            ["unlike", [2, 2], ["accumulate", "gradients"]],
        ),
        *(["joined", [2, 2]], ["accumulate", [2, 2]], ["gradients", [2, 2]]),
    ],
)
BROKEN: dict[str, Any] = training(
    [1, 2], calls=[["updates", [2, 4]], ["gradients", [2, 3]], ["fails", [2, 3]], ["updates", [2, 3]]], **ALONE
)
TESTED_APART = ("module that gathers", "module with a norm", "module that evaluates first")
FAST = ("2 x 1", "module", "module with a norm", "unlike")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {
        name: workers("gradients", given)
        for name, given in (CASES | MODULES | {"unlike": UNLIKE, "broken": BROKEN}).items()
    }
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST)


@pytest.mark.parametrize("name", selections.slow_but(FAST, CASES))
def test_each_worker_has_the_gradient_of_all_examples(found: Mapping[str, Any], name: str) -> None:
    given = CASES[name]
    expected = reference(given)
    for own in found[name][: len(given["devices"])]:
        assert not own["errors"]
        assert own["losses"] == pytest.approx(expected["losses"], rel=1e-9)
        for gradients, those in zip(own["gradients"], expected["gradients"], strict=True):
            assert_values(gradients, those)
        assert_values(own["values"], expected["values"])
        assert (own["gradients"], own["values"]) == (found[name][0]["gradients"], found[name][0]["values"])


@pytest.mark.parametrize(
    "name",
    selections.slow_but(FAST, [name for name in MODULES if name not in TESTED_APART]),
)
def test_a_module_has_the_gradient_of_all_examples(found: Mapping[str, Any], name: str) -> None:
    expected = reference(MODULES[name])
    for own in found[name][:2]:
        assert not own["errors"]
        for gradients, those in zip(own["gradients"], expected["gradients"], strict=True):
            assert_values(gradients, those)
        assert_values(own["values"], expected["values"])
        sends_factors = MODULES[name].get("options", {}).get("exchange") == "factors"
        assert bool(own["as_factors"]) == sends_factors
        repeated = [i for i, (a, b) in enumerate(itertools.pairwise(MODULES[name]["calls"]), 1) if a == b]
        assert all(own["compilations"][i] == own["compilations"][i - 1] for i in repeated)


def test_a_module_has_the_mean_of_statistics(found: Mapping[str, Any]) -> None:
    first, other = found["module with a norm"][:2]
    assert not first["errors"] and other == {**first, "losses": other["losses"]}


@pytest.mark.slow
def test_a_forward_that_fails_on_one_worker_ends_on_all_and_can_be_repeated(found: Mapping[str, Any]) -> None:
    given = MODULES["module that gathers"]
    expected = reference({**given, "calls": given["calls"][1:-1]}, skips=0)
    for rank, own in enumerate(found["module that gathers"][:2]):
        error, other = own["errors"]
        assert ("worker_training.py" if rank else "worker 1") in error and "the disk is full" in error
        assert other.startswith("MC2103" if rank else "MC6201") and "cannot be multiplied" in other
        for gradients, those in zip(own["gradients"][1:-1], expected["gradients"], strict=True):
            assert_values(gradients, those)
        assert_values(own["values"], expected["values"])


@pytest.mark.slow
def test_values_that_a_module_takes_over_after_an_evaluation_are_no_writes(found: Mapping[str, Any]) -> None:
    given = MODULES["module that evaluates first"]
    expected = reference({**given, "calls": given["calls"][1:]}, skips=0)
    for own in found["module that evaluates first"][:2]:
        assert not own["errors"]
        assert_values(own["values"], expected["values"])


def test_calls_that_differ_and_those_that_are_not_exact_are_refused_on_all_workers(found: Mapping[str, Any]) -> None:
    for own in found["unlike"][:2]:
        first, second, third, last = own["errors"]
        assert "step.gradients()" in first and "the step itself" in first
        assert "step.gradients()" in second and "step.accumulate()" in second
        assert "inside of step.join()" in third
        assert "in the middle of an accumulation" in last
        assert all(gradients == own["gradients"][0] for gradients in own["gradients"][:4])


@pytest.mark.slow
def test_a_call_that_fails_on_one_worker_leaves_the_gradients_of_all(found: Mapping[str, Any]) -> None:
    expected = reference({**BROKEN, "calls": [call for call in BROKEN["calls"] if call[0] != "fails"]}, skips=2)
    for own in found["broken"][:2]:
        (error,) = own["errors"]
        assert "the disk is full" in error
        assert own["gradients"][2] == own["gradients"][1]
        assert_values(own["gradients"][1], expected["gradients"][1])
        assert_values(own["values"], expected["values"])
