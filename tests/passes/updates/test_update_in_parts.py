"""The pass that lets updates make products part by part."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_bits, assert_same_training, train_mirrored, train_on_one_device
from selections import exhaustive, slow
from tiny_programs import captured_model, targets
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.ir.workers import World
from mirrorc.options.table import grouped
from mirrorc.passes import UpdateInParts, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import select_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.verifier.verifier import Verify

PARTS: dict[str, Any] = {"min_factored_elements": 0, "part_elements": 150}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": torch.optim.AdamW,
    "adamw of several operators": partial(torch.optim.AdamW, fused=False, foreach=False, amsgrad=True),
    "adamw for lists": partial(torch.optim.AdamW, foreach=True),
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "nadam": torch.optim.NAdam,
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr_decay=0.1, initial_accumulator_value=0.1),
    "adamax": torch.optim.Adamax,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(40, 30), nn.Tanh(), nn.Linear(30, 20), nn.Tanh(), nn.Linear(20, 3))


def compiled(rows: int = 8, num_devices: int = 2, **options: Any) -> Program:
    captured = captured_model(net(), num_devices, rows, columns=40)
    return run_passes(captured, default_pipeline(**PARTS | options), [Verify()])


def parts_of(program: Program) -> set[object]:
    return {node.kwargs.get("part_elements") for graph in program.graphs() for node in targets(graph, ops.update)}


def batches(*sizes: int, dtype: torch.dtype = torch.float64) -> list[dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return [{"input": torch.randn(n, 40, dtype=dtype), "target": torch.randint(0, 3, (n,))} for n in sizes]


def whole(pipeline: list[Pass]) -> list[Pass]:
    return select_passes(pipeline, ["update-in-parts"])


@pytest.mark.slow
def test_updates_of_products_make_them() -> None:
    program = compiled()
    assert parts_of(program) == {150}
    assert program.to_text().count("part_elements=150") == 1  # devices with equal graphs are printed once
    remarks = [remark.text for remark in program.remarks if remark.by == "update-in-parts"]
    assert "the products of 1 bucket are made 150 elements at a time" in remarks[0]
    assert "a product of some rows may be added up in another order" in remarks[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {"rows": 140},  # 140 numbers are added up for an element
        {"num_devices": 1},
        {"min_factored_elements": 2**30},
        {"part_elements": 2**20},  # all products are small against that
        {"part_elements": 10},  # and all rows longer than this
        {"max_grad_norm": 1.0},  # all elements are measured before the first update
        {"max_grad_norm": 1.0, "max_grad_value": 0.1},  # or bounded
    ],
)
def test_what_it_leaves_alone(changes: dict[str, Any]) -> None:
    program = compiled(**changes)
    assert parts_of(program) == {None}
    assert not [remark for remark in program.remarks if remark.by == "update-in-parts" and remark.is_kept]


def test_it_runs_behind_links_alone() -> None:
    pipeline = [one for one in default_pipeline(**PARTS) if one.name not in ("lower-collectives", "lower-devices")]
    program = run_passes(captured_model(net(), 2, 8, columns=40), pipeline, [Verify()])
    assert parts_of(program) == {None}


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, *slow((140,), (0,))])
def test_rows_of_other_workers_are_looked_at_when_they_are_there(rows: int) -> None:
    """Whatever a worker's own batch, all workers compile the same updates."""
    model, world = net(), World(2, 1)
    program = mirrorc.plan(
        model,
        batches(rows, dtype=torch.float32)[0],
        ["cpu"],
        world=world,
        optimizer=torch.optim.AdamW(model.parameters()),
        loss_fn=F.cross_entropy,
        communication=mirrorc.Communication(exchange="factors"),
        compiler=mirrorc.Compiler(backend="eager", passes=default_pipeline(over_workers=True, **PARTS)),
    )
    assert parts_of(program) == {None, 150}  # biases are added up, in a bucket of their own


def test_wrong_sizes_are_refused() -> None:
    with pytest.raises(ValueError, match="part_elements=0 must be at least 1"):
        UpdateInParts(0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "are_in_parts"),
    [
        ({"clip_grad_value": 1e-3}, True),
        *slow(({"clip_grad_norm": 0.1}, False), ({"check_finite": True}, False), ({"scaler": True}, False)),
    ],
)
def test_options_that_bound_or_look_at_shares(options: dict[str, Any], are_in_parts: bool) -> None:
    """Each part is bounded when it is made; shares that are looked at are made as a whole."""
    torch.manual_seed(0)
    first, trained = nn.Sequential(nn.Linear(40, 400), nn.Tanh(), nn.Linear(400, 400), nn.Linear(400, 3)), []
    for left_out in ([], ["update-in-parts"]):
        model = copy.deepcopy(first)
        given = options | ({"scaler": torch.amp.GradScaler("cpu", init_scale=4.0)} if "scaler" in options else {})
        with mirrorc.compile(
            model,
            2,
            optimizer=torch.optim.AdamW(model.parameters(), fused=True),
            loss_fn=F.cross_entropy,
            **grouped({"backend": "eager", "disable": left_out, **given}),
        ) as step:
            losses = [step(**batch).item() for batch in batches(9, 9, dtype=torch.float32)]
            assert (2**19 in parts_of(step.program)) is (are_in_parts and not left_out)
        trained.append((losses, list(model.parameters())))
    torch.testing.assert_close(*trained, rtol=1e-5, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("optimizer", "num_devices"),
    [
        ("adamw of several operators", 2),
        *slow(
            ("nadam", 3),
            ("adamw", 3),
            *((name, 3) for name in ("adamw for lists", "nesterov")),
            ("sgd", 2),
            ("adagrad", 2),
            ("rmsprop", 4),
        ),
        *exhaustive(*((name, n) for name in OPTIMIZERS for n in (2, 3, 4))),
    ],
)
def test_training_is_that_of_one_device(optimizer: str, num_devices: int) -> None:
    """From the first step on, in which optimizers make their state; with batches of two sizes in turn."""
    model, given = net().double(), batches(8, 3, 8, 3)
    pipeline, make = default_pipeline(**PARTS), OPTIMIZERS[optimizer]
    found = train_mirrored(model, make, given, num_devices, F.cross_entropy, passes=pipeline)
    assert_same_training(found, train_on_one_device(model, make, given, F.cross_entropy), 1e-11)
    for own, other in zip(found.optimizer.state.values(), found.optimizer.state.values(), strict=True):
        assert own.keys() == other.keys()


@pytest.mark.slow
def test_what_users_do_between_steps() -> None:
    """Schedulers, loaded state, another implementation: each part follows the optimizer as it is then."""
    model, given = net().double(), batches(*[8] * 8)
    kept: dict[str, Any] = {}

    def after(optimizer: torch.optim.Optimizer, number: int) -> None:
        if number == 1:
            kept["state"] = copy.deepcopy(optimizer.state_dict())
            optimizer.param_groups[0]["lr"] = 0.01
        if number == 3:
            optimizer.load_state_dict(kept["state"])
        if number == 5:
            optimizer.param_groups[0]["fused"], optimizer.param_groups[0]["foreach"] = False, False

    make = partial(torch.optim.AdamW, fused=True)
    pipeline = default_pipeline(**PARTS)
    found = train_mirrored(model, make, given, 2, F.cross_entropy, after_step=after, passes=pipeline)
    assert_same_training(found, train_on_one_device(model, make, given, F.cross_entropy, after_step=after), 1e-11)


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", *slow(("inductor",))])
def test_bits_are_those_of_whole_products(backend: str) -> None:
    """Here a product of few rows is added up in the order of many; where it is not, the pass says that bits change."""
    model, given = net().double(), batches(8, 8, 8)
    pipeline = default_pipeline(**PARTS)
    found, other = (
        train_mirrored(model, torch.optim.AdamW, given, 2, F.cross_entropy, passes=passes, backend=backend)
        for passes in (pipeline, whole(pipeline))
    )
    assert_same_training(found, other, 1e-13)
    again = train_mirrored(model, torch.optim.AdamW, given, 2, F.cross_entropy, passes=pipeline, backend=backend)
    assert_same_bits(found, again)


@pytest.mark.slow
def test_gradients_take_no_memory() -> None:
    rows = []
    for select in (list, whole):
        model = net()
        optimizer = torch.optim.AdamW(model.parameters(), fused=False, foreach=False)
        with mirrorc.compile(
            model,
            2,
            optimizer=optimizer,
            loss_fn=F.cross_entropy,
            compiler=mirrorc.Compiler(backend="eager", passes=select(default_pipeline(**PARTS))),
        ) as step:
            step(**batches(8, dtype=torch.float32)[0])
            rows.append(step.memory())
    in_parts, at_once = rows
    products = 40 * 30 + 30 * 20  # the last one is too small
    assert at_once.gradients - in_parts.gradients == 4 * products
    assert in_parts.rows[1].reserved == 4 * 150  # of five rows of 30; of 40, three have 120 elements
    assert max(row.within_step for row in in_parts.rows) < max(row.within_step for row in at_once.rows)
