import gc
import signal
import threading
import weakref

import pytest
import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import Device, parse_devices
from mirrorc.runtime.devices import thread_pool
from mirrorc.runtime.devices.thread_pool import DevicePool

PATIENT = 60.0


def pool_of(num_devices: int, num_threads: int = 1, timeout_seconds: float = PATIENT) -> DevicePool:
    return DevicePool(parse_devices([f"cpu:{i}" for i in range(num_devices)]), num_threads, timeout_seconds)


def threads_of(pool: DevicePool) -> list[threading.Thread]:
    return [thread for _, thread in pool.run([threading.current_thread] * len(pool.devices), lambda: None)]


def no_failure() -> None:
    raise AssertionError("nothing failed")


def test_every_device_runs_its_job_in_a_thread_of_its_own() -> None:
    pool = pool_of(3)
    barrier = threading.Barrier(3)  # passed only if all three run at the same time

    def job(replica: int) -> tuple[int, str]:
        barrier.wait(timeout=PATIENT)
        return replica, threading.current_thread().name

    found = pool.run([lambda r=r: job(r) for r in range(3)], no_failure)  # type: ignore[misc]
    assert found == [(True, (r, f"mirrorc cpu:{r}")) for r in range(3)]
    assert threads_of(pool) == threads_of(pool)
    pool.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="the GPU can be used")
def test_a_thread_that_cannot_use_its_device_says_so_at_once() -> None:
    num_threads = threading.active_count(), torch.get_num_threads()
    with pytest.raises(
        ExecutionError, match=r"the thread of cuda:0 cannot use its device\n  why:  .*(CUDA|NVIDIA)"
    ) as raised:
        DevicePool([Device("cuda:0", torch.device("cuda", 0))], 1, PATIENT)
    assert raised.value.__cause__ is not None, "with the traceback of the thread"
    assert (threading.active_count(), torch.get_num_threads()) == num_threads, "nothing is left of it"


def test_exceptions_come_back_and_the_others_are_woken_once() -> None:
    pool, failed = pool_of(3), threading.Event()
    calls = []
    error = ValueError("mine")

    def fail() -> None:
        raise error

    def wait() -> bool:
        return failed.wait(PATIENT)

    def on_failure() -> None:
        calls.append(1)
        failed.set()

    found = pool.run([wait, fail, fail], on_failure)
    assert found == [(True, True), (False, error), (False, error)] and calls == [1]
    assert pool.run([lambda: 1] * 3, no_failure) == [(True, 1)] * 3
    pool.close()


def test_even_a_system_exit_comes_back() -> None:
    pool = pool_of(1)
    ((succeeded, error),) = pool.run([lambda: exec("raise SystemExit(3)")], lambda: None)
    assert not succeeded and isinstance(error, SystemExit)
    pool.close()


def test_threads_end_on_close() -> None:
    pool = pool_of(2)
    threads = threads_of(pool)
    assert all(thread.is_alive() and thread.daemon for thread in threads)
    pool.close()
    assert not any(thread.is_alive() for thread in threads)
    pool.close()


def test_threads_end_when_the_pool_is_collected() -> None:
    pool = pool_of(2)
    threads, reference = threads_of(pool), weakref.ref(pool)
    del pool
    gc.collect()
    assert reference() is None
    for thread in threads:
        thread.join(timeout=PATIENT)
    assert not any(thread.is_alive() for thread in threads)


def test_threads_keep_their_number_of_intra_op_threads() -> None:
    before = torch.get_num_threads()
    pool = pool_of(2, num_threads=1)
    other = pool_of(2, num_threads=2)

    def job() -> int:
        torch.randn(200, 200) @ torch.randn(200, 200)
        return torch.get_num_threads()

    for _ in range(2):
        assert pool.run([job] * 2, no_failure) == [(True, 1)] * 2
        assert other.run([job] * 2, no_failure) == [(True, 2)] * 2
    assert torch.get_num_threads() == before
    pool.close()
    other.close()


def test_threads_record_no_gradients() -> None:
    pool = pool_of(1)
    assert pool.run([torch.is_grad_enabled], no_failure) == [(True, False)]
    assert torch.is_grad_enabled()
    pool.close()


@pytest.mark.slow
def test_a_job_that_does_not_end_is_named() -> None:
    pool, release = pool_of(2, timeout_seconds=0.2), threading.Event()
    try:
        with pytest.raises(
            ExecutionError, match=r"^MC5007: cpu:1 did not finish the call within 0.2 s\n(?s:.*)Communication\(timeout="
        ):
            pool.run([lambda: 1, lambda: release.wait(PATIENT)], lambda: None)
    finally:
        release.set()
        pool.close()


def test_jobs_and_results_are_not_kept() -> None:
    class Result:
        pass

    pool = pool_of(1)
    ((_, result),) = pool.run([Result], no_failure)
    reference = weakref.ref(result)
    del result
    pool.run([lambda: None], no_failure)
    gc.collect()
    assert reference() is None
    pool.close()


def test_an_interrupt_wakes_the_jobs_and_reaches_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    pool, stopped = pool_of(2), threading.Event()
    take, interrupts = pool._await_a_result, [KeyboardInterrupt()]

    def interrupted_once(*args: object) -> object:
        if interrupts:
            raise interrupts.pop()
        return take(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(pool, "_await_a_result", interrupted_once)
    ended = []

    def job() -> None:
        ended.append(stopped.wait(PATIENT))

    with pytest.raises(KeyboardInterrupt):
        pool.run([job, job], stopped.set)
    assert ended == [True, True]
    pool.close()


def test_a_signal_right_before_a_wait_is_handled_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python handles it when the wait is over, so no wait is long, though a job may be."""
    monkeypatch.setattr(thread_pool, "_LONGEST_SLEEP_SECONDS", 0.01)
    pool, stopped = pool_of(1), threading.Event()
    outbox, before = pool._outbox, signal.signal(signal.SIGUSR1, signal.default_int_handler)

    class Deaf:
        def get(self, timeout: float) -> object:
            assert timeout <= 0.01
            signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
            try:
                return outbox.get(timeout=timeout)
            finally:
                signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGUSR1])

    monkeypatch.setattr(pool, "_outbox", Deaf())

    def job() -> bool:
        signal.pthread_kill(threading.main_thread().ident, signal.SIGUSR1)  # type: ignore[arg-type]
        return stopped.wait(PATIENT)

    try:
        with pytest.raises(KeyboardInterrupt):
            pool.run([job], stopped.set)
        assert stopped.is_set()
    finally:
        signal.signal(signal.SIGUSR1, before)
        pool.close()
