"""Measures a step's memory: what torch's allocator reports while a device runs, and the resident pages of live tensors."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from resource import getpagesize
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile, record_function

import mirrorc
from mirrorc.ir.variables import Role

_JOB = "a device's step"
_PRESENT = 1 << 63  # of an entry of /proc/self/pagemap


@dataclass(frozen=True)
class MeasuredMemory:
    """Bytes.

    Attributes:
        parameters: of all devices, as the next three.
        gradients: what is written of the buckets, and what flat optimizers keep besides.
        optimizer_state: of all replicas.
        buffers: of all replicas, with what the model shows.
        activations: of each device, at its peak.
        held: all tensors that the step and its model hold between steps, found among Python's objects.
    """

    parameters: int
    gradients: int
    optimizer_state: int
    buffers: int
    activations: tuple[int, ...]
    held: int

    @property
    def total(self) -> int:
        """What stays between steps, and each device's peak."""
        return self.held + sum(self.activations)


def measure(make_step: Callable[[], mirrorc.Step], *args: Any, **kwargs: Any) -> tuple[mirrorc.Step, MeasuredMemory]:
    """Makes a step, runs it with these arguments, two times and two more for each device, and measures it.

    Linux only. The activations are those of the steps after the first, which makes the optimizer's state.
    """
    gc.collect()
    before = list(_live_tensors())  # held, so that no memory of theirs is used again meanwhile
    step = make_step()
    for _ in range(2):
        step(*args, **kwargs)
    peaks = [_activation_peak(step, replica, args, kwargs) for replica in range(len(step.program.devices))]
    gc.collect()
    known = {tensor.untyped_storage().data_ptr() for tensor in before}
    held = [t for t in _live_tensors() if t.untyped_storage().data_ptr() not in known]
    variables = step.variables.values()
    parameters = [v for variable in variables if variable.role is Role.PARAMETER for v in variable.values]
    buffers = [v for variable in variables if variable.role is Role.BUFFER for v in (*variable.values, variable.value)]
    flat = step._state.optimizers._state.optimizers.values()
    shown = [state for own in step._state.optimizers.groups.optimizers for state in own.state.values()]
    states = [*(own.state for own in flat), *shown]
    state = [v for entries in states for v in entries.values() if isinstance(v, torch.Tensor)]
    gradients = [g for bucket in step._state.store.buckets for g in bucket.gradients]
    gradients += [own.parameter.grad for own in flat if own.parameter.grad is not None]
    kinds = (_resident_bytes(tensors) for tensors in (parameters, gradients, state, buffers))
    return step, MeasuredMemory(*kinds, tuple(peaks), _resident_bytes(held))


def _live_tensors() -> Iterator[torch.Tensor]:
    """Tensors with memory, among all of Python's objects."""
    for one in gc.get_objects():
        if type(one) in (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer) and one.device.type == "cpu":
            yield one


def _resident_bytes(tensors: Sequence[torch.Tensor]) -> int:
    """Bytes of the memory of tensors, each once, that lie in pages which were ever written."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    page_bytes, resident = getpagesize(), 0
    with Path("/proc/self/pagemap").open("rb", buffering=0) as pagemap:
        for start, num_bytes in storages.items():
            if not num_bytes:
                continue
            first, last = start // page_bytes, (start + num_bytes - 1) // page_bytes
            pagemap.seek(first * 8)
            entries = memoryview(pagemap.read((last - first + 1) * 8)).cast("Q")
            for page, entry in enumerate(entries, first):
                if entry & _PRESENT:
                    bounds = max(start, page * page_bytes), min(start + num_bytes, (page + 1) * page_bytes)
                    resident += bounds[1] - bounds[0]
    return resident


def _activation_peak(step: mirrorc.Step, replica: int, args: Any, kwargs: Any) -> int:
    """Bytes above those before it at the peak of one more step, on one device.

    The step before it is watched, too: the profiler knows the sizes of those blocks alone that it has seen allocated.
    """
    usual = step._runs.pool
    step._runs.pool = _WatchedPool(replica)  # type: ignore[assignment]
    try:
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            for _ in range(2):
                step(*args, **kwargs)
    finally:
        step._runs.pool = usual
    return _peak_in_last_job(profiled)


class _WatchedPool:
    """Runs one device's job in the calling thread, which is the one that torch's profiler sees; the others in threads."""

    is_stuck = False

    def __init__(self, watched: int) -> None:
        self.watched = watched

    def run(
        self, jobs: Sequence[Callable[[], Any]], on_failure: Callable[[], None], results: list[Any]
    ) -> list[tuple[bool, Any]]:
        """As `mirrorc.runtime.devices.thread_pool.DevicePool.run`, but errors are raised."""
        jobs = [torch.no_grad()(job) for job in jobs]
        with ThreadPoolExecutor(len(jobs)) as threads:
            others = {i: threads.submit(job) for i, job in enumerate(jobs) if i != self.watched}
            try:
                with record_function(_JOB):
                    own = jobs[self.watched]()
            except BaseException:
                on_failure()
                raise
            results += [(True, own if i == self.watched else others[i].result()) for i in range(len(jobs))]
            return results


def _peak_in_last_job(profiled: Any) -> int:
    events = sorted(profiled.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    start, end = [(e.start_ns(), e.end_ns()) for e in events if e.name() == _JOB][-1]
    own = [event for event in events if event.name() == "[memory]" and start <= event.start_ns() <= end]
    return max(accumulate((event.nbytes() for event in own), initial=0))
