"""Guards on what Python may have read in a trace, which trace some of the later calls again."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.front_ends.front_end import tracing
from mirrorc.capture.python_trace.recorder import Recorded, recorded
from mirrorc.errors import CaptureError

_NUM_COMPARED_AT_FIRST = 3  # calls, with that which was traced
_GROWTH = 4  # how many times as many calls lie behind the next comparison, and the next


class TraceGuards:
    """Watches what Python may have read, and traces the second and the third call again, and then the 12th, 48th, ...

    Args:
        found: what was recorded, and what Python may read.
        call: model and loss, with the plain values of a later call when guards are asked about it.
        leaves: the tensors of the trace; their types are kept.
        decompositions: as for the trace.
    """

    numbers: tuple[int | float, ...] = ()
    draws: Sequence[object] = ()

    def __init__(
        self,
        found: Recorded,
        call: TrainingCall,
        leaves: Sequence[torch.Tensor],
        decompositions: Mapping[Any, Callable[..., Any]],
    ) -> None:
        self._call, self._decompositions = call, decompositions
        self._state, self._listing = found.state, found.listing
        self._passing, self._settled = found.trace.passing, found.changed
        self._types = types_of(leaves)
        self._context = contextvars.copy_context()
        self._num_calls, self._next = 1, 2

    def use_draws(self) -> Callable[[], None]:
        """Nothing is drawn of Python's random."""
        return lambda: None

    def changed_numbers(self) -> list[str]:
        """Numbers are constants of the graph, and programs of their own."""
        return []

    def hold(self) -> bool:
        """Whether a trace would still read what it read, and none of the step has come out otherwise."""
        return not self._call.history.differences and self._state.hold()

    def confirm(self) -> bool:
        """Whether a trace of now is the same, if this is a call that is compared."""
        self._num_calls += 1
        if self._num_calls < self._next:
            return True
        self._next = self._num_calls + 1 if self._num_calls < _NUM_COMPARED_AT_FIRST else _GROWTH * self._num_calls
        difference = self._context.copy().run(self._difference)
        if difference:
            self._call.history.differences.append(difference)
        return not difference

    def broken(self) -> str:
        """What is not as it was."""
        return next(iter((*self._call.history.differences, *self._state.changed())), "")

    def _difference(self) -> str:
        """What differs in a trace of now; empty if nothing does."""
        leaves = [torch.empty_strided(*own[:2], dtype=own[2], device=own[3]) for own in self._types]
        what = type(self._call.model).__name__
        try:
            with tracing(self._call):
                found = recorded(
                    self._call,
                    leaves,
                    self._decompositions,
                    what,
                    passing=self._passing,
                    may_change=self._settled,
                )
        except CaptureError as error:
            return str(error)
        return self._listing.difference(found.listing)


def types_of(leaves: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], ...]:
    """What an empty tensor like each is made with."""
    return tuple((leaf.shape, leaf.stride(), leaf.dtype, leaf.device) for leaf in leaves)
