"""Workers of which one loses a bucket when all have committed and updated the first one: what they say, how they go on."""

import contextlib
import copy
import io
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from worker_training import batch, made, values_of

import mirrorc
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer
from mirrorc.runtime.workers.transport.connections import BUCKETS

_LONGEST_SECONDS = 60.0


def _hold_back(step: Any, strike: Callable[[list[Any]], None], num_passing: int) -> None:
    """Lets the step's next call send so many messages of buckets; then, in a thread, calls ``strike`` with what ends others."""
    lane = step._coordinator.team.connections.lanes[BUCKETS]
    real, held, num_sent = lane.launch, [], 0

    def launch(collective: Any, done: Any) -> None:
        nonlocal num_sent
        num_sent += 1
        if num_sent <= num_passing:
            real(collective, done)
            return
        held.append(done)
        if len(held) == 1:
            threading.Thread(target=strike, args=(held,), daemon=True).start()

    lane.launch = launch


@contextlib.contextmanager
def _failing_update() -> Iterator[None]:
    real, num_made = FlatOptimizer.update, 0

    def update(self: FlatOptimizer, gradient: torch.Tensor) -> None:
        nonlocal num_made
        num_made += 1
        if num_made == 2:
            raise MemoryError("there is none")
        real(self, gradient)

    FlatOptimizer.update = update  # type: ignore[method-assign]
    try:
        yield
    finally:
        FlatOptimizer.update = real  # type: ignore[method-assign]


def _until(is_so: Callable[[], bool]) -> None:
    until = time.monotonic() + _LONGEST_SECONDS
    while not is_so():
        assert time.monotonic() < until, "it is never so"
        time.sleep(0.005)


def _said(use: Callable[[], Any]) -> str:
    try:
        use()
    except (mirrorc.MirrorcError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


def train_through_a_lost_bucket(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Trains as one of the workers; in the third step, worker ``culprit`` sends its first bucket alone, and then ``strikes``, or
    sends all, and fails in its second ``update``. Where the optimizer is dealt out, it sends all sums, and the new parameters
    of the first bucket that is gathered. Files in ``folder`` tell workers how far the others are."""
    model, optimizer = made("mlp", given.get("optimizer", "AdamW"), seed=rank)
    options = {"backend": "eager", "timeout": 60.0, "buckets": ByBytes(0.0005, 0.0005)}
    folder, size = Path(given["folder"]), len(given["devices"])
    losses: list[float] = []
    with mirrorc.compile(
        model,
        given["devices"][rank],
        optimizer=optimizer,
        loss_fn=nn.CrossEntropyLoss(),
        **grouped({**options, **given.get("options", {})}),
    ) as step:

        def train(number: int) -> None:
            x, y = batch(number, rank, given["sizes"][0][rank])
            losses.append(float(step(x, target=y)))

        train(0)
        train(1)
        is_dealt = "gather_parameters" in str(step.program)
        num_passing = len(step.program.buckets) + 1 if is_dealt else 1
        step.gather_optimizer_state()  # nothing to do where each worker has all of it
        kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

        def has_updated() -> bool:
            told = step._runs.last._progress.clause()
            return (
                f"bucket {len(step.program.buckets) - 1} of " in told if is_dealt else told.startswith("bucket 0 of ")
            )

        def tell() -> None:
            _until(has_updated)
            (folder / f"updated-{rank}").touch()

        def strike(held: list[Any]) -> None:
            _until(lambda: all((folder / f"updated-{other}").exists() for other in range(size)))
            if given["strikes"] == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            for done in held:
                done(RuntimeError("the cable is cut"))

        is_of_buckets = given["strikes"] != "update"
        teller = threading.Thread(target=tell if is_of_buckets else str, daemon=True)
        teller.start()
        began = time.monotonic()
        with contextlib.ExitStack() as stack:
            if rank == given["culprit"] and is_of_buckets:
                _hold_back(step, strike, num_passing)
            elif rank == given["culprit"]:
                stack.enter_context(_failing_update())
            told: dict[str, Any] = {"failed": _said(lambda: train(2)), "seconds": time.monotonic() - began}
        teller.join()
        x, y = batch(2, rank, 2)
        uses = {
            "step": lambda: train(2),
            "evaluate": lambda: step.evaluate(x, target=y),
            "variables": lambda: step.variables,
            "model": model.state_dict,
            "wrapper": nn.ModuleList([model]).state_dict,
            "optimizer": optimizer.state_dict,
            "copy": lambda: copy.deepcopy(model),
            "save": lambda: torch.save(model, io.BytesIO()),
            "prepare": lambda: step.prepare(x, target=y),
        }
        told["refused"] = {name: _said(use) for name, use in uses.items()}
        model.load_state_dict(kept[0])
        told["half"] = _said(lambda: step.evaluate(x, target=y))
        optimizer.load_state_dict(kept[1])
        uses.pop("step")
        told["restored"] = {name: _said(use) for name, use in uses.items() if name != "save"}
        if given["strikes"] != "kill":
            train(2)
            train(3)
        else:
            told["over"] = _said(lambda: train(2))
        return {**told, "losses": losses, "values": values_of(model), "explained": str(step.program)}
