"""What a step has left between two steps is neither used, shown nor saved until all of it is restored."""

import copy
import gc
import io
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import mirrorc
from mirrorc.errors import ExecutionError
from mirrorc.options.table import grouped
from mirrorc.runtime.state.shared.torn_state import TornState, refuse_torn

WHAT = "bucket 0 of 2 was updated"


def torn(kind: Any = torch.optim.AdamW) -> tuple[nn.Module, torch.optim.Optimizer, TornState, Any]:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = kind(model.parameters(), lr=0.1)
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    state = TornState(WHAT, dict(model.named_parameters()), [optimizer])
    state.guard(model, [optimizer])
    return model, optimizer, state, kept


USES: dict[str, Callable[[nn.Module, torch.optim.Optimizer], Any]] = {
    "model": lambda model, _: model.state_dict(),
    "part": lambda model, _: model[2].state_dict(),
    "whole": lambda model, _: nn.ModuleDict({"it": model}).state_dict(),
    "optimizer": lambda _, optimizer: optimizer.state_dict(),
    "copy": lambda model, _: copy.deepcopy(model),
    "save": lambda model, _: torch.save(model, io.BytesIO()),
    "step": lambda model, _: refuse_torn({id(parameter) for parameter in model.parameters()}),
}


@pytest.mark.parametrize("use", USES)
def test_a_use_is_refused_until_all_is_restored(use: str) -> None:
    model, optimizer, state, kept = torn()
    with pytest.raises(ExecutionError, match=f"{WHAT}\n.*6 parameters .* and the state of AdamW"):
        USES[use](model, optimizer)
    model.load_state_dict(kept[0])
    with pytest.raises(ExecutionError, match="still to be restored: the state of AdamW"):
        USES[use](model, optimizer)
    optimizer.load_state_dict(kept[1])
    USES[use](model, optimizer)
    assert state.is_restored


def test_one_parameter_that_was_not_written_is_named() -> None:
    model, optimizer, state, kept = torn()
    optimizer.load_state_dict(kept[1])
    model.load_state_dict({name: value for name, value in kept[0].items() if name != "2.bias"}, strict=False)
    with pytest.raises(ExecutionError, match=r"still to be restored: 1 parameter \(2.bias\)\n"):
        state.refuse()
    with torch.no_grad():
        model[2].bias.zero_()
    state.refuse()


def test_an_optimizer_without_state_needs_none() -> None:
    model, _, state, kept = torn(torch.optim.SGD)
    model.load_state_dict(kept[0])
    state.refuse()


def test_state_that_is_written_in_place_or_removed_is_restored() -> None:
    model, optimizer, state, kept = torn()
    model.load_state_dict(kept[0])
    for number, entries in enumerate(optimizer.state.values()):
        for value in list(entries.values()):
            value.mul_(1.0)
        if number == 0:
            entries.clear()
    assert state.is_restored


def test_plain_numbers_of_an_optimizer_are_restored_with_its_state() -> None:
    """Also where they are as they were: `load_state_dict` gives the very same objects."""
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.1, momentum=0.9)
    (parameter,) = optimizer.param_groups[0]["params"]
    optimizer.state[parameter] = {"step": 7, "is_warm": True}
    kept = copy.deepcopy(optimizer.state_dict())
    state = TornState(WHAT, {}, [optimizer])
    with pytest.raises(ExecutionError, match="still to be restored: the state of SGD"):
        state.refuse()
    optimizer.load_state_dict(kept)
    state.refuse()
    assert state.is_restored


def test_an_optimizer_that_takes_no_hooks_is_guarded_by_the_rest() -> None:
    class Bare(torch.optim.Optimizer):
        def __init__(self) -> None:
            self.state, self.param_groups = {}, []

    model = nn.Linear(2, 2)
    state = TornState(WHAT, dict(model.named_parameters()), [Bare()])
    state.guard(model, [Bare()])
    with pytest.raises(ExecutionError, match=WHAT):
        model.state_dict()


@pytest.mark.slow
def test_hooks_are_gone_after_the_next_use_and_others_are_not_concerned() -> None:
    model, optimizer, _, kept = torn()
    refuse_torn({id(parameter) for parameter in nn.Linear(1, 1).parameters()})
    model.load_state_dict(kept[0])
    optimizer.load_state_dict(kept[1])
    copied = copy.deepcopy(model)
    copied.state_dict()
    assert model[0]._state_dict_pre_hooks
    USES["step"](model, optimizer)
    assert not model[0]._state_dict_pre_hooks and not optimizer._optimizer_state_dict_pre_hooks


@pytest.mark.slow
def test_a_step_over_them_is_refused() -> None:
    model, optimizer, state, kept = torn()
    given = {"optimizer": optimizer, "loss_fn": nn.MSELoss(), "backend": "eager"}
    with mirrorc.compile(model, 2, **grouped(given)) as step:
        with pytest.raises(ExecutionError, match=WHAT):
            step(torch.ones(4, 3), target=torch.ones(4, 2))
        model.load_state_dict(kept[0])
        optimizer.load_state_dict(kept[1])
        step(torch.ones(4, 3), target=torch.ones(4, 2))
        assert step.variables["0.weight"].name == "0.weight"
    assert state.is_restored


@pytest.mark.slow
def test_nothing_keeps_them_alive() -> None:
    model, optimizer, _, _ = torn()
    refuse = {id(parameter) for parameter in model.parameters()}
    del model, optimizer, _
    gc.collect()
    refuse_torn(refuse)
