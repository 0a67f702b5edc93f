"""Captures one shard with a front end, and brings the graph into the form that passes take."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.call.traced_outputs import TracedOutputs
from mirrorc.capture.diagnostics.capture_errors import refuse_written_inputs, sparse_gradient
from mirrorc.capture.diagnostics.written_buffers import Computation, vectors_of_spectral_norms, written_alike
from mirrorc.capture.dynamo.traced_substitutes import buffers_of_synchronized_norms
from mirrorc.capture.front_ends.front_end import FrontEnd, Traced, tracing
from mirrorc.capture.model.model_state import OutsideNames, check_outside_writes, numbered
from mirrorc.capture.rewrites.operator_effects import keep_asserts
from mirrorc.capture.rewrites.replica_exchanges import keep_replica_values
from mirrorc.capture.rewrites.seed_random_ops import seed_random_ops
from mirrorc.capture.rewrites.sparse_lookups import rows_of_lookups
from mirrorc.capture.rewrites.strided_reads import confine_strided_reads
from mirrorc.capture.rewrites.value_names import with_stable_names
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.names import identifier
from mirrorc.ir.nodes import CHECKPOINT, Checkpoint, calls_to
from mirrorc.ir.program import Argument, ArgumentKind, gradient_output
from mirrorc.ir.rearrangements import TRANSPOSITIONS
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import module_of, source_line
from mirrorc.torch_internals import (
    Decompositions,
    JointGraph,
    NumberInput,
    SizesOfArguments,
    checkpoint_tag,
    has_symbols,
    is_symbolic,
    raw_symbols,
)


@dataclass(frozen=True)
class CapturedGraph:
    """The graph of one shard.

    Attributes:
        graph: placeholders are arguments; `mirrorc.ir.ops.read` nodes read variables. The output is a dict of ``loss``
            (None in an evaluation), ``gradients`` by parameter, and ``writes`` by buffer.
        sparse: parameters with sparse gradients in torch.
        size_keys: the key of each SIZE argument, in order; None for an unused argument.
    """

    graph: fx.Graph
    arguments: tuple[Argument, ...]
    constants: Mapping[str, torch.Tensor]
    traced: Traced
    sparse: frozenset[str] = frozenset()
    outside: Mapping[str, torch.Tensor] = field(default_factory=dict)
    alike: Mapping[str, Computation] = field(default_factory=dict)
    sizes: SizesOfArguments | None = None
    size_keys: tuple[Any, ...] = ()

    @property
    def trains(self) -> bool:
        return any(argument.kind is ArgumentKind.LOSS_WEIGHT for argument in self.arguments)

    @property
    def numbers(self) -> tuple[NumberInput, ...]:
        return self.traced.joint.numbers


def restructure(
    traced: Traced, leaf_names: Sequence[str], variable_names: Mapping[str, str], trained: Set[str], model_name: str
) -> CapturedGraph:
    """Rewrites a joint graph to read variables, take named arguments, and return outputs by name."""
    joint = traced.joint
    refuse_written_inputs(joint, leaf_names, variable_names, model_name)
    graph = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    keys = _symbolic_numbers(joint, values)
    arguments, seed, sizes = _add_arguments(graph, joint, leaf_names, values, keys)
    values |= {node: sizes.get(key, key) for node, key in values.items() if not isinstance(key, fx.Node)}
    constants = _copy_nodes(graph, joint, variable_names, values)
    _note_checkpoints(values, model_name)
    graph.output(_outputs(joint, values, variable_names, trained, model_name))
    looked_up = frozenset(variable_names.get(path, path) for path in joint.looked_up)
    sparse = rows_of_lookups(graph, looked_up, model_name)
    if seed_random_ops(graph, seed) == 0 and not seed.users:
        graph.erase_node(seed)
        arguments.pop()
    keep_asserts(graph, values[joint.tangent] if joint.tangent is not None else None, model_name)
    if joint.tangent is not None and joint.loss is not None:
        results = [joint.loss, *joint.buffer_writes.values(), *joint.outputs.values()]
        _move_before_backward(values[joint.tangent], [values[node] for node in results])
    _insert_gathers(graph, {name: values[node] for name, node in joint.outputs.items()})
    of_leaves = {leaf_names[i]: node for i, node in joint.gradients_of_leaves.items() if node is not None}
    _insert_gathers(graph, {gradient_output(name): values[node] for name, node in of_leaves.items()})
    _remove_dead_code(graph)
    arguments += keep_replica_values(graph)
    confine_strided_reads(graph)
    _separate_gradients(graph)
    _take_sizes_as_arguments(graph, joint, arguments, sizes, keys)
    read = {str(node.kwargs["variable"]) for node in calls_to(graph, ops.read)}
    output: Any = graph.output_node().args[0]
    outside = {variable_names[path]: variable.tensor for path, variable in joint.outside.items()}
    return CapturedGraph(
        graph,
        tuple(arguments),
        {name: constant for name, constant in constants.items() if name in read},
        traced,
        sparse=sparse,
        outside={name: tensor for name, tensor in outside.items() if name in read or name in output["writes"]},
        sizes=joint.sizes,
        size_keys=tuple(keys),
    )


def _symbolic_numbers(joint: JointGraph, values: dict[fx.Node, Any]) -> list[Any]:
    if joint.sizes is None:
        return []
    for node in joint.graph_module.graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, list | tuple) else (value,):
            if has_symbols(item):
                joint.sizes.check_symbols(item)
        if is_symbolic(value):
            values[node] = joint.sizes.add(value)
    return list(dict.fromkeys([*joint.sizes.symbols, *joint.sizes.numbers]))


def _add_arguments(
    graph: fx.Graph, joint: JointGraph, leaf_names: Sequence[str], values: dict[fx.Node, Any], sizes: Sequence[Any]
) -> tuple[list[Argument], fx.Node, dict[Any, fx.Node]]:
    arguments: list[Argument] = []
    nodes_of = {leaf: node for node, leaf in joint.leaf_of.items()}
    for leaf, name in enumerate(leaf_names):
        node = graph.placeholder(name)
        arguments.append(Argument(name, ArgumentKind.BATCH, leaf))
        if leaf in nodes_of:
            node.meta["val"] = nodes_of[leaf].meta["val"]
            values[nodes_of[leaf]] = node
    of_sizes: dict[Any, fx.Node] = {}
    for index, key in enumerate(sizes):
        name = _free_name(identifier(str(key)) if key.is_Symbol else "size", arguments)
        of_sizes[key] = graph.placeholder(name)
        of_sizes[key].meta["val"] = joint.sizes.known(key) if joint.sizes is not None else key
        arguments.append(Argument(name, ArgumentKind.SIZE, index))
    for joint_node in sorted(joint.number_of, key=joint.number_of.__getitem__):
        index = joint.number_of[joint_node]
        name = _free_name(identifier(joint.numbers[index].name), arguments)
        values[joint_node] = graph.placeholder(name)
        values[joint_node].meta["val"] = joint_node.meta["val"]
        arguments.append(Argument(name, ArgumentKind.NUMBER, index))
    if joint.tangent is not None:
        weight = values[joint.tangent] = graph.placeholder(ArgumentKind.LOSS_WEIGHT.value)
        weight.meta["val"] = joint.tangent.meta["val"]
        arguments.append(Argument(ArgumentKind.LOSS_WEIGHT.value, ArgumentKind.LOSS_WEIGHT))
    seed = graph.placeholder(ArgumentKind.SEED.value)
    seed.meta["val"] = joint.fake_seed()
    if joint.seed is not None:
        values[joint.seed] = seed
    arguments.append(Argument(ArgumentKind.SEED.value, ArgumentKind.SEED))
    return arguments, seed, of_sizes


def _take_sizes_as_arguments(
    graph: fx.Graph, joint: JointGraph, arguments: list[Argument], sizes: dict[Any, fx.Node], keys: list[Any]
) -> None:
    def taken(value: Any) -> Any:
        if not is_symbolic(value) or joint.sizes is None:
            return value
        key = joint.sizes.add(value)
        if key not in sizes and not isinstance(key, int | float):
            place = max(i for i, argument in enumerate(arguments) if argument.kind is ArgumentKind.SIZE)
            name = _free_name("size", arguments)
            with graph.inserting_after(sizes[keys[-1]]):
                sizes[key] = graph.placeholder(name)
            sizes[key].meta["val"] = joint.sizes.known(key)
            arguments.insert(place + 1, Argument(name, ArgumentKind.SIZE, len(keys)))
            keys.append(key)
        return sizes.get(key, key)

    for node in graph.nodes if joint.sizes is not None else ():
        if node.op == "call_function" and raw_symbols([node.args, node.kwargs]):
            args, kwargs = (fx.node.map_aggregate(operands, taken) for operands in (node.args, node.kwargs))
            node.args, node.kwargs = args, kwargs


def _free_name(name: str, arguments: Sequence[Argument]) -> str:
    return numbered(name, {*(argument.name for argument in arguments), "args", *ArgumentKind})


def _copy_nodes(
    graph: fx.Graph, joint: JointGraph, variable_names: Mapping[str, str], values: dict[fx.Node, Any]
) -> dict[str, torch.Tensor]:
    reads: dict[str, fx.Node] = {}
    constants: dict[str, torch.Tensor] = {}
    for node in joint.graph_module.graph.nodes:
        if node in values or node.op == "output":
            continue
        if node.op == "placeholder" or node.op == "get_attr":
            name = variable_names.get(joint.variable_of[node], joint.variable_of[node])
            if node.op == "get_attr":
                name = _constant_name(node, {*variable_names.values(), *constants})
            if name not in reads:
                reads[name] = graph.call_function(ops.read, (), {"variable": name})
                reads[name].meta["val"] = node.meta["val"]
            if node.op == "get_attr":
                constants[name] = joint.constant(node)
            values[node] = reads[name]
        else:
            values[node] = graph.node_copy(node, values.__getitem__)
            values[node].meta = _copied_meta(node)
    return constants


def _note_checkpoints(values: Mapping[fx.Node, fx.Node], model_name: str) -> None:
    numbers: dict[int, int] = {}
    for joint_node, node in values.items():
        if node.op != "call_function":
            continue
        try:
            tag = checkpoint_tag(joint_node)
        except ValueError as error:
            raise problem(
                CaptureError,
                f"MC2507: the policy of a checkpoint in {model_name} asks for {error}",
                "a result is kept where it is, or computed again",
                "return MUST_SAVE or PREFER_RECOMPUTE from the policy",
                at=source_line(node) or node.name,
            ) from None
        if tag is not None:
            number, keeps = tag
            node.meta[CHECKPOINT] = Checkpoint(numbers.setdefault(number, len(numbers)), keeps)


def _move_before_backward(tangent: fx.Node, results: Sequence[fx.Node]) -> None:
    """AOTAutograd regenerates views of mutated inputs at the end of the graph."""
    if not tangent.users:
        return
    first = min(tangent.users)  # nodes compare by their places in the graph
    late, waiting = set(), list(results)
    while waiting:
        node = waiting.pop()
        if node > first and node not in late:
            late.add(node)
            waiting += node.all_input_nodes
    for node in sorted(late):
        first.prepend(node)


def _insert_gathers(graph: fx.Graph, outputs: Mapping[str, fx.Node]) -> None:
    """Sets ``how="apart"`` for now; `call.step_outputs` decides later."""
    first = next((node for node in graph.nodes if node.op != "placeholder"), None)
    for name, value in outputs.items():
        is_early = value.op == "placeholder" and first is not None
        with graph.inserting_before(first) if is_early else graph.inserting_after(value):
            node = graph.call_function(ops.gather, (value,), {"output": name, "how": "apart"})
        node.meta = {**{k: v for k, v in value.meta.items() if k != "val"}, "val": None}


def _constant_name(node: fx.Node, taken: Set[str]) -> str:
    module = next((module_of(user) for user in node.users if module_of(user)), "")
    return numbered(f"{module}.constant".removeprefix("."), taken)


def _copied_meta(node: fx.Node) -> dict[str, Any]:
    keys = ("val", "stack_trace", "nn_module_stack")
    meta: dict[str, Any] = {key: node.meta[key] for key in keys if key in node.meta}
    if "nn_module_stack" not in meta and "fwd_nn_module_stack" in node.meta:  # backward of that module
        meta["nn_module_stack"] = node.meta["fwd_nn_module_stack"]
    return meta


def _outputs(
    joint: JointGraph,
    values: Mapping[fx.Node, fx.Node],
    variable_names: Mapping[str, str],
    trained: Set[str],
    model_name: str,
) -> dict[str, Any]:
    gradients: dict[str, fx.Node] = {}
    for name, node in joint.gradients.items():
        variable = variable_names.get(name, name)
        if variable not in trained or node is None:
            continue
        if node.meta["val"].layout is not torch.strided:
            raise CaptureError(sparse_gradient(variable, model_name, "gradients of mirrored variables"))
        gradient = _without_idle_transpositions(values[node])
        assert variable not in gradients, f"two gradients for {variable}"  # AOTAutograd adds up those of tied weights
        gradients[variable] = gradient
    if joint.loss is not None and not gradients and not any(joint.gradients_of_leaves.values()):
        raise problem(
            CaptureError,
            f"MC2203: the loss of {model_name} does not depend on any parameter that the optimizer updates",
            fix="torch.optim.SGD(model.parameters(), lr=0.1), or another optimizer over parameters that the loss depends on",
        )
    writes = {variable_names.get(name, name): values[node] for name, node in joint.buffer_writes.items()}
    loss = values[joint.loss] if joint.loss is not None else None
    return {"loss": loss, "gradients": gradients, "writes": writes}


def _without_idle_transpositions(node: fx.Node) -> fx.Node:
    """Autograd transposes gradients of weights twice."""
    same, wanted = node, node.meta["val"]
    while node.target in TRANSPOSITIONS:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        node, value = source, source.meta["val"]
        if value.shape == wanted.shape and value.stride() == wanted.stride():
            same = node
    return same


def _remove_dead_code(graph: fx.Graph) -> None:
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users and node.target not in ops.OF_FORWARD:
            graph.erase_node(node)


def _separate_gradients(graph: fx.Graph) -> None:
    """Copies gradients that have another use, because buckets are summed in place."""
    output: Any = graph.output_node().args[0]
    counts = Counter([output["loss"], *output["writes"].values(), *output["gradients"].values()])
    gradients: dict[str, fx.Node] = {}
    for name, node in output["gradients"].items():
        used_by_others = counts[node] > 1 or any(user.op != "output" for user in node.users)
        if node.op == "placeholder" or node.target is ops.read or used_by_others:
            is_early = node.op == "placeholder" or node.target is ops.read  # before backward: copy it at the end
            with graph.inserting_before(graph.output_node()) if is_early else graph.inserting_after(node):
                copy = graph.call_function(torch.ops.aten.clone.default, (node,))
            copy.meta = dict(node.meta)
            gradients[name] = copy
        else:
            gradients[name] = node
    order = {node: i for i, node in enumerate(graph.nodes)}
    ordered = dict(sorted(gradients.items(), key=lambda item: order[item[1]]))
    graph.output_node().args = ({**output, "gradients": ordered},)


_SAME_FOR_ALL = (ArgumentKind.NUMBER, ArgumentKind.NUM_REPLICAS)


def capture(
    front_end: FrontEnd,
    call: TracedLoss,
    leaves: Sequence[torch.Tensor],
    leaf_names: Sequence[str],
    variable_names: Mapping[str, str],
    trained: Set[str],
    decompositions: Decompositions,
    outside: OutsideNames,
) -> CapturedGraph:
    """``variable_names`` maps names of parameters and buffers to variables."""
    with tracing(call) as stack:
        traced = front_end.trace(stack, call, leaves, decompositions)
    model_name, names = type(call.model).__name__, outside.names_of(traced.joint.outside, {*variable_names.values()})
    check_outside_writes(traced.joint, names, model_name)
    names = {**variable_names, **names}
    captured = restructure(traced, leaf_names, names, trained, model_name)
    graph = with_stable_names(captured.graph, captured.arguments)
    graph.lint()
    arguments = zip(graph.find_nodes(op="placeholder"), captured.arguments, strict=True)
    same = {node.target for node, argument in arguments if argument.kind in _SAME_FOR_ALL}
    alike = _written_alike(graph, call, traced.joint, names, same)
    alike |= {names[path]: Computation(0) for path in traced.alike}
    return replace(captured, graph=graph, alike=alike)


def _written_alike(
    graph: fx.Graph, call: TracedLoss, joint: JointGraph, names: Mapping[str, str], arguments: Set[Any]
) -> dict[str, Computation]:
    if not joint.buffer_writes:
        return {}
    roots = [call, *(variable.root for variable in joint.outside.values() if variable.root is not None)]
    of_spectral_norms, of_synchronized_norms = vectors_of_spectral_norms(roots), buffers_of_synchronized_norms(roots)
    outside = {path: variable.tensor for path, variable in joint.outside.items()}
    tensors = {**dict(call.named_buffers(remove_duplicate=False)), **outside}
    ids = {names[path]: id(tensors.get(path)) for path in joint.buffer_writes}
    vectors = {name for name, tensor_id in ids.items() if tensor_id in of_spectral_norms}
    statistics = {name for name, tensor_id in ids.items() if tensor_id in of_synchronized_norms}
    output: Any = graph.output_node().args[0]
    counters = {names[path] for path in joint.buffer_writes if path.endswith("num_batches_tracked")} - statistics
    return written_alike(graph, output["writes"], vectors, statistics, counters, arguments)


def outputs_for(front_end: FrontEnd, call: TracedLoss, leaves: Sequence[torch.Tensor]) -> TracedOutputs | None:
    with tracing(call):
        return front_end.trace_outputs(call, leaves)
