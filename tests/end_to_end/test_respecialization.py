"""One step holds several programs over the same variables, and notices what would make one of them untrue."""

import gc
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from references import assert_same_model, train_on_one_device, unchanged
from selections import slow_but
from small_modules import Parts, module_of
from tiny_models import make_mlp, mlp_batch
from torch import nn
from twins import Twins, compiled_step
from twins import same_each_time as seeded

import mirrorc
from mirrorc import MirrorcError
from mirrorc.compilation import program_cache

TOLERANCE = 1e-10
SGD = partial(torch.optim.SGD, lr=0.1)
ADAM = partial(torch.optim.Adam, lr=0.1)


class TwoHeads(Parts):
    def __init__(self) -> None:
        super().__init__(trunk=nn.Linear(4, 4), a=nn.Linear(4, 1), b=nn.Linear(4, 1))

    def forward(self, x: torch.Tensor, head: str) -> torch.Tensor:
        return (self.a if head == "a" else self.b)(torch.tanh(self.trunk(x)))


class Scaled(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(2, 1))
        self.register_buffer("scale", torch.tensor(1.0))
        self.attribute: Any = 1

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        later = getattr(self, "later", 1)
        factor = 2 if isinstance(self.attribute, float) else 1
        return (self.layer(x) * self.scale).mean() * factor * later


def regression_batch(seed: int, **more: Any) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(8, n, generator=generator, dtype=torch.float64) for n in (4, 1))
    return {"x": x, "target": target, **more}


def compiled(model: nn.Module, make_optimizer: Any = SGD, **options: Any) -> mirrorc.Step:
    return compiled_step(model, optimizer=make_optimizer, **options)


STILL = partial(SGD, lr=0.0)


@contextmanager
def warning_of_many() -> Iterator[list[str]]:
    """The text of the one warning of many compilations, once the block has ended."""
    texts: list[str] = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield texts
    (found,) = [warning for warning in caught if "compiled" in str(warning.message)]
    assert found.filename == __file__, "the warning points at the user's line"
    texts.append(str(found.message))


# Programs that train different parameters


@pytest.mark.parametrize("disabled", [(), ("share-parameters",)], ids=["shared", "mirrored"])
@pytest.mark.parametrize("make_optimizer", [ADAM, partial(SGD, momentum=0.9)], ids=["adam", "momentum"])
def test_two_heads_take_turns(make_optimizer: Any, disabled: tuple[str, ...]) -> None:
    with Twins(seeded(TwoHeads).double(), make_optimizer, F.mse_loss, disable=disabled) as pair:
        for i, head in enumerate("abababbba"):
            pair.train(**regression_batch(i, head=head))
        pair.check()


@pytest.mark.parametrize("order", ["ab", "ba", "aab"])
def test_a_head_without_a_step_has_no_state(order: str) -> None:
    """Until its own program has run, as on one device."""
    with Twins(seeded(TwoHeads).double(), ADAM, F.mse_loss) as pair:
        for i, head in enumerate(order):
            pair.train(**regression_batch(i, head=head))
            pair.check()


def test_a_layer_that_is_frozen_for_a_while() -> None:
    model = seeded(lambda: nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 1))).double()
    with Twins(model, ADAM, F.mse_loss) as pair:
        for i in range(6):
            batch = regression_batch(i)
            pair.on_both(lambda own, _, i=i: own[0].requires_grad_(i not in (2, 3)))
            pair.train(batch["x"], target=batch["target"])
        pair.check()
        assert [pair.optimizer.state[p]["step"].item() for p in pair.model.parameters()] == [4, 4, 6, 6]


# What was replaced


REPLACED: dict[str, tuple[str, Callable[[Any], object]]] = {
    "buffer": ("scale", lambda model: setattr(model, "scale", torch.tensor(100.0))),
    "module": ("layer", lambda model: setattr(model, "layer", nn.Linear(2, 1))),
    "parameter": ("weight", lambda model: setattr(model.layer, "weight", nn.Parameter(torch.ones(1, 2)))),
    "module of another class": ("layer", lambda model: setattr(model, "layer", nn.Sequential(nn.Linear(2, 1)))),
}


@pytest.mark.fast
@pytest.mark.parametrize("what", REPLACED)
@pytest.mark.parametrize("after_a_call", [True, False])
def test_what_is_replaced_is_refused(what: str, after_a_call: bool) -> None:
    name, replace = REPLACED[what]
    model = seeded(Scaled)
    x = torch.ones(4, 2)
    with compiled(model) as step:
        if after_a_call:
            step(x)
        replace(model)
        for _ in range(2):
            with unchanged(model), pytest.raises(ValueError, match=f"{name}.*was replaced"):
                step(x)


# What was added


class Growing(Parts):
    def __init__(self) -> None:
        super().__init__(layers=nn.ModuleList([nn.Linear(2, 2)]))
        self.extra: nn.Module | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.extra is not None:
            x = self.extra(x)
        return (x * getattr(self, "scale", 1.0)).mean()


def test_what_is_added_is_refused_by_name_if_it_is_read() -> None:
    added: list[tuple[str, Callable[[Any], object]]] = [
        ("parameter 'layers.1.weight'", lambda model: model.layers.append(nn.Linear(2, 2))),
        ("parameter 'layers.1.weight'", lambda model: model.layers.append(nn.BatchNorm1d(2))),
        ("parameter 'extra.weight'", lambda model: setattr(model, "extra", nn.Linear(2, 2))),
        ("parameter 'scale'", lambda model: setattr(model, "scale", nn.Parameter(torch.tensor(2.0)))),
        ("buffer 'scale'", lambda model: model.register_buffer("scale", torch.tensor(2.0))),
    ]
    for name, add in added:
        model = seeded(Growing)
        with compiled(model) as step:
            step(torch.ones(4, 2))
            add(model)
            for _ in range(2):
                with (
                    unchanged(model),
                    pytest.raises(ValueError, match=f"{name} was added since it was compiled") as why,
                ):
                    step(torch.ones(4, 2))
                assert "new optimizer over model.parameters()" in str(why.value)


def test_what_is_added_without_a_new_variable_is_obeyed() -> None:
    added: list[Callable[[Any], object]] = [
        lambda model: model.layers.append(model.layers[0]),
        lambda model: model.layers.append(nn.Tanh()),
        lambda model: setattr(model, "extra", model.layers[0]),
        lambda model: setattr(model, "extra", nn.Sequential(nn.Tanh(), model.layers[0])),
        lambda model: setattr(model, "scale", model.layers[0].bias),
        lambda model: model.register_buffer("unread", torch.tensor(2.0)),
        lambda model: setattr(model, "unread", nn.Linear(2, 2)),
    ]
    for add in added:
        with Twins(seeded(Growing).double()) as pair:
            for i in range(3):
                pair.train(torch.ones(4, 2, dtype=torch.float64))
                if i == 0:
                    add(pair.model), add(pair.twin)
            assert [name for name in pair.step.variables if name.startswith("layers.0")]


def test_what_was_added_may_change_again() -> None:
    def negative(model: Any) -> None:
        model.extra.slope = -0.0

    class Sloped(nn.Module):
        slope = 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * (2.0 + math.copysign(1.0, self.slope))

    changes: list[Callable[[Any], object]] = [
        lambda model: model.layers.append(model.layers[0]),
        lambda model: model.layers.__setitem__(1, model.other),
        lambda model: model.layers.__setitem__(1, model.layers[0]),
        lambda model: setattr(model, "scale", model.other.bias),
        lambda model: setattr(model, "scale", model.layers[0].bias),
        lambda model: model.layers.__delitem__(1),
        lambda model: model.layers.append(nn.Tanh()),
        lambda model: model.layers[1].register_forward_hook(lambda module, given, output: output * 2.0),
        lambda model: model.layers.__setitem__(1, nn.Sigmoid()),
        lambda model: model.layers[1].register_forward_pre_hook(lambda module, given: (given[0] * 2.0,)),
        lambda model: setattr(model, "extra", Sloped()),
        negative,
        lambda model: model.layers.append(nn.Dropout(1.0)),
        lambda model: model.layers[2].eval(),
    ]
    for devices in (1, 2):
        model, x = seeded(Growing).double(), torch.rand(4, 2, dtype=torch.float64)
        model.other = nn.Linear(2, 2).double()
        with Twins(model, devices=devices) as pair, pytest.warns(UserWarning, match="compiled 8 times"):
            for change in [lambda model: None, *changes]:
                change(pair.model), change(pair.twin)
                pair.train(x)


# Hooks


HOOKS = [
    lambda weight, hook: weight.register_hook(hook),
    lambda weight, hook: weight.register_post_accumulate_grad_hook(hook),
    lambda weight, hook: _of_accumulation(weight).register_hook(hook),
    lambda weight, hook: _of_accumulation(weight).register_prehook(hook),
]
_HELD: list[Any] = []


def _of_accumulation(weight: Any) -> Any:
    """The AccumulateGrad node, which lasts only while something holds it."""
    _HELD[:] = [weight.view_as(weight).grad_fn.next_functions[0][0]]
    return _HELD[0]


@pytest.mark.fast
@pytest.mark.parametrize("register", HOOKS, ids=["tensor", "post-accumulate", "node", "before-node"])
def test_a_hook_on_a_gradient_is_refused(register: Any) -> None:
    model = make_mlp()
    register(model.second.weight, lambda *_: None)
    with (
        pytest.raises(ValueError, match=r"second\.weight.*hook|hook.*second\.weight"),
        compiled(model, loss_fn=F.cross_entropy) as step,
    ):
        step(**mlp_batch(4))


@pytest.mark.parametrize("register", HOOKS, ids=["tensor", "post-accumulate", "node", "before-node"])
def test_a_hook_on_a_gradient_that_comes_later_is_refused(register: Any) -> None:
    model = make_mlp()
    with compiled(model, loss_fn=F.cross_entropy) as step:
        step(**mlp_batch(4))
        handle = register(model.second.weight, lambda *_: None)
        with unchanged(model), pytest.raises(ValueError, match=r"second\.weight.*hook|hook.*second\.weight"):
            step(**mlp_batch(4))
        handle.remove()
        step(**mlp_batch(4))


@pytest.mark.parametrize("register", ["register_step_pre_hook", "register_step_post_hook"])
def test_a_step_hook_that_comes_later_is_not_ignored(register: str) -> None:
    model = make_mlp()
    optimizer = SGD(model.parameters())
    called = []
    with compiled_step(model, F.cross_entropy, optimizer=optimizer) as step:
        step(**mlp_batch(4))
        getattr(optimizer, register)(lambda *arguments: called.append(1))
        try:
            step(**mlp_batch(4))
        except (TypeError, ValueError, MirrorcError) as error:
            assert "hook" in str(error)
        else:
            assert len(called) == 1


def test_a_forward_hook_that_comes_later_is_not_ignored() -> None:
    model = seeded(Scaled)
    x = torch.ones(4, 2)
    with compiled(model, STILL) as step:
        plain = step(x).item()
        handle = model.layer.register_forward_hook(lambda module, arguments, output: output * 100)
        assert step(x).item() == pytest.approx(100 * plain)
        handle.remove()
        assert step(x).item() == plain


# Plain state that a graph is specialized on


def test_attributes_respecialize() -> None:
    model = seeded(Scaled)
    x = torch.ones(4, 2)
    with compiled(model, STILL) as step:

        def check() -> None:
            assert step(x).item() == pytest.approx(model(x).item())

        for name, values in (("attribute", (1, 1.0, True, 1)), ("later", (3, 4))):  # the later one was not there before
            for value in values:
                setattr(model, name, value)
                check()
        del model.later
        check()


def test_an_attribute_may_become_anything() -> None:
    class Weighted(Parts):
        def __init__(self) -> None:
            super().__init__(layer=nn.Linear(2, 1), weights=None)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            weights: Any = self.weights
            if isinstance(weights, dict):
                weights = weights["all"]
            elif isinstance(weights, SimpleNamespace):
                weights = weights.all
            elif isinstance(weights, list):
                weights = weights[0]
            elif isinstance(weights, np.ndarray):
                weights = torch.as_tensor(weights)
            return (self.layer(x).mean() * (1.0 if weights is None else weights)).sum()

    model = seeded(Weighted)
    some = [torch.tensor([2.0, 3.0]), np.ones(3), [4.0], {"all": 5.0}, SimpleNamespace(all=6.0), -0.0, None, True]
    with compiled(model, STILL) as step:
        for value in (None, *some, *reversed(some)):
            model.weights = value
            assert step(torch.ones(4, 2)).item() == pytest.approx(model(torch.ones(4, 2)).item()), repr(value)


DEFAULTS: dict[str, tuple[Callable[[], Any], Callable[[Any], None], tuple[Any, Any]]] = {
    "dtype": (torch.get_default_dtype, torch.set_default_dtype, (torch.float32, torch.float64)),
    "determinism": (torch.are_deterministic_algorithms_enabled, torch.use_deterministic_algorithms, (False, True)),
}


@pytest.mark.fast
@pytest.mark.parametrize("name", slow_but(["determinism"], DEFAULTS))
def test_another_default_respecializes(name: str) -> None:
    get, set_default, (first, second) = DEFAULTS[name]
    before = get()
    model = module_of(
        lambda self, x: (self.weight * x + torch.ones(3)).mean() * (2 if get() == second else 1),
        weight=nn.Parameter(torch.ones((), dtype=torch.float32)),
    )
    try:
        with compiled(model, STILL) as step:
            for value in (first, second, first):
                set_default(value)
                loss = step(torch.ones(4, 3, dtype=torch.float32))
                assert loss.item() == (4.0 if value == second else 2.0)
                assert loss.dtype is torch.get_default_dtype(), "constants have it"
    finally:
        set_default(before)


# Dtypes of variables


def test_another_dtype_of_the_model_is_not_taken_back() -> None:
    model = seeded(lambda: nn.Linear(2, 1))

    def call(step: mirrorc.Step, dtype: torch.dtype) -> None:
        step(torch.ones(4, 2, dtype=dtype), target=torch.zeros(4, 1, dtype=dtype))

    with compiled(model, loss_fn=F.mse_loss) as step:
        call(step, torch.float32)
        model.double()
        try:
            call(step, torch.float64)
        except ValueError as error:
            assert "weight" in str(error)
            return
        assert model.weight.dtype is torch.float64
        with unchanged(model), pytest.raises((ValueError, MirrorcError), match=r"weight|bias|dtype"):
            call(step, torch.float32)
        call(step, torch.float64)
        assert model.weight.dtype is torch.float64


# Many programs


class TakesANumber(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(2, 1))

    def forward(self, x: torch.Tensor, temperature: float) -> torch.Tensor:
        return F.leaky_relu(self.layer(x), temperature).mean()


def test_many_programs_warn_once() -> None:
    with warning_of_many() as texts, compiled(TakesANumber()) as step:
        for i in range(12):
            step(torch.ones(4, 2), temperature=1.0 + i)
    said = "each new value of 'temperature' (1.0, 2.0, 3.0, ...) is compiled anew (temperature: leaky_relu() takes it"
    assert said in texts[0] and "mirrorc.replicated" in texts[0]
    assert "shape of" not in texts[0] and "dynamic=" not in texts[0]


def test_the_warning_names_every_argument_that_keeps_changing() -> None:
    loss_fn: Any = lambda output, target: (output - target["y"]).square().mean()  # noqa: E731
    with warning_of_many() as texts, compiled(seeded(TwoHeads), loss_fn=loss_fn, dynamic=False) as step:
        for i in range(8):
            x = torch.ones(4 + 2 * (i % 3), 4)
            step(x, head=f"head {i}", target={"y": torch.zeros(len(x), 1)})
    assert "the shape of 'x' ([2, 4], [3, 4], [4, 4])" in texts[0] and "'head' ('head 0', 'head 1', " in texts[0]
    assert "'target.y' ([2, 1], [3, 1], [4, 1])" in texts[0]
    assert "pad batches to few shapes, or leave Compiler(dynamic=) out" in texts[0]


def test_the_warning_names_attributes_that_keep_changing_and_what_to_do() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Dropout(0.0))
    with warning_of_many() as texts, compiled(model, loss_fn=F.mse_loss) as step:
        for i in range(8):
            model.global_step, model[1].p, model.name = i, 0.125 * i, "fixed"
            step(torch.ones(4, 2), target=torch.zeros(4, 2))
    assert "the model's 'global_step' (0, 1, 2, ...) and the model's '1.p' (0.0, 0.125, 0.25, ...)" in texts[0]
    assert "outside of the model" in texts[0] and "fixed" not in texts[0] and "training" not in texts[0]


def test_the_warning_about_settings_of_torch_says_what_to_do() -> None:
    settings = itertools.product(("highest", "high"), (False, True), (None, torch.bfloat16, torch.float16))
    before, model = torch.get_float32_matmul_precision(), seeded(lambda: nn.Linear(2, 2))
    try:
        with warning_of_many() as texts, compiled(model, loss_fn=F.mse_loss) as step:
            for precision, is_deterministic, dtype in itertools.islice(settings, 8):
                torch.set_float32_matmul_precision(precision)
                torch.use_deterministic_algorithms(is_deterministic)
                with torch.autocast("cpu", dtype, enabled=dtype is not None):
                    step(torch.ones(4, 2), target=torch.zeros(4, 2))
    finally:
        torch.set_float32_matmul_precision(before)
        torch.use_deterministic_algorithms(False)
    assert "each new value of torch's modes is compiled anew" in texts[0] and "mirrorc.replicated" not in texts[0]
    assert "under the same settings of torch" in texts[0]


def test_a_step_keeps_the_programs_that_were_used_last(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program_cache, "MOST_SPECIALIZATIONS", 2)
    model = seeded(TakesANumber).double()
    numbers = [1.0, 2.0, 1.0, 3.0, 1.0, 2.0]
    batches = [{"x": torch.ones(4, 2, dtype=torch.float64), "temperature": number} for number in numbers]
    single = train_on_one_device(model, SGD, batches)
    with compiled(model) as step:
        programs = []
        for batch in batches:
            step(**batch)
            programs.append(weakref.ref(step.programs[-1]))
        gc.collect()
        used = [programs.index(program) for program in programs]
        assert used == [0, 1, 0, 3, 0, 5], "2.0 was not used for longest when 3.0 came, and was compiled again"
        assert [program() is None for program in programs] == [False, True, False, True, False, False]
    assert_same_model(model, single.model, TOLERANCE)


def test_a_few_programs_do_not_warn() -> None:
    with compiled(TakesANumber()) as step, warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for i in range(20):
            step(torch.ones(4, 2), temperature=float(i % 2))


def test_what_is_replaced_by_loading_is_named() -> None:
    model = nn.Sequential(nn.Linear(2, 1), nn.BatchNorm1d(1))
    with compiled(model, loss_fn=F.mse_loss) as step:
        step(torch.ones(4, 2), target=torch.zeros(4, 1))
        other = {name: value.clone() for name, value in model.state_dict().items()}
        model.load_state_dict(other)
        step(torch.ones(4, 2), target=torch.zeros(4, 1))
        model[1].load_state_dict({name[2:]: value for name, value in other.items() if name[0] == "1"}, assign=True)
        with pytest.raises(ValueError, match=r"parameter '1\.weight' was replaced (?s:.*) without assign=True"):
            step(torch.ones(4, 2), target=torch.zeros(4, 1))
