"""Spectral norms iterate their vectors once in each forward, as on one device with the whole batch, on all replicas alike."""

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from games import Turns
from references import assert_same_model, unchanged
from selections import exhaustive, slow, slow_but
from separate_memories import separate_memories
from small_modules import Parts, module_of
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from twins import Twins, compiled_step, sgd

import mirrorc
from mirrorc.errors import CaptureError, ExecutionError
from mirrorc.ir.variables import Aggregation

SIZES = (6, 1, 5, 2)
LONG = [(0, 6), (1, 6), (1, 1), (0, 1), (1, 5), (0, 6)]
COPIES = {"link": "copy", "disable": ("share-parameters",)}


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = spectral_norm(nn.Conv1d(1, 2, 3))
        self.head = spectral_norm(nn.Linear(8, 2), n_power_iterations=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def judged(y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.convolution(y.unsqueeze(1)).tanh().flatten(1))
            return out

        return judged(x) - judged(-x)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 6).double(), torch.randn(size, 2).double()


def assert_alike(step: mirrorc.Step, prefix: str = "") -> None:
    vectors = [v for name, v in step.variables.items() if name.startswith(prefix) and name.endswith(("._u", "._v"))]
    assert vectors and all(v.aggregation is Aggregation.SAME for v in vectors)
    assert all(torch.equal(value, v.value) for v in vectors for value in v.values)


@pytest.mark.parametrize(
    ("num_devices", "sizes", "options", "memories"),
    [
        (3, (6, 1), {}, "one"),
        (2, (4, 1), {"capture": "autograd", "microbatches": 2}, "one"),
        (3, SIZES, {"capture": "autograd"}, "two"),
        (2, (4,), {"microbatches": 2}, "two"),
        (1, SIZES, {}, "one"),
        (2, SIZES, {}, "two"),
        *exhaustive(
            (2, SIZES, {"backend": "inductor"}, "one"),
            (3, SIZES, {}, "one"),
            (2, SIZES, {"microbatches": 2}, "one"),
            (1, SIZES, {"microbatches": 3}, "one"),
        ),
    ],
)
def test_vectors_are_those_of_one_device(
    num_devices: int, sizes: tuple[int, ...], options: dict[str, Any], memories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a batch has fewer examples than devices, in accumulated gradients, evaluations and a forward of the user's."""
    if memories == "two":
        separate_memories(monkeypatch)
        options = {**options, **COPIES}
    torch.manual_seed(0)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with Twins(Bounded().double(), make, F.mse_loss, num_devices, **options) as pair:
        step, twin = pair.step, pair.twin

        def evaluated() -> None:
            expected = F.mse_loss(twin(x), y).detach()
            torch.testing.assert_close(step.evaluate(x, target=y), expected, rtol=1e-10, atol=1e-12)

        for size in sizes:
            x, y = batch(size)
            pair.train(x, target=y)
        assert_alike(step)
        if sizes == SIZES:
            (x, y), (u, v) = batch(4), batch(4)
            step.accumulate(x, target=y)
            step(u, target=v)
            pair.backward(x, target=y, loss_scale=0.5)
            pair.backward(u, target=v, loss_scale=0.5)
            pair.update()
            evaluated()
            pair.on_both(lambda own, _: own(x))
            step.evaluate(x)
            twin(x)
            assert_alike(step)
            pair.on_both(lambda own, _: own.eval())
            evaluated()
        assert_same_model(pair.model, twin, 1e-9)


def game(num_devices: int) -> Turns:
    torch.manual_seed(0)
    generator = nn.Linear(3, 3).double()
    critic = nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh(), spectral_norm(nn.Linear(4, 1))).double()
    losses = (
        lambda made, real: -critic(made).mean(),
        lambda judged, noise: critic(generator(noise).detach()).mean() - judged.mean(),
    )
    nets = (generator, critic)
    return Turns(nets, [sgd(net.parameters()) for net in nets], losses, num_devices)


@pytest.mark.parametrize(
    ("num_devices", "turns"), [(2, [(0, 4), (1, 1)]), (3, LONG), *exhaustive((1, LONG), (2, LONG))]
)
def test_a_critic_outside_of_the_model_iterates_in_both_steps(num_devices: int, turns: list[Any]) -> None:
    own, plain = game(num_devices), game(0)
    for turn, size in turns:
        x = torch.randn(size, 3).double()
        torch.testing.assert_close(own.train(turn, x), plain.train(turn, x), rtol=1e-10, atol=1e-12)
    assert_same_model(own.nets, plain.nets, 1e-9)
    assert_alike(own.steps[0], "outside.critic.")
    own.close()


@pytest.mark.fast
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_vectors_of_weights_that_are_drawn_at_random_are_each_replicas_own(capture: str) -> None:
    layer = nn.Linear(8, 8)  # so many elements that no two replicas draw the same mask
    parametrize.register_parametrization(layer, "weight", nn.Dropout(0.5))
    with compiled_step(spectral_norm(layer), F.mse_loss, capture=capture) as step:
        step(torch.ones(4, 8), target=torch.ones(4, 8))
        vector = step.variables["parametrizations.weight.1._u"]
        assert vector.aggregation is Aggregation.MEAN and not torch.equal(*vector.values)


def test_calls_that_follow_the_size_of_a_shard_are_refused() -> None:
    model = module_of(
        lambda self, x: torch.stack([self.layer(row) for row in x]),
        layer=nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3)),
    )
    with (
        compiled_step(model, nn.functional.mse_loss) as step,
        pytest.raises(mirrorc.CaptureError, match="is iterated another number of times for shards of other sizes"),
    ):
        step(torch.randn(5, 4), target=torch.randn(5, 3))


class ByData(Parts):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x)
        return self.layer(hidden) if x.sum() > 0 else hidden


@pytest.mark.fast
def test_a_step_of_plain_pytorch_whose_shards_iterate_otherwise_is_refused() -> None:
    model, x = ByData(layer=spectral_norm(nn.Linear(4, 4))), torch.rand(4, 4)
    words = r"spectral norm '.*_[uv]' was computed more often"
    with compiled_step(model, F.mse_loss, capture="autograd") as step:
        step(x, target=x)
        with unchanged(model), pytest.raises(mirrorc.ExecutionError, match=f"(?s){words}"):
            step(torch.cat([x[:2], -x[2:]]), target=x)
        step(-x, target=x)
        assert_alike(step)


# Weights that `torch.nn.utils.parametrize.cached` keeps are refused: replicas have weights of their own and one cache.


class Symmetric(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.triu() + weight.triu(1).T


class Net(nn.Module):
    def __init__(self, *, caches: bool) -> None:
        super().__init__()
        self.layer = parametrize.register_parametrization(nn.Linear(3, 3), "weight", Symmetric())
        self.caches = caches

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached() if self.caches else contextlib.nullcontext():
            return self.layer(self.layer(x).tanh())


def batch_of_squares() -> torch.Tensor:
    return torch.ones(4, 3, dtype=torch.float64)


@pytest.mark.fast
@pytest.mark.parametrize("capture", ["autograd", *slow(("dynamo",), ("auto",))])
@pytest.mark.parametrize("is_inside", [False, True], ids=["around the step", "in forward"])
def test_a_cache_is_refused(capture: str, is_inside: bool) -> None:
    model = Net(caches=is_inside).double()
    with compiled_step(model, F.mse_loss, capture=capture) as step:
        around = contextlib.nullcontext() if is_inside else parametrize.cached()
        with unchanged(model), around, pytest.raises(CaptureError, match=r"MC2301.*parametrize\.cached\(\)"):
            step(batch_of_squares(), target=batch_of_squares())
        model.caches = False
        step(batch_of_squares(), target=batch_of_squares())


def test_a_cache_around_a_later_step_is_refused_as_well() -> None:
    model = Net(caches=False).double()
    with compiled_step(model, F.mse_loss, capture="autograd") as step:
        step(batch_of_squares(), target=batch_of_squares())
        with unchanged(model), parametrize.cached(), pytest.raises(ExecutionError, match=r"parametrize\.cached\(\)"):
            step(batch_of_squares(), target=batch_of_squares())
        step(batch_of_squares(), target=batch_of_squares())


# A method of a C class that Python code holds may be another one in the next step, wherever it is held.


METHODS: dict[str, tuple[Any, Any]] = {
    "methods": (torch.Tensor.add, torch.Tensor.mul),
    "slots": (torch.Tensor.__add__, torch.Tensor.__mul__),
}

held: Any = torch.Tensor.add


class OfClass:
    held: Any = torch.Tensor.add


def default(x: torch.Tensor, held: Any = torch.Tensor.add) -> torch.Tensor:
    return held(x, x.tanh())


class Holder(nn.Module):
    def __init__(self, place: str) -> None:
        super().__init__()
        self.layer, self.place = nn.Linear(4, 4), place
        self.method: Any = torch.Tensor.add
        self.table, self.listed = {"one": self.method}, [self.method]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        if self.place == "default":
            return y + default(y)
        if self.place == "closure":
            return y + self.closure(y)
        method = {
            "attribute": lambda: self.method,
            "dict": lambda: self.table["one"],
            "list": lambda: self.listed[0],
            "global": lambda: held,
            "class": lambda: OfClass.held,
        }[self.place]()
        return y + method(y, y.tanh())

    def hold(self, method: Any) -> None:
        global held
        held = OfClass.held = self.method = self.table["one"] = self.listed[0] = method
        default.__defaults__ = (method,)
        self.closure = _calling(method)


def _calling(method: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    def call(x: torch.Tensor) -> torch.Tensor:
        return method(x, x.tanh())

    return call


PLACES = ("attribute", "dict", "list", "global", "class", "default", "closure")


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:MC2701")
@pytest.mark.parametrize("num_devices", [2, *exhaustive((1,), (3,))])
@pytest.mark.parametrize("kind", slow_but(["methods"], METHODS))
@pytest.mark.parametrize("place", slow_but(["attribute"], PLACES))
def test_the_next_step_calls_what_is_held_then(place: str, kind: str, num_devices: int) -> None:
    torch.manual_seed(0)
    model = Holder(place).double()
    first, second = METHODS[kind]
    model.hold(first)
    with Twins(model, loss_fn=F.mse_loss, devices=num_devices) as pair:
        for method in (first, first, second, second, first):
            pair.on_both(lambda own, _, method=method: own.hold(method))
            pair.train(torch.randn(6, 4).double(), target=torch.randn(6, 4).double())
        pair.check()
    assert held is first
