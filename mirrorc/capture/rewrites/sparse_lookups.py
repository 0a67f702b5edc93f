"""Traces lookups with ``sparse=True`` as dense, and finds variables to which torch gives sparse gradients.

Also warns of lookups that divide gradients by frequencies of rows, because each replica counts rows of its own shard.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from mirrorc.capture.call.call_arguments import Leaf
from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.errors import CaptureError
from mirrorc.ir.nodes import ancestors
from mirrorc.ir.type_inference import reinfer_type
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import last_users_frame
from mirrorc.torch_internals import leaf_of_placeholder, module_variables

_LOOKUPS = (F.embedding, F.embedding_bag)
_MEAN, _MAX = 1, 2  # the modes of bags, as the operator numbers them


def take_sparse_lookups(traced: fx.GraphModule, leaves: Sequence[torch.Tensor], model_name: str) -> frozenset[str]:
    """Makes lookups dense. Returns paths of parameters with sparse lookups only; torch gives others dense gradients."""
    sparse: set[str] = set()
    dense: set[str] = set()
    lookups = [(node, _arguments_of(node)) for node in _lookups(traced.graph)]
    if not any(arguments.get("sparse") is True for _, arguments in lookups):
        return frozenset()
    paths = module_variables(traced, leaves)
    for node, arguments in lookups:
        weight: Any = arguments["weight"]
        path = paths.get(weight, "")
        if arguments.get("sparse") is not True:
            dense.add(path)
            continue
        if weight.meta["example_value"].requires_grad:
            _check(arguments, path, model_name)
            sparse.add(path)
        arguments["sparse"] = False
        node.args, node.kwargs = (), arguments
    traced.recompile()
    return frozenset(sparse - dense)


def _lookups(graph: fx.Graph) -> Iterator[fx.Node]:
    return (node for node in graph.nodes if node.op == "call_function" and node.target in _LOOKUPS)


def _arguments_of(node: fx.Node) -> dict[str, Any]:
    return dict(inspect.signature(node.target).bind(*node.args, **node.kwargs).arguments)  # type: ignore[arg-type]


def _check(arguments: Mapping[str, Any], path: str, model_name: str) -> None:
    name = path.removeprefix("model.")
    if not path:
        raise problem(
            CaptureError,
            f"MC2501: a lookup of {model_name} has sparse=True, and what it reads is no parameter",
            "its gradient goes on through what computes it, where gradients are dense",
            "sparse=False",
        )
    if arguments.get("scale_grad_by_freq"):
        raise problem(
            CaptureError,
            f"MC2501: the lookup in {name!r} of {model_name} has sparse=True and scale_grad_by_freq=True",
            "torch does not support them together",
            ("scale_grad_by_freq=False", "sparse=False"),
        )


def leaves_with_offsets(graph: fx.Graph) -> tuple[int, ...]:
    """The indices of tensor arguments used as offsets of ``embedding_bag``."""
    leaves: set[int] = set()
    for node in _lookups(graph):
        offsets = _arguments_of(node).get("offsets")
        for source in ancestors(offsets) if isinstance(offsets, fx.Node) else ():
            leaf = leaf_of_placeholder(source) if source.op == "placeholder" else None
            leaves |= {leaf} if leaf is not None else set()
    return tuple(sorted(leaves))


def refuse_split_offsets(leaves: Sequence[Leaf], with_offsets: Sequence[int], model_name: str) -> None:
    """Offsets count from the first index of the whole batch."""
    for index in with_offsets:
        leaf = leaves[index]
        if leaf.split and leaf.tensor is not None:
            raise problem(
                CaptureError,
                f"MC2501: an embedding_bag of {model_name} takes argument {leaf.path!r} as offsets",
                "offsets are positions among the indices of the whole batch, and a shard has only some of these",
                (
                    "pass 2-D indices, a row for each bag, padded with padding_idx",
                    "mirrorc.PerReplica([mirrorc.replicated(indices0), ...]), mirrorc.PerReplica([offsets0, ...])",
                ),
            )


# In the graph of operators


def _gradient_of_bags(
    grad: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
    offset2bag: torch.Tensor,
    bag_size: torch.Tensor,
    maximum_indices: torch.Tensor,
    num_weights: int,
    scale_grad_by_freq: bool,
    mode: int,
    sparse: bool,
    per_sample_weights: torch.Tensor | None,
    padding_idx: int = -1,
) -> Any:
    """Expresses the gradient as rows to add; torch's gradient is as large as the table.

    An index's row is the gradient of its bag, times the index's weight, if any, over the bag's size in mode "mean".
    """
    if mode == _MAX or scale_grad_by_freq:
        return NotImplemented
    places = torch.arange(indices.shape[0], dtype=offsets.dtype, device=offsets.device)
    bags = torch.searchsorted(offsets, places, right=True) - 1  # empty bags begin where the next one does
    if mode == _MEAN:
        grad = grad / bag_size.clamp(min=1).unsqueeze(1)  # a bag of padding alone has the size 0
    rows = grad[bags]
    if per_sample_weights is not None:
        rows = rows * per_sample_weights.unsqueeze(1)
    return torch.ops.aten.embedding_dense_backward(rows, indices, num_weights, padding_idx, False)


BAGS_AS_ROWS: Mapping[Any, Callable[..., Any]] = {torch.ops.aten._embedding_bag_backward.default: _gradient_of_bags}
"""Decompositions with which joint export expresses gradients of embedding bags as rows."""


def rows_of_lookups(graph: fx.Graph, looked_up: frozenset[str], model_name: str) -> frozenset[str]:
    """The ``looked_up`` parameters whose gradients come only from lookups. Torch makes these gradients sparse.

    Also joins the gradients of several lookups in one table.
    """
    output: Any = graph.output_node().args[0]
    gradients, sparse = dict(output["gradients"]), set()
    for name in sorted(looked_up & gradients.keys()):
        lookups = _summands(gradients[name])
        if lookups is None:
            continue
        sparse.add(name)
        if len({node.args[3] for node in lookups}) > 1:
            raise problem(
                CaptureError,
                f"MC2501: lookups with sparse=True in {name!r} of {model_name} have different values of padding_idx",
                "its rows are added up together",
                ("give them one padding_idx", "sparse=False"),
            )
        if len(lookups) > 1:
            gradients[name] = _joined(graph, gradients[name], lookups)
    graph.output_node().args = ({**output, "gradients": gradients},)
    return frozenset(sparse)


def _summands(gradient: fx.Node) -> list[fx.Node] | None:
    if gradient.target is torch.ops.aten.embedding_dense_backward.default:
        return [gradient]
    if gradient.target is not torch.ops.aten.add.Tensor or gradient.kwargs:
        return None
    parts = [_summands(part) if isinstance(part, fx.Node) else None for part in gradient.args]
    return [node for part in parts for node in part or ()] if None not in parts else None


def _joined(graph: fx.Graph, gradient: fx.Node, lookups: Sequence[fx.Node]) -> fx.Node:
    aten = torch.ops.aten
    width = gradient.meta["val"].shape[1]
    with graph.inserting_after(gradient):
        anchor = graph.call_function(aten.clone.default, (gradient,))
    with graph.inserting_before(anchor):
        rows = [_insert(graph, node, aten.reshape.default, (node.args[0], [-1, width])) for node in lookups]
        places = [_insert(graph, node, aten.reshape.default, (node.args[1], [-1])) for node in lookups]
        if len({node.meta["val"].dtype for node in places}) > 1:
            wide = {"dtype": torch.int64}
            places = [_insert(graph, node, aten._to_copy.default, (node,), wide) for node in places]
        all_rows = _insert(graph, gradient, aten.cat.default, (rows,))
        all_places = _insert(graph, gradient, aten.cat.default, (places,))
        _, _, num_rows, padding_idx, scales = lookups[0].args
        target = aten.embedding_dense_backward.default
        made = _insert(graph, gradient, target, (all_rows, all_places, num_rows, padding_idx, scales))
    graph.erase_node(anchor)
    return made


def _insert(graph: fx.Graph, like: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
    node = graph.call_function(target, args, kwargs or {})
    node.meta = dict(like.meta)
    reinfer_type(node)
    return node


_COUNTED = (
    torch.ops.aten.embedding.default,
    torch.ops.aten._embedding_bag.default,
    torch.ops.aten._embedding_bag_forward_only.default,
)
_SCALES = 3  # the index of scale_grad_by_freq in the arguments of each lookup


def notes_on_counted_lookups(graph: fx.Graph, model_name: str) -> tuple[Note, ...]:
    notes: dict[Note, None] = {}
    for node in graph.nodes:
        if node.target in _COUNTED and len(node.args) > _SCALES and node.args[_SCALES] is True:
            frame = last_users_frame(node.meta.get("stack_trace") or "")
            message = (
                f"an embedding of {model_name} has scale_grad_by_freq=True: each replica divides its gradients by how often a "
                "row occurs in its own shard, one device by how often it occurs in the whole batch. DistributedDataParallel "
                "does the same. To have the update of one device, leave it out"
            )
            notes[Note.at(frame, message)] = None
    return tuple(notes)
