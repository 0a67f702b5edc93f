"""Payloads of packs, sent instead of whole packs: a user's, or the top-k elements with their indices."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mirrorc.analysis.communication.compressed_sums import bytes_of_largest, index_dtype
from mirrorc.compression import Collectives, Gradients, Payload
from mirrorc.messages.problem import problem
from mirrorc.runtime.workers.transport.lane import PayloadError, SeveralRounds
from mirrorc.torch_internals import GlooGroup

_SAMPLED = 61  # stride of the sample for a bound; odd, as sizes of layers are often powers of two
_MOST_CANDIDATES = 8  # for each element that is wanted; with more, looking at them again would take as long as sorting


class SentPart(Protocol):
    """The part of a pack that is sent, made when all devices of the worker have written their shares."""

    def launch(self, group: GlooGroup) -> Any:
        """Launches the exchange; returns a work."""

    def take(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Writes elements ``start:stop`` of the sum over all workers into ``into``, 1-D, once for each element."""


class SentPayload(SeveralRounds):
    """A `SentPart` that a user's `mirrorc.compression.Payload` encodes.

    ``whole`` is this worker's sum of the pack plus the residual. The lane's thread encodes, exchanges and decodes, so
    that all workers launch the rounds of all packs in the same order.
    """

    def __init__(
        self,
        payload: Payload,
        whole: torch.Tensor,
        gradients_of: Callable[[torch.Tensor], Gradients],
        state: Gradients,
        keep: Callable[[Gradients], object],
        num_workers: int,
    ) -> None:
        self._payload, self._whole, self._gradients_of = payload, whole, gradients_of
        self._state, self._keep, self._num_workers = state, keep, num_workers
        self._sum = torch.zeros_like(whole)

    def launch(self, group: GlooGroup) -> Any:
        """Returns this object; its `wait` launches the rounds."""
        self._group = group
        return self

    def wait(self) -> None:
        """Runs the payload, in the lane's thread."""
        try:
            with torch.no_grad():
                self._exchange(Collectives(self._group, self._num_workers))
        except ConnectionError:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {error}"
            raise problem(
                PayloadError,
                f"MC1507: exchange() of compression={self._payload!r} failed",
                reason,
                "mend that method, or leave compression= out",
            ) from error

    def _exchange(self, collectives: Collectives) -> None:
        gradients = self._gradients_of(self._whole)
        state = {name: self._state[name] for name in gradients if name in self._state}
        new = self._payload.exchange(gradients, self._gradients_of(self._sum), state, collectives) or {}
        if others := [name for name in new if name not in gradients]:
            raise ValueError(
                f"MC1507: exchange() returned a state for {others[0]!r}, which is none of {', '.join(gradients)}"
            )
        self._keep({name: value.detach() for name, value in new.items()})

    def take(self, start: int, stop: int, into: torch.Tensor) -> None:
        into.copy_(self._sum[start:stop])


class LargestElements:
    """A `SentPart` of the top-k elements of a worker's pack, 1-D, which it zeroes there. NaN is the largest."""

    def __init__(self, whole: torch.Tensor, count: int, num_workers: int) -> None:
        self._count, self._dtype, self._places = count, whole.dtype, index_dtype(whole.numel())
        self._num_elements = whole.numel()
        size = bytes_of_largest(count, whole.numel(), whole.dtype)
        self.message, *self.gathered = (whole.new_empty(size, dtype=torch.uint8) for _ in range(1 + num_workers))
        chosen = places_of_largest(whole.abs(), count)
        elements, places = self._parts(self.message)
        torch.index_select(whole, 0, chosen, out=elements)
        places.copy_(chosen)
        whole.index_fill_(0, chosen, 0)

    def launch(self, group: GlooGroup) -> Any:
        return group.all_gather(self.message, self.gathered)

    def take(self, start: int, stop: int, into: torch.Tensor) -> None:
        """Adds up the workers' elements in the order of ranks. The pack already has the residual."""
        into.zero_()
        for elements, places in self.of_workers():
            if stop - start < self._num_elements:
                is_inside = (places >= start) & (places < stop)
                elements, places = elements[is_inside], places[is_inside] - start
            into.index_add_(0, places, elements)

    def of_workers(self) -> Sequence[tuple[torch.Tensor, torch.Tensor]]:
        return [self._parts(message) for message in self.gathered]

    def _parts(self, message: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The elements and indices in a message; the wider dtype comes first, for alignment."""
        kinds = sorted((self._dtype, self._places), key=lambda dtype: -dtype.itemsize)
        end = self._count * kinds[0].itemsize
        first, second = message[:end].view(kinds[0]), message[end:].view(kinds[1])
        return (first, second) if kinds[0] is self._dtype else (second, first)


def places_of_largest(magnitudes: torch.Tensor, count: int) -> torch.Tensor:
    """Indices of the ``count`` largest of ``magnitudes`` (1-D, non-negative), in any order; NaN is the largest.

    On a CPU, ``torch.topk`` takes five times as long on all elements, because it moves pairs. A bound from a sample
    therefore first selects slightly too many candidates. With too few or far too many, ``torch.topk`` runs on all
    elements.
    """
    sample = magnitudes[::_SAMPLED]
    expected = count / _SAMPLED
    sampled = math.ceil(expected + 4 * math.sqrt(expected) + 4)
    if magnitudes.device.type != "cpu" or sampled > sample.numel():
        return magnitudes.topk(count, sorted=False).indices
    bound = sample.topk(sampled, sorted=False).values.min()
    candidates = (magnitudes < bound).logical_not_().nonzero().view(-1)
    if not count <= candidates.numel() <= _MOST_CANDIDATES * count:
        return magnitudes.topk(count, sorted=False).indices
    return candidates[magnitudes[candidates].topk(count, sorted=False).indices]
