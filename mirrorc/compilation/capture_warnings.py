"""Warnings about captures, each given once."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import users_stack_level


class CaptureWarnings:
    def __init__(self, num_devices: int) -> None:
        self._num_devices, self._has_warned_of_differences = num_devices, False
        self._noted: set[Note] = set()
        self._has_warned_of_ladder = False

    def warn_of_differences(self, differences: Sequence[str]) -> None:
        if differences and not self._has_warned_of_differences:
            self._has_warned_of_differences = True
            text = message(
                f"MC3101: the loss gives other gradients on {self._num_devices} devices than on one, as it does under DDP",
                "; ".join(differences),
                (
                    "reduction='sum', divided by a number that is the same for all shards",
                    "print(mirrorc.check_loss(model, x, target=y, loss_fn=loss_fn)), to see how much",
                ),
            )
            warnings.warn(text, stacklevel=users_stack_level())

    def warn_of_ladder(self, text: str) -> None:
        """Warns of a fallback, unless ``text`` is empty."""
        if text and not self._has_warned_of_ladder:
            self._has_warned_of_ladder = True
            warnings.warn(text, stacklevel=users_stack_level())

    def warn_of_notes(self, notes: Sequence[Note]) -> None:
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                warnings.warn_explicit(note.message, UserWarning, note.filename, note.lineno)
