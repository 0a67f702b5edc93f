"""What `mirrorc.check_loss` says of losses whose meaning is known, and that it leaves no trace."""

import copy
import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from references import unchanged
from selections import slow_but
from tiny_models import MODELS
from tiny_programs import sgd_step
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.options.table import grouped


def net(*inside: nn.Module, dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *inside, nn.Linear(8, 4)).to(dtype)


def batch(num_examples: int = 12, num_left_out: int = 0, dtype: torch.dtype = torch.float64) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_examples, 6, generator=generator, dtype=dtype)
    y = torch.randint(4, (num_examples,), generator=generator)
    y[:num_left_out] = -100
    return {"input": x, "target": y}


def contrastive(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    unit = F.normalize(output)
    return F.cross_entropy(unit @ unit.t(), torch.arange(len(unit)))


def check(model: nn.Module, loss_fn: Any = F.cross_entropy, num_replicas: int = 3, **more: Any) -> mirrorc.LossCheck:
    given = {key: more.pop(key) for key in ("num_left_out", "num_examples", "dtype") if key in more}
    return mirrorc.check_loss(model, **batch(**given), loss_fn=loss_fn, num_replicas=num_replicas, **more)


@pytest.mark.parametrize("name", slow_but(("mlp", "conv", "gpt2", "gpt2-own-loss"), MODELS))
def test_means_over_examples_are_the_same(name: str) -> None:
    """Whole models, with uneven shards."""
    tiny = MODELS[name]
    model = tiny.make(torch.float64)
    found = mirrorc.check_loss(model, **tiny.batch(5, torch.float64, 0), loss_fn=tiny.loss_fn, tolerance=1e-5)
    assert found.num_examples == (3, 2)
    assert found.same == (name != "resnet"), found
    assert "BatchNorm normalize by the statistics of each replica's shard" in str(found) or found.same


@pytest.mark.slow
@given(
    st.integers(1, 4),
    st.integers(4, 13),
    st.sampled_from(["mean", "sum"]),
    st.sampled_from([torch.float32, torch.float64]),
)
@fuzzed(8)
def test_dropout_and_uneven_shards_make_no_difference(
    num_replicas: int, num_examples: int, reduction: str, dtype: torch.dtype
) -> None:
    """On CPUs dropout draws in place; GPUs have an operator for it, which is that of the second model."""

    class Dropout(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.ops.aten.native_dropout(x, 0.5, True)[0] + torch.rand_like(x) * 0.1

    def loss_fn(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target, reduction=reduction)

    for inside in (nn.Dropout(0.5), Dropout()):
        found = check(
            net(inside, dtype=dtype),
            loss_fn,
            num_replicas,
            loss_reduction=reduction,
            num_examples=num_examples,
            dtype=dtype,
        )
        assert found.same, found


WEIGHTED = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 2.0, 3.0, 9.0], dtype=torch.float64))
SUM = nn.CrossEntropyLoss(reduction="sum")
COUPLED: dict[str, tuple[Callable[[], nn.Module], Any, dict[str, Any], str]] = {
    "batch norm": (lambda: net(nn.BatchNorm1d(8)), F.cross_entropy, {}, r"(?s)one BatchNorm normalizes.*this is all"),
    "statistics that are not kept": (
        lambda: net(nn.BatchNorm1d(8, track_running_stats=False)),
        F.cross_entropy,
        {},
        r"(?s)one BatchNorm normalizes.*this is all",
    ),
    "class weights": (
        net,
        WEIGHTED,
        {},
        "cross_entropy is a mean weighted by class.*reduction='sum'.*the same for all shards",
    ),
    "left out": (
        net,
        F.cross_entropy,
        {"num_left_out": 2},
        r"leaves out the 2 of 12 targets that are -100.*keeps: 2, 4, 4",
    ),
    "two causes": (
        lambda: net(nn.BatchNorm1d(8)),
        WEIGHTED,
        {},
        r"(?s)one BatchNorm normalizes.*this is not all.*mean weighted by class",
    ),
    "a sum": (net, SUM, {}, r"with loss_reduction='sum' they are the same: the loss is a sum over its examples"),
    "contrastive": (net, contrastive, {}, "compares or normalizes examples across the batch"),
    "a sum and a term once": (
        net,
        lambda output, target: SUM(output, target) + 5 * (output * 0).sum() + 3.0,
        {"loss_reduction": "sum"},
        "a term that does not depend on the examples is added once for each replica",
    ),
    "normalized advantages": (
        net,
        lambda output, target: ((output - output.mean(0)) / output.std(0) * output.detach()).mean(),
        {},
        "a statistic over dim 0",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COUPLED)
def test_what_couples_examples_is_found_and_named(name: str) -> None:
    make, loss_fn, more, reason = COUPLED[name]
    found = check(make(), loss_fn, **more)
    assert not found.same and found.differences
    with pytest.raises(mirrorc.MirrorcError, match=r"not the same on 3 replicas: the loss is") as raised:
        check(make(), loss_fn, raises=True, **more)
    assert raised.match(reason)
    assert f"  why:  {found.reasons[0]}" in str(raised.value) and str(found) == repr(found)
    assert check(make(), loss_fn, num_replicas=1, **more).same, "one device is what the others are compared with"


@pytest.mark.slow
def test_it_says_what_a_step_does() -> None:
    for name in ("batch norm", "left out", "a sum and a term once"):
        make, loss_fn, more, _ = COUPLED[name]
        model = make()
        num_left_out = more.get("num_left_out", 0)
        found = check(model, loss_fn, num_replicas=2, **more)
        reduction = more.get("loss_reduction", "mean")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        options: dict[str, Any] = {"loss_reduction": reduction, "backend": "eager"}
        with mirrorc.compile(model, 2, optimizer=optimizer, loss_fn=loss_fn, **grouped(options)) as step:
            assert step(**batch(num_left_out=num_left_out)).item() == pytest.approx(found.sharded_loss, rel=1e-9)


def test_batch_norm_in_eval_mode_couples_nothing() -> None:
    assert check(net(nn.BatchNorm1d(8)).eval()).same


def test_nothing_changes() -> None:
    """Neither values nor memory, versions, attributes, gradients or random streams; the step goes on as if nothing had been."""

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(8)
            self.num_calls, self.seen = 0, []

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.num_calls += 1
            self.seen.append(x)
            return F.dropout(self.norm(x), random.random() * np.random.random())

    model = net(Counting())
    model(batch()["input"]).sum().backward()
    counting = model[1]  # type: ignore[index]
    tensors = [*model.parameters(), *model.buffers()]
    versions = [(id(t), t.data_ptr(), t._version, t.grad) for t in tensors]
    kept = counting.num_calls, list(counting.seen)
    streams = torch.get_rng_state(), random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[union-attr]
    with unchanged(model):
        check(model)
    assert [(id(t), t.data_ptr(), t._version, t.grad) for t in [*model.parameters(), *model.buffers()]] == versions
    assert (counting.num_calls, counting.seen) == kept
    assert torch.equal(streams[0], torch.get_rng_state()) and random.getstate() == streams[1]
    assert np.random.get_state()[1].tolist() == streams[2]  # type: ignore[union-attr]


@pytest.mark.slow
def test_after_steps_and_within_a_step_s_life() -> None:
    model = net(nn.BatchNorm1d(8))
    twin = copy.deepcopy(model)
    found = []
    for own, is_checked in ((model, True), (twin, False)):
        with sgd_step(own, 2, loss_fn=F.cross_entropy) as step:
            for _ in range(3):
                step(**batch())
                found += [check(own)] if is_checked else []
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), twin.state_dict().values(), strict=True))
    assert len(found) == 3


def test_arguments_are_those_of_a_step() -> None:
    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.last = nn.Linear(6, 1)

        def forward(self, x: torch.Tensor, *, scale: torch.Tensor, power: int) -> dict[str, torch.Tensor]:
            return {"loss": ((self.last(x) * scale) ** power).mean()}

    x = torch.randn(6, 6)
    parts = mirrorc.PerReplica([x[:1], x[1:]])
    found = [mirrorc.check_loss(Scaled(), own, scale=mirrorc.replicated(torch.ones(1)), power=2) for own in (x, parts)]
    assert [own.num_examples for own in found] == [(3, 3), (1, 5)] and all(own.same for own in found)


def test_wrong_arguments_are_refused() -> None:
    model, given = net(), batch()
    for words, call in {
        "model is a str": lambda: mirrorc.check_loss("net", **given),
        "target is missing": lambda: mirrorc.check_loss(model, given["input"], loss_fn=F.cross_entropy),
        "num_replicas is 0": lambda: check(model, num_replicas=0),
        "loss_reduction is 'max'": lambda: check(model, loss_reduction="max"),
        "MC2202: the loss is a tensor \\[12, 4\\]": lambda: mirrorc.check_loss(model, given["input"]),
        "make no whole batch": lambda: mirrorc.check_loss(
            model,
            mirrorc.PerReplica([torch.ones(2, 6), torch.ones(2, 5)]),
            target=mirrorc.PerReplica([torch.ones(2), torch.ones(2)]),
            loss_fn=F.cross_entropy,
        ),
    }.items():
        with pytest.raises((TypeError, ValueError), match=words):
            call()


def test_draws_that_cannot_be_made_equal_are_named() -> None:
    class Shuffled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * torch.randperm(len(x))[:, None]

    found = check(net(Shuffled()))
    assert not found.same and "random numbers of randperm differ from run to run" in str(found)
