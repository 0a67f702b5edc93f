"""Batches are copied to GPUs that run late; the caller fills the same memory with the next batch."""

from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from late_streams import LateGpu
from tiny_programs import sgd_step
from torch.nn import functional as F

from mirrorc.runtime.execution import executor
from mirrorc.runtime.execution.replica_arguments import HostCopies


def train(gpu: LateGpu, copies: Any, num_steps: int, waits: bool) -> list[float]:
    batch, found = torch.zeros(4), []

    def step(own: torch.Tensor) -> None:
        gpu.queue(lambda: found.append(own.sum().item()))

    for i in range(num_steps):
        batch.fill_(i)
        step(copies.to_device(batch) if waits else gpu.copied_to(batch, gpu.device))
        if waits:
            copies.wait_until_read()
    gpu.finish()
    return found


@given(st.integers(0, 2**16), st.integers(1, 5))
@fuzzed(25)
def test_a_batch_may_be_filled_anew_when_the_step_has_returned(seed: int, num_steps: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gpu = LateGpu(seed)
        gpu.takes_the_place_of_cuda(patch)
        assert train(gpu, HostCopies(gpu.device), num_steps, waits=True) == [4.0 * i for i in range(num_steps)]


def test_such_a_gpu_shows_what_goes_wrong_otherwise() -> None:
    assert train(LateGpu(0), None, 3, waits=False) == [8.0] * 3, "every step has got the last batch"


def test_the_host_runs_ahead_of_the_last_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(0)
    gpu.takes_the_place_of_cuda(monkeypatch)
    copies, found = HostCopies(gpu.device), []
    gpu.compute.is_held = True  # the last step runs for long
    own = copies.to_device(torch.ones(3))
    gpu.queue(lambda: found.append(own.tolist()))
    copies.wait_until_read()
    assert not found and len(gpu.streams) == 2, "it waits for the copy alone"
    assert gpu.kept[id(own)] == [gpu.compute], "the copy's memory is not used again before the step has read it"
    gpu.compute.is_held = False
    gpu.finish()
    assert found == [[1.0] * 3]
    copies.wait_until_read()


def test_what_lies_on_a_gpu_is_copied_in_order_with_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(0)
    gpu.takes_the_place_of_cuda(monkeypatch)
    copies = HostCopies(gpu.device)
    copies.to_device(torch.ones(3, device="meta"))  # stands for another GPU
    copies.wait_until_read()
    assert len(gpu.streams) == 1 and len(gpu.compute.work) == 1, "the step's own stream, which waits for the caller's"


def test_a_step_returns_when_its_batch_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[tuple[str, Any]] = []

    class Recorded(HostCopies):
        def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
            done.append(("copied", tuple(tensor.shape)))
            return super().to_device(tensor)

        def wait_until_read(self) -> None:
            done.append(("waited", None))

    monkeypatch.setattr(executor, "HostCopies", Recorded)
    monkeypatch.setattr(executor, "reserve_for_caller", lambda loss: done.append(("kept", tuple(loss.shape))))
    monkeypatch.setattr(executor, "can_interleave", lambda program: False)
    model = torch.nn.Linear(3, 2)
    with sgd_step(model, 2, loss_fn=F.mse_loss) as step:
        step(torch.ones(4, 3), target=torch.ones(4, 2))
    assert sorted(done[:-2], key=str) == sorted([("copied", (2, 3)), ("copied", (2, 2)), ("waited", None)] * 2, key=str)
    assert done[-2:] == [("kept", ())] * 2, "the caller reads losses that the devices' streams have made"
