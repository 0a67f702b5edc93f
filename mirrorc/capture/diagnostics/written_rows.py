"""Warns of buffers that keep rows of examples: each replica writes rows of its shard, and the model then holds a mean."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import fx

from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.ir import ops
from mirrorc.ir.nodes import ancestors
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import last_users_frame
from mirrorc.torch_internals import bare_name, is_operator

_SAME_ON_ALL = (ops.read, ops.sum_over_replicas, ops.rows_of_replicas)
_AT_INDEX = ("index_put", "index_copy", "index_add", "index_fill", "index_reduce", "scatter", "scatter_add")


def notes_on_rows(
    graph: fx.Graph, split: Set[fx.Node], written_rows: Sequence[str], model_name: str
) -> tuple[Note, ...]:
    """``split``: placeholders with a row for each example; ``written_rows``: buffers not written in the graph."""
    output: Any = graph.output_node().args[0]
    differs: dict[fx.Node, bool] = {}  # whether a value is another on each replica
    for node in graph.nodes:
        sources = [] if node.target in _SAME_ON_ALL else node.all_input_nodes
        differs[node] = node in split or any(differs[source] for source in sources)
    sizes = {str(node.meta["val"].shape[0]) for node in split}
    notes = [Note(_text_on_rows(name.removeprefix("model."), model_name)) for name in written_rows]
    for name, write in output["writes"].items():
        made_of = ancestors(write)
        for node in graph.nodes:
            if node in made_of and is_operator(node.target) and _writes_rows(node, name, differs, sizes):
                frame = last_users_frame(node.meta.get("stack_trace") or "")
                notes.append(Note.at(frame, _text_on_rows(name, model_name)))
    return tuple(dict.fromkeys(notes))


def _writes_rows(node: fx.Node, buffer: str, differs: dict[fx.Node, bool], sizes: Set[str]) -> bool:
    operator, args = bare_name(node.target), list[Any](node.args)
    if operator in _AT_INDEX and _is_of(args[0], buffer):
        places = args[1] if operator == "index_put" else [args[2]]
        indices = [index for index in places if isinstance(index, fx.Node)]
        is_long = any(str(index.meta["val"].numel()) in sizes for index in indices)
        return any(differs[index] for index in indices) or (is_long and differs[node])
    if operator not in ("cat", "slice_scatter"):
        return False
    dim = next((value for value in (*args[1:], *node.kwargs.values()) if type(value) is int), 0)
    parts = args[0] if operator == "cat" else args[:2]
    long = [p for p in parts if differs[p] and not _is_of(p, buffer) and str(p.meta["val"].shape[dim]) in sizes]
    return bool(long) and any(_is_of(part, buffer) for part in parts)


def _is_of(node: Any, buffer: str) -> bool:
    while node.args and isinstance(node.args[0], fx.Node):
        if is_operator(node.target) and bare_name(node.target).endswith("_like"):
            return False
        node = node.args[0]
    return node.target is ops.read and node.kwargs["variable"] == buffer


def writes_rows(before: torch.Tensor, afters: Sequence[torch.Tensor], sizes: Sequence[Set[int]]) -> bool:
    """True if runs on different shards write different rows or columns, or as many as they have examples.

    Args:
        sizes: the possible numbers of examples of each run.
    """
    for dim in range(before.dim()) if before.dim() > 1 and len(afters) > 1 else ():
        each = [(after != before).movedim(dim, 0).flatten(1).any(1) for after in afters if after.shape == before.shape]
        if any(not torch.equal(rows, each[0]) for rows in each):
            return True
        if all(not rows.all() and int(rows.sum()) in counts for rows, counts in zip(each, sizes, strict=False)):
            return bool(each)
    return False


def _text_on_rows(name: str, model_name: str) -> str:
    return message(
        f"MC3306: forward of {model_name} writes rows of the buffer {name!r}, and each replica those of its own shard",
        "each replica has a buffer of its own, and the model shows their mean, or the first if they are integers",
        (
            "self.x[mirrorc.all_gather(index)] = mirrorc.all_gather(rows), which writes those of the whole batch on each",
            "return the rows from forward, and write them in your loop, between calls",
        ),
    )
