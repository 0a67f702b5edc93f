"""Process groups of our own over NCCL, which torch offers only behind its global ones, and which end no process."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch

_ENDLESS = timedelta(days=3650)
_HIGH = -1  # of the priorities of CUDA's streams
_WITHOUT_ENDING_THE_PROCESS = {  # torch's threads end it where a worker is late or a GPU fails; whoever waits here finds out
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


class NcclGroup:
    """A group of workers with a GPU each, registered nowhere, so that nobody else's collectives come between its own.

    Collectives are launched by one thread at a time and in one order on all workers, from the thread on whose current stream the
    operand is made: NCCL's own stream begins when that stream has come as far. Each returns a work, whose ``wait()`` blocks the
    host until the result is there, or the group is cut. On a GPU, a group with one member alone was tried; tests have substitutes
    for streams and for NCCL.

    Args:
        store: where the workers meet; nothing else uses its keys.
        rank, num_workers: of this worker, and how many there are.
        device: this worker's GPU.

    Raises:
        RuntimeError: the workers did not connect, or this build of torch has no NCCL. The first meeting has no bound of its own.
    """

    def __init__(self, store: Any, rank: int, num_workers: int, device: torch.device) -> None:
        kind: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)  # not in every build of torch
        if kind is None:
            raise RuntimeError("this build of torch has no NCCL")
        options = kind.Options(is_high_priority_stream=True)
        options._timeout = _ENDLESS  # whoever waits has a bound
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with current, _in_environment(_WITHOUT_ENDING_THE_PROCESS):
            self._group: Any = kind(store, rank, num_workers, options)
        self._ends: Any = torch.cuda.Stream(device, priority=_HIGH)  # comes as far as NCCL has
        self.is_cut = False
        self.all_reduce(torch.zeros(1, device=device)).wait()  # connects

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Adds up a dense tensor on the GPU over all workers, in place; the same bits on all of them."""
        work = self._group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])
        with torch.cuda.stream(self._ends):
            work.wait()  # this stream waits, not the host
            end = torch.cuda.Event(blocking=True)
            end.record(self._ends)
        return _Work(self, work, end)

    @property
    def is_broken(self) -> bool:
        """False: NCCL does not tell that another worker is gone."""
        return False

    def cut(self) -> None:
        """Ends everything that runs here with an error, also what waits for workers that do not come; may be repeated.

        The other workers are not told: those who wait for this one cut their own groups when they hear of the failure.
        """
        if self.is_cut:
            return
        self.is_cut = True
        aborting = threading.Thread(target=self._abort, name="mirrorc ends NCCL", daemon=True)
        try:
            aborting.start()  # NCCL may take its time, and whoever cuts must go on
        except RuntimeError:  # the interpreter ends
            self._abort()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()


class _Work:
    """A collective that was launched. Holds what torch gave for it, and with that its operand."""

    def __init__(self, group: NcclGroup, work: Any, end: Any) -> None:
        self._group, self._work, self._end = group, work, end

    def wait(self) -> None:
        """Returns when the result is there.

        Raises:
            RuntimeError: the group was cut, so that there may be none; or the GPU has failed.
        """
        self._end.synchronize()
        if self._group.is_cut:  # what NCCL was aborted in ends like any other
            raise RuntimeError("the connection to the other workers is closed")


@contextlib.contextmanager
def _in_environment(variables: dict[str, str]) -> Iterator[None]:
    """Sets variables of the environment for a while, as torch reads them when a group is made."""
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
