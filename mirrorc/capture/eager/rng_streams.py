"""A replica's random stream, for code that draws from the process's generators."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import torch

from mirrorc.custom_ops.random import STATES_LOCK, lock_of, mix
from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem

_LONGEST_WAIT_SECONDS = 3600


class ReplicaStream:
    """A replica's states for the process's generators of the CPU and the replica's GPU."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [torch.device("cpu"), *([device] if device.type == "cuda" else [])]
        self._states = [torch.Generator(each).manual_seed(mix(seed, 0)).get_state() for each in self._devices]
        self._before: list[torch.Tensor] | None = None  # the process's states while they are lent
        self._locks = contextlib.ExitStack()

    @contextlib.contextmanager
    def drawn_from(self) -> Iterator[None]:
        """Sets the process's generators to the stream's states. Other streams wait until the context ends."""
        self._begin()
        try:
            yield
        finally:
            self._end()

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Within `drawn_from`, lets other streams draw while this run waits."""
        if self._before is None:
            yield
            return
        self._end()
        try:
            yield
        finally:
            self._begin()

    def _begin(self) -> None:
        with contextlib.ExitStack() as stack:
            for device in self._devices:
                if not lock_of(device).acquire(timeout=_LONGEST_WAIT_SECONDS):
                    raise problem(
                        ExecutionError,
                        f"MC5008: another replica has drawn random numbers for {_LONGEST_WAIT_SECONDS} s",
                        "only one can at a time",
                        f"py-spy dump --pid {os.getpid()}, which shows what its forward waits for",
                    )
                stack.callback(lock_of(device).release)
            self._before = generator_states(self._devices)
            _set_generator_states(self._devices, self._states)
            self._locks = stack.pop_all()

    def _end(self) -> None:
        before, self._before = self._before, None
        if before is None:  # `paused` has not begun anew
            return
        with self._locks:
            self._states = generator_states(self._devices)
            _set_generator_states(self._devices, before)

    def has_advanced(self, since: ReplicaStream) -> bool:
        return not all(map(torch.equal, self._states, since._states))


def generator_states(devices: list[torch.device]) -> list[torch.Tensor]:
    with STATES_LOCK:
        return [torch.get_rng_state() if d.type == "cpu" else torch.cuda.get_rng_state(d) for d in devices]


def _set_generator_states(devices: list[torch.device], states: list[torch.Tensor]) -> None:
    with STATES_LOCK:
        for device, state in zip(devices, states, strict=True):
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
