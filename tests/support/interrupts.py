"""Interrupts a call at every place where Python may run a signal's handler, without signals, so that each run is the same."""

import dis
import functools
import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import CodeType, FrameType
from typing import Any

_Raise = Callable[[FrameType], None]
# CPython looks for signals at these instructions, when they have been executed
_CHECKING = ("RESUME", "CALL", "CALL_KW", "CALL_FUNCTION_EX", "JUMP_BACKWARD", "POP_JUMP_BACKWARD")
_CAUGHT = "PUSH_EXC_INFO"  # follows an instruction that raised: it has looked for none, and what is raised here Python never ends


@functools.cache
def _names(code: CodeType) -> dict[int, str]:
    return {instruction.offset: instruction.opname for instruction in dis.get_instructions(code)}


class Interrupter:
    """Runs calls and counts the places where this thread may take a signal; ``where`` was the last that was interrupted."""

    def __init__(self, is_traced: Callable[[str], bool] = lambda filename: True) -> None:
        self.where = ""
        self._is_traced = is_traced
        self._num_places, self._place = 0, -1
        self._previous: dict[FrameType, str] = {}
        self._raise: _Raise = interrupt

    def count(self, function: Callable[[], Any]) -> int:
        self.interrupted(function, -1)
        return self._num_places

    def interrupted(self, function: Callable[[], Any], place: int, how: _Raise | None = None) -> Any:
        """The result of a call that is interrupted at a place, if it has as many; raises what comes of it."""
        self._num_places, self._place, self.where, self._raise = 0, place, "", how or interrupt
        self._previous.clear()
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return function()
        finally:
            sys.settrace(before)
            self._previous.clear()

    def _trace(self, frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename == __file__ or not self._is_traced(frame.f_code.co_filename):
            return None
        frame.f_trace_opcodes = True
        if event == "return":
            self._previous.pop(frame, None)
        elif event == "opcode":
            found, now = self._previous.get(frame, ""), _names(frame.f_code)[frame.f_lasti]
            self._previous[frame] = now
            if found.startswith(_CHECKING) and now != _CAUGHT:
                self._at_place(frame)
        return self._trace

    def _at_place(self, frame: FrameType) -> None:
        self._num_places += 1
        if self._num_places == self._place + 1:
            sys.settrace(None)
            self.where = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            self._raise(frame)


def interrupt(frame: FrameType) -> None:
    handler = signal.getsignal(signal.SIGINT)
    assert callable(handler), "a test that interrupts asks for python_handles_interrupts"
    handler(signal.SIGINT, frame)


def fail(frame: FrameType) -> None:
    raise RuntimeError("a failure was put here")


@contextmanager
def python_handles_interrupts() -> Iterator[None]:
    """Within it, Ctrl-C raises KeyboardInterrupt, though who runs the tests may have it ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
