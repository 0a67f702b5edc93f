"""Warns of torch losses that contradict ``loss_reduction``."""

from __future__ import annotations

import inspect
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.capture.diagnostics.weighted_means import bound_arguments
from mirrorc.ir.nodes import ancestors
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import last_users_frame
from mirrorc.torch_internals import leaf_of_placeholder, sizes_now

_LOSSES = (
    F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.cosine_embedding_loss, F.cross_entropy, F.ctc_loss,
    F.gaussian_nll_loss, F.hinge_embedding_loss, F.huber_loss, F.kl_div, F.l1_loss, F.margin_ranking_loss, F.mse_loss,
    F.multi_margin_loss, F.multilabel_margin_loss, F.multilabel_soft_margin_loss, F.nll_loss, F.poisson_nll_loss,
    F.smooth_l1_loss, F.soft_margin_loss, F.triplet_margin_loss, F.triplet_margin_with_distance_loss,
)  # fmt: skip
_SIGNATURES = {function: inspect.signature(function) for function in _LOSSES}
_SUMMANDS = {operator.add, operator.iadd, operator.sub, operator.isub, operator.neg, torch.add, torch.sub, torch.neg}
_METHODS = {"add", "add_", "sub", "sub_", "neg"}  # with the same meaning
_PRODUCTS = {operator.mul, operator.imul, torch.mul, "mul", "mul_"}
_QUOTIENTS = {operator.truediv, operator.itruediv, torch.div, torch.true_divide, "div", "div_", "true_divide"}
_SUM = "sum"


@dataclass(frozen=True)
class Reduction:
    """A torch loss that is a summand of the model's loss. ``line`` is 0 if unknown."""

    function: str
    kind: str
    filename: str
    line: int


def reductions_of(traced: fx.GraphModule) -> tuple[Reduction, ...]:
    """Torch losses among the summands of the graph's first output.

    Losses scaled by a number of examples or elements are left out, because such a sum may be a mean. So are products
    and quotients of tensors.
    """
    reductions: dict[Reduction, None] = {}
    loss = traced.graph.output_node().args[0][0]  # type: ignore[index]
    for node, factors in _summands(loss):
        kind = _reduction(node.target, node.args, node.kwargs) if node.op == "call_function" else None
        if kind is not None and (sources := _batch_of(node)):
            counts = _counts([*node.all_input_nodes, *sources]) if factors else []
            pairs = [(factor, count) for factor in (*factors, math.prod(factors)) for count in counts]
            if any(math.isclose(factor * count, 1) or math.isclose(factor, count) for factor, count in pairs):
                continue  # a mean made of a sum, or the reverse, or a number from outside that is the same
            frame = last_users_frame(node.meta.get("stack_trace") or "")
            place = (frame.filename, frame.lineno or 0) if frame else ("<unknown>", 0)
            reductions[Reduction(node.target.__name__, kind, *place)] = None  # type: ignore[union-attr]
    return tuple(reductions)


def _summands(loss: Any) -> Iterator[tuple[fx.Node, tuple[float, ...]]]:
    seen: set[fx.Node] = set()
    waiting: list[tuple[Any, tuple[float, ...]]] = [(loss, ())]
    while waiting:
        node, factors = waiting.pop()
        if not isinstance(node, fx.Node) or node in seen or node.kwargs.get("alpha", 1) != 1:
            continue
        seen.add(node)
        numbers = [value for value in node.args if isinstance(value, int | float) and value]
        if node.target in (_METHODS if node.op == "call_method" else _SUMMANDS):
            waiting += [(value, factors) for value in node.args]
        elif node.target in _PRODUCTS and numbers:
            waiting += [(value, (*factors, numbers[0])) for value in node.args]
        elif node.target in _QUOTIENTS and node.args[1:] == tuple(numbers) and not node.kwargs:
            waiting.append((node.args[0], (*factors, 1 / numbers[0])))
        else:
            yield node, factors


def _counts(nodes: Sequence[fx.Node]) -> list[int]:
    """Candidates for a mean's divisor: the first size of a tensor, times any of its other sizes."""
    tensors = [node.meta.get("example_value") for node in nodes]
    shapes = {tuple(sizes_now(tensor)) for tensor in tensors if isinstance(tensor, torch.Tensor) and tensor.dim()}
    subsets = [(shape[0], rest) for shape in shapes for n in range(len(shape)) for rest in combinations(shape[1:], n)]
    return [first * math.prod(rest) for first, rest in subsets]


def _reduction(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> str | None:
    arguments = bound_arguments(_SIGNATURES, function, args, kwargs)
    kind = arguments["reduction"] if arguments is not None else None
    return kind if kind in ("mean", "batchmean", _SUM) else None


def _batch_of(node: fx.Node) -> list[fx.Node]:
    return [
        source for source in ancestors(node) if source.op == "placeholder" and leaf_of_placeholder(source) is not None
    ]


def notes_on_reductions(
    reductions: Sequence[Reduction], loss_reduction: str, num_devices: int, model_name: str
) -> tuple[Note, ...]:
    notes = []
    for reduction in reductions:
        if (reduction.kind == _SUM) == (loss_reduction == "sum"):
            continue
        if reduction.kind == _SUM:
            text = message(
                f"MC3102: {reduction.function} in the loss of {model_name} is a sum, but the step averages it over devices",
                f"loss and gradients are about 1/{num_devices} of the sum over the batch",
                "mirrorc.compile(..., loss_reduction='sum')",
            )
        else:
            text = message(
                f"MC3102: {reduction.function} in the loss of {model_name} is a mean, but loss_reduction='sum' adds it up",
                f"loss and gradients are about {num_devices} times the mean of the batch",
                ("leave loss_reduction= out", f"{reduction.function}(..., reduction='sum')"),
            )
        notes.append(Note(text, reduction.filename, reduction.line))
    return tuple(notes)
