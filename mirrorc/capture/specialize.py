"""From a model and a batch's shapes to a captured program, ready for the passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from mirrorc.capture.arguments import Call
from mirrorc.capture.captured_graph import CapturedGraph
from mirrorc.capture.constants import with_constants_apart
from mirrorc.capture.counted_lookups import notes_on_counted_lookups
from mirrorc.capture.dropped_effects import Note
from mirrorc.capture.errors import refuse_synchronized_statistics
from mirrorc.capture.front_ends import AUTO, FrontEnd, capture, front_end_named, outputs_for
from mirrorc.capture.guards import AllGuards
from mirrorc.capture.model_state import ModelState
from mirrorc.capture.number_inputs import captured_with_numbers, remarks_on_numbers
from mirrorc.capture.outputs import Outputs, outputs_of
from mirrorc.capture.shards import Shards
from mirrorc.capture.sums_and_means import notes_on_reductions
from mirrorc.capture.time_axes import refuse_split_time
from mirrorc.capture.traced_outputs import TracedOutputs
from mirrorc.capture.training_call import TrainingCall
from mirrorc.capture.weighted_means import differences_in, remarks_on
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.identifiers import identifier
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import LOSS_OUTPUT, ArgumentKind, Program, Stage
from mirrorc.ir.variables import Aggregation, Role, Synchronization, Variable
from mirrorc.optimizers import hyperparameters_by_label, update_rules
from mirrorc.torch_internals import is_dense

ShardTypes = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


@dataclass(frozen=True)
class CapturedProgram:
    """A CAPTURED program, and what it was captured from.

    Attributes:
        program: the program.
        constants: the tensors in it that are neither parameters nor buffers.
        guards: whether the Python state that its graphs depend on is as it was.
        notes: warnings to give, once.
        outputs: what a step returns beside its loss, if that is kept.
        differences: sentences on what makes a step on this batch differ from that of one device.
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    guards: AllGuards
    differences: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    outputs: Outputs | None = None


def shard_types(shard: Sequence[torch.Tensor], device: torch.device) -> ShardTypes:
    """The shapes, strides and dtypes on which a graph is specialized: those that a replica's tensors have on its device.

    A tensor with gaps or overlaps becomes dense when it is moved to another device.
    """
    moved = [t if t.device == device or is_dense(t) else torch.empty_like(t, device="meta") for t in shard]
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in moved)


def capture_program(
    training_call: TrainingCall,
    call: Call,
    shards: Shards,
    devices: tuple[Device, ...],
    state: ModelState,
    optimizer: torch.optim.Optimizer,
    decompositions: Mapping[Any, Callable[..., Any]],
    *,
    front_end: FrontEnd | None = None,
    loss_reduction: str = "mean",
) -> CapturedProgram:
    """Captures one graph for each distinct shape of a shard.

    Args:
        training_call: model and loss.
        call: the step's arguments, taken apart into tensors.
        shards: the shards of these tensors, one for each device.
        devices: the devices, in order of replicas.
        state: the model's variables.
        optimizer: the user's optimizer.
        decompositions: the decompositions of ATen operators that the backend prefers.
        front_end: traces the model; None for the one that is registered first.

    Raises:
        CaptureError: the model cannot be captured.
        ValueError: it reads a parameter or a buffer that was added to it since the step was made.
    """
    refuse_synchronized_statistics(training_call)
    front_end = front_end or front_end_named(AUTO)
    home = devices[0].torch_device
    types_of = [
        shard_types(shard, device.torch_device) if size else None
        for shard, device, size in zip(shards.tensors, devices, shards.num_examples, strict=True)
    ]
    distinct = list(dict.fromkeys(types for types in types_of if types is not None))
    shard_of_replica = tuple(distinct.index(types) if types is not None else None for types in types_of)
    examples = [_examples(types, home) for types in distinct]
    captured = _capture_each(front_end, training_call, call, examples, state, optimizer, decompositions)
    if len(devices) > 1:
        refuse_split_time(call.leaves, captured[0].leaves_with_time_first, type(training_call.model).__name__)

    def trace_grown() -> TracedOutputs | None:
        return outputs_for(front_end, training_call, _examples(_grown(distinct[0], call), home))

    keeps = training_call.keeps_outputs
    outputs = _gathered(captured, shard_of_replica, shards.num_examples, loss_reduction, trace_grown) if keeps else None
    return CapturedProgram(
        _program(captured, shard_of_replica, shards.num_examples, devices, state, optimizer, loss_reduction),
        {name: value for graph in captured for name, value in graph.constants.items()},
        AllGuards([graph.guards for graph in captured]),
        differences_in(captured[0].weighted_means, shards),
        _notes(captured, outputs, len(devices), type(training_call.model).__name__, loss_reduction),
        outputs,
    )


def _program(
    captured: Sequence[CapturedGraph],
    shard_of_replica: tuple[int | None, ...],
    num_examples: tuple[int, ...],
    devices: tuple[Device, ...],
    state: ModelState,
    optimizer: torch.optim.Optimizer,
    loss_reduction: str,
) -> Program:
    program = Program(
        stage=Stage.CAPTURED,
        devices=devices,
        variables=_variables(captured, state, optimizer),
        arguments=captured[0].arguments,
        shard_graphs=tuple(c.graph for c in captured),
        shard_of_replica=shard_of_replica,
        num_examples=num_examples,
        loss_reduction=loss_reduction,
        optimizer_groups=hyperparameters_by_label(optimizer) if captured[0].trains else {},
    )
    told = remarks_on_numbers(captured[0])
    return program.with_remarks(*remarks_on(captured[0].weighted_means, len(devices)), *told)


def _capture_each(
    front_end: FrontEnd,
    training_call: TrainingCall,
    call: Call,
    examples_of: Sequence[Sequence[torch.Tensor]],
    state: ModelState,
    optimizer: torch.optim.Optimizer,
    decompositions: Mapping[Any, Callable[..., Any]],
) -> list[CapturedGraph]:
    """One graph for each kind of shard, of which there are example tensors; the graphs agree on what they are a step of."""
    groups = optimizer.param_groups if training_call.trains else []
    updated = {id(parameter) for group in groups for parameter in group["params"]}
    trained = {name for name, p in state.parameters.items() if id(p) in updated and p.requires_grad}
    names = _unique([identifier(leaf.path) for leaf in call.leaves])
    paths, added = state.names_now()

    def captured_from(examples: Sequence[torch.Tensor]) -> CapturedGraph:
        graph = capture(front_end, training_call, examples, names, paths, trained, decompositions)
        _refuse_added(graph, added)
        return graph

    captured = captured_with_numbers(training_call.numbers, lambda: [captured_from(own) for own in examples_of])
    captured = with_constants_apart(captured, {*paths.values(), *state.tensors})
    _check_agreement(captured, type(training_call.model).__name__)
    return captured


def _examples(types: ShardTypes, device: torch.device) -> list[torch.Tensor]:
    """Tensors of these types, of any values."""
    return [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in types]


def _notes(
    captured: Sequence[CapturedGraph], outputs: Outputs | None, num_devices: int, what: str, loss_reduction: str
) -> tuple[Note, ...]:
    """The warnings to give on all graphs, each once."""
    notes = [note for graph in captured for note in graph.notes]
    if outputs is not None and outputs.told:
        notes.append(Note(f"{what}: {outputs.told}", "<unknown>", 0))
    if num_devices > 1 and captured[0].trains:
        notes += notes_on_counted_lookups(captured[0].graph, what)
        notes += notes_on_reductions(captured[0].reductions, loss_reduction, num_devices, what)
    return tuple(dict.fromkeys(notes))


def _gathered(
    captured: Sequence[CapturedGraph],
    shard_of_replica: Sequence[int | None],
    num_examples: Sequence[int],
    loss_reduction: str,
    trace_grown: Callable[[], TracedOutputs | None],
) -> Outputs:
    """What steps return beside their loss; notes in the graphs how each output is gathered, and the loss of an evaluation."""
    sizes = [num_examples[shard_of_replica.index(shard)] for shard in range(len(captured))]
    traced = [graph.outputs for graph in captured if graph.outputs is not None]
    other = trace_grown() if len(set(sizes)) == 1 and len(shard_of_replica) > 1 else None
    outputs = outputs_of(traced, shard_of_replica, [*sizes, *([sizes[0] + 1] if other is not None else [])], other)
    ways = {**outputs.ways, LOSS_OUTPUT: "averaged" if loss_reduction == "mean" else "summed"}
    for graph in captured:
        for node in calls_to(graph.graph, ops.gather):
            node.kwargs = {**node.kwargs, "how": ways[str(node.kwargs["output"])]}
    return outputs


def _grown(types: ShardTypes, call: Call) -> ShardTypes:
    """The types of a shard with one example more, laid out in the same order of dimensions."""
    grown = []
    for (size, stride, dtype), leaf in zip(types, call.leaves, strict=True):
        shape = [size[0] + 1, *size[1:]] if leaf.split else list(size)
        strides, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):  # the innermost first
            strides[dim] = step
            step *= shape[dim]
        grown.append((torch.Size(shape), tuple(strides), dtype))
    return tuple(grown)


def _unique(names: list[str]) -> list[str]:
    taken = {"args", *(kind.value for kind in ArgumentKind if kind is not ArgumentKind.BATCH)}
    for i, name in enumerate(names):
        while name in taken:
            name += "_"
        taken.add(name)
        names[i] = name
    return names


def _refuse_added(captured: CapturedGraph, added: Mapping[str, str]) -> None:
    """Refuses variables that were added to the model: memory, updates and copies are made for those that it had."""
    for node in calls_to(captured.graph, ops.read):
        if node.kwargs["variable"] in added:
            raise ValueError(
                f"the model's {added[str(node.kwargs['variable'])]} was added since mirrorc.compile(): make a new optimizer over "
                "model.parameters() and compile the model anew"
            )


def _check_agreement(captured: Sequence[CapturedGraph], what: str) -> None:
    """Checks that the graphs of all shard shapes make the same gradients and draw random numbers in the same places."""
    first, *others = captured
    for other in others:
        for part in ("gradients", "writes"):
            if set(_output(first)[part]) != set(_output(other)[part]):
                raise CaptureError(
                    f"{what} makes other {part} for a shard of another size: its graph depends on the batch size; use "
                    "batches that divide by the number of devices"
                )
        if [argument.kind for argument in first.arguments] != [argument.kind for argument in other.arguments]:
            raise CaptureError(f"{what} draws random numbers for some shard sizes only; use batches that divide evenly")


def _output(captured: CapturedGraph) -> dict[str, Any]:
    output = captured.graph.output_node().args[0]
    assert isinstance(output, dict)
    return output


def _variables(
    captured: Sequence[CapturedGraph], state: ModelState, optimizer: torch.optim.Optimizer
) -> dict[str, Variable]:
    read = dict.fromkeys(str(node.kwargs["variable"]) for c in captured for node in calls_to(c.graph, ops.read))
    gradients, writes = _output(captured[0])["gradients"], _output(captured[0])["writes"]
    rules = update_rules(optimizer, state.parameters, list(gradients))
    constants = {name: value for c in captured for name, value in c.constants.items()}
    variables = {}
    for name in [*read, *(name for name in writes if name not in read)]:
        tensor = state.tensors[name] if name in state.tensors else constants[name]
        role = Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.BUFFER
        synchronization, aggregation = Synchronization.MIRRORED, Aggregation.NONE
        if name in writes:
            synchronization = Synchronization.PER_REPLICA
            aggregation = Aggregation.MEAN if tensor.dtype.is_floating_point else Aggregation.FIRST
        shape = tuple(tensor.shape)
        strides = tuple(tensor.stride())
        variables[name] = Variable(
            name, shape, strides, tensor.dtype, role, synchronization, aggregation, rules.get(name)
        )
    return variables
