"""Where the tracer's own words would lead astray, a refusal says what the user's line does, and what to do instead."""

import contextlib
import functools
import random
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from references import unchanged
from small_modules import Parts, module_of
from torch import nn
from twins import compiled_step

import mirrorc
from mirrorc import CaptureError, ExecutionError
from mirrorc.options.table import grouped

pytestmark = pytest.mark.fast

ARRAY, TOTAL = np.array([2.0, 3.0]), torch.zeros(2)
MASK = nn.Transformer.generate_square_subsequent_mask(3)


class Net(Parts):
    def __init__(self, does: Callable[[Any, torch.Tensor], torch.Tensor], more: nn.Module | None = None) -> None:
        super().__init__(layer=nn.Linear(2, 2), more=more, does=does)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return self.does(self, y)


def hooked(register: str) -> nn.Module:
    net = Net(lambda net, y: y)
    getattr(net.layer, register)(lambda *_: None)
    return net


def in_sequence(y: torch.Tensor) -> torch.Tensor:
    return y[:, None].expand(-1, 3, -1)


def assert_small(net: Any, y: torch.Tensor) -> torch.Tensor:
    torch._assert((y.abs() < 100).all(), "too large")
    return y


class Last(Parts):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__(layer=layer)

    def forward(self, y: torch.Tensor) -> torch.Tensor:
        return self.layer(in_sequence(y))[0][:, -1]


def penalty(net: Any, y: torch.Tensor) -> torch.Tensor:
    out, backward = torch.func.vjp(net.more, y)
    return out * backward(torch.ones_like(out))[0].square().sum(1, keepdim=True)


def penalty_by_autograd(net: Any, y: torch.Tensor) -> torch.Tensor:
    (gradient,) = torch.autograd.grad(y.square().sum(), y, create_graph=True)
    return gradient


def add_up(net: Any, y: torch.Tensor) -> torch.Tensor:
    TOTAL.add_(1)
    return y


def keep_mean(net: Any, y: torch.Tensor) -> torch.Tensor:
    TOTAL.copy_(y.detach().mean(0))
    return y


def recurrent(kind: type[nn.Module]) -> nn.Module:
    def begins_with_whole_states(net: Any, y: torch.Tensor) -> torch.Tensor:
        state = torch.zeros(1, 1 + len(y), 2)
        return net.more(in_sequence(y), (state, state) if kind is nn.LSTM else state)[0][:, 0]

    return Net(begins_with_whole_states, kind(2, 2, batch_first=True))


def under(net: Any, y: torch.Tensor) -> torch.Tensor:
    with net.more:
        return y


def drops_layer(net: Any, y: torch.Tensor) -> torch.Tensor:
    return torch.where(torch.rand(()) < 0.5, y, y * 2)


def transformer(**more: Any) -> nn.Module:
    whole = nn.Transformer(2, 1, 1, 1, 4, dropout=0.0, batch_first=True)
    return Net(lambda net, y: net.more(in_sequence(y), in_sequence(y), tgt_mask=MASK, **more).mean(1), whole)


ADDS_UP, READS_TOTAL = functools.partial(Net, add_up), functools.partial(Net, lambda net, y: y * float(TOTAL[0]))
CASES: list[tuple[Callable[[], nn.Module], tuple[str, str]]] = [
    (
        lambda: recurrent(nn.LSTM),
        ("the first states of a recurrent net have their examples in dim 1", "h.transpose(0, 1)"),
    ),
    (
        lambda: recurrent(nn.GRU),
        ("the first states of a recurrent net have their examples in dim 1", "h.transpose(0, 1)"),
    ),
    (
        lambda: Net(lambda net, y: y if random.choice((0, 1)) else y * 2),
        ("random numbers of Python or numpy", "random.random()"),
    ),
    (
        lambda: Net(lambda net, y: y if np.random.rand(1) < 0.5 else y * 2),
        ("random numbers of Python or numpy", "torch.where"),
    ),
    (lambda: Net(under, threading.Lock()), ("it enters a lock", "around the call")),
    (lambda: Net(under, threading.RLock()), ("it enters a lock", "around the call")),
    (transformer, ("whether it is causal", "tgt_is_causal=True")),
    (lambda: Net(assert_small), ("torch._assert of a tensor is not captured", 'assert condition, "text"')),
    (lambda: Net(lambda net, y: y * float(ARRAY[0])), ("Python number of a value of numpy", "before the call")),
    (READS_TOTAL, ("reads a tensor as a Python number", "compute with tensors")),
    (ADDS_UP, ("writes in place to a tensor that is no buffer", "register_buffer")),
    (lambda: Net(keep_mean), ("writes in place to a tensor that is no buffer", "register_buffer")),
    (lambda: Net(penalty_by_autograd), ("with torch.autograd.grad", "torch.func.vjp(net, x)")),
    (lambda: Net(penalty, nn.BatchNorm1d(2)), ("net that writes a buffer", "nn.LayerNorm")),
    (lambda: Net(penalty, Last(nn.LSTM(2, 2, batch_first=True))), ("gradient of a recurrent layer", "nn.LSTMCell")),
    (lambda: hooked("register_full_backward_hook"), ("hook on its backward", "remove it")),
    (lambda: hooked("register_full_backward_pre_hook"), ("hook on its backward", "remove it")),
]
INTERNALS = (
    "INTERNAL ASSERT",
    "report a bug",
    "shape_env",
    "Eq(u0",
    "Dynamo",
    "aten.",
    "aot_autograd",
    "functionalize",
)


def compiled(model: nn.Module) -> mirrorc.Step:
    return compiled_step(model, F.mse_loss, capture="dynamo")


def cases() -> Iterator[tuple[Callable[[], nn.Module], tuple[str, str]]]:
    """Those of this version of torch: 2.15 captures torch._assert, and 2.11 speaks otherwise of tensors from elsewhere."""
    for make, words in CASES:
        is_captured = "torch._assert" in words[0] and torch.__version__ >= "2.15"
        if is_captured or (make in (ADDS_UP, READS_TOTAL) and torch.__version__ < "2.12"):
            continue
        yield make, words


def test_torchs_assert_is_refused_or_stops_the_step() -> None:
    model = Net(assert_small)
    with contextlib.suppress(CaptureError), compiled(model) as step:
        step(torch.ones(4, 2), target=torch.zeros(4, 2))
        with pytest.raises(ExecutionError, match="too large"):
            step(torch.full((4, 2), 1e6), target=torch.zeros(4, 2))


@pytest.mark.slow
def test_causes_that_the_tracer_does_not_name() -> None:
    for make, (reason, remedy) in cases():
        model = make()
        with compiled(model) as step, unchanged(model), pytest.raises(CaptureError) as refused:
            step(torch.ones(4, 2), target=torch.zeros(4, 2))
        text = str(refused.value)
        assert reason in text.partition("\n  fix:  ")[0] and remedy in text.partition("\n  fix:  ")[2], text
        assert not any(word in text for word in INTERNALS), text


@pytest.mark.slow
def test_the_remedies_are_captured() -> None:
    def cell(net: Any, y: torch.Tensor) -> torch.Tensor:
        state = torch.zeros_like(y)
        for _ in range(3):
            state = net.more(y, state)
        return state

    scale = float(ARRAY[0])
    for model in (
        Net(drops_layer),
        Net(cell, nn.GRUCell(2, 2)),
        transformer(tgt_is_causal=True),
        Net(lambda net, y: y * scale),
        Net(penalty, nn.Sequential(nn.LayerNorm(2), nn.BatchNorm1d(2, track_running_stats=False))),
    ):
        with compiled(model) as step:
            assert torch.isfinite(step(torch.ones(4, 2), target=torch.zeros(4, 2)))


def test_tensors_that_are_not_dense_are_refused_by_name() -> None:
    x, model = torch.ones(4, 2), Net(lambda net, y: y)
    nested = torch.nested.nested_tensor([torch.ones(2)] * 4, layout=torch.jagged)
    refused: list[tuple[Any, str]] = [
        (x.to_sparse(), "argument 'x' has the layout torch.sparse_coo(?s:.*)x.to_dense()"),
        (x.to_sparse_csr(), "argument 'x' has the layout torch.sparse_csr"),
        (mirrorc.replicated(x.to_sparse()), "argument 'x' has the layout"),
        (mirrorc.PerReplica([x.to_sparse()] * 2), "argument 'x' has the layout"),
        (nested, "argument 'x' is a nested tensor(?s:.*)x.to_padded_tensor"),
        (torch.nested.nested_tensor([torch.ones(2)] * 4), "argument 'x' is a nested tensor"),
    ]
    with compiled(model) as step:
        for value, words in refused:
            with unchanged(model), pytest.raises(ValueError, match=words) as why:
                step(value, target=torch.zeros(4, 2))
            assert "\n  fix:  " in str(why.value)
        step(x, target=torch.zeros(4, 2))


class LogitsFirst(Parts):
    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.layer(x)
        return logits, F.cross_entropy(logits, y)


def test_a_loss_after_the_logits_is_to_be_returned_first() -> None:
    model, x, y = LogitsFirst(layer=nn.Linear(6, 3)), torch.randn(4, 6), torch.arange(4) % 3
    with compiled_step(model) as step, unchanged(model), pytest.raises(CaptureError) as raised:
        step(x, y)
    assert "fix:  return loss, logits," in str(raised.value) and "lambda *batch: model(*batch)[1]" in str(raised.value)
    options = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), **grouped({"backend": "eager"})}
    expected = model(x, y)[1].item()
    with mirrorc.compile(lambda *batch: model(*batch)[1], ["cpu:0", "cpu:1"], modules=[model], **options) as step:
        assert step(x, y).item() == pytest.approx(expected)


def multiplied(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    target.mul_(2.0)
    return F.mse_loss(output, target)


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_an_argument_that_the_loss_writes_is_not_laid_to_forward(capture: str) -> None:
    error = pytest.raises(CaptureError, match="forward or loss of Linear writes its argument 'target'")
    with compiled_step(nn.Linear(6, 3), multiplied, capture=capture) as step, error:
        step(torch.randn(4, 6), torch.randn(4, 3))


def changed_by_call(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    scores = output.sigmoid()
    loss = (scores * scores - target).mean()
    scores.mul_(2.0)
    return loss


def changed_by_assignment(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    scores = output.sigmoid()
    loss = (scores * scores - target).mean()
    scores[0] = 0.0
    return loss


@pytest.mark.parametrize(
    ("loss_fn", "line"), [(changed_by_call, "scores.mul_(2.0)"), (changed_by_assignment, "scores[0] = 0.0")]
)
@pytest.mark.filterwarnings("ignore:Error detected in:UserWarning")
def test_a_tensor_changed_before_backward_is_named_with_its_line(loss_fn: Any, line: str) -> None:
    for capture in ("auto", "autograd"):
        model = nn.Linear(6, 3)
        with (
            compiled_step(model, loss_fn, capture=capture) as step,
            unchanged(model),
            pytest.raises(CaptureError) as raised,
        ):
            step(torch.randn(4, 6), torch.randn(4, 3))
        text = str(raised.value)
        assert text.startswith("MC2103: Linear or its loss changes a tensor in place that backward needs as it was\n")
        assert (line in text) == (capture == "auto") and "value = value + 1" in text


def test_states_of_layers_are_said_to_have_their_batch_in_dim_1() -> None:
    x, hidden = torch.randn(4, 5, 6), (torch.zeros(1, 4, 3), torch.zeros(1, 4, 3))
    with compiled_step(
        module_of(lambda self, x, hidden: self.layer(x, hidden)[0].mean(), layer=nn.LSTM(6, 3, batch_first=True))
    ) as step:
        with pytest.raises(ValueError, match=r"fix:  mirrorc\.batch_dim\(hidden\[0\], 1\), if its dim 1 is the batch"):
            step(x, hidden)
        assert step(x, tuple(mirrorc.batch_dim(state, 1) for state in hidden)).isfinite()
