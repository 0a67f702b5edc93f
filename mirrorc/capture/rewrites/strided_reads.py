"""Makes operators that address elements by their position in memory independent of the memory around their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import viewed
from mirrorc.analysis.graph.layouts import BY_POSITION
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.type_inference import find_type_anew
from mirrorc.messages.source_lines import source_line
from mirrorc.torch_internals import SizesGivenUp, is_dense, is_symbolic, schema_of

aten = torch.ops.aten


def confine_strided_reads(graph: fx.Graph) -> None:
    """Lets ``as_strided`` and its like address nothing but elements of their argument, counted from its first element.

    A shard lies somewhere in the batch, and a value that another region has made may lie anywhere: what is around them in memory
    is not what was there while tracing. If the argument is a view, the operator gets the value that is viewed. Operators give
    their results in layouts of their own choice, so the argument must be contiguous, unless it is the user's own memory.

    Raises:
        CaptureError: an operator addresses elements outside of its argument, or the argument is not contiguous.
    """
    for node in [node for node in graph.nodes if node.target in BY_POSITION]:
        names = [argument.name for argument in schema_of(node.target).arguments]
        arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        given: Any = node.args[0]
        offset = arguments.get("storage_offset")
        offset = given.meta["val"].storage_offset() if offset is None else offset
        offset, sizes, strides = (fx.node.map_arg(a, _number) for a in (offset, arguments["size"], arguments["stride"]))
        if is_symbolic(offset):
            raise SizesGivenUp("as_strided begins at a place that follows from sizes")
        reach = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        last = offset + reach if all(n != 0 for n in sizes) else offset
        is_scatter = node.target is aten.as_strided_scatter.default  # its result has the shape of its argument
        while not _holds(given, offset, last) and (source := _same_memory(given)) is not None and not is_scatter:
            given = source
        if not _holds(given, offset, last):
            raise CaptureError(
                f"as_strided at {source_line(node) or node.name} addresses elements by their position in memory, and what it is "
                "given is not contiguous, or not all of them are in it: index it, or give as_strided what .contiguous() gives"
            )
        first = given.meta["val"].storage_offset()
        if first:
            with graph.inserting_before(node):
                own = graph.call_function(aten.clone.default, (given,))
            own.meta = dict(given.meta)
            find_type_anew(own)
            given = own
        if "storage_offset" in names:
            arguments["storage_offset"] = offset - first
        node.args, node.kwargs = (given, *[arguments[name] for name in names[1:]]), {}


def _number(node: fx.Node) -> Any:
    """The number of an argument that is computed of symbolic sizes."""
    return node.meta["val"]


def _same_memory(node: fx.Node) -> fx.Node | None:
    """The value that a view shows, if positions count the same elements there; None if there is none."""
    source = viewed(node)
    return source if source is not None and source.meta["val"].dtype == node.meta["val"].dtype else None


def _holds(node: fx.Node, first: int, last: int) -> bool:
    """Whether these positions in memory are those of elements of a value, wherever the value will lie."""
    value = node.meta["val"]
    is_laid = is_dense(value) if node.op == "placeholder" or node.target is ops.read else value.is_contiguous()
    start = value.storage_offset()
    return is_laid and start <= first and last < start + value.numel()
