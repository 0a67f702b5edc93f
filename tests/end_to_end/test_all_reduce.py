"""Training with every algorithm of all-reduce means what training on one device means."""

from __future__ import annotations

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from references import assert_trains_alike, train_mirrored, train_on_one_device
from selections import exhaustive, thinned
from tiny_programs import SMALL_BUCKETS, TwoLayers, targets
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

from mirrorc.all_reduce_algorithms import ALGORITHMS, ReduceToOne
from mirrorc.ir import ops

ADAMW = partial(torch.optim.AdamW, lr=0.1)
ALGORITHM_NAMES = [*ALGORITHMS]
HOW = ["shared", "mirrored", "copy"]


def batches(num_examples: int = 12) -> list[dict[str, torch.Tensor]]:
    draw = torch.Generator().manual_seed(1)
    target = torch.arange(num_examples) % 3
    return [
        {"x": torch.randn(num_examples, 4, dtype=torch.float64, generator=draw), "target": target} for _ in range(3)
    ]


def parameters(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().flatten() for parameter in model.parameters()])


def net() -> TwoLayers:
    torch.manual_seed(0)
    return TwoLayers().double()


def trained(num_devices: int, **options: Any) -> torch.Tensor:
    options = {**SMALL_BUCKETS, **options}
    return parameters(train_mirrored(net(), ADAMW, batches(), num_devices, F.cross_entropy, **options).model)


SOME = [(name, 3, how) for name, how in zip(ALGORITHM_NAMES, HOW * 3, strict=False)]
SOME += [
    ("ring", 4, "shared"),
    ("tree", 1, "shared"),
]
ALL = [*product(ALGORITHM_NAMES, [1, 2, 3, 4, 8], HOW)]
THINNED = [case.values for case in thinned(ALGORITHM_NAMES, [1, 2, 3, 4, 8], HOW) if not case.marks]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("algorithm", "num_devices", "how"),
    [
        *SOME,
        *(case for case in THINNED if case not in SOME),
        *exhaustive(*(case for case in ALL if case not in SOME and case not in THINNED)),
    ],
)
def test_training_agrees_with_one_device(algorithm: str, num_devices: int, how: str) -> None:
    options: dict[str, Any] = {
        "shared": {},
        "mirrored": {"disable": ["share-parameters"]},
        "copy": {"disable": ["share-parameters"], "link": "copy"},
    }[how]
    options |= {**SMALL_BUCKETS, "algorithm": algorithm}
    assert_trains_alike(net(), ADAMW, batches(), num_devices, F.cross_entropy, **options)


@pytest.mark.slow
def test_sums_in_the_order_of_replicas_have_the_bits_of_native_ones() -> None:
    expected = trained(3)
    for algorithm in ("reduce-to-one{device=2}", "round-robin"):
        assert torch.equal(trained(3, algorithm=algorithm, exact_order=True), expected), algorithm
    assert torch.equal(trained(2, algorithm="ring"), trained(2))  # the sum of two does not depend on their order


@pytest.mark.slow
def test_two_replicas_with_gradients_of_ones_take_a_quarter_twice() -> None:
    """A weight of ones, gradients of ones on each replica, and a learning rate of 0.25: half of it is left."""
    for algorithm in ALGORITHM_NAMES:
        model = nn.Linear(10, 1, bias=False)
        nn.init.ones_(model.weight)
        loss_fn = lambda output, target: (output - target).sum()  # noqa: E731
        options = {"optimizer": partial(torch.optim.SGD, lr=0.25), "loss_reduction": "sum"}
        with compiled_step(model, loss_fn, algorithm=algorithm, **options) as step:
            step(torch.ones(2, 10), target=torch.zeros(2, 1))
        assert torch.equal(model.weight, torch.full((1, 10), 0.5)), algorithm


@pytest.mark.slow
def test_pack_sizes_do_not_change_the_result() -> None:
    found = [trained(2, algorithm="ring", buckets=buckets) for buckets in ("auto", 1 / 2**20, 4 / 2**20)]
    assert all(torch.equal(one, found[0]) for one in found)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.head = nn.Embedding(600, 256), nn.Linear(256, 520), nn.Linear(520, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.wide(self.table(x))))


@pytest.mark.slow
def test_gradients_that_would_be_factors_are_sent_whole() -> None:
    torch.manual_seed(0)
    model = Wide().double()
    batch = [{"x": torch.arange(6), "target": torch.arange(6) % 3}]
    expected = parameters(train_on_one_device(model, ADAMW, batch, F.cross_entropy).model)
    for named in ((), ("factor-gradients",)):
        found = copy.deepcopy(model)
        with compiled_step(found, F.cross_entropy, optimizer=ADAMW, algorithm="ring", disable=named) as step:
            step(**batch[0])
            said = "no gradient stays factors: ring sends whole gradients between devices"
            assert (said in [str(remark.text) for remark in step.program.remarks]) is not bool(named)
        torch.testing.assert_close(parameters(found), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["ring", "reduce-to-one"])
def test_clipping_checks_and_microbatches_work_with_sums_of_messages(algorithm: str) -> None:
    for shares in (True, False):
        options: dict[str, Any] = {} if shares else {"disable": ["share-parameters"]}
        options |= {"clip_grad_norm": 0.1, "clip_grad_value": 0.05, "check_finite": True, "microbatches": 2}
        expected = trained(2, **options)  # it measures norms of parts
        torch.testing.assert_close(trained(2, algorithm=algorithm, **options), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.slow
def test_gradients_that_were_accumulated_are_in_the_sum() -> None:
    found = []
    for algorithm in ("native", "ring"):
        model = net()
        with compiled_step(model, F.cross_entropy, optimizer=ADAMW, algorithm=algorithm) as step:
            for batch in batches():
                step.accumulate(**batch)
                step(**batch)
                step.evaluate(**batch)
        found.append(parameters(model))
    assert torch.equal(*found)


def test_an_optimizer_that_runs_by_itself_gets_the_whole_sum() -> None:
    def muon(model: nn.Module) -> torch.optim.Optimizer:
        return torch.optim.Muon([model.fc1.weight, model.fc2.weight], lr=0.1)

    results = []
    for options in ({}, {"algorithm": "ring"}, {"algorithm": "tree", "disable": ["share-parameters"]}):
        model = net()
        model.fc1.bias.requires_grad_(False)
        model.fc2.bias.requires_grad_(False)
        with compiled_step(model, F.cross_entropy, optimizer=muon(model), **options) as step:
            for batch in batches():
                step(**batch)
        results.append(parameters(model))
    assert torch.equal(results[0], results[1]) and torch.equal(results[0], results[2])


def test_a_program_shows_its_messages_and_what_they_cost() -> None:
    model = net()
    options = {"algorithm": ReduceToOne(device=1), "disable": ["share-parameters"]}
    with compiled_step(model, F.cross_entropy, 3, optimizer=ADAMW, **options) as step:
        step(**batches()[0])
        text = str(step.program)
        assert "send(bucket=0, b0, destination=1, chunk=0, round=0, link=shared-memory)" in text
        assert "reduce-to-one for bucket 0" in text and "in a step a device sends at most" in text
        assert not any(targets(module.graph, *ops.REDUCTIONS) for module in step.program.device_graphs.values())
        assert step.memory().total > 0 and "send" in str(step.explain())
