"""Observes the operators of a first run that its tensors do not tell of."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch

from mirrorc.capture.diagnostics.lone_examples import is_undefined
from mirrorc.capture.diagnostics.weighted_means import WeightedMean, weighted_mean_of_operator
from mirrorc.messages.source_lines import line_of
from mirrorc.torch_internals import is_users_file, replaced_operators, schema_of, storage_key, writes_argument


class ObservedOperators:
    """Attributes:
    undefined: the line of the first operator whose result is not a number for one example; may be empty.
    means: the means over targets, with the numbers of targets.
    """

    def __init__(self) -> None:
        self.undefined = ""
        self.means: list[WeightedMean] = []
        self._written: set[int] = set()  # keys of memory

    def has_written(self, tensor: torch.Tensor) -> bool:
        """True also for a write through ``.data``, and of the same value."""
        return storage_key(tensor) in self._written

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with replaced_operators(self._note):
            yield

    def _note(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self.undefined and is_undefined(operator, args, kwargs):
            self.undefined = _running_line() or str(operator)
        if (mean := weighted_mean_of_operator(operator, args, _running_line)) is not None:
            self.means.append(mean)
        if writes_argument(operator):
            values = {**dict(zip((a.name for a in schema_of(operator).arguments), args, strict=False)), **kwargs}
            for argument in schema_of(operator).arguments:
                if argument.is_write:
                    self._note_write(values.get(argument.name))
        return NotImplemented

    def _note_write(self, written: Any) -> None:
        for tensor in written if isinstance(written, list | tuple) else [written]:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._written.add(storage_key(tensor))


def _running_line() -> str:
    frames = [frame for frame in traceback.extract_stack() if is_users_file(frame.filename)]
    return line_of(frames[-1]) if frames else ""
