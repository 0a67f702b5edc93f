"""Python side effects of forward and loss, which a captured step does not repeat."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.capture_errors import UnreadableError
from mirrorc.errors import CaptureError
from mirrorc.torch_internals import (
    PythonCall,
    PythonWrite,
    guards_of,
    is_users_file,
    python_effects_of,
)

_OF_A_MODULE = re.compile(r"L\['self'\](\._modules\['[^']+'\])*(\._buffers|\._parameters)?$")
_SUBMODULE = re.compile(r"\._modules\['([^']+)'\]")
_UNKNOWN = traceback.FrameSummary("<unknown>", 0, "forward", line="")


@dataclass(frozen=True)
class Note:
    """A warning to issue once, at a line of the user's code."""

    message: str
    filename: str = "<unknown>"
    lineno: int = 0

    @classmethod
    def at(cls, frame: traceback.FrameSummary | None, message: str) -> Note:
        return cls(message, frame.filename, frame.lineno or 0) if frame is not None else cls(message)


def dropped_effects(
    traced: fx.GraphModule, text: str, model_name: str, again: Callable[[], fx.GraphModule]
) -> tuple[Note, ...]:
    """Notes on changed Python objects and prints in a trace; refuses changes of state.

    A changed object is state if the trace also reads it, or if the next trace gives another graph. An object that
    settles is not state: the next trace gives the same graph without the change, as where a library caches facts.
    """
    effects, read = python_effects_of(traced), guards_of(traced).names
    _refuse_draws(effects.draws, effects.cached_draws, model_name)
    lasting = []
    for write in effects.writes:
        is_read = write.is_read_by_changing or any(
            name.startswith(beginning) for part in write.parts for beginning in _reads_of(write, part) for name in read
        )
        if not is_read or _OF_A_MODULE.match(write.source) or not _settles(write, text, again):
            _refuse_state(write, is_read, model_name)
            lasting.append(write)
    _refuse_reads_of_next_trace(lasting, text, again, model_name)
    return tuple(
        dict.fromkeys([*(_of_write(write, model_name) for write in lasting), *_of_calls(effects.calls, model_name)])
    )


def changed_arguments(traced: fx.GraphModule, call: TrainingCall, model_name: str) -> tuple[Note, ...]:
    """Notes on argument containers from which a trace removes items.

    Refuses other changes: they would be lost, because replicas get copies.
    """
    effects = python_effects_of(traced)
    paths = call.containers()
    notes: list[Note] = []
    changed = [(paths[container.position], container) for container in effects.changed_arguments]
    for path, container in changed:
        if container.only_loses:
            continue
        raise CaptureError(
            f"forward or loss of {model_name} changes its argument {path!r}{users_place(container.stack)}: each replica has a "
            "container of its own, made for the step, so that the caller's would stay as it is. Remedy: change a copy, as in "
            "dict(batch) or list(states), return what is to last with the output, or keep it in a buffer and write that in place "
            "(self.x.copy_(value))."
        )
    for path, container in changed:
        frame = _users_frame(container.stack) or _UNKNOWN
        notes.append(
            Note.at(
                frame,
                f"{model_name} takes items out of its argument {path!r} ({frame.line}), which stay in yours: each replica has a "
                "container of its own. Take them out of a copy, as in dict(batch), or before the step",
            )
        )
    return tuple(notes)


def users_place(stack: Sequence[traceback.FrameSummary]) -> str:
    """The user's innermost line, as the continuation of a sentence; empty if no frame is the user's."""
    frame = _users_frame(stack)
    return f" at {frame.filename}:{frame.lineno}: {frame.line!r}" if frame is not None else ""


_Stacks = Sequence[Sequence[traceback.FrameSummary]]


def _refuse_draws(draws: _Stacks, cached_draws: _Stacks, model_name: str) -> None:
    for stack in draws:
        raise CaptureError(
            f"forward or loss of {model_name} draws a number from Python's random{users_place(stack)}, which would be the same "
            "in every step of a captured graph. Remedy: draw it with torch, as in torch.rand(()), or draw it before the step and "
            "pass it as a replicated tensor."
        )
    for stack in cached_draws:
        raise CaptureError(
            f"forward or loss of {model_name} calls a function that keeps the random numbers that it has drawn (functools.cache)"
            f"{users_place(stack)}: a captured step would draw them anew each time. Remedy: call it before the step, and keep "
            "the result in a buffer, or pass it as a replicated tensor."
        )


def _settles(write: PythonWrite, text: str, again: Callable[[], fx.GraphModule]) -> bool:
    if not (write.is_constant and write.can_be_applied):
        return False
    with write.applied():
        second = again()
        later = {(other.source, part) for other in python_effects_of(second).writes for part in other.parts}
    is_same = str(second.graph) == text
    return is_same and later.isdisjoint((write.source, part) for part in write.parts)


def _refuse_reads_of_next_trace(
    writes: Sequence[PythonWrite], text: str, again: Callable[[], fx.GraphModule], model_name: str
) -> None:
    known = [write for write in writes if write.can_be_applied]
    if not known or _is_same_after(known, text, again):
        return
    alone = (write for write in known if len(known) == 1 or not _is_same_after([write], text, again))
    _refuse_state(next(alone, known[0]), True, model_name)


def _is_same_after(writes: Sequence[PythonWrite], text: str, again: Callable[[], fx.GraphModule]) -> bool:
    with contextlib.ExitStack() as stack:
        for write in writes:
            stack.enter_context(write.applied())
        try:
            return str(again().graph) == text
        except Exception:  # noqa: BLE001 - it goes another way, on which it cannot be traced
            return False


def _refuse_state(write: PythonWrite, is_read: bool, model_name: str) -> None:
    where = users_place(write.stack)
    if _OF_A_MODULE.match(write.source):
        name = ".".join(_SUBMODULE.findall(write.source)).removeprefix("model").removeprefix(".")
        owner = f"its module {name!r}" if name else "itself"
        reason = f"assigns an attribute of {owner} (self.x = ...){where}"
        refusal = (
            f"forward of {model_name} {reason}, which a captured graph does not do again in every step. Remedy: write buffers "
            "in place (self.x.add_(1), self.x.copy_(value)), pass changing values as arguments, use local variables for values "
            "of one call, and return values such as an auxiliary loss."
        )
        raise CaptureError(refusal) if is_read else UnreadableError(refusal, f": forward {reason}")
    if is_read:
        raise CaptureError(
            f"forward or loss of {model_name} reads and changes {write.words.name}{where}: each step would go on from the last "
            "one, which a captured graph cannot. Remedy: keep it in a buffer and write that in place (self.x.add_(1)), or "
            "change it between steps."
        )


def _reads_of(write: PythonWrite, part: str) -> tuple[str, ...]:
    of_class = f"dict(type({write.source}).__dict__)[{part[1:]!r}]" if part.startswith(".") else write.source + part
    return write.source + part, of_class


def _of_write(write: PythonWrite, model_name: str) -> Note:
    frame = _users_frame(write.stack) or _UNKNOWN
    name, place = write.words
    return Note.at(
        frame,
        f"{model_name} changes {name} in {place or 'forward or loss'} ({frame.line}), which a captured step does not do. "
        "Return what you want to see with the output, keep it in a buffer, or collect it with the plain model between steps",
    )


def _of_calls(calls: Sequence[PythonCall], model_name: str) -> list[Note]:
    notes = []
    for call in calls:
        frame = _users_frame(call.stack)
        if frame is None or not call.repeats or "site-packages" in frame.filename:
            continue  # libraries log such things once
        done = "ran while the step was traced" if call.has_run else "was left out"
        notes.append(
            Note.at(
                frame,
                f"{call.name} in {model_name} {done}: a captured step does not call it ({frame.line}). Call it between steps",
            )
        )
    return notes


def _users_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    return next((frame for frame in reversed(stack) if is_users_file(frame.filename)), None)
