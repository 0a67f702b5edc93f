"""Derives a shard's expected results from its microbatches' graphs, independently of the pass that joins these graphs."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Argument, ArgumentKind, Program
from mirrorc.ir.value_types import value_type
from mirrorc.ir.variables import Aggregation
from mirrorc.verifier.expressions.expressions import Expressions

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


def is_accumulated(before: Program, after: Program) -> bool:
    return bool(before.shard_of_microbatch) and not after.shard_of_microbatch
