"""Private gloo groups that can end at once, unlike torch's global groups."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

from mirrorc.torch_internals.distributed.sockets import is_any_closed, open_sockets

_ANY_PORT = 9  # nothing is sent
_ENDLESS = timedelta(days=3650)

_groups: weakref.WeakSet[GlooGroup] = weakref.WeakSet()
_opening = threading.Lock()  # a group's listener is the one opened under this lock


class GlooGroup:
    """A group of workers outside of torch's registry.

    One thread at a time may launch collectives, in the same order on all workers. Signals do not interrupt ``wait()``.

    Args:
        store: for this group only.

    Raises:
        RuntimeError: the workers did not meet in time, or the store was lost.
    """

    def __init__(self, store: Any, rank: int, num_workers: int, timeout_seconds: float) -> None:
        from torch.distributed import ProcessGroupGloo  # not in every build of torch

        places = _places(store, rank, num_workers)
        with _opening:
            before = open_sockets()
            options: Any = ProcessGroupGloo._Options()
            devices = [ProcessGroupGloo.create_device(**place) for place in places]
            options._devices = devices or [ProcessGroupGloo.create_default_device()]
            options._timeout = timedelta(seconds=timeout_seconds)
            listening = {_port(n) for n, inode in open_sockets().items() if before.get(n) != inode and _is_listening(n)}
        self._group: Any = ProcessGroupGloo(store, rank, num_workers, options)
        store.set(f"ports/{rank}", " ".join(map(str, listening)))
        known = listening.union(*(map(int, store.get(f"ports/{other}").split()) for other in range(num_workers)))
        self._connected = {number: inode for number, inode in open_sockets().items() if _joins(number, known)}
        _groups.add(self)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        return self._group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])

    def all_gather(self, tensor: torch.Tensor, into: Sequence[torch.Tensor], *, is_patient: bool = False) -> Any:
        """Copies the tensor of rank N into ``into[N]``; ``is_patient`` lifts the timeout."""
        from torch.distributed.distributed_c10d import AllgatherOptions

        options = AllgatherOptions()
        if is_patient:
            options.timeout = _ENDLESS
        return self._group.allgather([list(into)], [tensor], options)

    def all_gather_whole(self, tensor: torch.Tensor, into: torch.Tensor) -> Any:
        return self._group._allgather_base(_as_bytes(into), _as_bytes(tensor))

    def all_to_all(self, parts: torch.Tensor, into: torch.Tensor) -> Any:
        """Sends each worker its part of a 1-D tensor."""
        return self._group.alltoall_base(_as_bytes(into), _as_bytes(parts), [], [])

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Any:
        return self._group.broadcast(tensor, root)

    @property
    def is_broken(self) -> bool:
        """True if another worker has closed a connection; always False without ``/proc``."""
        return is_any_closed(self._connected)

    def let_go(self) -> None:
        """Drops the connections in a forked child, because open copies would hide the parent's end from peers."""
        sockets = open_sockets()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number, inode in self._connected.items():
            if sockets.get(number) == inode:
                os.dup2(nowhere, number)  # not closed, as gloo may close the number
        os.close(nowhere)
        self._connected = {}

    def cut(self) -> None:
        """Ends all collectives with an error, on this worker and others; idempotent.

        Closes the connections, because torch cannot cancel a collective. Listening sockets stay open, because gloo
        would otherwise end the process.
        """
        sockets = open_sockets()
        for number, inode in self._connected.items():
            if sockets.get(number) == inode:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._connected = {}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)


def _places(store: Any, rank: int, num_workers: int) -> list[dict[str, str]]:
    """The interfaces in GLOO_SOCKET_IFNAME, or the address towards the store: host names often mean loopback."""
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    store.set(f"address/{rank}", "" if names else _address_towards(_host(store)))
    if names:
        return [{"interface": name} for name in names]
    addresses = [store.get(f"address/{other}").decode() for other in range(num_workers)]
    address = addresses[rank]
    elsewhere = next((other for other in addresses if other and not _is_loopback(other)), "")
    if _is_loopback(address) and elsewhere:
        address = _address_towards(elsewhere)
    return [{"hostname": address}] if address else []


def _host(store: Any) -> str:
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _address_towards(host: str) -> str:
    addresses = []
    with contextlib.suppress(OSError):  # an unknown name
        addresses = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM) if host else []
    for family, kind, protocol, _, address in sorted(addresses, key=lambda entry: entry[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as way:  # no route
            way.connect(address)
            return socket.getnameinfo(way.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
    return ""


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def _port(number: int) -> int:
    with socket.socket(fileno=os.dup(number)) as duplicate:
        return int(duplicate.getsockname()[1])


def _is_listening(number: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as duplicate:
        return bool(duplicate.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _joins(number: int, ports: set[int]) -> bool:
    try:
        with socket.socket(fileno=os.dup(number)) as duplicate:
            theirs = duplicate.getpeername()  # a listener has none
            return theirs[1] in ports or duplicate.getsockname()[1] in ports
    except (OSError, IndexError, TypeError):  # not connected, or no network socket
        return False


def _let_go_of_all() -> None:
    for group in list(_groups):
        group.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_all)
