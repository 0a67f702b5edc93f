"""What a probe is, and the table of all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

PARTS = ("correctness", "speed", "processes", "example")

Figures = Mapping[str, float | str | None]
"""What a probe measured, by the name of the column."""


class Skipped(Exception):
    """A probe cannot look at its thing here; the text says why."""


class Failed(Exception):
    """A probe found something else than it expects; the text says what."""


@dataclass(frozen=True)
class Scene:
    """Where a probe runs.

    Attributes:
        device: "cuda", or "cpu" for a rehearsal with tiny sizes.
        out: the folder for files that it writes, such as a trace.
    """

    device: str
    out: Path

    @property
    def is_rehearsal(self) -> bool:
        """Whether there is no GPU, so that sizes are tiny."""
        return self.device == "cpu"

    def logical(self, count: int) -> list[str]:
        """The names of logical devices: on one GPU, or on this processor."""
        if self.is_rehearsal:
            return [f"cpu:{i}" for i in range(count)]
        return ["cuda:0", *(f"cuda:0/{i}" for i in range(1, count))]

    def needs_gpu(self) -> None:
        """Raises `Skipped` in a rehearsal."""
        if self.is_rehearsal:
            raise Skipped("it needs a GPU")


@dataclass(frozen=True)
class Probe:
    """One thing to look at.

    Attributes:
        part, name: in which table it is told, and as what.
        run: looks at it in a process of its own; raises `Skipped`, `Failed` or whatever goes wrong.
        seconds: after this time it is ended, with all processes that it has started.
        environment: variables of the environment, besides those of the caller.
        leaves: the name of the folder in which Inductor keeps what it compiles; a probe with the same one finds it there. Empty
            for a folder of its own.
    """

    part: str
    name: str
    run: Callable[[Scene], Figures | None]
    seconds: float
    environment: Mapping[str, str] = field(default_factory=dict)
    leaves: str = ""


PROBES: dict[str, Probe] = {}
"""All probes by ``part/name``, in the order in which they run."""


def add_probe(part: str, name: str, run: Callable[[Scene], Figures | None], seconds: float, **more: Any) -> None:
    """Adds a probe to the table; the arguments are `Probe`'s."""
    probe = Probe(part, name, run, seconds, **more)
    assert part in PARTS and f"{part}/{name}" not in PROBES
    PROBES[f"{part}/{name}"] = probe


def expect(is_so: object, otherwise: str) -> None:
    """Raises `Failed` with the text unless something is so."""
    if not is_so:
        raise Failed(otherwise)
