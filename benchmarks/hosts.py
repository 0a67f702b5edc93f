"""Two hosts on one machine: network namespaces, joined by a link of limited bandwidth (Linux, as root; iproute2)."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator

ADDRESSES = ("10.77.0.1", "10.77.0.2")
INTERFACE = "wire0"  # what each host calls its end
_MOST_SECONDS = 20  # that a command of iproute2 takes


def why_not() -> str:
    """Why no hosts can be made here; empty if they can."""
    if missing := [tool for tool in ("ip", "tc") if shutil.which(tool, path=search_path()) is None]:
        return f"{' and '.join(missing)} of iproute2 are not installed"
    if os.geteuid() != 0:
        return "network namespaces need root"
    return ""


@contextlib.contextmanager
def two_hosts(gigabits: float) -> Iterator[list[list[str]]]:
    """Makes both hosts, and removes them at the end; each sends at most so many gigabits in a second.

    Yields:
        What begins a command line that runs on the host, of each.

    Raises:
        RuntimeError: a command of iproute2 has failed; nothing is left.
    """
    names = [f"mirrorc-{os.getpid()}-{i}" for i in range(len(ADDRESSES))]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
            _run("ip", "-n", name, "link", "set", "lo", "up")
        _run(
            "ip",
            "-n",
            names[0],
            "link",
            "add",
            "name",
            INTERFACE,
            "type",
            "veth",
            "peer",
            "name",
            INTERFACE,
            "netns",
            names[1],
        )
        for name, address in zip(names, ADDRESSES, strict=True):
            _run("ip", "-n", name, "address", "add", f"{address}/24", "dev", INTERFACE)
            _run("ip", "-n", name, "link", "set", INTERFACE, "up")
            limit = ("rate", f"{gigabits:g}gbit", "burst", "512kb", "latency", "50ms")
            _run("tc", "-n", name, "qdisc", "add", "dev", INTERFACE, "root", "tbf", *limit)
        yield [["ip", "netns", "exec", name] for name in names]
    finally:
        for name in names:
            with contextlib.suppress(RuntimeError):  # it was not made
                _run("ip", "netns", "delete", name)


def search_path() -> str:
    """Where programs are looked for, iproute2's as well."""
    return os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))


def _run(*command: str) -> None:
    environment = {**os.environ, "PATH": search_path()}
    done = subprocess.run(command, capture_output=True, text=True, timeout=_MOST_SECONDS, env=environment)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)}: {done.stderr.strip() or done.returncode}")
