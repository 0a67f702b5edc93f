"""Backwards of plain PyTorch give one gradient after the other: buckets begin meanwhile, and what fails reaches the user."""

import argparse
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from branching import SGD, TOLERANCE, batches
from references import assert_trains_alike, refused, train_mirrored, unchanged
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError
from mirrorc.packing import ByBytes, EqualPacks
from mirrorc.runtime.communication.shared_memory import SharedMemoryCommunicator

ONE_EACH = {"buckets": ByBytes(1e-4, 1e-4)}  # a bucket for each gradient, or nearly


class Tells(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.tell()
        return gradient, None


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(3)).double()
        self.tell: Callable[[int], None] = lambda number: None

    def branch(self, number: int, h: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.tanh() if row.sum().item() > 0 else 2 * row for row in h])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, layer in enumerate(self.layers):
            told = Tells.apply(layer(x), partial(self.tell, number))  # type: ignore[no-untyped-call]
            x = self.branch(number, told)
        return x


class Shares(Layers):
    def branch(self, number: int, h: torch.Tensor) -> torch.Tensor:
        return super().branch(number, self.layers[0](h) if number == 2 else h)


class Skips(Layers):
    def branch(self, number: int, h: torch.Tensor) -> torch.Tensor:
        h = super().branch(number, h)
        return torch.stack([row + self.layers[1](row) if number == 2 and row.sum().item() > 3 else row for row in h])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number in (0, 2):
            x = self.branch(number, self.layers[number](x))
        return x


class Looks(Layers):
    def branch(self, number: int, h: torch.Tensor) -> torch.Tensor:
        (slope,) = torch.autograd.grad(h.square().sum(), h, retain_graph=True)
        return super().branch(number, h * slope.detach().sigmoid())


class Comes(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, layer: nn.Module) -> torch.Tensor:
        ctx.layer = layer
        ctx.save_for_backward(x)
        with torch.no_grad():
            return layer(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            y = ctx.layer(x)
        torch.autograd.backward(y, gradient)
        return x.grad, None


class Reverses(Layers):
    def branch(self, number: int, h: torch.Tensor) -> torch.Tensor:
        return super().branch(number, Comes.apply(h, self.layers[1]) if number != 1 else h)  # type: ignore[no-untyped-call]


@pytest.mark.parametrize(
    ("kind", "num_devices"),
    [
        *((Layers, 2), (Skips, 3), (Reverses, 2)),
        (Shares, 2),
        (Looks, 2),
        (Layers, 1),
        (Layers, 3),
        (Shares, 3),
        (Skips, 1),
        (Skips, 2),
        (Looks, 1),
        (Reverses, 3),
    ],
)
def test_buckets_of_one_gradient_each_equal_one_device(kind: type[Layers], num_devices: int) -> None:
    data = batches(7, 5)
    assert_trains_alike(
        kind(), SGD, data, num_devices, F.cross_entropy, tolerance=TOLERANCE, capture="autograd", **ONE_EACH
    )


WAYS: list[dict[str, Any]] = [
    {"microbatches": 2},
    {"link": "copy"},
    {"placement": "mirrored", "algorithm": "ring"},
    {"clip_grad_norm": 1e6},
    {"buckets": EqualPacks(3)},
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_options_that_wait_and_send_between_regions(options: dict[str, Any]) -> None:
    data, own = batches(8, 6), {} if "buckets" in options else ONE_EACH
    assert_trains_alike(
        Skips(), SGD, data, 2, F.cross_entropy, tolerance=TOLERANCE, capture="autograd", **own, **options
    )


def compiled(model: Layers, devices: int = 2, **options: Any) -> mirrorc.Step:
    optimizer = SGD(model.parameters())
    asked: dict[str, Any] = {"capture": "autograd", **ONE_EACH, **options}
    return compiled_step(model, F.cross_entropy, devices, optimizer, **asked)


class Events:
    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kept = argparse.Namespace(of={})  # objects of the standard library are no state of the model
        launch = SharedMemoryCommunicator.launch_reduce_scatter

        def noted(communicator: Any, bucket: int, *given: Any) -> Any:
            self.note(f"launch {bucket}")
            return launch(communicator, bucket, *given)

        monkeypatch.setattr(SharedMemoryCommunicator, "launch_reduce_scatter", noted)

    @property
    def of(self) -> dict[int, list[str]]:
        return self._kept.of

    def note(self, event: str) -> None:
        self.of.setdefault(threading.get_ident(), []).append(event)

    def note_layer(self, number: int) -> None:
        self.note(f"layer {number}")


@pytest.mark.fast
def test_buckets_are_launched_while_backward_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    model, batch = Layers(), batches(6)[0]
    events = Events(monkeypatch)
    with compiled(model) as step:
        step(**batch)
        events.of.clear()
        model.tell = events.note_layer
        step(**batch)
        layers = [sorted({slot.variable.split(".")[1] for slot in b.slots}) for b in step.program.buckets]
    assert layers == [["2"], ["2"], ["1"], ["1"], ["0"], ["0"]]
    expected = ["layer 2", "launch 0", "launch 1", "layer 1", "launch 2", "launch 3", "layer 0", "launch 4", "launch 5"]
    assert list(events.of.values()) == [expected, expected]


@pytest.mark.fast
def test_a_parameter_that_a_call_does_not_use_holds_up_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    class Sometimes(Layers):
        uses_it = torch.tensor(True)

        def branch(self, number: int, h: torch.Tensor) -> torch.Tensor:
            return h * self.scale if number == 2 and self.uses_it else h

    model, batch = Sometimes(), batches(6)[0]
    events = Events(monkeypatch)
    model.scale = nn.Parameter(torch.ones(6, dtype=torch.float64))
    with compiled(model) as step:
        step(**batch)
        assert [slot.variable for slot in step.program.buckets[0].slots] == ["scale"]
        events.of.clear()
        model.tell, model.uses_it = events.note_layer, torch.tensor(False)
        step(**batch)
    for found in events.of.values():
        assert found[:3] == ["layer 2", "launch 0", "launch 1"]


def test_replicas_that_draw_wait_for_nobody_meanwhile() -> None:
    """One at a time draws from the generators of the process, so that the others could not come."""

    class Drops(Layers):
        def branch(self, number: int, h: torch.Tensor) -> torch.Tensor:
            return F.dropout(super().branch(number, h), 0.1)

    data = batches(6, 6)
    waits = {"algorithm": "ring", "placement": "mirrored"}
    for options in (waits, {}):
        torch.manual_seed(1)
        found = train_mirrored(
            Drops(), SGD, data, 2, F.cross_entropy, capture="autograd", timeout=20, **ONE_EACH, **options
        )
        if options:
            first = found
    torch.testing.assert_close(found.losses, first.losses, rtol=1e-12, atol=0.0)


@pytest.mark.parametrize("where", [2, 1, 0])
@pytest.mark.parametrize("devices", [1, 2])
def test_a_backward_that_fails_in_the_middle_changes_nothing(devices: int, where: int) -> None:
    model, batch = Layers(), batches(6)[0]

    def fail(number: int) -> None:
        if number == where:
            raise KeyError("no gradient of this layer")

    with compiled(model, devices) as step:
        before = step(**batch)
        for _ in range(2):
            model.tell = fail
            words = (
                rf"replica \d on cpu:\d in bwd_{2 * (2 - where)} raised KeyError: 'no gradient.*\n"
                r"  at:   test_backwards_in_parts\.py:\d+  raise KeyError.*\n  now:  No parameter was changed"
            )
            with unchanged(model), pytest.raises(ExecutionError, match=words):
                step(**batch)
            model.tell = lambda number: None
        assert step(**batch).item() < before.item()


def test_a_replica_that_fails_alone_stops_the_others_in_their_backward() -> None:
    model, batch = Layers(), batches(6)[0]
    failing = threading.Event()

    def fail_once(number: int) -> None:
        if number == 1 and not failing.is_set():
            failing.set()
            raise KeyError("no gradient of this layer")

    with compiled(model, 2, algorithm="ring", placement="mirrored", timeout=20) as step:
        step(**batch)
        model.tell = fail_once
        with unchanged(model), pytest.raises(ExecutionError, match=r"(?s)KeyError.*\n  now:  No parameter was changed"):
            step(**batch)
        step(**batch)


def test_a_gradient_that_is_added_to_behind_the_others_is_refused() -> None:
    """The first call has used the layer once, in the graph itself."""

    class Later(Layers):
        is_on = torch.tensor(False)

        def branch(self, number: int, h: torch.Tensor) -> torch.Tensor:
            return Comes.apply(h, self.layers[2]) if number == 0 and self.is_on else h  # type: ignore[no-untyped-call]

    model, batch = Later(), batches(6)[0]
    with compiled(model) as step:
        step(**batch)
        model.is_on = torch.tensor(True)
        with refused(ExecutionError, r"MC2602: a gradient of shape .* changed after it had been sent", model):
            step(**batch)
        model.is_on = torch.tensor(False)
        step(**batch)
