"""Runs steps of a lowered program."""

from __future__ import annotations

import dataclasses
import functools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.communication.worker_meetings import worker_meetings
from mirrorc.analysis.gradients.eager_gradients import exchanges_as_plain_pytorch
from mirrorc.custom_ops.replica_collectives import exchanging
from mirrorc.ir.nodes import is_region_call
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.runtime.codegen.graph_function import GraphFunction, generate, with_profiler_ranges
from mirrorc.runtime.codegen.regions import RegionFunction
from mirrorc.runtime.communication import Communicator, communicators_of
from mirrorc.runtime.communication.replica_values import PlainExchanges, ReplicaValues
from mirrorc.runtime.devices.events import record_event, reserve_for_caller, wait_device, wait_event
from mirrorc.runtime.devices.thread_pool import DevicePool, Results
from mirrorc.runtime.devices.uninterrupted import completed
from mirrorc.runtime.execution.binding.binder import Binder
from mirrorc.runtime.execution.binding.eager_backward import driven, waits_between
from mirrorc.runtime.execution.binding.interleaving import (
    InterleavingTrial,
    PausingStep,
    can_interleave,
    interleave,
    pauses_at,
)
from mirrorc.runtime.execution.binding.step_outputs import StepOutputs
from mirrorc.runtime.execution.commit.commit_point import OtherWorkers
from mirrorc.runtime.execution.commit.finite_checks import commit_point_of
from mirrorc.runtime.execution.commit.update_progress import UsedVariables, progress_of
from mirrorc.runtime.execution.cuda_graphs import StepGraph
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.execution.replica_arguments import HostCopies, replica_arguments
from mirrorc.runtime.execution.step_failures import explain_failure, note_if_torn
from mirrorc.runtime.profiling.recorder import Recorder
from mirrorc.runtime.state.accumulation_state import ProgramState
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples
from mirrorc.runtime.state.shares.pieces import forget_writes
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.buckets.exchanges import exchanges_of
from mirrorc.runtime.workers.buckets.replica_values import WorkerValues
from mirrorc.runtime.workers.protocol.vote import Columns, Vote
from mirrorc.runtime.workers.team.team import Team
from mirrorc.torch_internals import is_plain_thread

_MOST_CACHED = 16


class Losses:
    def __init__(self, program: Program, state: ProgramState) -> None:
        self._program, self._state = program, state
        self._weights: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    def weight_tensors(self, replica_weights: Sequence[float], examples: Examples) -> Sequence[torch.Tensor | None]:
        """Each replica's gradient of its loss, a scalar: loss weight times loss scale. None without backward."""
        if not self._program.trains:
            return [None] * len(replica_weights)
        scale = self._state.begin_loss(self._program, examples)
        if not self._program.present:
            return [None] * len(replica_weights)
        weights = tuple(weight * scale for weight in replica_weights) if scale != 1.0 else tuple(replica_weights)
        if weights not in self._weights:
            if len(self._weights) >= _MOST_CACHED:  # this number may change in every step
                self._weights.clear()
            graphs = [module.graph for module in self._program.device_graphs.values()]
            graph = graphs[self._program.first_present]
            (argument,) = placeholders_of(graph, self._program.arguments, ArgumentKind.LOSS_WEIGHT)
            like = argument.meta["val"]
            self._weights[weights] = [
                torch.full(like.shape, weight, dtype=like.dtype, device=device.torch_device)
                for weight, device in zip(weights, self._program.devices, strict=True)
            ]
        return self._weights[weights]

    def wait(self, results: Sequence[tuple[torch.Tensor | None, Any]]) -> None:
        home = self._program.devices[0].torch_device
        for (loss, event), device in zip(results, self._program.devices, strict=True):
            if loss is not None:
                reserve_for_caller(loss)
            wait_event(event, home)
            wait_event(event, device.torch_device)  # the caller may reuse the shards' memory there

    def total(
        self, results: Sequence[tuple[torch.Tensor | None, Any]], weights: Sequence[float]
    ) -> torch.Tensor | None:
        """The weighted sum of the losses, on the first device. None without a loss, and on a worker without examples."""
        if not self._program.has_loss or not self._program.present:
            return None
        home = self._program.devices[0].torch_device
        pairs = zip(results, weights, strict=True)
        present = [(loss, weight) for (loss, _), weight in pairs if loss is not None]
        dtype = present[0][0].dtype
        exact = torch.float32 if dtype.itemsize < 4 else dtype
        with torch.no_grad():
            parts = [loss.to(home, exact) * weight for loss, weight in present]
            total = functools.reduce(torch.add, parts)
            if total.dtype is not dtype:
                total = total.to(dtype)
            return total.reshape(()) if total.dim() else total


class BoundFunctions:
    """One function per replica, bound again for each memory layout. Functions in ``pausing`` yield at `pauses_at`."""

    def __init__(self, program: Program, binder: Binder, recorder: Recorder | None) -> None:
        self._program, self._binder, self._recorder = program, binder, recorder
        self._layout = -1
        self.whole: list[GraphFunction] = []
        self.pausing: list[GraphFunction] = []

    def bind(self) -> None:
        if self._layout == self._binder.state.layout:
            return
        self._binder.pieces.clear()
        self._binder.summed_pieces.clear()
        self._binder.all_deferred.clear()
        self.whole, self.pausing = self._generate(), []
        if self._recorder is not None:
            self._recorder.nodes = [function.marked for function in self.whole]
        self._layout = self._binder.state.layout

    def bind_pausing(self) -> None:
        if not self.pausing:
            self.pausing = self._generate(pauses_at)

    def _generate(self, pauses: Callable[[fx.Node], bool] = lambda _: False) -> list[GraphFunction]:
        clocks = self._recorder.clocks if self._recorder is not None else [None] * self._program.num_replicas
        bind = self._binder.bind
        functions = [
            generate(
                name,
                module.graph,
                functools.partial(bind, r),
                boxed=is_region_call,
                clock=clocks[r],
                pauses=pauses,
                waits=waits_between(self._program, module.graph).__contains__,
            )
            for r, (name, module) in enumerate(self._program.device_graphs.items())
        ]
        for function in functions:
            if function.asks:
                function.call = driven(function)
        return functions


class Executor:
    """A lowered program, ready to run.

    Args:
        timeout_seconds: the longest wait of a replica for other replicas.
        step_graph: captures and replays the steps of a single device; None for no CUDA graph.

    Attributes:
        used: the parameters used by replicas, if backward runs as plain PyTorch.
    """

    def __init__(
        self,
        program: Program,
        regions: Sequence[Mapping[str, RegionFunction]],
        state: ProgramState,
        constants: Mapping[str, torch.Tensor],
        timeout_seconds: float,
        recorder: Recorder | None = None,
        step_graph: StepGraph | None = None,
        team: Team | None = None,
    ) -> None:
        self.program, self.recorder, self._step_graph = program, recorder, step_graph
        self.updates = program.updates
        self.needs_seed = any(argument.kind is ArgumentKind.SEED for argument in program.arguments)
        self.num_updates = 0
        self.regions, self.state = regions, state
        self._communicators = communicators_of(program, timeout_seconds) | exchanges_of(program, team)
        self._is_exchanged = team is not None  # others' rows come into the buckets
        self._progress = progress_of(program)
        self.used = UsedVariables(program, state)
        workers = None
        if team is not None:
            workers = OtherWorkers(functools.partial(self._vote, team, Columns.of(program)), team.hear)
        self.commit = commit_point_of(program, timeout_seconds, self.used.settle, workers)
        self.outputs = StepOutputs(program)
        self.meets_workers = team is not None and bool(worker_meetings(program))
        self._replica_values = (
            WorkerValues(program, timeout_seconds, team.launch_value)
            if team is not None and self.meets_workers
            else ReplicaValues(program, timeout_seconds)
        )
        self._plain_exchanges = PlainExchanges(program.devices, program.present, timeout_seconds)
        self._exchanges_plainly = exchanges_as_plain_pytorch(program)
        self._carriers: tuple[Communicator | ReplicaValues | WorkerValues | PlainExchanges, ...] = (
            *self._communicators.values(),
            self._replica_values,
            self._plain_exchanges,
        )
        self._binder = Binder(
            program,
            regions,
            state,
            constants,
            self._communicators,
            self.commit,
            self.outputs,
            self._replica_values,
            self._progress,
            self.used.unused,
        )
        self.functions = BoundFunctions(program, self._binder, recorder)
        self.trial = InterleavingTrial(can_interleave(program))
        self.is_interleaved = False  # whether the last step was interleaved
        self._stop: Callable[[], object] = self.commit.stop  # stops the step that runs
        self._stopping = threading.Lock()  # so that nobody stops a failed step during its clean-up
        self._host_copies = [HostCopies(device.torch_device) for device in program.devices]
        self._timeout_seconds, self._losses = timeout_seconds, Losses(program, state)

    @property
    def _torn(self) -> str:
        return self._progress.clause_if_begun() if self._progress is not None else ""

    def _vote(self, team: Team, columns: Columns, vote: Vote) -> tuple[bool, torch.Tensor | None]:
        """One replica calls this after all replicas have arrived at the commit."""
        vote = dataclasses.replace(vote, used=self.used.tell())
        outcome = team.vote(vote, columns=columns, is_early=self._progress is not None)
        self.used.hear(outcome.used)
        return outcome.takes_place, outcome.numbers

    def run(
        self,
        pool: DevicePool,
        shards: Sequence[Sequence[torch.Tensor]],
        weights: Sequence[float],
        examples: Examples,
        seed: int | None,
        guard: InterruptGuard,
        numbers: Sequence[Sequence[int | float]] = (),
        sizes: Sequence[Sequence[int | float]] = (),
    ) -> torch.Tensor | None:
        """Runs a step that `commit` has begun. Returns `Losses.total`."""
        self.functions.bind()
        if self._step_graph is not None:
            self._step_graph.renew_for(self.program, self.state.optimizers, memory=self.state.layout)
        self._choose_way()
        if self.recorder is not None:
            self.recorder.begin()
        weighted = self._losses.weight_tensors(weights, examples)
        held_by = dict.fromkeys(device.torch_device for device in self.program.devices)
        # what the caller's streams have queued comes first: weights, too
        start = [record_event(device) for device in held_by]
        none = [()] * len(shards)
        each = zip(shards, weighted, numbers or none, sizes or none, strict=True)
        calls = [
            (r, start, shard, weight, seed, replica_numbers, of, examples)
            for r, (shard, weight, replica_numbers, of) in enumerate(each)
        ]
        self.state.begin()
        self.outputs.begin()
        self.used.begin()
        if self._progress is not None:
            self._progress.begin()
        results: Results = []
        loss, number = None, self.state.num_skipped + 1  # of this step, if it is skipped
        try:
            seconds = self._run_replicas(pool, calls, guard, results)
            if self._is_done(results):
                loss = completed(functools.partial(self._finish, results, weights, seconds, number))
        except BaseException as error:
            if self._is_done(results):
                completed(functools.partial(self._finish, results, weights, 0.0, number))
            else:
                self._give_up(pool)
                note_if_torn(error, self.program, self.commit.is_committed, self._torn)
            raise
        if not self._is_done(results):
            self._give_up(pool)
            if guard.raised is not None and not self.commit.is_committed:
                raise guard.raised
            failures = {replica: result[1] for replica, result in enumerate(results) if result and not result[0]}
            raise explain_failure(self.program, failures, self.commit.is_committed, self._torn)
        if guard.raised is not None:
            raise guard.raised
        return loss

    def _is_done(self, results: Results) -> bool:
        num_done = sum(result is not None and result[0] for result in results)
        return self.commit.is_decided and num_done == self.program.num_replicas

    def _run_replicas(self, pool: DevicePool, calls: Sequence[Any], guard: InterruptGuard, results: Results) -> float:
        began = time.perf_counter()
        if self.is_interleaved:
            pool.run_here(lambda: interleave([self._run_interleaved(*call) for call in calls], results))
        else:
            self._run_in_threads(pool, calls, guard, results)
        return time.perf_counter() - began

    def _run_in_threads(self, pool: DevicePool, calls: Sequence[Any], guard: InterruptGuard, results: Results) -> None:
        def stop() -> None:
            if self.commit.stop():
                self._abort()
                pool.wake()

        self._stop = stop
        guard.stop_by(stop)
        try:
            pool.run([functools.partial(self._run_replica, *call) for call in calls], self._abort, results)
        finally:
            self._stop = self.commit.stop
            guard.stop_by(None)

    def interrupt(self) -> None:
        """Stops a step that runs in another thread, unless its commit is binding."""
        with self._stopping:
            self._stop()

    def _finish(self, results: Results, weights: Sequence[float], seconds: float, number: int) -> torch.Tensor | None:
        """Idempotent, also after an interrupt at any point."""
        done = [result[1] for result in results if result is not None]
        self._losses.wait(done)
        if self.commit.is_skipped:
            self.state.skip(number)
            self._forget_step()
            seconds = 0.0
        else:
            self.state.finish()
        for carrier in self._carriers:
            carrier.reset()
        self._binder.forget_deferred()
        loss = self._losses.total(done, weights)
        if self.is_interleaved == self.trial.interleaves and seconds:
            self.trial.record(seconds)
        return loss

    def _choose_way(self) -> None:
        is_interleaved = self.trial.interleaves and is_plain_thread()
        if is_interleaved:
            self.functions.bind_pausing()
        if is_interleaved != self.is_interleaved and self.recorder is not None:
            self.recorder.clear()
        self.is_interleaved = is_interleaved
        for communicator in self._communicators.values():
            communicator.in_one_thread = is_interleaved
        writer = (weakref.ref(self), is_interleaved)  # threads and interleaving each have their own pieces of shares
        if not self.state.keeps_gradients_of(writer):
            forget_writes(self._binder.pieces)
        elif self._is_exchanged:
            forget_writes(self._binder.summed_pieces)
        self.state.give_gradients_to(writer)

    def release(self) -> None:
        if self._step_graph is not None:
            self._step_graph.release()

    def _run_replica(self, replica: int, *arguments: Any) -> tuple[torch.Tensor | None, Any]:
        values = replica_arguments(self.program, replica, self._host_copies[replica], *arguments)
        # a generated function: `Binder.bind` has bound each node of the replica's graph to the function of its handler
        call = with_profiler_ranges(self.functions.whole[replica])
        if self._exchanges_plainly and replica in self.program.present:
            with exchanging(self._plain_exchanges.of(replica)):
                loss = call(values)
        else:
            loss = call(values) if self._step_graph is None else self._run_captured(self._step_graph, call, values)
        done = record_event(self.program.devices[replica].torch_device)
        self._host_copies[replica].wait_until_read()
        return loss, done

    def _run_interleaved(self, replica: int, *arguments: Any) -> PausingStep:
        values = replica_arguments(self.program, replica, self._host_copies[replica], *arguments)
        return (yield from with_profiler_ranges(self.functions.pausing[replica])(values)), None

    def _run_captured(
        self, step_graph: StepGraph, function: Callable[[list[Any]], Any], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        step_graph.load(values)
        if step_graph.is_due:
            with self.state.optimizers.capturing(), self.commit.suspended():
                step_graph.capture(function)  # calls are captured, not run
        if step_graph.is_captured:
            self.commit.commit()
        return step_graph.run(function)

    def _abort(self) -> None:
        self.commit.stop()
        self._forget_step()
        self.commit.abort()
        for carrier in self._carriers:
            carrier.abort()

    def _forget_step(self) -> None:
        if self.recorder is not None:
            self.recorder.forget()

    def _give_up(self, pool: DevicePool) -> None:
        """Cleans up after the GPUs' queued work, because the memory of this work will be reused."""
        self.commit.stop()
        for device in dict.fromkeys(device.torch_device for device in self.program.devices if not pool.is_stuck):
            if not wait_device(device, self._timeout_seconds):
                pool.mark_stuck()
        is_untouched = self._progress is not None and not self._progress.has_begun
        if self.state.abandon(has_committed=self.commit.is_committed and not is_untouched):
            self.commit.revoke()
        elif self._progress is not None:
            assert isinstance(self.state, StepState), "a program that commits early trains"
            self.state.tear(self._progress.clause())
        if pool.is_stuck:  # when a stuck device continues, it must find its rendezvous aborted
            return
        self._forget_step()
        self._binder.forget_deferred()
        with self._stopping:
            self.commit.begin_afresh()
            for carrier in self._carriers:
                carrier.begin_afresh()
