"""Private NCCL groups that never end the process, unlike torch's global groups."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

_ENDLESS = timedelta(days=3650)
_HIGH = -1  # a priority of CUDA streams
_WITHOUT_ENDING_THE_PROCESS = {  # torch's threads end it for a late worker or a failed GPU; here, a wait reports them
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


class NcclGroup:
    """A group of workers with a GPU each, outside of torch's registry. Tested only with one worker.

    One thread at a time may launch collectives, in the same order on all workers, on the operand's stream. The
    constructor waits for all workers without a timeout.
    """

    def __init__(self, store: Any, rank: int, num_workers: int, device: torch.device) -> None:
        kind: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)  # not in every build of torch
        if kind is None:
            raise RuntimeError("this build of torch has no NCCL")
        options = kind.Options(is_high_priority_stream=True)
        options._timeout = _ENDLESS  # the waiting code has a bound
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with current, _in_environment(_WITHOUT_ENDING_THE_PROCESS):
            self._group: Any = kind(store, rank, num_workers, options)
        self._ends: Any = torch.cuda.Stream(device, priority=_HIGH)  # follows NCCL's progress
        self.is_cut = False
        self.all_reduce(torch.zeros(1, device=device)).wait()  # connects

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        work = self._group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])
        with torch.cuda.stream(self._ends):
            work.wait()  # the stream waits, not the host
            end = torch.cuda.Event(blocking=True)
            end.record(self._ends)
        return _Work(self, work, end)

    @property
    def is_broken(self) -> bool:
        """Always False: NCCL does not report a lost worker."""
        return False

    def cut(self) -> None:
        """Ends all collectives on this worker with an error, without telling other workers; idempotent."""
        if self.is_cut:
            return
        self.is_cut = True
        aborting = threading.Thread(target=self._abort, name="mirrorc ends NCCL", daemon=True)
        try:
            aborting.start()  # NCCL may take long, and the caller must go on
        except RuntimeError:  # the interpreter ends
            self._abort()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()


class _Work:
    def __init__(self, group: NcclGroup, work: Any, end: Any) -> None:
        self._group, self._work, self._end = group, work, end

    def wait(self) -> None:
        self._end.synchronize()
        if self._group.is_cut:  # an aborted collective ends like any other
            raise RuntimeError("the connection to the other workers is closed")


@contextlib.contextmanager
def _in_environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
