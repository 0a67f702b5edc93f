"""Gradients are clipped, scaled and checked as in one process where each worker has the sum of its part of them alone."""

import math
from collections.abc import Mapping
from typing import Any

import pytest
import selections
from sharded_habits import reference
from worker_processes import LazyOutcomes, workers
from worker_training import training

from mirrorc.packing import ByBytes

SMALL = {"buckets": ByBytes(0.001, 0.0005)}
STEPS: list[list[Any]] = [["step", [4, 2]], ["step", [2, 4]], ["step", [4, 2]], ["step", [4, 0]]]
OF_THREE: list[list[Any]] = [["step", [3, 5, 2]], ["step", [0, 5, 2]], ["step", [3, 5, 2]], ["step", [3, 5, 2]]]
ADDED: list[list[Any]] = [["accumulate", [3, 2, 2]], ["accumulate", [0, 2, 2]], ["step", [3, 5, 2]]]
CASES: dict[str, dict[str, Any]] = {
    "norm, 2 x 1": training([1, 1], calls=STEPS, bound={"max": 0.1, "type": 2.0}),
    "largest, 2 x 2": training([2, 2], calls=STEPS, bound={"max": 0.01, "type": math.inf}),
    "3-norm and value, accumulated": training(
        [1, 2, 1],
        calls=[OF_THREE[0], *ADDED, OF_THREE[1]],
        bound={"max": 0.2, "type": 3.0},
        options={**SMALL, "clip_grad_value": 0.02},
    ),
    "groups": training(
        [1, 2, 1],
        calls=OF_THREE,
        groups=[[0, 2], [2, 3], [3, 6]],
        bound=[{"max": 0.1, "type": 2.0}, None, {"max": 0.02, "type": math.inf}],
    ),
    "mixed": training([1, 1], calls=STEPS, is_mixed=True, bound={"max": 0.1, "type": 1.5}),
    "mixed, 3 x (1, 2, 1)": training([1, 2, 1], calls=OF_THREE, is_mixed=True, bound={"max": 0.1, "type": 2.0}),
    "scaled": training(
        [1, 2, 1],
        calls=[*OF_THREE[:2], ["step", [3, 5, 2], [1, "nan"]], *ADDED, ["step", [3, 5, 2], [2, "nan"]], OF_THREE[3]],
        scaler={"init_scale": 1024.0, "growth_interval": 2},
        bound={"max": 0.1, "type": 2.0},
    ),
    "scaled alone": training(
        [1, 1],
        calls=[STEPS[0], ["step", [2, 4], [1, "nan"]], *STEPS[1:]],
        scaler={"init_scale": 8.0, "growth_interval": 3},
        options={**SMALL, "microbatches": 2},
    ),
    "factors, clipped and scaled": training(
        [1, 2, 1],
        calls=[*OF_THREE[:2], ["step", [3, 5, 2], [1, "nan"]], *ADDED, OF_THREE[3]],
        scaler={"init_scale": 1024.0, "growth_interval": 2},
        bound={"max": 0.1, "type": 2.0},
        options={**SMALL, "exchange": "factors", "clip_grad_value": 0.02},
    ),
    "checked": training(
        [1, 2, 1],
        calls=[OF_THREE[0], ["step", [3, 5, 2], [1, "nan"]], *OF_THREE[1:]],
        options={**SMALL, "check_finite": True},
    ),
    "skips": training(
        [1, 1],
        calls=[STEPS[0], ["step", [2, 2], [1, "nan"]], *STEPS[1:]],
        options={**SMALL, "check_finite": "skip"},
        bound={"max": 0.1, "type": 2.0},
    ),
}
CASES = {name: {"options": SMALL, **given} for name, given in CASES.items()}
FAST = ("groups", "factors, clipped and scaled", "checked")


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("habits", given) for name, given in CASES.items()}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST)


def is_near(own: Any, expected: Any) -> bool:
    return own == pytest.approx(expected, rel=1e-10, abs=1e-12, nan_ok=True)


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but(FAST, CASES))
def test_steps_norms_and_state_are_those_of_one_process(found: Mapping[str, Any], case: str) -> None:
    given = CASES[case]
    expected = reference(given)
    for own in found[case][: len(given["devices"])]:
        for loss, wanted in zip(own["losses"], expected["losses"], strict=True):
            assert isinstance(loss, str) or is_near(loss, wanted)
        norms, wanted = ([one for one in each["norms"] if not any(map(math.isnan, one))] for each in (own, expected))
        assert len(norms) == len(wanted) and all(map(is_near, norms, wanted))
        assert own["scales"] == expected["scales"]
        for what in ("values", "state"):
            assert own[what].keys() == expected[what].keys()
            for name, values in expected[what].items():
                assert is_near(own[what][name], values), name


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but(FAST, CASES))
def test_all_workers_decide_and_clip_by_the_same_bits(found: Mapping[str, Any], case: str) -> None:
    first, *others = found[case][: len(CASES[case]["devices"])]
    assert "= scatter_sums(" in first["program"]
    for own in others:
        for what in ("norms", "skipped", "scales", "values", "state"):
            assert str(own[what]) == str(first[what]), what


@pytest.mark.slow
def test_what_is_not_finite_on_one_worker_is_one_error_on_all(found: Mapping[str, Any]) -> None:
    """It counts the elements of all workers' parts, of which none has all."""
    (error,) = {own["losses"][1] for own in found["checked"]}
    assert error.startswith("NonFiniteError: MC5101: worker 1 (") and "): the loss on cpu:0 is nan\n" in error
    assert (
        "the reduced gradient of '0.weight' is not finite (65 of 65 elements, such as nan), and so is that of 5 other"
        in error
    )
    assert "No parameter was changed" in error


@pytest.mark.slow
def test_skipped_steps_leave_no_worker_behind(found: Mapping[str, Any]) -> None:
    for own in found["skips"][:2]:
        assert own["skipped"] == [0, 1, 1, 1, 1] and "otherwise=skip" in own["program"]
