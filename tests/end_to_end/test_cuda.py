"""The same meaning on GPUs: one, and two logical devices on one. Runs where torch sees a GPU."""

import copy
import sys
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc import ExecutionError
from mirrorc.runtime.execution.cuda_graphs import NUM_WARM_UP_STEPS
from mirrorc.torch_internals import adagrad_is_fused_on_gpus

pytestmark = [pytest.mark.fast, pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no GPU")]

DEVICES = {"one": ["cuda:0"], "two-logical": ["cuda:0", "cuda:0/1"]}


def make_net(p: float = 0.0) -> torch.nn.Module:
    layers = [torch.nn.Linear(12, 40), torch.nn.ReLU(), torch.nn.Dropout(p), torch.nn.Linear(40, 5)]
    return torch.nn.Sequential(*layers).double()


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("devices", DEVICES.values(), ids=list(DEVICES))
def test_five_steps_agree_with_one_cpu(devices: list[str], backend: str) -> None:
    torch.manual_seed(0)
    model = make_net()
    reference = copy.deepcopy(model)
    x, y = torch.randn(7, 12).double(), torch.randint(0, 5, (7,))
    expected = torch.optim.AdamW(reference.parameters(), lr=0.01)
    with compiled_step(
        model,
        F.cross_entropy,
        devices,
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        backend=backend,
        buckets=0.001,
    ) as step:
        for _ in range(5):
            expected.zero_grad()
            loss = F.cross_entropy(reference(x), y)
            loss.backward()
            expected.step()
            torch.testing.assert_close(step(x.cuda(), target=y.cuda()).cpu(), loss.detach(), rtol=1e-10, atol=1e-12)
        for variable in step.variables.values():
            assert all(torch.equal(variable.values[0], other) for other in variable.values)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        assert found.is_cuda
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-9, atol=1e-10)


class Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net, self.number = make_net(), torch.tensor(1.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) / self.number


@pytest.mark.parametrize("devices", DEVICES.values(), ids=list(DEVICES))
@pytest.mark.parametrize(
    ("make_model", "make_optimizer"),
    [(make_net, torch.optim.Adagrad), (Scaled, torch.optim.SGD)],
    ids=["Adagrad", "a number of the host's"],
)
def test_steps_agree_with_one_cpu(devices: list[str], make_model: Any, make_optimizer: Any) -> None:
    torch.manual_seed(0)
    model = make_model()
    reference = copy.deepcopy(model)
    x, y = torch.randn(7, 12).double(), torch.randint(0, 5, (7,))
    expected = make_optimizer(reference.parameters(), lr=0.01)
    with compiled_step(
        model, F.cross_entropy, devices, optimizer=make_optimizer(model.parameters(), lr=0.01), backend="inductor"
    ) as step:
        for _ in range(3):
            expected.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            expected.step()
            step(x, target=y)
    for found, wanted in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(found.detach().cpu(), wanted.detach(), rtol=1e-9, atol=1e-10)


def odd_vocabulary() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(64, 256), torch.nn.ReLU(), torch.nn.Linear(256, 1003))


def test_products_that_torch_pads_train() -> None:
    """Its result would have longer rows than those that backward was compiled for."""
    torch.manual_seed(0)
    model = odd_vocabulary()
    reference = copy.deepcopy(model).cuda()
    x, y = torch.randn(2048, 64).cuda(), torch.randint(0, 1003, (2048,)).cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with (
        torch._inductor.config.patch(force_shape_pad=True),
        mirrorc.compile(model, ["cuda:0"], optimizer=optimizer, loss_fn=F.cross_entropy) as step,
    ):
        loss = step(x, target=y)
    torch.testing.assert_close(loss, F.cross_entropy(reference(x), y).detach(), rtol=1e-4, atol=1e-5)


def test_two_runs_are_equal_bit_for_bit() -> None:
    def run() -> list[torch.Tensor]:
        torch.manual_seed(1)
        model = make_net(0.5)
        x, y = torch.randn(8, 12).double(), torch.randint(0, 5, (8,))
        with compiled_step(model, F.cross_entropy, DEVICES["two-logical"]) as step:
            for _ in range(3):
                step(x, target=y)
        return [parameter.detach().cpu() for parameter in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(run(), run(), strict=True))


@pytest.mark.parametrize("devices", DEVICES.values(), ids=list(DEVICES))
def test_steps_that_are_not_finite_are_skipped_or_refused_and_bad_memory_is_found(devices: list[str]) -> None:
    x, y = torch.randn(8, 12).double(), torch.randint(0, 5, (8,))
    bad = x.clone()
    bad[-1, 0] = float("nan")
    for check_finite in (True, "skip"):
        model = make_net()
        options: Any = {"check_finite": check_finite, "check_replicas_every": 1, "buckets": 0.001}
        with compiled_step(
            model, F.cross_entropy, devices, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01), **options
        ) as step:
            for _ in range(3):
                step(x, target=y)
            kept = [parameter.detach().clone() for parameter in model.parameters()]
            if check_finite is True:
                with pytest.raises(mirrorc.NonFiniteError, match=r"'0.weight' is not finite"):
                    step(bad, target=y)
            else:
                assert step(bad, target=y).isnan() and step.num_skipped == 1
            assert all(torch.equal(p, own) for p, own in zip(model.parameters(), kept, strict=True))
            step(x, target=y)
            assert not torch.equal(kept[0], next(model.parameters()))
            if len(devices) > 1:
                step.variables["0.weight"].values[1].view(-1)[:1] += 1.0
                with pytest.raises(mirrorc.ExecutionError, match=r"the replicas' copies of '0.weight' are not equal"):
                    step(x, target=y)


def test_inputs_with_gaps_are_dense_on_the_gpu() -> None:
    model = make_net()
    reference = copy.deepcopy(model)
    x, y = torch.randn(8, 24).double()[:, ::2], torch.randint(0, 5, (8,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with mirrorc.compile(model, ["cuda:0"], optimizer=optimizer, loss_fn=F.cross_entropy) as step:
        found = step(x, target=y).cpu()
    torch.testing.assert_close(found, F.cross_entropy(reference(x), y).detach(), rtol=1e-10, atol=1e-12)


# CUDA graphs. The rates have 32 bits, as those of graphs have.

OPTIMIZERS = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.125),
    "adam": lambda parameters: torch.optim.Adam(parameters, lr=0.125, amsgrad=True),
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.125, momentum=0.5),
}
if adagrad_is_fused_on_gpus():
    OPTIMIZERS["adagrad"] = lambda parameters: torch.optim.Adagrad(parameters, lr=0.125)


def train(
    kind: str, *, cuda_graphs: bool, backend: str, sizes: tuple[int, ...] = (7,), num_steps: int = 10
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = make_net().float()
    optimizer = OPTIMIZERS[kind](model.parameters())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    losses = []
    with compiled_step(
        model, F.cross_entropy, ["cuda:0"], optimizer=optimizer, backend=backend, cuda_graphs=cuda_graphs, buckets=0.001
    ) as step:
        for i in range(num_steps * len(sizes)):
            size = sizes[i % len(sizes)]
            losses.append(step(torch.randn(size, 12), target=torch.randint(0, 5, (size,))))
            scheduler.step()
        if cuda_graphs:
            assert step._runs.last is not None and step._runs.last._step_graph is not None
            assert step._runs.last._step_graph.is_captured
    state = [value for entries in optimizer.state_dict()["state"].values() for value in entries.values()]
    return [value.detach().cpu() for value in (*losses, *model.parameters(), *state)]


def assert_close(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """The kernels are the same, only whether the rate is a tensor may round otherwise."""
    assert len(found) == len(expected)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("backend", ["eager", "inductor"])
@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_graphs_train_as_calls_do(kind: str, backend: str) -> None:
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*capturable.*")
        found = train(kind, cuda_graphs=True, backend=backend)
    assert_close(found, train(kind, cuda_graphs=False, backend=backend))


def test_graphs_of_two_shapes_share_their_memory() -> None:
    expected = train("adamw", cuda_graphs=False, backend="eager", sizes=(7, 4))
    assert_close(train("adamw", cuda_graphs=True, backend="eager", sizes=(7, 4)), expected)


def test_a_graph_is_dropped_and_captured_anew() -> None:
    runs = []
    for cuda_graphs in (False, True):
        torch.manual_seed(0)
        model = make_net().float()
        optimizer = OPTIMIZERS["adamw"](model.parameters())
        with compiled_step(model, F.cross_entropy, ["cuda:0"], optimizer=optimizer, cuda_graphs=cuda_graphs) as step:
            for i in range(3 * NUM_WARM_UP_STEPS + 6):
                if i == NUM_WARM_UP_STEPS + 2:
                    optimizer.param_groups[0]["weight_decay"] = 0.5
                if i == 2 * NUM_WARM_UP_STEPS + 4:
                    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
                step(torch.randn(7, 12), target=torch.randint(0, 5, (7,)))
        runs.append([parameter.detach().cpu() for parameter in model.parameters()])
    assert_close(runs[1], runs[0])


def test_a_loss_that_is_kept_outlives_replays() -> None:
    model = make_net()
    with mirrorc.compile(
        model,
        ["cuda:0"],
        optimizer=OPTIMIZERS["sgd"](model.parameters()),
        loss_fn=F.cross_entropy,
        compiler=mirrorc.Compiler(cuda_graphs=True),
    ) as step:
        kept = [step(torch.randn(7, 12).double(), target=torch.randint(0, 5, (7,))) for _ in range(8)]
        values = [loss.item() for loss in kept]
    assert len(set(values)) == 8


def test_what_a_gpu_refuses_to_capture_is_said_and_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_net()
    x, y = torch.randn(7, 12).double(), torch.randint(0, 5, (7,))
    with compiled_step(
        model, F.cross_entropy, ["cuda:0"], optimizer=OPTIMIZERS["sgd"](model.parameters()), cuda_graphs=True
    ) as step:
        for _ in range(NUM_WARM_UP_STEPS):
            step(x, target=y)
        before = copy.deepcopy(model.state_dict())
        with monkeypatch.context() as patch:
            patch.setattr(
                sys.modules["torch.optim.sgd"], "sgd", lambda parameters, *_, **__: parameters[0].sum().item()
            )
            with pytest.raises(
                ExecutionError, match=r"(?s)cannot be captured.*cuda_graphs=False.*No parameter was changed"
            ):
                step(x, target=y)
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert torch.ones(3).cuda().sum().item() == 3.0, "the GPU goes on"


def test_two_logical_devices_have_no_graph() -> None:
    model = make_net()
    with pytest.raises(ValueError, match="on cuda:0, cuda:0/1: devices wait for one another"):
        mirrorc.compile(
            model,
            DEVICES["two-logical"],
            optimizer=OPTIMIZERS["sgd"](model.parameters()),
            loss_fn=F.cross_entropy,
            compiler=mirrorc.Compiler(cuda_graphs=True),
        )


def test_adagrad_is_fused_where_torch_permits_it() -> None:
    parameter = torch.nn.Parameter(torch.ones(3, device="cuda"))
    refuses = nullcontext() if adagrad_is_fused_on_gpus() else pytest.raises(RuntimeError, match="fused")
    with refuses:
        parameter.grad = torch.ones_like(parameter)
        torch.optim.Adagrad([parameter], fused=True).step()
