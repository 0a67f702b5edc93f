"""The events of a run: functions that do the same to both sides, each with a name and a seed for what it chooses."""

from collections.abc import Callable
from dataclasses import dataclass
from random import Random

import torch

from fuzzed_training.comparison import Side
from fuzzed_training.models import make_batch
from fuzzed_training.pair import Pair

Handler = Callable[[Pair, Random], None]


@dataclass(frozen=True)
class Event:
    """One event of a run: ``Event("write_in_place", 3)``."""

    name: str
    seed: int = 0

    def happen(self, pair: Pair) -> None:
        EVENTS[self.name](pair, Random(self.seed))


EVENTS: dict[str, Handler] = {}
"""Every event by its name."""


def event(function: Handler) -> Handler:
    EVENTS[function.__name__] = function
    return function


def normal(seed: int, like: torch.Tensor) -> torch.Tensor:
    return torch.randn(like.shape, generator=torch.Generator().manual_seed(seed), dtype=like.dtype) * 0.5


def draw_seed(draw: Random) -> int:
    return draw.randrange(2**31)


def draw_name(pair: Pair, draw: Random) -> str:
    return draw.choice(list(pair.twin.parameters()))


def draw_held(pair: Pair, draw: Random) -> str | None:
    """The name of a parameter for which the optimizer has state, on both sides; None if there is none."""
    own = [name for name, p in pair.twin.parameters().items() if pair.twin.optimizer.state.get(p)]
    return draw.choice(own) if own else None


def state_of(side: Side, name: str) -> dict[str, object]:
    return side.optimizer.state[side.parameters()[name]]


@event
def step(pair: Pair, draw: Random) -> None:
    pair.train(draw_batch(pair, draw))


def draw_batch(pair: Pair, draw: Random) -> dict[str, object]:
    """A batch with two examples or more, as normalization needs, now and then too few for all replicas."""
    num_examples = draw.choice((8, 8, 8, 8, 9, 11, 3)) if pair.setting.is_uneven else 8
    return make_batch(pair.twin.model, num_examples, draw_seed(draw), draw.choice("aaab"))


@event
def step_without_examples(pair: Pair, draw: Random) -> None:
    pair.must_refuse(make_batch(pair.twin.model, 0, draw_seed(draw)), "no examples")
