"""Parameters move into buckets: who else writes them is seen, and who else holds their memory is told."""

from __future__ import annotations

import copy
import itertools
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from games import Game
from references import assert_mirrored, assert_same_model, train_step
from selections import slow_but
from separate_memories import separate_memories
from tiny_models import make_mlp, mlp_batch
from torch import nn
from torch.nn import functional as F
from twins import MlpTwins, compiled_step

import mirrorc

ADAM = partial(torch.optim.Adam, lr=0.05)
COPIES = {"link": "copy", "disable": ("share-parameters",)}


def compiled(model: nn.Module, optimizer: Any, num_devices: int = 2, **options: Any) -> mirrorc.Step:
    options = {"loss_fn": F.cross_entropy} | options
    return compiled_step(model, devices=num_devices, optimizer=optimizer, **options)


@pytest.fixture(params=["shared", "copies", "two memories"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of compile; devices with memory of their own, such as GPUs, are CPUs that say so."""
    if request.param == "two memories":
        separate_memories(monkeypatch)
    return {} if request.param == "shared" else COPIES


@pytest.mark.slow
@pytest.mark.parametrize("who_is_compiled", ["both", "generator"])
def test_what_another_step_trains_is_read_as_it_is(way: dict[str, Any], who_is_compiled: str) -> None:
    def games() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, n)).double() for n in (3, 1)]
        make = partial(torch.optim.Adam, lr=0.05, fused=True)
        return [(Game(*nets, bool(i)), make(nets[i].parameters())) for i in (1, 0)]

    plain, own = games(), games()
    names = {"both": (0, 1), "generator": (1,)}[who_is_compiled]
    steps = {i: compiled(*own[i], loss_fn=None, **way) for i in names}
    for seed in range(6):
        torch.manual_seed(seed)
        batch = {"noise": torch.randn(6, 3).double(), "real": torch.randn(6, 3).double()}
        for i in range(2):
            expected = train_step(*plain[i], batch, None)
            found = steps[i](**batch).item() if i in steps else train_step(*own[i], batch, None)
            assert found == pytest.approx(expected, rel=1e-9)
            for model, optimizer in (plain[i], own[i]):
                model.zero_grad() if i not in steps else optimizer.zero_grad()
            plain[i][0].zero_grad()
    assert_same_model(own[0][0], plain[0][0], 1e-9)
    for i, step in steps.items():
        step(**batch)
        assert_mirrored(step, own[i][0], 2)
        step.close()


@pytest.mark.parametrize("num_devices", slow_but([2], [1, 2]))
def test_a_backward_through_parameters_that_a_step_has_changed_is_refused_by_torch(num_devices: int) -> None:
    model = make_mlp()
    with compiled(model, ADAM(model.parameters()), num_devices) as step:
        for _ in range(2):
            step(**mlp_batch(6))
            loss = F.cross_entropy(model(mlp_batch(4)["x"]), mlp_batch(4)["target"])
            step(**mlp_batch(6))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            model.zero_grad()


def swap(model: nn.Module, _: Any, kept: list[Any]) -> None:
    kept.append([p.data for p in model.parameters()])
    for p in model.parameters():
        p.data = p.data + 0.1


def put_back(model: nn.Module, _: Any, kept: list[Any]) -> None:
    for p, data in zip(model.parameters(), kept[-1], strict=True):
        p.data = data


def exchange(model: nn.Module, _: Any, kept: list[Any]) -> None:
    kept.append(model.first.bias.data)
    model.first.bias.data, model.first.bias.grad = model.first.bias.data.flip(0).clone(), None


def restart(_: nn.Module, optimizer: torch.optim.Optimizer, __: list[Any]) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data.zero_()


def restart_count(_: nn.Module, optimizer: torch.optim.Optimizer, __: list[Any]) -> None:
    for state in optimizer.state.values():
        state["step"].numpy()[...] = 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("events", "options"),
    [
        *itertools.product([(swap, exchange, swap, put_back), (restart_count,)], [COPIES]),
        *itertools.product([(swap, exchange, swap, put_back), (restart_count,)], [{}]),
        *itertools.product([(swap, put_back)], [{}, COPIES]),
        ((restart,), {}),  # moments that are written so are not seen by copies
    ],
)
def test_memory_that_is_replaced_or_written_behind_torchs_back(
    events: tuple[Callable[..., None], ...], options: dict[str, Any]
) -> None:
    with MlpTwins(ADAM, **options) as pair:
        kept: dict[int, list[Any]] = {id(model): [] for model, _ in pair.sides}
        for event in [None, *events, None, *events, None]:
            if event is not None:
                pair.on_both(lambda own, its, event=event: event(own, its, kept[id(own)]))
            pair.steps(1)
        pair.check()


def holders(model: nn.Module) -> Iterator[Any]:
    yield model.state_dict()
    yield [p.data for p in model.parameters()]
    yield [p.detach() for p in model.parameters()]
    yield model.second.weight[0].detach()
    yield model.second.weight.data.numpy()


TAKEN_BEFORE = (
    r"MC3207: .* taken before the first step .* \((1 parameter, |6 parameters, such as )'(first|second)\.weight'\)\n"
    r"(?s:.*) copy\.deepcopy\(model\.state_dict\(\)\)"
)


@pytest.mark.slow
@pytest.mark.parametrize("index", range(5))
def test_memory_of_parameters_that_others_hold_is_told_before_they_move(index: int) -> None:
    model = make_mlp()
    held = list(holders(model))[index]
    with compiled(model, ADAM(model.parameters())) as step:
        with pytest.warns(UserWarning, match=TAKEN_BEFORE) as told:
            step(**mlp_batch(6))
        assert len(told) == 1 and told[0].filename == __file__
        later = next(holders(model))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(**mlp_batch(6))
            step(**mlp_batch(3))
        assert all(torch.equal(later[name], value) for name, value in model.state_dict().items())
    del held


@pytest.mark.slow
def test_nothing_is_told_where_nobody_holds_the_memory_of_parameters() -> None:
    model = make_mlp()
    twin = copy.deepcopy(model)
    saved = copy.deepcopy(model.state_dict())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = ADAM(model.parameters())
    train_step(model, optimizer, mlp_batch(6), F.cross_entropy)
    circle: list[Any] = [model.state_dict()]  # garbage that is collected one day
    circle.append(circle)
    del circle
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compiled(model, optimizer, 3) as step:
            step(**mlp_batch(6))
            step(**mlp_batch(4, seed=1))
    assert_same_model(twin, make_mlp(), 0)
    assert saved and averaged is not None


def test_nothing_is_told_where_parameters_and_buffers_lie_in_one_memory() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    flat, begin = torch.zeros(100), 0
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            part = flat[begin : begin + value.numel()].view(value.shape).copy_(value)
            model.load_state_dict({name: part}, strict=False, assign=True)
            begin += value.numel()
    del flat, part, value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compiled_step(model, F.mse_loss, optimizer=ADAM) as step:
            step(torch.ones(4, 3), target=torch.zeros(4, 2))


@pytest.mark.slow
def test_parameters_in_memory_that_processes_share_are_refused() -> None:
    """Other processes would keep the values of before the first step."""
    model = make_mlp().share_memory()
    with compiled(model, ADAM(model.parameters())) as step:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"(?s)'first\.weight'.*share_memory.*load_state_dict"):
                step(**mlp_batch(6))
    assert all(p.is_shared() for p in model.parameters())
    model = make_mlp()
    with compiled(model, ADAM(model.parameters())) as step:
        step(**mlp_batch(6))
        model.share_memory()
        with pytest.raises(ValueError, match=r"share_memory"):
            step(**mlp_batch(6))
