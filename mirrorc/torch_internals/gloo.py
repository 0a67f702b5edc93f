"""Process groups of our own over gloo, which torch offers only behind its global ones, and what ends them at once."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
import threading
import weakref
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch

_groups: weakref.WeakSet[GlooGroup] = weakref.WeakSet()
_opening = threading.Lock()  # a group's listener is told from another's by when it was opened


class GlooGroup:
    """A group of workers that is registered nowhere, so that nobody else's collectives come between its own.

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

        with _opening:
            before = _sockets()
            options = _options(ProcessGroupGloo, timeout_seconds)
            listening = {_port(n) for n, inode in _sockets().items() if before.get(n) != inode and _is_listening(n)}
        self._group: Any = ProcessGroupGloo(store, rank, num_workers, options)
        store.set(f"ports/{rank}", " ".join(map(str, listening)))
        known = listening.union(*(map(int, store.get(f"ports/{other}").split()) for other in range(num_workers)))
        self._connected = {number: inode for number, inode in _sockets().items() if _joins(number, known)}
        _groups.add(self)

    def all_reduce(self, tensor: torch.Tensor) -> Any:
        """Adds up a dense tensor over all workers, in place; the same bits on all of them."""
        return self._group.allreduce([torch.view_as_real(tensor) if tensor.is_complex() else tensor])

    def all_gather(self, tensor: torch.Tensor, into: Sequence[torch.Tensor]) -> Any:
        """Copies every worker's tensor into the one of its rank."""
        return self._group.allgather([list(into)], [tensor])

    def broadcast(self, tensor: torch.Tensor) -> Any:
        """Copies worker 0's tensor into those of the others."""
        return self._group.broadcast(tensor, 0)

    def let_go(self) -> None:
        """Called in a child that was forked: it holds no connection of its parent, whose end would not be noticed otherwise."""
        sockets = _sockets()
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
        sockets = _sockets()
        for number, inode in self._connected.items():
            if sockets.get(number) == inode:
                with contextlib.suppress(OSError), socket.socket(fileno=os.dup(number)) as connection:
                    connection.shutdown(socket.SHUT_RDWR)
        self._connected = {}


def _options(kind: Any, timeout_seconds: float) -> Any:
    """The options of a group, whose listeners are opened now: on the interfaces that GLOO_SOCKET_IFNAME names, as torch's are."""
    options = kind._Options()
    names = os.environ.get("GLOO_SOCKET_IFNAME", "")
    devices = [kind.create_device(interface=name) for name in names.split(",") if name]
    options._devices = devices or [kind.create_default_device()]
    options._timeout = timedelta(seconds=timeout_seconds)
    return options


def _sockets() -> dict[int, int]:
    """The sockets of this process: their inodes by number of the file."""
    found: dict[int, int] = {}
    if not os.path.isdir("/proc/self/fd"):  # as on macOS: works end when their time is over
        return found
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


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
