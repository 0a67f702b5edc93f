"""Interleaves the replicas of a small step in the caller's thread, because waking threads takes longer than the step."""

from __future__ import annotations

import statistics
from collections.abc import Generator, Sequence
from typing import Any

from torch import fx

from mirrorc.analysis.gradients.eager_gradients import exchanges_as_plain_pytorch
from mirrorc.ir import ops
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program
from mirrorc.runtime.communication import Aborted
from mirrorc.runtime.devices.thread_pool import Results
from mirrorc.runtime.devices.uninterrupted import is_raised_by_signal

LONGEST_SECONDS = 1e-3  # a longer step is never interleaved: it computes for longer than waking threads takes
_NUM_UNCOUNTED, _NUM_TRIED = 3, 9  # steps of each way: the first ones are warm-up, the others are compared
NUM_TRIAL_STEPS = 2 * (_NUM_UNCOUNTED + _NUM_TRIED)
"""After so many steps, the choice between threads and interleaving is final."""

PausingStep = Generator[None, None, Any]
"""A replica's step as a generator, which yields at `pauses_at` and returns the step's result."""


def pauses_at(node: fx.Node) -> bool:
    """True for nodes before which a replica yields: its commit, and waits before the commit."""
    if node.target is ops.commit:
        return True
    return node.target is ops.wait and any(node < commit for commit in calls_to(node.graph, ops.commit))


def can_interleave(program: Program) -> bool:
    """True if replicas that yield at `pauses_at` never block in one thread.

    All replicas must wait for the same buckets in the same order, and waits must need only launches of other replicas, as for
    an `all_reduce` in one thread. Replicas that update must not share its sum: an optimizer may write its gradients.
    """
    if len(program.devices) == 1 or any(device.is_asynchronous for device in program.devices):
        return False
    if any(next(calls_to(module.graph, *ops.ATTENDED), None) is not None for module in program.device_graphs.values()):
        return False  # replicas without examples do not meet there
    if exchanges_as_plain_pytorch(program):
        return False  # replicas wait for each other within a region
    waits = [list(calls_to(module.graph, ops.wait)) for module in program.device_graphs.values()]
    launches: list[Any] = [wait.args[0] for graph_waits in waits for wait in graph_waits]
    allowed = (ops.reduce_scatter, ops.all_reduce) if program.leaves_gradients else (ops.reduce_scatter,)
    if any(x.target not in allowed or not link_named(x.kwargs["link"]).reads_shared_memory for x in launches):
        return False
    return len({tuple(map(bucket_of, graph_waits)) for graph_waits in waits}) == 1


def interleave(replicas: Sequence[PausingStep], results: Results) -> None:
    """Runs all replicas' steps in turn, each to its next pause, and fills ``results``.

    A failure ends all steps and is recorded in ``results``. An interrupt ends all steps and is raised.
    """
    results.extend([(False, Aborted())] * len(replicas))
    left = dict(enumerate(replicas))
    while left:
        for replica, steps in list(left.items()):
            try:
                next(steps)
            except StopIteration as end:
                results[replica] = (True, end.value)
                del left[replica]
            except Exception as error:  # the caller raises it
                for other in left.values():
                    other.close()
                if is_raised_by_signal(error):
                    raise
                results[:] = [(False, Aborted())] * len(replicas)
                results[replica] = (False, error)
                return


class InterleavingTrial:
    """Chooses between threads and interleaving by the times of the first steps.

    The first steps run in threads. If they are short, the next ones are interleaved, and the faster way is kept.
    """

    def __init__(self, can_interleave: bool) -> None:
        self.interleaves = False
        self.is_decided = not can_interleave
        self._seconds: list[float] = []
        self._threads_seconds = 0.0

    def record(self, seconds: float) -> None:
        if self.is_decided:
            return
        self._seconds.append(seconds)
        if len(self._seconds) < _NUM_UNCOUNTED + _NUM_TRIED:
            return
        typical = statistics.median(self._seconds[_NUM_UNCOUNTED:])
        self._seconds.clear()
        if self.interleaves:
            self.interleaves, self.is_decided = typical < self._threads_seconds, True
        elif typical < LONGEST_SECONDS:
            self.interleaves, self._threads_seconds = True, typical
        else:
            self.is_decided = True
