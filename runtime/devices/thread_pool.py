"""A persistent thread for each device."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.runtime.devices.process_memory import cache_freed_memory
from mirrorc.torch_internals import is_profiled, seen_by_profiler

Job = Callable[[], Any]
Result = tuple[bool, Any]  # (True, result) or (False, exception)
Results = list[Result | None]  # by device; None until its job ends
Order = tuple[dict[int, Job], int, list[Any]] | None  # jobs by replica, the replica, and results; None ends the thread
Message = tuple[int, Exception] | None  # a device whose thread failed to start, and why; None for anything else
_STOP = None
_LONGEST_SLEEP_SECONDS = 1.0  # Python handles a signal that comes right before a wait only after it


class DevicePool:
    """A thread per device. Threads end with `close`, with the pool, or with the interpreter.

    Args:
        num_threads: threads of torch's operators within each CPU device.
        timeout_seconds: the longest duration of a job.
    """

    def __init__(self, devices: Sequence[Device], num_threads: int, timeout_seconds: float) -> None:
        self.devices = devices
        cache_freed_memory()
        self.num_threads = num_threads
        self.timeout_seconds = timeout_seconds
        self._inboxes: list[queue.SimpleQueue[Order]] = [queue.SimpleQueue() for _ in devices]
        self._outbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        before = torch.get_num_threads()
        self._threads: list[threading.Thread] = []
        self.is_stuck = False
        self._finalizer = weakref.finalize(self, _stop, self._inboxes, self._threads)  # also at interpreter exit
        for replica, device in enumerate(devices):
            arguments = (replica, device.torch_device, num_threads, self._inboxes[replica], self._outbox)
            thread = threading.Thread(target=_serve, args=arguments, name=f"mirrorc {device.name}", daemon=True)
            self._threads.append(thread)
        try:
            for thread in self._threads:
                thread.start()
            for _ in devices:
                self._await_ready()
        except BaseException:
            self.close()
            raise
        finally:
            torch.set_num_threads(before)  # the threads' setting reaches threads that start later: put it back

    def _await_ready(self) -> None:
        try:
            message = self._next_message(time.monotonic() + self.timeout_seconds)
        except queue.Empty:
            raise problem(
                ExecutionError,
                f"MC5007: the devices' threads were not ready within {self.timeout_seconds:g} s",
                "a GPU hangs, or the machine is that busy",
                (f"communication=mirrorc.Communication(timeout={2 * self.timeout_seconds:g})", "nvidia-smi, for a GPU"),
            ) from None
        if message is not None:
            replica, error = message
            raise problem(
                ExecutionError,
                f"MC5007: the thread of {self.devices[replica]} cannot use its device",
                f"{type(error).__name__}: {error}",
                ("mirrorc doctor, which tries all devices", "leave this device out of devices="),
            ) from error

    def run(self, jobs: Sequence[Job], on_failure: Callable[[], None], results: Results | None = None) -> list[Result]:
        """Runs one job on each device, in the caller's context. Returns (True, result) or (False, exception) for each.

        Args:
            on_failure: called at the first failure or an interrupt; it must wake waiting jobs.
            results: an empty list that receives the results, also in case of an interrupt.

        Raises:
            ExecutionError: a job did not end in time.
            BaseException: the caller's interrupt, after all jobs have ended.
        """
        self._check_free()
        results = [] if results is None else results
        results.extend([None] * len(jobs))
        context = contextvars.copy_context()
        jobs = [functools.partial(context.copy().run, job) for job in jobs]  # one thread at a time enters a context
        if is_profiled():
            jobs = [seen_by_profiler(job) for job in jobs]
        waiting, deadline = dict(enumerate(jobs)), time.monotonic() + self.timeout_seconds
        interruption: BaseException | None = None
        while True:
            try:
                for replica, inbox in enumerate(self._inboxes) if waiting else ():
                    inbox.put((waiting, replica, results))
                self._await_results(results, deadline, on_failure, interruption is not None)
                break
            except ExecutionError:
                self.is_stuck = True
                on_failure()
                raise
            except BaseException as error:
                if interruption is not None:
                    self.is_stuck = True
                    raise
                interruption = error
        if interruption is not None:
            raise interruption
        return [result for result in results if result is not None]

    def _await_results(self, results: Results, until: float, on_failure: Callable[[], None], is_stopped: bool) -> None:
        has_called = False
        while None in results:
            if not has_called and (is_stopped or any(result and not result[0] for result in results)):
                on_failure()
                has_called = True
            self._await_a_result(until, results)

    def mark_stuck(self) -> None:
        """Refuses further jobs, because a device may still use the memory of the last ones."""
        self.is_stuck = True

    def wake(self) -> None:
        self._outbox.put(None)

    def run_here(self, job: Job) -> Any:
        """Runs a job of CPU devices in the calling thread, with the settings of a device's thread."""
        self._check_free()
        before = torch.get_num_threads()
        try:
            torch.set_num_threads(self.num_threads)
            with torch.no_grad():
                return job()
        finally:
            torch.set_num_threads(before)

    def _check_free(self) -> None:
        if self.is_stuck:
            raise problem(
                ExecutionError,
                "MC5007: a device is still busy with an earlier call that was given up",
                fix="close() the step or module, and compile anew",
            )

    def _await_a_result(self, deadline: float, results: Sequence[Any]) -> None:
        """An interrupt may lose the message but no result: the threads write ``results`` themselves."""
        try:
            self._next_message(deadline)
        except queue.Empty:
            names = ", ".join(str(d) for d, result in zip(self.devices, results, strict=True) if result is None)
            raise problem(
                ExecutionError,
                f"MC5007: {names} did not finish the call within {self.timeout_seconds:g} s",
                "an operator hangs, or a call takes that long",
                (
                    f"communication=mirrorc.Communication(timeout={2 * self.timeout_seconds:g})",
                    f"py-spy dump --pid {os.getpid()}, while it hangs, which shows the operator",
                    "close() the step or module, and compile anew",
                ),
            ) from None

    def _next_message(self, deadline: float) -> Message:
        """Interruptible by Ctrl-C. Raises `queue.Empty` at the deadline."""
        while True:
            left = max(0.0, deadline - time.monotonic())
            try:
                return self._outbox.get(timeout=min(left, _LONGEST_SLEEP_SECONDS))
            except queue.Empty:
                if left <= _LONGEST_SLEEP_SECONDS:
                    raise

    def close(self) -> None:
        _stop(self._inboxes, self._threads)
        self._finalizer.detach()


def _stop(inboxes: Sequence[queue.SimpleQueue[Order]], threads: Sequence[threading.Thread]) -> None:
    for inbox in inboxes:
        inbox.put(_STOP)
    for thread in threads:
        if thread is not threading.current_thread() and thread.ident is not None:
            thread.join(timeout=5.0)


def _set_up(stack: contextlib.ExitStack, device: torch.device, num_threads: int) -> None:
    if device.type == "cuda":
        stack.enter_context(torch.cuda.device(device))
        stack.enter_context(torch.cuda.stream(torch.cuda.Stream(device)))
    else:
        torch.get_num_threads()  # makes torch initialize this thread now; later, that would undo the next line
        torch.set_num_threads(num_threads)
    stack.enter_context(torch.no_grad())


_THREAD = threading.local()


def is_thread_of_device() -> bool:
    return getattr(_THREAD, "is_of_device", False)


def _serve(
    replica: int,
    device: torch.device,
    num_threads: int,
    inbox: queue.SimpleQueue[Order],
    outbox: queue.SimpleQueue[Message],
) -> None:
    _THREAD.is_of_device = True
    with contextlib.ExitStack() as stack:
        try:
            _set_up(stack, device, num_threads)
        except Exception as error:  # noqa: BLE001 - the pool's maker raises it
            outbox.put((replica, error))
            return
        outbox.put(None)
        while True:
            order = inbox.get()  # idle: ends by _STOP, which comes with close(), garbage collection or exit
            if order is _STOP:
                return
            jobs, replica, results = order
            job = jobs.pop(replica, None)
            if job is None:  # the job was sent twice
                continue
            try:
                results[replica] = (True, job())
            except BaseException as error:  # noqa: BLE001 - the caller raises it
                results[replica] = (False, error)
            if not results[replica][0] or None not in results:
                # the caller is woken only once, because each time it takes the interpreter from threads that still run
                outbox.put(None)
            del order, job, jobs, results
