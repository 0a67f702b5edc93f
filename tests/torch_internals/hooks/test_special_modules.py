"""Modules of TorchScript: what is known of them by torch's private objects."""

from typing import Any

import pytest
import torch
import torch.backends.cudnn.rnn
from torch import nn
from torch.nn.utils import parametrizations

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import renew_recurrent_weights, weights_for_cudnn

pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit:DeprecationWarning")


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm = nn.Linear(3, 4), nn.BatchNorm1d(4)
        self.count, self.factor = 0, torch.ones(1)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.norm(self.inner(x)) * scale


@torch.jit.script
class Interval:
    def __init__(self, low: float) -> None:
        self.low = low


class Bounded(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.interval = Interval(0.5)

    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        return self.inner(x).clamp(self.interval.low)


class Counting(Layers):
    def forward(self, x: torch.Tensor, scale: float = 2.0) -> torch.Tensor:
        if scale > 1.0:
            self.count += 1
        return self.inner(x) * self.count * self.factor


def test_scripted_and_traced_modules_and_those_within_them_are_known() -> None:
    module = torch.jit.script(Layers())
    assert internals.is_script_module(module) and internals.is_script_module(module.inner)
    assert internals.is_script_module(torch.jit.trace(nn.Linear(3, 4), torch.zeros(2, 3)))
    assert not internals.is_script_module(Layers())


def test_a_copy_computes_with_other_tensors_and_writes_other_buffers() -> None:
    original = torch.jit.script(Layers())
    others = {id(t): t.detach().clone() for t in (*original.parameters(), *original.buffers())}
    others[id(original.inner.weight)] = weight = torch.ones(4, 3, requires_grad=True)
    own = internals.ScriptCopy(original)
    before = {name: value.clone() for name, value in original.state_dict().items()}
    original.eval()
    own.load(lambda tensor: others[id(tensor)])
    assert not own.module.training and not own.module.norm.training
    original.train()
    own.load(lambda tensor: others[id(tensor)])
    assert own.module.training and own.module.inner.weight is weight
    own.module(torch.randn(5, 3)).square().sum().backward()
    assert weight.grad is not None and int(others[id(original.norm.num_batches_tracked)]) == 1
    assert all(torch.equal(value, before[name]) for name, value in original.state_dict().items())
    own.unload()
    assert all(tensor.numel() == 0 for tensor in (*own.module.parameters(), *own.module.buffers()))


def test_other_attributes_are_those_of_now_and_what_changes_them_is_found() -> None:
    original = torch.jit.script(Counting())
    own = internals.ScriptCopy(original)
    original.count, original.factor = 3, torch.full((1,), 2.0)
    same = {id(tensor): tensor for tensor in (*original.parameters(), *original.buffers())}.__getitem__
    own.load(lambda tensor: same(id(tensor)))
    assert own.module.count == 3 and own.module.factor is original.factor and own.changed() is None
    x = torch.randn(5, 3)
    assert torch.equal(own.module(x, 0.5), original.inner(x) * 6)
    assert own.changed() is None
    own.module(x)
    assert own.changed() == "count" and original.count == 3
    own.load(lambda tensor: same(id(tensor)))
    assert own.module.count == 3 and own.changed() is None
    own.module.factor.mul_(2.0)
    assert own.changed() == "factor"


def test_objects_in_attributes_are_found() -> None:
    for module in (torch.jit.script(Counting()), torch.jit.trace(nn.Linear(3, 4), torch.zeros(2, 3))):
        assert internals.object_within(module) is None
    assert internals.object_within(torch.jit.script(Bounded())) == "interval"
    assert internals.object_within(torch.jit.script(nn.Sequential(nn.Linear(3, 3), Bounded()))) == "interval"


def test_signatures() -> None:
    for module in (Layers(), torch.jit.script(Layers())):
        assert str(internals.forward_signature(module)).startswith("(x")
        assert list(internals.forward_signature(module).parameters) == ["x", "scale"]
        assert internals.forward_signature(module).parameters["scale"].default == 2.0
    traced = torch.jit.trace(nn.Linear(3, 4), torch.zeros(2, 3))
    assert len(internals.forward_signature(traced).parameters) == 1


@pytest.mark.slow
def test_a_layer_computes_with_its_new_parameters_and_finds_nothing_changed() -> None:
    x = torch.randn(3, 2, 4)
    for kind in (nn.LSTM, nn.GRU, nn.RNN):
        layer, other = kind(4, 5, num_layers=2, bidirectional=True), kind(4, 5, num_layers=2, bidirectional=True)
        before = list(layer._flat_weights)
        layer._parameters.update(other._parameters)
        assert layer._weights_have_changed()
        renew_recurrent_weights(layer)
        assert not layer._weights_have_changed()
        torch.testing.assert_close(layer(x)[0], other(x)[0], rtol=0.0, atol=0.0)
        renewed = layer._flat_weights
        assert [id(weight) for weight in renewed] != [id(weight) for weight in before]


def test_computed_weights_are_left_as_they_are() -> None:
    layer = parametrizations.weight_norm(nn.GRU(4, 5), "weight_hh_l0")
    before = layer._flat_weights
    renew_recurrent_weights(layer)
    assert layer._flat_weights is before


@pytest.mark.parametrize(
    ("kind", "layer"),
    [
        ("lstm", nn.LSTM(3, 5, num_layers=2, proj_size=2, bidirectional=True)),
        ("lstm", nn.LSTM(3, 5, bias=False)),
        ("gru", nn.GRU(3, 5, num_layers=2)),
        ("rnn_tanh", nn.RNN(3, 5, bidirectional=True)),
        ("rnn_relu", nn.RNN(3, 5, nonlinearity="relu")),
    ],
)
def test_cudnn_is_told_of_weights_as_by_a_layer(kind: str, layer: nn.RNNBase, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where there is no GPU: only the calls are compared. A layer's weights stay where they are."""
    calls: list[tuple[Any, ...]] = []
    monkeypatch.setattr(torch.Tensor, "is_cuda", True, raising=False)
    monkeypatch.setattr(torch.backends.cudnn, "is_acceptable", lambda weight: True)
    monkeypatch.setattr(torch.backends.cudnn.rnn, "get_cudnn_mode", lambda mode: mode)
    monkeypatch.setattr(torch, "_use_cudnn_rnn_flatten_weight", lambda: True)
    monkeypatch.setattr(torch, "_cudnn_rnn_flatten_weight", lambda *call: calls.append(call))
    layer.flatten_parameters()
    aliases = weights_for_cudnn(layer._flat_weights, kind, layer.num_layers, layer.bidirectional)
    (_, *expected), (moved, *options) = calls
    assert options == expected and moved is aliases
    assert all(alias is not weight for alias, weight in zip(aliases, layer._flat_weights, strict=True))


def test_weights_on_a_cpu_are_left_as_they_are() -> None:
    weights = nn.GRU(4, 5)._flat_weights
    assert weights_for_cudnn(weights, "gru", 1, False) is weights
