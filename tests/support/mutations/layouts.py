"""Mutations of how values lie in memory: of operators that only lay them out, and of what reads memory in order."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.layouts import is_layout_only, may_read_memory_in_order
from mirrorc.ir.program import Program
from mutations.places import bodies, is_value, next_like, with_argument
from mutations.table import Edit, breaks, keeps

aten = torch.ops.aten
_BY_MEMORY = [0, 2, 3, 1]  # a permutation: dimensions of a value in channels-last format in the order of memory


def _layouts(program: Program) -> Iterator[fx.Node]:
    for graph in bodies(program):
        yield from (n for n in graph.nodes if is_layout_only(n) and n.meta["val"].is_floating_point())


def _put(node: fx.Node, target: Callable[..., Any], *args: Any, **kwargs: Any) -> fx.Node:
    with node.graph.inserting_before(node):
        made = node.graph.call_function(target, args, kwargs)
    given, named = fx.node.map_arg((args, kwargs), lambda n: n.meta["val"])
    with node.meta["val"].fake_mode:
        made.meta["val"] = target(*given, **named)
    return made


def _replace(node: fx.Node, other: fx.Node) -> None:
    node.replace_all_uses_with(other)
    node.graph.erase_node(node)


@breaks(in_regions=True, is_judged=True)
def lay_out_another_value(program: Program) -> Iterator[Edit]:
    """An operator that lays a value out is given another of the same type, such as another convolution's weight."""
    for node in _layouts(program):
        values = [value for value in node.graph.nodes if is_value(value) and value < node]
        other = next_like(node.args[0], values)  # type: ignore[arg-type]
        if other is not None:
            yield partial(with_argument, node, 0, other)


@breaks(in_regions=True)
def round_while_laying_out(program: Program) -> Iterator[Edit]:
    """A copy in another memory format casts to 16 bits, and another copy casts back."""

    def edit(node: fx.Node) -> None:
        memory_format, dtype = node.kwargs["memory_format"], node.meta["val"].dtype
        rounded = _put(node, aten._to_copy.default, node.args[0], dtype=torch.bfloat16, memory_format=memory_format)
        _replace(node, _put(node, aten._to_copy.default, rounded, dtype=dtype, memory_format=memory_format))

    for node in _layouts(program):
        yield partial(edit, node)


@breaks(in_regions=True)
def leave_out_a_copy_for_what_reads_memory_in_order(program: Program) -> Iterator[Edit]:
    """An operator that torch does not define is given a value as it lies, not the copy that lies as before."""
    for node in _layouts(program):
        if any(may_read_memory_in_order(user.target) for user in node.users):
            yield partial(_replace, node, node.args[0])  # type: ignore[arg-type]


@breaks(in_regions=True)
def flatten_in_the_order_of_memory(program: Program) -> Iterator[Edit]:
    """A reshape that copies, of a value in channels-last format, is a view of the elements as they lie."""

    def edit(node: fx.Node) -> None:
        _replace(
            node,
            _put(node, aten.view.default, _put(node, aten.permute.default, node.args[0], _BY_MEMORY), node.args[1]),
        )

    for node in _copying_reshapes(program):
        yield partial(edit, node)


@breaks(in_regions=True)
def permute_after_a_copying_reshape(program: Program) -> Iterator[Edit]:
    """A value in channels-last format is brought into another order after the reshape that copies it, and not before."""

    def edit(node: fx.Node) -> None:
        n, c, h, w = node.args[0].meta["val"].shape  # type: ignore[union-attr]
        copied = _put(node, aten.reshape.default, node.args[0], [n, h, w, c])
        restored = _put(node, aten.permute.default, copied, [0, 3, 1, 2])  # lies as the value did
        with_argument(node, 0, restored)

    for node in _copying_reshapes(program):
        yield partial(edit, node)


def _copying_reshapes(program: Program) -> Iterator[fx.Node]:
    for graph in bodies(program):
        yield from (node for node in graph.nodes if node.target is aten.reshape.default and _copies(node))


def _copies(reshape: fx.Node) -> bool:
    """Whether what is reshaped is in channels-last format alone."""
    value = reshape.args[0].meta["val"]  # type: ignore[union-attr]
    is_laid_out = value.dim() == 4 and value.is_contiguous(memory_format=torch.channels_last)
    return is_laid_out and not value.is_contiguous()


@keeps(in_regions=True)
def lay_out_once_more(program: Program) -> Iterator[Edit]:
    """A value that was laid out is copied once more, in that format or by way of another."""

    def edit(node: fx.Node, target: Any, memory_formats: list[torch.memory_format]) -> None:
        after, users = node.next, list(node.users)
        copy = node
        for memory_format in memory_formats:
            with node.graph.inserting_before(after):
                made = node.graph.call_function(target, (copy,), {"memory_format": memory_format})
            with node.meta["val"].fake_mode:
                made.meta["val"] = target(copy.meta["val"], memory_format=memory_format)
            copy = made
        for user in users:
            user.replace_input_with(node, copy)

    for node in _layouts(program):
        own: Any = node.kwargs["memory_format"]
        for target in (aten.clone.default, aten.contiguous.default, aten._to_copy.default):
            yield partial(edit, node, target, [own])
        yield partial(edit, node, aten.clone.default, [torch.contiguous_format, own])
