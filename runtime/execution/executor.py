"""Runs the steps of a lowered program: on every device, the function of its graph."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.custom_ops.random import mix
from mirrorc.ir import ops
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.optimizers import check_capturable
from mirrorc.runtime.codegen.graph_function import GraphFunction, generate
from mirrorc.runtime.codegen.regions import RegionFunction
from mirrorc.runtime.communication import communicators_of
from mirrorc.runtime.devices.events import kept_for_caller, record_event, wait_device, wait_event
from mirrorc.runtime.devices.host_copies import HostCopies
from mirrorc.runtime.devices.thread_pool import DevicePool
from mirrorc.runtime.execution.binding import Binder
from mirrorc.runtime.execution.cuda_graphs import StepGraph
from mirrorc.runtime.execution.failures import explain_failure
from mirrorc.runtime.execution.interleaving import InterleavingTrial, PausingStep, can_interleave, interleave
from mirrorc.runtime.profiling.recorder import Recorder
from mirrorc.runtime.state.gradient_shares import forget_what_is_written
from mirrorc.runtime.state.step_state import StepState
from mirrorc.torch_internals import is_plain_thread


class Executor:
    """A lowered program, ready to run.

    Args:
        program: a LOWERED program.
        regions: for each device, its compiled regions by name.
        state: the variables and the optimizer, which all programs of one step share.
        constants: tensors that the capture found outside of parameters and buffers.
        timeout_seconds: the longest time that a replica waits for another one.
        recorder: keeps the times of the last steps; None for no recording.
        step_graph: captures and replays the steps of a program of one device; None to make all calls in every step.
    """

    def __init__(
        self,
        program: Program,
        regions: Sequence[Mapping[str, RegionFunction]],
        state: StepState,
        constants: Mapping[str, torch.Tensor],
        timeout_seconds: float,
        recorder: Recorder | None = None,
        step_graph: StepGraph | None = None,
    ) -> None:
        self.program = program
        self.recorder = recorder
        self._step_graph = step_graph
        self.regions = regions
        self._state = state
        self._communicators = communicators_of(program, timeout_seconds)
        self._binder = Binder(program, regions, state, constants, self._communicators)
        self._functions: list[GraphFunction] = []
        self._pausing_functions: list[GraphFunction] = []  # the same, but pausing before waits; made when first needed
        self.trial = InterleavingTrial(can_interleave(program))
        self.is_interleaved = False  # whether the last step was
        self._host_copies = [HostCopies(device.torch_device) for device in program.devices]
        self._timeout_seconds = timeout_seconds
        self._layout = -1
        self._weights: dict[tuple[Any, ...], list[torch.Tensor]] = {}

    @property
    def needs_seed(self) -> bool:
        """Whether the program draws random numbers."""
        return any(argument.kind is ArgumentKind.SEED for argument in self.program.arguments)

    def bind(self) -> None:
        """Binds the program to the memory's present layout."""
        if self._layout == self._state.layout:
            return
        self._binder.pieces.clear()
        self._functions, self._pausing_functions = self._generate(), []
        if self.recorder is not None:
            self.recorder.nodes = [function.marked for function in self._functions]
        self._layout = self._state.layout

    def _generate(self, pauses: Callable[[fx.Node], bool] = lambda _: False) -> list[GraphFunction]:
        clocks = self.recorder.clocks if self.recorder is not None else [None] * self.program.num_replicas
        bind = self._binder.bind
        return [
            generate(name, module.graph, functools.partial(bind, r), boxed=_is_region, clock=clocks[r], pauses=pauses)
            for r, (name, module) in enumerate(self.program.device_graphs.items())
        ]

    def run(
        self, pool: DevicePool, shards: Sequence[Sequence[torch.Tensor]], weights: Sequence[float], seed: int | None
    ) -> torch.Tensor:
        """Runs one step.

        Args:
            pool: the devices' threads.
            shards: for each replica, its tensors in order of the call's leaves.
            weights: for each replica, the weight of its loss in the batch's loss.
            seed: the seed of the step's random streams, if the program draws random numbers.

        Returns:
            The weighted sum of the replicas' losses, a scalar on the first device.

        Raises:
            ExecutionError: a replica failed; names device, operation and source line.
            ValueError: the optimizer has become one that cannot be captured in a CUDA graph.
        """
        self._state.begin()
        self.bind()
        self._renew_step_graph()
        self._choose_way()
        if self.recorder is not None:
            self.recorder.begin()
        weight_tensors = self._weight_tensors(tuple(weights))
        held_by = dict.fromkeys(device.torch_device for device in self.program.devices)
        start = [record_event(device) for device in held_by]  # what the caller's streams have queued comes first
        given = [
            (replica, start, shards[replica], weight_tensors[replica], seed)
            for replica in range(self.program.num_replicas)
        ]
        began = time.perf_counter()
        try:
            if self.is_interleaved:
                results = pool.run_here(lambda: interleave([self._run_interleaved(*own) for own in given]))
            else:
                results = pool.run([functools.partial(self._run_replica, *own) for own in given], self._abort)
        except BaseException:
            if not pool.is_stuck:  # a device that is stuck must find its rendezvous aborted when it goes on
                self._begin_afresh(pool)
            raise
        failures = {replica: error for replica, (succeeded, error) in enumerate(results) if not succeeded}
        if failures:
            self._begin_afresh(pool)
            raise explain_failure(self.program.devices, failures, self._state.has_updated)
        if self.is_interleaved == self.trial.interleaves:
            self.trial.record(time.perf_counter() - began)
        for communicator in self._communicators.values():
            communicator.release()
        return self._global_loss([value for _, value in results], weights)

    def _choose_way(self) -> None:
        """Chooses threads or interleaving; if the last step was of the other mode or of another program, forgets its records."""
        is_interleaved = self.trial.interleaves and is_plain_thread()
        if is_interleaved and not self._pausing_functions:
            self._pausing_functions = self._generate(lambda node: node.target is ops.wait)
        if is_interleaved != self.is_interleaved and self.recorder is not None:
            self.recorder.clear()
        self.is_interleaved = is_interleaved
        writer = (id(self), is_interleaved)  # threads and interleaving each have their own pieces of shares
        if not self._state.keeps_gradients_of(writer):
            forget_what_is_written(self._binder.pieces)
        self._state.give_gradients_to(writer)

    def _renew_step_graph(self) -> None:
        """Drops a graph that was captured for another layout of memory or for other hyperparameters."""
        if self._step_graph is None:
            return
        optimizers = self._state.optimizers
        fixed = {"memory": self._state.layout, "hyperparameters": optimizers.baked_hyperparameters()}
        if not self._step_graph.is_for(**fixed):
            check_capturable(optimizers.user_optimizer, self.program.variables)
            self._step_graph.renew(**fixed)

    def release(self) -> None:
        """Frees the memory that it keeps on a GPU for later steps."""
        if self._step_graph is not None:
            self._step_graph.release()

    def _run_replica(self, replica: int, *given: Any) -> tuple[torch.Tensor, Any]:
        """Runs a replica's step in its thread; returns its loss, and an event that tells when a GPU has done the step."""
        values = self._arguments(replica, *given)
        call = self._functions[replica].call
        loss = call(values) if self._step_graph is None else self._run_captured(self._step_graph, call, values)
        done = record_event(self.program.devices[replica].torch_device)
        self._host_copies[replica].wait_until_read()
        return loss, done

    def _run_interleaved(self, replica: int, *given: Any) -> PausingStep:
        """Runs a replica's step on a CPU in the caller's thread."""
        loss = yield from self._pausing_functions[replica].call(self._arguments(replica, *given))
        return loss, None

    def _arguments(
        self, replica: int, start: Sequence[Any], shard: Sequence[torch.Tensor], weight: torch.Tensor, seed: int | None
    ) -> list[torch.Tensor]:
        for event in start:
            wait_event(event)
        values: list[torch.Tensor] = []
        for argument in self.program.arguments:
            if argument.kind is ArgumentKind.BATCH:
                own = shard[argument.leaf]  # type: ignore[index]
                values.append(own if self._step_graph is not None else self._host_copies[replica].to_device(own))
            elif argument.kind is ArgumentKind.LOSS_WEIGHT:
                values.append(weight)
            else:
                assert seed is not None
                values.append(torch.tensor(mix(seed, replica), dtype=torch.int64))
        return values

    def _run_captured(
        self, step_graph: StepGraph, function: Callable[[list[Any]], Any], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Runs a step with a CUDA graph, which is captured when it is due and replayed from then on."""
        step_graph.load(values)
        if any(value.device.type == "cpu" and value.is_pinned() for value in values):
            self._host_copies[0].note_reads()
        if step_graph.is_due:
            try:
                with self._state.optimizers.capturing():
                    step_graph.capture(function)
            finally:
                self._state.has_updated = False  # the calls were made, but nothing has run
        self._state.has_updated = step_graph.is_captured
        return step_graph.run(function)

    def _weight_tensors(self, weights: tuple[float, ...]) -> list[torch.Tensor]:
        if weights not in self._weights:
            graph = next(iter(self.program.device_graphs.values())).graph
            (argument,) = placeholders_of(graph, self.program.arguments, ArgumentKind.LOSS_WEIGHT)
            like = argument.meta["val"]
            self._weights[weights] = [
                torch.full(like.shape, weight, dtype=like.dtype, device=device.torch_device)
                for weight, device in zip(weights, self.program.devices, strict=True)
            ]
        return self._weights[weights]

    def _global_loss(self, results: Sequence[tuple[torch.Tensor, Any]], weights: Sequence[float]) -> torch.Tensor:
        home = self.program.devices[0].torch_device
        for (loss, event), device in zip(results, self.program.devices, strict=True):
            kept_for_caller(loss)
            wait_event(event, home)
            wait_event(event, device.torch_device)  # the caller may reuse the shards' memory there
        dtype = results[0][0].dtype
        exact = torch.float32 if dtype.itemsize < 4 else dtype
        with torch.no_grad():
            parts = [loss.to(home, exact) * weight for (loss, _), weight in zip(results, weights, strict=True)]
            return functools.reduce(torch.add, parts).to(dtype).reshape(())

    def _abort(self) -> None:
        self._forget_step()
        for communicator in self._communicators.values():
            communicator.abort()

    def _forget_step(self) -> None:
        if self.recorder is not None:
            self.recorder.forget()

    def _begin_afresh(self, pool: DevicePool) -> None:
        """Cleans up after a failed step: waits for the GPUs' queued work, because the memory of the step will be used again."""
        for device in dict.fromkeys(device.torch_device for device in self.program.devices):
            if not wait_device(device, self._timeout_seconds):
                pool.is_stuck = True  # no further step may use its memory
        self._forget_step()
        self._state.abandon()
        for communicator in self._communicators.values():
            communicator.begin_afresh()


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_module"
