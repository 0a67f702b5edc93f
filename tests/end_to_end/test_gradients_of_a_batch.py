"""`step.gradients` leaves in ``p.grad`` what plain PyTorch's backward of the whole batch leaves; the update is the user's."""

import copy
import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import selections
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from module_twins import batch, net
from references import assert_same_model, unchanged
from small_modules import module_of
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.errors import ExecutionError, NonFiniteError
from mirrorc.options.table import grouped
from mirrorc.runtime.state.gradient_state import GradientState

pytestmark = pytest.mark.fast

TOLERANCE = 1e-12
Batch = tuple[torch.Tensor, torch.Tensor]
PLAIN: dict[str, Any] = {"capture": "autograd"}


class Both:
    """A model whose gradients a step computes, and its twin in plain PyTorch."""

    def __init__(self, model: Any = None, devices: int = 2, loss_fn: Any = F.cross_entropy, **options: Any) -> None:
        self.model = net() if model is None else model
        self.twin, self.loss_fn = copy.deepcopy(self.model), loss_fn
        options = {"backend": "eager", "progress": False, **options}
        self.step = mirrorc.compile(self.model, devices, loss_fn=loss_fn, **grouped(options))

    def __enter__(self) -> "Both":
        return self

    def __exit__(self, *_: object) -> None:
        self.step.close()

    def plain(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = self.loss_fn(self.twin(x), y)
        loss.backward()
        return loss.detach()

    @property
    def sides(self) -> list[tuple[nn.Module, Callable[..., torch.Tensor]]]:
        return [(self.model, self.step.gradients), (self.twin, self.plain)]

    def backward(self, *own: Batch) -> None:
        """Calls for gradients, which add up; losses and gradients agree."""
        for x, y in own:
            torch.testing.assert_close(self.step.gradients(x, y), self.plain(x, y), rtol=TOLERANCE, atol=TOLERANCE)
        self.check_gradients()

    def check_gradients(self) -> None:
        for (name, p), q in zip(self.model.named_parameters(), self.twin.parameters(), strict=True):
            assert (p.grad is None) == (q.grad is None), name
            if p.grad is not None:
                assert (p.grad.dtype, p.grad.stride()) == (q.grad.dtype, q.grad.stride()), name
                torch.testing.assert_close(p.grad, q.grad, rtol=TOLERANCE, atol=TOLERANCE)

    def check(self) -> None:
        assert_same_model(self.model, self.twin, 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("devices", "options"),
    [(1, {}), (2, {}), (3, {}), (3, {"disable": ("share-parameters",)}), (2, {"placement": "mirrored"})],
)
def test_gradients_add_up_over_batches_of_any_size_as_by_backward(devices: int, options: dict[str, Any]) -> None:
    with Both(devices=devices, **options) as both:
        both.backward(batch(6))
        both.backward(batch(6, 1), batch(5, 2), batch(2, 3))
        for model, _ in both.sides:
            model.zero_grad(set_to_none=False)
        both.backward(batch(6, 4))


def lbfgs(model: nn.Module, gradients: Callable[..., torch.Tensor]) -> None:
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4, line_search_fn="strong_wolfe")

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        return gradients(*batch(6))

    for _ in range(2):
        optimizer.step(closure)  # type: ignore[arg-type]


def sam(model: nn.Module, gradients: Callable[..., torch.Tensor]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for seed in range(3):
        gradients(*batch(6, seed))
        with torch.no_grad():
            climbs = [0.05 * p.grad / p.grad.norm() for p in model.parameters()]
            for p, climb in zip(model.parameters(), climbs, strict=True):
                p.add_(climb)
        optimizer.zero_grad()
        gradients(*batch(6, seed))
        with torch.no_grad():
            for p, climb in zip(model.parameters(), climbs, strict=True):
                p.sub_(climb)
        optimizer.step()
        optimizer.zero_grad()


def clipping(model: nn.Module, gradients: Callable[..., torch.Tensor]) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    for seed, size in enumerate((6, 5, 6)):
        gradients(*batch(size, seed))
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        if norm > 0.2:  # a step that is left out by its norm
            optimizer.step()
        optimizer.zero_grad()


def projecting(model: nn.Module, gradients: Callable[..., torch.Tensor]) -> None:
    """Gradients of two batches taken apart, each without what opposes the other, as PCGrad does."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    taken = []
    for seed in (0, 1):
        optimizer.zero_grad()
        gradients(*batch(4 + seed, seed))
        taken.append([p.grad for p in model.parameters()])
    optimizer.zero_grad()
    for p, a, b in zip(model.parameters(), *taken, strict=True):
        inner = (a * b).sum()
        p.grad = a + b - (inner * (a / a.square().sum() + b / b.square().sum()) if inner < 0 else 0.0)
    optimizer.step()


def penalizing(model: nn.Module, gradients: Callable[..., torch.Tensor]) -> None:
    """Noise and decay of the user's own between backward and update, on parameters that it writes itself."""
    for seed in range(2):
        gradients(*batch(6, seed))
        with torch.no_grad():
            for p in model.parameters():
                p.grad.add_(p, alpha=0.01)
                p.data = p.data - 0.1 * p.grad
        model.zero_grad()


def loading(model: nn.Module, gradients: Callable[..., torch.Tensor]) -> None:
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    gradients(*batch(6))
    optimizer.step()
    model.load_state_dict(before)
    gradients(*batch(6, 1))
    optimizer.step()


LOOPS = [lbfgs, sam, clipping, projecting, penalizing, loading]


@pytest.mark.parametrize("devices", selections.slow_but([2], [1, 2, 3]))
@pytest.mark.parametrize("loop", selections.slow_but([lbfgs, sam], LOOPS))
def test_a_loop_around_gradients_is_that_of_one_device(loop: Callable[..., None], devices: int) -> None:
    with Both(devices=devices) as both:
        for model, gradients in both.sides:
            loop(model, gradients)
        both.check()


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"microbatches": 2},
        {"microbatches": 3, "devices": 1},
        {"loss_fn": nn.CrossEntropyLoss(reduction="sum"), "loss_reduction": "sum"},
        {"buckets": 0.0002},
        {"check_finite": True},
        {"exact_order": True},
        {"placement": "central"},
        {"algorithm": "ring", "devices": 3},
        PLAIN,
        {**PLAIN, "microbatches": 2},
    ],
    ids=str,
)
def test_every_option_of_a_step_keeps_the_gradient_of_the_whole_batch(options: dict[str, Any]) -> None:
    with Both(**options) as both:
        both.backward(batch(7), batch(6, 1), batch(2, 2))


@pytest.mark.slow
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_inductor_gives_the_same_gradients(capture: str) -> None:
    with Both(backend="inductor", capture=capture) as both:
        both.backward(batch(6), batch(6, 1))


class Partly(nn.Module):
    """A frozen layer, a layer that some batches use, and one that none does."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen, self.seldom, self.never, self.head = (nn.Linear(6, 6) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.frozen(x)
        return self.head(self.seldom(x) if x.shape[0] > 3 else x)


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, PLAIN], ids=["dynamo", "autograd"])
def test_frozen_and_unused_parameters_keep_none(options: dict[str, Any]) -> None:
    with Both(Partly().double(), **options) as both:
        both.backward(batch(2))
        both.backward(batch(8, 1))
        for model, _ in both.sides:
            model.zero_grad()
            model.get_submodule("head").requires_grad_(False)
            model.get_submodule("frozen").requires_grad_(True)
        both.backward(batch(8, 2))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_buffers_are_written_as_in_a_step(devices: int) -> None:
    with Both(net(nn.BatchNorm1d(8)), devices) as both:
        other = copy.deepcopy(both.model)
        optimizer = torch.optim.SGD(other.parameters(), lr=0.0)
        options = grouped({"backend": "eager", "progress": False})
        step = mirrorc.compile(other, devices, optimizer=optimizer, loss_fn=F.cross_entropy, **options)
        with step:
            for seed in range(2):
                assert torch.equal(both.step.gradients(*batch(6, seed)), step(*batch(6, seed)))
        for name, buffer in both.model.named_buffers():
            assert torch.equal(buffer, other.get_buffer(name)), name


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 3])
@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.ASGD], ids=lambda make: make.__name__)
def test_updates_of_the_step_and_of_the_user_take_turns(make: Any, devices: int) -> None:
    model = net()
    optimizer, twin = make(model.parameters(), lr=0.05), copy.deepcopy(model)
    twin_optimizer = make(twin.parameters(), lr=0.05)
    with Both(model, devices, optimizer=optimizer) as both:
        both.twin = twin
        for kind, seed in zip("sgsggs", range(6), strict=True):
            both.plain(*batch(6, seed))
            if kind == "s":
                both.step(*batch(6, seed))
            else:
                both.step.gradients(*batch(6, seed))
                both.check_gradients()
                optimizer.step()
                optimizer.zero_grad()
            twin_optimizer.step()
            twin_optimizer.zero_grad()
            assert all(p.grad is None for p in model.parameters())
        both.check()


@pytest.mark.slow
def test_parameters_that_the_optimizer_does_not_have_get_a_gradient_too() -> None:
    model = net()
    with Both(model, optimizer=torch.optim.SGD(model[0].parameters(), lr=0.1)) as both:
        both.step(*batch(6))
        both.twin.load_state_dict(model.state_dict())
        both.backward(batch(6, 1))


def test_a_kept_gradient_is_the_callers_memory() -> None:
    with Both() as both:
        both.backward(batch(6))
        kept = [p.grad for p in both.model.parameters()]
        values = [gradient.clone() for gradient in kept]
        both.model.zero_grad()
        both.step.gradients(*batch(6, 1))
        assert all(map(torch.equal, kept, values))
        present = [p.grad for p in both.model.parameters()]
        both.step.gradients(*batch(6, 2))
        assert all(p.grad is gradient for p, gradient in zip(both.model.parameters(), present, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_sparse_gradient_is_a_sparse_tensor(devices: int) -> None:
    parts = {"table": nn.Embedding(9, 4, sparse=True, padding_idx=0), "head": nn.Linear(4, 3)}
    model = module_of(lambda self, x: self.head(self.table(x).sum(1)), **parts).double()
    with Both(model, devices) as both:
        for seed in range(2):
            x = torch.randint(9, (6, 2), generator=torch.Generator().manual_seed(seed))
            both.step.gradients(x, batch(6)[1])
            both.plain(x, batch(6)[1])
            ours, theirs = (model.get_parameter("table.weight").grad for model, _ in both.sides)
            assert ours is not None and theirs is not None and ours.is_sparse
            torch.testing.assert_close(ours.to_dense(), theirs.to_dense(), rtol=TOLERANCE, atol=TOLERANCE)
        for model, _ in both.sides:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        both.check()


def test_strided_and_tied_parameters_have_gradients_of_their_layout() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(6, 6, bias=False)
            self.first.weight = nn.Parameter(torch.randn(6, 6).t())
            self.second = nn.Linear(6, 6)
            self.second.weight = self.first.weight

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(torch.tanh(self.first(x)))

    torch.manual_seed(0)
    with Both(Tied().double()) as both:
        both.backward(batch(6), batch(5, 1))


REFUSED = {
    "clip_grad_norm": {"clip_grad_norm": 1.0},
    "clip_grad_value": {"clip_grad_value": 1.0},
    "check_finite='skip'": {"check_finite": "skip"},
    "scaler": {"scaler": torch.amp.GradScaler("cpu")},
}


@pytest.mark.parametrize("options", REFUSED.values(), ids=REFUSED)
def test_an_option_that_would_not_touch_gradients_of_the_user_is_refused(options: dict[str, Any]) -> None:
    model = net()
    both = Both(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), **options)
    words = r"MC1003: step.gradients\(\) cannot be used with"
    with both, unchanged(model), pytest.raises(ExecutionError, match=words):
        both.step.gradients(*batch(6))


def test_without_an_optimizer_options_of_updates_are_refused() -> None:
    for options in (*REFUSED.values(), {"cuda_graphs": True}):
        with pytest.raises(ValueError, match=rf"MC1003: {next(iter(options))}=.* cannot be used without optimizer="):
            Both(**options)
    with Both(check_finite=True, scaler=torch.amp.GradScaler("cpu", enabled=False)) as both:
        both.backward(batch(6))


def test_gradients_in_the_middle_of_an_accumulation_are_refused() -> None:
    model = net()
    with Both(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1)) as both:
        both.step.accumulate(*batch(6))
        with unchanged(model), pytest.raises(ExecutionError, match=r"MC3206: .* in the middle of an accumulation"):
            both.step.gradients(*batch(6))
        both.step.zero_grad()
        both.backward(batch(6))


def test_without_an_optimizer_a_step_cannot_update() -> None:
    with Both() as both:
        for call in (both.step, both.step.accumulate):
            with unchanged(both.model), pytest.raises(ValueError, match="MC1211: optimizer is missing"):
                call(*batch(6))
        assert both.step.prepare(*batch(6)).leaves_gradients
        both.backward(batch(6))
        torch.testing.assert_close(both.step.evaluate(*batch(6)), both.loss_fn(both.twin(batch(6)[0]), batch(6)[1]))


def test_the_log_names_a_call_for_gradients(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mirrorc.compilation.step_compiler"), Both() as both:
        both.step.prepare(*batch(6))
    assert "compiling a call for gradients of Sequential for cpu:0, cpu:1 (" in caplog.text


@pytest.mark.parametrize("devices", [1, 2])
def test_a_call_that_fails_leaves_gradients_and_buffers_as_they_were(devices: int) -> None:
    with Both(net(nn.BatchNorm1d(8)), devices, check_finite=True) as both:
        both.step.gradients(*batch(6))
        x, _ = batch(6)
        before = [p.grad.clone() for p in both.model.parameters() if p.grad is not None]
        with unchanged(both.model), pytest.raises(NonFiniteError):
            both.step.gradients(x * torch.inf, batch(6)[1])
        assert all(torch.equal(p.grad, g) for p, g in zip(both.model.parameters(), before, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_a_failure_behind_the_commit_leaves_gradients_as_they_were(
    devices: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no memory for a gradient")

    with Both(devices=devices) as both:
        both.backward(batch(6))
        with monkeypatch.context() as patch, unchanged(both.model):
            patch.setattr(GradientState, "add", fail)
            with pytest.raises(ExecutionError, match=r"no memory for a gradient(?s:.*)nothing was changed"):
                both.step.gradients(*batch(6, 1))
            both.check_gradients()
        both.backward(batch(6, 2))


def test_outputs_come_with_the_loss() -> None:
    with Both(return_outputs=True) as both:
        loss, outputs = both.step.gradients(*batch(6))
        torch.testing.assert_close(outputs, both.twin(batch(6)[0]).detach())
        torch.testing.assert_close(loss, both.plain(*batch(6)))
        both.check_gradients()


def test_a_program_for_gradients_adds_each_bucket_once_and_is_read_back() -> None:
    with Both(buckets=0.0002) as both:
        program = both.step.prepare(*batch(6))
        text = str(program)
        assert text.count("add_to_grad(bucket=") == len(program.buckets) > 1 and "update(" not in text
        assert "gradients alone" in text.splitlines()[0]
        complete = program.to_text(complete=True)
        assert mirrorc.parse(complete).to_text(complete=True) == complete
        assert "gradients" in str(both.step.memory())


@pytest.mark.slow
def test_a_resumed_run_begins_with_the_buffers_of_each_replica() -> None:
    model = net(nn.BatchNorm1d(8))
    with Both(model) as both:
        both.step.gradients(*batch(6))
        state = copy.deepcopy(both.step.state_dict())
        resumed = net(nn.BatchNorm1d(8))
        with Both(resumed) as other:
            other.step.load_state_dict(state)
            for step in (both.step, other.step):
                step.gradients(*batch(6, 1))
            ours, theirs = (step.state_dict()["replica_buffers"] for step in (both.step, other.step))
            for name, buffer in ours.items():
                pairs = zip(buffer["replicas"], theirs[name]["replicas"], strict=True)
                assert all(torch.equal(*pair) for pair in pairs), name
        assert_same_model(model, resumed, 0.0)


@pytest.mark.parametrize("placement", ["mirrored", "shared"])
def test_updates_that_no_version_counts_are_read_on_all_devices(placement: str) -> None:
    model = net()
    with Both(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), placement=placement) as both:
        both.step(*batch(7))  # from now on devices may have copies
        for _ in range(3):
            for model, _ in both.sides:
                model.zero_grad()
            both.backward(batch(7))
            for model, _ in both.sides:
                for parameter in model.parameters():
                    parameter.data.add_(parameter.grad, alpha=-2.0)  # type: ignore[arg-type]


def test_a_gradient_that_nothing_can_be_added_to_is_refused_before_anything_is_written() -> None:
    with torch.inference_mode():
        made_in_inference = torch.zeros(3, dtype=torch.float64)
    with Both(net(nn.BatchNorm1d(8).double())) as both:
        both.step.gradients(*batch(6))
        for name, gradient in (
            ("3.weight", torch.zeros(1, 1, dtype=torch.float64).expand(3, 8)),
            ("3.bias", made_in_inference),
        ):
            parameter = both.model.get_parameter(name)
            parameter.grad = gradient
            with unchanged(both.model), pytest.raises(ExecutionError, match=rf"MC3209: .*'{name}'"):
                both.step.gradients(*batch(6))
            parameter.grad = None
        with pytest.raises(ExecutionError, match="MC5005: this program leaves gradients to its caller"):
            both.step.explain()


def test_memory_of_a_step_has_what_calls_for_gradients_hold() -> None:
    model = nn.Sequential(nn.Embedding(40, 6, sparse=True), nn.Flatten(), nn.Linear(12, 3)).double()
    x, y = torch.randint(40, (6, 2)), batch(6)[1]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with Both(model, optimizer=optimizer, devices=2) as both:
        both.step(x, y)
        before = both.step.memory()
        both.step.gradients(x, y)
        after, gradients = both.step.memory(), both.step.memory(both.step.programs[-1])
        linear, rows = 8 * (36 + 3), 12 * 8 * (6 + 1)
        held = [after.devices[i].own.gradients - before.devices[i].own.gradients for i in range(2)]
        bucket = gradients.devices[1].own.gradients
        assert bucket >= linear and held == [linear + rows + bucket, bucket]
        assert "in p.grad of the model" in str(after) and "this is a call for gradients" in str(gradients)
        model.zero_grad()
        assert both.step.memory().gradients == before.gradients + 2 * bucket


def test_what_concerns_updates_alone_is_left_out_with_a_remark() -> None:
    with Both(algorithm="ring", devices=3) as both:
        both.backward(batch(7))
        assert "# remark: ring: left out here, where sums are whole" in str(both.step.program)


def test_a_hook_on_a_gradient_is_refused() -> None:
    for hook in ("register_hook", "register_post_accumulate_grad_hook"):
        model = net()
        getattr(model[0].weight, hook)(lambda *_: None)
        with Both(model) as both, pytest.raises(ValueError, match=r"MC1207: .* has a hook on its gradient"):
            both.step.gradients(*batch(6))


@pytest.mark.slow
def test_a_function_gives_what_it_returns() -> None:
    model = net()

    @mirrorc.train_step(model, devices=2, **grouped({"backend": "eager", "progress": False}))
    def step(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        output = model(x)
        return F.cross_entropy(output, y), {"norm": output.square().mean()}

    with step, Both(copy.deepcopy(model)) as both:
        loss, metrics = step.gradients(*batch(6))
        expected = both.plain(*batch(6))
        torch.testing.assert_close(loss, expected)
        torch.testing.assert_close(metrics["norm"], both.twin(batch(6)[0]).square().mean().detach())
        both.model = model
        both.check_gradients()


@pytest.mark.slow
@settings(max_examples=8, deadline=None, derandomize=True)
@given(
    devices=st.sampled_from([1, 2, 3]),
    events=st.lists(
        st.sampled_from(["gradients", "step", "update", "zero", "zeros", "write", "move", "evaluate"]),
        min_size=3,
        max_size=10,
    ),
)
def test_calls_in_any_order_are_those_of_plain_pytorch(devices: int, events: list[str]) -> None:
    model, make = net(), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    optimizer, twin = make(model.parameters()), copy.deepcopy(model)
    twin_optimizer = make(twin.parameters())
    with Both(model, devices, optimizer=optimizer) as both:
        both.twin = twin
        for seed, event in enumerate(events):
            own = batch(3 + seed % 4, seed)
            if event == "gradients":
                both.backward(own)
            elif event == "step":  # which trains on its own batch alone
                for o in (optimizer, twin_optimizer):
                    o.zero_grad()
                both.step(*own)
                both.plain(*own)
                twin_optimizer.step()
                twin_optimizer.zero_grad()
            elif event == "evaluate":
                torch.testing.assert_close(both.step.evaluate(*own), both.loss_fn(twin(own[0]), own[1]).detach())
            else:
                for o, m in ((optimizer, model), (twin_optimizer, twin)):
                    if event == "update" and any(p.grad is not None for p in m.parameters()):
                        o.step()
                    elif event == "write":
                        with torch.no_grad():
                            m[0].weight.mul_(0.9)
                    elif event == "move":
                        m[2].weight.data = m[2].weight.data.clone()
                    elif event in ("zero", "zeros"):
                        o.zero_grad(set_to_none=event == "zero")
        both.check_gradients()
        both.check()
