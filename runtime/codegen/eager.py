"""The backend that calls operators one by one."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.layouts import BY_POSITION, may_read_memory_in_order, reads_strides
from mirrorc.custom_ops import out_products
from mirrorc.ir.nodes import is_compute
from mirrorc.ir.rearrangements import VIEWS_IN_ORDER
from mirrorc.runtime.codegen.graph_function import generate
from mirrorc.runtime.codegen.regions import Backend, RegionFunction
from mirrorc.torch_internals import SizesGivenUp, has_symbols, is_dense, schema_of, sizes_key, with_sizes_now


class EagerBackend(Backend):
    """Calls the captured operators. Some return other strides than their fake versions. Views then copy if necessary,
    operators that may read memory in order get the inferred strides, and ``as_strided`` raises an error.
    """

    name = "eager"

    def compile(self, graph_module: fx.GraphModule, name: str, num_threads: int) -> RegionFunction:
        return generate(name, graph_module.graph, _function_of).call


_NEED_THEIR_LAYOUT = (torch.ops.aten.view_as_complex.default,)  # it fails where real and imaginary parts are apart
# any layout does, as for aten.mm
_READ_BY_INDEX = (out_products.mm_into, out_products.linear_into, out_products.addmm_into, out_products.add_rows_into)


def _function_of(node: fx.Node) -> Callable[..., Any]:
    target: Any = node.target
    if target in VIEWS_IN_ORDER:
        return torch.ops.aten.reshape.default
    if target in BY_POSITION:
        return _by_position(node)
    if not is_compute(node) or not _needs_layouts(target):
        return target
    schema = schema_of(target).arguments
    written = {argument.name for argument in schema if argument.alias_info is not None and argument.alias_info.is_write}
    positional = [None if a.name in written else _layout(value) for a, value in zip(schema, node.args, strict=False)]
    named = {name: None if name in written else _layout(operand) for name, operand in node.kwargs.items()}
    if not any(positional) and not any(named.values()):
        return target

    def on_inferred_layouts(*args: Any, **kwargs: Any) -> Any:
        return target(
            *[_laid(value, layout) for value, layout in zip(args, positional, strict=True)],
            **{name: _laid(value, named[name]) for name, value in kwargs.items()},
        )

    return on_inferred_layouts


def _by_position(node: fx.Node) -> Callable[..., Any]:
    """Offsets count from the operand's first element, not from the start of its storage."""
    target: Any = node.target
    arguments = [argument.name for argument in schema_of(target).arguments]
    place = arguments.index("storage_offset") if "storage_offset" in arguments else len(arguments)
    inferred = _layout(node.args[0])
    if isinstance(inferred, DimOrder):
        raise SizesGivenUp(f"{target} addresses elements by their position in memory")

    def by_position(value: torch.Tensor, *args: Any) -> Any:
        if inferred is not None and value.stride() != inferred:
            raise RuntimeError(
                f"{target} addresses elements by their position in memory, and its argument has the strides {value.stride()} "
                f"where tracing found {inferred}: give it tensor.clone(memory_format=torch.contiguous_format)"
            )
        arguments = [value, *args]
        if len(arguments) > place and arguments[place] is not None:
            arguments[place] += value.storage_offset()
        return target(*arguments)

    return by_position


def _needs_layouts(target: Any) -> bool:
    in_order = may_read_memory_in_order(target) and target not in _READ_BY_INDEX
    return in_order or reads_strides(target) or target in _NEED_THEIR_LAYOUT


def _layout(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        value = argument.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dim() == 0:
            return None
        return DimOrder.of(value) if has_symbols(value) else value.stride()
    if isinstance(argument, list | tuple):
        layouts = [_layout(item) for item in argument]
        return layouts if any(layouts) else None
    return None


@dataclass(frozen=True)
class DimOrder:
    """The memory order of a dense tensor with symbolic sizes: its dimensions from the outermost."""

    dims: tuple[int, ...]

    @classmethod
    def of(cls, value: torch.Tensor) -> DimOrder:
        """Raises `SizesGivenUp` for a tensor with gaps or overlaps, because the order does not determine its strides."""
        now = with_sizes_now(value)
        strides = now.stride()
        order = cls(tuple(sorted(range(now.dim()), key=lambda dim: (-strides[dim], dim))))
        if sizes_key(value.stride()) != sizes_key(order.strides(value.shape)):
            raise SizesGivenUp("an operator reads memory in order, of a value with gaps or overlaps")
        return order

    def strides(self, shape: Sequence[Any]) -> tuple[Any, ...]:
        strides: list[Any] = [1] * len(shape)
        step: Any = 1
        for dim in reversed(self.dims):
            strides[dim] = step
            step = step * shape[dim]
        return tuple(strides)


def _laid(value: Any, layout: Any) -> Any:
    if layout is None:
        return value
    if isinstance(layout, list):
        return [_laid(item, strides) for item, strides in zip(value, layout, strict=True)]
    if isinstance(layout, DimOrder):
        layout = layout.strides(value.shape)
    if value.stride() == layout:
        return value
    copy = torch.empty_strided(value.shape, layout, dtype=value.dtype, device=value.device)
    return copy.copy_(value) if is_dense(copy) else value.contiguous()
