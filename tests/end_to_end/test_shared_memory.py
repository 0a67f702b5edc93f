"""Variables that share memory are refused by name; those that only lie side by side are trained."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_model, unchanged
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.user.aliased_tensors import refuse_shared_memory


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
