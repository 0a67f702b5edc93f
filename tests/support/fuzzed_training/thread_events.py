"""Events in which another thread reads the model, or evaluates it, between calls or during them."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from random import Random

import torch

from fuzzed_training.events import draw_batch, event
from fuzzed_training.pair import Pair


@event
def train_while_read(pair: Pair, draw: Random) -> None:
    """Another thread runs a layer and copies the state while the model trains."""
    with _reading(pair):
        pair.train(draw_batch(pair, draw))


@contextmanager
def _reading(pair: Pair) -> Iterator[None]:
    model, ends, errors = pair.mine.model, threading.Event(), []
    values = torch.ones(2, 4, dtype=torch.float64)

    def read() -> None:
        try:
            while not ends.is_set():
                with torch.no_grad():
                    model.head(values)  # type: ignore[operator]
                for value in model.state_dict().values():
                    value.clone()
        except Exception as error:  # noqa: BLE001 - the other thread raises it
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    try:
        yield
    finally:
        ends.set()
        thread.join()
    assert not errors, f"a thread that reads the model raises {errors[0]!r}"


@event
def evaluate_in_another_thread(pair: Pair, draw: Random) -> None:
    batch, errors = draw_batch(pair, draw), []

    def evaluate() -> None:
        try:
            pair.evaluate(batch)
        except BaseException as error:  # noqa: BLE001 - the caller raises it
            errors.append(error)

    thread = threading.Thread(target=evaluate)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
