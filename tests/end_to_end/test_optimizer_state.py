"""The user's optimizer and model stay the interface: state goes in and out in PyTorch's own format, at any time."""

import collections
import copy
import io
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import OptimizerMaker, assert_same_model, assert_same_state, refused, train_step, unchanged
from selections import exhaustive, slow
from small_modules import Parts
from tiny_models import make_mlp, mlp_batch
from torch import nn
from twins import MlpTwins, compiled_step, sgd

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


def saved_and_loaded(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file)


@pytest.mark.parametrize("name", KINDS_OF_STATE)
def test_state_of_a_single_device_run_goes_on(name: str) -> None:
    model = make_mlp()
    optimizer = STATEFUL[name](model.parameters())
    for seed in range(3):
        train_step(model, optimizer, mlp_batch(6, seed=seed), F.cross_entropy)
    with MlpTwins(STATEFUL[name], model=model) as pair:
        pair.on_both(lambda _, own: own.load_state_dict(saved_and_loaded(optimizer.state_dict())))
        pair.steps(3)
        pair.check()


@pytest.mark.parametrize("name", KINDS_OF_STATE)
def test_state_of_a_mirrored_run_goes_on_on_a_single_device(name: str) -> None:
    with MlpTwins(STATEFUL[name], devices=3) as pair:
        pair.steps(3)
        model = copy.deepcopy(pair.model)
        model.load_state_dict(saved_and_loaded(pair.model.state_dict()))
        optimizer = STATEFUL[name](model.parameters())
        optimizer.load_state_dict(saved_and_loaded(pair.optimizer.state_dict()))
        pair.twin_optimizer.load_state_dict(pair.twin_optimizer.state_dict())  # it turns some entries into other dtypes
        for _ in range(3):
            batch = pair.next_batch()
            train_step(model, optimizer, batch, F.cross_entropy)
            pair.plain(**batch)
        assert_same_model(model, pair.twin, TOLERANCE)
        assert_same_state(optimizer, pair.twin_optimizer, TOLERANCE)


@pytest.mark.parametrize("devices", [2, 3])
def test_state_goes_on_with_another_step(devices: int) -> None:
    with MlpTwins(ADAMW) as pair:
        pair.steps()
        first = pair.step
        pair.step = compiled_step(pair.model, F.cross_entropy, devices, optimizer=pair.optimizer)
        if devices != pair.devices:
            first.close()
        pair.devices = devices
        pair.steps()
        if devices == 2:  # both are open, and take turns
            second, pair.step = pair.step, first
            pair.steps()
            second.close()
        pair.check()


@pytest.mark.fast
def test_saved_state_is_small_and_each_parameter_has_a_count() -> None:
    with MlpTwins(ADAMW) as pair:
        pair.steps(2)
        states = pair.optimizer.state_dict()["state"].values()
        assert all(state.keys() == {"step", "exp_avg", "exp_avg_sq"} for state in states)
        assert len({state["step"].data_ptr() for state in states}) == len(list(pair.model.parameters()))
        assert all(state["step"] == 2 and state["step"].shape == () for state in states)
        pair.check()


@pytest.mark.parametrize(
    ("make_optimizer", "change"),
    [
        (ADAMW, {"lr": 0.1, "betas": (0.8, 0.99)}),
        (STATEFUL["adadelta"], {"rho": 0.5}),
        (MOMENTUM, {"momentum": 0.5, "weight_decay": 0.1}),
        (ADAMW, {"amsgrad": True}),
        *exhaustive((MOMENTUM, {"lr": 0.03}), (MOMENTUM, {"nesterov": True}), (ADAMW, {"maximize": True, "eps": 1e-3})),
    ],
    ids=str,
)
def test_hyperparameters_change_between_steps(make_optimizer: OptimizerMaker, change: dict[str, Any]) -> None:
    with MlpTwins(make_optimizer) as pair:
        pair.on_both(lambda _, own: own.param_groups[0].update(change) if "amsgrad" in change else None)
        pair.steps()
        pair.on_both(lambda _, own: own.param_groups[0].update(change))
        pair.steps()
        pair.check()


def other_counts(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    state = copy.deepcopy(optimizer.state_dict())
    for index, entries in state["state"].items():
        if "step" in entries:
            entries["step"] = torch.tensor(float(3 + index % 2))
    if isinstance(optimizer, torch.optim.SGD):
        del state["state"][1]  # a parameter without momentum yet
    optimizer.load_state_dict(state)


@pytest.mark.parametrize("make_optimizer", [ADAMW, STATEFUL["adadelta"], MOMENTUM], ids=["adamw", "adadelta", "sgd"])
def test_state_loaded_between_steps_is_honored(make_optimizer: OptimizerMaker) -> None:
    with MlpTwins(make_optimizer, devices=3) as pair:
        pair.steps(1)
        states = [copy.deepcopy(own.state_dict()) for own in (pair.optimizer, pair.twin_optimizer)]
        pair.steps(3)
        pair.optimizer.load_state_dict(states[0])
        pair.twin_optimizer.load_state_dict(states[1])
        pair.steps()
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


def test_a_frozen_and_a_trained_parameter_exchange_their_memory() -> None:
    model = make_mlp()
    model.first.bias.requires_grad_(False)
    with MlpTwins(ADAMW, model=model) as pair:
        pair.steps()
        pair.on_both(exchange_data)
        pair.steps()
        pair.check()


def test_buffers_written_between_steps_are_mirrored() -> None:
    class Scaled(Parts):
        def __init__(self) -> None:
            super().__init__(inner=make_mlp())
            self.register_buffer("scale", torch.ones((), dtype=torch.float64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * self.scale

    with MlpTwins(MOMENTUM, model=Scaled()) as pair:
        pair.steps(1)
        pair.on_both(lambda model, _: model.scale.fill_(3.0))
        pair.steps(1)
        pair.on_both(lambda model, _: model.load_state_dict({**model.state_dict(), "scale": torch.tensor(0.5)}))
        pair.steps(1)
        pair.check()


@pytest.mark.parametrize("make_optimizer", [ADAMW, STATEFUL["adadelta"], MOMENTUM], ids=["adamw", "adadelta", "sgd"])
def test_unfreezing_and_freezing_between_steps(make_optimizer: OptimizerMaker) -> None:
    model = make_mlp()
    model.first.requires_grad_(False)
    frozen = model.first.weight.clone()
    with MlpTwins(make_optimizer, model=model) as pair:
        pair.steps()
        assert torch.equal(model.first.weight, frozen)
        pair.on_both(lambda model, _: model.first.requires_grad_(True))
        pair.steps()
        assert not torch.equal(model.first.weight, frozen)
        pair.on_both(lambda model, _: model.second.requires_grad_(False))
        pair.steps()
        pair.check()


class WithUnused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = make_mlp()
        self.unused = nn.Linear(2, 2)
        self.frozen = nn.Parameter(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x) + self.frozen


@pytest.mark.parametrize("make_optimizer", [ADAMW, STATEFUL["adadelta"]], ids=["adamw", "adadelta"])
def test_frozen_and_unused_parameters_are_untouched(make_optimizer: OptimizerMaker) -> None:
    model = WithUnused()
    before = copy.deepcopy(model)
    with MlpTwins(lambda parameters: make_optimizer(parameters, weight_decay=0.5), model=model) as pair:
        pair.steps(3)
        assert torch.equal(model.frozen, before.frozen)
        assert_same_model(model.unused, before.unused, 0.0)
        assert len(pair.optimizer.state_dict()["state"]) == len(list(model.inner.parameters()))
        pair.check()


def test_a_frozen_parameter_outside_the_optimizer_is_readable() -> None:
    with MlpTwins(ADAMW, model=WithUnused(), select=lambda model: model.inner.parameters()) as pair:
        pair.steps()
        assert [torch.equal(value, pair.model.frozen) for value in pair.step.variables["frozen"].values] == [True, True]
        pair.check()


class Tied(Parts):
    def __init__(self) -> None:
        super().__init__(encoder=nn.Linear(6, 6, bias=False).double(), decoder=nn.Linear(6, 6).double())
        self.decoder.weight = self.encoder.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decoder(torch.tanh(self.encoder(x)))


@pytest.mark.parametrize("make_optimizer", [ADAMW, STATEFUL["adadelta"]], ids=["adamw", "adadelta"])
def test_tied_weights_are_one_variable(make_optimizer: OptimizerMaker) -> None:
    with MlpTwins(make_optimizer, model=Tied()) as pair:
        pair.steps(3)
        encoder, decoder = (pair.step.variables[name] for name in ("encoder.weight", "decoder.weight"))
        assert encoder.value.data_ptr() == decoder.value.data_ptr() and encoder.name == decoder.name
        assert pair.model.encoder.weight is pair.model.decoder.weight
        pair.check()


class MixedPrecision(Parts):
    def __init__(self, small: torch.dtype) -> None:
        super().__init__(small=small, first=nn.Linear(6, 16).double())
        self.second = nn.Linear(16, 16).float()  # wide enough for vectorized optimizers
        self.third = nn.Linear(16, 16).to(small)
        self.last = nn.Linear(16, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.first(x))
        hidden = hidden + torch.tanh(self.second(hidden.float())) + torch.tanh(self.third(hidden.to(self.small)))
        return self.last(hidden.double())


@pytest.mark.parametrize(
    ("make_optimizer", "small", "tolerance", "backend"),
    [
        (MOMENTUM, torch.float32, 1e-5, "eager"),
        *exhaustive((MOMENTUM, torch.bfloat16, 0.02, "eager")),
        (MOMENTUM, torch.float16, 0.005, "eager"),
        *exhaustive((ADAMW, torch.float32, 1e-5, "eager")),
        (ADAMW, torch.bfloat16, 0.02, "eager"),
        (STATEFUL["adagrad"], torch.bfloat16, 0.02, "eager"),
        (sgd, torch.bfloat16, 0.02, "inductor"),
    ],
)
def test_parameters_of_several_dtypes(
    make_optimizer: OptimizerMaker, small: torch.dtype, tolerance: float, backend: str
) -> None:
    torch.manual_seed(0)
    with MlpTwins(make_optimizer, model=MixedPrecision(small), tolerance=tolerance, backend=backend) as pair:
        pair.steps(2 if backend == "eager" else 1)
        assert_same_model(pair.model, pair.twin, tolerance)
        assert {p.dtype for p in pair.model.parameters()} == {torch.float64, torch.float32, small}


@pytest.mark.fast
def test_optimizer_over_some_of_the_parameters() -> None:
    with MlpTwins(ADAMW, select=lambda model: model.last.parameters()) as pair:
        before = copy.deepcopy(pair.model)
        pair.steps(3)
        assert torch.equal(pair.model.first.weight, before.first.weight)
        assert not torch.equal(pair.model.last.weight, before.last.weight)
        pair.check()


@pytest.mark.parametrize("make_optimizer", [ADAMW, STATEFUL["adadelta"], MOMENTUM], ids=["adamw", "adadelta", "sgd"])
def test_a_group_added_later_is_trained(make_optimizer: OptimizerMaker) -> None:
    with MlpTwins(make_optimizer, select=lambda model: model.last.parameters()) as pair:
        pair.steps()
        pair.on_both(lambda model, own: own.add_param_group({"params": list(model.first.parameters()), "lr": 0.02}))
        pair.steps()
        pair.check()


def test_step_hooks_run_with_every_step() -> None:
    calls: list[int] = []
    with MlpTwins(ADAMW) as pair:
        pair.optimizer.register_step_post_hook(lambda *_: calls.append(1))
        pair.steps(3)
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


def counts_in_place(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["step"].fill_(10.0)


def moments_in_place(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].zero_()


def trained_by_hand(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train_step(model, optimizer, mlp_batch(6, seed=77), F.cross_entropy)


def all_cleared(_: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.state.clear()


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
    counts_in_place,
    moments_in_place,
    trained_by_hand,
    all_cleared,
]


def test_any_change_of_the_state_is_honored() -> None:
    for change in CHANGES_OF_STATE:
        with MlpTwins(ADAMW) as pair:
            if change is trained_by_hand:
                pair.on_both(change)  # before the first step
            pair.steps(2)
            pair.on_both(change)
            pair.steps(1)
            pair.on_both(change)
            pair.steps(2)
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


@pytest.mark.parametrize(
    ("change", "make_optimizer"),
    [
        (popped_momentum, MOMENTUM),
        (momentum_of_none, MOMENTUM),
        (renamed_momentum, MOMENTUM),
        (other_counts, STATEFUL["nadam"]),
        (other_counts, ADAMW),
        (other_counts, MOMENTUM),
        (exchange_data, ADAMW),
        (load_other_weights, ADAMW),
        (write_in_place, STATEFUL["adadelta"]),
        (replace_data, ADAMW),
        (load_other_weights, STATEFUL["adadelta"]),
        (write_in_place, ADAMW),
        (replace_data, STATEFUL["adadelta"]),
    ],
)
def test_what_is_written_between_steps_is_honored(change: Callable[..., None], make_optimizer: OptimizerMaker) -> None:
    with MlpTwins(make_optimizer, devices=3) as pair:
        pair.steps(2)
        pair.on_both(change)
        pair.steps(2)
        pair.check()


def test_a_dict_of_state_that_the_user_holds_stays_the_optimizers() -> None:
    with MlpTwins(ADAMW) as pair:
        pair.on_both(lambda model, own: own.state[model.first.weight])  # makes an empty one
        held = [own.state[model.first.weight] for model, own in pair.sides]
        pair.steps(2)
        pair.on_both(one_cleared)  # which lays memory out anew
        pair.steps(1)
        for state in held:
            state["exp_avg"].fill_(2.0)
        pair.steps(1)
        for state in held:
            state["exp_avg_sq"] = state["exp_avg_sq"] * 2.0
        pair.steps(2)
        pair.check()


INCOMPLETE: list[tuple[str, dict[str, Any], str, str]] = [
    ("adamw", {"amsgrad": True}, "max_exp_avg_sq", "amsgrad=True"),
    ("rmsprop", {"centered": True}, "grad_avg", "centered=True"),
    ("rmsprop", {"momentum": 0.5}, "momentum_buffer", "momentum=0.5"),
]


def test_hyperparameters_that_need_other_state_are_refused_until_it_is_there() -> None:
    for name, change, entry, switch in INCOMPLETE:
        make = {**STATEFUL, "rmsprop": partial(torch.optim.RMSprop, lr=0.001)}[name]
        words = f"'[a-z.]*' has no '{entry}'\n.* must be complete with {switch}\n.*zeros_like"
        with MlpTwins(make) as pair:
            pair.steps(2)
            pair.on_both(lambda _, own, change=change: own.param_groups[0].update(change))
            with pytest.raises(KeyError, match=entry):
                pair.plain(**mlp_batch(6))
            for _ in range(2):
                with unchanged(pair.model, pair.optimizer), pytest.raises(ValueError, match=f"(?s){words}"):
                    pair.step(**mlp_batch(6))
            for _, own in pair.sides:
                for parameter, state in own.state.items():
                    state[entry] = torch.zeros_like(parameter)
            pair.steps(2)
            pair.check()


@pytest.mark.fast
def test_a_text_in_place_of_a_learning_rate_is_refused_before_the_commit() -> None:
    with MlpTwins(partial(torch.optim.AdamW, lr=0.1)) as pair:
        pair.steps(1)
        pair.optimizer.param_groups[0]["lr"] = "0.01"
        refused = pytest.raises(TypeError, match=r"MC1215: lr of AdamW group 0 is the text '0.01'.*\n  fix: .* float")
        with unchanged(pair.model), refused:
            pair.step(**mlp_batch(6))
        pair.on_both(lambda _, own: own.param_groups[0].update(lr=0.01))
        pair.steps(2)
        pair.check()


def test_state_that_lacks_an_entry_or_has_another_shape_is_refused() -> None:
    changes: list[tuple[Callable[[dict[str, Any]], Any], str]] = [
        (
            lambda state: state.pop("exp_avg"),
            "'second.weight' has no 'exp_avg'\n.* state that is there must be complete",
        ),
        (lambda state: state.pop("step"), "'second.weight' has no 'step'"),
        (lambda state: state.update(exp_avg=torch.zeros(())), r"'exp_avg' of AdamW for 'second.weight' is \[\], but"),
        (lambda state: state.update(exp_avg_sq=0.0), "'exp_avg_sq' of AdamW for 'second.weight' is float, but"),
        (
            lambda state: state.update(exp_avg=state["exp_avg"].float()),
            "'exp_avg' of AdamW for 'second.weight' is torch.float32, but the parameter is torch.float64.*load_state_dict",
        ),
    ]
    with MlpTwins(ADAMW) as pair:
        pair.steps(2)
        for change, words in changes:
            state = pair.optimizer.state[pair.model.second.weight]
            before = dict(state)
            change(state)
            with pytest.raises(ValueError, match=f"(?s){words}"):
                pair.step(**mlp_batch(6))
            state.update(before)
            pair.steps(2)
        pair.check()


def test_a_model_that_changes_its_dtype_needs_its_optimizers_state_cast() -> None:
    """torch's own update would fail half-way."""
    with MlpTwins(ADAMW) as pair:
        pair.steps(2)
        pair.on_both(lambda model, _: model.float())
        pair.tolerance = 1e-5
        batch = mlp_batch(6)
        batch = {**batch, "x": batch["x"].float()}
        for _ in range(2):
            with refused(ValueError, r"fix:  optimizer\.load_state_dict", pair.model, pair.optimizer):
                pair.step(**batch)
        pair.on_both(lambda _, own: own.load_state_dict(own.state_dict()))
        for _ in range(2):
            pair.train(**batch)
        assert_same_model(pair.model, pair.twin, 1e-5)
