"""Leaves gradients as factors."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import fx

from mirrorc.analysis.gradients.region_factors import FactorsOfRegions, arguments_of
from mirrorc.analysis.gradients.region_gradients import calls_by_region, gradient_names
from mirrorc.analysis.gradients.whole_gradients import why_whole
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Slot
from mirrorc.ir.gradient_forms import FactoredGradient
from mirrorc.ir.graph_edits import call, copied, remove_unused
from mirrorc.ir.links import best_link, carrier_of, link_named, why_memory_is_not_shared
from mirrorc.ir.names import identifier
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted
from mirrorc.printing.printed_values import size_text
from mirrorc.torch_internals import add_node, is_symbolic, lazy_graph_module, num_bytes_now


@dataclass(frozen=True)
class FactorGradients:
    """Leaves a gradient as its factors, the operands of its last operator, if they are smaller::

        bwd_0 = call_region(dy, x, region=bwd_0)          bwd_0 = call_region(dy, region=bwd_0)
        g     = bwd_0[0]                                  left  = bwd_0[0]
        output {gradients: {w: g}}                  ->    g     = product(left, x, bucket=0, variable=w)
                                                          output {gradients: {w: g}}

    Such gradients are matrix products over examples, and rows of embeddings (`mirrorc.ir.gradient_forms`). With shared
    memory, each device computes its share of a gradient from all replicas' factors. This costs as many operations, but
    a gradient is written once, not once per replica.

    Gradients that are exchanged as factors, or whose optimizer takes rows, always become factors. On a single CPU only
    embedding gradients do.

    Guarantees: no factor is a variable or a view of one, because an update may write it before the gradient is
        computed.

    Attributes:
        min_elements: smaller gradients stay whole (no gain at 256 x 256, a seventh of the step at 512 x 512).
        parameters_are_shared, all_reduce: set by `mirrorc.passes.resolve_sharing`. None counts as True, and as native
            sums.

    Source: sufficient factor broadcasting (Xie et al., 2016).
    """

    min_elements: int = 2**17
    link: str | None = None
    parameters_are_shared: bool | None = None
    all_reduce: str | None = None
    name: str = field(default="factor-gradients", init=False)
    input_stage: Stage = field(default=Stage.OUTLINED, init=False)
    output_stage: Stage = field(default=Stage.OUTLINED, init=False)
    trains_only: ClassVar = True
    changes_bits: str = field(
        default="a share of such a gradient is one sum over the examples of all replicas", init=False
    )

    def __post_init__(self) -> None:
        if self.link is not None:
            link_named(self.link)

    def run(self, program: Program) -> Program:
        if not program.buckets:
            raise PassError("MC4003: pass 'factor-gradients' needs a bucket plan: run 'plan-buckets' before it")
        slots = {slot.variable: slot for b in program.buckets if b.rule.is_flat for slot in b.slots}
        rows = {slot.variable: slot for b in program.buckets if b.rule.takes_rows for slot in b.slots}
        sent = {slot.variable for b in program.buckets if b.is_sent_as_factors for slot in b.slots}
        due = {*rows, *program.gathered, *sent}
        why_not = self._why_no_shares(program, bool(slots))
        if why_not and not due:
            return program.with_remarks(f"no gradient stays factors: {why_not}", is_kept=program.num_replicas > 1)
        if rows and program.accumulation in (Accumulation.ADDS, Accumulation.ENDS):
            raise problem(
                PassError,
                f"MC2501: sparse gradients of several calls, as that of {min(rows)}, are not kept",
                fix="nn.Embedding(..., sparse=False), with an optimizer for dense gradients",
            )
        buckets = {slot.variable: bucket.index for bucket in program.buckets for slot in bucket.slots}
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        names, whole = self._named(program, graphs, slots | rows, due, why_not)
        calls = calls_by_region(graphs)
        bodies = {name: copied(program.regions[name].graph_module.graph) for name in calls}
        recognized = FactorsOfRegions(program, graphs, bodies, names, whole, due)
        regions = dict(program.regions)
        for name, nodes in calls.items():
            if chosen := recognized.chosen(name):
                split = _split(bodies[name], arguments_of(bodies[name], nodes), chosen)
                for number, node in enumerate(nodes):
                    _rewire(node, number, split, names, buckets)
                regions[name] = replace(regions[name], graph_module=lazy_graph_module({}, bodies[name], name))
                if not split.results:  # the region only made gradients of its arguments
                    del regions[name]
        if missing := due - _factored(graphs[0]):
            name = min(missing)
            remedy = (
                "nn.Embedding(..., sparse=False), with an optimizer for dense gradients"
                if name in rows
                else "compile with communication=mirrorc.Communication(exchange='dense')"
            )
            raise problem(
                PassError,
                f"MC4003: workers or the optimizer take the gradient of {name} as factors, and it exists only as a whole",
                f"it is one of those {whole.get(name, 'that are used otherwise, too')}",
                remedy,
            )
        if regions == program.regions:
            return program.with_remarks(_remark(program, whole), is_kept=False)
        factored = program.evolve(shard_graphs=graphs, regions=regions)
        return factored.with_remarks(_remark(factored, whole))

    def _named(
        self,
        program: Program,
        graphs: Sequence[fx.Graph],
        slots: Mapping[str, Slot],
        due: Collection[str],
        why_not: str,
    ) -> tuple[dict[fx.Node, str], dict[str, str]]:
        """Variables whose gradients may become factors, by node; and reasons why others stay whole, by variable."""
        cut = {slot.variable for bucket in program.buckets if bucket.is_cut for slot in bucket.slots}
        names, whole = {}, {}
        for graph in graphs:
            for node, name in gradient_names(graph).items():
                slot = slots.get(name)
                least = 0 if name in due else self.min_elements  # required factors were chosen by bytes sent
                why = why_whole(node.meta["val"], slot.strides if slot is not None else None, least)
                if why := "in buckets that are cut into packs" if name in cut else why:
                    whole[name] = why
                elif why_not and name not in due:
                    whole[name] = f"because {why_not}"
                else:
                    names[node] = name
        return names, whole

    def _why_no_shares(self, program: Program, has_shares: bool) -> str:
        if program.leaves_gradients:
            return "the user gets each whole"
        if program.accumulation is not Accumulation.NONE:
            return (
                "those of several calls are added up whole: nobody knows how many calls' factors would have to be kept"
            )
        if program.num_replicas == 1 and program.workers.are_several:
            is_sent = any(bucket.is_sent_as_factors for bucket in program.buckets)
            return "" if is_sent else "one device has no share to make, and workers exchange whole buckets"
        if program.num_replicas == 1:
            is_cpu = program.devices[0].torch_device.type == "cpu"
            return "" if is_cpu else "one device has no share to make"
        if why_not := why_memory_is_not_shared(program.devices):
            return why_not
        if any(bucket.owner is not None for bucket in program.buckets):
            return "each is added up whole, by the device that owns its variable"
        if self.parameters_are_shared is False:
            return "no pass shares parameters, so that each device needs the whole gradient"
        if not has_shares:
            return ""
        if self.all_reduce is not None:
            return f"{self.all_reduce} sends whole gradients between devices"
        carrier = carrier_of(self.link or best_link(program.devices)[0], ops.reduce_scatter)
        is_read = link_named(carrier).reads_shared_memory
        return "" if is_read else f"over the link {carrier}, no device reads the others' factors in their memory"


def _factored(graph: fx.Graph) -> set[str]:
    return {str(node.kwargs["variable"]) for node in calls_to(graph, *ops.FACTORED)}


def _remark(program: Program, whole: Mapping[str, str]) -> str:
    output: Any = program.shard_graphs[0].output_node().args[0]
    gradients: dict[str, fx.Node] = output["gradients"]
    factored = {name: node for name, node in gradients.items() if node.target in ops.FACTORED}
    reasons = Counter(whole.get(name, "that are used otherwise, too") for name in gradients if name not in factored)
    others = ", ".join(f"{number} {why}" for why, number in reasons.most_common())
    if not factored:
        return f"no gradient stays factors: {others}"
    sizes = {slot.variable: slot.num_elements * b.dtype.itemsize for b in program.buckets for slot in b.slots}
    whole_bytes = sum(sizes[name] for name in factored)
    first = next(filter(None, program.shard_of_microbatch), (0,))  # the graphs of a replica's microbatches
    factor_bytes = sum(_bytes_of_factors(program.shard_graphs[number]) for number in first)
    number = f"{len(factored)} of {counted(len(gradients), 'gradient')}"
    rows = {name for name in factored if (update := program.variables[name].update) and update.takes_rows}
    gain = (
        "the optimizer gets rows alone"
        if rows == factored.keys()
        else "devices can gather these"
        if program.gathered
        else "each device can make its own share of them"
        if program.num_replicas > 1 and not program.leaves_gradients
        else "workers can send these"
        if program.workers.are_several
        else "only what this step or the last one adds to is written"
    )
    remark = (
        f"{number} ({size_text(whole_bytes)} of {size_text(sum(sizes.values()))}) "
        f"leave their regions as factors ({size_text(factor_bytes)} on each device), so that {gain}"
    )
    return remark + (f"; the others are made whole: {others}" if others else "")


def _bytes_of_factors(graph: fx.Graph) -> int:
    factors = {factor for node in calls_to(graph, *ops.FACTORED) for factor in node.all_input_nodes}
    return sum(num_bytes_now(factor.meta["val"]) for factor in factors)


@dataclass(frozen=True)
class _Split:
    """A region that returns factors instead of some gradients.

    Attributes:
        remaining, arguments: the former indices of the remaining results and arguments.
        results: the remaining results, then the factors.
        factored: the factored gradients, by former result index.
        outer_arguments: for each former placeholder, its argument in each call.
    """

    remaining: list[int]
    results: list[fx.Node]
    arguments: list[int]
    factored: Mapping[int, FactoredGradient]
    outer_arguments: Mapping[fx.Node, list[fx.Node]]


def _split(
    body: fx.Graph, outer_arguments: Mapping[fx.Node, list[fx.Node]], factored: Mapping[int, FactoredGradient]
) -> _Split:
    old: Any = body.output_node().args[0]
    remaining = [place for place in range(len(old)) if place not in factored]
    results = [old[place] for place in remaining]
    factors = [factor for gradient in factored.values() for factor in gradient.factors]
    results += dict.fromkeys(factor for factor in factors if factor not in outer_arguments and factor not in results)
    body.output_node().args = (tuple(results),)
    remove_unused(body)
    arguments = [
        i
        for i, argument in enumerate(outer_arguments)
        if argument.users or (results and is_symbolic(argument.meta["val"]))
    ]
    for i, placeholder in enumerate(outer_arguments):
        if i not in arguments:
            body.erase_node(placeholder)
    body.lint()
    return _Split(remaining, results, arguments, factored, outer_arguments)


def _rewire(
    node: fx.Node, number: int, split: _Split, names: Mapping[fx.Node, str], buckets: Mapping[str, int]
) -> None:
    parts: dict[int, fx.Node] = {part.args[1]: part for part in node.users}  # type: ignore[misc]
    last, graph = max([node, *parts.values()]), node.graph
    gradients: Any = node.kwargs["gradients"]
    places = {old: new for new, old in enumerate(split.remaining)}
    whole = {name: places[place] for name, place in gradients.items() if place in places}
    node.kwargs = {**node.kwargs, "gradients": whole}
    node.args = tuple(node.args[i] for i in split.arguments)
    node.meta["val"] = tuple(result.meta["val"] for result in split.results)
    outside = {inside: of_calls[number] for inside, of_calls in split.outer_arguments.items()}
    called: dict[fx.Node, str] = {}  # a region per call, because each call's factors belong to other variables
    for place, made in split.factored.items():
        for factor, name in zip(made.factors, made.form.factor_names, strict=True):
            called.setdefault(factor, f"{identifier(names[parts[place]])}_{name}")
    for new, result in enumerate(split.results):
        if new < len(split.remaining):
            part = parts[split.remaining[new]]
            part.args = (node, new)
        else:
            with graph.inserting_after(last):
                part = last = add_node(graph, "call_function", operator.getitem, (node, new), {}, called[result])
            part.meta.update(result.meta)
        outside[result] = part
    for place, made in split.factored.items():
        gradient, variable = parts[place], names[parts[place]]
        with graph.inserting_after(last):
            tags = {"bucket": buckets[variable], "variable": variable, **made.details}
            last = call(graph, made.form.operation, tuple(outside[factor] for factor in made.factors), tags)
        last.meta.update(gradient.meta)
        gradient.replace_all_uses_with(last)
        graph.erase_node(gradient)
    if not split.results:
        graph.erase_node(node)
