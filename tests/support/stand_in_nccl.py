"""What takes the place of NCCL where there is no GPU: on streams that run late, and between processes over gloo."""

import contextlib
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from late_streams import LateEvent, LateGpu

from mirrorc.ir import links
from mirrorc.runtime.workers.transport import lane
from mirrorc.torch_internals import GlooGroup, NcclGroup

CPU = torch.device("cpu")
_LONGEST_SECONDS = 120.0


class Options:
    def __init__(self, is_high_priority_stream: bool = False) -> None:
        self.is_high_priority_stream, self._timeout = is_high_priority_stream, None


def nccl_on(gpu: LateGpu, num_workers: int) -> type:
    """`ProcessGroupNCCL` of a worker whose GPU runs late; the other workers have what this one has, so sums are multiples.

    Its works begin when the stream that is current at their launch has come as far, and run on a stream of its own.
    """

    class Group:
        Options = Options
        made: list[Any] = []  # noqa: RUF012 - for the test that made the class

        def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
            self.options, self.size, self.is_aborted = options, size, threading.Event()
            self.stream = gpu.new_stream()
            self.made.append(self)

        def allreduce(self, tensors: Sequence[torch.Tensor]) -> Any:
            (tensor,) = tensors
            self.stream.wait_event(gpu.record_event())
            with gpu.on(self.stream):
                gpu.queue(lambda: tensor.mul_(num_workers))
                return Waited(gpu.record_event())

        def abort(self) -> None:
            self.is_aborted.set()

    class Waited:
        def __init__(self, event: LateEvent) -> None:
            self._event = event

        def wait(self) -> None:
            torch.cuda.current_stream().wait_event(self._event)

    return Group


@contextlib.contextmanager
def nccl_over_gloo() -> Iterator[None]:
    """Lets workers with a CPU each train as those with a GPU each, over the link nccl-workers, for which gloo works."""
    words_or_buckets = itertools.cycle((False, True))  # a team opens its lanes in this order
    opened: Callable[..., Any] = lane.opened_group

    def open_group(store: Any, rank: int, num_workers: int, seconds: float, device: torch.device) -> Any:
        is_for_buckets = next(words_or_buckets)
        return (
            NcclGroup(store, rank, num_workers, device)
            if is_for_buckets
            else opened(store, rank, num_workers, seconds, device)
        )

    link = links.link_named("nccl-workers")
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(links._links, link.name, replace(link, device_type="cpu", preference=2))
        patch.setattr(lane, "opened_group", open_group)
        patch.setattr(torch.distributed, "ProcessGroupNCCL", _GlooAsNccl, raising=False)
        patch.setattr(torch.cuda, "Stream", lambda device=None, priority=0: _Stream())
        patch.setattr(torch.cuda, "stream", _Stream.made_current)
        patch.setattr(torch.cuda, "Event", lambda **_: _Event())
        yield


class _Stream:
    """A stream that holds the works for which it waits."""

    _current = threading.local()

    def __init__(self) -> None:
        self.works: list[Any] = []

    @contextlib.contextmanager
    def made_current(self) -> Iterator[None]:
        self._current.stream = self
        yield
        del self._current.stream


class _Event:
    def record(self, stream: _Stream) -> None:
        self._works = list(stream.works)
        stream.works.clear()

    def synchronize(self) -> None:
        for work, is_aborted in self._works:
            try:
                work.wait()
            except RuntimeError:  # NCCL tells nothing of a worker that is gone: its kernel goes on waiting
                assert is_aborted.wait(_LONGEST_SECONDS)


class _GlooAsNccl:
    Options = Options

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._group, self._is_aborted = GlooGroup(store, rank, size, _LONGEST_SECONDS), threading.Event()

    def allreduce(self, tensors: Sequence[torch.Tensor]) -> Any:
        launched = self._group.all_reduce(*tensors), self._is_aborted

        class Waited:
            def wait(self) -> None:
                _Stream._current.stream.works.append(launched)

        return Waited()

    def abort(self) -> None:
        self._is_aborted.set()
        self._group.cut()
