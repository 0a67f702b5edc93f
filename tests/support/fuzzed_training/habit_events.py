"""Events that are other calls of a step: gradients of several calls, and evaluations."""

from random import Random

from fuzzed_training.events import draw_batch, event
from fuzzed_training.pair import Pair


@event
def accumulate(pair: Pair, draw: Random) -> None:
    for _ in range(draw.randint(1, 3)):
        pair.accumulate(draw_batch(pair, draw))


@event
def accumulate_and_step(pair: Pair, draw: Random) -> None:
    accumulate(pair, draw)
    pair.train(draw_batch(pair, draw))


@event
def drop_accumulated(pair: Pair, draw: Random) -> None:
    how = draw.randrange(4)
    if how == 0:
        pair.drop_all_accumulated()
    for side in pair.sides:
        if how == 1:
            pair.drop_accumulated_by_optimizer(side)
        elif how > 1:
            pair.drop_accumulated(side, side.model if how == 2 else side.model.hidden)  # type: ignore[arg-type]


@event
def evaluate(pair: Pair, draw: Random) -> None:
    batch, is_switched = draw_batch(pair, draw), draw.random() < 0.5
    modes = [{module: module.training for module in side.model.modules()} for side in pair.sides]
    for side in pair.sides if is_switched else ():
        side.model.eval()
    pair.evaluate(batch)
    for own in modes:
        for module, mode in own.items():
            module.training = mode
