"""A GPU whose streams run late: first in, first out, each as far behind the host as a test wants."""

from __future__ import annotations

import contextlib
import random
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from mirrorc.runtime.devices import events
from mirrorc.runtime.execution import replica_arguments


class LateEvent:
    def __init__(self, gpu: LateGpu) -> None:
        self._gpu, self.has_happened = gpu, False

    def record(self, stream: LateStream) -> None:
        stream.work.append(self)

    def synchronize(self) -> None:
        self._gpu.run_until(lambda: self.has_happened)


class LateStream:
    """`torch.cuda.Stream`; ``is_held`` keeps it from running anything, as a long kernel does."""

    def __init__(self, gpu: LateGpu) -> None:
        self._gpu = gpu
        self.work: deque[Any] = deque()  # functions to call, events that happen, and pairs ("wait", event)
        self.is_held = False

    def wait_event(self, event: LateEvent) -> None:
        self.work.append(("wait", event))

    def can_go_on(self) -> bool:
        if self.is_held or not self.work:
            return False
        head = self.work[0]
        return not isinstance(head, tuple) or head[1].has_happened

    def go_on(self) -> None:
        head = self.work.popleft()
        if isinstance(head, LateEvent):
            head.has_happened = True
        elif not isinstance(head, tuple):
            head()


class LateGpu:
    """Runs what is queued only when the host waits for something, and then in an order that nothing but waits restricts.

    Its tensors are tensors of the CPU: what was not computed yet is not a number. ``kept``: the streams for which a tensor was
    kept, by its id.
    """

    device = torch.device("cuda", 0)

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self.streams: list[LateStream] = []
        self.kept: dict[int, list[LateStream]] = {}
        self.compute = self.new_stream()
        self._current = self.compute

    def new_stream(self, device: Any = None) -> LateStream:
        self.streams.append(LateStream(self))
        return self.streams[-1]

    @contextlib.contextmanager
    def on(self, stream: LateStream) -> Iterator[None]:
        before, self._current = self._current, stream
        yield
        self._current = before

    def queue(self, work: Callable[[], object]) -> None:
        self._current.work.append(work)

    def record_event(self, device: Any = None) -> LateEvent:
        event = LateEvent(self)
        event.record(self._current)
        return event

    def copied_to(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        """The host's memory is read when the copy runs, not when it is queued."""
        copy = torch.full_like(tensor, torch.nan)
        self.queue(lambda: copy.copy_(tensor))
        return copy

    def run_until(self, is_reached: Callable[[], bool]) -> None:
        while not is_reached():
            able = [stream for stream in self.streams if stream.can_go_on()]
            assert able, "the host waits for what cannot happen before the host goes on"
            self._random.choice(able).go_on()

    def finish(self) -> None:
        self.run_until(lambda: not any(stream.work for stream in self.streams))

    def takes_the_place_of_cuda(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torch.cuda, "Stream", self.new_stream)
        monkeypatch.setattr(torch.cuda, "stream", self.on)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self._current)
        monkeypatch.setattr(events, "record_event", self.record_event)
        for name in ("record_event", "copied_to"):
            monkeypatch.setattr(replica_arguments, name, getattr(self, name))
        monkeypatch.setattr(
            replica_arguments, "reserve_for", lambda t, stream: self.kept.setdefault(id(t), []).append(stream)
        )
