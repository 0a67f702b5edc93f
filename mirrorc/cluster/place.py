"""The place of this process among the workers that train together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """Which worker a process is, of how many, and where the workers meet; nobody has been asked whether the others exist.

    Attributes:
        rank: the worker's number, from 0. Worker 0 is the chief.
        num_workers: how many workers there are.
        told_by: what says so: ``torchrun's variables``, ``TF_CONFIG`` or ``the process group``; empty for a process on its own.
        host, port: where the workers' store listens; an empty host if a process group has a store.
        hosts_store: whether this worker opens the store; otherwise it connects to it.
        local_rank: the worker's number among those of its machine, if that is told.
        num_restarts: how often this machine's workers have caused all to be started again, as torchrun's agent counts.
        store_is_kept: whether the store outlives the workers, so that it may have what those of an earlier start have left.
    """

    rank: int = 0
    num_workers: int = 1
    told_by: str = ""
    host: str = ""
    port: int = 0
    hosts_store: bool = False
    local_rank: int | None = None
    num_restarts: int = 0
    store_is_kept: bool = False

    @property
    def address(self) -> str:
        """Where the store listens, as one writes it."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        if not self.told_by:
            return "a process on its own"
        return f"worker {self.rank} of {self.num_workers} by {self.told_by}"
