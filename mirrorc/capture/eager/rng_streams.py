"""A replica's own stream of random numbers for code that draws from the generators of the process."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from mirrorc.custom_ops.random import STATES_LOCK, lock_of, mix
from mirrorc.errors import ExecutionError

_LONGEST_WAIT_SECONDS = 3600


class ReplicaStream:
    """The states in which a replica's code finds the generators of the process, and in which it has left them.

    Args:
        seed: all numbers follow from it.
        device: of the replica. There are generators for the CPU and for each GPU.
    """

    def __init__(self, seed: int, device: torch.device) -> None:
        self._devices = [torch.device("cpu"), *([device] if device.type == "cuda" else [])]
        self._states = [torch.Generator(own).manual_seed(mix(seed, 0)).get_state() for own in self._devices]

    @contextlib.contextmanager
    def drawn_from(self) -> Iterator[None]:
        """A block that draws from the stream; one such block runs at a time, and the generators are then as they were.

        Raises:
            ExecutionError: other blocks have taken the generators for an hour.
        """
        with contextlib.ExitStack() as stack:
            for device in self._devices:
                if not lock_of(device).acquire(timeout=_LONGEST_WAIT_SECONDS):
                    raise ExecutionError(
                        f"another replica has drawn random numbers for {_LONGEST_WAIT_SECONDS} s, and only one can at a time: "
                        "see what its forward waits for"
                    )
                stack.callback(lock_of(device).release)
            before = generator_states(self._devices)
            _set_generator_states(self._devices, self._states)
            try:
                yield
            finally:
                self._states = generator_states(self._devices)
                _set_generator_states(self._devices, before)

    def has_advanced(self, since: ReplicaStream) -> bool:
        """Whether numbers were drawn that another stream of the same seed has not drawn."""
        return not all(map(torch.equal, self._states, since._states))


def generator_states(devices: list[torch.device]) -> list[torch.Tensor]:
    """The states of these devices' generators of the process."""
    with STATES_LOCK:
        return [torch.get_rng_state() if d.type == "cpu" else torch.cuda.get_rng_state(d) for d in devices]


def _set_generator_states(devices: list[torch.device], states: list[torch.Tensor]) -> None:
    """Puts the generators of the process into these states."""
    with STATES_LOCK:
        for device, state in zip(devices, states, strict=True):
            if device.type == "cpu":
                torch.set_rng_state(state)
            else:
                torch.cuda.set_rng_state(state, device)
