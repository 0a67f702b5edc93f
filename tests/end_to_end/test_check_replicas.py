"""check_replicas_every finds memory of one replica that has gone bad, before a step spreads it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from references import unchanged
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc import ExecutionError
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes

UNSHARED: dict[str, Any] = {"disable": ["share-parameters"], "buckets": ByBytes(1e-4, 1e-4)}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.first(x))) * self.frozen


BATCH = {"x": torch.linspace(-1, 1, 36).reshape(6, 6).sin(), "target": torch.tensor([0, 1, 2, 0, 1, 2])}


def compiled(
    devices: int, every: int, optimizer: Any = torch.optim.AdamW, **options: Any
) -> tuple[Any, nn.Module, Any]:
    torch.manual_seed(0)
    model = Net()
    own = optimizer(model.parameters(), lr=0.01)
    given = {"loss_fn": F.cross_entropy, "backend": "eager", "check_replicas_every": every, **options}
    return mirrorc.compile(model, devices, optimizer=own, **grouped(given)), model, own


def flip_a_bit(tensor: torch.Tensor) -> None:
    tensor.detach().view(-1).view(torch.uint8).numpy()[-1] ^= 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "replica", "who"),
    [(3, 1, "cpu:1 differs from cpu:0 and cpu:2 \\(\\d bytes?\\)"), (2, 0, "none has a majority")],
)
def test_a_parameter_gone_bad_is_named_until_a_checkpoint_is_loaded(devices: int, replica: int, who: str) -> None:
    step, model, own = compiled(devices, 3, **UNSHARED)
    with step:
        for _ in range(3):
            step(**BATCH)  # the third is checked
        kept = {name: value.clone() for name, value in model.state_dict().items()}
        flip_a_bit(step.variables["last.weight"].values[replica])
        flip_a_bit(step.variables["norm.bias"].values[replica])
        for _ in range(2):
            step(**BATCH)  # not checked
        for _ in range(2):  # nothing has been mended in between
            with (
                unchanged(model, own),
                pytest.raises(
                    ExecutionError, match=rf"'norm.bias' are not equal any more\n.*{who}.*\n.*\n.*load a checkpoint"
                ),
            ):
                step(**BATCH)
        model.load_state_dict(kept)
        own.load_state_dict(own.state_dict())
        for _ in range(4):
            step(**BATCH)
        for name, _ in model.named_parameters():
            assert all(torch.equal(value, step.variables[name].value) for value in step.variables[name].values)


@pytest.mark.slow
def test_bad_state_of_the_optimizer_is_named() -> None:
    for optimizer, entry in ((torch.optim.AdamW, "exp_avg_sq"), (torch.optim.RMSprop, "square_avg")):
        step, _, own = compiled(2, 1, optimizer, **UNSHARED)
        with step:
            for _ in range(2):
                step(**BATCH)
            found = next(t for _, key, t in step._state.optimizers.copies() if key == entry)
            flip_a_bit(found[1][:1])
            with pytest.raises(ExecutionError, match=rf"the replicas' copies of {entry} of '[\w.]+' are not equal"):
                step(**BATCH)
            own.load_state_dict(own.state_dict())
            step(**BATCH)


def test_copies_of_what_an_optimizer_by_itself_updates_are_compared_too() -> None:
    step, model, _ = compiled(2, 1, torch.optim.Adadelta, **UNSHARED)
    with step:
        step(**BATCH)
        flip_a_bit(step.variables["first.bias"].values[1])
        with pytest.raises(ExecutionError, match=r"the replicas' copies of 'first\.bias' are not equal any more"):
            step(**BATCH)
        model.load_state_dict(model.state_dict())
        step(**BATCH)
        assert torch.equal(*step.variables["first.bias"].values)


def test_calls_for_gradients_copy_parameters_in_place_of_comparing_them() -> None:
    step, _, _ = compiled(2, 1, **UNSHARED)
    with step:
        step(**BATCH)
        copies = step.variables["first.bias"].values
        flip_a_bit(copies[1])
        assert not torch.equal(*copies)
        step.gradients(**BATCH)
        assert torch.equal(*copies)


@pytest.mark.slow
def test_what_replicas_have_of_their_own_is_not_compared() -> None:
    step, model, _ = compiled(3, 1, **UNSHARED)
    with step:
        for training in (True, True, False, False, True):
            model.train(training)
            step(**BATCH)
        values = step.variables["norm.running_mean"].values
        assert not torch.equal(values[0], values[1])


@pytest.mark.slow
def test_devices_that_share_their_parameters_are_said_to_have_nothing_to_compare() -> None:
    for devices, options, why in (
        (1, {}, "there is one device"),
        (2, {}, "parameters and optimizer state are kept once for all devices"),
        (2, UNSHARED, None),
    ):
        step, _, _ = compiled(devices, 1, **options)
        with step:
            step(**BATCH)
            step(**BATCH)
            said = f"# remark: check_replicas_every has nothing to compare: {why}"
            assert (said in str(step.program)) is (why is not None)


def test_wrong_numbers_are_refused() -> None:
    for every, error in ((-1, ValueError), (True, TypeError), (1.5, TypeError), ("2", TypeError), (None, TypeError)):
        with pytest.raises(error, match="check_replicas_every is"):
            compiled(2, every)  # type: ignore[arg-type]
    step, _, _ = compiled(2, 0)
    step.close()
