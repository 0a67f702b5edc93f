"""Losses are scaled as by torch's GradScaler on one device: scaler=; forward runs under autocast: autocast=."""

import math
from functools import partial
from typing import Any

import pytest
import torch
from selections import exhaustive
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc

ADAMW = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADADELTA = partial(torch.optim.Adadelta, lr=0.5)
UNSHARED = {"disable": ["share-parameters"]}
BAD = {2: math.inf, 3: math.nan, 7: -math.inf}  # what is in the batch of a step


def make_net(dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Linear(7, 3)).to(dtype)


def make_scaler() -> torch.amp.GradScaler:
    return torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)


class Pair(Twins):
    def __init__(self, make: Any, num_devices: int, dtype: torch.dtype = torch.float64, **options: Any) -> None:
        self.dtype, net = dtype, make_net(dtype)
        net.eval()  # BatchNorm then is the same on shards
        self.scaler, self.twin_scaler = make_scaler(), make_scaler()
        super().__init__(net, make, F.mse_loss, num_devices, scaler=self.scaler, **options)

    def train(self, bad: float | None = None, clip: Any = None, autocast: torch.dtype | None = None) -> None:
        x, target = torch.randn(6, 5, dtype=self.dtype), torch.randn(6, 3, dtype=self.dtype)
        if bad is not None:
            x[3, 2] = bad
        loss = self.step(x, target=target)
        with torch.autocast("cpu", autocast or torch.bfloat16, enabled=autocast is not None):
            expected = F.mse_loss(self.twin(x), target)
        self.twin_scaler.scale(expected).backward()
        self.twin_scaler.unscale_(self.twin_optimizer)
        if clip is not None:
            clip(self.twin)
        self.twin_scaler.step(self.twin_optimizer)
        self.twin_scaler.update()
        self.twin_optimizer.zero_grad()
        exact = {"rtol": 1e-9, "atol": 1e-11} if self.dtype == torch.float64 else {"rtol": 2e-2, "atol": 2e-3}
        torch.testing.assert_close(loss, expected.detach(), equal_nan=True, **exact)
        assert self.scaler.state_dict() == self.twin_scaler.state_dict()
        for own, other in zip(self.model.parameters(), self.twin.parameters(), strict=True):
            torch.testing.assert_close(own, other, **exact)
            mine, theirs = self.optimizer.state.get(own, {}), self.twin_optimizer.state.get(other, {})
            assert mine.keys() == theirs.keys()
            torch.testing.assert_close(dict(mine), dict(theirs), check_dtype=False, **exact)


@pytest.mark.parametrize(
    ("make", "num_devices", "options"),
    [
        (SGD, 3, UNSHARED),
        (ADADELTA, 2, {}), (ADAMW, 1, {}), (SGD, 4, {"buckets": 1e-4}), (SGD, 2, {"backend": "inductor"}),
        *exhaustive((ADAMW, 2, {}), (ADADELTA, 3, UNSHARED), (ADAMW, 2, UNSHARED | {"link": "copy"})),
    ],
)  # fmt: skip
def test_a_scaled_step_is_that_of_one_device_also_where_it_is_skipped(
    make: Any, num_devices: int, options: dict[str, Any]
) -> None:
    with (pair := Pair(make, num_devices, **options)).step as step:
        for i in range(12):
            pair.train(BAD.get(i))
        assert step.num_skipped == len(BAD)


@pytest.mark.parametrize(("num_devices", "options"), [(1, {}), (3, UNSHARED), (2, {})])
def test_bounds_are_of_unscaled_gradients(num_devices: int, options: dict[str, Any]) -> None:
    def clip(net: nn.Module) -> None:
        nn.utils.clip_grad_norm_(net.parameters(), 0.05)
        nn.utils.clip_grad_value_(net.parameters(), 0.01)

    with (pair := Pair(ADAMW, num_devices, clip_grad_norm=0.05, clip_grad_value=0.01, **options)).step as step:
        for i in range(5):
            pair.train(BAD.get(i), clip)
            assert bool(step.grad_norm.isnan()) is (i in BAD) and not step.grad_norm > 10


@pytest.mark.parametrize("bound", [math.inf, [math.inf]])
def test_a_first_step_that_is_skipped_has_a_norm_that_is_not_a_number(bound: Any) -> None:
    with (pair := Pair(ADAMW, 2, clip_grad_norm=bound)).step as step:
        pair.train(math.inf)
        (norm,) = step.grad_norm if isinstance(bound, list) else (step.grad_norm,)
        assert norm.isnan() and norm.shape == () and norm.dtype == torch.float64
        pair.train()
        (norm,) = step.grad_norm if isinstance(bound, list) else (step.grad_norm,)
        assert norm > 0


@pytest.mark.parametrize(
    ("dtype", "num_devices"), [(torch.float16, 2), (torch.bfloat16, 2), (torch.float16, 1), (torch.bfloat16, 1)]
)
def test_forward_runs_under_autocast(dtype: torch.dtype, num_devices: int) -> None:
    with (pair := Pair(SGD, num_devices, torch.float32, autocast=dtype)).step as step:
        for i in range(4):
            pair.train(BAD.get(i), autocast=dtype)
        assert not torch.is_autocast_enabled("cpu")
        text = step.program.to_text(regions=True)
        assert ("f16" if dtype is torch.float16 else "bf16") in text


def test_autocast_by_name_and_by_context_are_the_same() -> None:
    def trained(**options: Any) -> list[torch.Tensor]:
        net = make_net(torch.float32)
        by_context = options.pop("by_context", False)
        with compiled_step(net, F.mse_loss, optimizer=SGD, **options) as step:
            for _ in range(2):
                with torch.autocast("cpu", torch.bfloat16, enabled=by_context):
                    step(torch.randn(6, 5), target=torch.randn(6, 3))
        return [p.detach() for p in net.parameters()]

    ways: list[dict[str, Any]] = [
        {"autocast": torch.bfloat16},
        {"autocast": "bfloat16"},
        {"autocast": True},
        {"by_context": True},
    ]
    plain, *others = (trained(), *(trained(**given) for given in ways))
    assert all(all(map(torch.equal, others[0], other)) for other in others[1:])
    assert not all(map(torch.equal, plain, others[0]))
    assert all(map(torch.equal, plain, trained(autocast=False)))


def test_a_scaler_stays_the_users() -> None:
    with (pair := Pair(SGD, 2)).step:
        pair.train()
        for scaler in (pair.scaler, pair.twin_scaler):
            scaler.update(2.0**5)
        pair.train()
        assert pair.scaler.get_scale() == 2.0**6
        saved = pair.scaler.state_dict()
        pair.train(math.inf)
        for scaler in (pair.scaler, pair.twin_scaler):
            scaler.load_state_dict(saved)
        for _ in range(3):
            pair.train()
    net = make_net(torch.float32)
    idle = torch.amp.GradScaler("cpu", enabled=False)
    with compiled_step(net, F.mse_loss, optimizer=SGD, scaler=idle) as step:
        assert step(torch.randn(4, 5), target=torch.full((4, 3), math.inf)).isinf() and step.num_skipped == 0
        assert idle.state_dict() == {} and "scale" not in step.program.to_text()


@pytest.mark.fast
def test_a_scale_stops_growing_before_infinity() -> None:
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127, growth_interval=1)
    net = nn.Linear(1, 1, dtype=torch.float64)
    with compiled_step(net, F.mse_loss, optimizer=SGD, scaler=scaler) as step:
        step(torch.ones(2, 1).double(), target=torch.ones(2, 1).double())
        assert scaler.get_scale() == 2.0**127 and step.num_skipped == 0


def test_a_failed_step_leaves_the_scaler_alone() -> None:
    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        torch._assert_async((target < 5).all(), "too large")
        return F.mse_loss(output, target)

    net, scaler = make_net(torch.float32), make_scaler()
    with compiled_step(net, loss_fn, optimizer=SGD, scaler=scaler) as step:
        step(torch.randn(4, 5), target=torch.zeros(4, 3))
        before = scaler.state_dict()
        with pytest.raises(mirrorc.ExecutionError, match="too large"):
            step(torch.randn(4, 5), target=torch.full((4, 3), 9.0))
        assert scaler.state_dict() == before
        step(torch.randn(4, 5), target=torch.zeros(4, 3))
        assert scaler.get_scale() == 2.0**11, "two steps in a row, the growth interval"


@pytest.mark.fast
def test_a_scaler_is_that_of_one_step() -> None:
    nets, scaler = [make_net(torch.float64) for _ in range(2)], make_scaler()
    compiled = partial(compiled_step, loss_fn=F.mse_loss, scaler=scaler)
    first = compiled(nets[0], optimizer=SGD(nets[0].parameters()))
    with pytest.raises(ValueError, match=r"(?s)by two steps.*give each step a GradScaler of its own"):
        compiled(nets[1], optimizer=SGD(nets[1].parameters()))
    first.close()
    second = compiled(nets[1], optimizer=SGD(nets[1].parameters()))
    second(torch.randn(4, 5).double(), target=torch.randn(4, 3).double())
    del second  # in a notebook, a step is forgotten more often than it is closed
    compiled(nets[0], optimizer=SGD(nets[0].parameters())).close()


@pytest.mark.fast
def test_what_it_refuses() -> None:
    net = make_net(torch.float32)
    compiled = partial(compiled_step, net, F.mse_loss, optimizer=SGD(net.parameters()))
    given = {"scaler": make_scaler()}
    for options, kind, text in (
        ({"scaler": 1024.0}, TypeError, "scaler is 1024.0: give a torch.amp.GradScaler"),
        (
            given | {"check_finite": True},
            ValueError,
            "with check_finite=True\n  why:  .* what happens to such a step, too",
        ),
        (given | {"passes": mirrorc.passes.default_pipeline()}, ValueError, "scaler= and passes= cannot be combined"),
        (given | {"disable": ["unscale-gradients"]}, ValueError, "needs the pass 'unscale-gradients'"),
        (given | {"disable": ["check-finite"]}, ValueError, "needs the pass 'check-finite'"),
        ({"autocast": torch.float32}, ValueError, "autocast is torch.float32\n  fix:  give torch.bfloat16"),
        ({"autocast": "half"}, ValueError, "autocast is 'half'"),
        ({"autocast": 16}, TypeError, "autocast is 16"),
    ):
        with pytest.raises(kind, match=text):
            compiled(**options)
    half = nn.Linear(5, 3, dtype=torch.float16)
    with pytest.raises(ValueError, match=r"the parameter .weight. is float16\n  fix:  keep"):
        mirrorc.compile(half, 2, optimizer=SGD(half.parameters()), loss_fn=F.mse_loss, scaler=make_scaler())
