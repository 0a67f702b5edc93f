"""Rules on what the replicas hand to the caller beside the loss."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.torch_internals import size_key, sizes_key
from mirrorc.verifier.rules.programs import Violation, scopes
from mirrorc.verifier.rules.rule import Order, rule

_Key = tuple[str, str, object, object]


@rule(since=Stage.CAPTURED, order=Order.OWNERS)
def outputs_are_gathered_alike(program: Program) -> Iterator[Violation]:
    """Every replica with examples gathers the same outputs, each once, in the same way and of one dtype; parts of a concatenated
    one have a row for each example and are alike in all other dimensions, parts of one that is averaged or summed are of one
    shape."""
    each: list[tuple[str, list[fx.Node], int | None]] = []
    sizes = program.num_examples if len(program.num_examples) == program.num_replicas else ()
    for i, graph in enumerate(program.shard_graphs):
        size = next((size for shard, size in _sizes_of_graphs(program) if shard == i), None) if sizes else None
        each.append((f"the graph of shard {i}", list(calls_to(graph, ops.gather)), size))
    for i, (name_of_replica, graph, replicas) in enumerate(scopes(program)):
        found = list(calls_to(graph, ops.gather))
        for r in replicas:
            if (i if r is None else r) not in program.present:
                continue  # `replicas_without_examples_run_nothing` speaks of it
            size = sizes[i if r is None else r] if sizes else None
            each.append((name_of_replica(r), [node for node in found if replica_of(node) == r], size))
    first: dict[str, _Key] | None = None
    for where, nodes, num_examples in each:
        own: dict[str, _Key] = {}
        for node in nodes:
            name = str(node.kwargs.get("output"))
            if not node.all_input_nodes:
                continue  # `operations_have_their_arguments` speaks of it
            if name in own:
                yield Violation(f"{where} gathers {name} twice", node)
            own[name] = _key(node)
            if own[name][0] == "concatenated" and not _has_rows(program, node, num_examples):
                yield Violation(f"{where} gathers {name} along the batch, but it has no row for each example", node)
        if first is None:
            first = own
        for name in {**first, **own}:
            if first.get(name) != own.get(name):
                at = next((n for n in nodes if str(n.kwargs.get("output")) == name), nodes[0] if nodes else None)
                yield Violation(f"{where} gathers {name} otherwise than {each[0][0]}, or not at all", at)


def _sizes_of_graphs(program: Program) -> Iterator[tuple[int | None, int]]:
    """The graphs that shards, or their microbatches, run, each with the number of examples."""
    if not program.shard_of_microbatch:
        yield from zip(program.shard_of_replica, program.num_examples, strict=False)
    for shards, sizes in zip(program.shard_of_microbatch, program.microbatches, strict=False):
        yield from zip(shards, sizes, strict=False)


def _has_rows(program: Program, node: fx.Node, num_examples: int | None) -> bool:
    value = node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return True
    size = size_key(value.shape[0]) if value.dim() else None
    if size is None or isinstance(size, int):
        return size is not None and num_examples in (None, size)
    return size in _symbols_of_examples(program, node.graph)


def _symbols_of_examples(program: Program, graph: fx.Graph) -> set[Any]:
    """What counts the examples of a shard whose size is a symbol: dim 0 of the arguments that are split."""
    names = {argument.name for argument in program.arguments if argument.has_examples}
    arguments = [*graph.find_nodes(op="placeholder"), *calls_to(graph, ops.argument)]
    values = [node.meta.get("val") for node in arguments if node.kwargs.get("name", node.target) in names]
    return {size_key(value.shape[0]) for value in values if isinstance(value, torch.Tensor)}


def _key(node: fx.Node) -> _Key:
    """What must be the same for all parts of an output."""
    how, value = str(node.kwargs.get("how")), node.all_input_nodes[0].meta.get("val")
    if not isinstance(value, torch.Tensor):
        return how, str(node.kwargs.get("output")), None, None
    whole = sizes_key(value.shape)
    shape = {"concatenated": whole[1:], "averaged": whole, "summed": whole}.get(how)
    return how, str(node.kwargs.get("output")), value.dtype, shape
