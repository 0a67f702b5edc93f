"""Control messages of a team's workers in a call."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from mirrorc.cluster import Cluster, Worker
from mirrorc.cluster.consistency import StoreTransport, Transport, compare, digest
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import with_line
from mirrorc.runtime.workers.protocol.call_state import CallStage, CallState
from mirrorc.runtime.workers.team.step_watcher import PublishedFailures
from mirrorc.runtime.workers.transport.connections import Connections, all_texts, answered
from mirrorc.runtime.workers.transport.lane import LostConnectionError

_LONGEST_ANSWER_SECONDS = 10.0  # of the store, after the time to wait for others
_HOST = torch.device("cpu")


class ControlCollectives:
    """Collectives on small values, called by all workers in the same order.

    Raises:
        LostConnectionError: by every method, if a worker has failed or the connection is lost.
    """

    def __init__(
        self,
        cluster: Cluster,
        timeout_seconds: float,
        call: CallState,
        connections: Connections,
        failures: PublishedFailures,
    ) -> None:
        self._cluster, self._timeout_seconds, self._call = cluster, timeout_seconds, call
        self._connections, self._failures = connections, failures

    def all_reduce(self, tensor: torch.Tensor) -> None:
        with on_host(tensor) as host_tensor:
            self._connections.run_control(lambda group: group.all_reduce(host_tensor))

    def broadcast(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Broadcasts worker ``root``'s dense tensor, of any dtype."""
        if tensor.numel():
            with on_host(tensor) as host_tensor:
                message = host_tensor.view(-1).view(torch.uint8)
                self._connections.run_control(lambda group: group.broadcast(message, root))

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        whole = tensor.new_empty(tensor.numel() * self._cluster.num_workers)
        self._connections.run_control(lambda group: group.all_gather_whole(tensor, whole))
        return whole

    def all_gather_texts(self, text: str) -> list[tuple[str, str]]:
        encoded = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in self._cluster.workers]
        self._connections.run_control(lambda group: group.all_gather(torch.tensor([len(encoded)]), lengths))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(encoded)] = encoded
        gathered = [torch.empty_like(padded) for _ in lengths]
        self._connections.run_control(lambda group: group.all_gather(padded, gathered))
        messages = zip(gathered, lengths, strict=True)
        texts = [bytes(message[: int(length)].tolist()).decode() for message, length in messages]
        return list(zip(map(str, self._cluster.workers), texts, strict=True))

    def first_texts(self, about: str, text: str) -> list[str]:
        """Each worker's first text on a subject, by rank; equal on all workers."""
        store = self._connections.part_of_store(f"told of {about}")
        return all_texts(store, self._cluster, text, self._timeout_seconds, self._is_over)

    def _is_over(self) -> bool:
        return self._failures.is_any() or self._connections.are_broken

    def compare(self, subject: str, facts: Mapping[str, object], remedy: str) -> None:
        """If facts differ, all workers raise `CommunicationError` with the first difference."""
        self._compare(subject, facts, remedy, lambda: _Lane(self._cluster, self._connections, self._begin_refusal))

    def refuse_difference(self, subject: str, facts: Mapping[str, object], remedy: str) -> None:
        """Like `compare`, after headers have shown a difference."""
        self._compare(subject, facts, remedy, self._begin_refusal)

    def _begin_refusal(self) -> Transport:
        """Begins the refusal of the call by all workers. The store carries the facts, because they may be long."""
        self._call.stage = CallStage.REFUSED
        store = self._connections.part_of_store(f"facts {self._call.number}")
        return _BoundedStore(store, self._cluster, self._timeout_seconds, self._look)

    def _compare(
        self, subject: str, facts: Mapping[str, object], remedy: str, open_transport: Callable[[], Transport]
    ) -> None:
        try:
            compare(subject, facts, over=open_transport(), remedy=remedy)
        except LostConnectionError:
            self._call.stage = CallStage.BEFORE  # other workers do not raise this error
            raise
        except CommunicationError as error:
            raise CommunicationError(with_line(str(error), "now", "No parameter was changed")) from None

    def _look(self) -> None:
        if self._is_over():
            raise LostConnectionError("a worker is gone, or has failed")

    @contextmanager
    def raising_alike(self) -> Iterator[None]:
        """A context whose errors all workers raise, so that no worker has to notify the others."""
        try:
            yield
        except CommunicationError:
            self._call.stage = CallStage.REFUSED
            raise


class _BoundedStore:
    """A `StoreTransport` that raises `LostConnectionError` if a worker is lost or the store does not answer in time."""

    def __init__(self, store: Any, cluster: Cluster, timeout_seconds: float, look: Callable[[], object]) -> None:
        self.workers: Sequence[Worker] = cluster.workers
        self._seconds = timeout_seconds + _LONGEST_ANSWER_SECONDS
        deadline = time.monotonic() + timeout_seconds
        self._transport = StoreTransport(store, cluster.workers, cluster.rank, deadline, look)

    def digests(self, topic: str, text: str) -> Sequence[int]:
        return answered(lambda: self._transport.digests(topic, text), self._seconds)

    def texts(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        return answered(lambda: self._transport.texts(topic, text, ranks), self._seconds)


class _Lane:
    """Exchanges digests over the connections. If they differ, exchanges facts over the store."""

    def __init__(self, cluster: Cluster, connections: Connections, open_store: Callable[[], Transport]) -> None:
        self.workers: Sequence[Worker] = cluster.workers
        self._connections, self._open_store = connections, open_store

    def digests(self, topic: str, text: str) -> Sequence[int]:
        digests = [torch.empty(1, dtype=torch.int64) for _ in self.workers]
        self._connections.run_control(lambda group: group.all_gather(torch.tensor([digest(text)]), digests))
        return list(map(int, digests))

    def texts(self, topic: str, text: str, ranks: Sequence[int]) -> list[str]:
        store = self._open_store()
        store.digests(topic, text)
        return store.texts(topic, text, ranks)


@contextmanager
def on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """``tensor`` itself, or a CPU copy of a GPU tensor, copied back afterwards."""
    host_copy = tensor.to(_HOST)
    yield host_copy
    if host_copy is not tensor:
        tensor.copy_(host_copy)
