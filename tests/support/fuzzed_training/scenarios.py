"""Whole runs: what they begin with and their events, as values that Hypothesis draws, shrinks and prints."""

from __future__ import annotations

import warnings
from collections.abc import Collection
from dataclasses import dataclass, field

from hypothesis import strategies as st

from fuzzed_training import failure_events, model_events, optimizer_events, python_events, users_steps
from fuzzed_training.events import EVENTS, Event
from fuzzed_training.models import DROPOUT, FEATURES, LOSSES
from fuzzed_training.pair import Pair
from fuzzed_training.settings import OPTIMIZERS, OPTIONAL_PASSES, Distribution, Setting

GROUPS = (
    model_events,
    optimizer_events,
    users_steps,
    python_events,
    failure_events,
)  # importing these registers their events

KNOWN_TO_FAIL: dict[str, str] = {}
"""Events and features that are left out because runs with them fail today, each with the reason."""

NOT_REPEATABLE = ("interrupt_at_random",)  # what depends on time


@dataclass(frozen=True)
class Scenario:
    """A run. Its text is the Python that makes it: ``Scenario(setting=Setting(...), events=(Event('step', 0), ...)).play()``."""

    setting: Setting = field(default_factory=Setting)
    events: tuple[Event, ...] = ()

    def play(self) -> Pair:
        """Runs the events, and a step after the last.

        Raises:
            AssertionError: mirrorc and plain PyTorch differ; says after which event, and what.
        """
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair = Pair(self.setting)
            try:
                self._play(pair)
            finally:
                pair.close()
        return pair

    def _play(self, pair: Pair) -> None:
        for i, event in enumerate((*self.events, Event("step"))):
            try:
                event.happen(pair)
                pair.check()
            except Exception as error:
                error.add_note(f"in event {i}, {event}; before it: {pair.log}")
                raise
            pair.log.append(str(event))


def scenarios(
    *, max_events: int, is_uneven: bool = False, is_repeated: bool = False, left_out: Collection[str] = NOT_REPEATABLE
) -> st.SearchStrategy[Scenario]:
    """Runs.

    Args:
        max_events: the number of events.
        is_uneven: batches of several sizes, and any number of devices; otherwise all shards have one shape, which is quick.
        is_repeated: models with dropout; the other side is trained by mirrorc as well.
        left_out: events and features; those that are known to fail are left out, too.
    """
    left_out = {*left_out, *KNOWN_TO_FAIL}
    names = sorted(EVENTS.keys() - left_out)
    events = st.builds(Event, st.sampled_from(["step"] * (len(names) // 2) + names), st.integers(0, 255))
    features = st.lists(st.sampled_from([name for name in FEATURES if name not in left_out]), max_size=3, unique=True)
    always = (DROPOUT,) if is_repeated else ()
    settings = st.builds(
        Setting,
        features=features.map(lambda own: (*always, *sorted(own))),
        loss=st.sampled_from(tuple(LOSSES)),
        optimizer=st.sampled_from(tuple(OPTIMIZERS)),
        distribution=st.builds(
            Distribution,
            num_devices=st.integers(1, 4) if is_uneven else st.sampled_from((2, 1, 4)),
            link=st.sampled_from((None, "copy")),
            left_out=st.lists(st.sampled_from(OPTIONAL_PASSES), max_size=2, unique=True).map(tuple),
            bucket_bytes=st.sampled_from((2**20, 200, 400)),
            factors=st.booleans(),
            exact_order=st.booleans(),
            is_checked=st.booleans(),
        ),
        holds_all=st.sampled_from((True, True, True, False)),
        is_uneven=st.booleans() if is_uneven else st.just(False),
        is_repeated=st.just(is_repeated),
        seed=st.integers(0, 7),
    )
    return st.builds(Scenario, settings, st.lists(events, min_size=1, max_size=max_events).map(tuple))
