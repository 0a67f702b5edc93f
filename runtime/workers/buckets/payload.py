"""Payloads of packs, sent instead of whole packs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch

from mirrorc.compression import Collectives, Gradients, Payload
from mirrorc.messages.problem import problem
from mirrorc.runtime.workers.transport.lane import PayloadError, SeveralRounds
from mirrorc.torch_internals import GlooGroup


class SentPart(Protocol):
    """The part of a pack that is sent, made when all devices of the worker have written their shares."""

    def launch(self, group: GlooGroup) -> Any:
        """Launches the exchange; returns a work."""

    def take(self, start: int, stop: int, into: torch.Tensor, *, keeps_rest: bool) -> None:
        """Writes elements ``start:stop`` of the sum over all workers into ``into``, 1-D, once for each element.

        With ``keeps_rest``, the pack may keep the residual of these elements.
        """


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
        """Runs the payload, in the lane's thread.

        Raises:
            ConnectionError: another worker is gone.
            PayloadError: the user's code failed.
        """
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

    def take(self, start: int, stop: int, into: torch.Tensor, *, keeps_rest: bool) -> None:
        into.copy_(self._sum[start:stop])
