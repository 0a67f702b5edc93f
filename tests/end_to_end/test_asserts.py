"""What a forward asserts about tensors stops the step, with the user's words, before anything has changed."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import selections
import torch
import torch.nn.functional as F
from asserting import TEXT, Asserting
from references import assert_same_model, unchanged
from small_modules import Parts
from torch import distributions as D
from torch import nn
from twins import Twins, compiled_step

import mirrorc
from mirrorc import CaptureError, ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.packing import ByBytes

BUCKETS = {"buckets": ByBytes(0.01, 0.001)}


def asserting_twins(model: nn.Module, devices: int = 2, **options: Any) -> Twins:
    return Twins(model.double(), partial(torch.optim.AdamW, lr=0.01), F.mse_loss, devices, **BUCKETS | options)


@pytest.mark.parametrize(
    ("devices", "options"),
    [
        (1, {}),
        (2, {}),
        (3, {"disable": ("share-parameters",)}),
        (2, {"link": "copy", "disable": ("share-parameters",)}),
        (2, {"backend": "inductor"}),
    ],
    ids=["one", "shared", "mirrored", "copy", "inductor"],
)
def test_a_failed_assert_raises_with_its_line_and_changes_nothing(devices: int, options: dict[str, Any]) -> None:
    torch.manual_seed(0)
    x, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    with asserting_twins(Asserting(), devices, **options) as pair:
        model = pair.model
        for place, value in ((0, float("nan")), (5, float("inf")), (5, None)):
            pair.step(x, target=target)
            if devices == 1:
                pair.plain(x, target=target)
            bad = x.clone()
            bad[place] = 1e30 if value is None else value
            with unchanged(model, pair.optimizer), pytest.raises(ExecutionError) as failed:
                if value is None:  # BatchNorm would make it small
                    model.eval()
                pair.step(bad, target=target)
            model.train()
            told = str(failed.value)
            assert "asserting.py:" in told and "No parameter was changed" in told
            assert isinstance(failed.value.__cause__, AssertionError)
            assert (
                (TEXT in told and "torch.isfinite(x).all()" in told) if value is not None else "assertion error" in told
            )
        if devices == 1:
            assert_same_model(model, pair.twin, 1e-10)


@pytest.mark.fast
def test_checks_of_torch_are_asserts() -> None:
    """Models of Hugging Face check their arguments so, and torch reads a number for it in plain PyTorch."""

    class Checks(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            torch._check_tensor_all(x > -5.0, lambda: "too small")
            return self.layer(x)

    x, target = torch.randn(6, 4, dtype=torch.float64), torch.randn(6, 3, dtype=torch.float64)
    with asserting_twins(Checks(layer=nn.Linear(4, 3))) as pair:
        pair.train(x, target=target)
        bad = x.clone()
        bad[5] = -6.0
        refused = pytest.raises(ExecutionError, match="not all elements are true")
        with unchanged(pair.model, pair.optimizer), refused:
            pair.step(bad, target=target)
        pair.check()


def test_asserts_stay_in_the_program_before_everything_that_leaves_the_replica() -> None:
    with compiled_step(Asserting(), F.mse_loss, **BUCKETS) as step:
        step.prepare(torch.ones(4, 4), target=torch.ones(4, 3))
        for graph in (module.graph for module in step.graphs.values()):
            checks = list(calls_to(graph, ops.check))
            assert [check.kwargs["text"] for check in checks] == [TEXT, "assertion error", "assertion error"]
            assert max(checks) < min(node for node in graph.nodes if node.target in ops.LAUNCHES)
        text = str(step.programs[-1])
        assert f"# or the step stops: {TEXT!r}" in text


class InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        torch._assert_async(torch.isfinite(gradient).all(), "a gradient")
        return gradient * 2


@torch.library.custom_op("mirrorc_tests::note", mutates_args=())
def note(x: torch.Tensor) -> None:
    """Would write a log."""


note.register_fake(lambda x: None)


class Calls(Parts):
    def __init__(self, function: Any) -> None:
        super().__init__(layer=nn.Linear(4, 3), function=function)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        done = self.function(y)
        return y if done is None else done


@pytest.mark.fast
@pytest.mark.parametrize(
    ("function", "words"),
    [
        (lambda y: InBackward.apply(y), ("asserts something in backward", "assert it in forward")),
        (
            torch.ops.mirrorc_tests.note,
            ("mirrorc_tests.note", "test_asserts.py:", "call it in your loop, between calls"),
        ),
    ],
    ids=["backward", "effect"],
)
def test_other_effects_are_refused(function: Any, words: tuple[str, ...]) -> None:
    model = Calls(function)
    with compiled_step(model, F.mse_loss) as step, unchanged(model), pytest.raises(CaptureError) as refused:
        step(torch.ones(4, 4), target=torch.ones(4, 3))
    assert all(word in str(refused.value) for word in words), str(refused.value)


# Losses of torch.distributions are captured, and what they check of parameters and values stops the step.


def policy(out: torch.Tensor, target: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    actions, advantages = target
    chosen = D.Categorical(logits=out)
    return -(chosen.log_prob(actions) * advantages).mean() - 0.01 * chosen.entropy().mean()


def likelihood(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mean, scale = out.chunk(2, dim=1)
    posterior = D.Independent(D.Normal(mean, nn.functional.softplus(scale)), 1)
    prior = D.Independent(D.Normal(torch.zeros_like(mean), torch.ones_like(mean)), 1)
    return D.kl_divergence(posterior, prior).mean() - posterior.log_prob(target).mean()


def positive(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    shape, rate = out.exp().chunk(2, dim=1)
    return -D.Gamma(shape, rate).log_prob(target.square() + 0.1).mean() - D.Beta(shape, rate).entropy().mean()


def normal(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mean, scale = out.chunk(2, dim=1)
    return -D.Normal(mean, scale).log_prob(target).mean()


def exponential(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -D.Exponential(out[:, :2].exp()).log_prob(target).mean()


def compiled(model: nn.Module, loss_fn: Callable[..., Any]) -> mirrorc.Step:
    return compiled_step(model, loss_fn, optimizer=torch.optim.AdamW, capture="dynamo")


@pytest.mark.parametrize("loss_fn", [policy, likelihood, positive], ids=lambda loss_fn: loss_fn.__name__)
def test_losses_of_distributions_are_captured(loss_fn: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)  # torch.compile sets it to False for good
    torch.manual_seed(0)
    options: dict[str, Any] = {"capture": "dynamo", "tolerance": 1e-12}
    pair = Twins(nn.Linear(5, 4).double(), torch.optim.AdamW, loss_fn, **options)
    with pair, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            values = torch.randn(7, 2, dtype=torch.float64)
            target: Any = (torch.randint(0, 4, (7,)), values[:, 0]) if loss_fn is policy else values
            pair.train(torch.randn(7, 5, dtype=torch.float64), target=target)
        assert_same_model(pair.model, pair.twin, 1e-12)
    assert D.Distribution._validate_args


@pytest.mark.parametrize(
    ("loss_fn", "told"),
    [(normal, "the parameter scale of a distribution Normal"), (exponential, "a value of a distribution Exponential")],
    ids=["parameter", "value"],
)
def test_what_a_distribution_refuses_stops_the_step(
    loss_fn: Callable[..., Any], told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)
    model = nn.Linear(4, 4, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(torch.eye(4))
    x, target = torch.rand(6, 4, dtype=torch.float64) + 0.5, torch.rand(6, 2, dtype=torch.float64)
    with compiled(model, loss_fn) as step:
        step(x, target=target)
        bad_x, bad_target = x.clone(), target.clone()
        bad_x[4, 3] = bad_target[4, 1] = -9.0
        with unchanged(model), pytest.raises(ExecutionError) as failed:
            step(bad_x, target=bad_target)
        assert told in str(failed.value) and "test_asserts.py:" in str(failed.value)
        D.Distribution.set_default_validate_args(False)
        step(x, target=bad_target)  # compiled anew, without checks


@pytest.mark.fast
def test_a_distribution_that_checks_nothing_is_not_checked() -> None:
    def unchecked(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -D.Normal(out[:, :2], out[:, 2:], validate_args=False).log_prob(target).mean()

    with compiled(nn.Linear(4, 4).double(), unchecked) as step:
        step(torch.randn(6, 4, dtype=torch.float64), target=torch.randn(6, 2, dtype=torch.float64))
        assert "check(" not in str(step.program)


@pytest.mark.fast
@pytest.mark.parametrize(
    ("shape", "told"),
    [((6, 3), "does not fit a distribution Normal with a batch of shape"), ((), "takes a tensor, not 0.5")],
)
def test_a_value_of_another_kind_is_refused(shape: tuple[int, ...], told: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(D.Distribution, "_validate_args", True)

    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return -D.Normal(out[:, :2], out[:, 2:].exp()).log_prob(target if shape else 0.5).mean()

    model = nn.Linear(4, 4).double()
    with compiled(model, loss) as step, unchanged(model), pytest.raises(mirrorc.CaptureError) as refused:
        step(torch.randn(6, 4).double(), target=torch.randn(shape or (6, 2)).double())
    assert told in str(refused.value)


# A loss that is a function around a module whose parameters the optimizer has trains them.


class Criterion(Parts):
    def __init__(self) -> None:
        super().__init__(head=nn.Linear(2, 2))

    def compute(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(self.head(output), target)


class Held:
    def __init__(self, criterion: Criterion) -> None:
        self.criterion = criterion

    def __call__(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return self.criterion.compute(output, target)


def applied(criterion: Criterion, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return criterion.compute(output, target)


Losses = Callable[[Criterion], Any]

WAYS: dict[str, Losses] = {
    "a method": lambda criterion: criterion.compute,
    "a closure": lambda criterion: lambda output, target: criterion.compute(output, target),
    "a partial": lambda criterion: partial(applied, criterion),
    "a partial of a method": lambda criterion: partial(criterion.compute),
}


def models() -> tuple[nn.Module, Criterion]:
    torch.manual_seed(0)
    return nn.Linear(3, 2).double(), Criterion().double()


def optimizer(*modules: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1, momentum=0.5)


@pytest.mark.fast
@pytest.mark.parametrize("name", ["a method", *selections.slow(*((name,) for name in WAYS if name != "a method"))])
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("devices", [2, *selections.slow((1,), (3,))])
def test_parameters_of_a_loss_train_as_on_one_device(name: str, capture: str, devices: int) -> None:
    model, criterion = models()
    twin, other = copy.deepcopy((model, criterion))
    reference = optimizer(twin, other)
    with compiled_step(model, WAYS[name](criterion), devices, optimizer(model, criterion), capture=capture) as step:
        for size in (6, 6, 5):
            x, target = torch.randn(size, 3).double(), torch.randn(size, 2).double()
            expected = WAYS[name](other)(twin(x), target)
            torch.testing.assert_close(step(x, target=target), expected, rtol=1e-12, atol=0)
            reference.zero_grad()
            expected.backward()
            reference.step()
    for one, wanted in ((model, twin), (criterion, other)):
        torch.testing.assert_close(one.state_dict(), wanted.state_dict(), rtol=1e-12, atol=1e-14)


def test_the_state_of_a_step_has_them() -> None:
    batches = [(torch.randn(6, 3).double(), torch.randn(6, 2).double()) for _ in range(4)]
    ends = []
    for resumes in (False, True):
        model, criterion = models()
        step = compiled_step(model, criterion.compute, 2, optimizer(model, criterion))
        for i, (x, target) in enumerate(batches):
            if resumes and i == 2:
                state = step.state_dict()
                step.close()
                model, criterion = nn.Linear(3, 2).double(), Criterion().double()
                step = compiled_step(model, criterion.compute, 2, optimizer(model, criterion))
                step.load_state_dict(state)
            step(x, target=target)
        step.close()
        ends.append({**model.state_dict(), **criterion.state_dict()})
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=0)


def test_an_object_around_the_module_trains_as_a_graph_and_is_refused_as_plain_pytorch() -> None:
    x, target = torch.randn(6, 3).double(), torch.randn(6, 2).double()
    model, criterion = models()
    expected = criterion.compute(model(x), target)
    with compiled_step(model, Held(criterion), 2, optimizer(model, criterion), capture="dynamo") as step:
        torch.testing.assert_close(step(x, target=target), expected)
    model, criterion = models()
    step = compiled_step(model, Held(criterion), 2, optimizer(model, criterion), capture="autograd")
    with step, pytest.raises(CaptureError, match="MC2306"):
        step(x, target=target)


@pytest.mark.fast
def test_a_method_as_the_model_is_refused_with_the_function_that_trains_it() -> None:
    _, criterion = models()
    with pytest.raises(TypeError, match=r"(?s)MC1201: model is the method compute of Criterion.*modules=\[net\]"):
        mirrorc.compile(criterion.compute, ["cpu:0"], optimizer=optimizer(criterion), loss_fn=F.mse_loss)
