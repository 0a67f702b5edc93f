"""Numbers the workers' starts, as a store may outlive a start."""

from __future__ import annotations

import time
from typing import Any

from mirrorc.cluster.place import Place
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem

_SECONDS_BETWEEN_LOOKS = 0.02
_NUM_STARTS, _NUM_KNOCKS = "starts", "knocks"


class Start:
    """A numbered start of the workers, opened by the chief.

    torchrun's agents restart failed workers but keep the store. Each agent counts only its own workers' restarts. So
    other workers knock, and join the start whose chief answers.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._num_heard = store, -1
        self.number: int = store.add(_NUM_STARTS, 1)

    def answer(self) -> None:
        """Answers new knocks. The chief calls this repeatedly while it waits."""
        knocks = self._store.add(_NUM_KNOCKS, 0)
        if knocks != self._num_heard:
            self._store.set(_heard(self.number), str(knocks))
            self._num_heard = knocks


def await_start(store: Any, place: Place, deadline: float) -> int:
    """Waits for the present chief; returns the number of its start.

    Raises:
        CommunicationError: the chief did not answer in time.
    """
    number_of_knock = store.add(_NUM_KNOCKS, 1)
    while True:
        number = store.add(_NUM_STARTS, 0)
        if number and store.check([_heard(number)]) and int(store.get(_heard(number))) >= number_of_knock:
            return number
        if time.monotonic() > deadline:
            raise problem(
                CommunicationError,
                f"MC6205: {place}: worker 0 did not come in time",
                fix="see whether it runs, and was told the same address",
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _heard(number: int) -> str:
    return f"heard/{number}"
