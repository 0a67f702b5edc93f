"""Warnings about captures, each given once."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence

from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.messages.source_lines import warn

_ITEM = re.compile(r"(?P<list>.*?)\[(?P<index>\d+)\][.\[]")  # in the path of a tensor within an item


class CaptureWarnings:
    def __init__(self, num_devices: int) -> None:
        self._num_devices = num_devices
        self._has_warned_of_differences = self._has_warned_of_ladder = False
        self._noted: set[Note] = set()
        self._listed: set[str] = set()

    def warn_of_listed_examples(self, call: Call, num_examples: int) -> None:
        """A list of containers, such as a detector's targets, may have the batch's length by chance."""
        items: dict[str, set[str]] = {}
        for leaf in call.leaves:
            if leaf.split and (match := _ITEM.match(leaf.path)):
                items.setdefault(match["list"], set()).add(match["index"])
        by_items = {leaf.path for leaf in call.leaves if leaf.is_guess}
        by_rows = {name for name, indices in items.items() if len(indices) == num_examples}
        for name in sorted(by_items | by_rows):
            if self._num_devices > 1 and num_examples > 1 and name not in self._listed:
                self._listed.add(name)
                how = "is split by items" if name in by_items else "is split along dim 0 of each tensor in it"
                warn(
                    f"MC1310: {name!r}, a list of {num_examples} items, {how}",
                    f"the batch has {num_examples} examples, too, which may be a coincidence",
                    (
                        f"mirrorc.examples({name}), if each item is an example",
                        f"mirrorc.replicated({name}), if each device needs all items",
                        f"{f'tuple({name})' if name in by_items else 'nothing'}, if dim 0 of each tensor is the batch",
                    ),
                )

    def warn_of_differences(self, differences: Sequence[str]) -> None:
        if differences and not self._has_warned_of_differences:
            self._has_warned_of_differences = True
            warn(
                f"MC3101: the loss gives other gradients on {self._num_devices} devices than on one, as it does under DDP",
                "; ".join(differences),
                (
                    "reduction='sum', divided by a number that is the same for all shards",
                    "print(mirrorc.check_loss(model, x, target=y, loss_fn=loss_fn)), to see how much",
                ),
            )

    def warn_of_ladder(self, text: str) -> None:
        """No warning if ``text`` is empty."""
        if text and not self._has_warned_of_ladder:
            self._has_warned_of_ladder = True
            warn(text)

    def warn_of_notes(self, notes: Sequence[Note]) -> None:
        for note in notes:
            if note not in self._noted:
                self._noted.add(note)
                warnings.warn_explicit(note.message, UserWarning, note.filename, note.lineno)
