"""Workers with a GPU each, where there is none: gloo takes the place of NCCL, and CPUs that of GPUs."""

from typing import Any

import pytest
import torch
from worker_processes import outcome, outcomes, workers
from worker_training import assert_training, assert_values, in_one_process, reference, training

from mirrorc.ir.devices import parse_devices
from mirrorc.runtime.communication import Aborted
from mirrorc.runtime.workers.buckets.exchanges import ExchangesOfGpus
from mirrorc.runtime.workers.team.control_messages import on_host

CASES: dict[str, dict[str, Any]] = {
    "mlp": training([1, 1], [[4, 4], [4, 2]], stepped=1),
    "random": training([1, 1], [[3, 6]], model="random", optimizer="SGD"),
    "bound": training([1, 1], [[0, 4], [2, 4]], options={"clip_grad_norm": 0.1, "buckets": 0.0005}),
    "recovers": training([1, 1], [[4, 4]], faults=[[0, 1, "wrong batch"], [1, 1, "operator"], [2, 0, "operator"]]),
    "factors": training([1, 1], [[4, 4]], options={"exchange": "factors"}),
}


def run(given: dict[str, Any]) -> list[Any]:
    return workers("train", {"over_nccl": True, **given}, num_processes=2)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    return outcomes(tmp_path_factory.mktemp("gpus"), {name: run(given) for name, given in CASES.items()})


@pytest.mark.slow
@pytest.mark.parametrize("case", ["mlp", "bound"])
def test_steps_are_those_of_one_process(found: dict[str, Any], case: str) -> None:
    losses, values = reference(CASES[case], range(4))
    for own in found[case]:
        assert_training(own, losses, values)
        assert "exchange over nccl-workers" in own["explained"] and own["gathered"] == 0
    assert found[case][0]["values"] == found[case][1]["values"]


@pytest.mark.slow
def test_streams_and_statistics_are_those_of_all_replicas(found: dict[str, Any]) -> None:
    losses, values = in_one_process(CASES["random"])
    for own in found["random"]:
        assert_training(own, losses, values)


@pytest.mark.slow
def test_after_a_failure_on_one_worker_all_go_on(found: dict[str, Any]) -> None:
    losses, values = reference(CASES["recovers"], [3])
    first, second = found["recovers"]
    for own in (first, second):
        assert own["losses"][3] == pytest.approx(losses[0], rel=1e-9)
        assert_values(own["values"], values)
    assert "it raised ValueError: MC1304: arguments disagree on dim 0" in first["losses"][0]
    assert "OSError: the disk is full" in first["losses"][1] and "OSError: the disk is full" in second["losses"][1]
    assert "No parameter was changed\n  fix:  make the call again, on all workers" in second["losses"][2]


@pytest.mark.slow
def test_factors_are_refused_where_nothing_gathers_them(found: dict[str, Any]) -> None:
    for own in found["factors"]:
        assert own["error"].startswith(
            "ValueError: MC1003: exchange='factors' cannot be used on cpu:0\n  why:  what joins workers there"
        )
        assert own["error"].endswith("gathers no factors\n  fix:  give exchange='auto'")


@pytest.mark.slow
def test_a_worker_that_is_killed_is_named(tmp_path: Any) -> None:
    """NCCL does not tell that a worker is gone: its kernel waits until it is aborted. The connections over gloo tell."""
    options = {"early_update": False}  # so that the other one waits for a sum, and not for its vote
    given = training([1, 1], [[4, 4]], faults=[[1, 1, "kill in forward"]], ends=True, options=options)
    (own,) = outcome(tmp_path, run(given), num_ended=1)
    assert isinstance(own["losses"][0], float)
    assert own["losses"][1].startswith("CommunicationError: MC6201: training call 2 has failed\n  why:  worker 1 (")
    assert "the connection to the other workers is closed" in own["losses"][1] and own["seconds"] < 60.0
    assert "No parameter was changed" in own["losses"][1]


class OnGpu:
    def __init__(self, *values: float) -> None:
        self.values = torch.tensor(values)

    def to(self, device: torch.device) -> torch.Tensor:
        assert device.type == "cpu"
        return self.values.clone()

    def copy_(self, own: torch.Tensor) -> None:
        self.values = own


def test_what_workers_tell_each_other_goes_through_the_host() -> None:
    tensor, own = OnGpu(1.0, 2.0), torch.ones(2)
    with on_host(tensor) as told_on_host:  # type: ignore[arg-type]
        told_on_host.mul_(3)
    assert tensor.values.tolist() == [3.0, 6.0]
    with on_host(own) as told_on_host:
        assert told_on_host is own


def test_a_step_that_fails_ends_the_collectives_for_which_its_gpu_waits() -> None:
    """Or whoever waits for the GPU to clean up waits for a worker that is gone."""
    made = ExchangesOfGpus(
        parse_devices(1), {0: "bucket 0"}, lambda collective, done: None, 60.0, {}, {}, lambda bucket: [], 0, 2
    )
    ended: list[str] = []
    made.end_collectives = lambda: ended.append("ended")
    made.abort()
    assert not ended, "nothing is under way"
    made.begin_afresh()
    made.launch_exchange(0, torch.ones(2))
    made.abort()
    assert ended == ["ended"]
    with pytest.raises(Aborted):
        made.wait_exchange(0, 0, torch.ones(2))
