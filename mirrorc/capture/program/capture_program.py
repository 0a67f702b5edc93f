"""Captures a model as a program, for the shapes of a batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.call.shards import (
    STAND_IN_SIZE,
    Shards,
    SymbolicDims,
    data_of,
    examples_of,
    graphs_to_capture,
    grown_types,
    leaves_of,
    mark_symbolic_dims,
)
from mirrorc.capture.call.step_outputs import Outputs, outputs_of, refuse_outputs_apart
from mirrorc.capture.call.traced_loss import BuffersAssigned, TracedLoss
from mirrorc.capture.call.traced_outputs import TracedOutputs
from mirrorc.capture.diagnostics.capture_errors import EVEN_BATCHES
from mirrorc.capture.diagnostics.loss_means import differences_in, notes_on_reductions, remarks_on
from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.capture.diagnostics.split_effects import refuse_split_time, refuse_undefined, undefined_in
from mirrorc.capture.diagnostics.written_buffers import aggregation_alike, notes_on_rows
from mirrorc.capture.front_ends.front_end import AUTO, AllGuards, FrontEnd, front_end_named
from mirrorc.capture.model.model_state import ModelState, free_name
from mirrorc.capture.program.captured_graph import CapturedGraph, capture, outputs_for
from mirrorc.capture.program.gathered_rows import GatheredRows
from mirrorc.capture.program.number_inputs import (
    SymbolicSizes,
    captured_with_numbers,
    remarks_on_numbers,
    with_equal_sizes,
    with_numbers_of_each,
)
from mirrorc.capture.rewrites.replica_exchanges import refuse_replica_values, refuse_stale_buffers
from mirrorc.capture.rewrites.sparse_lookups import notes_on_counted_lookups, refuse_split_offsets
from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.custom_ops.replica_collectives import gathering
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.names import identifier
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import LOSS_OUTPUT, Argument, ArgumentKind, Program, Stage, gradient_output
from mirrorc.ir.type_rules import any_value
from mirrorc.ir.variables import Aggregation, Role, Synchronization, Variable
from mirrorc.ir.workers import ALONE, Workers
from mirrorc.messages.problem import message, problem
from mirrorc.torch_internals import Decompositions
from mirrorc.user.optimizer_groups import OptimizerGroups, gradient_rule, hyperparameters_by_label, update_rules


@dataclass(frozen=True)
class CapturedProgram:
    """A program at stage CAPTURED, with the state that its steps read.

    Attributes:
        constants: tensors other than parameters and buffers.
        differences: sentences on differences between this batch's step and one device.
        outputs: None if steps return only the loss.
        sizes: None if all sizes are constants.
    """

    program: Program
    constants: Mapping[str, torch.Tensor]
    guards: AllGuards
    differences: tuple[str, ...] = ()
    notes: tuple[Note, ...] = ()
    outputs: Outputs | None = None
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    sizes: SymbolicSizes | None = None

    @property
    def loss_dtype(self) -> torch.dtype | None:
        output: Any = self.program.shard_graphs[0].output_node().args[0]
        return output["loss"].meta["val"].dtype if self.program.trains else None

    def written(self) -> set[str]:
        variables = self.program.variables.values()
        return {v.name for v in variables if v.synchronization is Synchronization.PER_REPLICA}


def capture_program(
    traced_loss: TracedLoss,
    call: Call,
    shards: Shards,
    devices: tuple[Device, ...],
    state: ModelState,
    optimizers: OptimizerGroups | None,
    decompositions: Decompositions,
    *,
    front_end: FrontEnd | None = None,
    loss_reduction: str = "mean",
    symbolic: SymbolicDims = (),
    workers: Workers = ALONE,
) -> CapturedProgram:
    """Captures a graph for each distinct shape of a shard or microbatch; one graph for a worker without examples.

    Args:
        optimizers: None without updates; then all parameters that require gradients get them.
    """
    model_name = type(traced_loss.model).__name__
    front_end = front_end or front_end_named(AUTO)
    distinct, runs = graphs_to_capture(shards, call, devices, symbolic)
    traced_loss.data = data_of(shards, call, devices) if front_end.needs_data else None
    examples = leaves_of(distinct, traced_loss.data, devices[0].torch_device, model_name)
    for tensors in examples:
        mark_symbolic_dims(tensors, symbolic)
        for leaf in traced_loss.differentiated:
            tensors[leaf].requires_grad_()
    rows = GatheredRows(shards.num_examples, runs, workers, shards.rows_elsewhere)

    def capture_all() -> list[CapturedGraph]:
        about = (call, examples, rows, state, optimizers, decompositions)
        return _capture_each(front_end, traced_loss, *about, are_sizes_symbolic=any(symbolic))

    captured = rows.capture_until_stable(capture_all, model_name)
    captured = with_numbers_of_each(captured) if shards.microbatches else captured
    _refuse_splits(captured, runs, call, shards, devices, model_name)

    def trace_grown() -> TracedOutputs | None:
        with gathering(rows.of(0, more=1), rows.num_replicas):
            grown = examples_of(grown_types(distinct[0], call), devices[0].torch_device)
            return outputs_for(front_end, traced_loss, grown)

    parts = shards.by_microbatch(call)
    means_of = [captured[index].traced.weighted_means for indices in runs for index in indices]
    means_of = [*captured[0].traced.means_of_shards] or means_of
    outputs = None
    if traced_loss.keeps_outputs:
        outputs = _gathered(captured, runs, call, shards, loss_reduction, trace_grown)
    return CapturedProgram(
        _program(captured, runs, call, shards, devices, state, optimizers, loss_reduction),
        {name: value for graph in captured for name, value in graph.constants.items()},
        AllGuards([graph.traced.guards for graph in captured]),
        differences_in(means_of, parts),
        _notes(captured, outputs, len(parts.num_examples), model_name, loss_reduction)
        + (_notes_on_rows(captured[0], call, model_name) if len(runs) > 1 else ()),
        outputs,
        {name: tensor for graph in captured for name, tensor in graph.outside.items()},
        _sizes(captured, runs, shards, call),
    )


def _refuse_splits(
    captured: Sequence[CapturedGraph],
    runs: tuple[tuple[int, ...], ...],
    call: Call,
    shards: Shards,
    devices: tuple[Device, ...],
    model_name: str,
) -> None:
    graphs, in_parts = [graph.graph for graph in captured], bool(shards.microbatches)
    refuse_replica_values(graphs, runs, devices, in_parts=in_parts, model_name=model_name)
    first = captured[0]
    refuse_stale_buffers([*_output(first)["writes"].keys() - first.alike.keys()], runs, first.graph, model_name)
    if len(shards.by_microbatch(call).num_examples) > 1:
        refuse_split_time(call.leaves, captured[0].traced.leaves_with_time_first, model_name)
        refuse_split_offsets(call.leaves, captured[0].traced.leaves_with_offsets, model_name)
        _refuse_lone_examples(captured, runs, shards, model_name)


def _refuse_lone_examples(
    captured: Sequence[CapturedGraph], runs: tuple[tuple[int, ...], ...], shards: Shards, model_name: str
) -> None:
    """A batch with a single example may behave as on one device."""
    sizes = shards.microbatches or [(size,) if size else () for size in shards.num_examples]
    sized = [pair for indices, parts in zip(runs, sizes, strict=True) for pair in zip(indices, parts, strict=True)]
    for index in sorted({index for index, size in sized if size == 1}) if len(sized) > 1 else ():
        graph = captured[index]
        refuse_undefined(graph.traced.undefined or undefined_in(graph.graph), model_name)


def _sizes(
    captured: Sequence[CapturedGraph], runs: tuple[tuple[int, ...], ...], shards: Shards, call: Call
) -> SymbolicSizes | None:
    sizes = SymbolicSizes(
        tuple((graph.sizes, graph.size_keys) for graph in captured),
        tuple(indices[0] if indices else None for indices in runs),
        shards.microbatches,
        tuple(leaf.split for leaf in call.leaves),
    )
    return sizes if sizes.has_symbols else None


def _program(
    captured: Sequence[CapturedGraph],
    runs: tuple[tuple[int, ...], ...],
    call: Call,
    shards: Shards,
    devices: tuple[Device, ...],
    state: ModelState,
    optimizers: OptimizerGroups | None,
    loss_reduction: str,
) -> Program:
    program = Program(
        stage=Stage.CAPTURED,
        devices=devices,
        variables=_variables(captured, state, optimizers),
        arguments=tuple(_with_examples(argument, call) for argument in captured[0].arguments),
        shard_graphs=tuple(c.graph for c in captured),
        shard_of_replica=tuple(indices[0] if indices else None for indices in runs),
        shard_of_microbatch=runs if shards.microbatches else (),
        num_examples=shards.num_examples,
        microbatches=shards.microbatches,
        loss_reduction=loss_reduction,
        optimizer_groups=hyperparameters_by_label(optimizers) if captured[0].trains and optimizers is not None else {},
    )
    first, num_parts = captured[0], len(shards.by_microbatch(call).num_examples)
    on_means = remarks_on(first.traced.weighted_means, num_parts)
    return program.with_remarks(*first.traced.remarks, *on_means, *remarks_on_numbers(captured))


def _with_examples(argument: Argument, call: Call) -> Argument:
    is_split = argument.kind is ArgumentKind.BATCH and call.leaves[argument.leaf or 0].split
    return replace(argument, has_examples=True) if is_split else argument


def _capture_each(
    front_end: FrontEnd,
    traced_loss: TracedLoss,
    call: Call,
    examples_of: Sequence[Sequence[torch.Tensor]],
    rows: GatheredRows,
    state: ModelState,
    optimizers: OptimizerGroups | None,
    decompositions: Decompositions,
    *,
    are_sizes_symbolic: bool,
) -> list[CapturedGraph]:
    updated = optimizers.parameters() if optimizers is not None else set(map(id, state.parameters.values()))
    trained = {name for name, p in state.parameters.items() if id(p) in updated and p.requires_grad}
    names = _unique([identifier(leaf.path) for leaf in call.leaves])
    paths, added = state.names_now()

    def captured_from(shard: int, examples: Sequence[torch.Tensor]) -> CapturedGraph:
        with gathering(rows.of(shard), rows.num_replicas):
            graph = capture(front_end, traced_loss, examples, names, paths, trained, decompositions, state.outside)
        _refuse_added(graph, added)
        return graph

    def capture_all() -> list[CapturedGraph]:
        while True:
            try:
                return [captured_from(shard, tensors) for shard, tensors in enumerate(examples_of)]
            except BuffersAssigned as error:
                assert not set(error.paths) <= set(traced_loss.assigned), "a known buffer stays the same tensor"
                traced_loss.assigned = (*traced_loss.assigned, *error.paths)

    model_name = type(traced_loss.model).__name__
    captured = captured_with_numbers(
        traced_loss.numbers, capture_all, model_name, are_sizes_symbolic=are_sizes_symbolic
    )
    outside = {name for graph in captured for name in graph.outside}
    captured = _with_constants_apart(captured, {*paths.values(), *state.tensors, *outside})
    captured = with_equal_sizes(captured)
    _check_agreement(captured, model_name)
    return captured


def _with_constants_apart(captured: Sequence[CapturedGraph], taken: Set[str]) -> list[CapturedGraph]:
    """Tensors of equal values stay different constants, because one may be written later."""
    known: dict[str, torch.Tensor] = {}
    named = []
    for shard, graph in enumerate(captured):
        names = {}
        for name, value in graph.constants.items():
            is_same = known.get(name, value) is value
            names[name] = name if is_same else free_name(f"{name}_shard{shard}", {*taken, *known, *graph.constants})
            known.setdefault(names[name], value)
        for node in calls_to(graph.graph, ops.read):
            variable = str(node.kwargs["variable"])
            node.kwargs = {**node.kwargs, "variable": names.get(variable, variable)}
        named.append(replace(graph, constants={names[name]: value for name, value in graph.constants.items()}))
    return named


def _check_agreement(captured: Sequence[CapturedGraph], model_name: str) -> None:
    first, *others = captured
    for other in others:
        if list(first.traced.guards.draws) != list(other.traced.guards.draws):
            raise problem(
                CaptureError,
                f"MC2303: {model_name} draws other numbers from Python's random for a shard of another size",
                "all replicas draw the same",
                ("torch.rand(len(x))", "draw them in your loop, and pass them as an argument"),
            )
        for part in ("gradients", "writes"):
            if set(_output(first)[part]) != set(_output(other)[part]):
                raise problem(
                    CaptureError,
                    f"MC2504: {model_name} makes other {part} for a shard of another size",
                    "its graph depends on the batch size",
                    EVEN_BATCHES,
                )
        if [argument.kind for argument in first.arguments] != [argument.kind for argument in other.arguments]:
            raise problem(
                CaptureError, f"MC2504: {model_name} draws random numbers for some shard sizes only", fix=EVEN_BATCHES
            )


def _notes(
    captured: Sequence[CapturedGraph], outputs: Outputs | None, num_parts: int, model_name: str, loss_reduction: str
) -> tuple[Note, ...]:
    notes = [note for graph in captured for note in graph.traced.notes]
    if outputs is not None and outputs.unknown:
        text = message(
            f"MC3402: {outputs.unknown} of {model_name} may lie along the batch: it is returned as a PerReplica",
            "a graph for another number of examples would tell, and the model takes no other",
            ("value.gather(), of what the call returns, for all rows", "return a tensor with a row for each example"),
        )
        notes.append(Note(text))
    if num_parts > 1 and captured[0].trains:
        notes += notes_on_counted_lookups(captured[0].graph, model_name)
        notes += notes_on_reductions(captured[0].traced.reductions, loss_reduction, num_parts, model_name)
    return tuple(dict.fromkeys(notes))


def _notes_on_rows(captured: CapturedGraph, call: Call, model_name: str) -> tuple[Note, ...]:
    if not captured.trains:
        return ()
    arguments = [_with_examples(argument, call) for argument in captured.arguments]
    names = {argument.name for argument in arguments if argument.has_examples}
    split = {node for node in captured.graph.find_nodes(op="placeholder") if node.target in names}
    return notes_on_rows(captured.graph, split, captured.traced.written_rows, model_name)


def _gathered(
    captured: Sequence[CapturedGraph],
    runs: Sequence[Sequence[int]],
    call: Call,
    shards: Shards,
    loss_reduction: str,
    trace_grown: Callable[[], TracedOutputs | None],
) -> Outputs:
    size_of: dict[int, int] = {}
    for indices, of_graphs in zip(runs, shards.microbatches or [[size] for size in shards.num_examples], strict=True):
        for shard, size in zip(indices, of_graphs, strict=False):
            size_of.setdefault(shard, size)  # the first replica's: a graph with symbolic sizes is traced with its shard
    sizes = [size_of[shard] for shard in range(len(captured))] if size_of else [STAND_IN_SIZE]
    traced = [graph.traced.outputs for graph in captured if graph.traced.outputs is not None]
    is_split = len(runs) > 1 or bool(shards.microbatches) or not size_of
    other = trace_grown() if len(set(sizes)) == 1 and is_split else None
    shard_of_replica = [indices[0] if indices else None for indices in runs]
    outputs = outputs_of(traced, shard_of_replica, [*sizes, *([sizes[0] + 1] if other is not None else [])], other)
    if shards.microbatches:
        refuse_outputs_apart(outputs.ways, traced)
    if not size_of:
        refuse_outputs_apart(outputs.ways, [*traced, *([other] if other is not None else [])], has_examples=False)
    ways = {**outputs.ways, LOSS_OUTPUT: "averaged" if loss_reduction == "mean" else "summed"}
    of_batch = [argument for argument in captured[0].arguments if argument.kind is ArgumentKind.BATCH]
    for argument, leaf in zip(of_batch, call.leaves, strict=True):
        ways[gradient_output(argument.name)] = "concatenated" if leaf.split else "summed"
    for graph in captured:
        for node in calls_to(graph.graph, ops.gather):
            node.kwargs = {**node.kwargs, "how": ways[str(node.kwargs["output"])]}
    return outputs


def _unique(names: list[str]) -> list[str]:
    taken = {"args", *(kind.value for kind in ArgumentKind if kind is not ArgumentKind.BATCH)}
    for i, name in enumerate(names):
        names[i] = free_name(name, taken)
        taken.add(names[i])
    return names


def _refuse_added(captured: CapturedGraph, added: Mapping[str, str]) -> None:
    """Variables added after compilation have no memory and no updates."""
    for node in calls_to(captured.graph, ops.read):
        if node.kwargs["variable"] in added:
            raise problem(
                ValueError,
                f"MC1206: the model's {added[str(node.kwargs['variable'])]} was added since it was compiled",
                fix="make a new optimizer over model.parameters(), and compile the model anew",
            )


def _output(captured: CapturedGraph) -> dict[str, Any]:
    output: Any = captured.graph.output_node().args[0]
    return dict(output)


def _constants_on_host(captured: Sequence[CapturedGraph]) -> set[str]:
    reads = [node for c in captured for node in calls_to(c.graph, ops.read) if node.kwargs["variable"] in c.constants]
    elsewhere = [node for node in reads if node.meta["val"].device != any_value(node.graph).device]
    return {str(node.kwargs["variable"]) for node in elsewhere}


def _variables(
    captured: Sequence[CapturedGraph], state: ModelState, optimizers: OptimizerGroups | None
) -> dict[str, Variable]:
    read = dict.fromkeys(str(node.kwargs["variable"]) for c in captured for node in calls_to(c.graph, ops.read))
    gradients, writes = _output(captured[0])["gradients"], _output(captured[0])["writes"]
    # Control flow of plain PyTorch may skip parameters.
    is_plain = next(calls_to(captured[0].graph, take_gradient), None) is not None
    sparse = captured[0].sparse
    rules = (
        update_rules(optimizers, state.parameters, list(gradients), sparse, may_be_unused=is_plain)
        if optimizers is not None
        else {name: gradient_rule(is_sparse=name in sparse, may_be_unused=is_plain) for name in gradients}
    )
    others = {name: value for c in captured for name, value in (*c.constants.items(), *c.outside.items())}
    on_host = _constants_on_host(captured)
    variables = {}
    for name in [*read, *(name for name in writes if name not in read)]:
        tensor = state.tensors[name] if name in state.tensors else others[name]
        role = Role.PARAMETER if isinstance(tensor, torch.nn.Parameter) else Role.BUFFER
        synchronization, aggregation = Synchronization.MIRRORED, Aggregation.NONE
        if name in writes:
            synchronization = Synchronization.PER_REPLICA
            aggregation = Aggregation.MEAN if tensor.dtype.is_floating_point else Aggregation.FIRST
            aggregation = aggregation_alike(name, [c.alike for c in captured]) or aggregation
        about = (role, synchronization, aggregation, rules.get(name), name in on_host)
        variables[name] = Variable(name, tuple(tensor.shape), tuple(tensor.stride()), tensor.dtype, *about)
    return variables
