"""Compressed messages of gradients between workers: the largest elements, or a user-defined payload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

Gradients = Mapping[str, torch.Tensor]
"""Tensors of gradients, by the names of their parameters."""


@dataclass(frozen=True)
class TopK:
    """Top-k compression with error feedback: each worker sends the largest elements of its sum of each bucket, and adds the
    rest to its sum in the next step.

    Attributes:
        ratio: the fraction of a bucket's elements that is sent, more than 0, at most 1. A bucket sends at least one element.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, Real) or isinstance(self.ratio, bool):
            raise TypeError(f"ratio is {self.ratio!r}: give the part of all elements that is sent, such as 0.01")
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"ratio is {self.ratio!r}: give the part of all elements that is sent, above 0 and at most 1"
            )

    def count(self, num_elements: int) -> int:
        """The number of sent elements of ``num_elements``."""
        return min(num_elements, max(1, math.ceil(self.ratio * num_elements)))


class Collectives:
    """Blocking collectives over all workers, for `Payload.exchange`."""

    def __init__(self, group: Any, num_workers: int) -> None:
        self._group, self._num_workers = group, num_workers

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Adds up a contiguous tensor over all workers, in place; all get the same bits.

        Raises:
            ValueError: the tensor is not contiguous.
            ConnectionError: another worker is gone.
        """
        self._run(tensor, lambda: self._group.all_reduce(tensor))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gathers contiguous tensors of all workers, of one shape and dtype, by rank; raises as `all_reduce`."""
        gathered = [torch.empty_like(tensor) for _ in range(self._num_workers)]
        self._run(tensor, lambda: self._group.all_gather(tensor, gathered))
        return gathered

    def _run(self, tensor: torch.Tensor, launch: Callable[[], Any]) -> None:
        if not tensor.is_contiguous():
            raise ValueError(f"a tensor of the strides {tensor.stride()} cannot be sent: give tensor.contiguous()")
        try:
            launch().wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error


class Payload:
    """The base class of user-defined payloads, which encode a worker's gradients in messages and sum them over all workers.

    A subclass is a frozen dataclass. Workers compare the text of their instances, so its fields include everything that must be
    the same on all. The base class sends all gradients whole. ``examples/power_sgd.py`` is an example.

    The gradients of one message are a dict by parameter name. Each has the shape and strides of its parameter; a gradient that
    is split between two messages comes as a 1-D range.
    """

    def num_bytes(self, gradients: Gradients, num_workers: int) -> int:
        """The size of a message, for choices, reports and predictions.

        Args:
            gradients: on the device ``meta``, without values.
            num_workers: the number of senders.

        Returns:
            The bytes that a worker passes to `Collectives.all_reduce`, plus ``num_workers / 2`` times the bytes that it passes
            to `Collectives.all_gather`. If this is 0, or no less than the gradients' bytes, they are sent whole.
        """
        return 0

    def exchange(
        self, gradients: Gradients, sums: Gradients, state: Gradients, collectives: Collectives
    ) -> Gradients | None:
        """Sends the gradients of a message, and computes their sums.

        It runs in a thread of its own during backward; messages take turns, in one order on all workers. All workers must call
        the same collectives, and compute the same bits of the sums: matrix products, and sums over a dimension, differ between
        processors.

        Args:
            gradients: this worker's sums, with the unsent part of earlier steps. The values left in them at return are added to
                the gradients of the next step.
            sums: zeros of the same shapes: write the sums over all workers into them.
            state: this method's last result for these gradients; empty in the first step. Do not write it.

        Returns:
            The ``state`` for the next step: new tensors by the names of gradients, the same on all workers; None for none. If
                the step fails or skips its update, this state and the values left in ``gradients`` are discarded.
                `mirrorc.Step.unsent_state` has both.
        """
        raise NotImplementedError


def check_payload(payload: Payload) -> None:
    """Refuses a payload that workers could not compare by its text, or that sends nothing.

    Raises:
        TypeError: its class is no frozen dataclass, or lacks a method.
    """
    kind = type(payload)
    if "__dataclass_params__" not in vars(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(
            f"compression is an instance of {kind.__qualname__}, which is no frozen dataclass: workers compare the texts of "
            "their payloads, which are to say all of them; put @dataclass(frozen=True) before the class"
        )
    for method in ("num_bytes", "exchange"):
        if getattr(kind, method) is getattr(Payload, method):
            raise TypeError(
                f"compression is an instance of {kind.__qualname__}, which has no {method}() of its own: define it as "
                "mirrorc.compression.Payload says"
            )


_payloads: dict[str, Payload] = {}


def register_payload(payload: Payload) -> str:
    """Registers a payload and returns its text in programs of this process."""
    text = " ".join(repr(payload).split())  # on one line
    _payloads[text] = payload
    return text


def payload_named(text: str) -> Payload | None:
    """The payload registered under this text; None if there is none in this process."""
    return _payloads.get(text)
