"""Finds the vectors of spectral norms, which forward iterates by the weights alone, so that all replicas write the same."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx, nn

from mirrorc.ir import ops

_KIND = "_SpectralNorm"  # the class of what torch.nn.utils.parametrizations.spectral_norm registers
_VECTORS = ("_u", "_v")


def vectors_of_spectral_norms(roots: Iterable[nn.Module]) -> set[int]:
    """The ids of the buffers that the spectral norms of modules iterate in each forward in train mode."""
    norms = {own for root in roots for own in root.modules() if type(own).__name__ == _KIND}
    return {id(norm._buffers[name]) for norm in norms for name in _VECTORS if norm._buffers.get(name) is not None}


def written_alike(graph: fx.Graph, writes: Mapping[str, fx.Node], vectors: Iterable[str]) -> frozenset[str]:
    """Those among the vectors that a captured graph writes by variables alone, which have the same value on all replicas.

    Args:
        graph: the graph.
        writes: what it writes, by the names of variables.
        vectors: the names of those that are vectors of spectral norms.
    """
    alike = writes.keys() & set(vectors)
    while True:
        own: dict[fx.Node, bool] = {}  # whether a value is made of variables that are the same everywhere
        for node in graph.nodes:
            if node.target is ops.read:
                name = str(node.kwargs["variable"])
                own[node] = name in alike or name not in writes
            else:
                own[node] = node.op == "call_function" and all(own[given] for given in node.all_input_nodes)
        found = {name for name in alike if own[writes[name]]}
        if found == alike:
            return frozenset(alike)
        alike = found


def tensors_at(module: nn.Module, outside: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The buffers of a traced module by each of their paths, and those of others by theirs."""
    return {**dict(module.named_buffers(remove_duplicate=False)), **outside}
