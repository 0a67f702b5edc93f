"""Python side effects of forward and loss, which a captured step does not repeat."""

from __future__ import annotations

import contextlib
import re
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import fx

from mirrorc.capture.call.traced_loss import BufferPath, TracedLoss
from mirrorc.capture.diagnostics.capture_errors import StateError
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import line_of
from mirrorc.printing.printed_values import dtype_name
from mirrorc.torch_internals import (
    PythonCall,
    PythonWrite,
    guards_of,
    is_users_file,
    parametrization_cache,
    python_effects_of,
)

_OF_A_MODULE = re.compile(r"L\['self'\](\._modules\['[^']+'\])*(\._buffers|\._parameters)?$")
_TABLES = ("._buffers", "._parameters")
_SUBMODULE = re.compile(r"\._modules\['([^']+)'\]")
_E = TypeVar("_E", bound=Exception)
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
    """Warnings about changed Python objects and prints in a trace. Changes of state are refused.

    A changed object is state if the trace also reads it, or if the next trace gives another graph. It is not state if
    the next trace gives the same graph without a change, as for a library's cache.
    """
    effects, read = python_effects_of(traced), guards_of(traced).names
    _refuse_draws(effects.draws, effects.cached_draws, model_name)
    lasting, attributes = list[PythonWrite](), list[PythonWrite]()
    for write in effects.writes:
        is_read = write.is_read_by_changing or any(
            name.startswith(beginning) for part in write.parts for beginning in _reads_of(write, part) for name in read
        )
        if not is_read or _OF_A_MODULE.match(write.source) or not _settles(write, text, again):
            is_attribute = _OF_A_MODULE.match(write.source) is not None
            if is_read or (is_attribute and write.source.endswith(_TABLES)):
                _refuse_state(write, model_name)
            lasting.append(write)
            if is_attribute:
                attributes.append(write)
    _refuse_reads_of_next_trace(lasting, text, again, model_name)
    notes = [_of_write(write, model_name) for write in lasting if write not in attributes]
    notes += _of_calls(effects.calls, model_name)
    if attributes:
        names = dict.fromkeys(part.removeprefix(".") for write in attributes for part in write.parts)
        frame = _users_frame(attributes[0].stack)
        notes.append(Note.at(frame, unkept_attributes(model_name, [*names], frame)))
    return tuple(dict.fromkeys(notes))


def assigned_buffers(traced: fx.GraphModule, call: TracedLoss, model_name: str) -> tuple[BufferPath, ...]:
    """The buffers to which a trace assigns new tensors. Refuses tensors of another shape or dtype."""
    assigned: list[BufferPath] = []
    for write in python_effects_of(traced).writes:
        before = write.owner
        if not (_OF_A_MODULE.match(write.source) and write.source.endswith("._buffers") and isinstance(before, dict)):
            continue
        if not isinstance(write.items, dict) or not all(key in before for key in write.items):
            continue
        path = tuple(_SUBMODULE.findall(write.source))
        for name, value in write.items.items():
            if value is before[name] or not all(isinstance(each, torch.Tensor) for each in (value, before[name])):
                continue
            if sum(each is before[name] for module in call.modules() for each in module._buffers.values()) > 1:
                continue  # the others would keep the former tensor
            if not is_like(value, before[name]):
                full_name = ".".join((*path, name)).removeprefix("model.")
                raise other_buffer(CaptureError, model_name, full_name, value, before[name], users_place(write.stack))
            assigned.append((path, name))
    return tuple(assigned)


def is_like(value: torch.Tensor, buffer: torch.Tensor) -> bool:
    return value.shape == buffer.shape and value.dtype is buffer.dtype and value.device == buffer.device


def other_buffer(
    kind: type[_E], model_name: str, name: str, value: torch.Tensor, buffer: torch.Tensor, at: str = ""
) -> _E:
    kinds = [f"{dtype_name(each.dtype)}{list(each.shape)} on {each.device}" for each in (value, buffer)]
    return problem(
        kind,
        f"MC2304: forward of {model_name} assigns a tensor of {kinds[0]} to its buffer {name!r}",
        f"each buffer keeps its memory, here of {kinds[1]}",
        (f"self.{name}.copy_(value), which keeps its kind", f"self.register_buffer(...) with a tensor of {kinds[0]}"),
        at=at,
    )


def changed_arguments(traced: fx.GraphModule, call: TracedLoss, model_name: str) -> tuple[Note, ...]:
    """Warnings about argument containers from which a trace removes items.

    Other changes are refused, because replicas get copies, and changes of these would be lost.
    """
    paths, notes = call.containers(), list[Note]()
    for container in python_effects_of(traced).changed_arguments:
        path = paths[container.position]
        if not container.only_loses:
            raise problem(
                CaptureError,
                f"MC2302: forward or loss of {model_name} changes its argument {path!r}",
                "each replica has a container of its own, so that yours would stay as it is",
                (
                    "change a copy, dict(batch) or list(states), and return what is to last",
                    "keep it in a buffer, self.x.copy_(value)",
                ),
                at=users_place(container.stack),
            )
        frame = _users_frame(container.stack) or _UNKNOWN
        text = message(
            f"MC3303: {model_name} takes items out of its argument {path!r}, which stay in yours",
            "each replica has a container of its own",
            "batch = dict(batch) in forward, or take them out before the call",
            at=line_of(frame),
        )
        notes.append(Note.at(frame, text))
    return tuple(notes)


def users_place(stack: Sequence[traceback.FrameSummary]) -> str:
    frame = _users_frame(stack)
    return line_of(frame) if frame is not None else ""


def drawn_number(model_name: str, why: str, at: str) -> CaptureError:
    return problem(
        CaptureError,
        f"MC2303: forward or loss of {model_name} draws a number at random outside of torch",
        why,
        ("torch.rand(())", "mirrorc.replicated(torch.tensor(random.random())), as an argument"),
        at=at,
    )


def unkept_attributes(model_name: str, names: Sequence[str], frame: traceback.FrameSummary | None = None) -> str:
    shown = ", ".join(map(repr, names[:5])) + (", ..." if len(names) > 5 else "")
    return message(
        f"MC3304: forward of {model_name} sets attributes of modules ({shown}), which do not reach the model",
        "they last for the call alone, with one value for each replica",
        (
            "model(x), the plain model, if you read them",
            "self.register_buffer('x', ...) once, and self.x.copy_(value) in forward",
        ),
        at=line_of(frame) if frame is not None else "",
    )


def assigned_attribute(model_name: str, name: str, why: str, at: str = "") -> str:
    return message(
        f"MC2301: forward of {model_name} sets {name}",
        why,
        (
            "return it, pass it as an argument, or use a local variable",
            "for what must survive the call: self.register_buffer('x', ...) once, and self.x.copy_(value) in forward",
        ),
        at=at,
    )


def cached_parametrizations(model_name: str, at: str = "") -> str:
    return message(
        f"MC2301: {model_name} caches parametrized weights, torch.nn.utils.parametrize.cached()",
        "the cache is one for all replicas, and each has weights of its own",
        (
            "leave cached() out, in forward and around the call",
            "read a weight that is used several times once, w = self.layer.weight, and compute with F.linear(x, w)",
        ),
        at=at,
    )


_Stacks = Sequence[Sequence[traceback.FrameSummary]]


def _refuse_draws(draws: _Stacks, cached_draws: _Stacks, model_name: str) -> None:
    for stack in draws:
        raise drawn_number(model_name, "a captured graph would have the same number in every call", users_place(stack))
    for stack in cached_draws:
        raise problem(
            CaptureError,
            f"MC2303: forward or loss of {model_name} calls a function that keeps its random numbers (functools.cache)",
            "a captured graph would draw them anew each time",
            (
                "mirrorc.replicated(value), as an argument, of a value drawn before the call",
                "keep its result in a buffer",
            ),
            at=users_place(stack),
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
    _refuse_state(next(alone, known[0]), model_name)


def _is_same_after(writes: Sequence[PythonWrite], text: str, again: Callable[[], fx.GraphModule]) -> bool:
    with contextlib.ExitStack() as stack:
        for write in writes:
            stack.enter_context(write.applied())
        try:
            return str(again().graph) == text
        except Exception:  # noqa: BLE001 - it goes another way, on which it cannot be traced
            return False


def _refuse_state(write: PythonWrite, model_name: str) -> None:
    where = users_place(write.stack)
    if _OF_A_MODULE.match(write.source):
        name = ".".join(_SUBMODULE.findall(write.source)).removeprefix("model").removeprefix(".")
        sets = f"an attribute of {f'its module {name!r}' if name else 'itself'}, self.x = ..."
        refusal = assigned_attribute(model_name, sets, "a compiled call would not set it again", where)
        raise StateError(refusal, f"{f'{where}: ' if where else ''}forward sets {sets}")
    if write.owner is parametrization_cache():
        refusal = cached_parametrizations(model_name, where)
        raise StateError(refusal, f"{f'{where}: ' if where else ''}it caches parametrized weights")
    changes = f"reads and changes {write.words.name}"
    refusal = message(
        f"MC2301: forward or loss of {model_name} {changes}",
        "each call would go on from the last one, which a captured graph cannot",
        ("keep it in a buffer, and write that in place: self.x.add_(1)", "change it in your loop, between calls"),
        at=where,
    )
    raise StateError(refusal, f"{f'{where}: ' if where else ''}it {changes}")


def _reads_of(write: PythonWrite, part: str) -> tuple[str, ...]:
    of_class = f"dict(type({write.source}).__dict__)[{part[1:]!r}]" if part.startswith(".") else write.source + part
    return write.source + part, of_class


def _of_write(write: PythonWrite, model_name: str) -> Note:
    frame = _users_frame(write.stack) or _UNKNOWN
    name, place = write.words
    text = message(
        f"MC3301: {model_name} changes {name} in {place or 'forward or loss'}, which a captured graph does not do",
        "",
        (
            "return it from forward; with mirrorc.compile(..., return_outputs=True) the step returns it, too",
            "self.register_buffer('x', ...) once, and self.x.copy_(value) in forward",
            "model(x), the plain model, in your loop",
        ),
        at=line_of(frame),
    )
    return Note.at(frame, text)


def _of_calls(calls: Sequence[PythonCall], model_name: str) -> list[Note]:
    notes = []
    for call in calls:
        frame = _users_frame(call.stack)
        if frame is None or not call.repeats or "site-packages" in frame.filename:
            continue  # libraries log such things once
        done = "ran once, during capture, and runs in no later call" if call.has_run else "runs in no call"
        text = message(
            f"MC3302: {call.name} in {model_name} {done}",
            "a captured graph consists of tensor operations",
            "call it in your loop, between calls",
            at=line_of(frame),
        )
        notes.append(Note.at(frame, text))
    return notes


def _users_frame(stack: Sequence[traceback.FrameSummary]) -> traceback.FrameSummary | None:
    return next((frame for frame in reversed(stack) if is_users_file(frame.filename)), None)
