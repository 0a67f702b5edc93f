"""Ranges of torch's profiler for the calls of a device."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import fx
from torch.profiler import record_function

from mirrorc.ir.nodes import is_compute, is_region_call, region_of
from mirrorc.runtime.codegen.graph_function import GraphFunction
from mirrorc.torch_internals import is_profiled


def with_profiler_ranges(function: GraphFunction) -> Callable[[list[Any]], Any]:
    """The call of a device's function, with a profiler range around each inner call if a profiler is active."""
    if not is_profiled():
        return function.call
    return functools.partial(_paused_in_ranges if function.pauses else _in_ranges, function)


def _in_ranges(function: GraphFunction, values: list[Any]) -> Any:
    plain = _named(function)
    try:
        return function.call(values)
    finally:
        function.namespace.update(plain)


def _paused_in_ranges(function: GraphFunction, values: list[Any]) -> Iterator[Any]:
    plain = _named(function)
    try:
        return (yield from function.call(values))
    finally:
        function.namespace.update(plain)


def _named(function: GraphFunction) -> Mapping[str, Any]:
    plain = {name: function.namespace[name] for name, node in function.calls.items() if _is_named(node)}
    for name, bound in plain.items():
        function.namespace[name] = _ranged(range_name(function.calls[name], function.title), bound)
    return plain


def _is_named(node: fx.Node) -> bool:
    return is_region_call(node) or not (is_compute(node) or node.target.__module__ == "_operator")


def range_name(node: fx.Node, device: str) -> str:
    if is_region_call(node):
        return f"mirrorc::{region_of(node)} {device}"
    bucket = f" b{node.kwargs['bucket']}" if isinstance(node.kwargs.get("bucket"), int) else ""
    bucket += f" pack {node.kwargs['pack']}" if node.kwargs.get("pack") is not None else ""
    return f"mirrorc::{getattr(node.target, '__name__', node.target)}{bucket} {device}"


def _ranged(name: str, bound: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return bound(*args, **kwargs)

    return run
