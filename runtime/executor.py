"""Runs a lowered program: binds every device's graph to memory, regions and communicators, and runs them in step."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc import ops
from mirrorc.optimizers import check_capturable
from mirrorc.program import Program
from mirrorc.randomness import mix
from mirrorc.runtime.backend import RegionFunction
from mirrorc.runtime.buffers import VariableStore
from mirrorc.runtime.codegen import Constant, GraphFunction, generate
from mirrorc.runtime.communicator import Communicator, communicator_for
from mirrorc.runtime.communicator.base import record_event, wait_device, wait_event
from mirrorc.runtime.cuda_graphs import StepGraph
from mirrorc.runtime.device_thread import DevicePool
from mirrorc.runtime.factored_gradients import (
    FactoredBucket,
    Factors,
    Piece,
    factored_slots,
    forget_what_is_written,
    make_whole,
    pieces_of_share,
)
from mirrorc.runtime.failures import explain_failure
from mirrorc.runtime.optimizer import BucketOptimizers
from mirrorc.runtime.recording import Recorder


@dataclass(frozen=True)
class Memory:
    """What the programs of one step share."""

    store: VariableStore
    optimizers: BucketOptimizers


class Executor:
    """A lowered program, ready to run.

    Args:
        program: a LOWERED program.
        regions: for each device, its compiled regions by name.
        memory: variables and optimizer.
        constants: tensors that the capture found outside of parameters and buffers.
        timeout_seconds: bound of every wait among replicas.
        recorder: keeps the times of its last steps; None for none.
        step_graph: captures and replays the steps of a program of one device; None to make every call anew.
    """

    def __init__(
        self,
        program: Program,
        regions: Sequence[Mapping[str, RegionFunction]],
        memory: Memory,
        constants: Mapping[str, torch.Tensor],
        timeout_seconds: float,
        recorder: Recorder | None = None,
        step_graph: StepGraph | None = None,
    ) -> None:
        self.program = program
        self.recorder = recorder
        self._step_graph = step_graph
        self.regions = regions
        self._memory = memory
        self._constants = constants
        self._communicators = self._make_communicators(timeout_seconds)
        self._functions: list[GraphFunction] = []
        self._pieces: list[Piece] = []
        self._layout = -1
        self._weights: dict[tuple[Any, ...], list[torch.Tensor]] = {}
        self.has_updated = False  # whether the last run got as far as changing variables

    def _make_communicators(self, timeout_seconds: float) -> dict[str, Communicator]:
        tags: dict[str, list[tuple[str, int]]] = {}
        for module in self.program.device_graphs.values():
            for node in ops.calls(module.graph, *ops.REDUCTIONS, ops.send):
                found, tag = tags.setdefault(str(node.kwargs["link"]), []), (ops.name_of(node), ops.bucket_of(node))
                if tag not in found:
                    found.append(tag)
        made = {link: communicator_for(link, self.program.devices, timeout_seconds) for link in tags}
        for link, communicator in made.items():
            communicator.prepare(tags[link])
        self._tags = tags
        return made

    def bind(self) -> None:
        """Binds the program to the memory's present layout."""
        if self._layout == self._memory.store.layout:
            return
        clocks = self.recorder.clocks if self.recorder is not None else [None] * self.program.num_replicas
        modules = self.program.device_graphs.items()
        self._pieces = []
        self._functions = [
            generate(name, module.graph, functools.partial(self._bind_node, r), boxed=_is_region, clock=clocks[r])
            for r, (name, module) in enumerate(modules)
        ]
        if self.recorder is not None:
            self.recorder.nodes = [function.marked for function in self._functions]
        self._layout = self._memory.store.layout

    def _bind_node(self, replica: int, node: fx.Node) -> Any:
        """What carries out a node on a replica. Arguments that only the compiler needs are bound away."""
        if node.op == "call_module":
            return self.regions[replica][str(node.target)]
        if node.target is operator.getitem or ops.is_compute(node):
            return node.target
        return _BINDERS[node.target](self, replica, node)

    def _bind_read(self, replica: int, node: fx.Node) -> Constant:
        name = str(node.kwargs["variable"])
        if name in self._constants:
            return Constant(self._constants[name].to(self.program.devices[replica].torch_device))
        return Constant(self._memory.store.values(name)[replica])

    def _bind_slot(self, replica: int, node: fx.Node) -> Constant:
        flat = self._memory.store.buckets[ops.bucket_of(node)]
        names = [slot.variable for slot in flat.bucket.slots]
        return Constant(flat.gradient_slots[replica][names.index(str(node.kwargs["variable"]))])

    def _bind_pack(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor | FactoredBucket]:
        flat = self._memory.store.buckets[ops.bucket_of(node)]
        slots, whole = flat.gradient_slots[replica], flat.gradients[replica]
        factored = factored_slots(node)
        left = [slot.place for slot in factored]
        plain = [i for i in range(len(slots)) if i not in left]
        pieces = pieces_of_share(flat.bucket, factored, replica, self.program.num_replicas)
        self._pieces += pieces
        is_left_to_shares = all(
            user.target is ops.reduce_scatter and user.kwargs["link"] == "shared-memory" for user in node.users
        )

        def pack(*gradients: Any, **_: Any) -> torch.Tensor | FactoredBucket:
            for i in plain:
                if gradients[i] is not slots[i]:  # else backward wrote it there
                    slots[i].copy_(gradients[i])
            if factored and is_left_to_shares:
                return FactoredBucket(whole, [gradients[i] for i in left], pieces)
            if factored:
                make_whole(whole, flat.bucket, factored, [gradients[i] for i in left])
            return whole

        return pack

    def _bind_factored(self, replica: int, node: fx.Node) -> Callable[..., Any]:
        stays_factored, make = ops.stays_factored(node), _maker(node)

        def factored(one: torch.Tensor, other: torch.Tensor, **_: Any) -> Factors | torch.Tensor:
            return (one, other) if stays_factored else make(one, other)

        return factored

    def _bind_reduction(self, replica: int, node: fx.Node) -> Callable[..., Any]:
        communicator, bucket = self._communicators[str(node.kwargs["link"])], ops.bucket_of(node)
        launch: Any = {
            ops.all_reduce: communicator.launch_all_reduce,
            ops.reduce_scatter: communicator.launch_reduce_scatter,
        }[node.target]  # type: ignore[index]

        def reduction(own: torch.Tensor | FactoredBucket, **_: Any) -> Any:
            return launch(bucket, replica, own)

        return reduction

    def _bind_send(self, replica: int, node: fx.Node) -> Callable[..., None]:
        communicator, bucket = self._communicators[str(node.kwargs["link"])], ops.bucket_of(node)
        parameters = self._memory.store.buckets[bucket].parameters[replica]

        def send(*_: Any, destination: int, **__: Any) -> None:
            communicator.send(bucket, replica, destination, parameters)

        return send

    def _bind_recv(self, replica: int, node: fx.Node) -> Callable[..., None]:
        def recv(**_: Any) -> None:
            """Nothing to do before the wait: the sender's memory is fetched from there."""

        return recv

    def _bind_wait(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        collective = node.args[0]
        assert isinstance(collective, fx.Node)
        communicator, bucket = self._communicators[str(collective.kwargs["link"])], ops.bucket_of(node)
        waits: dict[Any, Callable[..., torch.Tensor]] = {
            ops.all_reduce: communicator.wait_all_reduce,
            ops.reduce_scatter: communicator.wait_reduce_scatter,
            ops.recv: functools.partial(communicator.receive, source=collective.kwargs.get("source")),  # type: ignore[arg-type]
        }
        wait_for = waits[collective.target]

        def wait(pending: Any, **_: Any) -> torch.Tensor:
            return wait_for(bucket, replica, pending=pending)

        return wait

    def _bind_update(self, replica: int, node: fx.Node) -> Callable[..., None]:
        apply = self._memory.optimizers.updater(ops.bucket_of(node), replica)

        def update(gradient: torch.Tensor, **_: Any) -> None:
            self.has_updated = True
            apply(gradient)

        return update

    def _bind_step_optimizer(self, replica: int, node: fx.Node) -> Callable[..., None]:
        def step_optimizer(*gradients: torch.Tensor, buckets: Sequence[int], **_: Any) -> None:
            self.has_updated = True
            self._memory.optimizers.step_by_itself(buckets, *gradients)

        return step_optimizer

    def _bind_store(self, replica: int, node: fx.Node) -> Callable[..., None]:
        parameters = self._memory.store.buckets[ops.bucket_of(node)].parameters[replica]

        def store(value: torch.Tensor, **_: Any) -> None:
            parameters.copy_(value)

        return store

    def _bind_write(self, replica: int, node: fx.Node) -> Callable[..., None]:
        own = self._memory.store.values(str(node.kwargs["variable"]))[replica]

        def write(value: torch.Tensor, **_: Any) -> None:
            own.copy_(value)

        return write

    def run(
        self, pool: DevicePool, shards: Sequence[Sequence[torch.Tensor]], weights: Sequence[float], seed: int | None
    ) -> torch.Tensor:
        """Runs one step.

        Args:
            pool: the devices' threads.
            shards: for each replica, its tensors in order of the call's leaves.
            weights: for each replica, its part of the batch's loss.
            seed: of the step's random streams, if the program draws random numbers.

        Returns:
            The weighted sum of the replicas' losses, a scalar on the first device.

        Raises:
            ExecutionError: a replica failed; names device, operation and source line.
            ValueError: the optimizer has become one that cannot be captured in a CUDA graph.
        """
        self.bind()
        self._renew_step_graph()
        if self.recorder is not None:
            self.recorder.begin()
        self.has_updated = False
        if self._memory.store.gradients_are_of is not self or not self._memory.optimizers.leave_gradients:
            forget_what_is_written(self._pieces)
        self._memory.store.gradients_are_of = self
        weight_tensors = self._weight_tensors(tuple(weights))
        held_by = dict.fromkeys(device.torch_device for device in self.program.devices)
        start = [record_event(device) for device in held_by]  # what the caller's streams have queued comes first
        jobs = [
            functools.partial(self._run_replica, replica, start, shards[replica], weight_tensors[replica], seed)
            for replica in range(self.program.num_replicas)
        ]
        try:
            results = pool.run(jobs, self._abort)
        except BaseException:
            if not pool.is_stuck:  # who is stuck shall find the meetings it was to come to, called off
                self._begin_afresh()
            raise
        failures = {replica: error for replica, (succeeded, error) in enumerate(results) if not succeeded}
        if failures:
            self._begin_afresh()
            raise explain_failure(self.program.devices, failures, self.has_updated)
        for communicator in self._communicators.values():
            communicator.release()
        return self._global_loss([value for _, value in results], weights)

    def _renew_step_graph(self) -> None:
        """Drops what was captured for another layout of memory, or for other hyperparameters."""
        if self._step_graph is None:
            return
        optimizers = self._memory.optimizers
        layout, baked = self._memory.store.layout, optimizers.baked_hyperparameters()
        if self._step_graph.renew(memory=layout, hyperparameters=baked):
            check_capturable(optimizers.user_optimizer, self.program.variables)

    def release(self) -> None:
        """Frees what it keeps on a GPU for steps to come."""
        if self._step_graph is not None:
            self._step_graph.release()

    def _run_replica(
        self, replica: int, start: Sequence[Any], shard: Sequence[torch.Tensor], weight: torch.Tensor, seed: int | None
    ) -> tuple[torch.Tensor, Any]:
        """A replica's step, in its thread; gives its loss, and an event for when a GPU has done it."""
        device = self.program.devices[replica].torch_device
        for event in start:
            wait_event(event)
        values: list[torch.Tensor] = []
        for argument in self.program.arguments:
            if argument.kind == "batch":
                own = shard[argument.leaf]  # type: ignore[index]
                values.append(own if self._step_graph is not None else own.to(device, non_blocking=True))
            elif argument.kind == "loss_weight":
                values.append(weight)
            else:
                assert seed is not None
                values.append(torch.tensor(mix(seed, replica), dtype=torch.int64))
        call = self._functions[replica].call
        loss = call(values) if self._step_graph is None else self._run_captured(self._step_graph, call, values)
        return loss, record_event(device)

    def _run_captured(
        self, step_graph: StepGraph, function: Callable[[list[Any]], Any], values: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """A step with a graph: captured when it is due, and replayed from then on."""
        step_graph.load(values)
        if step_graph.is_due:
            try:
                with self._memory.optimizers.capturing():
                    step_graph.capture(function)
            finally:
                self.has_updated = False  # the calls were made, but nothing has run
        self.has_updated = step_graph.is_captured
        return step_graph.run(function)

    def _weight_tensors(self, weights: tuple[float, ...]) -> list[torch.Tensor]:
        if weights not in self._weights:
            graph = next(iter(self.program.device_graphs.values())).graph
            like = next(n for n in graph.nodes if n.op == "placeholder" and n.target == "loss_weight").meta["val"]
            self._weights[weights] = [
                torch.full(like.shape, weight, dtype=like.dtype, device=device.torch_device)
                for weight, device in zip(weights, self.program.devices, strict=True)
            ]
            if self.program.devices[0].torch_device.type == "cuda":
                torch.cuda.synchronize()  # once: other streams will read them
        return self._weights[weights]

    def _global_loss(self, results: Sequence[tuple[torch.Tensor, Any]], weights: Sequence[float]) -> torch.Tensor:
        home = self.program.devices[0].torch_device
        for (_, event), device in zip(results, self.program.devices, strict=True):
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

    def _begin_afresh(self) -> None:
        """After a step that failed: nobody waits for the end of what GPUs were given of it, and its memory is used anew."""
        for device in dict.fromkeys(device.torch_device for device in self.program.devices):
            wait_device(device)
        self._forget_step()
        self._memory.store.gradients_are_of = None
        for link, communicator in self._communicators.items():
            communicator.prepare(self._tags[link])


def _maker(gradient: fx.Node) -> Callable[..., torch.Tensor]:
    """The function of two factors that makes a gradient whole."""
    target, (_, _, *others) = ops.made_whole(gradient)
    return lambda one, other: target(one, other, *others)


def _is_region(node: fx.Node) -> bool:
    return node.op == "call_module"


_BINDERS: dict[Any, Callable[[Executor, int, fx.Node], Any]] = {
    ops.read: Executor._bind_read,
    ops.slot: Executor._bind_slot,
    **dict.fromkeys(ops.FACTORED, Executor._bind_factored),
    ops.pack: Executor._bind_pack,
    ops.all_reduce: Executor._bind_reduction,
    ops.reduce_scatter: Executor._bind_reduction,
    ops.send: Executor._bind_send,
    ops.recv: Executor._bind_recv,
    ops.wait: Executor._bind_wait,
    ops.update: Executor._bind_update,
    ops.step_optimizer: Executor._bind_step_optimizer,
    ops.store: Executor._bind_store,
    ops.write: Executor._bind_write,
}
