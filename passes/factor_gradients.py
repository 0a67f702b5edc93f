"""Leaves gradients as two factors, whose product each device makes for its share alone."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import fx

from mirrorc import ops
from mirrorc.aliases import viewed, viewed_variable
from mirrorc.errors import PassError
from mirrorc.graphs import call, copied
from mirrorc.inputs import identifier
from mirrorc.passes.region_gradients import (
    calls_by_region,
    gradient_names,
    gradient_places,
    matrix_product,
    remove_unused,
    share_one_memory,
)
from mirrorc.program import Program, Stage
from mirrorc.torch_internals import add_node, lazy_graph_module

Factors = tuple[fx.Node, fx.Node]


@dataclass(frozen=True)
class FactorGradients:
    """Takes the last matrix product of a gradient out of its region, if its factors are smaller than the gradient::

        bwd_0 = call_region(dy, x, region=bwd_0)          bwd_0 = call_region(dy, region=bwd_0)
        g     = bwd_0[0]                                  left  = bwd_0[0]
        output {gradients: {w: g}}                  ->    g     = product(left, x, bucket=0, variable=w)
                                                          output {gradients: {w: g}}

        region bwd_0(dy, x):                              region bwd_0(dy):
            t  = aten.t(dy)                                   t = aten.t(dy)
            mm = aten.mm(t, x)                      ->        return [t]
            return [mm]

    The gradient of a linear layer's weight is such a product, over the examples of the batch. On devices that share one memory
    and update a share of the parameters each, none of them needs the whole: each makes the rows of its own share, from the
    factors of all replicas. As much is multiplied as before, but every gradient is written once, not once by each replica, and
    there is nothing left to add up in memory. Otherwise `pack` makes the product.

    Needs: a bucket plan and outlined regions.
    Guarantees: what a gradient is made of stays the same. Factors are values of the step, never variables or views of them, which
        an update may have written by the time that the product is made.

    Attributes:
        min_elements: gradients with fewer are left as they are: they stay in cache, where adding costs less than the calls
            that a product by shares needs (measured: even at 256 x 256, a seventh of the step saved at 512 x 512).

    Source: sending factors instead of gradients is sufficient factor broadcasting (Xie et al., 2016), here without the sending.
    """

    min_elements: int = 2**17
    name: str = field(default="factor-gradients", init=False)
    input_stage: Stage = field(default=Stage.OUTLINED, init=False)
    output_stage: Stage = field(default=Stage.OUTLINED, init=False)

    def run(self, program: Program) -> Program:
        if not program.buckets:
            raise PassError("pass 'factor-gradients' needs a bucket plan: run 'plan-buckets' before it")
        if program.num_replicas == 1 or not share_one_memory(program):
            return program
        slots = {slot.variable: slot for b in program.buckets if b.rule.elementwise for slot in b.slots}
        bucket_of = {slot.variable: bucket.index for bucket in program.buckets for slot in bucket.slots}
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        names = {
            node: name
            for graph in graphs
            for node, name in gradient_names(graph).items()
            if name in slots
            and slots[name].num_elements >= self.min_elements
            and node.meta["val"].stride() == slots[name].strides
        }
        bodies, found = {}, {}
        calls = calls_by_region(graphs)
        for name, nodes in calls.items():
            bodies[name] = copied(program.regions[name].graph_module.graph)
            found[name] = _factors(program, bodies[name], nodes, names)
        # all replicas must give the same gradients as factors, whatever their shards
        counts = Counter(
            names[part] for name, own in found.items() for place in own for part in _parts(calls[name], place)
        )
        regions = dict(program.regions)
        for name, own in found.items():
            chosen = {
                place: pair
                for place, pair in own.items()
                if all(counts[names[part]] == len(graphs) for part in _parts(calls[name], place))
            }
            if chosen:
                given = _given(bodies[name], calls[name])
                split = _split(bodies[name], given, chosen)
                for number, node in enumerate(calls[name]):
                    _rewire(node, number, split, names, bucket_of)
                regions[name] = replace(regions[name], graph_module=lazy_graph_module({}, bodies[name], name))
        return program.evolve(shard_graphs=graphs, regions=regions)


def _parts(calls: list[fx.Node], place: int) -> list[fx.Node]:
    """A result of a region, in each of its calls."""
    return [part for node in calls for part in node.users if part.args[1] == place]


def _factors(
    program: Program, body: fx.Graph, calls: list[fx.Node], names: Mapping[fx.Node, str]
) -> dict[int, Factors]:
    """For each gradient that is worth it, by its place among a region's results, the two factors in the region's body."""
    results: Any = body.output_node().args[0]
    given = _given(body, calls)
    places = [gradient_places(node, names)[0] for node in calls]
    found = {}
    for place in places[0]:
        if not all(place in own for own in places):
            continue
        product = matrix_product(results[place])
        if product is None or results.count(results[place]) > 1:
            continue
        left, right = product.args
        assert isinstance(left, fx.Node) and isinstance(right, fx.Node)
        num_elements = left.meta["val"].numel() + right.meta["val"].numel()
        sources = [source for factor in (left, right) for source in given.get(viewed(factor), ())]
        is_of_variable = any(viewed_variable(program, source) is not None for source in sources)
        if num_elements < product.meta["val"].numel() and not is_of_variable:
            found[place] = (left, right)
    return found


def _given(body: fx.Graph, calls: list[fx.Node]) -> dict[fx.Node, list[fx.Node]]:
    """What the calls give for each of a body's placeholders."""
    placeholders = [node for node in body.nodes if node.op == "placeholder"]
    return {p: [node.args[i] for node in calls] for i, p in enumerate(placeholders)}  # type: ignore[misc]


@dataclass(frozen=True)
class _Split:
    """A region whose products are left to others.

    Attributes:
        kept: places of the results that stay, in order; they come first.
        results: the body's new results: those that stay, then factors.
        arguments: places of the arguments that are still used.
        factors: place of each gradient that was a product, to its factors in the body.
        given: the body's former placeholders, with what the calls give for them.
    """

    kept: list[int]
    results: list[fx.Node]
    arguments: list[int]
    factors: Mapping[int, Factors]
    given: Mapping[fx.Node, list[fx.Node]]


def _split(body: fx.Graph, given: Mapping[fx.Node, list[fx.Node]], factors: Mapping[int, Factors]) -> _Split:
    """Makes a body give factors instead of products; a factor that it was given itself need not be given back."""
    old: Any = body.output_node().args[0]
    kept = [place for place in range(len(old)) if place not in factors]
    results = [old[place] for place in kept]
    results += dict.fromkeys(f for pair in factors.values() for f in pair if f not in given and f not in results)
    body.output_node().args = (tuple(results),)
    remove_unused(body)
    arguments = [i for i, placeholder in enumerate(given) if placeholder.users]
    for placeholder in given:
        if not placeholder.users:
            body.erase_node(placeholder)
    body.lint()
    return _Split(kept, results, arguments, factors, given)


def _rewire(
    node: fx.Node, number: int, split: _Split, names: Mapping[fx.Node, str], buckets: Mapping[str, int]
) -> None:
    """Gives the products of a split region to the graph of one of its calls."""
    parts: dict[int, fx.Node] = {part.args[1]: part for part in node.users}  # type: ignore[misc]
    last, graph = max([node, *parts.values()]), node.graph
    gradients: Any = node.kwargs["gradients"]
    places = {old: new for new, old in enumerate(split.kept)}
    own = {name: places[place] for name, place in gradients.items() if place in places}
    node.kwargs = {**node.kwargs, "gradients": own}
    node.args = tuple(node.args[i] for i in split.arguments)
    node.meta["val"] = tuple(result.meta["val"] for result in split.results)
    outside = {inside: given[number] for inside, given in split.given.items()}
    called: dict[fx.Node, str] = {}  # a region that is called twice gives the factors of other variables each time
    for place, pair in split.factors.items():
        for factor, side in zip(pair, ("left", "right"), strict=True):
            called.setdefault(factor, f"{identifier(names[parts[place]])}_{side}")
    for new, result in enumerate(split.results):
        if new < len(split.kept):
            part = parts[split.kept[new]]
            part.args = (node, new)
        else:
            with graph.inserting_after(last):
                part = last = add_node(graph, "call_function", operator.getitem, (node, new), {}, called[result])
            part.meta.update(result.meta)
        outside[result] = part
    for place, pair in split.factors.items():
        gradient, variable = parts[place], names[parts[place]]
        with graph.inserting_after(last):
            tags = {"bucket": buckets[variable], "variable": variable}
            last = call(graph, ops.product, tuple(outside[factor] for factor in pair), tags)
        last.meta.update(gradient.meta)
        gradient.replace_all_uses_with(last)
        graph.erase_node(gradient)
