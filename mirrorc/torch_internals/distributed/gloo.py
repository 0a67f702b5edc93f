"""Process groups of our own over gloo, which torch offers only behind its global ones, and what ends them at once."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

from mirrorc.torch_internals.distributed.sockets import is_any_closed, open_sockets

_ANY_PORT = 9  # nothing is sent there
_ENDLESS = timedelta(days=3650)

_groups: weakref.WeakSet[GlooGroup] = weakref.WeakSet()
_opening = threading.Lock()  # a group's listener is told from another's by when it was opened


class GlooGroup:
    """A group of workers that is registered nowhere, so that nobody else's collectives come between its own.

    Workers connect over the interfaces that the environment variable ``GLOO_SOCKET_IFNAME`` names, as torch's groups do;
    otherwise over that by which they reach the store.

    Collectives are launched by one thread at a time and in one order on all workers. Each returns a work, whose ``wait()``
    blocks, deaf to signals, until it is done, fails, or the timeout is over.

    Args:
        store: where the workers meet; nothing else uses its keys.
        rank, num_workers: of this worker, and how many there are.
        timeout_seconds: the longest time that a collective takes, the first meeting as well.

    Raises:
        RuntimeError: the workers did not meet in time, or the store was lost.
    """

    def __init__(self, store: Any, rank: int, num_workers: int, timeout_seconds: float) -> None:
        from torch.distributed import ProcessGroupGloo  # not in every build of torch

        places = _places(store, rank, num_workers)
        with _opening:
            before = open_sockets()
            options = _options(ProcessGroupGloo, places, timeout_seconds)
            listening = {_port(n) for n, inode in open_sockets().items() if before.get(n) != inode and _is_listening(n)}
        self._group: Any = ProcessGroupGloo(store, rank, num_workers, options)
        store.set(f"ports/{rank}", " ".join(map(str, listening)))
        known = listening.union(*(map(int, store.get(f"ports/{other}").split()) for other in range(num_workers)))
        self._connected = {number: inode for number, inode in open_sockets().items() if _joins(number, known)}
        _groups.add(self)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Adds up a dense tensor over all workers, in place; the same bits on all of them."""
        return self._group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])

    def all_gather(self, tensor: torch.Tensor, into: Sequence[torch.Tensor], *, is_patient: bool = False) -> Any:
        """Copies every worker's tensor into the one of its rank; one that ``is_patient`` waits for the others without a bound."""
        from torch.distributed.distributed_c10d import AllgatherOptions

        options = AllgatherOptions()
        if is_patient:
            options.timeout = _ENDLESS
        return self._group.allgather([list(into)], [tensor], options)

    def all_gather_whole(self, tensor: torch.Tensor, into: torch.Tensor) -> Any:
        """Copies every worker's tensor, 1-D and of one length, into ``into``, one behind the other in the order of ranks."""
        return self._group._allgather_base(_as_bytes(into), _as_bytes(tensor))

    def all_to_all(self, parts: torch.Tensor, into: torch.Tensor) -> Any:
        """Sends each worker its part of a 1-D tensor, and puts what comes from each into ``into``, both in the order of ranks.

        All parts have one length.
        """
        return self._group.alltoall_base(_as_bytes(into), _as_bytes(parts), [], [])

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> Any:
        """Copies the tensor of worker ``root`` into those of the others."""
        return self._group.broadcast(tensor, root)

    @property
    def is_broken(self) -> bool:
        """Whether another worker has closed a connection, as it does when its process ends; also where nothing is under way.

        Nobody can say so where the system has no ``/proc``.
        """
        return is_any_closed(self._connected)

    def let_go(self) -> None:
        """Called in a child that was forked: it holds no connection of its parent, whose end would not be noticed otherwise."""
        sockets = open_sockets()
        nowhere = os.open(os.devnull, os.O_RDWR)
        for number, inode in self._connected.items():
            if sockets.get(number) == inode:
                os.dup2(nowhere, number)  # not closed, as gloo may close the number
        os.close(nowhere)
        self._connected = {}

    def cut(self) -> None:
        """Ends everything that runs, here and on the others, with an error, by closing its connections; may be repeated.

        Nothing else ends it: a work cannot be cancelled, and the group waits for its works when it is deleted. What listens is
        left alone, as gloo ends the process if that is lost.
        """
        sockets = open_sockets()
        for number, inode in self._connected.items():
            if sockets.get(number) == inode:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._connected = {}


def _as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The same memory; what is copied alone need not be of a dtype that gloo knows."""
    return tensor.view(torch.uint8)


def _options(kind: Any, places: Sequence[Mapping[str, str]], timeout_seconds: float) -> Any:
    """The options of a group, whose listeners are opened now at these places; without any, where torch's would be."""
    options = kind._Options()
    options._devices = [kind.create_device(**place) for place in places] or [kind.create_default_device()]
    options._timeout = timedelta(seconds=timeout_seconds)
    return options


def _places(store: Any, rank: int, num_workers: int) -> list[dict[str, str]]:
    """Where this worker listens: on the interfaces that are named, or else at its address on the way to the store.

    torch takes the address of the machine's name, which on many machines is one of the loopback interface. Here, too, the
    machine of the store may know its own name by such an address; it then takes that on the way to a worker elsewhere. Where
    the store has no host, there is no place, and torch's counts.
    """
    names = [name for name in os.environ.get("GLOO_SOCKET_IFNAME", "").split(",") if name]
    store.set(f"address/{rank}", "" if names else _address_towards(_host(store)))
    if names:
        return [{"interface": name} for name in names]
    addresses = [store.get(f"address/{other}").decode() for other in range(num_workers)]
    own = addresses[rank]
    elsewhere = next((other for other in addresses if other and not _is_loopback(other)), "")
    if _is_loopback(own) and elsewhere:
        own = _address_towards(elsewhere)
    return [{"hostname": own}] if own else []


def _host(store: Any) -> str:
    """The host that a store of torch was told to connect to; empty if it is one without connections."""
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return str(getattr(store, "host", ""))


def _address_towards(host: str) -> str:
    """The address of this machine on the way to another; empty if none is known. Sends nothing."""
    found = []
    with contextlib.suppress(OSError):  # the name is not known here
        found = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM) if host else []
    for family, kind, protocol, _, address in sorted(found, key=lambda one: one[0] != socket.AF_INET):
        with contextlib.suppress(OSError), socket.socket(family, kind, protocol) as way:  # there is no way
            way.connect(address)
            return socket.getnameinfo(way.getsockname(), socket.NI_NUMERICHOST | socket.NI_NUMERICSERV)[0]
    return ""


def _is_loopback(address: str) -> bool:
    return bool(address) and ipaddress.ip_address(address).is_loopback


def _port(number: int) -> int:
    with socket.socket(fileno=os.dup(number)) as found:
        return int(found.getsockname()[1])


def _is_listening(number: int) -> bool:
    with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as found:
        return bool(found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
    return False


def _joins(number: int, ports: set[int]) -> bool:
    """Whether a socket is connected, and to or from one of these ports."""
    try:
        with socket.socket(fileno=os.dup(number)) as found:
            theirs = found.getpeername()  # what listens has none, and is left alone
            return theirs[1] in ports or found.getsockname()[1] in ports
    except (OSError, IndexError, TypeError):  # not connected, or not of the network
        return False


def _let_go_of_all() -> None:
    for group in list(_groups):
        group.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_all)
