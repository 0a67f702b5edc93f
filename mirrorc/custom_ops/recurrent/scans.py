"""What the operators of recurrent layers share: in which order steps are taken, and sequences of different lengths."""

from __future__ import annotations

from collections.abc import Sequence

import torch

LIBRARY = torch.library.Library("mirrorc", "FRAGMENT")


class Order:
    """The order in which a layer goes through ``[time, batch, ...]``.

    Sequences that are shorter than the time lie at its beginning. A reverse layer begins with the last item of each, so they are
    turned round, each by itself; what follows their ends is computed and not used.

    Args:
        like: a value ``[time, batch, ...]``.
        lengths: of the sequences; None if all are as long as the time.
        reverse: whether time runs backwards.
    """

    def __init__(self, like: torch.Tensor, lengths: torch.Tensor | None, reverse: bool) -> None:
        self._time, self._batch = like.shape[:2]
        self._backwards = reverse and lengths is None
        self._turned: tuple[torch.Tensor, torch.Tensor] | None = None
        self._ends: tuple[torch.Tensor, torch.Tensor] | None = None
        self._beyond: torch.Tensor | None = None
        if lengths is not None:
            lengths = lengths.to(like.device)
            time = torch.arange(self._time, device=like.device).unsqueeze(1)
            examples = torch.arange(self._batch, device=like.device)
            self._beyond = (time >= lengths).unsqueeze(2)
            self._ends = (lengths - 1, examples)
            if reverse:
                self._turned = (torch.where(time < lengths, lengths - 1 - time, time), examples)

    def turned(self, value: torch.Tensor) -> torch.Tensor:
        """A value in the order of steps, or one in the order of steps in that of time."""
        return value if self._turned is None else value[self._turned]

    def steps(self) -> Sequence[int]:
        """The steps in their order."""
        return range(self._time - 1, -1, -1) if self._backwards else range(self._time)

    def previous(self, states: torch.Tensor, first: torch.Tensor) -> torch.Tensor:
        """The states before each step, where the first is given."""
        parts = (states[1:], first.unsqueeze(0)) if self._backwards else (first.unsqueeze(0), states[:-1])
        return torch.cat(parts)

    def last(self, states: torch.Tensor) -> torch.Tensor:
        """A copy of the states after the last step of each sequence."""
        if self._ends is not None:
            return states[self._ends]
        return states[self.steps()[-1]].clone()

    def clear(self, states: torch.Tensor) -> torch.Tensor:
        """Writes zeros behind the ends of sequences."""
        return states if self._beyond is None else states.masked_fill_(self._beyond, 0.0)

    def gradients(self, of_states: torch.Tensor | None, of_last: torch.Tensor) -> list[torch.Tensor] | None:
        """For each step, what its state gets of gradient from what the layer gives, where lengths are known.

        Args:
            of_states: the gradient of the states, in the order of time; None if only the last ones are given.
            of_last: the gradient of the last states.
        """
        if self._beyond is None or self._ends is None:
            return None if of_states is None else list(of_states.unbind())
        if of_states is None:
            given = of_last.new_zeros(self._time, *of_last.shape)
        else:
            given = self.turned(of_states).masked_fill(self._beyond, 0.0)
        given[self._ends] += of_last
        return list(given.unbind())

    def after(self, of_last: torch.Tensor) -> torch.Tensor:
        """The gradient that the last step begins with."""
        return of_last if self._ends is None else torch.zeros_like(of_last)


def flat(value: torch.Tensor) -> torch.Tensor:
    """Time and batch as one dimension."""
    return value.reshape(-1, value.shape[-1])
