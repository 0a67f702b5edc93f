"""Every plan of packs gives the numbers of one device, whatever the parameters and the optimizer are."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import (
    OptimizerMaker,
    assert_same_bits,
    assert_same_model,
    assert_same_training,
    assert_trains_alike,
    train_mirrored,
    train_on_one_device,
    unchanged,
)
from selections import exhaustive, slow, slow_but, thinned
from small_modules import Parts, module_of
from tiny_models import MODELS
from torch import nn
from twins import batches_of, compiled_step

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.packing import ByBytes, EqualPacks, EqualSplits, Gradient

TOLERANCE = 1e-12


def by_layers(gradients: Sequence[Gradient]) -> list[list[str]]:
    layers: dict[tuple[str, torch.dtype], list[str]] = {}
    for one in gradients:
        layers.setdefault((one.name.rpartition(".")[0], one.dtype), []).append(one.name)
    return list(layers.values())


def by_size(gradient: Gradient) -> int:
    return -gradient.elements


PLANS: dict[str, dict[str, Any]] = {
    "default": {},
    "one pack": {"buckets": math.inf},
    "small": {"buckets": ByBytes(1e-4, 1e-4)},
    "no packing": {"buckets": EqualPacks(0)},
    "2 packs": {"buckets": EqualPacks(2)},
    "5 packs": {"buckets": EqualPacks(5)},
    "5 packs, reversed": {"order": "reversed", "buckets": EqualPacks(5)},
    "3 packs by size": {"order": by_size, "buckets": EqualPacks(3)},
    "splits": {"buckets": EqualSplits(2)},
    "groups": {"buckets": by_layers},
    "groups, reversed": {"order": "reversed", "buckets": by_layers},
}
OPTIMIZERS: dict[str, OptimizerMaker] = {
    "sgd": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "adafactor": partial(torch.optim.Adafactor, lr=0.01),  # not element by element
}
OFTEN = ("no packing", "2 packs", "5 packs, reversed", "groups")
"""The plans that `make test` tries."""
SELDOM = [plan for plan in PLANS if plan not in OFTEN]

LINKS: dict[str, dict[str, Any]] = {
    "shared": {},
    "mirrored": {"disable": ["share-parameters"]},
    "copies": {"disable": ["share-parameters"], "link": "copy"},
}


KINDS = ["adamw", "adafactor"]
TABLE = [*product(PLANS, [1, 2, 3], KINDS, LINKS)]
QUICK = [case.values for case in thinned(OFTEN, [2, 3], KINDS, [*LINKS]) if not case.marks]
MORE = [
    *product(OFTEN, [1], ["adamw"], ["shared"]),
    *product(SELDOM, [3], ["adamw"], ["mirrored", "copies"]),
    *product(SELDOM, [2], ["adafactor"], ["shared"]),
]


def trained(options: dict[str, Any], num_devices: int, optimizer: OptimizerMaker, name: str = "mlp") -> None:
    tiny = MODELS[name]
    model, batches = tiny.make(torch.float64), tiny.batches(6, torch.float64, steps=3)
    assert_trains_alike(model, optimizer, batches, num_devices, tiny.loss_fn, tolerance=TOLERANCE, **options)


@pytest.mark.parametrize(
    ("plan", "num_devices", "optimizer", "link"),
    [*QUICK, *MORE, *exhaustive(*(case for case in TABLE if case not in QUICK and case not in MORE))],
)
def test_every_plan_trains_as_one_device(plan: str, num_devices: int, optimizer: str, link: str) -> None:
    trained(PLANS[plan] | LINKS[link], num_devices, OPTIMIZERS[optimizer])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("plan", "num_devices", "link"),
    [("2 packs", 2, "shared"), *slow(("5 packs", 3, "copies"), ("5 packs, reversed", 1, "shared"))],
)
@pytest.mark.parametrize("optimizer", [*slow_but(["adafactor"], ["adafactor", "sgd"])])
def test_optimizers_that_run_by_themselves_get_whole_gradients(
    plan: str, num_devices: int, link: str, optimizer: str
) -> None:
    trained(PLANS[plan] | LINKS[link], num_devices, OPTIMIZERS[optimizer])


class Odd(nn.Module):
    def __init__(self, num_tiny: int = 40) -> None:
        super().__init__()
        self.huge = nn.Linear(12, 200)
        self.tiny = nn.ParameterList(nn.Parameter(torch.full((), 0.01 * (i + 1))) for i in range(num_tiny))
        self.empty = nn.Parameter(torch.empty(0, 3))
        self.turned = nn.Parameter(torch.linspace(-1, 1, 200 * 4).reshape(200, 4).t())
        self.single = nn.Parameter(torch.linspace(-1, 1, 12))
        self.last = nn.Linear(200, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scale = torch.stack(list(self.tiny)).sum() + self.empty.sum()
        hidden = torch.tanh(self.huge(x * self.single.double() * scale))
        return self.last(hidden) + F.linear(hidden, self.turned)


def make_odd(num_tiny: int = 40) -> nn.Module:
    torch.manual_seed(3)
    model = Odd(num_tiny).double()
    model.single.data = model.single.data.float()
    return model


def assert_odd_trains_alike(
    optimizer: str, num_devices: int, num_tiny: int = 40, steps: int = 3, **options: Any
) -> None:
    """All but what is empty; one parameter has 32 bits, whose sums are rounded, and the others follow it."""
    given = batches_of(*[7] * steps, features=12, classes=4)
    model, make = make_odd(num_tiny), OPTIMIZERS[optimizer]
    mirrored = train_mirrored(model, make, given, num_devices, F.cross_entropy, **options)
    single = train_on_one_device(model, make, given, F.cross_entropy)
    del mirrored.model.empty, single.model.empty
    assert_same_training(mirrored, single, 1e-6)


@pytest.mark.parametrize("num_devices", [*exhaustive((1,), (2,)), 3])
@pytest.mark.parametrize("plan", [*PLANS])
def test_parameters_of_all_kinds_are_packed(plan: str, num_devices: int) -> None:
    assert_odd_trains_alike("adamw", num_devices, **PLANS[plan])


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # minutes, also beside other work
@pytest.mark.parametrize("num_packs", [4, 0])
def test_thousands_of_parameters_are_packed(num_packs: int) -> None:
    assert_odd_trains_alike("sgd", 2, num_tiny=5000, steps=1, buckets=EqualPacks(num_packs))


class Sum(Parts):
    """A loss whose gradient is one for each element of a weight of ones."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x @ self.weight).sum()


@pytest.mark.fast
@pytest.mark.parametrize("num_bytes", [1, 4, math.inf])
def test_packs_of_so_many_bytes_give_the_same(num_bytes: float) -> None:
    model = Sum(weight=nn.Parameter(torch.ones(10, 1)))
    make = partial(torch.optim.SGD, lr=0.25)
    with compiled_step(model, optimizer=make, loss_reduction="sum", buckets=num_bytes / 2**20) as step:
        step(torch.ones(2, 10))
    assert torch.equal(model.weight.detach(), torch.full((10, 1), 0.5))


FEATURES: dict[str, dict[str, Any]] = {
    "clipped": {"clip_grad_norm": 0.05},
    "bounded": {"clip_grad_value": 0.01},
    "checked": {"check_finite": True},
    "microbatches": {"microbatches": 2},
    "exact order": {"exact_order": True},
}


@pytest.mark.parametrize("link", ["shared", "copies"])
@pytest.mark.parametrize("feature", [*FEATURES])
def test_packs_go_together_with_what_else_a_step_does(feature: str, link: str) -> None:
    tiny = MODELS["mlp"]
    model, batches = tiny.make(torch.float64), tiny.batches(7, torch.float64, steps=3)
    options = FEATURES[feature] | LINKS[link]
    packed, whole = (
        train_mirrored(model, OPTIMIZERS["adamw"], batches, 3, tiny.loss_fn, buckets=buckets, **options)
        for buckets in (EqualPacks(5), ByBytes(math.inf))
    )
    assert_same_training(packed, whole, TOLERANCE)
    if "exact_order" in options:
        assert_same_bits(packed, whole)


@pytest.mark.parametrize("link", [*LINKS])
def test_packs_of_accumulated_gradients_and_of_replicas_without_examples(link: str) -> None:
    tiny = MODELS["mlp"]
    whole = tiny.batch(5, torch.float64, 0)
    parts = [{name: value[start:stop] for name, value in whole.items()} for start, stop in ((0, 4), (4, 5))]
    trained_models = []
    for buckets in (EqualPacks(3), ByBytes(math.inf)):
        model = tiny.make(torch.float64)
        with compiled_step(model, tiny.loss_fn, 3, OPTIMIZERS["adamw"], buckets=buckets, **LINKS[link]) as step:
            step.accumulate(**parts[0])
            step(**parts[1])  # one example on three devices
            step(**whole)
        trained_models.append(model)
    assert_same_model(*trained_models, TOLERANCE)


def test_a_scaler_skips_a_step_whose_packs_are_not_finite() -> None:
    tiny = MODELS["mlp"]
    model = tiny.make(torch.float32)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**100)
    batch = tiny.batch(6, torch.float32, 0)
    with compiled_step(model, tiny.loss_fn, optimizer=OPTIMIZERS["sgd"], scaler=scaler, buckets=EqualPacks(3)) as step:
        with unchanged(model):
            step(**batch | {"x": batch["x"] * math.inf})
        assert step.num_skipped == 1


def test_compiled_regions_write_into_the_slots_of_packs() -> None:
    tiny = MODELS["conv"]
    model, batches = tiny.make(torch.float64), tiny.batches(6, torch.float64, steps=3)
    options = {"backend": "inductor", "buckets": EqualPacks(4)}
    assert_trains_alike(model, OPTIMIZERS["adamw"], batches, 2, tiny.loss_fn, tolerance=1e-10, **options)


@dataclass(frozen=True)
class LaunchLast:
    name: str = "launch-last"
    input_stage: Stage = Stage.SCHEDULED
    output_stage: Stage = Stage.SCHEDULED

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        last = max(calls_to(graph, ops.pack))
        for launch in reversed(list(calls_to(graph, ops.all_reduce))):
            last.append(launch)
        return program.evolve(graph=graph)


def explained(**options: Any) -> Any:
    tiny = MODELS["mlp"]
    model = tiny.make(torch.float64)
    options |= {"optimizer": OPTIMIZERS["sgd"], "buckets": EqualPacks(4), **LINKS["copies"]}
    with compiled_step(model, tiny.loss_fn, **options) as step:
        for batch in tiny.batches(6, torch.float64, steps=4):
            step(**batch)
        return step.explain(), str(step.explain())


def test_the_explanation_shows_packs_in_flight_before_the_last_gradient_is_made() -> None:
    early, text = explained()
    late, _ = explained(add=[mirrorc.after("schedule-overlap", LaunchLast())])
    for found in (early, late):
        assert [row.label for row in found.buckets] == ["b0 p0", "b0 p1", "b0 p2", "b0 p3"]
        assert sum(row.num_bytes for row in found.buckets) > 0
    assert "b0 p0" in text and "p is the pack of the bucket" in text
    last_ready = [max(row.ready_ms for row in found.buckets) for found in (early, late)]
    assert early.buckets[0].launched_ms < last_ready[0]
    assert all(row.launched_ms >= last_ready[1] for row in late.buckets)


def test_a_cut_program_is_printed_read_saved_and_told_of(tmp_path: Path) -> None:
    tiny = MODELS["mlp"]
    model = tiny.make(torch.float64)
    with compiled_step(
        model, tiny.loss_fn, optimizer=OPTIMIZERS["sgd"](model.parameters()), buckets=EqualPacks(3)
    ) as step:
        program = step.prepare(**tiny.batch(6, torch.float64, 0))
        step(**tiny.batch(6, torch.float64, 0))
        memory = step.memory()
    text = program.to_text()
    assert "#   packs, of elements 0 … " in text and "all_reduce(bucket=0, b0_pack1, pack=1" in text
    assert "unpack(bucket=0, b0_pack0_sum, b0_pack1_sum, b0_pack2_sum)" in text
    assert "#   packs, of elements 0 … " in text
    program.save(tmp_path / "program.mirror")
    assert Program.load(tmp_path / "program.mirror").to_text() == text
    assert "gradients" in str(memory)


@pytest.mark.parametrize(
    ("order", "expected"),
    [
        ("ready", ["one.bias", "one.weight", "two.bias", "two.weight"]),
        ("reversed", ["two.bias", "two.weight", "one.bias", "one.weight"]),
        (lambda one: one.name, ["one.bias", "one.weight", "two.bias", "two.weight"]),
    ],
)
def test_gradients_lie_in_the_order_that_is_asked_for(order: Any, expected: list[str]) -> None:
    model = module_of(lambda self, x: self.one(torch.tanh(self.two(x))), one=nn.Linear(5, 3), two=nn.Linear(5, 5))
    with compiled_step(model, F.cross_entropy, order=order, buckets=math.inf) as step:
        program = step.prepare(torch.ones(4, 5), target=torch.zeros(4, dtype=torch.int64))
    (bucket,) = program.buckets
    found = [slot.variable for slot in bucket.slots]
    assert (sorted(found[:2]), sorted(found[2:])) == (sorted(expected[:2]), sorted(expected[2:]))
    assert found == expected or order == "ready"  # in which a weight and a bias may take turns
