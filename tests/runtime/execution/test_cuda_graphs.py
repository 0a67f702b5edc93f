"""How graphs are asked for of torch.cuda, and the memory that they read."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from recorded_calls import CallRecorder

from mirrorc.runtime.execution import cuda_graphs
from mirrorc.runtime.execution.cuda_graphs import NUM_WARM_UP_STEPS, CudaCapturer, StepGraph

CPU = torch.device("cpu")


class StandInGraph:
    def pool(self) -> tuple[int, int]:
        return (id(self), 0)


def test_captures_share_the_pool_of_one_that_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[Any, dict[str, Any]]] = []

    spoiled: list[Any] = []

    @contextlib.contextmanager
    def graph(own: Any, **options: Any) -> Iterator[None]:
        asked.append((own, options))
        pool = options.get("pool")
        assert pool not in spoiled, "torch refuses a pool whose last capture has failed"
        try:
            yield
        except BaseException:
            spoiled.append(pool)
            raise

    monkeypatch.setattr(torch.cuda, "CUDAGraph", StandInGraph)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"the thread's stream on {device}")
    capturer, calls = CudaCapturer(CPU, 60.0), []
    graphs = [capturer.capture(lambda i=i: calls.append(i)) for i in range(2)]  # type: ignore[misc]
    (anchor, _), *others = asked
    assert [own for own, _ in others] == graphs and anchor not in graphs and calls == [0, 1]
    assert [options.pop("pool", None) for _, options in asked] == [None, anchor.pool(), anchor.pool()]
    with pytest.raises(ZeroDivisionError):
        capturer.capture(lambda: 1 // 0)  # type: ignore[arg-type, return-value]
    failed = asked[-1][0]
    assert all(any(own is kept for kept in capturer._failed) for own in (failed, anchor)), "torch points to them"
    capturer.capture(lambda: calls.append(2))
    assert calls == [0, 1, 2] and asked[-1][1].pop("pool") not in spoiled
    assert asked.pop(3)[1].pop("pool") == anchor.pool()
    shared = {"stream": "the thread's stream on cpu", "capture_error_mode": "thread_local"}
    assert [options for _, options in asked] == [shared] * 5


def halved(box: list[torch.Tensor]) -> torch.Tensor:
    (x,) = box
    box.clear()
    return x.sum() / 2


def run(graph: StepGraph, function: Callable[[list[Any]], torch.Tensor], x: torch.Tensor) -> float:
    graph.load([x])
    if graph.is_due:
        graph.capture(function)
    return graph.run(function).item()


def test_it_warms_up_then_replays_until_something_fixed_changes() -> None:
    recorder = CallRecorder()
    graph = StepGraph(recorder, CPU)
    was_captured = []
    for i in range(2 * NUM_WARM_UP_STEPS + 4):
        layout = int(i > NUM_WARM_UP_STEPS + 1)
        assert graph.is_for(layout=layout) == (i not in (0, NUM_WARM_UP_STEPS + 2))
        if not graph.is_for(layout=layout):
            graph.renew(layout=layout)
        assert run(graph, halved, torch.full((4,), float(i))) == 2.0 * i
        was_captured.append(graph.is_captured)
    once = [False] * NUM_WARM_UP_STEPS + [True] * 2
    assert was_captured == once + once
    assert [own.is_reset for own in recorder.graphs] == [True, False] and recorder.num_waits == 1


def test_a_graph_that_is_released_is_captured_anew() -> None:
    recorder = CallRecorder()
    graph = StepGraph(recorder, CPU)
    graph.renew(layout=0)
    graph.release()
    for i in range(2 * NUM_WARM_UP_STEPS + 2):
        if i == NUM_WARM_UP_STEPS + 1:
            graph.release()
        assert run(graph, halved, torch.full((4,), float(i))) == 2.0 * i
    assert [own.num_replays for own in recorder.graphs] == [1, 1]


def test_a_graph_that_hangs_is_let_go_and_never_freed() -> None:
    recorder = CallRecorder()
    graph = StepGraph(recorder, CPU)
    for _ in range(NUM_WARM_UP_STEPS + 1):
        run(graph, halved, torch.ones(4))
    (own,) = recorder.graphs
    recorder.hangs = True
    graph.release()
    assert not graph.is_captured and not own.is_reset
    assert any(kept is own for kept in cuda_graphs._still_running), "freeing it would free memory that it writes"
    cuda_graphs._still_running.remove(own)


def test_capturers_wait_for_a_gpu_for_so_long_at_most(monkeypatch: pytest.MonkeyPatch) -> None:
    comes = threading.Event()
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: comes.wait(60.0))
    capturer = CudaCapturer(torch.device("cuda", 0), timeout_seconds=0.05)
    assert not capturer.wait()
    comes.set()
    assert CudaCapturer(torch.device("cuda", 0), timeout_seconds=60.0).wait()


def test_an_expanded_argument_is_copied_once() -> None:
    graph = StepGraph(CallRecorder(), CPU)
    for i in range(2):
        x = torch.tensor([[1.0], [2.0]]).add(i).expand(2, 3)
        graph.load([x])
        assert torch.equal(graph._inputs[0], x) and graph._inputs[0].stride() == x.stride()
