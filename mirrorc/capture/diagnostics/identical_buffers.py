"""Finds buffers that all replicas write alike: vectors of spectral norms, and statistics that are made of sums over replicas."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx, nn

from mirrorc.errors import CaptureError
from mirrorc.ir import ops

_KIND = "_SpectralNorm"  # the class of what torch.nn.utils.parametrizations.spectral_norm registers
_VECTORS = ("_u", "_v")
_SAME_ON_ALL = (ops.sum_over_replicas, ops.rows_of_replicas)


def vectors_of_spectral_norms(roots: Iterable[nn.Module]) -> set[int]:
    """The ids of the buffers that the spectral norms of modules iterate in each forward in train mode."""
    norms = {own for root in roots for own in root.modules() if type(own).__name__ == _KIND}
    return {id(norm._buffers[name]) for norm in norms for name in _VECTORS if norm._buffers.get(name) is not None}


def are_alike(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Whether two runs have iterated a vector, of length one, to the same value, but for rounding."""
    return torch.allclose(one, other.to(one.device), rtol=0.0, atol=torch.finfo(one.dtype).eps ** 0.5, equal_nan=True)


def written_alike(graph: fx.Graph, writes: Mapping[str, fx.Node], vectors: Iterable[str]) -> dict[str, int]:
    """Those among the vectors that a captured graph writes by variables alone, or by values of all replicas, which have the same
    value on all replicas that run it; for each, a number made of how it is computed, which is the same in graphs that compute it
    alike.

    Args:
        graph: the graph.
        writes: what it writes, by the names of variables.
        vectors: the names of those that norms write alike.
    """
    alike = writes.keys() & set(vectors)
    while True:
        own: dict[fx.Node, bool] = {}  # whether a value is made of variables that are the same everywhere
        for node in graph.nodes:
            if node.target is ops.read:
                name = str(node.kwargs["variable"])
                own[node] = name in alike or name not in writes
            elif node.target in _SAME_ON_ALL:
                own[node] = True
            else:
                own[node] = node.op == "call_function" and all(own[given] for given in node.all_input_nodes)
        found = {name for name in alike if own[writes[name]]}
        if found == alike:
            made = _expressions(node for node in graph.nodes if own[node])
            return {name: made[writes[name]] for name in sorted(alike)}
        alike = found


def iterated_alike(name: str, alike: Sequence[Mapping[str, int]]) -> bool:
    """Whether all captured graphs, each with what `written_alike` gives, write a buffer to one value.

    Raises:
        CaptureError: each of them writes it by variables alone, but in another way.
    """
    ways = {own.get(name) for own in alike}
    if len(ways) > 1 and None not in ways:
        raise CaptureError(
            f"{name!r}, a vector of a spectral norm, is iterated another number of times for shards of other sizes, so replicas "
            "would have different ones. Remedy: call the module as often whatever the size of the batch is, with all examples "
            "at once."
        )
    return None not in ways


def _expressions(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    """For each node a number made of its operator and of all that it is computed of."""
    made: dict[fx.Node, int] = {}
    for node in nodes:
        if node.target in _SAME_ON_ALL:
            made[node] = hash((str(node.target), node.kwargs["number"]))
            continue
        given = fx.node.map_arg((node.args, node.kwargs), lambda source: f"value {made[source]}")
        made[node] = hash((node.op, str(node.target), repr(given)))
    return made


def tensors_at(module: nn.Module, outside: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers of a traced module by each of their paths, and those of others by theirs."""
    return {**dict(module.named_buffers(remove_duplicate=False)), **outside}
