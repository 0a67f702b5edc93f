"""Torch losses: reductions that contradict ``loss_reduction``, and means over class weights or targets, not examples."""

from __future__ import annotations

import inspect
import logging
import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import torch
from torch import fx
from torch.nn import functional as F

from mirrorc.capture.call.shards import Shards
from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.ir.nodes import ancestors
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import last_users_frame, last_users_line
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

    Losses scaled by a number of examples or elements are left out (such a sum may be a mean), and products of tensors.
    """
    reductions: dict[Reduction, None] = {}
    loss = traced.graph.output_node().args[0][0]  # type: ignore[index]
    for node, factors in _summands(loss):
        kind = _reduction(node.target, node.args, node.kwargs) if node.op == "call_function" else None
        if kind is not None and (sources := _batch_of(node)):
            counts = _divisors([*node.all_input_nodes, *sources]) if factors else []
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


def _divisors(nodes: Sequence[fx.Node]) -> list[int]:
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
    placeholders = [source for source in ancestors(node) if source.op == "placeholder"]
    return [source for source in placeholders if leaf_of_placeholder(source) is not None]


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


logger = logging.getLogger(__name__)

DEFAULT_IGNORE_INDEX = -100
_OPERATORS = (torch.ops.aten.nll_loss_forward.default, torch.ops.aten.nll_loss2d_forward.default)
_MEAN = 1  # as operators count reductions
_WITH_TARGETS = {function: inspect.signature(function) for function in (F.cross_entropy, F.nll_loss)}


@dataclass(frozen=True, eq=False)
class WeightedMean:
    """A call of a torch loss that averages over its targets.

    Attributes:
        is_weighted: it divides by the sum of class weights.
        targets: computes the targets of a shard; None if they depend on more than the arguments.
        writes_ignored: the code that computes the targets has the value of ``ignore_index``.
        counted: the numbers of ignored and of all targets in a run; None for a graph.
    """

    function: str
    target: Any
    is_weighted: bool
    ignore_index: int
    line: str = ""
    targets: Targets | None = None
    writes_ignored: bool = False
    counted: tuple[int, int] | None = None

    def counts(self, tensors: Sequence[torch.Tensor]) -> tuple[int, int] | None:
        """The numbers of ignored and of all targets in a shard; None if unknown."""
        targets = self.targets.of(tensors) if self.targets is not None else None
        return self.counted if targets is None else _counts(targets, self.ignore_index)


def _counts(targets: torch.Tensor, ignore_index: int) -> tuple[int, int]:
    return int((targets == ignore_index).sum()), targets.numel()


@dataclass(frozen=True, eq=False)
class Targets:
    """The part of a graph that computes the targets of a loss.

    Attributes:
        inputs: for each placeholder, the index of a tensor argument; also its dim if the placeholder is a size.
    """

    graph: fx.GraphModule
    inputs: tuple[tuple[int, int | None], ...]
    device: torch.device

    def of(self, tensors: Sequence[torch.Tensor]) -> torch.Tensor | None:
        inputs = [tensors[i].to(self.device) if dim is None else tensors[i].shape[dim] for i, dim in self.inputs]
        try:
            with torch.no_grad(), torch.random.fork_rng():
                return self.graph(*inputs)
        except Exception as error:
            logger.debug("no count of targets", exc_info=error)
            return None


def bound_arguments(
    signatures: Mapping[Any, inspect.Signature], function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any] | None:
    """A call's arguments with defaults; None if ``signatures`` lacks the function."""
    try:
        signature = signatures.get(function)
    except TypeError:  # not hashable
        return None
    if signature is None:
        return None
    bound = signature.bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


def weighted_mean(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> WeightedMean | None:
    arguments = bound_arguments(_WITH_TARGETS, function, args, kwargs)
    if arguments is None or arguments["reduction"] != "mean":
        return None
    is_weighted = arguments["weight"] is not None
    return WeightedMean(function.__name__, arguments["target"], is_weighted, arguments["ignore_index"])


def weighted_mean_of_operator(operator: Any, args: Sequence[Any], line: Callable[[], str]) -> WeightedMean | None:
    if operator not in _OPERATORS or args[3] != _MEAN:
        return None
    _, target, weight, _, ignore_index = args[:5]
    counted = _counts(target, ignore_index)
    return WeightedMean("cross_entropy or nll_loss", target, weight is not None, ignore_index, line(), counted=counted)


def weighted_means_of(traced: fx.GraphModule) -> tuple[WeightedMean, ...]:
    means = []
    for node in traced.graph.nodes:
        mean = weighted_mean(node.target, node.args, node.kwargs) if node.op == "call_function" else None
        if mean is None or not isinstance(mean.target, fx.Node):
            continue
        value = mean.target.meta.get("example_value")
        if isinstance(value, torch.Tensor) and not value.is_floating_point():
            line = last_users_line(node.meta.get("stack_trace") or "")
            nodes = _makers(mean.target, node)
            writes = any(mean.ignore_index in _numbers_of(maker) for maker in nodes)
            means.append(replace(mean, line=line, targets=_targets(mean.target, nodes), writes_ignored=writes))
    return tuple(means)


def _makers(target: fx.Node, loss: fx.Node) -> list[fx.Node]:
    nodes, size = ancestors(target), 0
    while len(nodes) > size:
        size = len(nodes)
        made = {node for node in nodes if node.op != "placeholder"}
        for node in loss.graph.nodes:
            if node is loss:
                break
            if _writes(node) and not made.isdisjoint(ancestors(node.args[0])):
                nodes |= ancestors(node)
    return [node for node in loss.graph.nodes if node in nodes]


def _writes(node: fx.Node) -> bool:
    is_method = node.op == "call_method" and str(node.target).endswith("_") and not str(node.target).endswith("__")
    return (is_method or node.target is operator.setitem) and isinstance(node.args[0], fx.Node)


def _numbers_of(node: fx.Node) -> list[Any]:
    return [value for value in (*node.args, *node.kwargs.values()) if type(value) in (int, float)]


def _targets(target: fx.Node, makers: Sequence[fx.Node]) -> Targets | None:
    inputs = [_input(node) for node in makers if node.op == "placeholder"]
    known = [place for place in inputs if place is not None]
    if len(known) < len(inputs):
        return None
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in makers:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    graph.output(copies[target])
    module = fx.GraphModule(target.graph.owning_module or {}, graph)
    return Targets(module, tuple(known), target.meta["example_value"].device)


def _input(node: fx.Node) -> tuple[int, int | None] | None:
    if (leaf := leaf_of_placeholder(node)) is not None:
        return leaf, None
    size = node.meta.get("example_value")
    if not isinstance(size, torch.SymInt):
        return None
    for other in node.graph.find_nodes(op="placeholder"):
        if (leaf := leaf_of_placeholder(other)) is not None:
            shape = list(map(str, other.meta["example_value"].shape))
            if str(size) in shape:
                return leaf, shape.index(str(size))
    return None


def remarks_on(means: Sequence[WeightedMean], num_replicas: int) -> tuple[str, ...]:
    texts = [_text(mean) for mean in means if num_replicas > 1]
    return tuple(dict.fromkeys(text for text in texts if text))


def differences_in(means_of: Sequence[Sequence[WeightedMean]], shards: Shards) -> tuple[str, ...]:
    """``means_of`` has the means in the graph of each shard with examples."""
    differences: list[str] = []
    present = [tensors for tensors, size in zip(shards.tensors, shards.num_examples, strict=True) if size]
    for means in zip(*means_of, strict=False) if len(present) > 1 else ():
        counts = [mean.counts(tensors) for mean, tensors in zip(means, present, strict=True)]
        known = [count for count in counts if count is not None]
        if len({few / many for few, many in known if many}) > 1:
            numbers = ", ".join(f"{few} of {many}" for few, many in known)
            differences.append(f"{_text(means[0], ignores=True)} ({numbers} in the shards of this batch)")
        elif means[0].writes_ignored and not known:
            differences.append(_text(means[0], ignores=True))
        elif means[0].is_weighted:
            differences.append(_text(means[0]))
    return tuple(dict.fromkeys(differences))


def _text(mean: WeightedMean, *, ignores: bool = False) -> str:
    divisors = ["the class weights"] if mean.is_weighted else []
    if ignores or mean.ignore_index != DEFAULT_IGNORE_INDEX:
        divisors.append(f"the number of targets that are not {mean.ignore_index}")
    place = f"{mean.function}{f' at {mean.line}' if mean.line else ''}"
    return f"in {place}, each device divides by {' and '.join(divisors)} of its own shard" if divisors else ""
