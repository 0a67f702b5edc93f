"""Wherever parameters are and whoever updates them, a step means the same: numbers, bits, buffers and the optimizer's state."""

import copy
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import pytest
import torch
from references import (
    NormalizedSgd,
    Trained,
    assert_mirrored,
    assert_same_bits,
    assert_same_model,
    assert_same_state,
    assert_same_training,
    train_mirrored,
    train_on_one_device,
    train_shard_by_shard,
    unchanged,
)
from selections import exhaustive
from separate_memories import separate_memories
from tiny_models import make_mlp, mlp_batch
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes
from mirrorc.passes import SpreadCopies
from mirrorc.runtime.state.optimizers.flat_optimizer import FlatOptimizer

TOLERANCE = 1e-12
ADAMW = partial(torch.optim.AdamW, lr=0.01)
SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SMALL = {"buckets": ByBytes(0.001, 0.001)}
NAMED = {"first.weight": "cpu:1", "last.bias": "cpu:1", "*": "central"}
Placement = str | Mapping[str, str]


def model_and_batches(num_examples: int = 6) -> tuple[nn.Module, list[dict[str, Any]]]:
    """Even on two and three devices: where parameters lie is the same for all sizes of shards."""
    return make_mlp(torch.float64), [mlp_batch(num_examples, torch.float64, seed) for seed in range(3)]


def assert_means_the_same(
    placement: Placement, num_devices: int, make_optimizer: Any = ADAMW, **options: Any
) -> tuple[Trained, Trained]:
    model, batches = model_and_batches()
    options = {"loss_fn": F.cross_entropy, **SMALL, **options}
    alone = train_on_one_device(model, make_optimizer, batches, F.cross_entropy)
    mirrored = train_mirrored(model, make_optimizer, batches, num_devices, placement="mirrored", **options)
    placed = train_mirrored(model, make_optimizer, batches, num_devices, placement=placement, **options)
    assert_same_training(placed, alone, TOLERANCE)
    assert_same_bits(placed, mirrored)
    assert_same_state_bits(placed, mirrored)
    return alone, placed


def assert_same_state_bits(one: Trained, other: Trained) -> None:
    found, wanted = one.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
    assert found.keys() == wanted.keys() and found
    for number, entries in wanted.items():
        for key, value in entries.items():
            assert torch.equal(torch.as_tensor(found[number][key]), torch.as_tensor(value)), (number, key)


@pytest.mark.parametrize(
    ("placement", "num_devices", "link"),
    [
        ("central", 3, "copy"),
        ("least-loaded", 3, None),
        ("cached", 3, "copy"),
        (NAMED, 2, None),
        ("central", 2, None),
        ("least-loaded", 2, "copy"),
        ("least-loaded", 1, None),
        ("central", 1, None),
        ("central", 2, "copy"),
        ("central", 3, None),
        (NAMED, 3, "copy"),
        ("least-loaded", 2, None),
        ("least-loaded", 3, "copy"),
        ("least-loaded", 4, None),
        ("central", 4, "copy"),
        *exhaustive(*((p, 8, link) for p in ("central", "least-loaded", NAMED) for link in (None, "copy"))),
    ],
)
def test_a_step_means_the_same(placement: Placement, num_devices: int, link: str | None) -> None:
    alone, placed = assert_means_the_same(placement, num_devices, link=link)
    assert_same_state(placed.optimizer, alone.optimizer, TOLERANCE)


@pytest.mark.parametrize(
    ("placement", "options"),
    [
        ("least-loaded", {"clip_grad_norm": 0.1, "microbatches": 2}),
        ("central", {"check_finite": True, "clip_grad_value": 0.01}),
        ("least-loaded", {"scaler": 1024.0, "link": "copy"}),
        ("central", {"clip_grad_norm": 0.1, "link": "copy"}),
        ("least-loaded", {"check_finite": "skip", "clip_grad_norm": mirrorc.ClipGradNorm(0.1, float("inf"))}),
        ("central", {"scaler": 1024.0, "clip_grad_norm": 0.1}),
        ("least-loaded", {"exact_order": True}),
        (NAMED, {"check_replicas_every": 1, "link": "copy"}),
        ("least-loaded", {"backend": "inductor"}),
    ],
)
def test_so_it_does_with_other_options(placement: Placement, options: dict[str, Any]) -> None:
    model, batches = model_and_batches()
    options = {"loss_fn": F.cross_entropy, **SMALL, **options}
    trained = []
    for where in ("mirrored", placement):
        own = dict(options)
        if "scaler" in own:
            own["scaler"] = torch.amp.GradScaler("cpu", init_scale=own["scaler"])
        trained.append(train_mirrored(model, ADAMW, batches, 2, placement=where, **own))
    if "clip_grad_norm" in options or "backend" in options:  # norms of parts are added up in another order
        assert_same_training(trained[1], trained[0], TOLERANCE)
        assert_same_state(trained[1].optimizer, trained[0].optimizer, TOLERANCE)
    else:
        assert_same_bits(trained[1], trained[0])
        assert_same_state_bits(trained[1], trained[0])


@pytest.mark.parametrize("placement", ["least-loaded", "central", "cpu:2"])
def test_so_it_does_where_devices_have_memories_of_their_own(placement: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one device sends is a copy on another one, and the optimizer's state may lie elsewhere than the user's parameters."""
    separate_memories(monkeypatch)
    where: Placement = {"*": placement}
    assert_means_the_same(where, 3, link="copy")
    run = Run(where, num_devices=3, link="copy")
    run.train()
    run.each(lambda step, *_: step.evaluate(**run.batches[1]))
    run.each(lambda _, __, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    run.train()


@pytest.mark.parametrize(
    ("placement", "num_devices", "link"),
    [("least-loaded", 3, "copy"), ("central", 3, None), ("central", 4, "copy"), ("least-loaded", 4, None)],
)
def test_copies_that_devices_pass_on_are_the_same(placement: str, num_devices: int, link: str | None) -> None:
    trained = []
    for one in (SpreadCopies(), SpreadCopies(min_elements=1, within_one_memory=True, link=link)):
        model, batches = model_and_batches()
        options: dict[str, Any] = {"disable": ["spread-copies"], "add": [mirrorc.before("lower-collectives", one)]}
        trained.append(
            train_mirrored(
                model, ADAMW, batches, num_devices, F.cross_entropy, placement=placement, link=link, **SMALL, **options
            )
        )
    assert_same_bits(trained[1], trained[0])
    assert_same_state_bits(trained[1], trained[0])


@pytest.mark.parametrize(("placement", "num_devices"), [("least-loaded", 2), ("central", 3)])
def test_an_optimizer_that_is_not_element_wise_runs_on_the_first_device(placement: str, num_devices: int) -> None:
    assert_means_the_same(placement, num_devices, partial(NormalizedSgd, lr=0.1))


def test_two_optimizers_of_both_kinds_over_one_model() -> None:
    trained = []
    for placement in ("mirrored", "least-loaded"):
        model, batches = model_and_batches()
        first, *others = model.parameters()
        optimizers = [NormalizedSgd([first], lr=0.1), ADAMW(others)]
        with compiled_step(model, F.cross_entropy, 3, optimizer=optimizers, placement=placement, **SMALL) as step:
            losses = [step(**batch).item() for batch in batches]
            assert_mirrored(step, model, 3)
        trained.append(Trained(model, optimizers[1], losses))
    assert_same_bits(trained[1], trained[0])


@pytest.mark.parametrize(("placement", "num_devices"), [("least-loaded", 2), ("central", 3)])
def test_buffers_are_each_replicas_own(placement: str, num_devices: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 3)).double()
    batches = [{"input": batch["x"], "target": batch["target"]} for batch in model_and_batches()[1]]
    wanted = train_shard_by_shard(model, SGD, batches, num_devices, F.cross_entropy)
    found = train_mirrored(model, SGD, batches, num_devices, F.cross_entropy, placement=placement, **SMALL)
    assert_same_training(found, wanted, 1e-10)


class Run:
    def __init__(self, *placements: Placement, num_devices: int = 2, **options: Any) -> None:
        self.model, self.batches = model_and_batches()
        self.wanted = copy.deepcopy(self.model)
        self.optimizer, self.wanted_optimizer = ADAMW(self.model.parameters()), ADAMW(self.wanted.parameters())
        common = {"loss_fn": F.cross_entropy, "backend": "eager", **SMALL, **options}
        self.steps = [
            mirrorc.compile(
                self.model, num_devices, optimizer=self.optimizer, **grouped({"placement": placement, **common})
            )
            for placement in placements
        ]
        self.mirrored = mirrorc.compile(
            self.wanted, num_devices, optimizer=self.wanted_optimizer, **grouped({"placement": "mirrored", **common})
        )

    def each(self, act: Callable[[Any, nn.Module, torch.optim.Optimizer], Any], which: int = 0) -> None:
        found = act(self.steps[which], self.model, self.optimizer)
        wanted = act(self.mirrored, self.wanted, self.wanted_optimizer)
        assert found is None or torch.equal(torch.as_tensor(found), torch.as_tensor(wanted))
        assert_same_model(self.model, self.wanted, 0.0)

    def train(self, which: int = 0) -> None:
        self.each(lambda step, *_: step(**self.batches[0]), which)


def test_evaluations_accumulation_and_writes_of_the_user() -> None:
    run = Run("least-loaded", num_devices=3)
    run.train()
    run.each(lambda step, *_: step.evaluate(**run.batches[1]))
    for _ in range(2):
        run.each(lambda step, *_: step.accumulate(**run.batches[1]))
    run.train()

    def write(_: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(0.5)
                optimizer.state[parameter]["exp_avg"].mul_(2.0)
        optimizer.param_groups[0]["lr"] = 0.02

    run.each(write)
    run.train()
    run.each(lambda step, model, _: step(**run.batches[2]))
    run.each(
        lambda _, model, __: model.requires_grad_(True).get_parameter("first.weight").requires_grad_(False) is None
    )
    run.train()  # with other buckets
    run.each(
        lambda step, *_: step(**{key: value[:1] for key, value in run.batches[0].items()})
    )  # one device has examples


def test_state_goes_from_one_placement_to_another() -> None:
    run = Run("central")
    for _ in range(2):
        run.train()
    state = copy.deepcopy((run.model.state_dict(), run.optimizer.state_dict()))
    other = Run("least-loaded", num_devices=3)
    run.each(lambda *_: None)
    other.model.load_state_dict(state[0])
    other.optimizer.load_state_dict(state[1])
    other.wanted.load_state_dict(run.wanted.state_dict())
    other.wanted_optimizer.load_state_dict(copy.deepcopy(run.wanted_optimizer.state_dict()))
    for _ in range(2):
        other.train()
    saved = other.optimizer.state_dict()
    other.train()
    other.each(lambda _, model, optimizer: optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict())))
    other.train()
    assert saved["state"].keys() == {0, 1, 2, 3, 4, 5}


def test_steps_over_one_model_may_place_it_otherwise() -> None:
    run = Run("central", "least-loaded", "shared", NAMED)
    for which in (0, 1, 0, 2, 3, 1):
        run.train(which)


def test_only_the_owner_has_the_optimizers_state() -> None:
    run = Run("central", num_devices=3, link="copy")
    run.train()
    held = [device.own for device in run.steps[0].memory().devices]
    num_bytes = sum(bucket.num_bytes for bucket in run.steps[0].program.buckets)
    assert [one.parameters for one in held] == [num_bytes] * 3
    assert [one.optimizer_state for one in held[1:]] == [0, 0]
    assert held[0].optimizer_state is not None and held[0].optimizer_state >= 2 * num_bytes
    run = Run("least-loaded")
    run.train()
    first, second = (device.own.optimizer_state for device in run.steps[0].memory().devices)
    assert first and second and abs(first - second) < 0.2 * (first + second)


def test_a_step_says_what_it_moves() -> None:
    run = Run("least-loaded", num_devices=3)
    run.train()
    program = run.steps[0].program
    owners = {bucket.owner for bucket in program.buckets}
    assert owners == {0, 1, 2}
    kinds = {bucket.kind for bucket in run.steps[0].explain().buckets}
    assert kinds == {"reduce", "send"}
    for replica, graph in enumerate(program.graphs()):
        own = [bucket for bucket in program.buckets if bucket.owner == replica]
        assert sum(1 for _ in calls_to(graph, ops.update)) == len(own)
        assert sum(1 for _ in calls_to(graph, ops.send)) == 2 * len(own)
        assert sum(1 for _ in calls_to(graph, ops.store)) == len(program.buckets) - len(own)


def test_a_first_step_whose_owner_cannot_update_is_undone_on_all_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run("least-loaded", num_devices=3)
    update, calls = FlatOptimizer.update, []

    def short_of_memory(self: FlatOptimizer, gradient: torch.Tensor) -> None:
        calls.append(self)
        if len(calls) == 4:
            raise RuntimeError("no memory")
        update(self, gradient)

    with monkeypatch.context() as patch:
        patch.setattr(FlatOptimizer, "update", short_of_memory)
        with unchanged(run.model), pytest.raises(mirrorc.ExecutionError, match="no memory"):
            run.steps[0](**run.batches[0])
    assert not run.optimizer.state
    run.train()


class TwoHeads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.left, self.right = nn.Linear(4, 5).double(), nn.Linear(5, 3).double(), nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor, head: str = "left") -> torch.Tensor:
        return self.get_submodule(head)(self.body(x).tanh())


@pytest.mark.fast
def test_a_call_may_leave_out_what_a_placement_names() -> None:
    placement = {"left.weight": "cpu:1", "right.bias": "cpu:1"}
    adam = partial(torch.optim.Adam, lr=0.05)
    with Twins(TwoHeads(), adam, F.mse_loss, placement=placement, tolerance=TOLERANCE) as pair:
        for head in ("left", "right", "left"):
            x, target = torch.randn(4, 4, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)
            pair.train(x, head=head, target=target)
        pair.check()


@pytest.mark.fast
def test_a_pipeline_that_names_an_owner_of_nothing_is_refused() -> None:
    pipeline = mirrorc.passes.default_pipeline(placement="central", owners=(("lost.weight", "cpu:1"),))
    with pytest.raises(PassError, match=r"names 'lost\.weight', which is no parameter or buffer of the model"):
        train_mirrored(
            make_mlp(torch.float64), ADAMW, [mlp_batch(6, torch.float64, 0)], 2, F.cross_entropy, passes=pipeline
        )
