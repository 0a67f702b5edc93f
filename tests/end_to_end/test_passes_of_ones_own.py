"""Passes that users add: placed, verified, dumped and run like mirrorc's own."""

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import custom_pass
import pytest
import torch
from selections import exhaustive
from tiny_models import make_mlp, mlp_batch
from torch import fx
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import calls_to, is_region_call
from mirrorc.ir.program import Program, Stage
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline


@dataclass(frozen=True)
class ClipBuckets:
    limit: float
    changes_dataflow: bool = True
    name: str = field(default="clip-buckets", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.UPDATED, init=False)

    def run(self, program: Program) -> Program:
        program = program.evolve(graph=copied(program.mirrored_graph))
        for update in list(calls_to(program.mirrored_graph, ops.update)):
            (gradient,) = update.all_input_nodes
            clamped = insert(program, update, torch.ops.aten.clamp.default, (gradient, -self.limit, self.limit))
            update.args = (clamped,)
        return program


@dataclass(frozen=True)
class ScaleGradients:
    changes_dataflow: bool = False
    name: str = field(default="scale-gradients", init=False)
    input_stage: Stage = field(default=Stage.PACKED, init=False)
    output_stage: Stage = field(default=Stage.PACKED, init=False)

    def run(self, program: Program) -> Program:
        program = program.evolve(graph=copied(program.mirrored_graph))
        for pack in list(calls_to(program.mirrored_graph, ops.pack)):
            scaled: tuple[fx.Node, ...] = tuple(
                insert(program, pack, torch.ops.aten.mul.Tensor, (gradient, 2.0)) for gradient in pack.all_input_nodes
            )
            pack.args = scaled
        return program


def trained(
    num_devices: int, steps: int = 4, dtype: torch.dtype = torch.float32, **options: Any
) -> tuple[Any, Program]:
    model, sgd = make_mlp(dtype), partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with compiled_step(model, F.cross_entropy, num_devices, sgd, **options) as step:
        for seed in range(steps):
            step(**mlp_batch(12, dtype, seed))
        return [p.detach().clone() for p in model.parameters()], step.program


def largest_difference(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


MIRRORED = ("share-parameters",)
# Where the pass stands, what is disabled, and the number of devices that every run tries; all others are slow.
STANDS: list[tuple[str, tuple[str, ...], int]] = [
    ("insert-all-reduce", (), 2),
    ("insert-all-reduce", MIRRORED, 3),
    ("schedule-overlap", (), 1),
    ("schedule-overlap", MIRRORED, 2),
    ("share-parameters", (), 3),
]


@pytest.mark.parametrize(
    ("num_devices", "place", "disabled"),
    [
        *((often, place, disabled) for place, disabled, often in STANDS[1::2]),
        *((often, place, disabled) for place, disabled, often in STANDS[::2]),
        *exhaustive(*((n, place, disabled) for place, disabled, often in STANDS for n in (1, 2, 3) if n != often)),
    ],
)
def test_bfloat16_on_the_wire(num_devices: int, place: str, disabled: tuple[str, ...]) -> None:
    half = custom_pass.Bfloat16OnTheWire()
    if place == "insert-all-reduce":
        half = EarlyBfloat16()
    options = {"disable": disabled, "buckets": ByBytes(1e-3, 1e-3)}
    plain, _ = trained(num_devices, **options)
    found, program = trained(num_devices, add=[mirrorc.after(place, half)], **options)
    difference = largest_difference(plain, found)
    assert difference < 2e-2 and (difference > 0) == (num_devices > 1)
    for module in program.device_graphs.values():
        for launch in calls_to(module.graph, *ops.REDUCTIONS):
            assert launch.meta["val"].value.dtype == torch.bfloat16
    assert ("bf16" in str(program)) == (num_devices > 1)


class EarlyBfloat16(custom_pass.Bfloat16OnTheWire):  # type: ignore[misc, name-defined]
    input_stage = Stage.REDUCED
    output_stage = Stage.REDUCED

    def run(self, program: Program) -> Program:
        return super().run(program)


@pytest.mark.parametrize("num_devices", [3, 1, 2])
def test_an_operator_of_torch_may_stand_between_wait_and_update(num_devices: int) -> None:
    clip = mirrorc.after("insert-update", ClipBuckets(0.01))
    found, program = trained(num_devices, steps=1, dtype=torch.float64, add=[clip])
    model = make_mlp(torch.float64)
    batch = mlp_batch(12, torch.float64, 0)
    F.cross_entropy(model(batch["x"]), batch["target"]).backward()
    expected = [p - 0.1 * p.grad.clamp(-0.01, 0.01) for p in model.parameters()]
    assert largest_difference(found, expected) < 1e-12 and "aten.clamp.default" in str(program)


def test_the_clamp_goes_with_the_update_and_keeps_the_overlap() -> None:
    options = {"disable": ("share-parameters",), "buckets": ByBytes(1e-3, 1e-3)}
    _, program = trained(2, add=[mirrorc.after("insert-update", ClipBuckets(1.0))], **options)
    graph = program.device_graphs["cpu:0"].graph
    nodes = list(graph.nodes)
    last_region = max(i for i, node in enumerate(nodes) if is_region_call(node))
    assert len(program.buckets) > 1 and all(nodes.index(wait) > last_region for wait in calls_to(graph, ops.wait))


@pytest.mark.fast
def test_a_change_of_what_is_computed_must_be_declared() -> None:
    with pytest.raises(mirrorc.VerifyError, match=r"'scale-gradients' breaks the rule"):
        trained(2, add=[mirrorc.after("pack-gradients", ScaleGradients())])


def test_a_declared_change_of_what_is_computed_is_run() -> None:
    added = [mirrorc.after("pack-gradients", ScaleGradients(changes_dataflow=True))]
    found, program = trained(2, steps=1, dtype=torch.float64, add=added)
    plain, _ = trained(2, steps=1, dtype=torch.float64)
    start = [p.detach() for p in make_mlp(torch.float64).parameters()]
    doubled = [begin + 2 * (end - begin) for begin, end in zip(start, plain, strict=True)]
    assert largest_difference(found, doubled) < 1e-12
    assert "d(last.weight)_mul" in str(program)


def test_a_pipeline_of_ones_own_and_added_passes_go_together() -> None:
    pipeline = [*default_pipeline()]
    added = [mirrorc.before("lower-collectives", custom_pass.Bfloat16OnTheWire())]
    _, program = trained(2, passes=pipeline, add=added)
    assert "bf16" in str(program)


def test_added_passes_stand_where_they_were_placed(tmp_path: Path) -> None:
    first = mirrorc.after("insert-update", ClipBuckets(1.0))
    second = mirrorc.before("clip-buckets", ClipBuckets(2.0))
    trained(2, steps=1, add=[first, second], dump=tmp_path)
    names = sorted(path.name for path in (tmp_path / "program-0").glob("*clip-buckets.txt"))
    assert names == ["16-clip-buckets.txt", "17-clip-buckets.txt"]
    text = (tmp_path / "program-0" / "16-clip-buckets.txt").read_text(encoding="utf-8")
    assert "clamp.default(b0_sum, -2.0, 2.0)" in text


@pytest.mark.fast
@pytest.mark.parametrize(
    ("added", "error", "message"),
    [
        ([ClipBuckets(1.0)], TypeError, r"add holds ClipBuckets.*, without a place\n  fix:  add=\[mirrorc.after"),
        ([mirrorc.after("insert-updates", ClipBuckets(1.0))], ValueError, r"'clip-buckets' next to 'insert-updates', which is"),
        ([mirrorc.after("insert-update", ClipBuckets)], TypeError, r"is no pass\n  why:  a pass has name"),
        ([mirrorc.before("insert-update", ClipBuckets(1.0))], mirrorc.PassError, r"takes programs from UPDATED to UPDATED"),
    ],
)  # fmt: skip
def test_wrong_additions_are_refused(added: list[Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        trained(2, steps=1, add=added)
