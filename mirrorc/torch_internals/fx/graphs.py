"""Makes graphs and fake tensors faster or more quietly than torch's public functions."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

__all__ = [
    "FakeTensor",
    "FakeTensorMode",
    "add_node",
    "lazy_graph_module",
    "lazy_graph_modules",
    "quiet_fake_tensors",
    "traced_on_fake_tensors",
]


def lazy_graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A graph module that writes its Python code only when it is called or its code is read, which mirrorc seldom does."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=class_name)


@contextlib.contextmanager
def lazy_graph_modules() -> Iterator[None]:
    """A block in which torch's tracers make graph modules of this kind; they write the code of three or more for each trace."""
    from torch.fx._lazy_graph_module import _use_lazy_graph_module

    with _use_lazy_graph_module(True):
        yield


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
    """Does the same as `Graph.create_node` in a third of the time, because it does not search the arguments for symbolic sizes.

    It is for passes that copy large graphs whose sizes are all numbers. If ``is_valid``, the name is that of a node of another
    graph, and only needs to be made unique.
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
    function: Callable[..., Any], values: Sequence[Any], decompositions: Mapping[Any, Callable[..., Any]] | None = None
) -> fx.Graph:
    """Traces the operators that a function calls into a graph, which has a placeholder for each argument.

    Args:
        function: a function of tensors.
        values: fake tensors for its arguments, all of one fake mode, which the graph's values share.
        decompositions: decompositions of the operators that must not be in the graph.
    """
    from torch.fx.experimental.proxy_tensor import make_fx

    with values[0].fake_mode:
        return make_fx(function, dict(decompositions or {}))(*values).graph


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keeps torch from logging tracebacks of operators that fail on fake tensors; the caller reports the error itself."""
    from torch._subclasses.fake_tensor import log

    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was
