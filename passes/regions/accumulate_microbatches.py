"""Runs shards in microbatches."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import fx

from mirrorc.analysis.buckets.slots_of_values import gradient_of, slot_of
from mirrorc.custom_ops import out_products
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import call, copied, copy_node
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Argument, ArgumentKind, Program, Region, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.ir.variables import Aggregation
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted, listed
from mirrorc.torch_internals import lazy_graph_module

aten = torch.ops.aten


@dataclass(frozen=True)
class AccumulateMicrobatches:
    """Runs the microbatches of a shard in turn, so that memory holds the activations of only one.

    The first microbatch writes gradients into slots. Later microbatches call variants of the regions that add to the
    slots::

        fwd_0 = call_region(x, w, region=fwd_0)           x_0   = microbatch(x, index=0, sizes=(4, 4))
        loss  = fwd_0[0]                                  fwd_0 = call_region(x_0, w, region=fwd_0)
        slot  = slot(bucket=0, variable=w)                l_0   = fwd_0[0]
        bwd_0 = call_region(weight, fwd_0[1], slot,  ->   slot  = slot(bucket=0, variable=w)
                            region=bwd_0)                 half  = aten.mul(weight, 0.5)
        g     = bwd_0[0]                                  bwd_0 = call_region(half, fwd_0[1], slot, region=bwd_0)
        output {loss: loss, gradients: {w: g}}            g_0   = bwd_0[0]
                                                          x_1   = microbatch(x, index=1, sizes=(4, 4))
                                                          ...
                                                          bwd_0_adding = call_region(half, ..., g_0, region=bwd_0_adding)
                                                          g_1   = bwd_0_adding[0]           # in the memory of g_0
                                                          output {loss: 0.5 l_0 + 0.5 l_1, gradients: {w: g_1}}

        region bwd_0(dy, x, w_slot):                      region bwd_0_adding(dy, x, w_slot):
            mirrorc.mm_into(w_slot, dy, x)           ->       mirrorc.addmm_into(w_slot, dy, x)
            return [w_slot]                                   return [w_slot]

    A mean loss is weighted by a microbatch's fraction of the shard's examples. Each microbatch has its own random
    stream, and reads buffers as the previous one wrote them. A factored gradient has the factors of all microbatches.
    Reductions overlap with the last microbatch's backward.

    Needs: outlined graphs of microbatches.
    Guarantees: loss and gradients are summed in the order of microbatches; outputs are joined in the order of examples.
    """

    name: str = field(default="accumulate-microbatches", init=False)
    input_stage: Stage = field(default=Stage.OUTLINED, init=False)
    output_stage: Stage = field(default=Stage.OUTLINED, init=False)
    trains_only: ClassVar = True

    def run(self, program: Program) -> Program:
        if not program.shard_of_microbatch:
            return program.with_remarks("no shard is run in microbatches", is_kept=False)
        pairs = list(zip(program.shard_of_microbatch, program.microbatches, strict=True))
        kinds = list(dict.fromkeys(pair for pair in pairs if pair[1]))
        regions = _Regions(program)
        graphs = tuple(_ShardGraph(program, regions, *kind).graph() for kind in kinds)
        repeated = program.evolve(
            shard_graphs=graphs,
            shard_of_replica=tuple(kinds.index(pair) if pair[1] else None for pair in pairs),
            shard_of_microbatch=(),
            regions=regions.called_by(graphs),
        )
        return repeated.with_remarks(_remark(program, regions), is_kept=False)


def _remark(program: Program, regions: _Regions) -> str:
    numbers = sorted({len(sizes) for sizes in program.microbatches if sizes})
    remark = f"each shard is run in {listed([str(number) for number in numbers])} microbatches, one after the other"
    return remark + f"; {counted(len(regions.adding), 'region')} made that add to the gradients of the one before"


class _Regions:
    def __init__(self, program: Program) -> None:
        self.adding: dict[tuple[str, tuple[int, ...]], Region] = {}
        self._regions = program.regions

    def called_by(self, graphs: Sequence[fx.Graph]) -> dict[str, Region]:
        called = {str(node.kwargs["region"]) for graph in graphs for node in calls_to(graph, ops.call_region)}
        regions = {**self._regions, **{region.name: region for region in self.adding.values()}}
        return {name: region for name, region in regions.items() if name in called}

    def adding_variant(self, name: str, places: tuple[int, ...]) -> str:
        if (name, places) not in self.adding:
            stem, _, shard = name.partition("_shard")
            names = (
                f"{stem}_adding{i or ''}{f'_shard{shard}' if shard else ''}"
                for i in itertools.chain((0,), itertools.count(2))
            )
            taken = {*self._regions, *(region.name for region in self.adding.values())}
            unused = next(each for each in names if each not in taken)
            self.adding[name, places] = _adding(self._regions[name], unused, places)
        return self.adding[name, places].name


def _adding(region: Region, name: str, places: Sequence[int]) -> Region:
    graph = copied(region.graph_module.graph)
    arguments = graph.find_nodes(op="placeholder")
    slots = {arguments[place] for place in places}
    for node in list(graph.nodes):
        if node.target is out_products.mm_into and node.args[0] in slots:
            node.target = out_products.addmm_into
        elif node.target is aten.copy_.default and node.args[0] in slots:
            with graph.inserting_before(node):
                added = graph.call_function(aten.add.Tensor, node.args)
            added.meta = dict(node.meta)
            node.args = (node.args[0], added)
    graph.lint()
    return replace(region, name=name, graph_module=lazy_graph_module({}, graph, name))


class _ShardGraph:
    """A shard's graph, of the graphs of its microbatches ``shards``, which have ``sizes`` examples."""

    def __init__(self, program: Program, regions: _Regions, shards: tuple[int, ...], sizes: tuple[int, ...]) -> None:
        self._program, self._regions, self._sizes = program, regions, sizes
        self._sources = [program.shard_graphs[shard] for shard in shards]
        self._graph = fx.Graph()
        self._shared: dict[Any, fx.Node] = {}  # what all microbatches take: arguments, variables, weights
        self._outputs: list[dict[str, Any]] = []
        self._gathered: dict[str, list[fx.Node]] = {}
        self._factors: dict[str, list[fx.Node]] = {}  # of the microbatches so far, by variable

    def graph(self) -> fx.Graph:
        arguments = {argument.name: argument for argument in self._program.arguments}
        for node in self._sources[0].find_nodes(op="placeholder"):
            self._shared[node.target] = self._argument(node, arguments[str(node.target)])
        how, loss = "averaged" if self._program.loss_reduction == "mean" else "summed", None
        for index, source in enumerate(self._sources):
            self._outputs.append(self._copy(index, source, arguments))
            loss = self._added(loss, self._outputs[-1]["loss"], index, how)
        self._graph.output({**self._outputs[-1], "loss": loss})
        return self._graph

    def _argument(self, node: fx.Node, argument: Argument) -> fx.Node:
        argument_node = copy_node(self._graph, node, {})
        value = node.meta.get("val")
        if argument.has_examples and isinstance(value, torch.Tensor):
            shape = (sum(self._sizes), *value.shape[1:])
            with value.fake_mode:  # type: ignore[attr-defined]
                argument_node.meta["val"] = torch.empty_strided(
                    shape, value.stride(), dtype=value.dtype, device=value.device
                )
        return argument_node

    def _copy(self, index: int, source: fx.Graph, arguments: Mapping[str, Argument]) -> dict[str, Any]:
        values: dict[fx.Node, fx.Node] = {}
        before = self._outputs[-1] if self._outputs else None
        for node in source.nodes:
            if node.op == "placeholder":
                values[node] = self._microbatch_argument(index, arguments[str(node.target)])
            elif node.target is ops.read:
                values[node] = self._read(node, before)
            elif node.target is ops.slot:
                values[node] = self._slot(node, before)
            elif node.target is ops.call_region:
                values[node] = self._call(index, node, values)
            elif node.target in ops.FACTORED:
                values[node] = self._factored(index, node, values)
            elif node.target is ops.gather:
                self._gather(node, values)
            elif node.op != "output":
                values[node] = copy_node(self._graph, node, values, name=_name(node.name, index))
        output: Any = fx.node.map_arg(source.output_node().args[0], values.__getitem__)
        gradients = {name: self._accumulated(name, gradient, before) for name, gradient in output["gradients"].items()}
        return {**output, "gradients": gradients}

    def _microbatch_argument(self, index: int, argument: Argument) -> fx.Node:
        whole = self._shared[argument.name]
        is_used = "val" in whole.meta
        if len(self._sizes) == 1 or not is_used:
            return whole
        if argument.has_examples:
            return self._insert(ops.microbatch, (whole,), {"index": index, "sizes": self._sizes})
        if argument.kind is ArgumentKind.SEED:
            return self._insert(ops.microbatch_seed, (whole,), {"index": index})
        if argument.kind is ArgumentKind.LOSS_WEIGHT and self._program.loss_reduction == "mean":
            share = self._sizes[index] / sum(self._sizes)
            if ("weight", share) not in self._shared:
                self._shared["weight", share] = self._insert(aten.mul.Tensor, (whole, share), {})
            return self._shared["weight", share]
        return whole

    def _slot(self, node: fx.Node, before: Mapping[str, Any] | None) -> fx.Node:
        earlier: fx.Node | None = before["gradients"][node.kwargs["variable"]] if before is not None else None
        return earlier if earlier is not None and slot_of(earlier) is not None else self._shared_copy(node)

    def _read(self, node: fx.Node, before: Mapping[str, Any] | None) -> fx.Node:
        """A read, or the previous microbatch's write; always a read for `Aggregation.SAME`."""
        name = str(node.kwargs["variable"])
        written = before["writes"].get(name) if before is not None else None
        is_same = written is not None and self._program.variables[name].aggregation is Aggregation.SAME
        return written if written is not None and not is_same else self._shared_copy(node)

    def _shared_copy(self, node: fx.Node) -> fx.Node:
        key = (node.target, node.kwargs["variable"])
        if key not in self._shared:
            self._shared[key] = copy_node(self._graph, node, {})
        return self._shared[key]

    def _call(self, index: int, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> fx.Node:
        region_call = copy_node(self._graph, node, values, name=_name(node.name, index))
        adds = tuple(
            place
            for place, operand in enumerate(region_call.args)
            if gradient_of(operand) and slot_of(operand) is not None
        )
        if adds:
            region_call.kwargs = {
                **region_call.kwargs,
                "region": self._regions.adding_variant(str(node.kwargs["region"]), adds),
            }
        return region_call

    def _factored(self, index: int, node: fx.Node, values: Mapping[fx.Node, fx.Node]) -> Any:
        """Collects factors. The last microbatch returns the gradient with all of them, others None."""
        factors = self._factors.setdefault(str(node.kwargs["variable"]), [])
        factors += [values[factor] for factor in node.args]  # type: ignore[index]
        if index + 1 < len(self._sizes):
            return None
        gradient = copy_node(self._graph, node, values)
        gradient.args = tuple(factors)
        return gradient

    def _accumulated(self, name: str, gradient: fx.Node, before: Mapping[str, Any] | None) -> fx.Node:
        earlier = before["gradients"][name] if before is not None else None
        if earlier is None or earlier in _operands(gradient):
            return gradient
        return self._insert(aten.add.Tensor, (earlier, gradient), {})

    def _gather(self, node: fx.Node, values: dict[fx.Node, fx.Node]) -> None:
        parts = self._gathered.setdefault(str(node.kwargs["output"]), [])
        parts.append(values[node.all_input_nodes[0]])
        if len(parts) == len(self._sizes):
            joined = self._joined(parts, str(node.kwargs["how"]))
            values[node] = copy_node(self._graph, node, {node.all_input_nodes[0]: joined})

    def _joined(self, parts: Sequence[fx.Node], how: str) -> fx.Node:
        if len(parts) == 1:
            return parts[0]
        if how == "concatenated":
            return self._insert(aten.cat.default, (list(parts),), {})
        if how not in ("averaged", "summed"):
            raise problem(
                PassError,
                f"MC4003: microbatches cannot combine an output that is gathered {how!r}",
                "each microbatch has its own part of it",
                "leave microbatches= out",
            )
        total = None
        for index, part in enumerate(parts):
            total = self._added(total, part, index, how)
        assert total is not None, "there is a part"
        return total

    def _added(self, total: fx.Node | None, part: fx.Node, index: int, how: str) -> fx.Node:
        if how == "averaged" and len(self._sizes) > 1:
            part = self._insert(aten.mul.Tensor, (part, self._sizes[index] / sum(self._sizes)), {})
        return part if total is None else self._insert(aten.add.Tensor, (total, part), {})

    def _insert(self, target: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> fx.Node:
        node = call(self._graph, target, args, kwargs)
        set_type(self._program, node)
        return node


def _operands(gradient: fx.Node) -> tuple[Any, ...]:
    source = gradient.args[0] if gradient_of(gradient) is not None else None
    return source.args if isinstance(source, fx.Node) else ()


def _name(name: str, index: int) -> str:
    return name if index == 0 else f"{name}_m{index}"
