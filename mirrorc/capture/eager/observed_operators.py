"""Observes the operators of a first run that its tensors do not tell of."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from mirrorc.capture.diagnostics.lone_examples import is_undefined
from mirrorc.messages.source_lines import line_of
from mirrorc.torch_internals import is_users_file, replaced_operators


class ObservedOperators:
    """Attributes:
    undefined: the line of the first operator whose result is not a number for one example; may be empty.
    """

    def __init__(self) -> None:
        self.undefined = ""

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        with replaced_operators(self._note):
            yield

    def _note(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self.undefined and is_undefined(operator, args, kwargs):
            frames = [frame for frame in traceback.extract_stack() if is_users_file(frame.filename)]
            self.undefined = line_of(frames[-1]) if frames else str(operator)
        return NotImplemented
