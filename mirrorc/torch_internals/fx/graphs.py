"""Functions on graphs, faster or quieter than torch's public ones."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from unittest.mock import patch

from torch import fx, nn

Decompositions = Mapping[Any, Callable[..., Any]]
"""By operator, a function that computes the same by other operators."""


def lazy_graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A graph module that generates its code at its first call or when its code is read."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=class_name)


def lazy_graph_modules() -> contextlib.AbstractContextManager[Any]:
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    return _use_lazy_graph_module(True)


def add_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    type_expr: Any = None,
    *,
    is_valid: bool = False,
) -> fx.Node:
    """Adds a node as `Graph.create_node` does, in a third of the time. All sizes must be numbers.

    If ``is_valid``, the name comes from another graph, and needs only to be made unique.
    """
    names = graph._graph_namespace
    if is_valid and name not in names._used_names and not name[-1].isdigit():
        names._used_names.add(name)
        names._base_count.setdefault(name, 0)
    else:
        name = names.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs, type_expr)
    names.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def traced_on_fake_tensors(
    function: Callable[..., Any], values: Sequence[Any], decompositions: Decompositions | None = None
) -> fx.Graph:
    """All ``values`` must share one fake mode; values in the graph get the same mode."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with values[0].fake_mode:
        return make_fx(function, dict(decompositions or {}))(*values).graph


def quiet_fake_tensors() -> contextlib.AbstractContextManager[Any]:
    from torch._subclasses.fake_tensor import log

    return patch.object(log, "disabled", True)
