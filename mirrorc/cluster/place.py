"""The place of this process among the workers that train together."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Place:
    """A worker's place, known before any contact with other workers.

    Attributes:
        source: ``torchrun's variables``, ``TF_CONFIG``, ``the process group``, or empty for a process on its own.
        host, port: address of the workers' store; the host is empty if the process group has a store.
        hosts_store: this worker opens the store.
        store_persists: the store may have keys of an earlier start.
    """

    rank: int = 0
    num_workers: int = 1
    source: str = ""
    host: str = ""
    port: int = 0
    hosts_store: bool = False
    local_rank: int | None = None
    num_restarts: int = 0
    store_persists: bool = False

    @property
    def address(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        if not self.source:
            return "a process on its own"
        return f"worker {self.rank} of {self.num_workers} by {self.source}"
