"""Finds buffers to which all replicas write the same value, such as vectors of spectral norms."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import fx, nn

from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.messages.problem import problem

_KIND = "_SpectralNorm"  # the class registered by torch.nn.utils.parametrizations.spectral_norm
_VECTORS = ("_u", "_v")
_SAME_ON_ALL = (ops.sum_over_replicas, ops.rows_of_replicas)


def vectors_of_spectral_norms(roots: Iterable[nn.Module]) -> set[int]:
    norms = {module for root in roots for module in root.modules() if type(module).__name__ == _KIND}
    return {id(norm._buffers[name]) for norm in norms for name in _VECTORS if norm._buffers.get(name) is not None}


def are_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    allowed = torch.finfo(first.dtype).eps ** 0.5 if first.is_floating_point() else 0.0
    return torch.allclose(first, second.to(first.device), rtol=0.0, atol=allowed, equal_nan=True)


def written_alike(graph: fx.Graph, writes: Mapping[str, fx.Node], vectors: Iterable[str]) -> dict[str, int]:
    """The ``vectors`` computed only from values that are equal on all replicas, each with a hash of its computation."""
    alike = writes.keys() & set(vectors)
    while True:
        is_same: dict[fx.Node, bool] = {}  # whether a value is equal on all replicas
        for node in graph.nodes:
            if node.target is ops.read:
                name = str(node.kwargs["variable"])
                is_same[node] = name in alike or name not in writes
            elif node.target in _SAME_ON_ALL:
                is_same[node] = True
            else:
                is_same[node] = node.op == "call_function" and all(is_same[source] for source in node.all_input_nodes)
        remaining = {name for name in alike if is_same[writes[name]]}
        if remaining == alike:
            made = _expressions(node for node in graph.nodes if is_same[node])
            return {name: made[writes[name]] for name in sorted(alike)}
        alike = remaining


def iterated_alike(name: str, alike: Sequence[Mapping[str, int]]) -> bool:
    """True if all captured graphs write the same value to a buffer.

    Raises:
        CaptureError: the graphs compute the value in different ways.
    """
    ways = {hashes.get(name) for hashes in alike}
    if len(ways) > 1 and None not in ways:
        raise problem(
            CaptureError,
            f"MC2505: the spectral norm {name!r} is iterated another number of times for shards of other sizes",
            "replicas would have different vectors",
            "call its module as often whatever the size of the batch is, with all examples at once",
        )
    return None not in ways


def _expressions(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    made: dict[fx.Node, int] = {}
    for node in nodes:
        if node.target in _SAME_ON_ALL:
            made[node] = hash((str(node.target), node.kwargs["number"]))
            continue
        operands = fx.node.map_arg((node.args, node.kwargs), lambda source: f"value {made[source]}")
        made[node] = hash((node.op, str(node.target), repr(operands)))
    return made
