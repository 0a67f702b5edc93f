"""What a step queues on its caller's streams, and what the devices' streams wait for, in the order in which a GPU needs it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from recorded_calls import CallRecorder
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.compilation import step_compiler
from mirrorc.options.table import OPTIONS, grouped
from mirrorc.runtime.execution import executor, replica_arguments
from mirrorc.runtime.execution.cuda_graphs import NUM_WARM_UP_STEPS
from mirrorc.runtime.execution.replica_arguments import HostCopies
from mirrorc.runtime.state.optimizers.bucket_optimizers import BucketOptimizers
from mirrorc.runtime.state.variables.shown_buffers import ShownBuffers


def noting(patch: pytest.MonkeyPatch, owner: Any, name: str, done: list[str], word: str) -> None:
    function: Callable[..., Any] = getattr(owner, name)

    def noted(*args: Any, **kwargs: Any) -> Any:
        done.append(word)
        return function(*args, **kwargs)

    patch.setattr(owner, name, noted)


@pytest.fixture
def done(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    found: list[str] = []
    noting(monkeypatch, executor, "record_event", found, "event")
    noting(monkeypatch, replica_arguments, "wait_event", found, "devices wait")
    noting(monkeypatch, executor, "wait_event", found, "caller waits")
    noting(monkeypatch, executor.Losses, "weight_tensors", found, "weights")
    noting(monkeypatch, ShownBuffers, "aggregate", found, "buffers")
    noting(monkeypatch, BucketOptimizers, "finish_step", found, "state")
    monkeypatch.setattr(executor, "can_interleave", lambda program: False)
    return found


def test_devices_wait_for_the_weights_and_the_caller_for_what_it_reads(done: list[str]) -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with mirrorc.compile(
        model, 2, optimizer=optimizer, loss_fn=F.mse_loss, compiler=mirrorc.Compiler(backend="eager")
    ) as step:
        step(torch.randn(8, 3), target=torch.randn(8, 2))
    assert done.index("weights") < done.index("event") < done.index("devices wait"), "they read the weights"
    last = len(done) - 1 - done[::-1].index("caller waits")
    assert done.count("caller waits") == 4, "on the first device and on its own, for each"
    assert last < min(done.index("buffers"), done.index("state")), "it reads what the devices have written"


def test_batches_of_captured_steps_are_copied_on_a_stream_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[tuple[int, ...]] = []

    class Recorded(HostCopies):
        def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
            copied.append(tuple(tensor.shape))
            return super().to_device(tensor)

    recorder = CallRecorder()
    monkeypatch.setattr(executor, "HostCopies", Recorded)
    monkeypatch.setattr(OPTIONS, "check_exclusions", lambda request: None)
    monkeypatch.setattr(step_compiler, "CudaCapturer", lambda device, seconds: recorder)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    num_steps = NUM_WARM_UP_STEPS + 2
    options: dict[str, Any] = {"loss_fn": F.mse_loss, "backend": "eager", "cuda_graphs": True}
    with mirrorc.compile(model, ["cpu:0"], optimizer=optimizer, **grouped(options)) as step:
        for _ in range(num_steps):
            step(torch.ones(4, 3), target=torch.ones(4, 2))
    assert recorder.num_replays == 2
    assert copied == [(4, 3), (4, 2)] * num_steps, "the host need not wait for the last replay to read a batch"
