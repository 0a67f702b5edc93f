"""A rule on two programs: that a pass keeps what is computed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from torch import fx

from mirrorc import ops
from mirrorc.program import Program, Region, Stage
from mirrorc.rules.programs import Violation, scopes

Result = tuple[int, str, str]  # a replica; "loss", "gradient of" or "value for"; a variable
Flows = dict[Result, list[tuple[Any, fx.Node | None]]]


def dataflow_is_kept(before: Program, after: Program, known: KnownFlows | None = None) -> Iterator[Violation]:
    """On every replica the loss, each gradient and each buffer's new value are the same expressions as before the pass.

    Expressions are compared by structure, over region calls; where a pass outlines the regions, over the operators in them.
    """
    known = known or KnownFlows()
    is_outlining = before.stage < Stage.OUTLINED <= after.stage
    expected = known.flows(before, is_outlining)
    found = known.flows(after, is_outlining)
    for key in [*expected, *(key for key in found if key not in expected)]:
        old, new = (Counter(number for number, _ in flows.get(key, [])) for flows in (expected, found))
        if old != new:
            replica, kind, name = key
            node = next((node for number, node in found.get(key, []) if old[number] == 0), None)
            what = f"{kind} {name}".strip() + f" on {after.devices[replica]}"
            given = [
                f" is given {sum(new.values())} times, not {sum(old.values())}",
                " is computed in another way than before",
            ]
            yield Violation(f"the {what}{given[sum(old.values()) == sum(new.values())]}", node)


class KnownFlows:
    """Numbers of expressions over a whole pipeline, and the last program's results: the next pass is given that program."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._last: tuple[Program, bool, Flows] | None = None

    def flows(self, program: Program, inlined: bool) -> Flows:
        """What each replica computes; ``inlined``: looking into regions."""
        if self._last is None or self._last[0] is not program or self._last[1] is not inlined:
            self._last = (program, inlined, _Expressions(program, self._numbers, inlined).flows())
        return self._last[2]


class _Expressions:
    """Numbers expressions, so that equal ones have equal numbers, over all programs that share the table.

    Args:
        program: the program.
        numbers: the table, from an operation and the numbers of its arguments to the number of the result.
        inlined: whether to look into regions.
    """

    def __init__(self, program: Program, numbers: dict[Any, int], inlined: bool) -> None:
        self.program, self.numbers, self.inlined = program, numbers, inlined

    def flows(self) -> Flows:
        """The expressions of what each replica computes, each with the node that gives it (None: an output)."""
        found: Flows = {}
        if self.program.stage < Stage.REPLICATED:
            of_shard = [list(self._outputs(graph, self._number_graph(graph))) for graph in self.program.shard_graphs]
            for replica, shard in enumerate(self.program.shard_of_replica):
                for kind, name, number in of_shard[shard]:
                    found.setdefault((replica, kind, name), []).append((number, None))
            return found
        for replica, (_, graph, replicas) in enumerate(scopes(self.program)):
            numbered = self._number_graph(graph)
            own = replica if replicas == [None] else None
            for kind, name, node, value in _results(self.program, graph):
                of = own if own is not None else ops.replica_of(node)
                found.setdefault((of or 0, kind, name), []).append((numbered[value], node))
            output: Any = graph.output_node().args[0]
            for r, loss in enumerate([output] if isinstance(output, fx.Node) else output["losses"]):
                found.setdefault((own if own is not None else r, "loss", ""), []).append((numbered[loss], None))
            if isinstance(output, dict):
                for key, kind in (("gradients", "gradient of"), ("writes", "value for")):
                    for name, values in output.get(key, {}).items():
                        for r, value in enumerate(values):
                            found.setdefault((r, kind, name), []).append((numbered[value], None))
        return found

    def _outputs(self, graph: fx.Graph, numbered: Mapping[fx.Node, Any]) -> Iterator[tuple[str, str, Any]]:
        output: Any = graph.output_node().args[0]
        yield "loss", "", numbered[output["loss"]]
        for key, kind in (("gradients", "gradient of"), ("writes", "value for")):
            for name, value in output[key].items():
                yield kind, name, numbered[value]

    def _number(self, *key: Any) -> int:
        try:
            return self.numbers.setdefault(key, len(self.numbers))
        except TypeError:  # something in it cannot be hashed
            return self.numbers.setdefault(repr(key), len(self.numbers))

    def _number_graph(self, graph: fx.Graph, arguments: Mapping[fx.Node, Any] | None = None) -> dict[fx.Node, Any]:
        numbered: dict[fx.Node, Any] = dict(arguments or {})
        for node in graph.nodes:
            if node in numbered or node.op == "output":
                continue
            if node.op == "placeholder" or node.target is ops.argument:
                numbered[node] = self._number("argument", str(node.kwargs.get("name", node.target)))
            elif node.target is ops.read:
                numbered[node] = self._number("read", node.kwargs["variable"])
            elif ops.is_region_call(node):
                numbered[node] = self._call(node, numbered)
            elif node.target is operator.getitem:
                source, index = numbered[node.args[0]], node.args[1]
                numbered[node] = source[index] if isinstance(source, tuple) else self._number("part", source, index)
            else:
                parts = (fx.node.map_arg(part, lambda n: ("value", numbered[n])) for part in (node.args, node.kwargs))
                numbered[node] = self._number(node.target, *(_hashable(part) for part in parts))
        return numbered

    def _call(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> Any:
        """A region's results: by name and arguments, slots apart; or its own expressions, as a tuple."""
        given = [numbered[n] for n in node.args if isinstance(n, fx.Node) and n.target is not ops.slot]
        region = self.program.regions.get(ops.region_of(node))
        if region is None or not self.inlined:
            return self._number("region", ops.region_of(node), *given)
        return self._inline(region, given)

    def _inline(self, region: Region, given: list[Any]) -> tuple[Any, ...]:
        body = region.graph_module.graph
        placeholders = [n for n in body.nodes if n.op == "placeholder"]
        numbered = self._number_graph(body, dict(zip(placeholders, given, strict=False)))
        results: Any = body.output_node().args[0]
        return tuple(numbered[result] for result in results)


def _hashable(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(_hashable(item) for item in value)
    if isinstance(value, dict):
        return tuple((key, _hashable(item)) for key, item in value.items())
    return (type(value), value) if isinstance(value, bool | int | float) else value


def _results(program: Program, graph: fx.Graph) -> Iterator[tuple[str, str, fx.Node, fx.Node]]:
    """The gradients that are packed and the values that are written: kind, variable, the node that does it, the value."""
    for node in graph.nodes:
        if node.target is ops.pack:
            for slot, gradient in zip(program.buckets[ops.bucket_of(node)].slots, node.all_input_nodes, strict=False):
                yield "gradient of", slot.variable, node, gradient
        elif node.target is ops.write:
            yield "value for", str(node.kwargs["variable"]), node, node.all_input_nodes[0]
