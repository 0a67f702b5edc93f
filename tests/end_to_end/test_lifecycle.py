"""Threads begin and end with their step, and nothing of the process is changed on the way."""

import copy
import gc
import importlib
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from selections import exhaustive, slow, slow_but
from tiny_models import make_mlp, mlp_batch
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError

TIMEOUT_SECONDS = 120
PRELUDE = """
import os, signal, sys, threading
signal.signal(signal.SIGINT, signal.default_int_handler)  # who runs the tests in the background may have it ignored
sys.path.insert(0, {tests!r})
import torch
import torch.nn.functional as F
import mirrorc

torch.manual_seed(0)

class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x):
        return self.layer(x)

def make(model):
    optimizer, eager = torch.optim.AdamW(model.parameters(), lr=0.01), mirrorc.Compiler(backend="eager")
    return mirrorc.compile(model, 2, optimizer=optimizer, loss_fn=F.cross_entropy, compiler=eager)

def say(*words):
    print(*words, flush=True)

def device_threads():
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("mirrorc")]

x, y = torch.randn(4, 6), torch.tensor([0, 1, 2, 0])
"""
HOLDING_NET = """
release = threading.Event()

@torch.library.custom_op("mirrorc_tests::hold", mutates_args=())
def hold(x: torch.Tensor) -> torch.Tensor:
    if x[0, 0] > 100:  # in one replica only; the other waits for it in the all-reduce
        say("holding")
        assert release.wait(60)
    return x.clone()

hold.register_fake(torch.empty_like)

class HoldingNet(Net):
    def forward(self, x):
        return self.layer(torch.ops.mirrorc_tests.hold(x))

def on_interrupt(number, frame):
    release.set()
    raise KeyboardInterrupt

signal.signal(signal.SIGINT, on_interrupt)
"""


def script(*parts: str) -> str:
    prelude = PRELUDE.format(tests=str(Path(__file__).parents[1] / "support"))
    return "\n".join([prelude, *(textwrap.dedent(part) for part in parts)])


@contextmanager
def process(*parts: str) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", script(*parts)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as running:
        try:
            yield running
        finally:
            running.kill()


def run(*parts: str) -> tuple[int, str, str]:
    with process(*parts) as running:
        output, errors = running.communicate(timeout=TIMEOUT_SECONDS)
        return running.returncode, output, errors


def device_threads() -> list[str]:
    """Threads of steps. Those of workers (heartbeats) may be left from other tests of this process."""
    names = [thread.name for thread in threading.enumerate() if thread.name.startswith("mirrorc")]
    return sorted(name for name in names if "heartbeats" not in name)


compile_mlp = partial(compiled_step, loss_fn=F.cross_entropy, optimizer=partial(torch.optim.AdamW, lr=0.01))


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    gc.collect()
    assert device_threads() == []
    yield
    gc.collect()
    assert device_threads() == []


def test_the_interpreter_exits_without_close() -> None:
    code, output, errors = run("""
        step = make(Net())
        say(step(x, target=y).item() > 0)
        say(device_threads())
    """)
    assert (code, errors) == (0, "")
    assert output.splitlines() == ["True", "['mirrorc cpu:0', 'mirrorc cpu:1']"]


def test_the_interpreter_exits_after_an_exception() -> None:
    code, _, errors = run("""
        step = make(Net())
        step(x, target=y)
        raise LookupError("the user's own")
    """)
    assert code == 1
    assert errors.splitlines()[-1] == "LookupError: the user's own"
    assert "mirrorc" not in errors.lower()


def test_ctrl_c_during_a_step() -> None:
    with process(
        HOLDING_NET,
        """
        model = HoldingNet()
        step = make(model)
        before = [p.detach().clone() for p in model.parameters()]
        bad = x.clone()
        bad[3, 0] = bad[2, 0] = 1000.0
        try:
            step(bad, target=y)
        except KeyboardInterrupt:
            say("interrupted")
        after = list(model.parameters())
        say("usable", bool(step(x, target=y).isfinite()))
        say("mirrored", all(torch.equal(*v.values) for v in step.variables.values()))
        step.close()
        say("threads", device_threads())
        """,
    ) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "holding\n"
        running.send_signal(signal.SIGINT)
        output, errors = running.communicate(timeout=TIMEOUT_SECONDS)
        assert output.splitlines() == ["interrupted", "usable True", "mirrored True", "threads []"]
        assert (running.returncode, errors) == (0, "")


def test_ctrl_c_that_nobody_catches_ends_the_process() -> None:
    with process("""
        step = make(Net())
        step(x, target=y)
        say("stepping")
        while True:
            step(x, target=y)
    """) as running:
        assert running.stdout is not None
        assert running.stdout.readline() == "stepping\n"
        running.send_signal(signal.SIGINT)
        _, errors = running.communicate(timeout=TIMEOUT_SECONDS)
        assert errors.splitlines()[-1] == "KeyboardInterrupt"
        assert running.returncode in (-signal.SIGINT, 130, 1)


FORK = """
step = make(Net())
{before}
child = os.fork()
if child == 0:
    try:
        step(x, target=y)
    except mirrorc.ExecutionError as error:
        say("forked process" in str(error), "spawn" in str(error))
        sys.exit(7)
    sys.exit(8)
say("exit code", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
say("parent goes on", bool(step(x, target=y).isfinite()))
"""


@pytest.mark.fast
@pytest.mark.parametrize(
    "before", [*slow(("step(x, target=y)",)), *exhaustive(("pass",))], ids=["after a step", "before any step"]
)
def test_a_step_in_a_forked_process_is_refused(before: str) -> None:
    code, output, errors = run(FORK.format(before=before))
    assert output.splitlines() == ["True True", "exit code 7", "parent goes on True"]
    assert (code, errors) == (0, "")


def test_a_forked_data_loader_beside_a_step() -> None:
    code, output, errors = run("""
        step = make(Net())
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), batch_size=2, num_workers=1, multiprocessing_context="fork"
        )
        say([bool(step(a, target=b).isfinite()) for _ in range(2) for a, b in loader])
        step.close()
    """)
    assert output.splitlines() == ["[True, True, True, True]"]
    assert (code, errors) == (0, "")


def test_with_ends_the_threads_also_when_a_step_fails() -> None:
    with pytest.raises(ValueError, match="disagree on dim 0"), compile_mlp(make_mlp(), devices=3) as step:
        assert device_threads() == []
        step(**mlp_batch(6))
        assert device_threads() == ["mirrorc cpu:0", "mirrorc cpu:1", "mirrorc cpu:2"]
        step(mlp_batch(6)["x"], target=mlp_batch(3)["target"])
    assert device_threads() == []


def test_close_ends_the_threads_and_the_model_keeps_its_weights() -> None:
    model = make_mlp()
    step = compile_mlp(model)
    step(**mlp_batch(6))
    expected = model(mlp_batch(6)["x"])
    step.close()
    assert device_threads() == []
    assert torch.equal(model(mlp_batch(6)["x"]), expected)
    torch.optim.SGD(model.parameters(), 0.1).step()


def test_two_steps_have_threads_of_their_own() -> None:
    with compile_mlp(make_mlp()) as first, compile_mlp(make_mlp()) as second:
        losses = [step(**mlp_batch(4)).item() for step in (first, second)]
        assert losses[0] == losses[1]
        assert len(device_threads()) == 4
        first.close()
        assert len(device_threads()) == 2
        assert second(**mlp_batch(4)).item() < losses[1]


@pytest.mark.fast
@pytest.mark.parametrize("backend", slow_but(["eager"], ["eager", "inductor"]))
def test_models_that_draw_nothing_leave_the_generator_alone(backend: str) -> None:
    model = make_mlp()
    before = torch.random.get_rng_state()
    with compiled_step(model, F.cross_entropy, backend=backend) as step:
        step(**mlp_batch(6))
        step(**mlp_batch(6))
    assert torch.equal(torch.random.get_rng_state(), before)


def test_capturing_dropout_draws_nothing() -> None:
    model = make_mlp(dropout=0.5)
    before = torch.random.get_rng_state()
    with compile_mlp(model) as step:
        step.prepare(**mlp_batch(4))
        assert torch.equal(torch.random.get_rng_state(), before)
        step(**mlp_batch(4))
        assert not torch.equal(torch.random.get_rng_state(), before)


@pytest.mark.parametrize("num_threads", [1, 2, 3])
def test_the_callers_number_of_threads_is_unchanged(num_threads: int) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        with compile_mlp(make_mlp()) as step:
            step(**mlp_batch(4))
            assert torch.get_num_threads() == num_threads
            found: list[int] = []
            thread = threading.Thread(target=lambda: found.append(torch.get_num_threads()))
            thread.start()
            thread.join()
            assert found == [num_threads]
        assert torch.get_num_threads() == num_threads
    finally:
        torch.set_num_threads(before)


def test_garbage_collection_ends_the_threads_and_gives_memory_back() -> None:
    model = make_mlp()
    step = compile_mlp(model)
    step(**mlp_batch(4))
    assert len(device_threads()) == 2
    watched = [weakref.ref(step), weakref.ref(model)]
    del step, model
    gc.collect()
    assert device_threads() == [] and [ref() for ref in watched] == [None, None]


def in_background(function: Any) -> threading.Thread:
    thread = threading.Thread(target=function, daemon=True)
    thread.start()
    return thread


class Inbox:
    def __init__(self, inner: Any, first: Callable[[], None]) -> None:
        self.inner, self.first = inner, [first]

    def put(self, order: Any) -> None:
        if self.first:
            self.first.pop()()
        self.inner.put(order)


def before_the_last_job(step: mirrorc.Step, do: Callable[[], None]) -> None:
    assert step._runs.pool is not None
    step._runs.pool._inboxes[1] = Inbox(step._runs.pool._inboxes[1], do)  # type: ignore[call-overload]


def test_closing_while_jobs_are_handed_out_stops_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device that was told to end before it got its job would let the others wait for it."""
    model = make_mlp()
    step = compile_mlp(model)
    step(**mlp_batch(4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    is_stopped, closing, left = threading.Event(), list[threading.Thread](), list[str]()
    stop = step._runs.last.interrupt  # type: ignore[union-attr]
    monkeypatch.setattr(step._runs.last, "interrupt", lambda: (stop(), is_stopped.set()))

    def close() -> None:
        step.close()
        left.extend(device_threads())

    def close_meanwhile() -> None:
        closing.append(in_background(close))
        assert is_stopped.wait(TIMEOUT_SECONDS / 10)

    before_the_last_job(step, close_meanwhile)
    with pytest.raises(ExecutionError, match="MC5003"):
        step(**mlp_batch(4))
    closing[0].join(TIMEOUT_SECONDS)
    assert not closing[0].is_alive() and left == [], "the call is waited for"
    assert all(map(torch.equal, model.parameters(), before))


def test_closing_in_the_callers_thread_lets_the_step_end() -> None:
    """As the handler of a signal may."""
    model = make_mlp()
    step = compile_mlp(model, timeout=5)
    step(**mlp_batch(4))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    before_the_last_job(step, step.close)
    step(**mlp_batch(4))
    assert device_threads() == [] and not any(map(torch.equal, model.parameters(), before))


@pytest.mark.parametrize("num_steps", [1, 40])  # in the devices' threads, and interleaved in the caller's
def test_closing_in_a_hook_of_the_optimizer_lets_the_step_end(num_steps: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_mlp()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step = compiled_step(model, F.cross_entropy, 2, optimizer)
    for _ in range(num_steps):
        step(**mlp_batch(4))
    before, waits = [parameter.detach().clone() for parameter in model.parameters()], list[float]()
    monkeypatch.setattr(step._lock._has_ended, "wait", waits.append)
    optimizer.register_step_post_hook(lambda *_: step.close())
    step(**mlp_batch(4))
    assert device_threads() == [] and not any(map(torch.equal, model.parameters(), before))
    assert waits == [], "it would wait for itself"


@pytest.mark.parametrize("longest_seconds", [TIMEOUT_SECONDS, 0.0])
def test_closing_while_the_step_is_compiled_leaves_no_thread(
    monkeypatch: pytest.MonkeyPatch, longest_seconds: float
) -> None:
    monkeypatch.setattr(importlib.import_module("mirrorc.calls.call_lock"), "_LONGEST_CLOSING_SECONDS", longest_seconds)
    step = compile_mlp(make_mlp())
    step(**mlp_batch(4))
    compiled, closing = step._specializer.specialization_for, list[threading.Thread]()

    def close_meanwhile(*arguments: Any, **options: Any) -> Any:
        found = compiled(*arguments, **options)
        closing.append(in_background(step.close))
        while not step._lock.is_closed:
            threading.Event().wait(0.001)
        if not longest_seconds:  # who closes does not wait, so that the call itself ends the threads
            closing[0].join(TIMEOUT_SECONDS)
        return found

    monkeypatch.setattr(step._specializer, "specialization_for", close_meanwhile)
    with pytest.raises(ExecutionError, match="the step is closed"):
        step(**mlp_batch(6))
    closing[0].join(TIMEOUT_SECONDS)
    assert not closing[0].is_alive() and device_threads() == []


def test_a_step_is_neither_copied_nor_pickled() -> None:
    model = make_mlp()
    with compiled_step(model, F.cross_entropy, optimizer=torch.optim.AdamW) as step:
        for attempt in (copy.copy, copy.deepcopy, pickle.dumps):
            for _ in range(2):
                with pytest.raises(TypeError, match=r"(?s)MC1602: .* cannot be copied or pickled\n.*compile the copy"):
                    attempt(step)
                step(**mlp_batch(6))
        with compiled_step(copy.deepcopy(model), F.cross_entropy, optimizer=torch.optim.AdamW) as other:
            assert other(**mlp_batch(6)).item() == step(**mlp_batch(6)).item()
