"""What workers do in tests whose optimizer is dealt out to them, and to its state between steps."""

import copy
import os
import pickle
import signal
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from worker_training import batch, made, values_of

import mirrorc
from mirrorc.options.table import grouped
from mirrorc.runtime.workers.buckets.exchanges import Exchanges

State = dict[str, dict[str, list[float]]]


def state_of(optimizer: torch.optim.Optimizer) -> State:
    saved = optimizer.state_dict()["state"]
    return {
        str(number): {
            key: (value.to_dense() if value.is_sparse else value).flatten().tolist() for key, value in entries.items()
        }
        for number, entries in saved.items()
    }


class _Training:
    def __init__(self, rank: int, given: dict[str, Any]) -> None:
        self.given, self.rank = given, rank
        self.model, self.optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=rank)
        options = {"shard_optimizer": True, "backend": "eager", "timeout": 100.0, **given.get("options", {})}
        self.step = mirrorc.compile(
            self.model,
            given["devices"][rank],
            optimizer=self.optimizer,
            loss_fn=nn.CrossEntropyLoss(),
            **grouped(options),
        )
        self.kept: Any = None
        self.states: list[State] = []

    def gather(self) -> None:
        self.step.gather_optimizer_state()
        self.states.append(state_of(self.optimizer))

    def keep(self) -> None:
        self.gather()
        self.kept = copy.deepcopy((self.model.state_dict(), self.optimizer.state_dict()))

    def load(self) -> None:
        values, state = self.kept
        self.model.load_state_dict(values)
        self.optimizer.load_state_dict(state)

    def shift(self) -> None:
        self.model.load_state_dict({name: value + 1 for name, value in self.model.state_dict().items()})

    def read(self) -> None:
        next(iter(self.optimizer.state.values()))["exp_avg"].norm()

    def freeze(self, is_frozen: bool) -> None:
        for parameter in next(iter(self.model.children())).parameters():
            parameter.requires_grad_(not is_frozen)

    def move(self) -> None:
        parameter = next(self.model.parameters())
        parameter.data = parameter.data.clone()

    def join_and_gather(self) -> None:
        with self.step.join():
            self.step.gather_optimizer_state()


def _die(training: _Training) -> None:
    def launch(*_: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)

    Exchanges.launch_parameters = launch  # type: ignore[method-assign]


EVENTS: dict[str, Callable[[_Training], Any]] = {
    "state": lambda training: training.optimizer.state_dict(),
    "own step": lambda training: training.optimizer.step(),
    "copy": lambda training: copy.deepcopy(training.optimizer),
    "pickle": lambda training: pickle.dumps(training.optimizer),
    "read": _Training.read,
    "gather": _Training.gather,
    "keep": _Training.keep,
    "load": _Training.load,
    "clear": lambda training: training.optimizer.state.clear(),
    "clear one": lambda training: training.optimizer.state.pop(training.model[0].weight),
    "shift": _Training.shift,
    "write": lambda training: nn.init.zeros_(training.model[0].bias),
    "freeze": lambda training: training.freeze(True),
    "free": lambda training: training.freeze(False),
    "move": _Training.move,
    "join and gather": _Training.join_and_gather,
    "die": _die,
}
"""What happens before a step, by name."""


def train(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Trains as one of the workers; ``events`` are a step, the rank or None for all, and what happens there."""
    training = _Training(rank, given)
    losses: list[Any] = []
    said: list[str] = []
    with training.step as step:
        torch.manual_seed(5 if rank == 0 else 6)
        for number in range(given.get("steps", 5)):
            for at, who, what in given.get("events", ()):
                if at == number and who in (None, rank):
                    try:
                        EVENTS[what](training)
                    except mirrorc.MirrorcError as error:
                        said.append(f"{type(error).__name__}: {error}")
                        if given.get("ends"):
                            return {"losses": losses, "said": said}
            sizes = given["sizes"][number % len(given["sizes"])]
            x, y = batch(number, rank, sizes[rank])
            try:
                losses.append(float(step(x, target=y)))
            except mirrorc.MirrorcError as error:
                losses.append(f"{type(error).__name__}: {error}")
                if given.get("ends"):
                    return {"losses": losses, "said": said}
        memory = step.memory()
        held = sum(one.optimizer_state or 0 for one in (*memory.shared, *(own.own for own in memory.devices)))
        actual = sum(part.nbytes for part in step._state.optimizers.held())
        explained = str(step.explain())
        training.gather()
        told = {
            "explained": explained,
            "schedule": step.schedule_hash,
            "held": held,
            "actual": actual,
            "program": str(step.program),
        }
    return {**told, "losses": losses, "said": said, "states": training.states, "values": values_of(training.model)}
