"""Each habit of docs/migrate/from-pytorch-loop.md by a test of its name. It is long because it is one list, as the page is."""

from __future__ import annotations

import ast
import contextlib
import copy
import io
import logging
import math
import random
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from asserting import TEXT, Asserting
from interrupts import Interrupter, python_handles_interrupts
from references import assert_same_model, assert_same_state, train_step, unchanged
from selections import slow
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence, pad_sequence
from torch.optim.lr_scheduler import OneCycleLR, ReduceLROnPlateau
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from twins import Twins, compiled_step

import mirrorc
from mirrorc import CaptureError
from mirrorc.compilation import progress
from mirrorc.ir.buckets import Elements
from mirrorc.runtime.state.optimizers.user_optimizers import DealtState, InternalSteps, watch_dealt_state

PAGE = Path(__file__).parents[2] / "docs" / "migrate" / "from-pytorch-loop.md"
KINDS = {"Same", "Changed", "Leave out", "Other", "Refused", "Warned"}
SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
ADAMW = partial(torch.optim.AdamW, lr=0.01)


def rows() -> dict[str, list[str]]:
    """The name of each habit, what a loop has, what it has with mirrorc, and what happens."""
    found: dict[str, list[str]] = {}
    for part in PAGE.read_text(encoding="utf-8").split("\n### ")[1:]:
        name, code, effect = (" ".join(text.split()) for text in part.split("\n\n")[:3])
        assert name not in found, f"{name} stands twice"
        found[name] = [name, *code.split(" → "), effect]
    return found


def quoted(row: str) -> str:
    sentence = re.findall(r'"(.+?)"', rows()[row][3])[0]
    return ".*".join(re.escape(part) for part in sentence.split("…"))


def test_page_each_row_has_a_test_and_each_test_a_row() -> None:
    tests = [name.removeprefix("test_") for name in globals() if name.startswith("test_")]
    assert [row.replace("-", "_") for row in rows()] == [name for name in tests if not name.startswith("page_")]
    assert len(rows()) >= 40


def test_page_each_row_is_whole() -> None:
    for row, cells in rows().items():
        assert len(cells) == 4, row
        kind = re.match(r"\*\*(.+?)[.:]\*\*", cells[3])
        assert kind is not None and kind[1] in KINDS, row
        assert ('"' in cells[3]) or kind[1] not in ("Refused", "Warned"), f"{row} quotes no sentence"


def test_page_its_code_is_python() -> None:
    for row, cells in rows().items():
        for code in re.findall(r"`(.+?)`", cells[1] + " " + cells[2]):
            source = code.replace(", ...)", ")").replace("(..., ", "(") + (" pass" if code.endswith(":") else "")
            before = (
                "try: pass\n" if source.startswith("except") else "def f(): " if source.startswith("return") else ""
            )
            try:
                ast.parse(before + source)
            except SyntaxError as error:
                raise AssertionError(f"{row}: {code}") from error


def net(dtype: torch.dtype = torch.float64) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).to(dtype)


def batch(size: int = 4, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (size,), generator=generator)


X, Y = batch()


def compiled(model: nn.Module, optimizer: Any = SGD, loss_fn: Any = F.cross_entropy, **options: Any) -> mirrorc.Step:
    return compiled_step(model, loss_fn, optimizer=optimizer, **options)


class Pair(Twins):
    def __init__(
        self, model: nn.Module | None = None, make: Any = SGD, loss_fn: Any = F.cross_entropy, **options: Any
    ) -> None:
        super().__init__(net() if model is None else model, make, loss_fn, **options)

    def backward(self, x: torch.Tensor = X, target: torch.Tensor = Y) -> torch.Tensor:
        self.twin_optimizer.zero_grad()
        return super().backward(x, target=target)

    def train(self, times: int = 1, after: Callable[[], Any] = lambda: None, size: int = 4) -> torch.Tensor:
        """Trains both, and compares them; ``after`` is what the plain loop does between backward and its update."""
        for seed in range(times):
            x, y = batch(size, seed)
            own, expected = self.step(x, target=y), self.backward(x, y)
            after()
            self.twin_optimizer.step()
            torch.testing.assert_close(own, expected)
        self.check()
        return own


@contextmanager
def refused(row: str, model: nn.Module, kind: type[BaseException] = CaptureError) -> Iterator[None]:
    with unchanged(model), pytest.raises(kind, match=f"(?s){quoted(row)}"):
        yield


@contextmanager
def warned(row: str) -> Iterator[None]:
    """Checks that a block warns of the row's sentence, once."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    said = [str(w.message) for w in caught if w.category is UserWarning]
    assert len(said) == 1 and re.search(quoted(row), said[0]), said


@pytest.fixture(autouse=True)
def no_warnings() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        yield


class Around(nn.Module):
    def __init__(self, does: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.does, self.count = net(), does, 0
        self.register_buffer("mean", torch.zeros((), dtype=torch.float64))

    def forward(self, x: torch.Tensor, **kwargs: Any) -> Any:
        return self.does(self, x, **kwargs)


def assert_draws_alike(model: nn.Module, seed_all: Callable[[int], Any], seeds: tuple[int, ...]) -> None:
    with Pair(model) as pair:
        for seed in seeds:
            seed_all(seed)
            own = pair.step(X, target=Y)
            seed_all(seed)
            torch.testing.assert_close(own, pair.backward())
            pair.twin_optimizer.step()
        pair.check()


# The batch and its arguments


@pytest.mark.slow
def test_training_step() -> None:
    with Pair() as pair:
        pair.train(3, size=5)


@pytest.mark.slow
def test_to_device() -> None:
    with Pair() as pair:
        assert pair.step(X.to("cpu"), target=Y.to("cpu")).device == torch.device("cpu")


@pytest.mark.slow
def test_data_parallel() -> None:
    with Pair(nn.DataParallel(net())) as pair:
        pair.train(2)
    torch.distributed.init_process_group("fake", rank=0, world_size=1, store=torch.distributed.HashStore())
    try:
        wrapped = nn.parallel.DistributedDataParallel(net())
        with pytest.raises(ValueError, match=quoted("data-parallel")):
            compiled(wrapped, SGD(wrapped.parameters()))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_process_group() -> None:
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=torch.distributed.HashStore())
    try:
        model = net()
        with pytest.raises(mirrorc.CommunicationError, match=quoted("process-group")):
            compiled(model, SGD(model.parameters()), timeout=0.2)
        compiled(model, SGD(model.parameters()), distributed=False).close()
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_sharded_optimizer() -> None:
    model = net()
    program = mirrorc.plan(
        model, ((X,), {"target": Y}), world=mirrorc.World(2, 2), rank=1, optimizer=ADAMW(model.parameters()),
        loss_fn=F.cross_entropy, memory=mirrorc.Memory(shard_optimizer=True), compiler=mirrorc.Compiler(backend="eager"),
    )  # fmt: skip
    (bucket,) = program.buckets
    assert bucket.part == Elements(bucket.num_elements // 2, bucket.num_elements)
    optimizer = ADAMW(model.parameters())
    optimizer.state[model[0].weight] = {"exp_avg": DealtState(torch.float64)}  # as the step of a worker leaves it
    internal_steps = InternalSteps()
    watch_dealt_state(optimizer, internal_steps)
    with pytest.raises(mirrorc.ExecutionError, match=quoted("sharded-optimizer")):
        optimizer.state_dict()
    with Pair(make=ADAMW, shard_optimizer=True) as pair:  # in a process on its own it changes nothing
        pair.train(2)
        pair.step.gather_optimizer_state()
        assert pair.optimizer.state_dict()["state"].keys() == pair.twin_optimizer.state_dict()["state"].keys()


def test_torch_compile() -> None:
    model = net()
    before = model[0].weight.detach().clone()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with compiled(torch.compile(model), SGD(model.parameters())) as step:
            loss = step(X, target=Y)
    torch.testing.assert_close(loss, F.cross_entropy(net()(X), Y).detach())
    assert not torch.equal(before, model[0].weight)


@pytest.mark.slow
def test_dict_batch() -> None:
    model = Around(lambda own, x, labels: {"loss": F.cross_entropy(own.net(x), labels)})
    with compiled(model, loss_fn=None) as step:
        torch.testing.assert_close(step(**{"x": X, "labels": Y}), F.cross_entropy(net()(X), Y).detach())


@pytest.mark.slow
def test_several_targets() -> None:
    def loss_fn(output: torch.Tensor, target: Any) -> torch.Tensor:
        return (F.cross_entropy(output, target[0], reduction="none") * target[1]).mean()

    w = torch.rand(4, dtype=torch.float64)
    with compiled(net(), loss_fn=loss_fn) as step:
        torch.testing.assert_close(step(X, target=(Y, w)), loss_fn(net()(X), (Y, w)).detach())


def test_positional_target() -> None:
    model = net()
    with compiled(model) as step:
        expected = F.cross_entropy(model(X), Y).detach()
        torch.testing.assert_close(step(X, Y), expected)


@pytest.mark.slow
def test_whole_tensor() -> None:
    model = Around(lambda own, x, table: own.net(x @ table))
    table = torch.randn(3, 3, dtype=torch.float64)
    with compiled(model) as step:
        found = step(X, table=mirrorc.replicated(table), target=Y)
        torch.testing.assert_close(found, F.cross_entropy(net()(X @ table), Y).detach())


def test_numpy_batch() -> None:
    model = net()
    with compiled(model) as step, refused("numpy-batch", model, TypeError):
        step(X.numpy(), target=Y)


@pytest.mark.slow
def test_other_shape() -> None:
    with Pair(loss_fn=lambda output, y: (output - y[:, None]).square().mean()) as pair:
        for size in (5, 8, 5):
            pair.train(size=size)
        assert "2 compiled programs" in repr(pair.step)


@pytest.mark.slow
def test_changing_number() -> None:
    model = Around(lambda own, x, beta: own.net(x) * beta)
    with compiled(model, SGD(model.parameters(), lr=0.0)) as step:
        for i in range(5):
            beta = 0.5 + 0.1 * i
            torch.testing.assert_close(step(X, beta=beta, target=Y), F.cross_entropy(net()(X) * beta, Y).detach())
        assert "2 compiled programs" in repr(step)


@pytest.mark.slow
def test_sequence_first() -> None:
    class First(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.lstm(x.transpose(0, 1))[0].transpose(0, 1)

    model = First()
    x, y = torch.randn(4, 6, 3, dtype=torch.float64), torch.randn(4, 6, 2, dtype=torch.float64)
    lstm = copy.deepcopy(model.lstm)
    expected = F.mse_loss(lstm(x.transpose(0, 1))[0].transpose(0, 1), y).detach()
    with compiled(model, loss_fn=F.mse_loss) as step:
        torch.testing.assert_close(step(x, target=y), expected)
    check = mirrorc.check_loss(
        lstm, x.transpose(0, 1), target=y.transpose(0, 1), loss_fn=lambda o, t: F.mse_loss(o[0], t)
    )
    assert not check.same


# The loss and the outputs


@pytest.mark.slow
def test_loss_item() -> None:
    with compiled(net()) as step:
        losses = [step(X, target=Y) for _ in range(3)]
        assert losses[0].item() > losses[2].item() and not losses[0].requires_grad


@pytest.mark.slow
def test_loss_backward() -> None:
    model = net()
    with compiled(model) as step:
        loss = step(X, target=Y)
        with warned("loss-backward"):
            loss.backward()


@pytest.mark.slow
def test_sum_loss() -> None:
    with Pair(loss_fn=nn.CrossEntropyLoss(reduction="sum"), loss_reduction="sum") as pair:
        pair.train(2)


@pytest.mark.slow
def test_sum_loss_unsaid() -> None:
    with compiled(net(), loss_fn=nn.CrossEntropyLoss(reduction="sum")) as step, warned("sum-loss-unsaid"):
        step(X, target=Y)


def test_loss_of_each_example() -> None:
    model = net()
    with (
        compiled(model, loss_fn=nn.CrossEntropyLoss(reduction="none")) as step,
        refused("loss-of-each-example", model),
    ):
        step(X, target=Y)


@pytest.mark.slow
def test_auxiliary_loss() -> None:
    with Pair(loss_fn=lambda o, y: F.cross_entropy(o, y, label_smoothing=0.1) + 0.1 * o.square().mean()) as pair:
        pair.train(2)


@pytest.mark.slow
def test_penalty() -> None:
    def loss_fn(own: nn.Module, o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(o, y) + 1e-2 * sum(p.square().sum() for p in own.parameters())

    model, plain = net(), net()
    train_step(plain, SGD(plain.parameters()), {"input": X, "target": Y}, partial(loss_fn, plain))
    with compiled(model, loss_fn=partial(loss_fn, model)) as step:
        step(X, target=Y)
    assert_same_model(model, plain, 1e-10)


@pytest.mark.slow
def test_class_weights() -> None:
    with (
        compiled(net(), loss_fn=nn.CrossEntropyLoss(torch.tensor([1.0, 3.0], dtype=torch.float64))) as step,
        warned("class-weights"),
    ):
        step(X, target=Y)


@pytest.mark.slow
def test_ignore_index() -> None:
    with compiled(net()) as step, warned("ignore-index"):
        step(X, target=torch.tensor([-100, -100, 0, 1]))


@pytest.mark.slow
def test_contrastive_loss() -> None:
    def loss_fn(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(o @ o.T, torch.arange(len(o)))

    found = mirrorc.check_loss(net(), X, target=Y, loss_fn=loss_fn)
    assert not found.same
    with compiled(net(), loss_fn=loss_fn) as step:
        output = net()(X)
        shards = [loss_fn(part, Y) for part in output.split(2)]
        torch.testing.assert_close(step(X, target=Y), ((shards[0] + shards[1]) / 2).detach())


@pytest.mark.slow
def test_gradient_penalty() -> None:
    def penalty(own: Any, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(own.net(x).sum(), x, create_graph=True)
        return gradient.square().sum(1).mean()

    def functional(own: Any, x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda inner: own.net(inner).sum())(x).square().sum(1).mean()

    plain = Around(penalty)
    optimizer = SGD(plain.parameters())
    plain(X).backward()
    optimizer.step()
    same, own = Around(penalty), Around(functional)
    with compiled(same, loss_fn=None) as step, pytest.warns(UserWarning, match=quoted("gradient-penalty")):
        step(X)
    with compiled(own, loss_fn=None) as step:
        step(X)
    assert_same_model(same, plain, 1e-10)
    assert_same_model(own, plain, 1e-10)


@pytest.mark.slow
def test_distributions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        torch.distributions.Distribution, "_validate_args", True
    )  # torch.compile sets it to False for good

    def loss_fn(o: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return -torch.distributions.Normal(o, 1.0).log_prob(y[:, None].to(o.dtype)).mean()

    with Pair(loss_fn=loss_fn, capture="dynamo") as pair:
        pair.train(2)
        with (
            unchanged(pair.model),
            pytest.raises(mirrorc.ExecutionError, match="the parameter loc of a distribution Normal"),
        ):
            pair.step(X * math.nan, target=Y)


@pytest.mark.slow
def test_accuracy() -> None:
    with compiled(net(), return_outputs=True) as step:
        _, logits = step(X, target=Y)
        torch.testing.assert_close(logits, net()(X).detach())
        assert (logits.argmax(1) == Y).sum().item() == (net()(X).argmax(1) == Y).sum().item()


@pytest.mark.slow
def test_loss_and_metrics() -> None:
    def loss_fn(o: torch.Tensor, y: torch.Tensor) -> Any:
        hits = mirrorc.summed((o.argmax(1) == y).sum())
        return F.cross_entropy(o, y), {"hits": hits, "mean": o.mean()}

    with compiled(net(), loss_fn=loss_fn, return_outputs=True) as step:
        _, (logits, metrics) = step(X, target=Y)
        assert metrics["hits"].item() == (logits.argmax(1) == Y).sum().item()
        torch.testing.assert_close(metrics["mean"], logits.mean())


# Gradients and clipping


@pytest.mark.slow
def test_zero_grad() -> None:
    with Pair() as pair:
        for _ in range(3):
            pair.optimizer.zero_grad(set_to_none=True)
            pair.train()


@pytest.mark.slow
def test_read_gradients() -> None:
    model, norms = net(), []
    optimizer = SGD(model.parameters())
    with compiled(model, optimizer) as step:
        step(X, target=Y)
        assert model[0].weight.grad is None
        handle = optimizer.register_step_pre_hook(lambda *_: norms.append(model[0].weight.grad.norm().item()))
        plain = copy.deepcopy(model)
        F.cross_entropy(plain(X), Y).backward()
        step(X, target=Y)
        handle.remove()
        step(X, target=Y)
        assert norms == [pytest.approx(plain[0].weight.grad.norm().item())]


@pytest.mark.slow
def test_clip_grad_norm() -> None:
    with Pair(clip_grad_norm=0.1) as pair:
        pair.train(2, lambda: nn.utils.clip_grad_norm_(pair.twin.parameters(), 0.1))


@pytest.mark.slow
def test_clip_after_the_step() -> None:
    with Pair() as pair, warned("clip-after-the-step"):
        pair.train()
        nn.utils.clip_grad_norm_(pair.model.parameters(), 0.1)
        pair.train()


@pytest.mark.slow
def test_clip_grad_value() -> None:
    with Pair(clip_grad_value=0.01) as pair:
        pair.train(2, lambda: nn.utils.clip_grad_value_(pair.twin.parameters(), 0.01))


@pytest.mark.slow
def test_log_grad_norm() -> None:
    with Pair(clip_grad_norm=math.inf) as pair:
        norms: list[torch.Tensor] = []
        pair.train(2, lambda: norms.append(nn.utils.get_total_norm(p.grad for p in pair.twin.parameters())))
        assert pair.step.grad_norm.item() == pytest.approx(norms[-1].item())


@pytest.mark.slow
def test_change_gradients() -> None:
    def halve(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for parameter in optimizer.param_groups[0]["params"]:
            parameter.grad.mul_(0.5)

    with Pair() as pair:
        for _, optimizer in pair.sides:
            optimizer.register_step_pre_hook(halve)
        pair.train(2)


def test_hook_on_a_gradient() -> None:
    model = net()
    model[0].weight.register_hook(lambda gradient: gradient * 2)
    with unchanged(model), pytest.raises(ValueError, match=quoted("hook-on-a-gradient")):
        compiled(model)(X, target=Y)


@pytest.mark.slow
def test_own_backward() -> None:
    with Pair() as pair:
        pair.train()
        F.cross_entropy(pair.model(X), Y).backward()
        with warned("own-backward"):
            pair.train()


@pytest.mark.slow
def test_microbatches() -> None:
    with Pair(microbatches=4) as pair:
        x, y = batch(8, 0)
        for part, own in zip(x.chunk(4), y.chunk(4), strict=True):
            (F.cross_entropy(pair.twin(part), own) / 4).backward()
        pair.twin_optimizer.step()
        pair.step(x, target=y)
        pair.check()


@pytest.mark.slow
def test_accumulation() -> None:
    (x, y), (u, v) = batch(6, 0), batch(4, 1)
    with Pair() as pair:
        for own_x, own_y in ((x, y), (u, v)):
            (F.cross_entropy(pair.twin(own_x), own_y) * len(own_x) / 10).backward()
        pair.twin_optimizer.step()
        pair.step.accumulate(x, target=y)
        pair.step(u, target=v)
        pair.check()


@pytest.mark.slow
def test_drop_accumulated() -> None:
    (x, y), (u, v) = batch(6, 0), batch(4, 1)
    with Pair() as pair:
        F.cross_entropy(pair.twin(x), y).backward()
        pair.step.accumulate(x, target=y)
        for _, optimizer in pair.sides:
            optimizer.zero_grad()
        F.cross_entropy(pair.twin(u), v).backward()
        pair.twin_optimizer.step()
        pair.step(u, target=v)
        pair.check()


# The optimizer, its groups and schedulers


@pytest.mark.slow
def test_optimizer_step() -> None:
    with Pair() as pair, warned("optimizer-step"):
        pair.train()
        pair.optimizer.step()
        pair.train()


@pytest.mark.slow
def test_groups() -> None:
    def make(parameters: Any) -> torch.optim.Optimizer:
        found = list(parameters)
        return torch.optim.AdamW([{"params": found[::2], "weight_decay": 0.1}, {"params": found[1::2], "lr": 0.1}])

    with Pair(make=make) as pair:
        pair.train(2)


@pytest.mark.slow
def test_add_group() -> None:
    with Pair(make=lambda parameters: SGD(list(parameters)[2:])) as pair:
        pair.train()
        for model, optimizer in pair.sides:
            optimizer.add_param_group({"params": list(model[0].parameters()), "lr": 0.01})
        pair.train()


@pytest.mark.slow
def test_scheduler() -> None:
    with Pair() as pair:
        schedulers = [OneCycleLR(optimizer, 0.5, total_steps=5) for _, optimizer in pair.sides]
        for _ in range(4):
            pair.train()
            for scheduler in schedulers:
                scheduler.step()
        assert "1 compiled program" in repr(pair.step)


@pytest.mark.slow
def test_plateau() -> None:
    with Pair() as pair:
        schedulers = [ReduceLROnPlateau(optimizer, patience=0) for _, optimizer in pair.sides]
        for _ in range(3):
            pair.train()
            for scheduler in schedulers:
                scheduler.step(1.0)
        assert pair.optimizer.param_groups[0]["lr"] < 0.1


@pytest.mark.slow
def test_write_lr() -> None:
    with Pair() as pair:
        for lr in (0.1, 0.0, 0.3):
            for _, optimizer in pair.sides:
                optimizer.param_groups[0]["lr"] = lr
            pair.train()


class Signs(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(parameter.grad.sign(), alpha=group["lr"])


@pytest.mark.slow
def test_own_optimizer() -> None:
    with Pair(make=Signs) as pair:
        pair.train(2)


def test_closure() -> None:
    model = net()
    with unchanged(model), pytest.raises(TypeError, match=quoted("closure")):
        compiled(model, torch.optim.LBFGS(model.parameters()))
    plain, (x, y) = net(), batch()

    def train(model: nn.Module, gradients: Callable[[], torch.Tensor]) -> None:
        optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=3)

        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            return gradients()

        optimizer.step(closure)  # type: ignore[arg-type]

    def backward() -> torch.Tensor:
        loss = F.cross_entropy(plain(x), y)
        loss.backward()
        return loss

    with compiled(model, None) as step:
        train(model, lambda: step.gradients(x, y))
    train(plain, backward)
    assert_same_model(model, plain, 1e-10)


class Up(torch.optim.Optimizer):
    """The first half of SAM: climbs along the gradient."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"rho": 0.05})

    def step(self, closure: Any = None) -> None:
        own = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in own if p.grad is not None]).norm()
        with torch.no_grad():
            for p in own:
                assert p.grad is not None
                self.state[p]["by"] = p.grad * (0.05 / norm)
                p.add_(self.state[p]["by"])


class Down(torch.optim.SGD):
    """The second half: goes back, and updates with the gradient that it has found above."""

    def __init__(self, parameters: Any, up: Up) -> None:
        super().__init__(parameters, lr=0.1, momentum=0.9)
        self.up = up

    def step(self, closure: Any = None) -> None:
        with torch.no_grad():
            for p in self.param_groups[0]["params"]:
                p.sub_(self.up.state[p]["by"])
        super().step()


@pytest.mark.slow
def test_two_evaluations() -> None:
    model, plain = net(), net()
    up, plain_up = Up(model.parameters()), Up(plain.parameters())
    down, plain_down = Down(model.parameters(), up), Down(plain.parameters(), plain_up)
    with compiled(model, up) as up_step, compiled(model, down) as down_step:
        for seed in range(3):
            x, y = batch(seed=seed)
            up_step(x, target=y)
            down_step(x, target=y)
            for optimizer in (plain_up, plain_down):
                train_step(plain, optimizer, {"input": x, "target": y}, F.cross_entropy)
    assert_same_model(model, plain, 1e-10)


@pytest.mark.slow
def test_several_optimizers() -> None:
    model, plain = net(), net()
    own, other = ([torch.optim.Muon([m[0].weight]), ADAMW([m[0].bias, *m[2].parameters()])] for m in (model, plain))
    with compiled(model, own) as step:
        for seed in range(2):
            x, y = batch(4, seed)
            step(x, target=y)
            F.cross_entropy(plain(x), y).backward()
            for o in other:
                o.step()
                o.zero_grad()
    assert_same_model(model, plain, 1e-10)
    for one, another in zip(own, other, strict=True):
        assert_same_state(one, another, 1e-10)


@pytest.mark.slow
def test_gan() -> None:
    def make() -> tuple[Any, ...]:
        generator, critic = net()[0].double(), net()
        head = nn.Linear(4, 3).double()
        with torch.no_grad():
            head.weight.fill_(0.1)
        generator = nn.Sequential(generator, head)
        one = Around(
            lambda own, z, real: F.softplus(-critic(real)).mean() + F.softplus(critic(generator(z).detach())).mean()
        )
        other = Around(lambda own, z: F.softplus(-critic(generator(z))).mean())
        for model in (one, other):
            model.net, model.critic = generator, critic
        return one, other, ADAMW(critic.parameters()), ADAMW(generator.parameters())

    one, other, for_critic, for_generator = make()
    plain, plain_other, plain_critic, plain_generator = make()
    with compiled(one, for_critic, None) as train_critic, compiled(other, for_generator, None) as train_generator:
        for seed in range(3):
            z, real = batch(4, seed)[0], batch(4, seed + 9)[0]
            train_critic(z, real=real)
            train_generator(z)
            plain_critic.zero_grad()
            plain(z, real=real).backward()
            plain_critic.step()
            plain_generator.zero_grad()
            plain_other(z).backward()
            plain_generator.step()
    assert_same_model(one, plain, 1e-10)
    assert_same_state(for_critic, plain_critic, 1e-10)
    assert_same_state(for_generator, plain_generator, 1e-10)


@pytest.mark.slow
def test_two_losses_in_turn() -> None:
    square = lambda o, y: o.square().mean()  # noqa: E731
    with Pair() as pair, compiled(pair.model, pair.optimizer, square) as other:
        for _ in range(2):
            pair.train()
            other(X, target=Y)
            train_step(pair.twin, pair.twin_optimizer, {"input": X, "target": Y}, square)
            pair.check()


# Mixed precision and scaling


@pytest.mark.slow
def test_autocast_context() -> None:
    with compiled(net(torch.float32), return_outputs=True) as step:
        with torch.autocast("cpu", torch.bfloat16):
            _, logits = step(X.float(), target=Y)
            expected = net(torch.float32)(X.float())
        assert logits.dtype == torch.bfloat16
        torch.testing.assert_close(logits, expected.detach(), rtol=1e-2, atol=1e-2)


@pytest.mark.slow
def test_autocast_option() -> None:
    with compiled(net(torch.float32), return_outputs=True, autocast=torch.bfloat16) as step:
        assert step(X.float(), target=Y)[1].dtype == torch.bfloat16


@pytest.mark.slow
def test_grad_scaler() -> None:
    model = net()
    with compiled(model) as step:
        loss = step(X, target=Y)
        with refused("grad-scaler", model, RuntimeError):
            torch.amp.GradScaler("cpu").scale(loss).backward()


@pytest.mark.slow
def test_scaler_option() -> None:
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=1) for _ in range(2)]
    with Pair(scaler=scalers[0]) as pair:
        for seed in range(2):
            x, y = batch(4, seed)
            pair.step(x, target=y)
            pair.twin_optimizer.zero_grad()
            scalers[1].scale(F.cross_entropy(pair.twin(x), y)).backward()
            scalers[1].step(pair.twin_optimizer)
            scalers[1].update()
        pair.check()
        assert scalers[0].state_dict() == scalers[1].state_dict()


def test_scaler_of_two() -> None:
    scaler, models = torch.amp.GradScaler("cpu"), [net(), net()]
    with compiled(models[0], scaler=scaler), refused("scaler-of-two", models[1], ValueError):
        compiled(models[1], scaler=scaler)


@pytest.mark.slow
def test_bfloat16_model() -> None:
    model = net(torch.bfloat16)
    with compiled(model, ADAMW(model.parameters())) as step:
        before = model[0].weight.detach().clone()
        assert step(X.bfloat16(), target=Y).dtype == torch.bfloat16 and not torch.equal(before, model[0].weight)


# Buffers, dropout and random numbers


@pytest.mark.slow
def test_batch_norm() -> None:
    model = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double()
    plain = copy.deepcopy(model)
    expected = sum(
        F.cross_entropy(plain(part), own) / 2 for part, own in zip(X[:4].split(2), Y[:4].split(2), strict=True)
    )
    with compiled(model) as step:
        torch.testing.assert_close(step(X[:4], target=Y[:4]), expected.detach())
        values = step.variables["1.running_mean"].values
        torch.testing.assert_close(model[1].running_mean, (values[0] + values[1]) / 2)


@pytest.mark.slow
def test_sync_batch_norm() -> None:
    model = nn.SyncBatchNorm.convert_sync_batchnorm(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)).double())
    plain = copy.deepcopy(model)
    expected = F.cross_entropy(plain(X), Y).detach()
    with compiled(model) as step:
        torch.testing.assert_close(step(X, target=Y), expected)
        torch.testing.assert_close(model[1].running_var, plain[1].running_var)


@pytest.mark.slow
def test_manual_seed() -> None:
    losses = []
    for _ in range(2):
        model = nn.Sequential(net(), nn.Dropout(0.5))
        with compiled(model) as step:
            torch.manual_seed(1)
            losses.append([step(X, target=Y).item() for _ in range(3)])
    assert losses[0] == losses[1]


@pytest.mark.slow
def test_write_a_buffer() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            own.mean.mul_(0.9).add_(x.mean(), alpha=0.1)
        return own.net(x)

    model, plain = Around(forward), Around(forward)
    with compiled(model) as step:
        step(X[:4], target=Y[:4])
    plain(X[:4])
    torch.testing.assert_close(model.mean, plain.mean)


def test_count_in_forward() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.count += 1
        return own.net(x)

    with pytest.warns(UserWarning, match="MC2701"), Pair(Around(forward)) as pair:
        pair.train(3)
        assert pair.model.count == pair.twin.count == 3


@pytest.mark.slow
def test_cached_mask() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(own, "mask"):
            own.mask = torch.ones(3, 3, dtype=torch.float64).triu(1)
        return own.net(x @ own.mask)

    with pytest.warns(UserWarning, match="MC2701"), Pair(Around(forward)) as pair:
        pair.train(4)
        assert torch.equal(pair.model.mask, pair.twin.mask)
        assert "autograd" not in pair.step.program.to_text()


@pytest.mark.slow
def test_loss_in_an_attribute() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.net[0].aux = x.pow(2).sum(1, keepdim=True)
        return own.net(x) * own.net[0].aux

    with pytest.warns(UserWarning, match="MC3304"), Pair(Around(forward)) as pair:
        pair.train()


def test_running_mean_in_python() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        own.count = 0.9 * own.count + 0.1 * x.mean(0)
        return own.net(x - own.count)

    model = Around(forward)
    with compiled(model) as step, refused("running-mean-in-python", model):
        step(X, target=Y)


def test_iterator_in_forward() -> None:
    model = Around(lambda own, x: own.net(x) * next(own.noise))
    model.noise = (0.5 for _ in range(9))
    with compiled(model) as step, refused("iterator-in-forward", model):
        step(X, target=Y)
    assert len([*model.noise]) == 9


@pytest.mark.slow
def test_python_random() -> None:
    model = Around(lambda own, x: own.net(x) * random.uniform(0.5, 1.0) if random.random() < 0.5 else own.net(x))
    assert_draws_alike(model, random.seed, (1, 2, 3))


@pytest.mark.slow
def test_layerdrop() -> None:
    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.layerdrop = net(), 0.5
            self.layer = nn.Linear(3, 3).double()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            skips = torch.rand([]) < self.layerdrop
            return self.net(x if skips else self.layer(x))

    assert_draws_alike(Drops(), torch.manual_seed, (1, 2, 5))


# Between steps


@pytest.mark.slow
def test_load_state_dict() -> None:
    with Pair() as pair:
        pair.train()
        saved = copy.deepcopy(pair.model.state_dict())
        pair.train()
        for model, _ in pair.sides:
            model.load_state_dict(saved)
        pair.train()


@pytest.mark.slow
def test_ema() -> None:
    with Pair() as pair:
        averages = [AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9)) for model, _ in pair.sides]
        for _ in range(3):
            pair.train()
            for average, (model, _) in zip(averages, pair.sides, strict=True):
                average.update_parameters(model)
        assert_same_model(averages[0], averages[1], 1e-10)


@pytest.mark.slow
def test_freeze() -> None:
    with Pair() as pair:
        for flag in (True, False, True):
            for model, _ in pair.sides:
                model[0].requires_grad_(flag)
            pair.train()


@pytest.mark.parametrize("devices", [1, *slow((2,), (3,))])
def test_freeze_with_zeros(devices: Any) -> None:
    with Pair(devices=devices) as pair:
        pair.train()
        for model, optimizer in pair.sides:
            optimizer.zero_grad(set_to_none=False)
            model[0].requires_grad_(False)
        before = pair.model[0].weight.detach().clone()
        pair.step(X, target=Y)
        F.cross_entropy(pair.twin(X), Y).backward()
        pair.twin_optimizer.step()
        assert torch.equal(pair.model[0].weight, before)
        assert not torch.allclose(pair.twin[0].weight, before), "momentum goes on"
        torch.testing.assert_close(pair.model[2].state_dict(), pair.twin[2].state_dict())


@pytest.mark.slow
def test_tie_weights() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Tanh(), nn.Linear(3, 3)).double()
    model[2].weight = model[0].weight
    with Pair(model) as pair:
        pair.train(2)
        assert pair.model[2].weight is pair.model[0].weight


def test_tie_by_data() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3)).double()
    model[1].weight.data = model[0].weight.data
    with unchanged(model), pytest.raises(ValueError, match=quoted("tie-by-data")):
        compiled(model)


@pytest.mark.slow
def test_clamp_weights() -> None:
    with Pair() as pair:
        for _ in range(2):
            pair.train()
            for model, _ in pair.sides:
                with torch.no_grad():
                    model[0].weight.clamp_(-0.1, 0.1)


@pytest.mark.slow
def test_clamp_data() -> None:
    with Pair() as pair:
        pair.train()
        for model, _ in pair.sides:
            model[0].weight.data.clamp_(-0.1, 0.1)
        pair.train()


@pytest.mark.slow
def test_new_head() -> None:
    model = net()
    with compiled(model) as step:
        step(X, target=Y)
        model[2] = nn.Linear(4, 2).double()
        with refused("new-head", model, ValueError):
            step(X, target=Y)


@pytest.mark.slow
def test_reset_a_layer() -> None:
    with Pair() as pair:
        pair.train()
        for model, _ in pair.sides:
            torch.manual_seed(7)
            model[2].reset_parameters()
        pair.train()


@pytest.mark.slow
def test_module_attribute() -> None:
    with Pair(Around(lambda own, x: own.net(x) * own.count)) as pair:
        for count in (1, 2, 1):
            pair.model.count = pair.twin.count = count
            pair.train()


@pytest.mark.slow
def test_deepcopy() -> None:
    with Pair() as pair:
        pair.train()
        snapshot = copy.deepcopy(pair.model)
        before = copy.deepcopy(pair.twin)
        pair.train()
        assert_same_model(snapshot, before, 1e-10)


# Evaluation


@pytest.mark.slow
def test_evaluate() -> None:
    with Pair(nn.Sequential(net(), nn.Dropout(0.0))) as pair:
        pair.train()
        for model, _ in pair.sides:
            model.eval()
        with torch.no_grad():
            torch.testing.assert_close(pair.model(X), pair.twin(X))
        for model, _ in pair.sides:
            model.train()
        pair.train()


@pytest.mark.slow
def test_evaluate_on_all_devices() -> None:
    with Pair() as pair:
        pair.train()
        torch.testing.assert_close(pair.step.evaluate(X, target=Y), F.cross_entropy(pair.twin(X), Y).detach())
        torch.testing.assert_close(pair.step.evaluate(X), pair.twin(X).detach())
        pair.train()


@pytest.mark.slow
def test_best_weights() -> None:
    with Pair() as pair:
        pair.train()
        best = copy.deepcopy(pair.model.state_dict())
        pair.train()
        pair.model.load_state_dict(best)
        assert torch.equal(pair.model[0].weight, best["0.weight"])


def test_inference_mode() -> None:
    model = net()
    with compiled(model) as step, torch.inference_mode(), refused("inference-mode", model, mirrorc.ExecutionError):
        step(X, target=Y)


# Checkpoints and resuming


@pytest.mark.slow
def test_resume() -> None:
    def make() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = nn.Sequential(net(), nn.Dropout(0.5))
        return model, ADAMW(model.parameters())

    model, optimizer = make()
    with compiled(model, optimizer) as step:
        step(X, target=Y)
        file = io.BytesIO()
        states = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "random": torch.get_rng_state()}
        torch.save(states, file)
        expected = [step(X, target=Y).item() for _ in range(2)]
    file.seek(0)
    states = torch.load(file)
    model, optimizer = make()
    with compiled(model, optimizer) as step:
        for steps_before in (0, 1):
            for _ in range(steps_before):
                step(X, target=Y)
            model.load_state_dict(states["model"])
            optimizer.load_state_dict(states["optimizer"])
            torch.set_rng_state(states["random"])
            assert [step(X, target=Y).item() for _ in range(2)] == expected
    plain, of_plain = make()
    plain.load_state_dict(states["model"])
    of_plain.load_state_dict(states["optimizer"])


@pytest.mark.slow
def test_early_state_dict() -> None:
    model = net()
    state = model.state_dict()
    with compiled(model) as step, warned("early-state-dict"):
        step(X, target=Y)
    assert not torch.equal(state["0.weight"], model[0].weight)


@pytest.mark.slow
def test_save_a_part() -> None:
    def size_of(state: Any) -> int:
        torch.save(state, file := io.BytesIO())
        return len(file.getvalue())

    model = nn.Sequential(nn.Linear(3, 1000), nn.Linear(1000, 2)).double()
    with compiled(model) as step:
        step(X, target=Y)
        head = model[1].bias.detach()
        assert size_of(head) > 30_000 > size_of(head.clone())


def test_save_the_step() -> None:
    with compiled(net()) as step, pytest.raises(TypeError, match=quoted("save-the-step")):
        torch.save(step, io.BytesIO())


# DataLoader and ragged batches


@pytest.mark.slow
def test_data_loader() -> None:
    loader = DataLoader(TensorDataset(*batch(9)), batch_size=4)
    with Pair() as pair:
        for x, y in loader:  # of 4, 4 and 1 examples
            pair.step(x, target=y)
            pair.backward(x, y)
            pair.twin_optimizer.step()
        pair.check()


def test_empty_batch() -> None:
    model = net()
    with compiled(model) as step, refused("empty-batch", model, ValueError):
        step(X[:0], target=Y[:0])


@pytest.mark.slow
def test_pack_padded_sequence() -> None:
    class Packing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2, batch_first=True).double()

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
            return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=x.shape[1])[0]

    torch.manual_seed(0)
    model = Packing()
    parts = [torch.randn(n, 3, dtype=torch.float64) for n in (2, 4, 3)]
    x, lengths = pad_sequence(parts, batch_first=True), torch.tensor([2, 4, 3])
    target = torch.zeros(3, 4, 2, dtype=torch.float64)
    expected = F.mse_loss(model(x, lengths), target).detach()
    with compiled(model, loss_fn=F.mse_loss) as step:
        torch.testing.assert_close(step(x, lengths, target=target), expected)


@pytest.mark.slow
def test_packed_sequence() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm = nn.LSTM(3, 2, batch_first=True).double()

        def forward(self, packed: PackedSequence) -> torch.Tensor:
            return pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=4)[0]

    torch.manual_seed(0)
    model = Packed()
    packed = pack_sequence([torch.randn(n, 3, dtype=torch.float64) for n in (2, 4, 3)], enforce_sorted=False)
    target = torch.zeros(3, 4, 2, dtype=torch.float64)
    expected = F.mse_loss(model(packed), target).detach()
    with compiled(model, loss_fn=F.mse_loss) as step:
        torch.testing.assert_close(step(packed, target=target), expected)


# Progress, printing, logging, profiling and hooks


@pytest.mark.slow
def test_progress(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert progress.PATIENCE_SECONDS == 2.0
    monkeypatch.setattr(progress, "PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr(progress, "free_terminal", lambda: None)
    caplog.set_level(logging.INFO, "mirrorc.compilation.progress")
    with compiled(net(), progress=False) as step:
        step(X, target=Y)
    assert not [record for record in caplog.records if record.name == "mirrorc.compilation.progress"]
    with compiled(net()) as step:
        step(X, target=Y)
        step(X, target=Y)
    (line,) = [record.getMessage() for record in caplog.records if record.name == "mirrorc.compilation.progress"]
    assert line.startswith("compiling Sequential for cpu:0, cpu:1: ") and "(the first call)" in line


@pytest.mark.slow
def test_print_in_forward() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        print("shape", x.shape)  # noqa: T201
        return own.net(x)

    with compiled(Around(forward)) as step, warned("print-in-forward"):
        step(X, target=Y)


@pytest.mark.slow
def test_self_log() -> None:
    class Logging(Around):
        """What Lightning's module does in `log` before it has a Trainer; test_lightning.py has the real one."""

        _trainer = None

        def log(self, name: str, value: torch.Tensor) -> None:
            if self._trainer is None:
                warnings.warn(
                    "You are trying to `self.log()` but the `self.trainer` reference is not registered on the model yet.",
                    stacklevel=2,
                )

    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = own.net(x)
        own.log("mean", y.mean())
        return y

    def storing(own: Any, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = own.net(x)
        own.logged["mean"] = y.mean().detach()
        return y

    model, plain = Logging(forward), net()
    optimizer = SGD(plain.parameters())
    with compiled(model) as step, warned("self-log"):
        found = [step(X, target=Y).item() for _ in range(3)]
    expected = [train_step(plain, optimizer, {"input": X, "target": Y}, F.cross_entropy) for _ in range(3)]
    assert found == pytest.approx(expected)
    assert_same_model(model.net, plain, 1e-10)
    model = Around(storing)
    model.logged = {}
    with compiled(model) as step, warned("store-activations"):
        step(X, target=Y)
    assert not model.logged


@pytest.mark.slow
def test_store_activations() -> None:
    model, stored = net(), []
    model[0].register_forward_hook(lambda module, given, output: stored.append(output))
    with compiled(model) as step, warned("store-activations"):
        step(X, target=Y)
    assert not stored


@pytest.mark.slow
def test_forward_hook() -> None:
    with Pair() as pair:
        for model, _ in pair.sides:
            model[0].register_forward_hook(lambda module, given, output: output * 2)
        pair.train(2)


@pytest.mark.slow
def test_backward_hook() -> None:
    model = net()
    model[-1].register_full_backward_hook(lambda module, given, output: tuple(2 * gradient for gradient in given))
    with Pair(model) as pair, pytest.warns(UserWarning, match=quoted("backward-hook")):
        pair.train(2)


@pytest.mark.slow
def test_profiler() -> None:
    with compiled(net()) as step:
        step(X[:4], target=Y[:4])
        with torch.profiler.profile() as profiled:
            step(X[:4], target=Y[:4])
    names = {event.key for event in profiled.key_averages()}
    assert {"aten::tanh", "mirrorc::fwd_0 cpu:0", "mirrorc::bwd_0 cpu:1"} <= names


@pytest.mark.slow
def test_activation_checkpointing() -> None:
    with Pair(Around(lambda own, x: checkpoint(own.net, x, use_reentrant=False))) as pair:
        pair.train(2)


@pytest.mark.slow
def test_activation_memory_budget() -> None:
    def memory(bound: str | None) -> int:
        torch.manual_seed(0)
        layers = [layer for _ in range(6) for layer in (nn.Linear(8, 8), nn.Tanh(), nn.Sigmoid())]
        model = nn.Sequential(nn.Linear(3, 8), *layers, nn.Linear(8, 2)).double()
        with compiled(model, activations=bound) as step:
            step(X, target=Y)
            return max(device.own.activations for device in step.memory().devices)

    whole = memory(None)
    with torch._functorch.config.patch(activation_memory_budget=0.5):
        assert memory(None) == whole
    assert memory("80%") <= 0.8 * whole


# Errors, numbers that are not finite, Ctrl-C


@pytest.mark.slow
def test_branch_on_a_tensor() -> None:
    def forward(own: Any, x: torch.Tensor) -> torch.Tensor:
        y = own.net(x)
        return torch.stack([2 * row if row.sum() > 0 else row for row in y])

    with Pair(Around(forward)) as pair, pytest.warns(UserWarning, match=quoted("branch-on-a-tensor")):
        pair.train(2)


@pytest.mark.slow
def test_item_in_forward() -> None:
    model = Around(lambda own, x: own.net(x) / next(own.net.parameters()).abs().max().item())
    with Pair(model) as pair, pytest.warns(UserWarning, match=quoted("item-in-forward")):
        pair.train(2)


@pytest.mark.slow
def test_assert_in_forward() -> None:
    model = Asserting().eval()
    x = torch.randn(4, 4)
    with compiled(model, loss_fn=F.mse_loss) as step:
        step(x, target=torch.zeros(4, 3))
        with unchanged(model), pytest.raises(mirrorc.ExecutionError, match=re.escape(TEXT)):
            step(x * math.nan, target=torch.zeros(4, 3))


@pytest.mark.slow
def test_skip_a_nan() -> None:
    model = net()
    with compiled(model, check_finite="skip") as step:
        step(X, target=Y)
        with unchanged(model):
            assert step(X * math.nan, target=Y).isnan()
        assert step.num_skipped == 1


@pytest.mark.slow
def test_stop_at_a_nan() -> None:
    model = net()
    with compiled(model, check_finite=True) as step, refused("stop-at-a-nan", model, mirrorc.NonFiniteError):
        step(X * math.nan, target=Y)


@pytest.mark.slow
def test_ctrl_c() -> None:
    model = net()
    with python_handles_interrupts(), compiled(model) as step:
        step(X, target=Y)
        own, interrupter = copy.deepcopy(model), Interrupter()
        num_places = interrupter.count(lambda: step(X, target=Y))
        model.load_state_dict(own.state_dict())
        for share in (0.2, 0.5, 0.8):
            before = copy.deepcopy(model.state_dict())
            with contextlib.suppress(KeyboardInterrupt):
                interrupter.interrupted(lambda: step(X, target=Y), int(share * num_places))
            assert interrupter.where
            is_done = {bool((value != before[name]).any()) for name, value in model.state_dict().items()}
            assert len(is_done) == 1, "all of the model is of one step"
