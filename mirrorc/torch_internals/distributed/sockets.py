"""The sockets of this process, to look at connections that torch has opened and does not show."""

from __future__ import annotations

import contextlib
import os
import select
import socket
import stat
from collections.abc import Mapping


def open_sockets() -> dict[int, int]:
    """The sockets of this process: their inodes by number of the file; none where the system has no ``/proc``."""
    found: dict[int, int] = {}
    if not os.path.isdir("/proc/self/fd"):  # as on macOS
        return found
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            status = os.stat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found


def connections_since(before: Mapping[int, int], port: int) -> dict[int, int]:
    """The sockets that are connected to a port elsewhere, and that were not among those that `open_sockets` gave before."""
    return {n: inode for n, inode in open_sockets().items() if before.get(n) != inode and _leads_to(n, port)}


def is_any_closed(sockets: Mapping[int, int]) -> bool:
    """Whether the other side of any of these connected sockets has closed it, or this process has; reads nothing.

    It is asked often, and looks at these sockets alone, however many files the process has.
    """
    return any(not _is_there(number, inode) or _is_closed(number) for number, inode in sockets.items())


def _is_there(number: int, inode: int) -> bool:
    """Whether a file's number is still that of the socket with this inode."""
    try:
        status = os.fstat(number)
    except OSError:  # no file has it
        return False
    return stat.S_ISSOCK(status.st_mode) and status.st_ino == inode


def _leads_to(number: int, port: int) -> bool:
    try:
        with socket.socket(fileno=os.dup(number)) as found:
            return bool(found.getpeername()[1] == port)
    except (OSError, IndexError, TypeError):  # not connected, or not of the network
        return False


def _is_closed(number: int) -> bool:
    looking = select.poll()
    looking.register(number, select.POLLRDHUP)
    return bool(looking.poll(0))
