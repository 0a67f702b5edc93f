"""The rule that a pass does not change the computation, also where it joins microbatches."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Container, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import BucketParts, named_step
from mirrorc.analysis.buckets.rescaling import scaling_factor
from mirrorc.analysis.buckets.slots_of_values import packed_slots
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, pack_of, replica_of, target_name
from mirrorc.ir.program import Argument, ArgumentKind, Program, Property, Stage
from mirrorc.ir.value_types import value_type
from mirrorc.ir.variables import Aggregation
from mirrorc.verifier.expressions.expressions import Expressions
from mirrorc.verifier.rules.meetings_of_replicas import say_meeting
from mirrorc.verifier.rules.rule import Scope, Violation, rule, scopes, written_buckets

Result = tuple[int, str, str]  # a replica; "loss", "gradient of" or "value for"; a variable
_WAYS = ("way to the reduction of", "way to the update of")
_RESCALING = tuple(target_name(operation) for operation in ops.RESCALING)
_NARROWING = tuple(map(target_name, (ops.compress, ops.decompress, ops.add_unsent)))
_MAY_CHANGE = {Property.CLIPPED: _RESCALING, Property.UNSCALED: _RESCALING, Property.COMPRESSED: _NARROWING}
"""The operations that a pass may insert before updates if it establishes a property."""
_UNCHANGED = -1  # a way without operators that change the bucket
Flows = dict[Result, list[tuple[Any, fx.Node | None]]]


@rule(scope=Scope.PASS, is_about_dataflow=True)
def dataflow_is_preserved(before: Program, after: Program, known: KnownFlows | None = None) -> Iterator[Violation]:
    """On every replica, a pass keeps the expressions of the loss, gradients, checks, outputs, written buffers and
    operands of the model's collectives, and the operators on each bucket before its update, unless the pass has the
    attribute changes_dataflow = True.

    Expressions are compared by structure. Unchanged regions are compared as calls, others by their operators. A value
    equals its copy in another memory format, except where an operator may read memory in order.
    """
    if known is not None and before.graphs() == after.graphs() and before.regions == after.regions:
        return  # the pass has returned the same graphs, and another rule checks that they are unchanged
    known = known or KnownFlows()
    inlined = before.regions != after.regions
    gained = set(after.properties) - set(before.properties)
    left_out = tuple(name for changed, names in _MAY_CHANGE.items() if changed in gained for name in names)
    if before.shard_of_microbatch and not after.shard_of_microbatch:
        expected = known.accumulated(before)
        inlined = True
    else:
        expected = known.flows(before, inlined, left_out=left_out)
    actual = known.flows(after, inlined, is_new=True, left_out=left_out)
    for key in [*expected, *(key for key in actual if key not in expected)]:
        if key[1] in _WAYS and (
            key not in actual or (key not in expected and {n for n, _ in actual[key]} == {_UNCHANGED})
        ):
            continue  # other rules check results that are missing in one program
        numbers = [[number for number, _ in flows.get(key, [])] for flows in (expected, actual)]
        if numbers[0] != numbers[1] and Counter(numbers[0]) != Counter(numbers[1]):
            old, new = map(Counter, numbers)
            replica, kind, name = key
            node = next((node for number, node in actual.get(key, []) if old[number] == 0), None)
            result = f"the {kind} {name}".strip() + f" on {after.devices[replica]}"
            if sum(old.values()) != sum(new.values()):
                yield Violation(f"{result} is given {sum(new.values())} times, not {sum(old.values())}", node)
                continue
            maker, why = known.first_difference(before, after, inlined, next(iter(old - new)), next(iter(new - old)))
            yield Violation(f"{result} is computed in another way than before{why}", maker or node)


class KnownFlows:
    """Numbers expressions over a whole pipeline, and remembers the last program's results."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._roots: dict[Any, Any] = {}
        self._last: tuple[Program, bool, Flows] | None = None

    def flows(self, program: Program, inlined: bool, *, is_new: bool = False, left_out: tuple[str, ...] = ()) -> Flows:
        """The results of each replica as expressions.

        Args:
            left_out: operations between gradients and updates to skip.
        """
        if left_out:
            self._last = None
            return _flows(program, Expressions(program, self._numbers, self._roots, inlined), left_out)
        if is_new or self._last is None or self._last[0] is not program or self._last[1] is not inlined:
            self._last = (program, inlined, _flows(program, Expressions(program, self._numbers, self._roots, inlined)))
        return self._last[2]

    def accumulated(self, program: Program) -> Flows:
        flows: Flows = {}
        expressions = Expressions(program, self._numbers, self._roots, inlined=True)
        for replica, kind, name, number in accumulated_results(program, expressions):
            flows.setdefault((replica, kind, name), []).append((number, None))
        return flows

    def first_difference(
        self, before: Program, after: Program, inlined: bool, old: int, new: int
    ) -> tuple[fx.Node | None, str]:
        """The new program's first node that differs, and a description; None and empty if unknown."""
        keys = {number: key for key, number in self._numbers.items()}
        there, here = self._makers(before, inlined), self._makers(after, inlined)
        differing: list[tuple[int, int]] = []
        while _without_values(keys.get(old)) == _without_values(keys.get(new)):
            values = [_values_in(keys.get(number)) for number in (old, new)]
            differing = [pair for pair in zip(*values, strict=False) if pair[0] != pair[1]]
            deeper = [pair for pair in differing if pair[1] not in there]  # values of the old program are not at fault
            if not deeper:
                break
            old, new = deeper[0]
        node, names = here.get(new), [_say_operation(keys.get(number)) for number in (old, new)]
        if node is None or not all(names):
            return None, ""
        if names[0] != names[1] or not differing:
            return node, f": {node.name} is {names[1]}, where {names[0]} was"
        was, operand = (maker.name for maker in (there.get(differing[0][0], node), here.get(differing[0][1], node)))
        # the operand is then an argument of a region, passed by a call
        is_inside = all(source.name != operand for source in node.all_input_nodes)
        return None if is_inside else node, f": {node.name} is made of {operand}, where it was of {was}"

    def _makers(self, program: Program, inlined: bool) -> dict[int, fx.Node]:
        makers: dict[int, fx.Node] = {}
        _flows(program, Expressions(program, self._numbers, self._roots, inlined, makers))
        return makers


def _values_in(key: Any) -> Iterator[int]:
    for part in key if isinstance(key, tuple) else ():
        if isinstance(part, tuple) and len(part) == 2 and part[0] == "value":
            yield part[1]
        else:
            yield from _values_in(part)


def _without_values(key: Any) -> Any:
    if not isinstance(key, tuple):
        return key
    return "value" if len(key) == 2 and key[0] == "value" else tuple(_without_values(part) for part in key)


def _say_operation(key: Any) -> str:
    if not isinstance(key, tuple):
        return ""
    if key[0] in ("argument", "read"):
        return f"{'the variable' if key[0] == 'read' else key[0]} {key[1]}"
    if key[0] == "part":
        return f"part {key[2]} of another value"
    return str(key[1]) if key[0] == "region" else "" if isinstance(key[0], str) else target_name(key[0])


def _flows(program: Program, expressions: Expressions, left_out: Container[str] = ()) -> Flows:
    flows: Flows = {}
    parts = BucketParts(program)
    if program.stage < Stage.REPLICATED:
        of_shard = [list(_outputs(graph, expressions.number_graph(graph))) for graph in program.shard_graphs]
        for replica in range(program.num_replicas):
            for shard in dict.fromkeys(program.graphs_run_by(replica)):
                for kind, name, number in of_shard[shard]:
                    flows.setdefault((replica, kind, name), []).append((number, None))
        return flows
    for replica, (_, graph, replicas) in enumerate(scopes(program)):
        numbered = expressions.number_graph(graph)
        place = replica if replicas == [None] else None
        for kind, name, node, value in _results(program, graph):
            owner = place if place is not None else replica_of(node)
            flows.setdefault((owner or 0, kind, name), []).append((numbered[value], node))
        for kind, bucket, node, value in _ways(graph):
            owner = place if place is not None else replica_of(value)
            way = _way(parts, expressions, value, left_out, scales=scaling_factor(node) is not None)
            flows.setdefault((owner or 0, kind, f"bucket {bucket}"), []).append((way, node))
        output: Any = graph.output_node().args[0]
        for r, loss in enumerate(output["losses"] if isinstance(output, dict) else [output]):
            if loss is None:
                continue  # of a replica without examples
            flows.setdefault((place if place is not None else r, "loss", ""), []).append((numbered[loss], None))
        if isinstance(output, dict):
            is_moved = program.num_replicas > 1 or program.accumulates  # by the step that ends the accumulation
            rows = [
                (_WAYS[not is_moved], bucket.index, values)
                for (bucket, _), values in zip(program.packs, output.get("packed", ()), strict=False)
                if is_moved or not bucket.is_cut
            ]
            rows += [(_WAYS[1], index, values) for index, values in enumerate(output.get("reduced", ()))]
            for kind, bucket, values in rows:
                for r, value in enumerate(values):
                    way = _way(parts, expressions, value, left_out)
                    flows.setdefault((r, kind, f"bucket {bucket}"), []).append((way, None))
            for key, kind in (("gradients", "gradient of"), ("writes", "value for")):
                for name, values in output.get(key, {}).items():
                    for r, value in enumerate(values):
                        if value is not None:
                            flows.setdefault((r, kind, name), []).append((numbered[value], None))
    return flows


def _way(
    parts: BucketParts, expressions: Expressions, value: fx.Node, left_out: Container[str], *, scales: bool = False
) -> int:
    """The value number of the operators on a packed or summed bucket. ``scales`` adds a scaling."""
    part = parts.of(value)
    if part is None:  # its elements are unknown: rules on collectives and updates report it
        return expressions.number("way", value.name)
    all_steps = (*part.steps, named_step(ops.scale, ("value",))) if scales else part.steps
    steps = [step for step in all_steps if step[0] not in left_out]
    return expressions.number("way", *steps) if steps else _UNCHANGED


def _outputs(graph: fx.Graph, numbered: Mapping[fx.Node, Any]) -> Iterator[tuple[str, str, Any]]:
    output: Any = graph.output_node().args[0]
    if output["loss"] is not None:
        yield "loss", "", numbered[output["loss"]]
    for key, kind in (("gradients", "gradient of"), ("writes", "value for")):
        for name, value in output[key].items():
            yield kind, name, numbered[value]
    for operations in ((ops.check,), (ops.gather,), (ops.keep,), tuple(ops.MEETINGS)):
        for node in calls_to(graph, *operations):
            if (result := _result(node)) is not None:
                yield *result, numbered[node.all_input_nodes[0]]


def _result(node: fx.Node) -> tuple[str, str] | None:
    """The kind and name of an operation's operand, which is a result; None for other operations."""
    if node.target is ops.check:
        return "condition of the check", repr(node.kwargs["text"])
    if node.target is ops.gather:
        return f"{node.kwargs['how']} output", str(node.kwargs["output"])
    if node.target is ops.keep:
        return "kept value", str(node.kwargs["number"])
    if node.target is ops.write:
        return "value for", str(node.kwargs["variable"])
    return ("value for", say_meeting(node)) if node.target in ops.MEETINGS else None


def _ways(graph: fx.Graph) -> Iterator[tuple[str, int, fx.Node, fx.Node]]:
    for node in graph.nodes:
        if node.target in ops.REDUCTIONS:
            yield from ((_WAYS[0], bucket_of(node), node, value) for value in node.all_input_nodes)
        elif node.target in ops.UPDATES:
            for bucket, value in zip(written_buckets(node), node.all_input_nodes, strict=False):
                yield _WAYS[1], bucket, node, value
        elif node.target is ops.add_to_grad:
            yield from ((_WAYS[1], bucket_of(node), node, value) for value in node.all_input_nodes)


def _results(program: Program, graph: fx.Graph) -> Iterator[tuple[str, str, fx.Node, fx.Node]]:
    for node in graph.nodes:
        if node.target is ops.pack:
            slots = packed_slots(program, node)
            packs = program.buckets[bucket_of(node)].launch_units if slots else ()
            start = next((pack.start for pack in packs if pack.number == pack_of(node)), 0)
            for slot, gradient in zip(slots, node.all_input_nodes, strict=False):
                if slot is not slots[0] or slot.offset >= start:  # else another pack has it
                    yield "gradient of", slot.variable, node, gradient
        elif (result := _result(node)) is not None:
            yield *result, node, node.all_input_nodes[0]


aten = torch.ops.aten


def accumulated_results(program: Program, expressions: Expressions) -> Iterator[tuple[int, str, str, int]]:
    """Yields replica, kind, name and value number of each result of each replica's shard.

    Losses of microbatches are added; mean losses are weighted by examples. Each microbatch reads the buffers that the
    previous one wrote; only `Aggregation.SAME` buffers keep their original value until the end.
    """
    for replica, shards in enumerate(program.shard_of_microbatch):
        sizes = program.microbatches[replica]
        each: list[tuple[dict[str, Any], dict[str, tuple[str, int]]]] = []
        written: dict[str, int] = {}
        for index, shard in enumerate(shards):
            graph = program.shard_graphs[shard]
            values = dict(_arguments(program, graph, index, sizes, expressions))
            for node in calls_to(graph, ops.read):
                if node.kwargs["variable"] in written:
                    values[node] = written[str(node.kwargs["variable"])]
            numbered = expressions.number_graph(graph, values)
            output: Any = fx.node.map_arg(graph.output_node().args[0], functools.partial(_number, numbered))
            written = {
                name: number.value
                for name, number in output["writes"].items()
                if program.variables[name].aggregation is not Aggregation.SAME
            }
            for check in calls_to(graph, ops.check):
                yield (
                    replica, "condition of the check", repr(check.kwargs["text"]), numbered[check.all_input_nodes[0]],
                )  # fmt: skip
            gathered = {
                str(node.kwargs["output"]): (str(node.kwargs["how"]), numbered[node.all_input_nodes[0]])
                for node in calls_to(graph, ops.gather)
            }
            each.append((output, gathered))
        for kind, name, number in _joined(program, each, sizes, expressions):
            yield replica, kind, name, number


class _Number:
    def __init__(self, value: int) -> None:
        self.value = value


def _number(numbered: Mapping[fx.Node, Any], node: fx.Node) -> Any:
    return _Number(numbered[node])


def _arguments(
    program: Program, graph: fx.Graph, index: int, sizes: tuple[int, ...], expressions: Expressions
) -> Iterator[tuple[fx.Node, int]]:
    arguments = {argument.name: argument for argument in program.arguments}
    for node in graph.find_nodes(op="placeholder"):
        argument = arguments[str(node.target)]
        whole = expressions.argument(argument.name, _type_in_shard(node, argument, sum(sizes)))
        yield node, whole if len(sizes) == 1 else _part(argument, whole, index, sizes, program, expressions)


def _type_in_shard(node: fx.Node, argument: Argument, num_examples: int) -> Any:
    kind: Any = value_type(node.meta.get("val"))
    is_split = argument.has_examples and isinstance(kind, tuple) and kind[0] == "tensor"
    return (kind[0], (num_examples, *kind[1][1:]), *kind[2:]) if is_split else kind


def _part(
    argument: Argument, whole: int, index: int, sizes: tuple[int, ...], program: Program, expressions: Expressions
) -> int:
    if argument.has_examples:
        return expressions.microbatch(whole, index, sizes)
    if argument.kind is ArgumentKind.SEED:
        return expressions.seed_of_microbatch(whole, index)
    if argument.kind is ArgumentKind.LOSS_WEIGHT and program.loss_reduction == "mean":
        return expressions.applied(aten.mul.Tensor, whole, sizes[index] / sum(sizes))
    return whole


def _joined(
    program: Program,
    each: list[tuple[dict[str, Any], dict[str, tuple[str, int]]]],
    sizes: tuple[int, ...],
    expressions: Expressions,
) -> Iterator[tuple[str, str, int]]:
    if not each:
        return  # a replica without examples
    outputs = [output for output, _ in each]
    how = "averaged" if program.loss_reduction == "mean" else "summed"
    yield "loss", "", _put_together([output["loss"].value for output in outputs], how, sizes, expressions)
    for name in outputs[0]["gradients"]:
        addends = [output["gradients"][name].value for output in outputs]
        yield "gradient of", name, _put_together(addends, "summed", sizes, expressions)
    for name, number in outputs[-1]["writes"].items():
        yield "value for", name, number.value
    for name, (how, _) in each[0][1].items():
        parts = [gathered[name][1] for _, gathered in each]
        yield f"{how} output", name, _put_together(parts, how, sizes, expressions)


def _put_together(parts: list[int], how: str, sizes: tuple[int, ...], expressions: Expressions) -> int:
    if len(parts) == 1:
        return parts[0]
    if how == "concatenated":
        return expressions.applied(aten.cat.default, parts)
    if how == "averaged":
        total = sum(sizes)
        parts = [
            expressions.applied(aten.mul.Tensor, part, size / total) for part, size in zip(parts, sizes, strict=True)
        ]
    return functools.reduce(functools.partial(expressions.applied, aten.add.Tensor), parts)
