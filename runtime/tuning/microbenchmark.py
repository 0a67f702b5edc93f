"""Measures the cost of a bucket plan: runs the end of a step on the real devices, with buckets of its own."""

from __future__ import annotations

import copy
import functools
import statistics
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.ir.devices import Device
from mirrorc.ir.links import link_named
from mirrorc.ir.variables import share_bounds
from mirrorc.runtime.communication import Aborted, communicator_for
from mirrorc.runtime.devices.process_memory import return_freed_memory
from mirrorc.runtime.devices.thread_pool import DevicePool
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer
from mirrorc.user.optimizer_kinds import SCALAR_STATE

Layout = tuple[int, ...]  # elements of each bucket
_SECONDS = 1.5  # after this time no further round begins, except for the first few
_FEWEST_ROUNDS, _MOST_ROUNDS = 2, 101


@dataclass(frozen=True)
class Configuration:
    """What is measured: on which devices, over which link, with which optimizer.

    Attributes:
        devices: in order of replicas.
        num_threads: threads of torch's operators on each CPU device.
        link: the link that joins them.
        shares_parameters: whether each device updates its share of one copy, or the whole of its own.
        dtype: of parameters and gradients.
        optimizer: the user's optimizer, which is not changed.
        group: index of the parameter group whose hyperparameters apply; None for an optimizer that runs by itself, whose cost is
            not measured because it does not depend on the buckets.
        timeout_seconds: the longest time of every wait.
    """

    devices: tuple[Device, ...]
    num_threads: int
    link: str
    shares_parameters: bool
    dtype: torch.dtype
    optimizer: torch.optim.Optimizer
    group: int | None
    timeout_seconds: float

    @property
    def moves_by_itself(self) -> bool:
        """Whether the link moves a bucket while devices compute, between its launch and the wait for it."""
        return link_named(self.link).moves_by_itself


def measured_seconds(configuration: Configuration, layouts: Sequence[Layout], scale: float) -> list[float]:
    """The seconds per step that each layout costs: medians over several rounds, each of which runs all layouts.

    On links that add in the wait, the cost is that of the launches, sums and updates of all buckets. On links that move by
    themselves, all buckets except the last one are hidden behind backward. The cost is then that of all launches and updates,
    and of the last bucket's transfer.

    Args:
        configuration: what is measured.
        layouts: plans for the same number of elements, up to rounding.
        scale: the number of the step's elements divided by that of the layouts. The last bucket's transfer is not scaled,
            because it does not depend on the number of all elements.
    """
    pool = DevicePool(configuration.devices, configuration.num_threads, configuration.timeout_seconds)
    try:
        benchmark = _Microbenchmark(configuration, layouts, pool)
        deadline = time.perf_counter() + _SECONDS  # only now: a link may need longer than that to begin
        seconds: list[list[float]] = [[] for _ in layouts]
        for turn in range(_MOST_ROUNDS):
            if turn >= _FEWEST_ROUNDS and time.perf_counter() > deadline:
                break
            for i in range(len(layouts)) if turn % 2 == 0 else reversed(range(len(layouts))):
                seconds[i].append(benchmark.run(i, scale))
        return [statistics.median(times) for times in seconds]
    finally:
        pool.close()


def free_memory(configuration: Configuration) -> None:
    """Returns the memory of microbenchmarks that have ended to the system."""
    if configuration.devices[0].is_asynchronous:
        torch.cuda.empty_cache()
    return_freed_memory()


@dataclass
class _Bucket:
    """A replica's part of a bucket; ``optimizer`` updates its share, None if it has none."""

    gradient: torch.Tensor
    optimizer: FlatOptimizer | None


class _Microbenchmark:
    """Buckets of several layouts over the same memory, and the state of their optimizers."""

    def __init__(self, configuration: Configuration, layouts: Sequence[Layout], pool: DevicePool) -> None:
        self._configuration, self._pool = configuration, pool
        num_elements = max(map(sum, layouts))
        homes = [device.torch_device for device in configuration.devices]
        # the memory is written, because memory that is only reserved would be read faster
        self._gradients = [_filled(0.0, num_elements, configuration.dtype, home) for home in homes]
        if configuration.shares_parameters:
            self._parameters = [_filled(1.0, num_elements, configuration.dtype, homes[0])] * len(homes)
        else:
            self._parameters = [_filled(1.0, num_elements, configuration.dtype, home) for home in homes]
        self._kind = "reduce_scatter" if configuration.shares_parameters else "all_reduce"
        self._communicator = communicator_for(configuration.link, configuration.devices, configuration.timeout_seconds)
        self._communicator.prepare([(self._kind, bucket) for bucket in range(max(map(len, layouts)))])
        self._launch: Callable[..., Any] = getattr(self._communicator, f"launch_{self._kind}")
        self._wait: Callable[..., torch.Tensor] = getattr(self._communicator, f"wait_{self._kind}")
        self._start = threading.Barrier(len(homes), timeout=configuration.timeout_seconds)
        self._layouts = [[self._buckets(layout, replica) for replica in range(len(homes))] for layout in layouts]
        self.run(0, 1.0)
        self._share_state()

    def _buckets(self, layout: Layout, replica: int) -> list[_Bucket]:
        buckets, end = [], 0
        for num_elements in layout:
            begin, end = end, end + num_elements
            own = slice(*self._share(begin, num_elements, replica))
            optimizer = None
            if self._configuration.group is not None and own.start < own.stop:
                optimizer = FlatOptimizer(
                    self._configuration.optimizer, self._configuration.group, self._parameters[replica][own]
                )
                optimizer.make_state()
            buckets.append(_Bucket(self._gradients[replica][begin:end], optimizer))
        return buckets

    def _share(self, begin: int, num_elements: int, replica: int) -> tuple[int, int]:
        if not self._configuration.shares_parameters:
            return begin, begin + num_elements
        start, stop = share_bounds(num_elements, len(self._configuration.devices), replica)
        return begin + start, begin + stop

    def _share_state(self) -> None:
        """Lets the optimizers of all layouts share the memory of their state, which those of the first layout have made."""
        num_replicas = len(self._configuration.devices)
        wholes: list[dict[str, torch.Tensor]] = [{} for _ in range(num_replicas)]
        if self._configuration.shares_parameters:
            wholes = wholes[:1] * num_replicas
        for replica, whole in enumerate(wholes):
            buckets = [bucket for layout in self._layouts for bucket in layout[replica]]
            optimizers = [bucket.optimizer for bucket in buckets if bucket.optimizer is not None]
            made = dict(optimizers[0].state) if optimizers else {}
            for key, value in made.items():
                is_flat = isinstance(value, torch.Tensor) and key not in SCALAR_STATE
                if is_flat and key not in whole:
                    whole[key] = _filled(0.0, self._parameters[replica].numel(), value.dtype, value.device)
                for own in optimizers:
                    place = own.parameter.storage_offset()
                    part = whole[key][place : place + own.parameter.numel()] if is_flat else copy.deepcopy(value)
                    own.state[key] = part

    def run(self, layout: int, scale: float) -> float:
        """Runs one step of a layout; returns the seconds of the slowest device."""
        jobs = [
            functools.partial(self._run_buckets, replica, own, scale)
            for replica, own in enumerate(self._layouts[layout])
        ]
        results = self._pool.run(jobs, self._abort)
        failures = [found for succeeded, found in results if not succeeded]
        if failures:
            raise next((e for e in failures if not isinstance(e, Aborted | threading.BrokenBarrierError)), failures[0])
        self._communicator.release()
        return max(float(seconds) for _, seconds in results)

    def _abort(self) -> None:
        self._start.abort()
        self._communicator.abort()

    def _run_buckets(self, replica: int, buckets: Sequence[_Bucket], scale: float) -> float:
        """Runs a device's part of a step in its thread."""
        for bucket in buckets:
            bucket.gradient.zero_()  # takes the place of backward, so that caches hold the gradients as after it
        self._now(replica)
        self._start.wait()
        run_layout = self._hidden_but_the_last if self._configuration.moves_by_itself else self._added_in_wait
        return run_layout(replica, buckets, scale)

    def _added_in_wait(self, replica: int, buckets: Sequence[_Bucket], scale: float) -> float:
        begun = self._now(replica)
        pending = [self._launch(i, replica, bucket.gradient) for i, bucket in enumerate(buckets)]
        order = range(len(buckets))
        for i in reversed(order) if self._configuration.shares_parameters else order:  # as `ShareParameters` has it
            _update(buckets[i], self._wait(i, replica, pending=pending[i]))
        return (self._now(replica) - begun) * scale

    def _hidden_but_the_last(self, replica: int, buckets: Sequence[_Bucket], scale: float) -> float:
        *others, last = range(len(buckets))
        begun = time.perf_counter()
        pending = [self._launch(i, replica, buckets[i].gradient) for i in others]
        launch_seconds = time.perf_counter() - begun
        sums = [self._wait(i, replica, pending=pending[i]) for i in others]
        self._now(replica)
        self._start.wait()
        begun = self._now(replica)
        sums.append(self._wait(last, replica, pending=self._launch(last, replica, buckets[last].gradient)))
        arrived = self._now(replica)
        for bucket, total in zip(buckets, sums, strict=True):
            _update(bucket, total)
        return (launch_seconds + self._now(replica) - arrived) * scale + arrived - begun

    def _now(self, replica: int) -> float:
        """Waits until a device has done its queued work; returns the time in seconds."""
        device = self._configuration.devices[replica]
        if device.is_asynchronous:
            torch.cuda.current_stream(device.torch_device).synchronize()
        return time.perf_counter()


def _update(bucket: _Bucket, gradient: torch.Tensor) -> None:
    if bucket.optimizer is not None:
        bucket.optimizer.update(gradient)


def _filled(value: float, num_elements: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    return torch.full((num_elements,), value, dtype=dtype, device=device)
