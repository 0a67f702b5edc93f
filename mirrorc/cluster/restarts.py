"""Which start of the workers this is, where their store has outlived an earlier one."""

from __future__ import annotations

import time
from typing import Any

from mirrorc.cluster.place import Place
from mirrorc.errors import CommunicationError

_SECONDS_BETWEEN_LOOKS = 0.02
_NUM_STARTS, _NUM_KNOCKS = "starts", "knocks"


class Start:
    """A start of the workers, as the chief has opened it.

    torchrun's agents start all workers again when one has failed. Their store stays, with all that the failed ones have left, and
    each agent counts the restarts that its own workers have caused. So workers of several machines have no number in common that
    tells one start from another. The chief opens a start with the next number. Another worker knocks, and goes on with the start
    whose chief has heard it: a chief of an earlier start is gone, and hears nobody.

    Args:
        store: of the workers; nothing else uses its keys.
    """

    def __init__(self, store: Any) -> None:
        self._store, self._num_heard = store, -1
        self.number: int = store.add(_NUM_STARTS, 1)

    def answer(self) -> None:
        """Tells the workers that have knocked that the chief is there; called again and again while it waits for them."""
        knocks = self._store.add(_NUM_KNOCKS, 0)
        if knocks != self._num_heard:
            self._store.set(_heard(self.number), str(knocks))
            self._num_heard = knocks


def await_start(store: Any, place: Place, deadline: float) -> int:
    """The number of the start whose chief is there.

    Args:
        store: as for `Start`.
        place: of this worker, which is not the chief.
        deadline: the time, by ``time.monotonic()``, until which the chief is awaited.

    Raises:
        CommunicationError: it did not come in time.
    """
    own = store.add(_NUM_KNOCKS, 1)
    while True:
        number = store.add(_NUM_STARTS, 0)
        if number and store.check([_heard(number)]) and int(store.get(_heard(number))) >= own:
            return number
        if time.monotonic() > deadline:
            raise CommunicationError(
                f"{place}: worker 0 did not come in time. See whether it runs, and was told the same address"
            )
        time.sleep(_SECONDS_BETWEEN_LOOKS)


def _heard(number: int) -> str:
    return f"heard/{number}"
