"""What the workers of a team tell each other in a call, all of them in one order."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import torch

from mirrorc.cluster import Cluster
from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.consistency import check_same_facts
from mirrorc.errors import CommunicationError
from mirrorc.runtime.workers.protocol.call_state import CallState
from mirrorc.runtime.workers.protocol.header import digest
from mirrorc.runtime.workers.team.failures import Failures
from mirrorc.runtime.workers.transport.connect import all_texts
from mirrorc.runtime.workers.transport.connections import Connections
from mirrorc.runtime.workers.transport.lane import LostConnectionError, in_words

_LONGEST_ANSWER_SECONDS = 10.0  # of the store, after the time to wait for others
_HOST = torch.device("cpu")


class Words:
    """Collectives on small values, which all workers call alike.

    Args:
        cluster: the workers.
        timeout_seconds: the longest time that a worker waits for another one.
        call: how far this worker is.
        connections: of the team.
        failures: of its workers.

    Raises:
        LostConnectionError: every method, if a worker has failed, or the connection broke.
    """

    def __init__(
        self, cluster: Cluster, timeout_seconds: float, call: CallState, connections: Connections, failures: Failures
    ) -> None:
        self._cluster, self._timeout_seconds, self._call = cluster, timeout_seconds, call
        self._connections, self._failures = connections, failures

    def sum(self, tensor: torch.Tensor) -> None:
        """Adds up a dense tensor over all workers, in place."""
        with on_host(tensor) as own:
            self._connections.tell(lambda group: group.all_reduce(own))

    def copy(self, tensor: torch.Tensor, root: int = 0) -> None:
        """Copies the dense tensor of worker ``root`` into those of the others, whatever its dtype."""
        if tensor.numel():
            with on_host(tensor) as own:
                self._connections.tell(lambda group: group.broadcast(own.view(-1).view(torch.uint8), root))

    def gather(self, own: torch.Tensor) -> torch.Tensor:
        """The 1-D tensors of all workers, which are of one length and dtype, one behind the other in the order of ranks."""
        whole = own.new_empty(own.numel() * self._cluster.num_workers)
        self._connections.tell(lambda group: group.all_gather_whole(own, whole))
        return whole

    def texts(self, text: str) -> list[tuple[str, str]]:
        """The name of each worker, with the text that it tells, by rank."""
        own = torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)
        lengths = [torch.empty(1, dtype=torch.int64) for _ in self._cluster.workers]
        self._connections.tell(lambda group: group.all_gather(torch.tensor([len(own)]), lengths))
        padded = torch.zeros(int(max(lengths)), dtype=torch.uint8)
        padded[: len(own)] = own
        told = [torch.empty_like(padded) for _ in lengths]
        self._connections.tell(lambda group: group.all_gather(padded, told))
        texts = [bytes(one[: int(length)].tolist()).decode() for one, length in zip(told, lengths, strict=True)]
        return list(zip(map(str, self._cluster.workers), texts, strict=True))

    def kept_texts(self, about: str, text: str) -> list[str]:
        """What each worker tells about something, by rank: the same texts on all of them, as none tells another one later."""
        store = self._connections.part_of_store(f"told of {about}")
        return all_texts(store, self._cluster, text, self._timeout_seconds, self._is_over)

    def _is_over(self) -> bool:
        """Whether another worker has failed, or is gone; asked where a worker waits for others in the store."""
        return self._failures.is_any() or self._connections.are_broken

    def compare(self, what: str, facts: Mapping[str, object], remedy: str) -> None:
        """Returns if all workers have equal facts.

        Raises:
            CommunicationError: they differ; all raise it, with who differs in what first, and a remedy.
        """
        told = [torch.empty(1, dtype=torch.int64) for _ in self._cluster.workers]
        own = torch.tensor([digest(repr(list(facts.items())))])
        self._connections.tell(lambda group: group.all_gather(own, told))
        if len(set(map(int, told))) > 1:
            self._call.are_all_raising = True
            self.refuse_difference(what, facts, remedy)

    def refuse_difference(self, what: str, facts: Mapping[str, object], remedy: str) -> None:
        """Raises the same error in all workers, with the first thing in which they differ.

        Raises:
            LostConnectionError: a worker has failed, or is gone, before it has told what it has.
        """
        store = self._connections.part_of_store(f"facts {self._call.number}")
        workers, rank = self._cluster.workers, self._cluster.rank
        deadline = time.monotonic() + self._timeout_seconds
        try:
            in_bounded_time(
                lambda: check_same_facts(store, workers, rank, what, facts, deadline, self._look),
                self._timeout_seconds + _LONGEST_ANSWER_SECONDS,
            )
        except LostConnectionError:
            self._call.are_all_raising = False  # they do not raise the like
            raise
        except CommunicationError as error:
            end = f" {remedy}." if remedy else ""
            raise CommunicationError(f"{error}. No parameter was changed.{end}") from None
        except (RuntimeError, TimeoutError) as error:
            raise LostConnectionError(f"the workers' store does not answer: {in_words(error)}") from error

    def _look(self) -> None:
        if self._is_over():
            raise LostConnectionError("a worker is gone, or has failed")

    @contextmanager
    def raising_alike(self) -> Iterator[None]:
        """A block that raises on all workers alike, or on none, so that nobody needs to be told."""
        try:
            yield
        except CommunicationError:
            self._call.are_all_raising = True
            raise


@contextmanager
def on_host(tensor: torch.Tensor) -> Iterator[torch.Tensor]:
    """A tensor as what workers tell each other over gloo: itself, or a copy of what lies on a GPU, which is then copied back."""
    own = tensor.to(_HOST)
    yield own
    if own is not tensor:
        tensor.copy_(own)
