"""Keeps operators that address memory by position within their arguments."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.aliases import viewed
from mirrorc.analysis.graph.layouts import BY_POSITION
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.type_inference import reinfer_type
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import source_line
from mirrorc.torch_internals import SizesGivenUp, is_dense, is_symbolic, schema_of

aten = torch.ops.aten


def confine_strided_reads(graph: fx.Graph) -> None:
    """Makes ``as_strided`` and similar operators address only elements of their argument.

    Memory around a shard or a region's result differs from memory in the trace. A view is replaced by its base, which
    must be contiguous, or dense if it is the user's.
    """
    for node in [node for node in graph.nodes if node.target in BY_POSITION]:
        names = [argument.name for argument in schema_of(node.target).arguments]
        arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
        base: Any = node.args[0]
        offset = arguments.get("storage_offset")
        offset = base.meta["val"].storage_offset() if offset is None else offset
        places: Any = (offset, arguments["size"], arguments["stride"])
        offset, sizes, strides = fx.node.map_arg(places, lambda source: source.meta["val"])
        if is_symbolic(offset):
            raise SizesGivenUp("as_strided begins at a place that follows from sizes")
        reach = sum((n - 1) * stride for n, stride in zip(sizes, strides, strict=True))
        last = offset + reach if all(n != 0 for n in sizes) else offset
        is_scatter = node.target is aten.as_strided_scatter.default  # its result has the shape of its argument
        while not _holds(base, offset, last) and (source := _same_memory(base)) is not None and not is_scatter:
            base = source
        if not _holds(base, offset, last):
            raise problem(
                CaptureError,
                "MC2508: as_strided cannot be captured here: it addresses elements by their position in memory",
                "its tensor is not contiguous, or does not own all of them",
                (
                    "x[...] or x.unfold(...) in place of as_strided",
                    "x.contiguous().as_strided(...), with that tensor's strides",
                ),
                at=source_line(node) or node.name,
            )
        first = base.meta["val"].storage_offset()
        if first:
            with graph.inserting_before(node):
                copy = graph.call_function(aten.clone.default, (base,))
            copy.meta = dict(base.meta)
            reinfer_type(copy)
            base = copy
        if "storage_offset" in names:
            arguments["storage_offset"] = offset - first
        node.args, node.kwargs = (base, *[arguments[name] for name in names[1:]]), {}


def _same_memory(node: fx.Node) -> fx.Node | None:
    source = viewed(node)
    return source if source is not None and source.meta["val"].dtype == node.meta["val"].dtype else None


def _holds(node: fx.Node, first: int, last: int) -> bool:
    value = node.meta["val"]
    is_laid = is_dense(value) if node.op == "placeholder" or node.target is ops.read else value.is_contiguous()
    start = value.storage_offset()
    return is_laid and start <= first and last < start + value.numel()
