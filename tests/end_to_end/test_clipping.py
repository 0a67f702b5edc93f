"""Clipped gradients are those of one device: clip_grad_norm=, clip_grad_value=, step.grad_norm."""

import copy
import math
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_parameters
from selections import exhaustive, slow
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc import ClipGradNorm, ExecutionError, NonFiniteError
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes

ADAMW = partial(torch.optim.AdamW, lr=0.05)
SGD = partial(torch.optim.SGD, lr=0.5, momentum=0.9)
ADADELTA = partial(torch.optim.Adadelta, lr=0.5)
SMALL = {"buckets": ByBytes(1e-3, 1e-3)}
UNSHARED = {"disable": ["share-parameters"]}
WAYS: dict[str, tuple[Any, dict[str, Any]]] = {
    "shares": (ADAMW, SMALL),
    "one bucket": (SGD, {}),
    "mirrored": (SGD, UNSHARED | SMALL),
    "copies": (ADAMW, UNSHARED | {"link": "copy"}),
    "foreach": (partial(ADAMW, foreach=True), SMALL),
    "fused": (partial(ADAMW, fused=True), SMALL),
    "by itself": (ADADELTA, SMALL),
    "by itself, mirrored": (ADADELTA, UNSHARED | SMALL),
    "checked": (ADAMW, SMALL | {"check_finite": True}),
    "skipped if need be, mirrored": (SGD, UNSHARED | {"check_finite": "skip"}),
    "exact order": (SGD, SMALL | {"exact_order": True}),
    "inductor": (ADAMW, {"backend": "inductor"}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.first, self.last = nn.Embedding(3000, 50), nn.Linear(50, 7), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.first(self.table(x))))


class Pair(Twins):
    def __init__(self, make: Any, num_devices: int, *, by_group: bool = False, **options: Any) -> None:
        def groups(net: Any) -> Any:
            others = [*net.first.parameters(), *net.last.parameters()]
            return [{"params": [*net.table.parameters()]}, {"params": others}] if by_group else net.parameters()

        torch.manual_seed(0)
        super().__init__(Net().double(), make, F.mse_loss, num_devices, select=groups, **options)

    def train(self, num_examples: int, clip: Any, factor: float = 1.0) -> Any:
        x, target = torch.randint(0, 3000, (num_examples,)), factor * torch.randn(num_examples, 3, dtype=torch.float64)
        loss, expected = self.step(x, target=target), self.backward(x, target=target)
        norm = clip(self.twin)
        self.update()
        torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-12)
        assert_same_parameters(self.model, self.twin, 1e-9)
        return norm


@pytest.mark.parametrize(
    ("way", "num_devices", "norm_type"),
    [
        ("shares", 4, math.inf), ("by itself", 2, 2.0),
        *slow(
            ("one bucket", 3, 0.5), ("shares", 3, 1.0), ("copies", 2, 3.0), ("mirrored", 2, 2.0), ("foreach", 2, 2.0),
            ("fused", 3, 2.0), ("by itself, mirrored", 3, 1.5), ("exact order", 2, 2.0), ("inductor", 2, 2.0),
        ),
        *exhaustive(
            ("shares", 1, 2.0), ("shares", 2, 2.0), ("checked", 2, 2.0), ("skipped if need be, mirrored", 2, 2.0),
            ("inductor", 1, 1.0), ("by itself", 1, 2.0), ("mirrored", 4, math.inf),
        ),
    ],
)  # fmt: skip
def test_the_norm_is_that_of_one_device(way: str, num_devices: int, norm_type: float) -> None:
    make, options = WAYS[way]
    bound = ClipGradNorm(0.02, norm_type)
    with (pair := Pair(make, num_devices, clip_grad_norm=bound, **options)).step as step:
        for num_examples, factor in ((7, 1.0), (7, 1e-6), (7, 10.0), (7, 1.0)):
            norm = pair.train(
                num_examples, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 0.02, norm_type), factor
            )
            torch.testing.assert_close(step.grad_norm, norm, rtol=1e-9, atol=0)


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [(3, UNSHARED | SMALL), *slow((2, SMALL)), *exhaustive((1, {}), (2, {"check_finite": True}))],
)
def test_groups_have_bounds_of_their_own(num_devices: int, options: dict[str, Any]) -> None:
    def clip(net: Net) -> Any:
        others = [*net.first.parameters(), *net.last.parameters()]
        return nn.utils.clip_grad_norm_(net.table.parameters(), 0.01), nn.utils.clip_grad_norm_(others, 0.03, math.inf)

    bounds = [0.01, ClipGradNorm(0.03, math.inf)]
    with (pair := Pair(SGD, num_devices, by_group=True, clip_grad_norm=bounds, **options)).step as step:
        for num_examples in (6, 5, 6):
            norms = pair.train(num_examples, clip)
            torch.testing.assert_close(step.grad_norm, norms, rtol=1e-9, atol=0)
    with (pair := Pair(SGD, num_devices, by_group=True, clip_grad_norm=(None, 0.03), **options)).step as step:
        norm = pair.train(
            6, lambda net: nn.utils.clip_grad_norm_([*net.first.parameters(), *net.last.parameters()], 0.03)
        )
        assert step.grad_norm[0] is None
        torch.testing.assert_close(step.grad_norm[1], norm, rtol=1e-9, atol=0)


@pytest.mark.fast
def test_a_group_that_is_added_needs_a_bound_of_its_own() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 2))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    x, target = torch.randn(4, 3), torch.randn(4, 2)
    with compiled_step(model, F.mse_loss, optimizer=optimizer, clip_grad_norm=[1.0]) as step:
        step(x, target=target)
        optimizer.add_param_group({"params": list(model[1].parameters())})
        before = [p.clone() for p in model.parameters()]
        with pytest.raises(
            ValueError, match=r"has 1 bound, but the optimizer has 2 groups now\n.*\n  fix:  mirrorc.compile"
        ):
            step(x, target=target)
        assert all(map(torch.equal, before, model.parameters()))
        del optimizer.param_groups[1]
        step(x, target=target)


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [(2, SMALL), *slow((3, UNSHARED | SMALL)), *exhaustive((1, {}), (2, {"check_finite": "skip"}))],
)
def test_elements_are_bounded_after_the_norm(num_devices: int, options: dict[str, Any]) -> None:
    def both(net: Net) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        nn.utils.clip_grad_value_(net.parameters(), 0.004)

    with (pair := Pair(ADAMW, num_devices, clip_grad_norm=0.05, clip_grad_value=0.004, **options)).step:
        for num_examples in (6, 5, 6):
            pair.train(num_examples, both)
    with (pair := Pair(ADAMW, num_devices, clip_grad_value=0.004, **options)).step as step:
        pair.train(6, lambda net: nn.utils.clip_grad_value_(net.parameters(), 0.004))
        with pytest.raises(ExecutionError, match="no norm was measured"):
            _ = step.grad_norm


FUSED = {kind.__name__: kind for kind in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad)}


@pytest.mark.parametrize(
    ("name", "num_devices", "options"),
    [
        ("AdamW", 2, SMALL),
        *slow(("SGD", 1, {}), ("Adagrad", 2, {}), ("AdamW", 2, UNSHARED)),
        *exhaustive(("Adam", 3, SMALL)),
    ],
)
def test_fused_updates_scale_gradients_as_they_read_them(name: str, num_devices: int, options: dict[str, Any]) -> None:
    """Also where the factor is 1 or 0, and where the user changes the implementation after the step was compiled."""
    torch.manual_seed(0)
    net = Net()
    plain, twin = copy.deepcopy(net), copy.deepcopy(net)
    more: dict[str, Any] = {"lr": 0.05, "fused": True} | ({"momentum": 0.9} if name == "SGD" else {})
    own, plains, twins = (FUSED[name](each.parameters(), **more) for each in (net, plain, twin))
    given: dict[str, Any] = {"loss_fn": F.mse_loss, "backend": "eager", "clip_grad_norm": 0.02}
    step = mirrorc.compile(net, num_devices, optimizer=own, **grouped({**given, **options}))
    other = mirrorc.compile(twin, num_devices, optimizer=twins, **grouped({"exact_order": True, **given, **options}))
    with step, other:
        for factor in (1.0, 1e-4, 10.0, 0.0, 1.0):
            if factor == 0.0 and name != "Adagrad":  # which makes no state for another implementation
                for optimizer in (own, plains, twins):
                    optimizer.param_groups[0].update(fused=False, foreach=False)
            x, target = torch.randint(0, 3000, (6,)), factor * torch.randn(6, 3)
            step(x, target=target)
            other(x, target=target)
            plains.zero_grad()
            F.mse_loss(plain(x), target).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.02)
            plains.step()
            for theirs in (plain, twin):
                torch.testing.assert_close([*net.parameters()], [*theirs.parameters()], rtol=1e-4, atol=1e-5)
        texts = [each.program.to_text() for each in (step, other)]
    assert ["scale(" in text for text in texts] == ["disable" in options and num_devices > 1, True]


def test_a_norm_is_measured_without_a_bound() -> None:
    with (pair := Pair(SGD, 2, clip_grad_norm=math.inf)).step as step:
        with pytest.raises(
            ExecutionError, match="MC5005: no norm was measured yet\n  why:  a training call measures it"
        ):
            _ = step.grad_norm
        norm = pair.train(5, lambda net: nn.utils.get_total_norm([p.grad for p in net.parameters()]))
        torch.testing.assert_close(step.grad_norm, norm, rtol=1e-9, atol=0)
        kept = step.grad_norm
        before = kept.clone()
        pair.train(4, lambda _: None)
        assert torch.equal(kept, before) and not torch.equal(step.grad_norm, before)


@pytest.mark.parametrize("num_devices", [2, *slow((1,))])
def test_what_is_not_finite_spreads_as_in_a_plain_loop_and_the_table_recovers(num_devices: int) -> None:
    with (pair := Pair(SGD, num_devices, clip_grad_norm=1.0)).step as step:
        pair.train(5, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        saved = copy.deepcopy((pair.model.state_dict(), pair.optimizer.state_dict()))
        x = torch.randint(0, 3000, (5,))
        step(x, target=torch.full((5, 3), math.nan, dtype=torch.float64))
        assert step.grad_norm.isnan() and all(p.isnan().all() for p in pair.model.parameters())
        pair.model.load_state_dict(saved[0])
        pair.optimizer.load_state_dict(saved[1])
        for _ in range(2):  # rows of the table that were not looked up have no gradient again
            pair.train(5, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))


def test_a_check_comes_before_the_clipping() -> None:
    x, bad = torch.randint(0, 3000, (5,)), torch.full((5, 3), math.inf, dtype=torch.float64)
    with (pair := Pair(SGD, 2, clip_grad_norm=1.0, check_finite=True)).step as step:
        pair.train(5, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        with pytest.raises(NonFiniteError):
            step(x, target=bad)
        pair.train(5, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
    with (pair := Pair(SGD, 2, clip_grad_norm=1.0, check_finite="skip")).step as step:
        pair.train(5, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        step(x, target=bad)
        assert step.num_skipped == 1 and step.grad_norm.isnan()
        pair.train(5, lambda net: nn.utils.clip_grad_norm_(net.parameters(), 1.0))
        assert step.grad_norm.isfinite()


def test_other_dtypes_and_tiny_models() -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.complex64):
        for num_devices in (1, 2, 3):
            torch.manual_seed(0)
            net = nn.Linear(3, 2, dtype=dtype)
            plain = copy.deepcopy(net)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, plain)]

            def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
                return (output - target).abs().float().square().mean()

            x, target = torch.randn(6, 3).to(dtype), torch.randn(6, 2).to(dtype)
            with compiled_step(net, loss_fn, num_devices, optimizer=optimizers[0], clip_grad_norm=0.1) as step:
                step(x, target=target)
                loss_fn(plain(x), target).backward()
                norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
                optimizers[1].step()
                tolerance = 1e-5 if dtype in (torch.float32, torch.complex64) else 2e-2
                torch.testing.assert_close(step.grad_norm, norm.float(), rtol=tolerance, atol=tolerance)
                assert_same_parameters(net, plain, tolerance)


def test_small_steps_clip_in_one_thread_with_the_same_bits() -> None:
    def trained(is_interleaved: bool) -> list[torch.Tensor]:
        torch.manual_seed(0)
        net = Net()
        with compiled_step(net, F.mse_loss, 3, optimizer=ADAMW, clip_grad_norm=0.1, timeout=60, **SMALL) as step:
            norms = []
            for _ in range(4):
                step(torch.randint(0, 3000, (7,)), target=torch.randn(7, 3))
                norms.append(step.grad_norm)
                trial = step._runs.last.trial  # type: ignore[union-attr]
                trial.interleaves, trial.is_decided = is_interleaved, True
            assert step._runs.last.is_interleaved is is_interleaved  # type: ignore[union-attr]
            return [*norms, *(p.detach() for p in net.parameters())]

    assert all(map(torch.equal, trained(True), trained(False)))


@pytest.mark.fast
def test_what_it_refuses() -> None:
    net = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    compiled = partial(compiled_step, net, F.mse_loss, optimizer=optimizer)
    for options, kind, text in (
        ({"clip_grad_norm": -1.0}, ValueError, "clip_grad_norm is -1.0\n  fix:  give a number from 0"),
        ({"clip_grad_norm": True}, TypeError, "clip_grad_norm is True"),
        ({"clip_grad_norm": "1"}, TypeError, "clip_grad_norm is '1'"),
        ({"clip_grad_norm": [1.0, 2.0]}, ValueError, r"clip_grad_norm is \[1.0, 2.0\], but the optimizer has 1 group\n"),
        ({"clip_grad_value": -1}, ValueError, "clip_grad_value is -1"),
        ({"clip_grad_value": math.nan}, ValueError, "clip_grad_value is nan"),
        ({"clip_grad_norm": 1.0, "passes": mirrorc.passes.default_pipeline()}, ValueError, "MC1004: "),
        ({"clip_grad_value": 1.0, "disable": ["clip-gradients"]}, ValueError, "needs the pass 'clip-gradients'"),
    ):  # fmt: skip
        with pytest.raises(kind, match=text):
            compiled(**options)
    for arguments in ((-1.0,), (1.0, 0.0), (1.0, -2.0), (math.nan,)):
        with pytest.raises(ValueError, match="give a"):
            ClipGradNorm(*arguments)
    with compiled(clip_grad_norm=[1.0]) as step:
        step(torch.randn(4, 4), target=torch.randn(4, 3))
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_groups_of_two_dtypes_are_bounded_whichever_comes_first() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 6), nn.Linear(6, 3).double())
    model[0].register_forward_hook(lambda module, given, output: output.double())
    plain = copy.deepcopy(model)
    x, y = torch.randn(6, 5), torch.randn(6, 3).double()
    torch.nn.functional.mse_loss(plain(x), y).backward()
    norms = [nn.utils.clip_grad_norm_(layer.parameters(), 0.1) for layer in plain]
    torch.optim.SGD(plain.parameters(), lr=0.1).step()
    optimizer = torch.optim.SGD([{"params": layer.parameters()} for layer in model], lr=0.1)
    loss_fn, bounds = torch.nn.functional.mse_loss, [0.1, 0.1]
    with compiled_step(model, loss_fn, optimizer=optimizer, clip_grad_norm=bounds) as step:
        step(x, target=y)
        torch.testing.assert_close([float(n) for n in step.grad_norm], [float(n) for n in norms], rtol=1e-6, atol=0.0)
    torch.testing.assert_close([*model.parameters()], [*plain.parameters()], rtol=1e-6, atol=1e-7)
