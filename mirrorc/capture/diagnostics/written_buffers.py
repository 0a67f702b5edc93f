"""Buffers that replicas write: one value on all, as counters and vectors of spectral norms, or rows of their own shard."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch
from torch import fx, nn

from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.nodes import ancestors
from mirrorc.ir.variables import Aggregation
from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import last_users_frame
from mirrorc.torch_internals import bare_name, is_operator

_EXCHANGES = (ops.sum_over_replicas, ops.rows_of_replicas)
_SAME_ON_ALL = (ops.read, *_EXCHANGES)
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


_KIND = "_SpectralNorm"  # the class registered by torch.nn.utils.parametrizations.spectral_norm
_VECTORS = ("_u", "_v")


def vectors_of_spectral_norms(roots: Iterable[nn.Module]) -> set[int]:
    norms = {module for root in roots for module in root.modules() if type(module).__name__ == _KIND}
    return {id(norm._buffers[name]) for norm in norms for name in _VECTORS if norm._buffers.get(name) is not None}


def are_alike(first: torch.Tensor, second: torch.Tensor) -> bool:
    allowed = torch.finfo(first.dtype).eps ** 0.5 if first.is_floating_point() else 0.0
    return torch.allclose(first, second.to(first.device), rtol=0.0, atol=allowed, equal_nan=True)


class Computation(NamedTuple):
    """The computation of a buffer with one value on all replicas.

    Attributes:
        expression: a hash.
        is_of_norm: the buffer is a vector of a spectral norm, which a step iterates once.
        is_counter: it is computed only from variables. Each microbatch then continues from the previous one.
    """

    expression: int
    is_of_norm: bool = False
    is_counter: bool = False


def written_alike(
    graph: fx.Graph,
    writes: Mapping[str, fx.Node],
    vectors: Collection[str],
    statistics: Collection[str],
    left_out: Collection[str],
    arguments: Collection[Any],
) -> dict[str, Computation]:
    """Buffers computed only from values that are equal on all replicas, and their computations.

    Args:
        vectors, statistics: buffers of spectral norms and of synchronized norms.
        left_out: buffers that belong to others with different values, such as a batch norm's counter.
        arguments: placeholders with one value for all replicas, such as numbers.
    """
    alike = writes.keys() - set(left_out)
    reduced = {*vectors, *statistics, *_exchanged(graph, writes)}
    while True:
        is_same: dict[fx.Node, bool] = {}  # whether a value is equal on all replicas
        for node in graph.nodes:
            if node.target is ops.read:
                name = str(node.kwargs["variable"])
                is_same[node] = name in alike or name not in writes
            elif node.op == "placeholder":
                is_same[node] = node.target in arguments
            elif node.target in _EXCHANGES:
                is_same[node] = True
            else:
                is_same[node] = node.op == "call_function" and all(is_same[source] for source in node.all_input_nodes)
        remaining = {name for name in alike if is_same[writes[name]]}
        if remaining == alike:
            made = _expressions(node for node in graph.nodes if is_same[node])
            return {n: Computation(made[writes[n]], n in vectors, n not in reduced) for n in sorted(alike)}
        alike = remaining


def _exchanged(graph: fx.Graph, writes: Mapping[str, fx.Node]) -> set[str]:
    after: set[fx.Node] = set()
    for node in graph.nodes:
        if node.target in _EXCHANGES or not after.isdisjoint(node.all_input_nodes):
            after.add(node)
    return {name for name, node in writes.items() if node in after}


def aggregation_alike(name: str, alike: Sequence[Mapping[str, Computation]]) -> Aggregation | None:
    """The aggregation of a buffer to which all captured graphs write the same value; None if they may differ."""
    ways = {computations.get(name) for computations in alike}
    if len(ways) > 1 and all(way is not None and way.is_of_norm for way in ways):
        raise problem(
            CaptureError,
            f"MC2505: the spectral norm {name!r} is iterated another number of times for shards of other sizes",
            "replicas would have different vectors",
            "call its module once in each forward, with all examples at once",
        )
    first = alike[0].get(name)
    if first is None or len(ways) > 1:
        return None
    return Aggregation.COUNTER if first.is_counter else Aggregation.SAME


def _expressions(nodes: Iterable[fx.Node]) -> dict[fx.Node, int]:
    made: dict[fx.Node, int] = {}
    for node in nodes:
        if node.target in _EXCHANGES:
            made[node] = hash((str(node.target), node.kwargs["number"]))
            continue
        operands = fx.node.map_arg((node.args, node.kwargs), lambda source: f"value {made[source]}")
        made[node] = hash((node.op, str(node.target), repr(operands)))
    return made
