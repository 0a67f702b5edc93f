"""The rule on reserved memory for large results of regions."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.graph.aliases import origins
from mirrorc.analysis.graph.dying_arguments import last_reader, reserved_argument
from mirrorc.custom_ops import out_products
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, is_region_call, region_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rules.rule import Violation, rule

_INTO = (out_products.mm_into, out_products.linear_into)


@rule(since=Stage.OUTLINED)
def reserved_values_do_not_overlap(program: Program) -> Iterator[Violation]:
    """Reserved memory is an argument of one region call of its own replica. The region computes one result into the
    whole memory before it reads it. No reader returns a view of the result. The last reader comes before the memory's
    next value.
    """
    for graph in program.graphs():
        # the last reader of each memory's value, and the memory's node
        busy_until: dict[Any, tuple[fx.Node, fx.Node]] = {}
        uses = [(_user(node), node) for node in calls_to(graph, ops.reserved)]
        for call, node in sorted(uses, key=lambda pair: (pair[0] is not None, pair[0] or pair[1])):
            if call is None:
                yield Violation(f"{node.name} must be given once, to a region of its own replica", node)
                continue
            fault, last = _use(program, call, node)
            if last is None:
                yield Violation(fault, node)
                continue
            memory = (node.kwargs.get("replica"), node.kwargs["number"])
            if memory in busy_until and not busy_until[memory][0] < call:
                reader, earlier = busy_until[memory]
                yield Violation(
                    f"{reader.name} reads the value in {earlier.name} after {call.name} has begun the next one", node
                )
            busy_until[memory] = (last, node)


def _user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    is_single_call = (
        len(users) == 1 and is_region_call(users[0]) and sum(argument is node for argument in users[0].args) == 1
    )
    return users[0] if is_single_call and replica_of(users[0]) == replica_of(node) else None


def _use(program: Program, call: fx.Node, node: fx.Node) -> tuple[str, fx.Node | None]:
    body = program.regions[region_of(call)].graph_module.graph
    place = next(i for i, source in enumerate(call.args) if source is node)
    argument = body.find_nodes(op="placeholder")[place]
    users = sorted(argument.users)
    if not users or users[0].target not in _INTO or users[0].args[0] is not argument:
        return f"{region_of(call)} reads {argument.name} before it computes a product into it", None
    if sum(user.target in _INTO and user.args[0] is argument for user in users) > 1 or argument in users[0].args[1:]:
        return f"{region_of(call)} writes more than one product into {argument.name}, or one of its old content", None
    results: Any = body.output_node().args[0]
    indices = [i for i, result in enumerate(results) if result is not None and argument in origins(result)]
    if len(indices) != 1 or reserved_argument(body, indices[0]) != place:
        return (
            f"{region_of(call)} must have exactly one result in {argument.name}, and nothing else in that result",
            None,
        )
    parts = [part for part in call.users if part.args[1] == indices[0]]
    last = last_reader(parts[0], program.regions) if len(parts) == 1 else None
    return f"the value in {node.name} is read by nothing, or by what may look at it later", last
