"""The exchange of values between replicas in a run of plain PyTorch."""

from __future__ import annotations

import contextlib
import sys
from types import FrameType
from typing import Any

import torch

from mirrorc.capture.eager.carried_state import CarriedState
from mirrorc.capture.eager.rng_streams import ReplicaStream
from mirrorc.custom_ops.replica_collectives import GATHER
from mirrorc.errors import CaptureError, ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import is_users_file


class RunExchange:
    """Exchanges values with other replicas, which run while this one waits.

    All replicas must exchange at the same line, or in the backward of the same exchange. Otherwise values would match
    only by chance. ``others.meet_at(subject, kind, value, rows)`` exchanges a value with replicas that pass the same
    subject; without a kind, it returns the value itself.
    """

    def __init__(self, others: Any, stream: ReplicaStream | None, state: CarriedState, model_name: str) -> None:
        self.place, self.count, self.number = others.place, others.count, 0
        self._others, self._stream, self._state, self._model_name = others, stream, state, model_name
        self._subjects: dict[int, str] = {}

    def meet(self, kind: str, value: torch.Tensor, rows: int, origin: int | None) -> torch.Tensor:
        if self._state.is_advanced:
            raise problem(ExecutionError, *advances_state(self._model_name))
        self.number += 1
        if origin is None:
            subject = f"{'mirrorc.all_gather' if kind == GATHER else 'mirrorc.all_reduce'}{_line()}"
        else:
            subject = f"the gradient of exchange {origin}, {self._subjects.get(origin, '')}"
        self._subjects[self.number] = subject
        return self._meet(kind, subject, value, rows)

    def end(self, phase: str) -> None:
        """Checks at the end of forward or backward that all replicas have exchanged equally many values."""
        if not self._state.is_advanced:
            self._meet("", f"the end of its {phase}", torch.empty(0), 0)

    def _meet(self, kind: str, subject: str, value: torch.Tensor, rows: int) -> torch.Tensor:
        with self._stream.paused() if self._stream is not None else contextlib.nullcontext():
            return self._others.meet_at(subject, kind, value, rows)


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not is_users_file(frame.f_code.co_filename):
        frame = frame.f_back
    return f" at {frame.f_code.co_filename.rsplit('/', 1)[-1]}:{frame.f_lineno}" if frame is not None else ""


def not_joined(model_name: str) -> CaptureError:
    return problem(
        CaptureError,
        f"MC2503: {model_name} asks for values of all replicas, and did not when it was captured",
        "replicas that ask would wait for those that do not",
        "mirrorc.all_reduce(value) or the like in each call, outside of any if",
    )


def advances_state(model_name: str) -> tuple[str, str, tuple[str, ...]]:
    return (
        f"MC2503: {model_name} asks for values of all replicas as plain PyTorch, and changes Python state",
        "replicas run one after the other there, and none would come to the next exchange",
        ("change the state in your loop, between calls", "keep it in a buffer, self.x.copy_(value)"),
    )
