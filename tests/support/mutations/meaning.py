"""What a program computes, as numbers to compare: a second opinion on what the verifier calls dataflow.

Unlike the verifier it looks into regions at every stage, knows that some operators keep a value, and knows what is written
into slots.
"""

import operator
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.slots_of_values import packed_slots
from mirrorc.custom_ops import out_products
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_compute, is_region_call, region_of
from mirrorc.ir.program import Program, Stage
from mutations.places import kind_of, timelines

aten = torch.ops.aten
_SAME = (aten.detach.default, aten.alias.default, aten.clone.default)
_VIEWS = (aten.view.default, aten._unsafe_view.default)
_COMPUTED = {
    out_products.mm_into: aten.mm.default,
    out_products.linear_into: aten.addmm.default,
}  # into memory that is given
Results = dict[tuple[int, str, str], list[Any]]


def meaning(program: Program) -> Results:
    """A number for the loss, each gradient, output, kept value and new buffer of each replica: equal for equal expressions."""
    results: Results = {}
    for replica, kind, name, value in _results(program):
        results.setdefault((replica, kind, name), []).append(value)
    return {key: sorted(values) for key, values in results.items()}


def _results(program: Program) -> Iterator[tuple[int, str, str, Any]]:
    if program.stage < Stage.REPLICATED:
        for replica, shard in enumerate(program.shard_of_replica):
            if shard is None:
                continue  # a replica without examples
            graph = program.shard_graphs[shard]
            values = _Values(program).of(graph.nodes)
            output: Any = graph.output_node().args[0]
            yield replica, "loss", "", values.get(output["loss"], 0)  # an evaluation gathers it
            yield from _gathered(replica, graph.nodes, values)
            for kind in ("gradients", "writes"):
                yield from ((replica, kind, name, values[node]) for name, node in output[kind].items())
        return
    for replica, line in enumerate(timelines(program)):
        if not line:
            continue
        values = _Values(program).of([node for node in line if node.target not in ops.COLLECTIVES])
        output = line[0].graph.output_node().args[0]
        yield replica, "loss", "", values.get(output["losses"][replica] if isinstance(output, dict) else output, 0)
        yield from _gathered(replica, line, values)
        for kind in ("gradients", "writes") if isinstance(output, dict) else ():
            for name, nodes in output.get(kind, {}).items():
                yield replica, kind, name, values.get(nodes[replica], 0)
        for node in line:
            if node.target is ops.write:
                yield replica, "writes", str(node.kwargs["variable"]), values[node.all_input_nodes[0]]
            elif node.target is ops.pack:
                slots = packed_slots(program, node)
                for slot, gradient in zip(slots, node.args, strict=bool(node.args)):
                    yield replica, "gradients", slot.variable, values[gradient]  # type: ignore[index]


def _gathered(
    replica: int, nodes: Iterable[fx.Node], values: dict[fx.Node, Any]
) -> Iterator[tuple[int, str, str, Any]]:
    for node in nodes:
        if node.target is ops.gather:
            name = f"{node.kwargs['output']} {node.kwargs['how']}"
            yield replica, "outputs", name, values[node.args[0]]  # type: ignore[index]
        elif node.target is ops.keep:
            yield replica, "kept", str(node.kwargs["number"]), values[node.args[0]]  # type: ignore[index]


class _Values:
    def __init__(self, program: Program) -> None:
        self.program = program
        self.turned: dict[int, int] = {}  # of a transpose, what was transposed
        self.viewed: dict[int, tuple[Any, str]] = {}  # of a view, what was viewed first, and its shape

    def of(self, nodes: Sequence[fx.Node], given: dict[fx.Node, Any] | None = None) -> dict[fx.Node, Any]:
        values: dict[fx.Node, Any] = dict(given or {})
        for node in nodes:
            if node.op != "output" and node not in values:
                values[node] = self._value(node, values)
        return values

    def _value(self, node: fx.Node, values: dict[fx.Node, Any]) -> Any:
        if node.op == "placeholder" or node.target is ops.argument:
            return hash(("argument", str(node.kwargs.get("name", node.target)), str(kind_of(node.meta.get("val")))))
        if is_region_call(node):
            return self._region(node, values)
        source = values.get(node.args[0]) if node.args and isinstance(node.args[0], fx.Node) else None
        if node.target is operator.getitem and isinstance(source, tuple):
            return source[node.args[1]]  # type: ignore[index]
        if node.target in _SAME or _is_laid_out(node):
            return source
        if node.target in _VIEWS and isinstance(node.args[0], fx.Node):
            return self._view(source, _shape(node.args[0]), _shape(node))
        if node.target is aten.t.default and source in self.turned:
            return self.turned[source]
        if node.target is ops.product:
            return hash((aten.mm.default, self._key(node.args, values), self._key({}, values)))
        if node.target is ops.index_add:
            given = (*node.args, node.meta["val"].shape[0], node.kwargs.get("padding_idx", -1), False)
            return hash((aten.embedding_dense_backward.default, self._key(given, values), self._key({}, values)))
        target, args = (_COMPUTED[node.target], node.args[1:]) if node.target in _COMPUTED else (node.target, node.args)
        value = hash((target, self._key(args, values), self._key(node.kwargs, values)))
        if node.target is aten.t.default:
            self.turned[value] = source  # type: ignore[assignment]
        if is_compute(node) and node.target._schema.is_mutable:  # type: ignore[union-attr]
            value = values[node.args[1]] if node.target is aten.copy_.default else value  # type: ignore[index]
            values[node.args[0]] = value  # type: ignore[index]
        return value

    def _view(self, source: Any, shape: str, wanted: str) -> Any:
        """A view of a view is one of what was viewed first, so that one of its first shape is that."""
        first, first_shape = self.viewed.get(source, (source, shape))
        if wanted == first_shape:
            return first
        value = hash(("view", first, wanted))
        self.viewed[value] = first, first_shape
        return value

    def _key(self, argument: Any, values: dict[fx.Node, Any]) -> Any:
        if isinstance(argument, fx.Node):
            return "value", values.get(argument)
        if isinstance(argument, list | tuple):
            return tuple(self._key(item, values) for item in argument)
        if isinstance(argument, dict):
            return tuple((key, self._key(item, values)) for key, item in argument.items())
        return type(argument).__name__, repr(argument)

    def _region(self, call: fx.Node, values: dict[fx.Node, Any]) -> tuple[Any, ...]:
        body = self.program.regions[region_of(call)].graph_module.graph
        placeholders = [node for node in body.nodes if node.op == "placeholder"]
        given = {p: values.get(value, 0) for p, value in zip(placeholders, call.args, strict=True)}  # type: ignore[call-overload]
        inside = self.of(list(body.nodes), given)
        results: Any = body.output_node().args[0]
        return tuple(inside[result] for result in results)


def _is_laid_out(node: fx.Node) -> bool:
    return node.target in (aten.contiguous.default, aten._to_copy.default) and set(node.kwargs) <= {"memory_format"}


def _shape(node: fx.Node) -> str:
    return str(list(node.meta["val"].shape))
