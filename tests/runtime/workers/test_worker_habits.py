"""Options that steps over several workers have as those of one process do: with the same numbers, and errors on all workers."""

from collections.abc import Mapping
from typing import Any

import pytest
import selections
import torch
from worker_habits import reference
from worker_processes import LazyOutcomes, workers
from worker_training import assert_values, training

STEPS: list[list[Any]] = [["step", [4, 2]], ["step", [2, 4]], ["step", [4, 2]], ["step", [4, 0]]]
OF_THREE: list[list[Any]] = [["step", [3, 5, 2]], ["step", [3, 5, 2]], ["step", [0, 5, 2]], ["step", [3, 5, 2]]]
CASES: dict[str, dict[str, Any]] = {
    "whole, 2 x 1": training([1, 1], optimizer="whole", calls=[*STEPS, ["accumulate", [2, 1]], STEPS[0]]),
    "whole, 2 x 2": training(
        [2, 2], optimizer="Adafactor", calls=STEPS, options={"clip_grad_norm": 0.1, "check_finite": True}
    ),
    "whole, left": training(
        [1, 1], optimizer="whole", calls=[["step", [4, 2]], ["step", [0, 3]], ["step", [0, 2]]], joins=True
    ),
    "noisy": training([1, 2, 1], optimizer="noisy", calls=OF_THREE),
    "drifts": training([1, 1], optimizer="drifts", calls=STEPS[:2]),
    "skips": training(
        [1, 2, 1],
        calls=[OF_THREE[0], ["step", [3, 5, 2], [1, "nan"]], ["step", [0, 5, 2], [2, "nan"]], OF_THREE[1]],
        options={"check_finite": "skip", "clip_grad_norm": 0.1},
    ),
    "refuses": training(
        [1, 1],
        calls=[
            *(STEPS[0], ["step", [2, 2], [1, "nan"]], ["accumulate", [2, 3]], ["accumulate", [2, 2], [0, "nan"]]),
            *(STEPS[1], STEPS[2]),
        ],
        options={"check_finite": True},
    ),
    "bound": training([1, 2, 1], calls=OF_THREE, options={"clip_grad_norm": 0.1}),
    "compares": training([1, 2], calls=[*STEPS, *STEPS], options={"check_replicas_every": 2}),
    "bad memory": training(
        [1, 1],
        calls=[*STEPS[:2], ["step", [4, 2], [1, "flip parameter"]], ["step", [4, 2]], ["step", [4, 2]]],
        options={"check_replicas_every": 2},
    ),
    "bad state": training(
        [1, 1],
        calls=[STEPS[0], ["accumulate", [2, 2]], ["step", [4, 2], [0, "flip exp_avg"]]],
        options={"check_replicas_every": 2},
    ),
    "evaluates alone": training(
        [1, 1],
        model="random",
        calls=[STEPS[0], ["step", [4, 2], [0, "evaluates"]], STEPS[0]],
        options={"check_replicas_every": 1},
    ),
    "writes other values": training(
        [1, 2], calls=[STEPS[0], ["step", [2, 4], [0, "halve"], [1, "double"]], *STEPS[:2]]
    ),
    "writes elsewhere": training(
        [1, 1], calls=[*STEPS[:2], ["step", [2, 4], [0, "halve"], [1, "halve exp_avg"]], *STEPS[:2]]
    ),
    "writes and evaluates": training(
        [1, 1], calls=[STEPS[0], ["step", [2, 4], [0, "halve"], [0, "evaluates"]], *STEPS[:2]]
    ),
    "writes and looks": training([1, 2], calls=[STEPS[0], ["step", [2, 4], [1, "double"], [1, "looks"]], *STEPS[:2]]),
    "writes beside state of another dtype": training(
        [1, 1], optimizer="NAdam", calls=[*STEPS[:2], ["step", [2, 4], [0, "halve"]], *STEPS[:2]]
    ),
    "writes alike": training(
        [1, 2],
        calls=[STEPS[0], ["step", [2, 4], *([r, w] for r in (0, 1) for w in ("halve", "double exp_avg"))], STEPS[0]],
    ),
    "objects": training([1, 1], optimizer="keeps", calls=STEPS[:3], options={"check_replicas_every": 1}),
    "bad object": training([1, 1], optimizer="keeps what drifts", calls=STEPS[:2], options={"check_replicas_every": 1}),
}
FAST = ("whole, 2 x 2", "drifts", "skips", "bound", "bad memory", "writes other values", "writes and evaluates")
AS_ONE_PROCESS = [
    name for name in CASES if name not in ("drifts", "bad memory", "bad state", "evaluates alone", "bad object")
]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("calls", given) for name, given in CASES.items()}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST)


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but(FAST, AS_ONE_PROCESS))
def test_steps_are_those_of_one_process_and_equal_on_all_workers(found: Mapping[str, Any], case: str) -> None:
    given = CASES[case]
    losses, values = reference(given)
    for own in found[case][: len(given["devices"])]:
        for loss, expected in zip(own["losses"], losses, strict=False):  # one that has left makes fewer
            assert expected is None or loss == pytest.approx(expected, rel=1e-9)
        assert_values(own["values"], values)
        assert (own["values"], own["state"]) == (found[case][0]["values"], found[case][0]["state"])


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but(FAST, [name for name in CASES if name.startswith("writes")]))
def test_who_has_written_otherwise_than_the_chief_is_warned(found: Mapping[str, Any], case: str) -> None:
    first, second = found[case][:2]
    text = "state of worker 1 differ from those of worker 0, and are replaced by these\n"
    other = {
        "writes other values": "worker 0 wrote something else",
        "writes elsewhere": "worker 0 wrote something else",
    }
    expected = {**other, "writes and looks": "worker 0 wrote nothing"}.get(case)
    assert not any("are replaced" in warning for warning in first["warned"])
    assert sum("are replaced" in warning for warning in second["warned"]) == (expected is not None)
    assert expected is None or any(text in warning and expected in warning for warning in second["warned"])


@pytest.mark.slow
def test_an_optimizer_that_draws_leaves_the_other_workers_streams_alone(found: Mapping[str, Any]) -> None:
    torch.manual_seed(6)
    expected = float(torch.rand(()))
    assert [own["drawn"] for own in found["noisy"][1:]] == [expected] * 2
    assert found["noisy"][0]["drawn"] != found["bound"][0]["drawn"]


@pytest.mark.slow
def test_an_optimizer_that_gives_other_numbers_elsewhere_is_found_out_on_all_workers(found: Mapping[str, Any]) -> None:
    one, other = found["drifts"][:2]
    assert isinstance(one["losses"][0], float) and one["losses"][1] == other["losses"][1]
    assert (
        "CommunicationError: MC6301: workers differ in parameters that each of them has updated by itself, with "
        "an optimizer that is not element-wise\n  why:  worker 0 (" in one["losses"][1]
    )
    assert "has 0.weight: checksum" in one["losses"][1] and "worker 1 (" in one["losses"][1]
    assert "No parameter was changed\n  fix:  load a checkpoint of model and optimizer on all" in one["losses"][1]
    assert "the optimizer does not give the same numbers everywhere" in one["losses"][1]


@pytest.mark.slow
def test_all_skip_a_step_in_which_one_loss_is_not_finite(found: Mapping[str, Any]) -> None:
    for own in found["skips"]:
        assert own["skipped"] == [0, 1, 2, 2] and own["norms"][0] == found["skips"][0]["norms"][0]


@pytest.mark.slow
def test_a_loss_that_is_not_finite_on_one_worker_is_an_error_on_all(found: Mapping[str, Any]) -> None:
    one, other = found["refuses"][:2]
    assert one["losses"][1] == other["losses"][1] and one["losses"][3] == other["losses"][3]
    assert one["losses"][1].startswith("NonFiniteError: MC5101: worker 1 (")
    assert "): the loss on cpu:0 is (nan+0j)" in one["losses"][1] or "): the loss on cpu:0 is nan" in one["losses"][1]
    assert "the reduced gradient of '0.weight' is not finite" in one["losses"][1]
    assert one["losses"][1].count("worker ") == 1 and "No parameter was changed" in one["losses"][1]
    assert one["losses"][3].count("worker 0 (") == 2  # its loss, and its own gradients, which were not added
    assert [own["kept"] for own in (one, other)] == [[0, 0, 2, 2, 0, 0], [0, 0, 3, 3, 0, 0]]


@pytest.mark.slow
def test_norms_have_the_same_bits_on_workers_with_different_numbers_of_devices(found: Mapping[str, Any]) -> None:
    assert found["bound"][0]["norms"] == found["bound"][1]["norms"] == found["bound"][2]["norms"]
    assert all(norm > 0.1 for norm in found["bound"][0]["norms"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "what", "at"),
    [("bad memory", "0.weight", 3), *selections.slow(("bad state", "exp_avg of 0.weight", 2))],
)
def test_copies_that_part_are_named_on_all_workers(found: Mapping[str, Any], case: str, what: str, at: int) -> None:
    one, other = found[case][:2]
    assert all(isinstance(loss, float) for loss in one["losses"][:at])
    for error in one["losses"][at:]:  # again, until they are written anew
        assert error.startswith(
            "CommunicationError: MC6301: workers differ in the copies of variables and optimizer state\n  why:  worker 0 ("
        )
        assert f"has {what}: checksum" in error and "Memory has gone bad" in error
    assert one["losses"][at:] == other["losses"][at:]


@pytest.mark.slow
def test_an_evaluation_on_one_worker_that_writes_buffers_is_no_fault_of_copies(found: Mapping[str, Any]) -> None:
    one, other = found["evaluates alone"][:2]
    assert all(isinstance(loss, float) for loss in one["losses"])
    assert one["losses"] == other["losses"] and one["values"] == other["values"]


@pytest.mark.slow
def test_objects_in_the_optimizers_state_are_compared_by_their_values(found: Mapping[str, Any]) -> None:
    one, other = found["bad object"][:2]
    assert one["losses"] == other["losses"] and isinstance(one["losses"][0], float)
    assert "has kept.sums of 0.bias: checksum" in one["losses"][1]
