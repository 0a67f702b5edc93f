"""Gradient compression between workers: top-k, or a user-defined payload."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from mirrorc.messages.problem import problem

Gradients = Mapping[str, torch.Tensor]
"""Tensors by parameter name."""


@dataclass(frozen=True)
class TopK:
    """Top-k compression with error feedback: each worker sends the largest elements of its gradient sums. The others
    are added in the next step.

    Attributes:
        ratio: the fraction of a bucket's elements to send, above 0 and at most 1; at least one element is sent.
    """

    ratio: float = 0.01

    def __post_init__(self) -> None:
        if not isinstance(self.ratio, Real) or isinstance(self.ratio, bool):
            raise TypeError(
                f"MC1001: ratio is {self.ratio!r}: give the part of all elements that is sent, such as 0.01"
            )
        if not 0 < self.ratio <= 1:
            raise ValueError(
                f"MC1002: ratio is {self.ratio!r}: give the part of all elements that is sent, above 0 and at most 1"
            )

    def count(self, num_elements: int) -> int:
        return min(num_elements, max(1, math.ceil(self.ratio * num_elements)))


class Collectives:
    """Blocking collectives over all workers, for `Payload.exchange`."""

    def __init__(self, group: Any, num_workers: int) -> None:
        self._group, self._num_workers = group, num_workers

    def all_reduce(self, tensor: torch.Tensor) -> None:
        """Sums a contiguous tensor over all workers, in place; all get the same bits.

        Raises:
            ValueError: the tensor is not contiguous.
            ConnectionError: another worker is gone.
        """
        self._run(tensor, lambda: self._group.all_reduce(tensor))

    def all_gather(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Gathers contiguous tensors of one shape and dtype, by rank. Raises as `all_reduce`."""
        gathered = [torch.empty_like(tensor) for _ in range(self._num_workers)]
        self._run(tensor, lambda: self._group.all_gather(tensor, gathered))
        return gathered

    def _run(self, tensor: torch.Tensor, launch: Callable[[], Any]) -> None:
        if not tensor.is_contiguous():
            fix = "give tensor.contiguous() to all_reduce or all_gather"
            raise problem(ValueError, f"MC1507: a tensor of the strides {tensor.stride()} cannot be sent", fix=fix)
        try:
            launch().wait()
        except RuntimeError as error:
            raise ConnectionError(str(error)) from error


class Payload:
    """The base class of payloads, which encode gradients in messages and sum them over workers.

    Subclasses are frozen dataclasses. Workers compare the repr of their instances, so fields must hold all settings. See
    ``examples/power_sgd.py``.

    The gradients of a message are a dict by parameter name. A gradient has the shape and strides of its parameter; if it is
    split between messages, it is 1-D.
    """

    def num_bytes(self, gradients: Gradients, num_workers: int) -> int:
        """The size of a message.

        Args:
            gradients: on the device ``meta``, without values.

        Returns:
            The bytes that a worker passes to `Collectives.all_reduce`, plus ``num_workers / 2`` times the bytes that it
                passes to `Collectives.all_gather`. If 0, or not less than the gradients' bytes, gradients are sent
                whole.
        """
        return 0

    def exchange(
        self, gradients: Gradients, sums: Gradients, state: Gradients, collectives: Collectives
    ) -> Gradients | None:
        """Sends the gradients of a message, and computes their sums.

        It runs in a thread during backward, for one message at a time, in the same order on all workers. All workers
        must call the same collectives and compute the same bits; note that matrix products and reductions differ
        between processors.

        Args:
            gradients: this worker's sums plus the residual of earlier steps. Their values at return are the new
                residual.
            sums: zeros, to be overwritten with the sums over all workers.
            state: the last result of this method for these gradients; empty in the first step. Do not modify it.

        Returns:
            The ``state`` for the next step, equal on all workers: new tensors by parameter name, or None. A failed or
                skipped step discards it, and the new residual. `mirrorc.Step.state_dict` has both.
        """
        raise NotImplementedError


def check_payload(payload: Payload) -> None:
    """Raises TypeError unless the payload is a frozen dataclass with `num_bytes` and `exchange` of its own."""
    kind = type(payload)
    if "__dataclass_params__" not in vars(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise problem(
            TypeError,
            f"MC1507: compression is an instance of {kind.__qualname__}, which is no frozen dataclass",
            "workers compare its repr, which must show all of its fields",
            f"put @dataclass(frozen=True) before class {kind.__qualname__}",
        )
    for method in ("num_bytes", "exchange"):
        if getattr(kind, method) is getattr(Payload, method):
            raise problem(
                TypeError,
                f"MC1507: compression is an instance of {kind.__qualname__}, which has no {method}()",
                fix=f"define {method}() as mirrorc.compression.Payload says",
            )


_payloads: dict[str, Payload] = {}


def register_payload(payload: Payload) -> str:
    """Registers a payload in this process. Returns its name in programs."""
    text = " ".join(repr(payload).split())  # on one line
    _payloads[text] = payload
    return text


def payload_named(text: str) -> Payload | None:
    return _payloads.get(text)
