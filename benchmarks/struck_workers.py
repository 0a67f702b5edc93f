"""Workers that train as examples/train_workers.py does, until one of them is struck: killed, stopped, or made to raise."""

from __future__ import annotations

import os
import random
import signal
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "examples"))

import train_workers
from train_digits import DigitNet

import mirrorc

NUM_STEPS = 14
TEXT = "struck by the benchmark"  # of what is raised
PLACES = ("operator", "script", "save", "interrupt")  # where a worker raises
_OPTIONS = ("--backend", "eager", "--epochs", "2", "--batch", "200", "--save-every", "3", "--dtype", "float64")

_is_struck = False


@dataclass(frozen=True)
class Run:
    """A start of all workers.

    Attributes:
        folder: for checkpoints, and for what each worker tells.
        num_workers: how many there are.
        port: of their store.
        timeout_seconds: that a worker waits for another one.
        place: where a worker raises that gets the signal `signal.SIGUSR1`.
        name: of the start, where there are several in one folder.
    """

    folder: Path
    num_workers: int
    port: int
    timeout_seconds: float
    place: str = ""
    name: str = "first"


@torch.library.custom_op("mirrorc_benchmarks::breaks", mutates_args=())
def breaks(x: torch.Tensor) -> torch.Tensor:
    """The same values, unless the worker is struck there."""
    _raise_if_struck("operator")
    return x.clone()


breaks.register_fake(torch.empty_like)
breaks.register_autograd(lambda _, gradient: gradient)


class Net(DigitNet):
    """The example's net with an operator that may break."""

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return super().forward(breaks(images))


_place = ""


def _raise_if_struck(place: str) -> None:
    if _is_struck and place == _place:
        raise OSError(f"{TEXT}: {place}")


def _strike(*_: Any) -> None:
    global _is_struck
    _is_struck = True
    if _place == "interrupt":
        signal.raise_signal(signal.SIGINT)


def work(run: Run, rank: int) -> None:
    """What one worker does; it tells in a file which calls of its step begin and end."""
    global _place
    _place = run.place
    signal.signal(signal.SIGUSR1, _strike)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell has it ignored in the background
    place = {"RANK": rank, "WORLD_SIZE": run.num_workers, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": run.port}
    os.environ.update({name: str(value) for name, value in place.items()})
    torch.set_num_threads(1)
    random.seed(0)  # Python seeds it anew in a fork
    told = os.open(told_by(run, rank), os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    train_workers.DigitNet = Net  # type: ignore[misc]
    mirrorc.Step.__call__ = _telling(mirrorc.Step.__call__, told)  # type: ignore[method-assign]
    mirrorc.Step.shard_batch = _breaking(mirrorc.Step.shard_batch, "script")  # type: ignore[method-assign]
    train_workers.Training.save = _breaking(train_workers.Training.save, "save")  # type: ignore[method-assign]
    given = ("--timeout", str(run.timeout_seconds), "--checkpoints", str(run.folder / "checkpoints"))
    train_workers.main([*_OPTIONS, *given])


def told_by(run: Run, rank: int) -> Path:
    """The file with a letter for each call that a worker has begun, and another one for each that has ended."""
    return run.folder / f"{run.name}-calls-{rank}"


def _telling(call: Callable[..., Any], told: int) -> Callable[..., Any]:
    def telling(*args: Any, **kwargs: Any) -> Any:
        os.write(told, b"b")
        given_back = call(*args, **kwargs)
        os.write(told, b"e")
        return given_back

    return telling


def _breaking(function: Callable[..., Any], place: str) -> Callable[..., Any]:
    def breaking(*args: Any, **kwargs: Any) -> Any:
        _raise_if_struck(place)
        return function(*args, **kwargs)

    return breaking
