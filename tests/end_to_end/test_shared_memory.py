"""Variables that share memory are refused by name; those that only lie side by side are trained."""

import contextvars
import random
import re
from collections import Counter, defaultdict, deque
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from branching import batches
from references import assert_same_model, assert_same_parameters, refused, unchanged
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step, sgd

import mirrorc
from mirrorc.user.aliased_tensors import refuse_shared_memory

pytestmark = pytest.mark.fast


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.norm = nn.Linear(4, 4), nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.register_buffer("held", torch.ones(4))
        self.double()
        self.plain: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.b(torch.tanh(self.a(x))) * self.held)
        return x if self.plain is None else x @ self.plain


ADAMW = partial(torch.optim.AdamW, lr=0.05)


def make() -> Model:
    torch.manual_seed(0)
    return Model()


def batch(seed: int = 1) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x, y = (torch.randn(6, 4, dtype=torch.float64, generator=generator) for _ in range(2))
    return {"x": x, "target": y}


def compiled(model: nn.Module, devices: int = 2) -> mirrorc.Step:
    return compiled_step(model, F.mse_loss, devices, ADAMW)


def one_weight(model: Model) -> None:
    model.b.weight.data = model.a.weight.data


def buffer_of_a_weight(model: Model) -> None:
    model.held = model.a.weight.detach()[1]


def overlapping_parts(model: Model) -> None:
    whole = torch.randn(5, 4, dtype=torch.float64)
    model.a.weight.data, model.b.weight.data = whole[:4], whole[1:]


def strided_parts(model: Model) -> None:
    whole = torch.randn(4, 8, dtype=torch.float64)
    model.a.weight.data, model.b.weight.data = whole[:, :4], whole[:, 3:7]


def view_of_a_bias(model: Model) -> None:
    model.held = model.b.bias.detach()


SHARED: list[tuple[Callable[[Model], None], tuple[str, str]]] = [
    (one_weight, ("parameter 'a.weight'", "parameter 'b.weight'")),
    (buffer_of_a_weight, ("parameter 'a.weight'", "tensor 'held'")),
    (overlapping_parts, ("parameter 'a.weight'", "parameter 'b.weight'")),
    (strided_parts, ("parameter 'a.weight'", "parameter 'b.weight'")),
    (view_of_a_bias, ("parameter 'b.bias'", "tensor 'held'")),
]


def test_variables_that_share_memory_are_refused_by_name() -> None:
    for share, (first, second) in SHARED:
        model = make()
        share(model)
        with unchanged(model), pytest.raises(ValueError, match=f"(?s){first} and {second} share memory.*clone"):
            compiled(model)


@pytest.mark.slow
def test_memory_that_is_shared_between_steps_is_refused_until_it_is_given_back() -> None:
    for share, (first, second) in SHARED:
        if share is buffer_of_a_weight or share is view_of_a_bias:
            continue  # which replaces a buffer, and is refused for that
        model = make()
        step = compiled(model)
        step(**batch())
        kept = model.a.weight.data, model.b.weight.data
        share(model)
        with unchanged(model), pytest.raises(ValueError, match=f"{first} and {second} share memory"):
            step(**batch())
        model.a.weight.data, model.b.weight.data = kept
        step(**batch())
        step.close()


@pytest.mark.parametrize("num_steps", [0, 1])
def test_shared_memory_is_seen_before_tensors_are_made_dense(num_steps: int) -> None:
    model = make()
    with compiled(model) as step:
        for _ in range(num_steps):
            step(**batch())
        strided_parts(model)
        of_another_shape = {name: value[:4] for name, value in batch().items()}  # so that it is compiled anew
        with unchanged(model), pytest.raises(ValueError, match=r"parameter 'a.weight' and parameter 'b.weight' share"):
            step(**of_another_shape)


def test_an_attribute_that_is_a_view_of_a_parameter_is_refused() -> None:
    model = make()
    model.plain = model.a.weight.detach().t()
    with compiled(model) as step, pytest.raises(ValueError, match=r"parameter 'a.weight' and tensor 'plain' share"):
        step(**batch())


def test_a_statistic_that_another_buffer_shows_is_refused() -> None:
    model = make()
    model.held = model.norm.running_var  # one buffer under two names is one variable
    compiled(model).close()
    model = make()
    model.held.data = model.norm.running_var.data
    told = r"(?s)model.held.*model.norm.running_var.*share storage.*\.clone"
    if torch.__version__ < "2.12":  # it does not say which
        told = r"(?s)view input mutations.*memory of its own.*\.clone"
    with compiled(model) as step, unchanged(model), pytest.raises(mirrorc.CaptureError, match=told):
        step(**batch())


def side_by_side(model: Model) -> None:
    whole = torch.randn(36, dtype=torch.float64)
    nn.utils.vector_to_parameters(whole[:32], [model.a.weight, model.b.weight])


def interleaved(model: Model) -> None:
    whole = torch.randn(4, 8, dtype=torch.float64)
    model.a.weight.data, model.b.weight.data = whole[:, ::2], whole[:, 1::2]


def read_only(model: Model) -> None:
    model.held.data = torch.ones(1, dtype=torch.float64).expand(4)
    model.plain = model.held.detach().expand(4, 4)


@pytest.mark.slow
@pytest.mark.parametrize("share", [side_by_side, interleaved, read_only])
def test_memory_without_common_elements_or_that_nothing_writes_is_trained_from(share: Callable[[Model], None]) -> None:
    model = make()
    share(model)
    with Twins(model, ADAMW, F.mse_loss, 1) as pair:
        for seed in range(3):
            pair.train(**batch(seed))
        assert_same_model(model, pair.twin, 1e-10)


def test_tensors_of_one_memory_that_do_not_move_are_no_matter() -> None:
    whole = torch.zeros(10)
    tensors = {"a": whole[:6], "b": whole[4:], "c": whole[6:], "none": whole[:0], "bytes": whole.view(torch.uint8)[:4]}
    refuse_shared_memory({name: tensors[name] for name in ("a", "c", "none")}, {"a", "c", "none"})
    refuse_shared_memory(tensors, ())
    for moving, first, second in (("b", "a", "b"), ("c", "b", "c"), ("bytes", "a", "bytes")):
        with pytest.raises(ValueError, match=re.escape(f"tensor {first!r} and tensor {second!r} share memory")):
            refuse_shared_memory(tensors, {moving})


# What replicas that run as plain PyTorch have in common: collections, generators, classes and context variables.


class Does(nn.Module):
    def __init__(self, deed: Callable[[Any, torch.Tensor], Any], own: Any = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.first, self.last = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()
        self.deed, self.own = deed, own

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        return self.last(h * self.deed(self.own, h))


compile_plain = partial(compiled_step, loss_fn=F.cross_entropy, capture="autograd")


def rotated(own: Any, h: torch.Tensor) -> Any:
    own.rotate(1)
    return own[0]


def counted(own: Any, h: torch.Tensor) -> Any:
    own["calls"] += 1
    return own["calls"]


COLLECTIONS = [(rotated, deque([1.0, 2.0, 3.0])), (counted, Counter(calls=1)), (counted, defaultdict(float))]
GENERATORS = [
    (lambda own, h: torch.rand(8, generator=own), lambda: torch.Generator().manual_seed(1), "torch.Generator"),
    (lambda own, h: torch.empty(8).normal_(generator=own), lambda: torch.Generator().manual_seed(1), "torch.Generator"),
    (lambda own, h: own.random(), lambda: random.Random(1), "model.own, a random.Random"),
    (
        lambda own, h: float(own.random()),
        lambda: np.random.default_rng(1),
        "model.own, a numpy.random._generator.Generator",
    ),
    (lambda own, h: own.rand(), lambda: np.random.RandomState(1), "model.own, a numpy.random.mtrand.RandomState"),
]


@pytest.mark.parametrize(("deed", "own"), COLLECTIONS, ids=lambda value: type(value).__name__)
def test_a_collection_of_any_kind_is_changed_once_a_step(deed: Any, own: Any) -> None:
    with Twins(Does(deed, own), sgd, F.cross_entropy, capture="autograd", tolerance=1e-12) as pair:
        for batch in batches(6, 5):
            pair.train(**batch)
        assert pair.model.own == pair.twin.own


@pytest.mark.parametrize(("deed", "make", "words"), GENERATORS, ids=lambda value: "")
def test_a_generator_of_ones_own_that_replicas_would_share_is_refused_and_put_back(
    deed: Any, make: Any, words: str
) -> None:
    """Which number each replica gets would follow their threads, so that two runs would differ."""
    model = Does(deed, make())
    h = torch.zeros(1)
    with (
        compile_plain(model) as step,
        refused(mirrorc.CaptureError, rf"draws from .*{words}.*\n.*follow their threads\n  fix:.*torch.rand", model),
    ):
        step(**batches(6)[0])
    assert torch.equal(torch.as_tensor(deed(model.own, h)), torch.as_tensor(deed(make(), h)))


def test_a_generator_that_is_torchs_own_is_a_stream_of_each_replica() -> None:
    model = Does(lambda own, h: torch.rand(8, generator=torch.default_generator))
    with compile_plain(model) as step:
        assert step(**batches(6)[0]).isfinite()


class Doubles(Does):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class DoublingLinear(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


def one(own: Any, h: torch.Tensor) -> float:
    return 1.0


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["auto", "autograd"])
@pytest.mark.parametrize("where", ["model", "layer"])
def test_another_class_of_a_module_counts_in_the_next_step(where: str, capture: str) -> None:
    with Twins(Does(one), loss_fn=F.cross_entropy, capture=capture, tolerance=1e-12) as pair:
        for i, batch in enumerate(batches(6, 6, 6, 6, 6)):
            if i >= 3:
                for own, _ in pair.sides:
                    changed, kind = (own, Doubles) if where == "model" else (own.last, DoublingLinear)
                    changed.__class__ = kind if i == 3 else kind.__base__  # type: ignore[assignment]
            pair.train(**batch)


_factor: contextvars.ContextVar[float] = contextvars.ContextVar("factor", default=1.0)


class ReadsBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return gradient * _factor.get()


@pytest.mark.parametrize("num_devices", [1, 2])
@pytest.mark.parametrize("capture", ["auto", "autograd"])
def test_context_variables_are_those_of_the_caller_in_each_step(capture: str, num_devices: int) -> None:
    def reads(own: Any, h: torch.Tensor) -> Any:
        return _factor.get() * ReadsBackward.apply(h)

    token = _factor.set(1.0)
    with Twins(Does(reads), sgd, F.cross_entropy, num_devices, capture=capture, tolerance=1e-12) as pair:
        for i, batch in enumerate(batches(6, 6, 6)):
            _factor.set(1.0 + i)
            expected = F.cross_entropy(pair.twin(batch["x"]), batch["target"]).item()
            assert pair.step.evaluate(**batch).item() == pytest.approx(expected, rel=1e-12)
            pair.train(**batch)
        assert_same_parameters(pair.model, pair.twin)
    _factor.reset(token)
