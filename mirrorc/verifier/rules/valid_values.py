"""Rules on single values."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.nodes import is_known, name_of, origin_of, owners_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.type_inference import has_inferred_type, infer_type, is_inferable
from mirrorc.ir.value_types import say_type, value_type
from mirrorc.messages.wording import numbered
from mirrorc.verifier.rules.rule import Order, Scope, Violation, rule, scopes


@rule(scope=Scope.GRAPH, order=Order.FORM)
def graphs_are_well_formed(program: Program, graph: fx.Graph) -> Iterator[Violation]:
    """Every value is defined before it is used, in its own graph, and names are unique (torch.fx's own lint)."""
    try:
        graph.lint()
    except (RuntimeError, ValueError) as error:
        message = str(error).splitlines()[0]  # after it comes the whole graph
        named = re.findall(r"Node '([^']+)'", message)
        yield Violation(f"graph is malformed: {message}", next((n for n in graph.nodes if n.name in named[-1:]), None))


@rule(scope=Scope.GRAPH, order=Order.TYPES)
def values_have_their_types(program: Program, graph: fx.Graph) -> Iterator[Violation]:
    """Every value has the shape, strides and dtype of its operation's result."""
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or not is_inferable(node):
            continue
        try:
            if not has_inferred_type(program, node):
                inferred, noted = infer_type(program, node), value_type(node.meta.get("val"))
                is_bare = noted is None and node.meta.get("val") is None
                fault = (
                    "no type is noted: make nodes with mirrorc.ir.graph_edits.insert, or note it with "
                    "mirrorc.ir.type_inference.set_type"
                    if is_bare
                    else f"is noted as {say_type(noted)}"
                )
                yield Violation(f"{node.name} is {say_type(inferred)}, but {fault}", node)
        except TypeError as error:
            yield Violation(f"{node.name}: {error}", node)


@rule(order=Order.OWNERS)
def replicas_meet_only_in_collectives(program: Program) -> Iterator[Violation]:
    """In the mirrored graph, a node's arguments belong to its own replica. Only collectives join replicas."""
    if program.graph is None:
        return
    owners = owners_of(program.graph)
    for node, replica in owners.items():
        if replica is None or not 0 <= replica < program.num_replicas:
            if node.op == "output" or node.target in ops.COLLECTIVES:
                continue
            yield Violation(f"{node.name} belongs to no replica", node)
        for source in node.all_input_nodes:
            other = owners[source]
            if other != replica and source.target not in ops.COLLECTIVES:
                yield Violation(f"{node.name} of replica {replica} uses {source.name} of replica {other}", node)


@rule(since=Stage.REPLICATED)
def results_belong_to_their_replicas(program: Program) -> Iterator[Violation]:
    """In the mirrored graph's output, a result for a replica belongs to that replica, and a result for a bucket is that
    bucket. A replica without examples has None in place of a loss, of gradients and of written values.
    """
    output: Any = program.graph.output_node().args[0] if program.graph is not None else {}
    rows: list[tuple[str, int | None, Any]] = (
        [("loss", None, output.get("losses", ()))] if program.has_loss and output else []
    )
    packs = [bucket.index for bucket, _ in program.packs]
    for i, values in enumerate(output.get("packed", ())):
        rows.append((f"pack {i}", packs[i] if i < len(packs) else i, values))
    rows += [(f"bucket {i}", i, values) for i, values in enumerate(output.get("reduced", ()))]
    for key in ("gradients", "writes"):
        rows += [(name, None, values) for name, values in output.get(key, {}).items()]
    for result, bucket, values in rows:
        wanted = [r if bucket is not None or r in program.present else None for r in range(program.num_replicas)]
        if [replica_of(value) if value is not None else None for value in values] != wanted:
            yield Violation(f"the results for {result} are not those of {_replicas(wanted)} in order")
        elif bucket is not None and any(origin_of(value).kwargs.get("bucket") != bucket for value in values):
            yield Violation(f"the results for {result} are of another bucket")


def _replicas(wanted: list[int | None]) -> str:
    present = [replica for replica in wanted if replica is not None]
    absent = [replica for replica, owner in enumerate(wanted) if owner is None]
    text = f"replicas {present[0]} to {present[-1]}" if not absent else numbered("replica", present)
    return f"{text}, with None for {numbered('replica', absent)}," if absent else text


@rule(since=Stage.CAPTURED, order=Order.REFERENCES)
def every_operation_is_known(program: Program) -> Iterator[Violation]:
    """Outside of regions there are only operations of mirrorc and operators of torch."""
    for _, graph, _ in scopes(program):
        for node in graph.nodes:
            if node.op == "get_attr" or (node.op == "call_function" and not is_known(node)):
                yield Violation(f"{name_of(node)} is no operation of mirrorc, nor an operator of torch", node)
