"""What a worker sends of a pack in place of the whole, and what all workers make of that."""

from __future__ import annotations

from typing import Any, Protocol

import torch

from mirrorc.torch_internals import GlooGroup


class SentPart(Protocol):
    """One pack of one step. It is made where all devices of the worker have written their shares of the pack."""

    def launch(self, group: GlooGroup) -> Any:
        """Launches what sends it; gives a work, see `mirrorc.runtime.workers.transport.lane.Lane.launch`."""

    def take(self, start: int, stop: int, into: torch.Tensor, *, keeps_rest: bool) -> None:
        """When that is done: writes these elements of the sum over all workers into memory, 1-D.

        If it ``keeps_rest``, the pack then has what the worker has not sent of these elements; each element is asked for so once.
        """
