"""Graphs and fake tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn


def lazy_graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A graph module that writes its Python code when somebody asks for it or calls it: mirrorc seldom does."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=class_name)


def add_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    type_expr: Any = None,
) -> fx.Node:
    """`Graph.create_node`, in a third of the time: without its walk through all arguments, in search of symbolic sizes.

    For passes that copy graphs of many nodes, in which sizes are numbers.
    """
    name = graph._graph_namespace.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs, type_expr)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


def traced_on_fake_tensors(
    function: Callable[..., Any], values: Sequence[Any], decompositions: Mapping[Any, Callable[..., Any]] | None = None
) -> fx.Graph:
    """The operators that a function calls, as a graph with a placeholder for each of its arguments.

    Args:
        function: of tensors.
        values: fake tensors like its arguments, of one mode, in which the graph's values are, too.
        decompositions: of operators that are not to be in the graph.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with values[0].fake_mode:
        return make_fx(function, dict(decompositions or {}))(*values).graph


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keeps torch from logging a traceback of what an operator raises on fake tensors, for who says it anyway."""
    from torch._subclasses.fake_tensor import log

    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
