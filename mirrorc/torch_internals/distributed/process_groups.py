"""Private groups of workers: gloo's end at once, NCCL's never end the process, both unlike torch's global groups."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import select
import socket
import stat
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from typing import Any

import torch

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
            kind: Any = ProcessGroupGloo
            options = kind._Options()
            options._devices = [kind.create_device(**place) for place in places] or [kind.create_default_device()]
            options._timeout = timedelta(seconds=timeout_seconds)
            listening = {_port(n) for n, inode in open_sockets().items() if before.get(n) != inode and _is_listening(n)}
        self._group: Any = ProcessGroupGloo(store, rank, num_workers, options)
        store.set(f"ports/{rank}", " ".join(map(str, listening)))
        known = listening.union(*(map(int, store.get(f"ports/{other}").split()) for other in range(num_workers)))
        self._connected = {n: inode for n, inode in open_sockets().items() if not known.isdisjoint(_ports_of(n))}
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


def _ports_of(number: int) -> tuple[int, ...]:
    """The ports of both ends of a connection, the peer's first; empty for other sockets."""
    try:
        with socket.socket(fileno=os.dup(number)) as duplicate:
            return duplicate.getpeername()[1], duplicate.getsockname()[1]
    except (OSError, IndexError, TypeError):  # not connected, or no network socket
        return ()


def _let_go_of_all() -> None:
    for group in list(_groups):
        group.let_go()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_let_go_of_all)


def open_sockets() -> dict[int, int]:
    """Socket inodes by file descriptor; empty without ``/proc``."""
    inodes: dict[int, int] = {}
    if not os.path.isdir("/proc/self/fd"):  # as on macOS
        return inodes
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                inodes[int(name)] = status.st_ino
    return inodes


def connections_since(before: Mapping[int, int], port: int) -> dict[int, int]:
    """Sockets that were connected to a remote port after ``before``, an earlier `open_sockets`."""
    return {n: inode for n, inode in open_sockets().items() if before.get(n) != inode and _ports_of(n)[:1] == (port,)}


def is_any_closed(sockets: Mapping[int, int]) -> bool:
    """The cost does not depend on the number of open files."""
    return any(not _is_there(number, inode) or _is_closed(number) for number, inode in sockets.items())


def _is_there(number: int, inode: int) -> bool:
    try:
        status = os.fstat(number)
    except OSError:  # no such file
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == inode


def _is_closed(number: int) -> bool:
    looking = select.poll()
    looking.register(number, select.POLLRDHUP)
    return bool(looking.poll(0))


_HIGH = -1  # a priority of CUDA streams
_WITHOUT_ENDING_THE_PROCESS = {  # torch's threads end it for a late worker or a failed GPU; here, a wait reports them
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_ENABLE_MONITORING": "0",
    "TORCH_NCCL_RETHROW_CUDA_ERRORS": "0",
}


class NcclGroup:
    """A group of workers with a GPU each, outside of torch's registry. Tested only with one worker.

    One thread at a time may launch collectives, in the same order on all workers, on the operand's stream. The
    constructor waits for all workers without a timeout.
    """

    def __init__(self, store: Any, rank: int, num_workers: int, device: torch.device) -> None:
        kind: Any = getattr(torch.distributed, "ProcessGroupNCCL", None)  # not in every build of torch
        if kind is None:
            raise RuntimeError("this build of torch has no NCCL")
        options = kind.Options(is_high_priority_stream=True)
        options._timeout = _ENDLESS  # the waiting code has a bound
        current = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
        with current, _in_environment(_WITHOUT_ENDING_THE_PROCESS):
            self._group: Any = kind(store, rank, num_workers, options)
        self._ends: Any = torch.cuda.Stream(device, priority=_HIGH)  # follows NCCL's progress
        self.is_cut = False
        self.all_reduce(torch.zeros(1, device=device)).wait()  # connects

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        work = self._group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])
        with torch.cuda.stream(self._ends):
            work.wait()  # the stream waits, not the host
            end = torch.cuda.Event(blocking=True)
            end.record(self._ends)
        return _Work(self, work, end)

    @property
    def is_broken(self) -> bool:
        """Always False: NCCL does not report a lost worker."""
        return False

    def cut(self) -> None:
        """Ends all collectives on this worker with an error, without telling other workers; idempotent."""
        if self.is_cut:
            return
        self.is_cut = True
        aborting = threading.Thread(target=self._abort, name="mirrorc ends NCCL", daemon=True)
        try:
            aborting.start()  # NCCL may take long, and the caller must go on
        except RuntimeError:  # the interpreter ends
            self._abort()

    def _abort(self) -> None:
        with contextlib.suppress(RuntimeError):
            self._group.abort()


class _Work:
    def __init__(self, group: NcclGroup, work: Any, end: Any) -> None:
        self._group, self._work, self._end = group, work, end

    def wait(self) -> None:
        self._end.synchronize()
        if self._group.is_cut:  # an aborted collective ends like any other
            raise RuntimeError("the connection to the other workers is closed")


@contextlib.contextmanager
def _in_environment(variables: dict[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
