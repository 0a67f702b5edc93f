"""Python state that each forward of a step changes, such as a counter: the step changes it once."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator

from torch import nn

from mirrorc.capture.eager.python_state import Changes, PythonState
from mirrorc.errors import CaptureError, ExecutionError, MirrorcError
from mirrorc.messages.problem import problem

_FIXES = (
    "change it in your loop, between calls",
    "keep it in a buffer, self.register_buffer('x', ...) once and self.x.copy_(value) in forward",
    "return it from forward; with mirrorc.compile(..., return_outputs=True) the step returns it, too",
)
_MOST_CAPTURES = 4
_LONGEST_WAIT_SECONDS = 3600


class CarriedState:
    """Restores the state before each forward of a step, and keeps the changes of the last forward.

    All replicas' runs of a step share it.

    Attributes:
        is_advanced: a first run has changed state. Replicas then run in turn.
        num_settled: counts steps without changes after a step with changes, as when a cache is filled. Another front
            end may then capture the model.
    """

    def __init__(self, model_name: str) -> None:
        self.is_advanced, self.num_settled = False, 0
        self._is_fallback, self._was_advanced = False, False
        self._model_name = model_name
        self._lock, self._running = threading.RLock(), set[int]()
        self._state: PythonState | None = None
        self._left: Changes | None = None

    @contextlib.contextmanager
    def first_runs(self, root: nn.Module) -> Iterator[list[Changes]]:
        """Collects the changes of first runs, and undoes them. Refuses changes that a step cannot repeat."""
        self._state = PythonState(root)
        changes: list[Changes] = []
        try:
            with self._running_forward(self._state):
                yield changes
            for each in changes:
                self._check(each, changes[0], CaptureError)
            self.is_advanced = self.is_advanced or any(changes)
        finally:
            self._state.put_back()
            self._state = None

    def restart(self) -> None:
        """To be called before a first run."""
        assert self._state is not None, "within first runs"
        self._state.put_back()

    def changes(self) -> Changes:
        assert self._state is not None, "within first runs"
        return self._state.changes()

    def note_capture(self, *, is_fallback: bool) -> None:
        """A model that runs as plain PyTorch because other front ends failed is captured again when its state settles."""
        self._is_fallback, self._was_advanced = is_fallback, False

    def count_settled(self) -> int:
        if self._left:
            self._was_advanced = True
        elif self._left is not None and self._was_advanced and self._is_fallback and self.num_settled < _MOST_CAPTURES:
            self.num_settled, self._was_advanced = self.num_settled + 1, False
        return self.num_settled

    def begin_step(self, root: nn.Module) -> None:
        # the user, or the last step, may have changed state
        if self._state is None or self._state.root is not root or self._state.changes():
            self._state = PythonState(root)
        self._left = None

    def undo_step(self) -> None:
        if self._state is not None:
            self._state.put_back()

    @contextlib.contextmanager
    def advanced(self) -> Iterator[None]:
        """A context around a forward of a step."""
        state = self._state
        assert state is not None, "within a step"
        if not self.is_advanced:
            with self._running_forward(state):
                yield
            self._refuse_changes(state)
            return
        with self.alone():
            state.put_back()
            with self._running_forward(state):
                yield
            left = state.changes()
            self._left = self._left if self._left is not None else left
            self._check(left, self._left, ExecutionError)

    @contextlib.contextmanager
    def _running_forward(self, state: PythonState) -> Iterator[None]:
        with self._lock:
            if not self._running:
                state.refuse_sources(self._model_name, self._running)
            self._running.add(threading.get_ident())
        try:
            yield
        finally:
            with self._lock:
                self._running.discard(threading.get_ident())
                if not self._running:
                    state.give_sources_back()

    def _refuse_changes(self, state: PythonState) -> None:
        """Compares while no forward runs, because a forward may change state for a while."""
        with self._lock:
            changes = state.changes() if not self._running else Changes()
        if not changes:
            return
        self._check(changes, changes, ExecutionError)
        self.is_advanced = True
        raise problem(
            ExecutionError,
            f"MC2601: forward or loss of {self._model_name} changed {changes.a_name}, and did not in its first run",
            "replicas ran at the same time, and each has changed it",
            "make the call again with the same batch: replicas run one after the other from now on",
        )

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Makes other replicas wait if this model changes state."""
        if not self.is_advanced:
            yield
            return
        if not self._lock.acquire(timeout=_LONGEST_WAIT_SECONDS):
            raise problem(
                ExecutionError,
                f"MC5008: another replica has run for {_LONGEST_WAIT_SECONDS} s",
                "replicas of a model that changes Python state run one after the other",
                f"py-spy dump --pid {os.getpid()}, which shows what its forward waits for",
            )
        try:
            yield
        finally:
            self._lock.release()

    def _check(self, changes: Changes, others: Changes, kind: type[MirrorcError]) -> None:
        if changes.drawn:
            raise problem(
                kind,
                f"MC2303: forward or loss of {self._model_name} draws from {changes.drawn[0]}",
                "all replicas share it, and which number each gets would follow their threads",
                (
                    "draw from torch's default generator, torch.rand(4), of which each replica has a stream of its own",
                    "draw in your loop, and pass what was drawn as an argument",
                ),
            )
        if changes.written:
            raise problem(
                kind,
                f"MC2304: forward or loss of {self._model_name} writes {changes.written[0]} in place",
                "all replicas would write the same memory: it is no buffer of the model, nor of a loss that is a module",
                ("self.register_buffer(...), or make its module a submodule", "its_module.eval(), for a normalization"),
            )
        if (name := changes.with_gradient) is not None:
            raise problem(
                kind,
                f"MC2301: forward or loss of {self._model_name} leaves a tensor with a gradient in {name}",
                "its graph is that of one replica, and ends with the call",
                (f"leave a detached one, value.detach(), in {name}", *_FIXES[1:]),
            )
        if (name := changes.differing(others)) is not None:
            raise problem(
                kind,
                f"MC2301: forward or loss of {self._model_name} changes {name}, and each replica leaves another value",
                "all replicas share it; only what is the same for every shard can be carried on to the next call",
                _FIXES,
            )
