"""Says what forward and loss do in Python that a captured step does not do again."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.errors import UnreadableError
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
    """Something to warn of, once, at a line of the user's."""

    message: str
    filename: str
    lineno: int


def dropped_effects(
    traced: fx.GraphModule, text: str, what: str, again: Callable[[], fx.GraphModule]
) -> tuple[Note, ...]:
    """Notes on what a trace did to Python objects, and on what it printed.

    What is read and changed is state, unless a trace after the change gives the same graph and does not change it again: then it
    was noted once what Python would find out anew, as libraries do in their configurations. What is changed is read as well if a
    trace after the change gives another graph: a list whose length counts, or a key that is looked up where it is missing.

    Args:
        traced: what the tracer gave.
        text: its graph as the tracer gave it, before anything changed it.
        what: the name of the model.
        again: traces the same call once more, in the same way.

    Raises:
        UnreadableError: it assigns an attribute of a module, whose former value it does not read.
        CaptureError: it changes what it reads as well, so that steps would differ.
    """
    effects, read = python_effects_of(traced), guards_of(traced).names
    _refuse_draws(effects.draws, effects.kept_draws, what)
    lasting = []
    for write in effects.writes:
        is_read = write.is_read_by_changing or any(
            name.startswith(beginning) for part in write.parts for beginning in _reads_of(write, part) for name in read
        )
        if not is_read or _OF_A_MODULE.match(write.source) or not _settles(write, text, again):
            _refuse_state(write, is_read, what)
            lasting.append(write)
    _refuse_what_the_next_reads(lasting, text, again, what)
    return tuple(dict.fromkeys([*(_of_write(write, what) for write in lasting), *_of_calls(effects.calls, what)]))


def changed_arguments(traced: fx.GraphModule, call: TrainingCall, what: str) -> tuple[Note, ...]:
    """Notes on containers among the arguments out of which a trace takes items; other changes of containers are refused.

    Replicas get containers of their own, made anew of shards, so that a change would be lost, and read back by no step.

    Raises:
        CaptureError: names the argument and the line.
    """
    effects = python_effects_of(traced)
    paths = call.containers()
    notes: list[Note] = []
    changed = [(paths[container.position], container) for container in effects.changed_arguments]
    for path, container in changed:
        if container.only_loses:
            continue
        raise CaptureError(
            f"forward or loss of {what} changes its argument {path!r}{_where(container.stack)}: each replica has a "
            "container of its own, made for the step, so that the caller's would stay as it is. Remedy: change a copy, as in "
            "dict(batch) or list(states), return what is to last with the output, or keep it in a buffer and write that in place "
            "(self.x.copy_(value))."
        )
    for path, container in changed:
        frame = _users_frame(container.stack) or _UNKNOWN
        notes.append(
            Note(
                f"{what} takes items out of its argument {path!r} ({frame.line}), which stay in yours: each replica has a "
                "container of its own. Take them out of a copy, as in dict(batch), or before the step",
                frame.filename,
                frame.lineno or 0,
            )
        )
    return tuple(notes)


def _where(stack: Sequence[traceback.FrameSummary]) -> str:
    frame = _users_frame(stack)
    return f" at {frame.filename}:{frame.lineno}: {frame.line!r}" if frame is not None else ""


_Stacks = Sequence[Sequence[traceback.FrameSummary]]


def _refuse_draws(draws: _Stacks, kept_draws: _Stacks, what: str) -> None:
    for stack in draws:
        raise CaptureError(
            f"forward or loss of {what} draws a number from Python's random{_where(stack)}, which would be the same in every "
            "step of a captured graph. Remedy: draw it with torch, as in torch.rand(()), or draw it before the step and pass "
            "it as a replicated tensor."
        )
    for stack in kept_draws:
        raise CaptureError(
            f"forward or loss of {what} calls a function that keeps the random numbers that it has drawn (functools.cache)"
            f"{_where(stack)}: a captured step would draw them anew each time. Remedy: call it before the step, and keep the "
            "result in a buffer, or pass it as a replicated tensor."
        )


def _settles(write: PythonWrite, text: str, again: Callable[[], fx.GraphModule]) -> bool:
    """Whether the next trace, after the change, gives the same graph and leaves alone what was changed."""
    if not (write.is_constant and write.can_be_applied):
        return False
    with write.applied():
        second = again()
        later = {(other.source, part) for other in python_effects_of(second).writes for part in other.parts}
    is_same = str(second.graph) == text
    return is_same and later.isdisjoint((write.source, part) for part in write.parts)


def _refuse_what_the_next_reads(
    writes: Sequence[PythonWrite], text: str, again: Callable[[], fx.GraphModule], what: str
) -> None:
    """Refuses changes after which the next trace gives another graph: it has read a length, a key that was not there, an item."""
    known = [write for write in writes if write.can_be_applied]
    if not known or _is_same_after(known, text, again):
        return
    alone = (write for write in known if len(known) == 1 or not _is_same_after([write], text, again))
    _refuse_state(next(alone, known[0]), True, what)


def _is_same_after(writes: Sequence[PythonWrite], text: str, again: Callable[[], fx.GraphModule]) -> bool:
    with contextlib.ExitStack() as stack:
        for write in writes:
            stack.enter_context(write.applied())
        try:
            return str(again().graph) == text
        except Exception:  # noqa: BLE001 - it goes another way, on which it cannot be traced
            return False


def _refuse_state(write: PythonWrite, is_read: bool, what: str) -> None:
    where = _where(write.stack)
    if _OF_A_MODULE.match(write.source):
        name = ".".join(_SUBMODULE.findall(write.source)).removeprefix("model").removeprefix(".")
        owner = f"its module {name!r}" if name else "itself"
        reason = f"assigns an attribute of {owner} (self.x = ...){where}"
        refusal = (
            f"forward of {what} {reason}, which a captured graph does not do again in every step. Remedy: write buffers in place "
            "(self.x.add_(1), self.x.copy_(value)), pass changing values as arguments, use local variables for values of one "
            "call, and return values such as an auxiliary loss."
        )
        raise CaptureError(refusal) if is_read else UnreadableError(refusal, f": forward {reason}")
    if is_read:
        raise CaptureError(
            f"forward or loss of {what} reads and changes {write.words.name}{where}: each step would go on from the last one, "
            "which a captured graph cannot. Remedy: keep it in a buffer and write that in place (self.x.add_(1)), or change it "
            "between steps."
        )


def _reads_of(write: PythonWrite, part: str) -> tuple[str, ...]:
    """How expressions begin that read a part of an object, or of its class."""
    of_class = f"dict(type({write.source}).__dict__)[{part[1:]!r}]" if part.startswith(".") else write.source + part
    return write.source + part, of_class


def _of_write(write: PythonWrite, what: str) -> Note:
    frame = _users_frame(write.stack) or _UNKNOWN
    name, place = write.words
    return Note(
        f"{what} changes {name} in {place or 'forward or loss'} ({frame.line}), which a captured step does not do. "
        "Return what you want to see with the output, keep it in a buffer, or collect it with the plain model between steps",
        frame.filename,
        frame.lineno or 0,
    )


def _of_calls(calls: Sequence[PythonCall], what: str) -> list[Note]:
    notes = []
    for call in calls:
        frame = _users_frame(call.stack)
        if frame is None or not call.repeats or "site-packages" in frame.filename:
            continue  # a library says such things once, if at all
        done = "ran while the step was traced" if call.has_run else "was left out"
        notes.append(
            Note(
                f"{call.name} in {what} {done}: a captured step does not call it ({frame.line}). Call it between steps",
                frame.filename,
                frame.lineno or 0,
            )
        )
    return notes


def _users_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    return next((frame for frame in reversed(stack) if is_users_file(frame.filename)), None)
