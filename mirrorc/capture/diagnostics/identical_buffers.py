"""Finds buffers to which all replicas write the same value, such as counters and vectors of spectral norms."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.variables import Aggregation
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


class Computation(NamedTuple):
    """The computation of a buffer with one value on all replicas.

    Attributes:
        expression: a hash.
        is_of_norm: the buffer is a vector of a spectral norm, which a step iterates once.
        is_counter: it is computed only from variables. Each microbatch then continues from the previous one.
    """

    expression: int
    is_of_norm: bool = False
    is_counter: bool = False


def written_alike(
    graph: fx.Graph,
    writes: Mapping[str, fx.Node],
    vectors: Collection[str],
    statistics: Collection[str],
    left_out: Collection[str],
    arguments: Collection[Any],
) -> dict[str, Computation]:
    """Buffers computed only from values that are equal on all replicas, and their computations.

    Args:
        vectors, statistics: buffers of spectral norms and of synchronized norms.
        left_out: buffers that belong to others with different values, such as a batch norm's counter.
        arguments: placeholders with one value for all replicas, such as numbers.
    """
    alike = writes.keys() - set(left_out)
    reduced = {*vectors, *statistics, *_exchanged(graph, writes)}
    while True:
        is_same: dict[fx.Node, bool] = {}  # whether a value is equal on all replicas
        for node in graph.nodes:
            if node.target is ops.read:
                name = str(node.kwargs["variable"])
                is_same[node] = name in alike or name not in writes
            elif node.op == "placeholder":
                is_same[node] = node.target in arguments
            elif node.target in _SAME_ON_ALL:
                is_same[node] = True
            else:
                is_same[node] = node.op == "call_function" and all(is_same[source] for source in node.all_input_nodes)
        remaining = {name for name in alike if is_same[writes[name]]}
        if remaining == alike:
            made = _expressions(node for node in graph.nodes if is_same[node])
            return {
                name: Computation(made[writes[name]], name in vectors, name not in reduced) for name in sorted(alike)
            }
        alike = remaining


def _exchanged(graph: fx.Graph, writes: Mapping[str, fx.Node]) -> set[str]:
    after: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in _SAME_ON_ALL or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    return {name for name, node in writes.items() if node in after}


def aggregation_alike(name: str, alike: Sequence[Mapping[str, Computation]]) -> Aggregation | None:
    """The aggregation of a buffer to which all captured graphs write the same value; None if they may differ.

    Raises:
        CaptureError: the graphs differ in the number of iterations of a spectral norm.
    """
    ways = {computations.get(name) for computations in alike}
    if len(ways) > 1 and all(way is not None and way.is_of_norm for way in ways):
        raise problem(
            CaptureError,
            f"MC2505: the spectral norm {name!r} is iterated another number of times for shards of other sizes",
            "replicas would have different vectors",
            "call its module once in each forward, with all examples at once",
        )
    first = alike[0].get(name)
    if first is None or len(ways) > 1:
        return None
    return Aggregation.COUNTER if first.is_counter else Aggregation.SAME


def _expressions(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    made: dict[fx.Node, int] = {}
    for node in nodes:
        if node.target in _SAME_ON_ALL:
            made[node] = hash((str(node.target), node.kwargs["number"]))
            continue
        operands = fx.node.map_arg((node.args, node.kwargs), lambda source: f"value {made[source]}")
        made[node] = hash((node.op, str(node.target), repr(operands)))
    return made
