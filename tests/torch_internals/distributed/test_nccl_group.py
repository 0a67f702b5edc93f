"""A group of NCCL that is registered nowhere, here on a GPU whose streams run late."""

import os
import threading
from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from late_streams import LateEvent, LateGpu
from stand_in_nccl import CPU, nccl_on

from mirrorc.torch_internals import NcclGroup


def opened(gpu: LateGpu, patch: pytest.MonkeyPatch, num_workers: int = 3) -> tuple[NcclGroup, Any]:
    """A group of one of the workers, and NCCL's group of torch in it."""
    kind: Any = nccl_on(gpu, num_workers)
    gpu.takes_the_place_of_cuda(patch)
    patch.setattr(torch.cuda, "Stream", lambda device, priority: gpu.new_stream())
    patch.setattr(torch.cuda, "Event", lambda blocking: LateEvent(gpu))
    patch.setattr(torch.distributed, "ProcessGroupNCCL", kind, raising=False)
    group = NcclGroup(None, 0, num_workers, CPU)
    return group, kind.made[-1]


@given(st.integers(0, 2**16), st.integers(1, 4))
@fuzzed(25)
def test_sums_are_of_what_was_queued_before_their_launch(seed: int, num_buckets: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        gpu = LateGpu(seed)
        group, _ = opened(gpu, patch)
        buckets, works = [torch.full((2,), torch.nan) for _ in range(num_buckets)], []
        for i, bucket in enumerate(buckets):
            gpu.queue(lambda i=i, bucket=bucket: bucket.fill_(i + 1.0))  # type: ignore[misc]
            works.append(group.all_reduce(bucket))
        assert all(bucket.isnan().all() for bucket in buckets), "nothing has run yet, and the host has not waited"
        for i, work in enumerate(works):
            work.wait()
            assert buckets[i].tolist() == [3.0 * (i + 1)] * 2


def test_backward_goes_on_while_a_bucket_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(0)
    group, nccl = opened(gpu, monkeypatch)
    nccl.stream.is_held, done = True, []  # it sends for long
    work = group.all_reduce(torch.ones(2))
    gpu.queue(lambda: done.append("backward"))
    gpu.run_until(lambda: bool(done))
    nccl.stream.is_held = False
    work.wait()


def test_complex_numbers_are_added_as_pairs(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(0)
    group, _ = opened(gpu, monkeypatch)
    given = torch.tensor([1 + 2j])
    group.all_reduce(given).wait()
    assert given.tolist() == [3 + 6j]


def test_a_group_that_is_cut_gives_no_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = LateGpu(0)
    group, nccl = opened(gpu, monkeypatch)
    work = group.all_reduce(torch.ones(2))
    group.cut()
    group.cut()
    assert nccl.is_aborted.wait(60.0)
    with pytest.raises(RuntimeError, match="the connection to the other workers is closed"):
        work.wait()  # an aborted collective ends like any other


def test_a_group_is_cut_while_the_interpreter_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: Any) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")

    group, nccl = opened(LateGpu(0), monkeypatch)
    monkeypatch.setattr(threading.Thread, "start", start)
    group.cut()
    assert nccl.is_aborted.is_set()


def test_torch_is_told_to_end_no_process_and_nothing_stays_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_NCCL_ENABLE_MONITORING", "1")
    monkeypatch.delenv("TORCH_NCCL_ASYNC_ERROR_HANDLING", raising=False)
    seen: dict[str, str | None] = {}
    gpu = LateGpu(0)
    kind: Any = nccl_on(gpu, 2)
    names = [f"TORCH_NCCL_{name}" for name in ("ASYNC_ERROR_HANDLING", "ENABLE_MONITORING", "RETHROW_CUDA_ERRORS")]

    class Noting(kind):
        def __init__(self, *args: Any) -> None:
            seen.update({name: os.environ.get(name) for name in names})
            super().__init__(*args)

    gpu.takes_the_place_of_cuda(monkeypatch)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device, priority: gpu.new_stream())
    monkeypatch.setattr(torch.cuda, "Event", lambda blocking: LateEvent(gpu))
    monkeypatch.setattr(torch.distributed, "ProcessGroupNCCL", Noting, raising=False)
    NcclGroup(None, 0, 2, CPU)
    assert seen == dict.fromkeys(names, "0")
    assert os.environ["TORCH_NCCL_ENABLE_MONITORING"] == "1" and names[0] not in os.environ
    assert Noting.made[-1].options.is_high_priority_stream, "what sends comes before backward"


def test_a_build_without_nccl_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(torch.distributed, "ProcessGroupNCCL", raising=False)
    with pytest.raises(RuntimeError, match="this build of torch has no NCCL"):
        NcclGroup(None, 0, 2, CPU)
