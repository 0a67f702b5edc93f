"""Tasks of all workers. If one worker fails, the others stop waiting."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from torch import distributed

from mirrorc.cluster.bounded_calls import in_bounded_time
from mirrorc.cluster.consistency import StoreTransport, compare
from mirrorc.cluster.lost_in_rounds import Lookout, in_short
from mirrorc.cluster.membership import Worker
from mirrorc.cluster.stores import SEE_STORE, first_line
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import message, problem

logger = logging.getLogger(__name__)

_LONGEST_VERDICT_SECONDS = 10.0  # on top of the wait for others, to send the result
_LONGEST_READING_SECONDS = 5.0  # at most, worker 0 waits for all to read the failure: it may host the store
_SECONDS_BETWEEN_LOOKS = 0.02
_FAILURE, _NUM_AWARE = "failure", "aware"
_T = TypeVar("_T")


class Round:
    """A task of all workers, such as a compilation. Its keys in the store have the prefix ``name``, equal on all
    workers.
    """

    def __init__(
        self, store: Any, workers: Sequence[Worker], rank: int, name: str, doing: str, lookout: Lookout
    ) -> None:
        self.workers, self.rank, self.name, self._doing, self._lookout = workers, rank, name, doing, lookout
        self._store: Any = distributed.PrefixStore(name, store)
        self._num_comparisons = itertools.count()
        self._is_aware = False  # this worker knows of the round's failure, and is counted in the store

    def check_same(self, topic: str, facts: Mapping[str, object], *, timeout_seconds: float) -> None:
        """See `Cluster.check_same`; also raises if a worker has failed in this round."""
        self._meet(lambda transport: compare(topic, facts, over=transport), f"compared {topic}", timeout_seconds)

    def all_say(self, text: str, *, timeout_seconds: float) -> list[str]:
        """As `Cluster.all_say`. Raises if a worker has failed in this round."""
        return self._meet(lambda transport: transport.all_say(text), "spoke with the others", timeout_seconds)

    def fail(self, error: BaseException) -> None:
        """Ends the other workers' round with this error, if it is the first. Raises nothing; takes a bounded time."""
        text = message(
            f"MC6201: {self.workers[self.rank]} failed in {self._doing}, which all workers call together",
            in_short(error, None),
            f"mend that, and call {self._doing} again on all workers",
        )
        try:
            in_bounded_time(lambda: self._tell(text), _LONGEST_READING_SECONDS + _LONGEST_VERDICT_SECONDS)
            self._is_aware = True
        except (TimeoutError, RuntimeError) as lost:
            logger.debug("the workers' store is lost: %s", first_line(lost))

    def _tell(self, text: str) -> None:
        if not self._is_aware:
            self._store.compare_set(_FAILURE, "", text)  # the first failure counts
            self._store.add(_NUM_AWARE, 1)
        if self.rank == 0:
            until = time.monotonic() + _LONGEST_READING_SECONDS
            num_gone = 0  # ended workers, which do not read the failure
            while self._store.add(_NUM_AWARE, 0) < len(self.workers) - num_gone and time.monotonic() < until:
                num_gone = max(num_gone, len(self._lookout.gone()))
                time.sleep(_SECONDS_BETWEEN_LOOKS)

    def _look(self) -> None:
        if not self._store.check([_FAILURE]):
            gone = self._lookout.gone()
            if not gone:
                return
            rank, fate = min(gone.items())
            what = f"MC6203: {self.workers[rank]} does not come to {self._doing}"
            text = message(what, fate, "end all workers, and start them again")
            self._store.compare_set(_FAILURE, "", text)  # the first failure counts
        text = self._store.get(_FAILURE).decode()
        self._store.add(_NUM_AWARE, 1)
        self._is_aware = True
        raise CommunicationError(text)

    def _meet(self, function: Callable[[StoreTransport], _T], doing: str, timeout_seconds: float) -> _T:
        store = distributed.PrefixStore(f"same/{next(self._num_comparisons)}", self._store)
        deadline = time.monotonic() + min(timeout_seconds, threading.TIMEOUT_MAX)
        transport = StoreTransport(store, self.workers, self.rank, deadline, self._look)
        seconds = deadline - time.monotonic() + _LONGEST_VERDICT_SECONDS
        try:
            return in_bounded_time(lambda: function(transport), seconds)
        except (TimeoutError, RuntimeError) as error:
            raise problem(
                CommunicationError,
                f"MC6204: {self.workers[self.rank]} lost the workers' store while it {doing}",
                first_line(error),
                SEE_STORE,
            ) from error
