"""Finds this process's connections to a port, and detects those closed by a peer."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
from collections.abc import Mapping


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
    return {n: inode for n, inode in open_sockets().items() if before.get(n) != inode and _leads_to(n, port)}


def is_any_closed(sockets: Mapping[int, int]) -> bool:
    """The cost does not depend on the number of open files."""
    return any(not _is_there(number, inode) or _is_closed(number) for number, inode in sockets.items())


def _is_there(number: int, inode: int) -> bool:
    try:
        status = os.fstat(number)
    except OSError:  # no such file
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == inode


def _leads_to(number: int, port: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(number)) as duplicate:
            return bool(duplicate.getpeername()[1] == port)
    except (OSError, IndexError, TypeError):  # not connected, or no network socket
        return False


def _is_closed(number: int) -> bool:
    looking = select.poll()
    looking.register(number, select.POLLRDHUP)
    return bool(looking.poll(0))
