"""Weights for losses that a Hugging Face model computes on each replica, so that they add up to the loss of the batch."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn

from mirrorc.calls.data_parallel import DataParallel
from mirrorc.capture.call.traced_outputs import summed
from mirrorc.messages.source_lines import warn

_IGNORED = -100  # a label that the losses of Hugging Face leave out


def _per_row(labels: torch.Tensor) -> torch.Tensor:
    return labels.ne(_IGNORED).flatten(1).sum(1) if labels.dim() > 1 else labels.ne(_IGNORED).long()


_WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "labels": _per_row,
    "labels but the first": lambda labels: _per_row(labels[:, 1:] if labels.dim() > 1 else labels),
    "examples": lambda labels: torch.ones_like(_per_row(labels)),
}
"""The weight of each row in a mean over the batch, from its labels."""


_TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
_TOLERANCE_OF_HALVES = 0.05


class LossWeights:
    """Determines whether a model's loss is a mean over labels or examples, or a sum, from losses of parts of a batch.

    Two weightings count as one until a batch shows their difference. ``gather`` concatenates a tensor of each worker,
    so that all decide equally.
    """

    def __init__(self, gather: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor) -> None:
        self._gather = gather
        self._ways = [*_WEIGHTS]
        self._num_batches = self._next_probe = 0
        self._is_divided: bool | None = None

    @contextlib.contextmanager
    def applied(self, parallel: DataParallel, inputs: Mapping[str, Any], has_items: bool) -> Iterator[None]:
        """Makes a module return the loss of the whole batch, although each replica computes its own loss.

        With ``has_items`` the model gets ``num_items_in_batch``, too, and divides by it.
        """
        model, labels = parallel.module, inputs["labels"]
        with contextlib.ExitStack() as stack:
            if has_items:
                stack.enter_context(_forward_of(model, _with_sum))
            elif (way := self._way(model, inputs)) != "examples":
                stack.enter_context(_forward_of(model, _with_weighted_sum(way)))
                total = _WEIGHTS[way](labels).sum()
                divide = functools.partial(_with_loss, change=lambda loss: loss / total)
                stack.enter_context(parallel.register_forward_hook(lambda _module, _args, outputs: divide(outputs)))
                # With these weights, gradients are those of one device.
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "MC3101: the loss gives other gradients")
            yield

    def divides(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        """True if the loss is a sum divided by the number of items, which some models accept and ignore."""
        if self._is_divided is None:
            number = inputs["labels"].numel()
            losses = [_loss(model, inputs, num_items_in_batch=torch.tensor(n)) for n in (number, 2 * number)]
            sizes = torch.stack(losses).double().nan_to_num(0.0, 0.0, 0.0).abs()
            once, twice = self._gather(sizes).view(-1, 2).sum(0).tolist()
            if once == twice == 0.0:
                return True  # a batch without labels shows nothing
            self._is_divided = abs(once - 2 * twice) < abs(once - twice)
        return self._is_divided

    def _way(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
        if len(self._ways) == 1:
            return self._ways[0]
        left = self._ways_left(model, inputs)
        votes = torch.tensor([float(way in left) for way in self._ways], device=inputs["labels"].device)
        agreed = self._gather(votes).view(-1, len(self._ways)).amin(0).tolist()
        before, self._ways = self._ways[0], [way for way, vote in zip(self._ways, agreed, strict=True) if vote]
        if not self._ways:
            self._ways = ["examples"]
            _warn("the model computes it, and it is a mean over neither examples nor labels")
        elif self._next_probe and self._ways[0] != before:
            _warn(f"before, when losses were all the same, it was taken for a mean over {before}, not {self._ways[0]}")
        return self._ways[0]

    def _ways_left(self, model: nn.Module, inputs: Mapping[str, Any]) -> list[str]:
        """The weightings by which the losses of two parts add up to that of the batch; all, if it does not show it."""
        self._num_batches += 1
        weights = [_WEIGHTS[way](inputs["labels"]).double() for way in self._ways]
        if self._num_batches < self._next_probe or not all(each.any() for each in weights):
            return self._ways
        shares = [each / each.sum() for each in weights]
        part = _telling_part(shares)
        if _difference(shares, part) <= _tolerance(model):
            return self._ways
        whole = _loss(model, inputs)
        losses = [(rows, float(_loss(model, _rows(inputs, rows)))) for rows in (part, ~part)]
        means = [sum(float(share[rows].sum()) * loss for rows, loss in losses if share[rows].any()) for share in shares]
        nearest = _nearest(means, whole, _tolerance(model, whole))
        if len(nearest) == len(means):  # such as losses that are all the same
            self._next_probe = 2 * self._num_batches
        return [self._ways[i] for i in nearest]


def _warn(why: str) -> None:
    what = "MC3101: the loss gives other gradients on several devices than on one"
    warn(what, why, "Trainer(..., compute_loss_func=...), which gets the outputs of the whole batch")


def _telling_part(shares: Sequence[torch.Tensor]) -> torch.Tensor:
    one, other = max(itertools.combinations(shares, 2), key=lambda pair: float((pair[0] - pair[1]).abs().sum()))
    return one > other


def _difference(shares: Sequence[torch.Tensor], part: torch.Tensor) -> float:
    of_part = [float(share[part].sum()) for share in shares]
    return max(of_part) - min(of_part)


def _nearest(means: Sequence[float], loss: torch.Tensor, tolerance: float) -> list[int]:
    """Indices of the means nearest to a loss. Several if rounding hides the difference; none if no mean fits."""
    size = abs(float(loss))
    if not math.isfinite(size):
        return [*range(len(means))]
    errors = [abs(mean - float(loss)) if math.isfinite(mean) else math.inf for mean in means]
    rounding = min(16 * torch.finfo(loss.dtype).eps, 4e-3)  # sums are rounded many times, halves once
    is_mean = min(errors) <= tolerance * size
    return [i for i, error in enumerate(errors) if is_mean and error <= min(errors) + rounding * size]


def _tolerance(model: nn.Module, *losses: torch.Tensor) -> float:
    tensors = [*model.parameters(), *losses]
    dtypes = {tensor.dtype for tensor in tensors}
    dtypes |= {
        torch.get_autocast_dtype(kind) for kind in {t.device.type for t in tensors} if torch.is_autocast_enabled(kind)
    }
    return max(_TOLERANCES.get(dtype, _TOLERANCE_OF_HALVES) for dtype in dtypes)


def _rows(inputs: Mapping[str, Any], rows: torch.Tensor) -> dict[str, Any]:
    def is_split(value: Any) -> bool:
        return isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == len(rows)

    return {name: value[rows.to(value.device)] if is_split(value) else value for name, value in inputs.items()}


def _loss(model: nn.Module, inputs: Mapping[str, Any], **others: Any) -> torch.Tensor:
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        with torch.no_grad():
            outputs = model(**inputs, **others)
    finally:
        for module, training in modes.items():
            module.training = training
    loss: torch.Tensor = outputs["loss"] if isinstance(outputs, dict) else outputs[0]
    return loss


def _with_loss(outputs: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    if not isinstance(outputs, dict):
        return (change(outputs[0]), *outputs[1:])
    outputs["loss"] = change(outputs["loss"])
    return outputs


def _with_sum(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
    return _with_loss(type(model).forward(model, *args, **kwargs), summed)


@functools.cache
def _with_weighted_sum(way: str) -> Callable[..., Any]:
    def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight = _WEIGHTS[way](kwargs["labels"]).sum()

        def weighted(mean: torch.Tensor) -> torch.Tensor:
            mean = mean.to(torch.promote_types(mean.dtype, torch.float32))  # the sum may be too large for a half
            return summed(torch.where(weight > 0, mean * weight, 0.0))  # the mean of no labels is not a number

        return _with_loss(type(model).forward(model, *args, **kwargs), weighted)

    return forward


@contextlib.contextmanager
def _forward_of(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    before = model.__dict__.get("forward")
    model.forward = MethodType(forward, model)
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before
