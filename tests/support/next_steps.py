"""Workers whose steps return with buckets in flight: what they do between two steps, and what comes of it."""

from __future__ import annotations

import contextlib
import copy
import hashlib
import itertools
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from worker_training import batch, made, values_of

import mirrorc

_LONGEST_SECONDS = 60.0
SMALL = {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0005, "exchange": "dense"}


def _sum_of(state: Any) -> str:
    """A checksum of the bits of all tensors in some state, and of its numbers."""
    found = hashlib.sha256()
    waiting = [state]
    while waiting:
        one = waiting.pop()
        if isinstance(one, torch.Tensor):
            found.update(one.detach().contiguous().numpy().tobytes())
        elif isinstance(one, dict):
            waiting += [value for _, value in sorted(one.items(), key=lambda item: str(item[0]))]
        elif isinstance(one, list | tuple):
            waiting += one
        else:
            found.update(repr(one).encode())
    return found.hexdigest()


def said(use: Callable[[], Any]) -> str:
    """The error of a use, with its class; "nothing" if there is none."""
    try:
        use()
    except (mirrorc.MirrorcError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


class _Between:
    """What a worker does between two steps, by name; each tells what it has found."""

    def __init__(self, step: mirrorc.Step, model: nn.Module, optimizer: torch.optim.Optimizer, rank: int) -> None:
        self.step, self.model, self.optimizer, self.rank = step, model, optimizer, rank

    def calls_the_model(self, number: int) -> Any:
        self.model.eval()
        found = self.model(batch(100 + number, 0, 3)[0]).tolist()
        self.model.train()
        return found

    def calls_a_part(self, number: int) -> Any:
        return self.model[0](batch(100 + number, 0, 3)[0]).tolist()

    def saves_the_model(self, number: int) -> Any:
        return _sum_of(self.model.state_dict())

    def saves_the_optimizer(self, number: int) -> Any:
        return _sum_of(self.optimizer.state_dict())

    def looks_at_variables(self, number: int) -> Any:
        return {name: _sum_of(own.value) for name, own in self.step.variables.items()}

    def synchronizes(self, number: int) -> Any:
        self.step.synchronize()
        return values_of(self.model)

    def evaluates(self, number: int) -> Any:
        x, y = batch(100 + number, self.rank, 3)
        return float(self.step.evaluate(x, target=y))

    def accumulates(self, number: int) -> Any:
        x, y = batch(200 + number, self.rank, 3)
        return float(self.step.accumulate(x, target=y))

    def loads(self, number: int) -> Any:
        state = {name: value / 2 for name, value in self.model.state_dict().items()}
        self.model.load_state_dict(state)
        self.optimizer.load_state_dict(self.optimizer.state_dict())
        return None

    def writes_when_synchronized(self, number: int) -> Any:
        self.step.synchronize()
        with torch.no_grad():
            self.model[0].bias.fill_(0.25)
        return None

    def writes_in_flight(self, number: int) -> Any:
        """Is refused once; what is written again counts."""
        with torch.no_grad():
            self.model[0].bias.fill_(0.25)
        refusal = said(self.step.synchronize)
        with torch.no_grad():
            self.model[0].bias.fill_(0.25)
        return refusal

    def writes_state_in_flight(self, number: int) -> Any:
        """Is refused in the next call."""
        next(iter(self.optimizer.state.values()))["exp_avg"].fill_(0.5)
        x, y = batch(300 + number, self.rank, 2)
        refusal = said(lambda: self.step(x, target=y))
        next(iter(self.optimizer.state.values()))["exp_avg"].fill_(0.5)
        return refusal

    def freezes(self, number: int) -> None:
        for layer in [*self.model][:-1]:
            layer.requires_grad_(False)

    def unfreezes(self, number: int) -> None:
        """From then on its parameters have been updated less often than others."""
        self.model.requires_grad_(True)

    def copies(self, number: int) -> Any:
        refusal = said(lambda: copy.deepcopy(self.model))
        self.step.synchronize()
        return [refusal, _sum_of(copy.deepcopy(self.model).state_dict())]

    def raises_here(self, number: int) -> Any:
        """A call that fails on one worker alone: all may call the step again."""
        x, y = batch(400 + number, self.rank, 2)
        return said(lambda: self.step(x, target=y[:-1] if self.rank == 1 else y))

    def raises_in_forward(self, number: int) -> Any:
        """A call that fails on one worker when forward has begun to update what the one before has left."""
        x, y = batch(400 + number, self.rank, 2)
        refusal = said(lambda: self.step(x, target=y + 100 if self.rank == 1 else y))
        self.step.synchronize()
        return [refusal, sorted({float(state["step"]) for state in self.optimizer.state_dict()["state"].values()})]


def train(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Trains as one of the workers, with a scheduler, and leaves the step without waiting for its last buckets.

    Args:
        rank: of this worker.
        given: ``model``, ``optimizer``, ``devices``, ``sizes``, ``options`` as for `worker_training.train`; ``between``, lists of
            a step and of what is done after it; ``overlaps``, whether steps return with buckets in flight.
    """
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=rank)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    options = {"backend": "eager", "timeout_seconds": 100.0, **SMALL, **given.get("options", {})}
    losses, found, in_flight = [], [], []
    with mirrorc.compile(
        model,
        given["devices"][rank],
        optimizer=optimizer,
        loss_fn=nn.CrossEntropyLoss(),
        overlap_next_step=given["overlaps"],
        **options,
    ) as step:
        between = _Between(step, model, optimizer, rank)
        torch.manual_seed(5 if rank == 0 else 6)
        for number in range(given.get("steps", 6)):
            sizes = given["sizes"][number % len(given["sizes"])]
            x, y = batch(number, rank, sizes[rank])
            losses.append(float(step(x, target=y)))
            in_flight.append(step._is_in_flight())
            scheduler.step()
            for at, what in given.get("between", ()):
                if at == number:
                    found.append(getattr(between, what)(number))
        told = {"program": str(step.program), "explained": str(step.explain())}
    counts = [float(state["step"]) for state in optimizer.state.values() if "step" in state]
    state = _sum_of(
        [list(optimizer.state[own].values()) for own in model.parameters()]
    )  # not in the order of first updates
    told |= {"values": values_of(model), "state": state, "counts": counts}
    return {**told, "losses": losses, "found": found, "in_flight": in_flight}


def _hold_the_last(step: Any, count: int) -> list[Any]:
    """Lets the step's next call send all of ``count`` messages but the last one; gives a list for what ends that."""
    lane = step._joint.team.connections.buckets
    real, held, num_sent = lane.launch, [], 0

    def launch(collective: Any, done: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent < count:
            real(collective, done)
        else:
            held.append(done)

    lane.launch = launch
    return held


@contextlib.contextmanager
def _failing(updates: Any) -> Iterator[None]:
    real = updates.update

    def update(*_: Any) -> None:
        raise MemoryError("there is none")

    updates.update = update
    try:
        yield
    finally:
        updates.update = real


def _meet(folder: Path, name: str, rank: int, size: int) -> None:
    (folder / f"{name}-{rank}").touch()
    until = time.monotonic() + _LONGEST_SECONDS
    while not all((folder / f"{name}-{other}").exists() for other in range(size)):
        assert time.monotonic() < until, "the others do not come"
        time.sleep(0.005)


def fail_in_flight(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Trains as one of the workers; the third step returns everywhere, then worker ``culprit`` loses its last bucket, or fails in
    its update. Each worker finds that by a use of its own.

    Args:
        rank: of this worker.
        given: as for `train`, with ``uses`` of each worker, and a ``folder`` for files by which workers see how far others are.
    """
    model, optimizer = made(given["model"], "AdamW", seed=rank)
    folder, size = Path(given["folder"]), len(given["devices"])
    losses: list[float] = []
    options = {"backend": "eager", "timeout_seconds": 60.0, **SMALL, **given.get("options", {})}
    is_dealt = options.get("shard_optimizer", False)
    with mirrorc.compile(
        model,
        given["devices"][rank],
        optimizer=optimizer,
        loss_fn=nn.CrossEntropyLoss(),
        overlap_next_step=True,
        **options,
    ) as step:

        def call(number: int) -> None:
            x, y = batch(number, rank, given["sizes"][0][rank])
            losses.append(float(step(x, target=y)))

        call(0)
        call(1)
        if is_dealt:
            step.gather_optimizer_state()
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        is_lost = rank == given["culprit"] and given["strikes"] == "cut"
        num_sent = (1 + is_dealt) * len(step.program.packs)  # of what is dealt out, parameters as well
        held = _hold_the_last(step, num_sent) if is_lost else []
        call(2)
        _meet(folder, "returned", rank, size)
        for done in held:
            done(RuntimeError("the cable is cut"))
        uses = {
            "step": lambda: call(3),
            "synchronize": step.synchronize,
            "state_dict": model.state_dict,
            "optimizer": optimizer.state_dict,
            "close": step.close,
        }
        last = max(bucket.index for bucket in step.program.buckets)
        with contextlib.ExitStack() as stack:
            if rank == given["culprit"] and given["strikes"] == "update":
                stack.enter_context(_failing(step._state.optimizers.flat_optimizer(last, 0)))
            told: dict[str, Any] = {"failed": said(uses[given["uses"][rank]])}
        numbers = {bucket.index: [pack.number for pack in bucket.own_packs] for bucket in step.program.buckets}
        told |= {"packs": numbers, "lost": max(itertools.chain(*numbers.values()))}
        _meet(folder, "failed", rank, size)
        told["refused"] = [said(model.state_dict), said(lambda: step.evaluate(batch(2, rank, 2)[0]))]
        if "close" in given["uses"]:
            return {**told, "losses": losses}
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        call(2)
        call(3)
        step.synchronize()
    return {**told, "losses": losses, "values": values_of(model)}
