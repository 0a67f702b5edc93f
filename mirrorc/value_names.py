"""Names for the values of a captured graph: after the user's modules, not after the tracer's numbering."""

from __future__ import annotations

import operator
from collections import Counter

import torch
from torch import fx

from mirrorc.inputs import identifier
from mirrorc.source_lines import module_of


def with_stable_names(graph: fx.Graph) -> fx.Graph:
    """A copy whose values are called by module and operator, such as ``encoder_fc1_addmm``, in backward ``d_encoder_fc1_mm``.

    Values of one name are counted, per module: ``encoder_fc1_mm_2`` is the second. So names are the same in every
    process, and changing one module leaves the names in all others alone.
    """
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    counts: Counter[str] = Counter()
    taken = {node.name for node in graph.nodes if node.op == "placeholder"}
    in_backward: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "output":
            continue
        if node.target == "loss_weight" or any(source in in_backward for source in node.all_input_nodes):
            in_backward.add(node)
        name = node.name
        if node.op == "call_function":
            base = _base(node, node in in_backward)
            name = _numbered(base, counts)
            while name in taken:
                name = _numbered(base, counts)
        taken.add(name)
        args, kwargs = (fx.node.map_arg(part, values.__getitem__) for part in (node.args, node.kwargs))
        values[node] = copy.create_node(node.op, node.target, args, kwargs, name=name)
        values[node].meta = node.meta
    copy.output(fx.node.map_arg(graph.output_node().args[0], values.__getitem__))
    return copy


def _base(node: fx.Node, is_backward: bool) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        operation = node.target._schema.name.split("::")[-1].strip("_")
    elif node.target is operator.getitem:
        operation = f"part{node.args[1]}"
    elif "variable" in node.kwargs:
        return identifier(str(node.kwargs["variable"]))
    else:
        operation = str(getattr(node.target, "__name__", node.target))
    parts = [*(["d"] if is_backward else []), *([module_of(node)] if module_of(node) else []), operation]
    return identifier(".".join(parts))


def _numbered(base: str, counts: Counter[str]) -> str:
    counts[base] += 1
    return base if counts[base] == 1 else f"{base}_{counts[base]}"
