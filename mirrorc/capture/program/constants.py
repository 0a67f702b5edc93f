"""Names the constants of the graphs of all shards."""

from __future__ import annotations

from collections.abc import Sequence, Set
from dataclasses import replace

import torch

from mirrorc.capture.program.captured_graph import CapturedGraph
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to


def with_constants_apart(captured: Sequence[CapturedGraph], taken: Set[str]) -> list[CapturedGraph]:
    """Renames different constants of one name, to names outside of ``taken``.

    Two equal tensors of the user differ, too: one of them may be written later.
    """
    known: dict[str, torch.Tensor] = {}
    named = []
    for shard, graph in enumerate(captured):
        names = {}
        for name, value in graph.constants.items():
            is_same = known.get(name, value) is value
            names[name] = name if is_same else _unique_name(f"{name}_shard{shard}", {*taken, *known, *graph.constants})
            known.setdefault(names[name], value)
        for node in calls_to(graph.graph, ops.read):
            variable = str(node.kwargs["variable"])
            node.kwargs = {**node.kwargs, "variable": names.get(variable, variable)}
        named.append(replace(graph, constants={names[name]: value for name, value in graph.constants.items()}))
    return named


def _unique_name(name: str, taken: Set[str]) -> str:
    while name in taken:
        name += "_"
    return name
