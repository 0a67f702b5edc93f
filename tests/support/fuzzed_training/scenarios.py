"""Whole runs: what they begin with and their events, as values that are drawn, made shorter and printed."""

import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field, replace
from random import Random

from fuzzed_training import (
    failure_events,
    habit_events,
    model_events,
    optimizer_events,
    python_events,
    thread_events,
    users_steps,
)
from fuzzed_training.events import EVENTS, Event
from fuzzed_training.models import DROPOUT, FEATURES, LOSSES, STATE_FEATURES
from fuzzed_training.pair import Pair, Refusal
from fuzzed_training.plans import Plans, draw_plans  # noqa: F401 - the text of a run has it
from fuzzed_training.python_features import PYTHON_FEATURES
from fuzzed_training.settings import (
    MAX_GRAD_NORMS,
    MAX_GRAD_VALUES,
    MICROBATCHES,
    OPTIMIZERS,
    OPTIONAL_PASSES,
    Distribution,
    Setting,
    has_factors,
)

GROUPS = (
    habit_events,
    model_events,
    optimizer_events,
    users_steps,
    python_events,
    thread_events,
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
        """Runs the events, and a step after the last; an AssertionError says after which event the sides differ, and in what."""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            pair = Pair(self.setting)
            try:
                self._play(pair)
            except Refusal as refusal:
                pair.refusal = str(refusal)
            finally:
                pair.close()
        return pair

    def _play(self, pair: Pair) -> None:
        for i, event in enumerate((*self.events, Event("step"))):
            try:
                event.happen(pair)
                pair.check()
            except Refusal:
                raise
            except Exception as error:
                error.add_note(f"in event {i}, {event}; before it: {pair.log}")
                raise
            pair.log.append(str(event))


def draw_scenario(
    random: Random,
    *,
    max_events: int,
    is_uneven: bool = False,
    is_repeated: bool = False,
    left_out: Collection[str] = NOT_REPEATABLE,
) -> Scenario:
    """A run. ``is_uneven``: batches of several sizes, and any number of devices; otherwise all shards have one shape.

    Hypothesis would repeat what it has drawn: in none of its 600 runs did the user run a model with normalization between two
    steps on several devices.
    """
    left_out = {*left_out, *KNOWN_TO_FAIL}
    features = random.sample([name for name in FEATURES if name not in left_out], random.randint(0, 3))
    features += random.sample(STATE_FEATURES, 1) if random.random() < 0.2 else []
    features += random.sample(PYTHON_FEATURES, 1) if random.random() < 0.3 else []
    factors, exact_order = random.choice(((True, False), (True, False), (False, False), (False, True)))
    distribution = Distribution(
        num_devices=random.randint(1, 4) if is_uneven else random.choice((2, 1, 4)),
        link=random.choice((None, "copy")),
        left_out=tuple(sorted(random.sample(OPTIONAL_PASSES, random.randint(0, 2)))),
        bucket_bytes=random.choice((2**20, 200, 400)),
        factors=factors,
        exact_order=exact_order,
        is_checked=random.choice((False, True)),
        microbatches=random.choice(MICROBATCHES),
        max_grad_norm=random.choice(MAX_GRAD_NORMS),
        max_grad_value=random.choice(MAX_GRAD_VALUES),
        recomputes=random.random() < 0.25,
    )
    can_factor = has_factors(distribution.left_out, exact_order)
    distribution = replace(distribution, plans=draw_plans(random, has_factors=can_factor))
    setting = Setting(
        features=(*((DROPOUT,) if is_repeated else ()), *sorted(features)),
        loss=random.choice(tuple(LOSSES)),
        optimizer=random.choice(tuple(OPTIMIZERS)),
        distribution=distribution,
        holds_all=random.choice((True, True, True, False)),
        is_uneven=is_uneven and random.choice((False, True)),
        is_repeated=is_repeated,
        seed=random.randint(0, 7),
    )
    names = sorted(EVENTS.keys() - left_out)
    names += ["step"] * (len(names) // 2) + ["fail_to_allocate"] * 2  # which fails at one of many places
    events = [Event(random.choice(names), random.randint(0, 255)) for _ in range(random.randint(1, max_events))]
    return Scenario(setting, tuple(events))


def play_or_shorten(scenario: Scenario) -> None:
    """Plays a run; if it fails, leaves out what it can so that it still fails, and raises that with the run as a note."""
    error = _failure_of(scenario)
    while error is not None:
        failing = ((shorter, found) for shorter in _one_less(scenario) if (found := _failure_of(shorter)) is not None)
        shortest = next(failing, None)
        if shortest is None:
            error.add_note(f"To repeat this run: {scenario}.play()")
            raise error
        scenario, error = shortest


def _failure_of(scenario: Scenario) -> Exception | None:
    try:
        scenario.play()
    except Exception as error:  # noqa: BLE001 - whatever it is, it is what the run has found
        return error
    return None


def _one_less(scenario: Scenario) -> Iterator[Scenario]:
    setting, events = scenario.setting, scenario.events
    for i in range(len(events)):
        yield replace(scenario, events=(*events[:i], *events[i + 1 :]))
    for name in setting.features:
        features = tuple(other for other in setting.features if other != name)
        yield replace(scenario, setting=replace(setting, features=features))
    for plans in setting.distribution.plans.simpler():
        yield replace(scenario, setting=replace(setting, distribution=replace(setting.distribution, plans=plans)))
