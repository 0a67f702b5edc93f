"""What a step must equal: training on one device, and for BatchNorm training shard by shard."""

import copy
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

import mirrorc
from mirrorc.options.table import grouped

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
Loss = Callable[[Any, Any], torch.Tensor]
Hook = Callable[[torch.optim.Optimizer, int], None]


class NormalizedSgd(torch.optim.Optimizer):
    """Scales by a parameter's gradient norm, so that no element's update depends on that element alone."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["count"] = state.get("count", 0) + 1
                state["mean_norm"] = 0.9 * state.get("mean_norm", torch.zeros((), dtype=p.dtype)) + p.grad.norm()
                p.add_(p.grad / state["mean_norm"], alpha=-group["lr"] / state["count"])


class CountedSigns(torch.optim.Optimizer):
    """Not one of those that run on whole buckets; keeps a count for each element."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p].setdefault("count", torch.zeros_like(p)).add_(1.0)
                p.add_(p.grad.sign(), alpha=-0.01)


@dataclass
class Trained:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    losses: list[float]


def loss_of(model: nn.Module, batch: Mapping[str, Any], loss_fn: Loss | None) -> torch.Tensor:
    arguments = dict(batch)
    if loss_fn is not None:
        target = arguments.pop("target")
        return loss_fn(model(**arguments), target)
    output = model(**arguments)
    return output if isinstance(output, torch.Tensor) else output["loss"]


def train_step(
    model: nn.Module, optimizer: torch.optim.Optimizer, batch: Mapping[str, Any], loss_fn: Loss | None = None
) -> float:
    optimizer.zero_grad()
    loss = loss_of(model, batch, loss_fn)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def train_on_one_device(
    model: nn.Module,
    make_optimizer: OptimizerMaker,
    batches: Sequence[Mapping[str, Any]],
    loss_fn: Loss | None = None,
    after_step: Hook | None = None,
) -> Trained:
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    losses = []
    for i, batch in enumerate(batches):
        losses.append(train_step(model, optimizer, batch, loss_fn))
        if after_step is not None:
            after_step(optimizer, i)
    return Trained(model, optimizer, losses)


def train_by_several(
    model: nn.Module,
    optimizers: Sequence[torch.optim.Optimizer],
    batches: Iterable[tuple[tuple[Any, ...], torch.Tensor]],
    loss_fn: Loss,
    before_update: Callable[[], object] = lambda: None,
) -> Sequence[torch.optim.Optimizer]:
    """Trains the very model on one device, with all optimizers after each backward, and gives them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, on checks of sparse tensors
        for args, target in batches:
            for optimizer in optimizers:
                optimizer.zero_grad()
            loss_fn(model(*args), target).backward()
            before_update()
            for optimizer in optimizers:
                optimizer.step()
    return optimizers


def train_mirrored(
    model: nn.Module,
    make_optimizer: OptimizerMaker,
    batches: Sequence[Mapping[str, Any]],
    num_devices: int,
    loss_fn: Loss | None = None,
    after_step: Hook | None = None,
    backend: str = "eager",
    **options: Any,
) -> Trained:
    """Trains a copy of the model with mirrorc, and checks after every step that all replicas hold the same bits."""
    model = copy.deepcopy(model)
    optimizer = make_optimizer(model.parameters())
    losses = []
    with mirrorc.compile(
        model, num_devices, optimizer=optimizer, loss_fn=loss_fn, **grouped({"backend": backend, **options})
    ) as step:
        for i, batch in enumerate(batches):
            losses.append(step(**batch).item())
            assert_mirrored(step, model, num_devices)
            if after_step is not None:
                after_step(optimizer, i)
    return Trained(model, optimizer, losses)


def train_shard_by_shard(
    model: nn.Module,
    make_optimizer: OptimizerMaker,
    batches: Sequence[Mapping[str, Any]],
    num_devices: int,
    loss_fn: Loss | None = None,
) -> Trained:
    """Trains with a copy of the buffers for each shard; the copies are aggregated in the end.

    Shards have two examples or more, so that a small batch has fewer of them. A shard's loss counts n_i/n, gradients are summed;
    floating-point buffers are averaged over the shards of the last batch, of others the first is taken.
    """
    copies = [copy.deepcopy(model) for _ in range(num_devices)]
    home = copies[0]
    optimizer = make_optimizer(home.parameters())
    losses, num_shards = [], num_devices
    for batch in batches:
        num_shards = min(num_devices, max(1, num_examples_in(batch) // 2))
        total = 0.0
        for i, own in enumerate(copies[:num_shards]):
            own.zero_grad()
            shard = shard_of(batch, num_shards, i)
            weight = num_examples_in(shard) / num_examples_in(batch)
            loss = loss_of(own, shard, loss_fn) * weight
            loss.backward()
            total += loss.item()
        with torch.no_grad():
            for parameters in zip(*(own.parameters() for own in copies[:num_shards]), strict=True):
                gradients = [p.grad for p in parameters if p.grad is not None]
                parameters[0].grad = torch.stack(gradients).sum(0) if gradients else None
            optimizer.step()
            for parameters in zip(*(own.parameters() for own in copies), strict=True):
                for other in parameters[1:]:
                    other.copy_(parameters[0])
        losses.append(total)
    for buffers in zip(*(own.buffers() for own in copies[:num_shards]), strict=True):
        if buffers[0].is_floating_point():
            buffers[0].copy_(torch.stack(list(buffers)).mean(0))
    return Trained(home, optimizer, losses)


def num_examples_in(batch: Mapping[str, Any]) -> int:
    return next(len(value) for value in batch.values() if isinstance(value, torch.Tensor))


def shard_of(batch: Mapping[str, Any], num_shards: int, place: int) -> dict[str, Any]:
    def cut(value: Any) -> Any:
        if isinstance(value, Mapping):
            return {key: cut(item) for key, item in value.items()}
        return value.tensor_split(num_shards)[place] if isinstance(value, torch.Tensor) else value

    return {key: cut(value) for key, value in batch.items()}


def assert_mirrored(step: mirrorc.Step, model: nn.Module, num_devices: int) -> None:
    """Every parameter of the program has the same bits on every device, and they are the user's."""
    own = dict(model.named_parameters(remove_duplicate=False))
    found = 0
    for name, variable in step.variables.items():
        if name in own:
            found += 1
            assert len(variable.values) == num_devices
            assert torch.equal(variable.value, own[name]), f"{name} of the model is not the variable's value"
            for replica, value in enumerate(variable.values):
                assert torch.equal(value, variable.value), f"{name} differs on replica {replica}"
    assert found > 0


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape and actual.dtype == expected.dtype
    if expected.numel() == 0:
        return 0.0
    scale = expected.abs().max().item()
    difference = (actual - expected).abs().max().item()
    return difference / scale if scale > 0.0 else difference


def assert_same_model(actual: nn.Module, expected: nn.Module, tolerance: float) -> None:
    """Parameters and buffers agree, each relative to its largest entry; integers exactly."""
    wanted = expected.state_dict()
    found = actual.state_dict()
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        if value.is_floating_point():
            error = relative_error(found[name], value)
            assert error <= tolerance, f"{name}: relative error {error:.3g}"
        else:
            assert torch.equal(found[name], value), name


def assert_same_parameters(actual: nn.Module, expected: nn.Module, tolerance: float = 1e-12) -> None:
    """Parameters agree, element by element; buffers may differ."""
    own, wanted = (dict(model.named_parameters()) for model in (actual, expected))
    torch.testing.assert_close(own, wanted, rtol=tolerance, atol=tolerance)


def assert_same_training(actual: Trained, expected: Trained, tolerance: float) -> None:
    assert_same_losses(actual, expected, tolerance)
    assert_same_model(actual.model, expected.model, tolerance)


def assert_trains_alike(
    model: nn.Module,
    make_optimizer: OptimizerMaker,
    batches: Sequence[Mapping[str, Any]],
    num_devices: int,
    loss_fn: Loss | None = None,
    *,
    tolerance: float = 1e-12,
    **options: Any,
) -> Trained:
    """Trains copies of the model with mirrorc and on one device, which agree; gives the one under mirrorc."""
    mirrored = train_mirrored(model, make_optimizer, batches, num_devices, loss_fn, **options)
    assert_same_training(mirrored, train_on_one_device(model, make_optimizer, batches, loss_fn), tolerance)
    return mirrored


def assert_same_losses(actual: Trained, expected: Trained, tolerance: float) -> None:
    assert len(actual.losses) == len(expected.losses)
    scale = max(abs(loss) for loss in expected.losses)
    errors = [abs(a - e) / scale for a, e in zip(actual.losses, expected.losses, strict=True)]
    assert max(errors) <= tolerance, f"relative errors of the losses {errors}"


def assert_same_bits(actual: Trained, expected: Trained) -> None:
    assert actual.losses == expected.losses
    wanted = expected.model.state_dict()
    for name, value in actual.model.state_dict().items():
        assert torch.equal(value, wanted[name]), name


def assert_same_state(actual: torch.optim.Optimizer, expected: torch.optim.Optimizer, tolerance: float) -> None:
    found, wanted = actual.state_dict(), expected.state_dict()
    assert found["param_groups"] == wanted["param_groups"]
    assert found["state"].keys() == wanted["state"].keys()
    for index, state in wanted["state"].items():
        assert found["state"][index].keys() == state.keys()
        for key, value in state.items():
            own = found["state"][index][key]
            if isinstance(value, torch.Tensor):
                assert relative_error(own, value) <= tolerance, f"{key} of parameter {index}"
            else:
                assert own == value, f"{key} of parameter {index}"


@contextmanager
def unchanged(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> Iterator[None]:
    before = copy.deepcopy(model.state_dict())
    state_before = copy.deepcopy(optimizer.state_dict()) if optimizer is not None else None
    yield
    after = model.state_dict()
    assert after.keys() == before.keys()
    for name, value in before.items():
        assert after[name].device == value.device and after[name].dtype == value.dtype
        assert value.is_meta or torch.equal(after[name], value), f"{name} has changed"
    if optimizer is not None and state_before is not None:
        state_after = optimizer.state_dict()
        assert state_after["param_groups"] == state_before["param_groups"]
        assert state_after["state"].keys() == state_before["state"].keys()
        for index, state in state_before["state"].items():
            for key, value in state.items():
                own = state_after["state"][index][key]
                assert torch.equal(own, value) if isinstance(value, torch.Tensor) else own == value, key


@contextmanager
def refused(
    error: type[BaseException] | tuple[type[BaseException], ...], match: str, model: nn.Module, optimizer: Any = None
) -> Iterator[None]:
    """Checks that a block raises, and leaves model and optimizer as they were."""
    with unchanged(model, optimizer), pytest.raises(error, match=match):
        yield
