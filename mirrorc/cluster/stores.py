"""Opens the rendezvous store in a bounded time. Ctrl-C can interrupt."""

from __future__ import annotations

import socket
import time
from datetime import timedelta
from typing import Any

from torch import distributed

from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.place import Place
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals.distributed.process_groups import connections_since, is_any_closed, open_sockets

_LONGEST_ANSWER_SECONDS = 20.0  # of a store that listens
_SECONDS_BETWEEN_TRIES = 0.1


SEE_STORE = (
    "read the log of the process that opened the store (worker 0, or torchrun's agent), then start all workers again"
)


def open_store(place: Place, deadline: float) -> Any:
    """Opens the workers' store on its host, or connects to it. ``deadline`` is by ``time.monotonic()``."""
    if not place.hosts_store:
        _await_listener(place, deadline)
    seconds = min(_LONGEST_ANSWER_SECONDS, max(1.0, deadline - time.monotonic()))
    try:
        return in_bounded_time(lambda: _opened(place, seconds), seconds + 1.0)
    except (RuntimeError, ValueError, TimeoutError) as error:
        what, fix = _why_not(place)
        raise problem(CommunicationError, f"MC6204: {place}: {what}", first_line(error), fix) from error


def _opened(place: Place, seconds: float) -> Any:
    return distributed.TCPStore(
        place.host,
        place.port,
        is_master=place.hosts_store,
        timeout=timedelta(seconds=seconds),
        wait_for_workers=False,
        multi_tenant=True,  # torch.distributed may open the store in this process, too
    )


def _why_not(place: Place) -> tuple[str, tuple[str, ...]]:
    if place.hosts_store:
        return f"it cannot open the workers' store at {place.address}", (
            "torchrun --master-port=29501, or another MASTER_PORT for all workers",
            "MASTER_ADDR with the name of this machine, if it has another",
        )
    what = f"what listens at {place.address} does not answer as a store"
    return what, ("torchrun --master-port=29501, or another MASTER_PORT for all workers",)


def _await_listener(place: Place, deadline: float) -> None:
    began = time.monotonic()
    while True:
        left = deadline - time.monotonic()
        try:
            with socket.create_connection((place.host, place.port), timeout=min(1.0, max(0.05, left))):
                return
        except OSError as error:  # also for a name that is not known yet
            if left <= 0:
                raise problem(
                    CommunicationError,
                    f"MC6205: {place}: nobody opened the workers' store at {place.address} within "
                    f"{time.monotonic() - began:.0f} s",
                    first_line(error),
                    f"start worker 0; nc -vz {place.host} {place.port} shows whether this machine reaches it",
                ) from error
        time.sleep(_SECONDS_BETWEEN_TRIES)


class OwnConnection:
    """A second connection to a store, whose requests do not wait for those of other threads."""

    def __init__(self, store: Any, seconds: float) -> None:
        def connected() -> Any:
            store.add("asked", 0)  # fails at once if the store is lost, where clone() would retry for long
            return store.clone()

        before = open_sockets()
        self.store = in_bounded_time(connected, seconds)
        self._sockets = connections_since(before, _port(store))

    @property
    def is_lost(self) -> bool:
        """True after the store's host has closed the connection; torch would warn of further requests."""
        return is_any_closed(self._sockets)


def _port(store: Any) -> int:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return int(getattr(store, "port", 0))


def first_line(error: Exception) -> str:
    """Torch appends addresses of its code in further lines."""
    return (str(error).splitlines() or [type(error).__name__])[0]
