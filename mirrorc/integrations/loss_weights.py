"""Weights of the losses that a Hugging Face model computes on each replica, so that they add up to that of the batch."""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import MethodType
from typing import Any

import torch
from torch import nn

from mirrorc.calls.data_parallel import DataParallel
from mirrorc.capture.call.traced_outputs import summed
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import users_stack_level

_IGNORED = -100  # a label that the losses of Hugging Face leave out


def _per_row(labels: torch.Tensor) -> torch.Tensor:
    return labels.ne(_IGNORED).flatten(1).sum(1) if labels.dim() > 1 else labels.ne(_IGNORED).long()


_WEIGHTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "labels": _per_row,
    "labels but the first": lambda labels: _per_row(labels[:, 1:] if labels.dim() > 1 else labels),
    "examples": lambda labels: torch.ones_like(_per_row(labels)),
}
"""For labels, the weight of each row in a mean over the batch."""


class LossWeights:
    """What a model's loss is a mean over, found by losses of halves of a batch, or that it is a sum.

    A batch whose rows all weigh the same by each of the ways that are left decides nothing, and needs no decision.
    """

    def __init__(self) -> None:
        self._ways = [*_WEIGHTS]
        self._is_divided: bool | None = None

    @contextlib.contextmanager
    def applied(self, parallel: DataParallel, inputs: Mapping[str, Any], has_items: bool) -> Iterator[None]:
        """Makes the loss of a module that of the whole batch, while each replica of its model has its own.

        Args:
            inputs: a batch with ``labels``.
            has_items: whether the model gets ``num_items_in_batch`` with it, and divides by that.
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
                # Weighted so, it gives the gradients of one device.
                stack.enter_context(warnings.catch_warnings())
                warnings.filterwarnings("ignore", "MC3101: the loss gives other gradients")
            yield

    def divides(self, model: nn.Module, inputs: Mapping[str, Any]) -> bool:
        """Whether the loss is a sum divided by the number of items; some models take it as one of any keywords, and ignore it."""
        if self._is_divided is None:
            first, second = (_loss(model, inputs, num_items_in_batch=torch.tensor(number)) for number in (1, 2))
            self._is_divided = _are_close(first, 2 * second)
        return self._is_divided

    def _way(self, model: nn.Module, inputs: Mapping[str, Any]) -> str:
        labels = inputs["labels"]
        weights = {way: _WEIGHTS[way](labels).double() for way in self._ways}
        totals = [each.sum() for each in weights.values()]
        shares = [each / total for each, total in zip(weights.values(), totals, strict=True)]
        if not all(totals) or all(torch.allclose(share, shares[0]) for share in shares):
            return self._ways[0]
        half = (len(labels) + 1) // 2
        parts = (slice(None, half), slice(half, None))
        whole = _loss(model, inputs)
        losses = [
            _loss(model, {name: _rows(value, len(labels), part) for name, value in inputs.items()}) for part in parts
        ]

        def mean(weight: torch.Tensor) -> Any:
            pairs = [(weight[part].sum(), loss) for part, loss in zip(parts, losses, strict=True)]
            return sum(of_part * loss for of_part, loss in pairs if of_part) / weight.sum()

        self._ways = [way for way in self._ways if _are_close(whole, mean(weights[way]))]
        if not self._ways:
            self._ways = ["examples"]
            text = message(
                "MC3101: the loss gives other gradients on several devices than on one",
                "the model computes it, and it is a mean over neither examples nor labels",
                "compute_loss_func=, which gets the outputs of the whole batch",
            )
            warnings.warn(text, stacklevel=users_stack_level())
        return self._ways[0]


def _rows(value: Any, number: int, part: slice) -> Any:
    is_split = isinstance(value, torch.Tensor) and value.dim() > 0 and len(value) == number
    return value[part] if is_split else value


def _are_close(loss: torch.Tensor, other: Any) -> bool:
    return bool(torch.isclose(loss, torch.as_tensor(other).to(loss), rtol=1e3 * torch.finfo(loss.dtype).eps, atol=0.0))


def _loss(model: nn.Module, inputs: Mapping[str, Any], **others: Any) -> torch.Tensor:
    """The loss of the plain model."""
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
    """A forward whose loss is added up over replicas."""
    return _with_loss(type(model).forward(model, *args, **kwargs), summed)


@functools.cache
def _with_weighted_sum(way: str) -> Callable[..., Any]:
    """A forward whose loss, times the weight of a replica's labels, is added up over replicas."""

    def forward(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        weight = _WEIGHTS[way](kwargs["labels"]).sum()

        def weighted(mean: torch.Tensor) -> torch.Tensor:
            return summed(torch.where(weight > 0, mean * weight, 0.0))  # the mean of no labels is not a number

        return _with_loss(type(model).forward(model, *args, **kwargs), weighted)

    return forward


@contextlib.contextmanager
def _forward_of(model: nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """Another forward of a model for a while."""
    before = model.__dict__.get("forward")
    model.forward = MethodType(forward, model)
    try:
        yield
    finally:
        del model.forward
        if before is not None:
            model.forward = before
