"""`Step.memory` on real runs: what it tells before the first step agrees with what is measured in those after it."""

import operator
import sys
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from custom_pass import Bfloat16OnTheWire
from measured_memory import MeasuredMemory, measure
from references import CountedSigns
from selections import exhaustive
from torch import nn
from torch.utils.checkpoint import checkpoint
from train_text import GPT, GPTConfig, next_byte_loss
from twins import compiled_step

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.runtime.memory.report import MemoryReport

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="pages of memory are looked at, in /proc")
CLOSE = {"rel": 0.1}
aten = torch.ops.aten
WIDTH = 512  # gradients of so many rows and columns stay factors


def mlp() -> nn.Module:
    hidden = [nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.Tanh()]
    return nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), *hidden, nn.Linear(WIDTH, 10))


def gpt() -> nn.Module:
    return GPT(GPTConfig(num_layers=2, num_heads=2, width=64, context=32))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.stem_norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        self.body, self.body_norm = nn.Conv2d(16, 32, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(32)
        self.head = nn.Linear(32, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = F.relu(self.body_norm(self.body(F.relu(self.stem_norm(self.stem(x))))))
        return self.head(h.mean((2, 3)))


class Embeddings(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(5000, 32) for _ in range(3))
        self.head = nn.Sequential(nn.Linear(96, 64), nn.ReLU(), nn.Linear(64, 1))

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        return self.head(torch.cat([table(rows[:, i]) for i, table in enumerate(self.tables)], 1)).squeeze(1)


class Checkpoints(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, 64)) for _ in range(4))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def vectors(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 64), torch.randint(10, (n,))


def text(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(256, (n, 32)), torch.randint(256, (n, 32))


def images(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 16, 16), torch.randint(10, (n,))


def clicks(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(5000, (n, 3)), torch.randint(2, (n,)).float()


MODELS: dict[str, Any] = {
    "mlp": (mlp, vectors, F.cross_entropy),
    "gpt": (gpt, text, next_byte_loss),
    "conv": (ConvNet, images, F.cross_entropy),
    "checkpoints": (Checkpoints, vectors, F.cross_entropy),
    "embedding": (Embeddings, clicks, F.binary_cross_entropy_with_logits),
}
ADAMW = partial(torch.optim.AdamW, lr=1e-3)


def compare(
    name: str, num_devices: int, make_optimizer: Any = ADAMW, per_replica: int = 16, more: int = 0, **options: Any
) -> tuple[MemoryReport, MeasuredMemory]:
    """What is told before the first step, which must be what is told after it, and what is measured."""
    make_model, make_batch, loss_fn = MODELS[name]
    x, y = make_batch(per_replica * num_devices + more)
    told = []

    def make_step() -> mirrorc.Step:
        torch.manual_seed(0)
        model = make_model()
        step = compiled_step(model, loss_fn, num_devices, optimizer=make_optimizer, timeout=60.0, **options)
        step.prepare(x, target=y)
        told.append(step.memory())
        return step

    step, measured = measure(make_step, x, target=y)
    with step:
        assert step.memory() == told[0]
    return told[0], measured


def check(told: MemoryReport, measured: MeasuredMemory) -> None:
    assert told.remarks == ()
    assert (told.parameters, told.optimizer_state, told.buffers) == (
        measured.parameters,
        measured.optimizer_state,
        measured.buffers,
    )
    assert told.gradients == pytest.approx(measured.gradients, **CLOSE)
    assert all(row.gradients == sum(row.gradient_parts.values()) for row in told.rows)
    for device, peak in zip(told.devices, measured.activations, strict=True):
        assert device.own.within_step == device.peak.num_bytes == pytest.approx(peak, **CLOSE)
        assert device.own.activations == device.activation_peak.num_bytes <= device.peak.num_bytes
        for moment in (device.peak, device.activation_peak):
            assert moment.smaller_bytes >= 0 and (moment.smaller_bytes > 0) == (moment.num_smaller > 0)
    assert told.total == pytest.approx(measured.total, **CLOSE)
    assert told.total - told.within_step == pytest.approx(measured.held, **CLOSE)


needs_blocks = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="what oneDNN copies is known for x86"
)


def on_devices(num_devices: list[int], also: dict[str, int], rare: int) -> list[Any]:
    """Each model on each number of devices; all are slow, or exhaustive on a ``rare`` number, but ``also`` on one number each."""
    return [
        pytest.param(
            name,
            number,
            marks=[
                *([needs_blocks] if name == "conv" else []),
                *([] if also.get(name) == number else [pytest.mark.exhaustive if number == rare else pytest.mark.slow]),
            ],
        )
        for name in MODELS
        for number in num_devices
    ]


@pytest.mark.parametrize(("name", "num_devices"), on_devices([1, 2, 3], {"conv": 2}, rare=2))
def test_what_is_told_agrees_with_what_is_measured(name: str, num_devices: int) -> None:
    check(*compare(name, num_devices))


@pytest.mark.fast
@pytest.mark.parametrize(("name", "num_devices"), on_devices([1, 2], {}, rare=1))
def test_compiled_regions_take_what_inductors_code_takes(name: str, num_devices: int) -> None:
    check(*compare(name, num_devices, backend="inductor"))


def test_fusion_takes_less() -> None:
    (fused, _), (plain, _) = (compare("gpt", 1, backend=backend) for backend in ("inductor", "eager"))
    assert fused.activations < 0.99 * plain.activations


@pytest.mark.parametrize(
    ("kind", "state_per_parameter"),
    [
        (partial(torch.optim.SGD, lr=0.1), 0),
        (partial(torch.optim.NAdam, lr=1e-3), 2),
        *exhaustive((partial(torch.optim.SGD, lr=0.1, momentum=0.9), 1), (partial(torch.optim.RMSprop, lr=1e-3), 1)),
        (partial(torch.optim.AdamW, lr=1e-3, amsgrad=True, fused=False, foreach=False), 3),
    ],
)
def test_updates_take_memory_too(kind: Any, state_per_parameter: int) -> None:
    told, measured = compare("mlp", 2, kind)
    check(told, measured)
    assert told.optimizer_state == pytest.approx(state_per_parameter * told.parameters, rel=0.001)


def test_an_update_that_takes_the_most_is_named() -> None:
    told, _ = compare("mlp", 1, partial(torch.optim.NAdam, lr=1e-3))
    assert told.devices[0].peak.call.startswith("update b")
    assert told.devices[0].peak.largest[0].name == "temporaries of update"


@pytest.mark.fast
def test_summed_and_clipped_gradients_are_no_activations_and_lists_add_up_to_their_peaks() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    options = {"algorithm": "ring", "clip_grad_norm": 1.0, "disable": ["share-parameters"]}
    with compiled_step(model, F.mse_loss, 3, optimizer=ADAMW, **options) as step:
        step.prepare(torch.randn(6, 64), target=torch.randn(6, 64))
        report = step.memory()
    trained = sum(4 * parameter.numel() for parameter in model.parameters())
    for device in report.devices:
        parts = device.own.gradient_parts
        assert parts["buckets"] == parts["kept"] == trained, "each clipped bucket is kept until the next step"
        assert device.own.gradients == sum(parts.values()) and device.own.passing_sums > 0
        assert device.peak.call == "scale" and device.activation_peak.call.startswith("bwd_")
        assert device.activation_peak.num_bytes + device.own.passing_sums == device.peak.num_bytes
        for peak in (device.peak, device.activation_peak):
            listed = sum(value.num_bytes for value in peak.largest)
            assert peak.num_bytes == listed + peak.smaller_bytes and f"{peak.num_smaller} smaller value" in str(report)
    assert "KiB in buckets" in str(report) and "kept until the next step" in " ".join(str(report).split())


@pytest.mark.parametrize("algorithm", ["native", "ring"])
@pytest.mark.parametrize("clip_grad_norm", [None, 1.0])
def test_sums_outside_of_buckets_agree_with_what_is_measured(algorithm: str, clip_grad_norm: float | None) -> None:
    check(*compare("gpt", 2, disable=["share-parameters"], algorithm=algorithm, clip_grad_norm=clip_grad_norm))


@pytest.mark.parametrize("num_devices", [3, 2])
def test_gradients_that_stay_factors_are_in_the_first_devices_bucket_alone(num_devices: int) -> None:
    told, measured = compare("mlp", num_devices, disable=["update-in-parts"])
    factored = 2 * WIDTH * WIDTH * 4
    first, *others = (device.own.gradients for device in told.devices)
    assert all(other == first - factored for other in others)
    assert measured.gradients == pytest.approx(told.gradients, **CLOSE)


@pytest.mark.parametrize("num_devices", [2, 3])
def test_products_that_are_made_in_parts_are_in_no_bucket(num_devices: int) -> None:
    whole, _ = compare("mlp", num_devices, disable=["update-in-parts"])
    told, measured = compare("mlp", num_devices)
    assert measured.gradients == pytest.approx(told.gradients, **CLOSE)
    assert told.gradients < whole.gradients / 2
    assert told.devices[0].own.reserved > 0


@pytest.mark.parametrize(
    ("link", "without"),
    [
        (None, ["share-parameters"]),
        ("copy", []),
        (None, ["share-parameters", "factor-gradients"]),
        *exhaustive(("copy", ["share-parameters", "factor-gradients"]), (None, []), ("copy", ["share-parameters"])),
    ],
)
def test_passes_and_links_change_what_is_kept(link: str | None, without: list[str]) -> None:
    told, measured = compare("mlp", 2, link=link, disable=without)
    check(told, measured)
    assert bool(told.shared) == ("share-parameters" not in without)


@dataclass(frozen=True)
class ShowsWeights:
    name: str = field(default="shows-weights", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.UPDATED, init=False)

    def run(self, program: Program) -> Program:
        program = program.evolve(graph=copied(program.mirrored_graph))
        commit = next(calls_to(program.mirrored_graph, ops.commit))
        for read in list(calls_to(program.mirrored_graph, ops.read)):
            if read.meta["val"].dim() == 2:
                copy = insert(program, read.next, aten.clone.default, (read,))
                split = insert(program, copy.next, aten.split.Tensor, (copy, len(copy.meta["val"])))
                part = insert(program, split.next, operator.getitem, (split, 0))
                view = insert(program, part.next, aten._unsafe_view.default, (part, [-1]))
                insert(program, commit, aten.dot.default, (view, view))
                insert(program, commit, aten.sum.default, (copy,))
        return program


@pytest.mark.parametrize(
    ("where", "added", "counted"),
    [("share-parameters", Bfloat16OnTheWire(), "gradients"), ("insert-update", ShowsWeights(), "activations")],
)
def test_what_a_pass_of_ones_own_makes_is_counted(where: str, added: Any, counted: str) -> None:
    """Views of it are counted with it."""
    plain, _ = compare("mlp", 2)
    told, measured = compare("mlp", 2, add=[mirrorc.after(where, added)])
    check(told, measured)
    assert getattr(told, counted) > getattr(plain, counted)


def test_devices_with_other_shards_have_their_own_peaks() -> None:
    told, measured = compare("gpt", 2, per_replica=4, more=1)
    check(told, measured)
    assert told.devices[0].own.activations > 1.1 * told.devices[1].own.activations


def test_what_is_shared_is_counted_once() -> None:
    told, _ = compare("mlp", 2)
    (shared,) = told.shared
    assert shared.devices == ("cpu:0", "cpu:1") and shared.gradients == shared.activations == 0
    assert shared.parameters == told.parameters and shared.optimizer_state == told.optimizer_state
    assert all(device.own.parameters == device.own.optimizer_state == 0 for device in told.devices)


@pytest.mark.fast
def test_frozen_parameters_and_buffers_that_nothing_writes_are_shared() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Linear(4, 2))
    model[0].requires_grad_(False)
    model.register_buffer("offset", torch.zeros(100))

    class Offset(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model
            self.register_buffer("offset", torch.zeros(2))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) + self.offset

    whole = Offset()
    with compiled_step(whole, F.mse_loss, optimizer=torch.optim.SGD(model[1].parameters(), lr=0.1)) as step:
        step.prepare(torch.ones(4, 8), target=torch.ones(4, 2))
        (shared,) = step.memory().shared
        assert shared.buffers == 2 * 4  # not the one that the forward does not read
        assert shared.parameters == (8 * 4 + 4) * 4 + sum(bucket.num_bytes for bucket in step.program.buckets)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_the_state_of_an_unknown_optimizer_is_not_guessed(num_devices: int) -> None:
    model, (x, y) = mlp(), vectors(8)
    with compiled_step(model, F.cross_entropy, num_devices, optimizer=CountedSigns) as step:
        step.prepare(x, target=y)
        before = step.memory()
        assert before.optimizer_state is None and "not known" in str(before)
        assert any("not known before its first step" in remark for remark in before.remarks)
        step(x, target=y)
        after = step.memory()
        assert after.optimizer_state == sum(4 * p.numel() for p in model.parameters())
        assert after.total == before.total + after.optimizer_state
        assert not any("first step" in remark for remark in after.remarks)


def test_loaded_state_is_looked_at() -> None:
    model, (x, y) = mlp(), vectors(8)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with compiled_step(model, F.cross_entropy, 1, optimizer=optimizer) as step:
        step(x, target=y)
        optimizer.param_groups[0]["momentum"] = 0.0
        assert step.memory().optimizer_state == step.memory().parameters  # what is there stays


def test_memory_is_told_after_the_step_is_closed() -> None:
    model, (x, y) = mlp(), vectors(8)
    with compiled_step(model, F.cross_entropy, optimizer=ADAMW) as step:
        step(x, target=y)
        told = step.memory()
    assert step.memory() == told


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_telling_it_changes_nothing(backend: str) -> None:
    losses = []
    for tells in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(mlp(), nn.Dropout(0.5))
        x, y = vectors(8)
        with compiled_step(model, F.cross_entropy, optimizer=ADAMW, backend=backend) as step:
            for _ in range(3):
                losses.append(step(x, target=y))
                told = step.memory() if tells else None
        assert told is None or told.total > 0
    assert torch.equal(torch.stack(losses[:3]), torch.stack(losses[3:]))


def test_the_peak_is_in_the_users_terms() -> None:
    told, _ = compare("gpt", 2)
    peak = told.devices[0].peak
    assert peak.call.startswith("bwd_") and "train_text.py:" in peak.source
    assert [value.num_bytes for value in peak.largest] == sorted((v.num_bytes for v in peak.largest), reverse=True)
    assert sum(value.num_bytes for value in peak.largest) <= peak.num_bytes
    text = str(told)
    assert f"in {peak.call}, at {peak.operation}\n  # {peak.source[:80]}" in text
    assert all(f"  {value.name}: {value.type}" in text for value in peak.largest)
