"""The user's optimizer and model stay the interface: state goes in and out in PyTorch's own format, at any time."""

from __future__ import annotations

import collections
import copy
import io
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import (
    OptimizerMaker,
    assert_mirrored,
    assert_same_model,
    assert_same_state,
    train_step,
    unchanged,
)
from selections import exhaustive, slow
from tiny_models import make_mlp, mlp_batch
from torch import nn
from twins import compiled_step

import mirrorc

TOLERANCE = 1e-10
STATEFUL: dict[str, OptimizerMaker] = {
    "sgd": partial(torch.optim.SGD, lr=0.1, momentum=0.9),
    "adam": partial(torch.optim.Adam, lr=0.01, amsgrad=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001, momentum=0.5, centered=True),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
}
MOMENTUM = STATEFUL["sgd"]
ADAMW = STATEFUL["adamw"]
# No step count; two moments and a third; state from the start; a scalar besides the step count; an optimizer by itself.
KINDS_OF_STATE = [
    "adam",
    "adadelta",
    *slow(("sgd",), ("adagrad",), ("nadam",)),
    *exhaustive(("adamw",), ("rmsprop",), ("adamax",), ("radam",)),
]


class Pair:
    def __init__(
        self,
        model: nn.Module,
        make_optimizer: OptimizerMaker,
        num_devices: int = 2,
        select: Callable[[nn.Module], Iterable[Any]] = lambda model: model.parameters(),
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = F.cross_entropy,
        **options: Any,
    ) -> None:
        self.model, self.twin = model, copy.deepcopy(model)
        self.optimizer, self.twin_optimizer = make_optimizer(select(self.model)), make_optimizer(select(self.twin))
        self.loss_fn, self.num_devices = loss_fn, num_devices
        options = {"backend": "eager", **options}
        self.step = mirrorc.compile(self.model, num_devices, optimizer=self.optimizer, loss_fn=loss_fn, **options)
        self._seed = 0

    def train(self, steps: int = 2) -> None:
        for _ in range(steps):
            self._seed += 1
            batch = mlp_batch(6, seed=self._seed)
            loss = self.step(**batch)
            expected = train_step(self.twin, self.twin_optimizer, batch, self.loss_fn)
            assert loss.item() == pytest.approx(expected, rel=TOLERANCE)
            assert_mirrored(self.step, self.model, self.num_devices)

    def on_both(self, change: Callable[[nn.Module, torch.optim.Optimizer], None]) -> None:
        change(self.model, self.optimizer)
        change(self.twin, self.twin_optimizer)

    def check(self) -> None:
        assert_same_model(self.model, self.twin, TOLERANCE)
        assert_same_state(self.optimizer, self.twin_optimizer, TOLERANCE)
        self.step.close()


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS_OF_STATE)
def test_state_of_a_single_device_run_goes_on(name: str) -> None:
    model = make_mlp()
    optimizer = STATEFUL[name](model.parameters())
    for seed in range(3):
        train_step(model, optimizer, mlp_batch(6, seed=seed), F.cross_entropy)
    pair = Pair(model, STATEFUL[name])
    pair.on_both(lambda _, own: own.load_state_dict(saved_and_loaded(optimizer.state_dict())))
    pair.train(3)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS_OF_STATE)
def test_state_of_a_mirrored_run_goes_on_on_a_single_device(name: str) -> None:
    pair = Pair(make_mlp(), STATEFUL[name], num_devices=3)
    pair.train(3)
    model = copy.deepcopy(pair.model)
    model.load_state_dict(saved_and_loaded(pair.model.state_dict()))
    optimizer = STATEFUL[name](model.parameters())
    optimizer.load_state_dict(saved_and_loaded(pair.optimizer.state_dict()))
    pair.twin_optimizer.load_state_dict(pair.twin_optimizer.state_dict())  # it turns some entries into other dtypes
    for seed in range(3):
        batch = mlp_batch(6, seed=100 + seed)
        train_step(model, optimizer, batch, F.cross_entropy)
        train_step(pair.twin, pair.twin_optimizer, batch, F.cross_entropy)
    assert_same_model(model, pair.twin, TOLERANCE)
    assert_same_state(optimizer, pair.twin_optimizer, TOLERANCE)
    pair.step.close()


@pytest.mark.slow
def test_state_moves_between_numbers_of_devices() -> None:
    pair = Pair(make_mlp(), ADAMW, num_devices=2)
    pair.train(2)
    pair.step.close()
    pair.step = compiled_step(pair.model, F.cross_entropy, 3, optimizer=pair.optimizer)
    pair.num_devices = 3
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_an_optimizer_that_has_stepped_before_compile_goes_on() -> None:
    model = make_mlp()
    pair = Pair(model, ADAMW)
    for seed in range(2):
        pair.on_both(
            lambda model, own, seed=seed: train_step(model, own, mlp_batch(6, seed=50 + seed), F.cross_entropy)
        )
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_step_counts_are_distinct_tensors() -> None:
    pair = Pair(make_mlp(), ADAMW)
    pair.train(2)
    counts = [state["step"] for state in pair.optimizer.state.values()]
    assert len({count.data_ptr() for count in counts}) == len(list(pair.model.parameters()))
    assert all(count == 2 and count.shape == () for count in counts)
    pair.train(1)
    assert all(state["step"] == 3 for state in pair.optimizer.state.values())
    pair.check()


def test_saved_state_is_small() -> None:
    pair = Pair(make_mlp(), ADAMW)
    pair.train(1)
    for state in pair.optimizer.state_dict()["state"].values():
        assert state.keys() == {"step", "exp_avg", "exp_avg_sq"}
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_optimizer", "change"),
    [
        (ADAMW, {"lr": 0.1, "betas": (0.8, 0.99)}),
        *slow((STATEFUL["adadelta"], {"rho": 0.5})),
        *slow((MOMENTUM, {"momentum": 0.5, "weight_decay": 0.1})),
        *slow((ADAMW, {"amsgrad": True})),
        *exhaustive((MOMENTUM, {"lr": 0.03}), (MOMENTUM, {"nesterov": True}), (ADAMW, {"maximize": True, "eps": 1e-3})),
    ],
    ids=str,
)
def test_hyperparameters_change_between_steps(make_optimizer: OptimizerMaker, change: dict[str, Any]) -> None:
    pair = Pair(make_mlp(), make_optimizer)
    pair.on_both(lambda _, own: own.param_groups[0].update(change) if "amsgrad" in change else None)
    pair.train(2)
    pair.on_both(lambda _, own: own.param_groups[0].update(change))
    pair.train(2)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["nadam", *slow(("adamw",), ("sgd",))])
def test_parameters_with_different_step_counts(name: str) -> None:
    def load(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        state = copy.deepcopy(optimizer.state_dict())
        for index, entries in state["state"].items():
            if "step" in entries:
                entries["step"] = torch.tensor(float(3 + index % 2))
        if name == "sgd":
            del state["state"][1]  # a parameter without momentum yet
        optimizer.load_state_dict(state)

    pair = Pair(make_mlp(), STATEFUL[name])
    pair.train(2)
    pair.on_both(load)
    pair.train(3)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_optimizer", [ADAMW, *slow((STATEFUL["adadelta"],), (MOMENTUM,))], ids=["adamw", "adadelta", "sgd"]
)
def test_state_loaded_between_steps_is_honored(make_optimizer: OptimizerMaker) -> None:
    pair = Pair(make_mlp(), make_optimizer, num_devices=3)
    pair.train(1)
    states = [copy.deepcopy(own.state_dict()) for own in (pair.optimizer, pair.twin_optimizer)]
    pair.train(3)
    pair.optimizer.load_state_dict(states[0])
    pair.twin_optimizer.load_state_dict(states[1])
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_state_cleared_between_steps_begins_afresh() -> None:
    pair = Pair(make_mlp(), ADAMW)
    pair.train(2)
    pair.on_both(lambda _, own: own.state.clear())
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_optimizer_state_written_in_place_is_honored() -> None:
    def write(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()

    pair = Pair(make_mlp(), ADAMW)
    pair.train(2)
    pair.on_both(write)
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_step_counts_written_in_place_are_honored() -> None:
    def write(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        for state in optimizer.state.values():
            state["step"].fill_(10.0)

    pair = Pair(make_mlp(), ADAMW)
    pair.train(2)
    pair.on_both(write)
    pair.train(2)
    pair.check()


def load_other_weights(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(9)
        model.load_state_dict(type(model)().double().state_dict())


def write_in_place(model: nn.Module, _: torch.optim.Optimizer) -> None:
    with torch.no_grad():
        model.first.weight.mul_(0.5)
        model.last.bias[1] = 3.0


def replace_data(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.second.weight.data = torch.full_like(model.second.weight, 0.1)
    model.first.bias.data = model.first.bias.data * 2.0


def exchange_data(model: nn.Module, _: torch.optim.Optimizer) -> None:
    model.first.bias.data, model.second.bias.data = model.second.bias.data, model.first.bias.data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "make_optimizer"),
    [
        (exchange_data, ADAMW),
        (load_other_weights, ADAMW),
        (write_in_place, STATEFUL["adadelta"]),
        (replace_data, ADAMW),
        *slow(
            (load_other_weights, STATEFUL["adadelta"]), (write_in_place, ADAMW), (replace_data, STATEFUL["adadelta"])
        ),
    ],
)
def test_weights_written_between_steps_are_mirrored(
    change: Callable[..., None], make_optimizer: OptimizerMaker
) -> None:
    pair = Pair(make_mlp(), make_optimizer, num_devices=3)
    pair.train(2)
    pair.on_both(change)
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_a_frozen_and_a_trained_parameter_exchange_their_memory() -> None:
    model = make_mlp()
    model.first.bias.requires_grad_(False)
    pair = Pair(model, ADAMW)
    pair.train(2)
    pair.on_both(exchange_data)
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_buffers_written_between_steps_are_mirrored() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_mlp()
            self.register_buffer("scale", torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    pair = Pair(Scaled(), MOMENTUM)
    pair.train(1)
    pair.on_both(lambda model, _: model.scale.fill_(3.0))
    pair.train(1)
    pair.on_both(lambda model, _: model.load_state_dict({**model.state_dict(), "scale": torch.tensor(0.5)}))
    pair.train(1)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_optimizer", [ADAMW, *slow((STATEFUL["adadelta"],), (MOMENTUM,))], ids=["adamw", "adadelta", "sgd"]
)
def test_unfreezing_and_freezing_between_steps(make_optimizer: OptimizerMaker) -> None:
    model = make_mlp()
    model.first.requires_grad_(False)
    pair = Pair(model, make_optimizer)
    frozen = model.first.weight.clone()
    pair.train(2)
    assert torch.equal(model.first.weight, frozen)
    pair.on_both(lambda model, _: model.first.requires_grad_(True))
    pair.train(2)
    assert not torch.equal(model.first.weight, frozen)
    pair.on_both(lambda model, _: model.second.requires_grad_(False))
    pair.train(2)
    pair.check()


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_mlp()
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.frozen


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [ADAMW, *slow((STATEFUL["adadelta"],))], ids=["adamw", "adadelta"])
def test_frozen_and_unused_parameters_are_untouched(make_optimizer: OptimizerMaker) -> None:
    model = WithUnused()
    before = copy.deepcopy(model)
    pair = Pair(model, lambda parameters: make_optimizer(parameters, weight_decay=0.5))
    pair.train(3)
    assert torch.equal(model.frozen, before.frozen)
    assert torch.equal(model.unused.weight, before.unused.weight)
    assert torch.equal(model.unused.bias, before.unused.bias)
    assert len(pair.optimizer.state_dict()["state"]) == len(list(model.inner.parameters()))
    pair.check()


@pytest.mark.slow
def test_a_frozen_parameter_outside_the_optimizer_is_readable() -> None:
    pair = Pair(WithUnused(), ADAMW, select=lambda model: model.inner.parameters())
    pair.train(2)
    assert [torch.equal(value, pair.model.frozen) for value in pair.step.variables["frozen"].values] == [True, True]
    pair.check()


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(6, 6, bias=False).double()
        self.decoder = nn.Linear(6, 6).double()
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


@pytest.mark.slow
@pytest.mark.parametrize("make_optimizer", [ADAMW, *slow((STATEFUL["adadelta"],))], ids=["adamw", "adadelta"])
def test_tied_weights_are_one_variable(make_optimizer: OptimizerMaker) -> None:
    pair = Pair(Tied(), make_optimizer)
    pair.train(3)
    variables = pair.step.variables
    assert variables["encoder.weight"].value.data_ptr() == variables["decoder.weight"].value.data_ptr()
    assert pair.model.encoder.weight is pair.model.decoder.weight
    assert len({variables[name].name for name in ("encoder.weight", "decoder.weight")}) == 1
    pair.check()


class MixedPrecision(nn.Module):
    def __init__(self, small: torch.dtype) -> None:
        super().__init__()
        self.small = small
        self.first = nn.Linear(6, 16).double()
        self.second = nn.Linear(16, 16).float()
        self.third = nn.Linear(16, 16).to(small)
        self.last = nn.Linear(16, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = hidden + torch.tanh(self.second(hidden.float())) + torch.tanh(self.third(hidden.to(self.small)))
        return self.last(hidden.double())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make_optimizer", "small", "tolerance"),
    [
        *slow((MOMENTUM, torch.float32, 1e-5)),
        *exhaustive((MOMENTUM, torch.bfloat16, 0.02)),
        *slow((MOMENTUM, torch.float16, 0.005)),
        *exhaustive((ADAMW, torch.float32, 1e-5)),
        (ADAMW, torch.bfloat16, 0.02),
        *slow((STATEFUL["adagrad"], torch.bfloat16, 0.02)),
    ],
    ids=["sgd-float32", "sgd-bfloat16", "sgd-float16", "adamw-float32", "adamw-bfloat16", "adagrad-bfloat16"],
)
def test_parameters_of_several_dtypes(make_optimizer: OptimizerMaker, small: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(0)
    model = MixedPrecision(small)
    twin = copy.deepcopy(model)
    optimizer, twin_optimizer = make_optimizer(model.parameters()), make_optimizer(twin.parameters())
    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        for seed in range(2):
            batch = mlp_batch(6, seed=seed)
            loss, expected = step(**batch), train_step(twin, twin_optimizer, batch, F.cross_entropy)
            assert loss.item() == pytest.approx(expected, rel=tolerance)
            assert_mirrored(step, model, 2)
    assert_same_model(model, twin, tolerance)
    assert {p.dtype for p in model.parameters()} == {torch.float64, torch.float32, small}


@pytest.mark.slow
def test_parameters_of_several_dtypes_when_compiled() -> None:
    torch.manual_seed(0)
    model, batch = MixedPrecision(torch.bfloat16), mlp_batch(6)
    twin = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mirrorc.compile(model, 2, optimizer=optimizer, loss_fn=F.cross_entropy) as step:
        loss = step(**batch)
        assert_mirrored(step, model, 2)
    expected = train_step(twin, torch.optim.SGD(twin.parameters(), lr=0.1), batch, F.cross_entropy)
    assert loss.item() == pytest.approx(expected, rel=1e-2)
    assert_same_model(model, twin, 0.02)


def test_optimizer_over_some_of_the_parameters() -> None:
    pair = Pair(make_mlp(), ADAMW, select=lambda model: model.last.parameters())
    before = copy.deepcopy(pair.model)
    pair.train(3)
    assert torch.equal(pair.model.first.weight, before.first.weight)
    assert not torch.equal(pair.model.last.weight, before.last.weight)
    pair.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "make_optimizer", [ADAMW, *slow((STATEFUL["adadelta"],), (MOMENTUM,))], ids=["adamw", "adadelta", "sgd"]
)
def test_a_group_added_later_is_trained(make_optimizer: OptimizerMaker) -> None:
    pair = Pair(make_mlp(), make_optimizer, select=lambda model: model.last.parameters())
    pair.train(2)
    pair.on_both(lambda model, own: own.add_param_group({"params": list(model.first.parameters()), "lr": 0.02}))
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_two_steps_in_turn_over_one_model() -> None:
    pair = Pair(make_mlp(), ADAMW)
    pair.train(2)
    first = pair.step
    pair.step = compiled_step(pair.model, F.cross_entropy, optimizer=pair.optimizer)
    pair.train(2)
    second, pair.step = pair.step, first
    pair.train(2)
    second.close()
    pair.check()


@pytest.mark.slow
def test_training_by_hand_between_steps_is_honored() -> None:
    pair = Pair(make_mlp(), ADAMW)
    pair.train(2)
    pair.on_both(lambda model, own: train_step(model, own, mlp_batch(6, seed=77), F.cross_entropy))
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_step_hooks_run_with_every_step() -> None:
    calls: list[int] = []
    pair = Pair(make_mlp(), ADAMW)
    pair.optimizer.register_step_post_hook(lambda *_: calls.append(1))
    pair.train(3)
    assert len(calls) == 3
    pair.check()


def replaced_moments(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 0.5)


def one_replaced_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = optimizer.state[model.second.weight]
    state["exp_avg_sq"] = state["exp_avg_sq"] * 4


def replaced_counts(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = torch.tensor(10.0)


def one_count_that_is_a_number(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.first.bias]["step"] = torch.tensor(7, dtype=torch.int64)


def as_torch_makes_it(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"] = state["step"].float()


def swapped_moments(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"].abs()


def cleared_in_place(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state.clear()


def one_cleared(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.last.weight].clear()
    optimizer.state.pop(model.last.bias)


def entry_of_ones_own(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state[model.last.weight]["note"] = "mine"
    optimizer.state[model.first.weight]["seen"] = [1, 2]


def third_moment(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["max_exp_avg_sq"] = state["exp_avg_sq"].clone()
    optimizer.param_groups[0]["amsgrad"] = True


def other_dict(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    old = optimizer.state
    optimizer.state = collections.defaultdict(dict, {p: {k: v.clone() for k, v in old[p].items()} for p in old})
    for state in optimizer.state.values():
        state["exp_avg"].neg_()


CHANGES_OF_STATE = [
    replaced_moments,
    one_replaced_moment,
    replaced_counts,
    one_count_that_is_a_number,
    swapped_moments,
    cleared_in_place,
    one_cleared,
    entry_of_ones_own,
    third_moment,
    other_dict,
]


@pytest.mark.slow
def test_any_change_of_the_state_is_honored() -> None:
    for change in CHANGES_OF_STATE:
        pair = Pair(make_mlp(), ADAMW)
        pair.train(2)
        pair.on_both(change)
        pair.train(1)
        pair.on_both(change)
        pair.train(2)
        if change is one_count_that_is_a_number:
            pair.on_both(as_torch_makes_it)
        pair.check()


def popped_momentum(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    del optimizer.state[model.second.weight]["momentum_buffer"]


def momentum_of_none(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["momentum_buffer"] = None


def renamed_momentum(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["of_old"] = state.pop("momentum_buffer")


@pytest.mark.slow
@pytest.mark.parametrize("change", [popped_momentum, *slow((momentum_of_none,), (renamed_momentum,))])
def test_momentum_that_was_removed_begins_afresh(change: Callable[..., None]) -> None:
    pair = Pair(make_mlp(), MOMENTUM)
    pair.train(2)
    pair.on_both(change)
    pair.train(2)
    pair.check()


@pytest.mark.slow
def test_a_dict_of_state_that_the_user_holds_stays_the_optimizers() -> None:
    pair = Pair(make_mlp(), ADAMW)
    pair.on_both(lambda model, own: own.state[model.first.weight])  # makes an empty one
    held = [
        own.state[model.first.weight] for own, model in ((pair.optimizer, pair.model), (pair.twin_optimizer, pair.twin))
    ]
    pair.train(2)
    pair.on_both(one_cleared)  # which lays memory out anew
    pair.train(1)
    for state in held:
        state["exp_avg"].fill_(2.0)
    pair.train(1)
    for state in held:
        state["exp_avg_sq"] = state["exp_avg_sq"] * 2.0
    pair.train(2)
    pair.check()


INCOMPLETE: list[tuple[str, dict[str, Any], str, str]] = [
    ("adamw", {"amsgrad": True}, "max_exp_avg_sq", "amsgrad=True"),
    ("rmsprop", {"centered": True}, "grad_avg", "centered=True"),
    ("rmsprop", {"momentum": 0.5}, "momentum_buffer", "momentum=0.5"),
]


@pytest.mark.slow
def test_hyperparameters_that_need_other_state_are_refused_until_it_is_there() -> None:
    for name, change, entry, switch in INCOMPLETE:
        make = {**STATEFUL, "rmsprop": partial(torch.optim.RMSprop, lr=0.001)}[name]
        pair = Pair(make_mlp(), make)
        pair.train(2)
        pair.on_both(lambda _, own, change=change: own.param_groups[0].update(change))
        with pytest.raises(KeyError, match=entry):
            train_step(pair.twin, pair.twin_optimizer, mlp_batch(6), F.cross_entropy)
        for _ in range(2):
            with (
                unchanged(pair.model, pair.optimizer),
                pytest.raises(
                    ValueError, match=f"'[a-z.]*' has no '{entry}', which it needs with {switch}.*zeros_like"
                ),
            ):
                pair.step(**mlp_batch(6))
        pair.on_both(
            lambda _, own, entry=entry: [s.update({entry: torch.zeros_like(p)}) for p, s in own.state.items()] and None
        )
        pair.train(2)
        pair.check()


@pytest.mark.slow
def test_state_that_lacks_an_entry_or_has_another_shape_is_refused() -> None:
    changes: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (lambda state: state.pop("exp_avg"), "'second.weight' has no 'exp_avg', which it needs once there is state"),
        (lambda state: state.pop("step"), "'second.weight' has no 'step'"),
        (lambda state: state.update(exp_avg=torch.zeros(())), r"'exp_avg' of AdamW for 'second.weight' is \[\], but"),
        (lambda state: state.update(exp_avg_sq=0.0), "'exp_avg_sq' of AdamW for 'second.weight' is float, but"),
        (
            lambda state: state.update(exp_avg=state["exp_avg"].float()),
            "'exp_avg' of AdamW for 'second.weight' is torch.float32, but the parameter is torch.float64.*load_state_dict",
        ),
    ]
    pair = Pair(make_mlp(), ADAMW)
    pair.train(2)
    for change, words in changes:
        state = pair.optimizer.state[pair.model.second.weight]
        before = dict(state)
        change(state)
        with pytest.raises(ValueError, match=words):
            pair.step(**mlp_batch(6))
        state.update(before)
        pair.train(2)
    pair.check()


@pytest.mark.slow
def test_a_model_that_changes_its_dtype_needs_its_optimizers_state_cast() -> None:
    """torch's own update would fail half-way."""
    pair = Pair(make_mlp(), ADAMW)
    pair.train(2)
    pair.on_both(lambda model, _: model.float() and None)
    batch = mlp_batch(6)
    batch = {**batch, "x": batch["x"].float()}
    for _ in range(2):
        with unchanged(pair.model, pair.optimizer), pytest.raises(ValueError, match=r"call optimizer\.load_state_dict"):
            pair.step(**batch)
    pair.on_both(lambda _, own: own.load_state_dict(own.state_dict()))
    for _ in range(2):
        loss = pair.step(**batch).item()
        assert loss == pytest.approx(train_step(pair.twin, pair.twin_optimizer, batch, F.cross_entropy), rel=1e-5)
    assert_same_model(pair.model, pair.twin, 1e-5)
