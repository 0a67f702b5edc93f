"""A rule on two programs: that a pass keeps what is computed."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.bucket_parts import BucketParts
from mirrorc.analysis.layouts import SAME_ORDER, is_layout_only, may_read_memory_in_order, reads_strides
from mirrorc.custom_ops import matmul
from mirrorc.ir import ops
from mirrorc.ir.gradient_forms import details_of, form_of
from mirrorc.ir.nodes import (
    bucket_of,
    is_compute,
    is_region_call,
    region_of,
    replica_of,
    target_name,
)
from mirrorc.ir.program import Program, Region, Stage
from mirrorc.ir.value_types import value_type
from mirrorc.verifier.rule import Scope, rule
from mirrorc.verifier.rules.programs import Violation, scopes, written_buckets

Result = tuple[int, str, str]  # a replica; "loss", "gradient of" or "value for"; a variable
_WAYS = ("way to the reduction of", "way to the update of")
_UNCHANGED = -1  # a way on which nothing is made of the bucket
Flows = dict[Result, list[tuple[Any, fx.Node | None]]]


@rule(scope=Scope.PASS, is_about_dataflow=True)
def dataflow_is_kept(before: Program, after: Program, known: KnownFlows | None = None) -> Iterator[Violation]:
    """On every replica the loss, each gradient, each bucket's way to its update and each buffer's new value stay the same; a pass
    that means to change one says so by the attribute changes_dataflow = True.

    Expressions are compared by structure: over region calls where regions stay as they are, else over the operators in them.
    A value and its copy in another memory format are the same (`mirrorc.analysis.layouts.LAYOUT_ONLY`), but not to an operator
    that may read memory in order: for such a one, the strides of what it is given belong to the expression.
    """
    if known is not None and before.graphs() == after.graphs() and before.regions == after.regions:
        return  # the same graphs, which the pass has left alone: that is checked
    known = known or KnownFlows()
    inlined = before.regions != after.regions
    expected, found = known.flows(before, inlined), known.flows(after, inlined, is_new=True)
    for key in [*expected, *(key for key in found if key not in expected)]:
        if key[1] in _WAYS and (
            key not in found or (key not in expected and {n for n, _ in found[key]} == {_UNCHANGED})
        ):
            continue  # of what is not there yet, or not any more, other rules speak
        numbers = [[number for number, _ in flows.get(key, [])] for flows in (expected, found)]
        if numbers[0] != numbers[1] and Counter(numbers[0]) != Counter(numbers[1]):
            old, new = map(Counter, numbers)
            replica, kind, name = key
            node = next((node for number, node in found.get(key, []) if old[number] == 0), None)
            what = f"the {kind} {name}".strip() + f" on {after.devices[replica]}"
            if sum(old.values()) != sum(new.values()):
                yield Violation(f"{what} is given {sum(new.values())} times, not {sum(old.values())}", node)
                continue
            maker, why = known.first_difference(before, after, inlined, next(iter(old - new)), next(iter(new - old)))
            yield Violation(f"{what} is computed in another way than before{why}", maker or node)


class KnownFlows:
    """Numbers of expressions over a whole pipeline, and the last program's results: the next pass is given that program."""

    def __init__(self) -> None:
        self._numbers: dict[Any, int] = {}
        self._roots: dict[Any, Any] = {}
        self._last: tuple[Program, bool, Flows] | None = None

    def flows(self, program: Program, inlined: bool, *, is_new: bool = False) -> Flows:
        """What each replica computes; ``inlined``: looking into regions; ``is_new``: a pass has just made the program."""
        if is_new or self._last is None or self._last[0] is not program or self._last[1] is not inlined:
            self._last = (program, inlined, _Expressions(program, self._numbers, self._roots, inlined).flows())
        return self._last[2]

    def first_difference(
        self, before: Program, after: Program, inlined: bool, old: int, new: int
    ) -> tuple[fx.Node | None, str]:
        """Where two expressions begin to differ: the node in the new program, if it can be told, and what is said of it."""
        keys = {number: key for key, number in self._numbers.items()}
        there, here = self._makers(before, inlined), self._makers(after, inlined)
        differing: list[tuple[int, int]] = []
        while _without_values(keys.get(old)) == _without_values(keys.get(new)):
            values = [_values_in(keys.get(number)) for number in (old, new)]
            differing = [pair for pair in zip(*values, strict=False) if pair[0] != pair[1]]
            deeper = [pair for pair in differing if pair[1] not in there]  # what was there before is right as it is
            if not deeper:
                break
            old, new = deeper[0]
        node, names = here.get(new), [_say_operation(keys.get(number)) for number in (old, new)]
        if node is None or not all(names):
            return None, ""
        if names[0] != names[1] or not differing:
            return node, f": {node.name} is {names[1]}, where {names[0]} was"
        was, given = (maker.name for maker in (there.get(differing[0][0], node), here.get(differing[0][1], node)))
        is_inside = all(
            source.name != given for source in node.all_input_nodes
        )  # of a region, which is given it by a call
        return None if is_inside else node, f": {node.name} is made of {given}, where it was of {was}"

    def _makers(self, program: Program, inlined: bool) -> dict[int, fx.Node]:
        makers: dict[int, fx.Node] = {}
        _Expressions(program, self._numbers, self._roots, inlined, makers).flows()
        return makers


def _values_in(key: Any) -> Iterator[int]:
    """The numbers of the values that an expression is made of."""
    for part in key if isinstance(key, tuple) else ():
        if isinstance(part, tuple) and len(part) == 2 and part[0] == "value":
            yield part[1]
        else:
            yield from _values_in(part)


def _without_values(key: Any) -> Any:
    """An expression's operation, and all that is no value in it."""
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


@dataclass(frozen=True)
class _Value:
    """An expression's number, where an operator's argument may be a number, too."""

    number: int


class _Expressions:
    """Numbers expressions, so that equal ones have equal numbers, over all programs that share the table.

    Args:
        program: the program.
        numbers: the table, from an operation and the numbers of its arguments to the number of the result.
        roots: for a view, by its number and how it lies in memory, the number of what is viewed and how that lies; for the number
            of a value of another shape, the number and the shape of the one with whose elements it begins.
        inlined: whether to look into regions.
        makers: is given, for each number, the node that it was found at first.
    """

    def __init__(
        self,
        program: Program,
        numbers: dict[Any, int],
        roots: dict[Any, Any],
        inlined: bool,
        makers: dict[int, fx.Node] | None = None,
    ) -> None:
        self.program, self.numbers, self.roots, self.inlined, self.makers = program, numbers, roots, inlined, makers
        self._parts = BucketParts(program)

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
                of = own if own is not None else replica_of(node)
                found.setdefault((of or 0, kind, name), []).append((numbered[value], node))
            for kind, bucket, node, value in _ways(graph):
                of = own if own is not None else replica_of(value)
                found.setdefault((of or 0, kind, f"bucket {bucket}"), []).append((self._way(value), node))
            output: Any = graph.output_node().args[0]
            for r, loss in enumerate([output] if isinstance(output, fx.Node) else output["losses"]):
                found.setdefault((own if own is not None else r, "loss", ""), []).append((numbered[loss], None))
            if isinstance(output, dict):
                is_moved = self.program.num_replicas > 1
                for key, kind in (("packed", _WAYS[not is_moved]), ("reduced", _WAYS[1])):
                    for bucket, values in enumerate(output.get(key, ())):
                        for r, value in enumerate(values):
                            found.setdefault((r, kind, f"bucket {bucket}"), []).append((self._way(value), None))
                for key, kind in (("gradients", "gradient of"), ("writes", "value for")):
                    for name, values in output.get(key, {}).items():
                        for r, value in enumerate(values):
                            found.setdefault((r, kind, name), []).append((numbered[value], None))
        return found

    def _way(self, value: fx.Node) -> int:
        """What operators of torch make of a packed or a summed bucket, all other values left out."""
        part = self._parts.of(value)
        if part is None:
            return self._number(
                "way", value.name
            )  # to nothing that can be told: `collectives` and `updates` speak of it
        return self._number("way", *part.steps) if part.steps else _UNCHANGED

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
                kind = value_type(node.meta.get("val"))
                numbered[node] = self._number("argument", str(node.kwargs.get("name", node.target)), kind)
            elif node.target is ops.read:
                numbered[node] = self._number("read", node.kwargs["variable"])
            elif is_region_call(node):
                numbered[node] = self._call(node, numbered)
            elif node.target is operator.getitem:
                source, index = numbered[node.args[0]], node.args[1]
                numbered[node] = (
                    source[index] if isinstance(source, tuple) else self._number("part", ("value", source), index)
                )
            elif node.target in ops.FACTORED:
                numbered[node] = self._whole(node, numbered)
            elif is_layout_only(node):
                numbered[node] = numbered[node.args[0]]
            elif node.target in ops.VIEWS:
                numbered[node] = self._view(node, numbered)
            elif is_compute(node) and node.target._schema.is_mutable:
                self._write(node, numbered)
            else:
                numbered[node] = self._number_operator(node, numbered)
            if self.makers is not None and isinstance(numbered.get(node), int):
                self.makers.setdefault(numbered[node], node)
        return numbered

    def _view(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int:
        """A view; the viewed value itself, if views lead back to how that lies, as a product's do that goes into its slot.

        What `reshape` gives may be a copy: it is no view of the memory of what it was given.
        """
        source = node.args[0]
        assert isinstance(source, fx.Node)
        viewed = (numbered[source], _lies(source))
        root, lies = self.roots.get(viewed, viewed)
        if _lies(node) == lies and node.target is not torch.ops.aten.reshape.default:
            return int(root)
        is_in_order = node.target in SAME_ORDER
        number = self._reshaped(node, viewed[0]) if is_in_order else self._number_operator(node, numbered)
        if node.target is not torch.ops.aten.reshape.default:
            self.roots[number, _lies(node)] = (root, lies)
        return number

    def _reshaped(self, node: fx.Node, source: int) -> int:
        """The elements of a value in another shape, however often and by whatever operator that was changed on the way."""
        first, shape = self.roots.get(source, (source, _shape(node.args[0])))
        if _shape(node) == shape:
            return int(first)
        number = self._number(torch.ops.aten.reshape.default, ("value", first), _shape(node))
        self.roots[number] = (first, shape)
        return number

    def _number_operator(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int:
        return self._number_application(node.target, node.args, node.kwargs, numbered)

    def _number_application(self, target: Any, args: Any, kwargs: Any, numbered: Mapping[fx.Node, Any]) -> int:
        key: list[Any] = [target, _hashable(args, numbered), _hashable(kwargs, numbered)]
        if reads_strides(target) or may_read_memory_in_order(target):
            fx.node.map_arg((args, kwargs), lambda source: key.append(_lies(source)))
        return self._number(*key)

    def _whole(self, gradient: fx.Node, numbered: Mapping[fx.Node, Any]) -> int:
        """A gradient as factors is the expression of the whole."""

        def apply(target: Any, *args: Any, **kwargs: Any) -> _Value:
            if target not in SAME_ORDER:
                return _Value(self._number_application(target, args, kwargs, numbered))
            source = args[0].number if isinstance(args[0], _Value) else numbered[args[0]]
            first, _ = self.roots.get(source, (source, None))
            return _Value(self._number(torch.ops.aten.reshape.default, ("value", first), tuple(args[1])))

        whole = form_of(gradient).make_whole(apply, gradient.args, gradient.meta["val"].shape, **details_of(gradient))
        assert isinstance(whole, _Value), "a form of gradient makes it by operators"
        return whole.number

    def _write(self, node: fx.Node, numbered: dict[fx.Node, Any]) -> None:
        """An operator that writes its first argument, which is from then on what was written."""
        target, *sources = node.args
        written = numbered[sources[0]] if node.target is torch.ops.aten.copy_.default else None  # type: ignore[index]
        if node.target is matmul.mm_into:
            factors = tuple(("value", numbered[source]) for source in sources)  # type: ignore[index]
            written = self._number(torch.ops.aten.mm.default, factors, ())
        elif written is None:
            written = self._number(node.target, *(("value", numbered.get(n)) for n in node.all_input_nodes))
        numbered[node] = numbered[target] = written  # type: ignore[index]

    def _call(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> Any:
        """A region's results: by name and arguments, slots apart; or its own expressions, as a tuple."""
        nodes = [n for n in node.args if isinstance(n, fx.Node)]
        given = [self._number("slot") if n.target is ops.slot else numbered[n] for n in nodes]
        if self.inlined:
            return self._inline(self.program.regions[region_of(node)], given)
        without_slots = [("value", number) for number, n in zip(given, nodes, strict=True) if n.target is not ops.slot]
        return self._number("region", region_of(node), *without_slots)

    def _inline(self, region: Region, given: list[Any]) -> tuple[Any, ...]:
        body = region.graph_module.graph
        placeholders = [n for n in body.nodes if n.op == "placeholder"]
        numbered = self._number_graph(body, dict(zip(placeholders, given, strict=False)))
        results: Any = body.output_node().args[0]
        return tuple(numbered[result] for result in results)


def _shape(value: Any) -> Any:
    return tuple(value.meta["val"].shape)


def _lies(node: fx.Node) -> Any:
    """A value's shape and strides, those apart that mean nothing."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    return tuple((size, stride if size > 1 else 0) for size, stride in zip(value.shape, value.stride(), strict=True))


def _ways(graph: fx.Graph) -> Iterator[tuple[str, int, fx.Node, fx.Node]]:
    """What reductions and updates are given: kind, bucket, the node that takes it, the value."""
    for node in graph.nodes:
        if node.target in ops.REDUCTIONS:
            yield from ((_WAYS[0], bucket_of(node), node, value) for value in node.all_input_nodes)
        elif node.target in ops.UPDATES:
            for bucket, value in zip(written_buckets(node), node.all_input_nodes, strict=False):
                yield _WAYS[1], bucket, node, value


def _hashable(value: Any, numbered: Mapping[fx.Node, Any] | None = None) -> Any:
    """An argument as part of a key, nodes in it by their numbers."""
    if isinstance(value, fx.Node) and numbered is not None:
        return ("value", numbered[value])
    if isinstance(value, _Value):
        return ("value", value.number)
    if isinstance(value, list | tuple):
        return tuple([_hashable(item, numbered) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _hashable(item, numbered)) for key, item in value.items()])
    return (type(value), value) if isinstance(value, bool | int | float) else value


def _results(program: Program, graph: fx.Graph) -> Iterator[tuple[str, str, fx.Node, fx.Node]]:
    """The gradients that are packed and the values that are written: kind, variable, the node that does it, the value."""
    for node in graph.nodes:
        if node.target is ops.pack:
            for slot, gradient in zip(program.buckets[bucket_of(node)].slots, node.all_input_nodes, strict=False):
                yield "gradient of", slot.variable, node, gradient
        elif node.target is ops.write:
            yield "value for", str(node.kwargs["variable"]), node, node.all_input_nodes[0]
