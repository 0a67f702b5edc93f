"""A front end that is declared outside of the package works like those within it."""

import contextlib
import copy
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import pytest
import torch
from references import train_step
from tiny_models import make_mlp, mlp_batch
from tiny_programs import captured_call, sgd_step
from torch.nn import functional as F

import mirrorc
from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.dynamo.dynamo_front_end import DynamoFrontEnd
from mirrorc.capture.front_ends.front_end import (
    Traced,
    front_end_named,
    ladder_named,
    register_front_end,
    unregister_front_end,
)
from mirrorc.options.table import grouped
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes


class CountingFrontEnd(DynamoFrontEnd):
    name = "counting"

    def __init__(self) -> None:
        self.shapes: list[tuple[int, ...]] = []

    def trace(
        self,
        stack: contextlib.ExitStack,
        call: TracedLoss,
        leaves: Sequence[torch.Tensor],
        decompositions: Mapping[Any, Callable[..., Any]],
    ) -> Traced:
        self.shapes.append(tuple(leaves[0].shape))
        return super().trace(stack, call, leaves, decompositions)


@pytest.fixture
def front_end() -> Iterator[CountingFrontEnd]:
    own = CountingFrontEnd()
    register_front_end(own)
    yield own
    unregister_front_end(own.name)


def captured_text(name: str) -> str:
    batch = mlp_batch(5)
    call = {"args": (batch["x"],), "kwargs": {"target": batch["target"]}}
    captured = captured_call(make_mlp(), F.cross_entropy, **call, num_devices=2, front_end=front_end_named(name))
    return run_passes(captured, default_pipeline()).to_text(regions=True)


@pytest.mark.slow
def test_a_front_end_from_outside_traces_each_shape_of_a_shard(front_end: CountingFrontEnd) -> None:
    assert captured_text("counting") == captured_text("dynamo")
    assert front_end.shapes == [(3, 6), (2, 6)]


@pytest.mark.slow
def test_a_step_is_captured_by_the_front_end_that_is_asked_for(front_end: CountingFrontEnd) -> None:
    model, batch = make_mlp(), mlp_batch(5)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss_fn": F.cross_entropy, "backend": "eager"}
    with mirrorc.compile(model, 2, **grouped({"capture": "counting", **options})) as step:  # type: ignore[arg-type]
        step(batch["x"], target=batch["target"])
    assert front_end.shapes == [(3, 6), (2, 6)]
    with pytest.raises(ValueError, match="capture is 'traced': choose one of auto, dynamo, autograd, counting"):
        mirrorc.compile(model, 2, **grouped({"capture": "traced", **options}))  # type: ignore[arg-type]


def test_a_rung_from_outside_is_tried_last() -> None:
    class Last(CountingFrontEnd):
        name = "last"

    register_front_end(Last(), is_rung=True)
    try:
        assert ladder_named("auto").names == ("dynamo", "autograd", "last")
    finally:
        unregister_front_end("last")
    assert ladder_named("auto").names == ("dynamo", "autograd")


def test_names_are_taken_once_and_unknown_ones_refused(front_end: CountingFrontEnd) -> None:
    with pytest.raises(ValueError, match="there is a front end 'counting' already: give this one another name"):
        register_front_end(CountingFrontEnd())
    with pytest.raises(ValueError, match="capture is 'no-such': choose one of auto, dynamo, autograd, counting"):
        front_end_named("no-such")


@pytest.mark.slow
def test_steps_may_be_compiled_in_several_threads_at_once() -> None:
    models = [make_mlp() for _ in range(3)]
    twins = copy.deepcopy(models)
    batches = [mlp_batch(4 + 2 * i, seed=i) for i in range(2)]
    losses: list[list[float]] = [[] for _ in models]
    errors: list[Exception] = []

    def train(model: torch.nn.Module, found: list[float]) -> None:
        try:
            with sgd_step(model, 2, loss_fn=F.cross_entropy) as step:
                found += [step(**batch).item() for batch in batches]
        except Exception as error:  # noqa: BLE001 - a thread's error is the test's
            errors.append(error)

    threads = [threading.Thread(target=train, args=pair) for pair in zip(models, losses, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert errors == [] and not torch.is_anomaly_enabled()
    for twin, found in zip(twins, losses, strict=True):
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        assert found == pytest.approx(
            [train_step(twin, optimizer, batch, F.cross_entropy) for batch in batches], rel=1e-10
        )
