"""The pass recompute-checkpoints, on captured models whose blocks are checkpoints."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_programs import FunctionPass, captured_model, targets
from torch import fx, nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from mirrorc.analysis.graph.cuts import first_of_backward
from mirrorc.errors import CaptureError, VerifyError
from mirrorc.ir.nodes import CHECKPOINT, calls_to, checkpoint_of
from mirrorc.ir.program import Program
from mirrorc.packing import ByBytes
from mirrorc.passes import OutlineRegions, PlanBuckets, RecomputeCheckpoints, RecomputeElementwise
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import Verify

aten = torch.ops.aten
MASK = torch.ops.mirrorc.seeded_mask.default


class Blocks(nn.Module):
    def __init__(self, num_blocks: int = 2, **options: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 4), nn.BatchNorm1d(4))
            for _ in range(num_blocks)
        )
        self.head, self.options = nn.Linear(4, 3), {"use_reentrant": False, **options}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + checkpoint(block, x, **self.options)
        return self.head(x)


def by_policy(policy: Callable[..., CheckpointPolicy]) -> Any:
    return partial(create_selective_checkpoint_contexts, policy)


def keeps_products(context: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if target is aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


def recomputes_products(context: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_RECOMPUTE if target is aten.addmm.default else CheckpointPolicy.PREFER_SAVE


def offloads(context: Any, target: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_CPU_OFFLOAD if target is aten.tanh.default else CheckpointPolicy.PREFER_RECOMPUTE


def recomputed(model: nn.Module) -> tuple[Program, Program]:
    before = captured_model(model, 1)
    return before, run_passes(before, [RecomputeCheckpoints()], [Verify()])


def parts(program: Program) -> tuple[list[fx.Node], list[fx.Node]]:
    graph = program.shard_graphs[0]
    nodes, first = list(graph.nodes), first_of_backward(program, graph)
    assert first is not None
    return nodes[: nodes.index(first)], nodes[nodes.index(first) :]


def read_by_backward(program: Program) -> list[fx.Node]:
    forward, backward = parts(program)
    return [node for node in forward if node.op == "call_function" and any(user in backward for user in node.users)]


@pytest.mark.slow
@pytest.mark.parametrize("use_reentrant", [False, True])
def test_backward_runs_the_operators_of_a_checkpoint_again(use_reentrant: bool) -> None:
    before, after = recomputed(Blocks(use_reentrant=use_reentrant))
    forward, backward = parts(after)
    for target in (aten.tanh.default, MASK):
        assert len([node for node in forward if node.target is target]) == 2
        copies = [node for node in backward if node.target is target]
        assert [node.name.removesuffix("_again") for node in copies] == [
            node.name for node in reversed(targets(before.shard_graphs[0], target))
        ]
    masks = {node.name: node for node in targets(after.shard_graphs[0], MASK)}
    assert all(masks[name].args == masks[name.removesuffix("_again")].args for name in masks)
    assert not any(node.target in (aten.tanh.default, MASK) for node in read_by_backward(after))
    assert [remark.text for remark in after.remarks if "2 checkpoints: backward runs" in remark.text]


@pytest.mark.slow
def test_a_copy_stands_where_backward_first_needs_it() -> None:
    """So no checkpoint is computed again before backward is through with the checkpoints behind it."""
    _, after = recomputed(Blocks(3))
    _, backward = parts(after)
    place = {node: i for i, node in enumerate(backward)}
    copies = {node for node in backward if node.name.endswith("_again")}
    assert copies
    for node in copies:
        between = backward[place[node] + 1 : min(place[user] for user in node.users)]
        assert copies.issuperset(between)


@pytest.mark.slow
def test_what_a_checkpoint_is_given_is_kept() -> None:
    before, after = recomputed(Blocks())
    kept = {node.name for node in read_by_backward(after)}
    assert kept < {node.name for node in before.shard_graphs[0].nodes}
    given = {checkpoint_of(node) for node in before.shard_graphs[0].nodes if node.name in kept}
    leaving = [node for node in before.shard_graphs[0].nodes if node.name in kept and checkpoint_of(node) is not None]
    assert None in given
    for node in leaving:
        assert any(checkpoint_of(user) != checkpoint_of(node) for user in node.users)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "num_again"), [(keeps_products, {"addmm": 0, "tanh": 2}), (recomputes_products, {"addmm": 2, "tanh": 0})]
)
def test_a_policy_says_what_is_kept(policy: Any, num_again: dict[str, int]) -> None:
    _, after = recomputed(Blocks(context_fn=by_policy(policy)))
    again = [node.name for node in after.shard_graphs[0].nodes if node.name.endswith("_again")]
    assert sum(name.endswith("_tanh_again") for name in again) == num_again["tanh"]
    assert sum(name.endswith("_addmm_again") for name in again) == num_again["addmm"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch has no such policy")
def test_a_policy_that_moves_values_is_refused() -> None:
    words = (
        r"a checkpoint in Blocks asks for CheckpointPolicy.MUST_CPU_OFFLOAD\n  at:   .*\n.*\n  fix:  return MUST_SAVE"
    )
    with pytest.raises(CaptureError, match=words):
        captured_model(Blocks(context_fn=by_policy(offloads)), 1)


@pytest.mark.slow
def test_buffers_are_written_once() -> None:
    before, after = recomputed(Blocks())
    written = [program.shard_graphs[0].output_node().args[0]["writes"] for program in (before, after)]  # type: ignore[index, call-overload]
    names = [{name: node.name for name, node in found.items()} for found in written]
    assert names[0] == names[1] and len(names[0]) == 6


@pytest.mark.slow
def test_copies_are_in_regions_of_backward() -> None:
    _, after = recomputed(Blocks())
    outlined = run_passes(after, [PlanBuckets(ByBytes(1e-4, 1e-4)), OutlineRegions()], [Verify()])
    bodies = {
        name: [node.name for node in region.graph_module.graph.nodes] for name, region in outlined.regions.items()
    }
    assert sum(name.startswith("bwd") for name in bodies) > 1
    for region, names in bodies.items():
        computed = [name for name in names if name.endswith("_again")]
        assert not computed or outlined.regions[region].phase == "backward"
    assert any(name.endswith("_tanh_again") for names in bodies.values() for name in names)


@pytest.mark.slow
def test_elementwise_values_that_are_recomputed_anyway_are_left_alone() -> None:
    before = captured_model(Blocks(), 1)
    after = run_passes(before, [RecomputeElementwise(), RecomputeCheckpoints()], [Verify()])
    assert not any(CHECKPOINT in node.meta for node in after.shard_graphs[0].nodes)


@pytest.mark.slow
def test_an_evaluation_keeps_nothing_anyway() -> None:
    before = captured_model(Blocks(), 1, evaluates=True)
    after = run_passes(before, [RecomputeCheckpoints()], [Verify()])
    names = [[node.name for node in program.shard_graphs[0].nodes] for program in (before, after)]
    assert names[0] == names[1]


class InTheLoss(nn.Module):
    """The checkpoint gives what the first operator of backward reads."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 3), nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


def test_what_backward_reads_at_once_is_kept() -> None:
    _, after = recomputed(InTheLoss())
    forward, backward = parts(after)
    assert not any(node.name.endswith("_again") for node in forward)
    assert any(node.name.endswith("_again") for node in backward)


@pytest.mark.slow
def test_a_captured_program_keeps_its_checkpoints_in_a_file(tmp_path: Path) -> None:
    program = captured_model(Blocks(context_fn=by_policy(keeps_products)), 1)
    program.save(tmp_path / "program.mirror")
    loaded = Program.load(tmp_path / "program.mirror")
    found, expected = (
        [(node.name, node.meta.get(CHECKPOINT)) for node in one.shard_graphs[0].nodes] for one in (loaded, program)
    )
    assert found == expected and any(own is not None and own.keeps for _, own in found)
    texts = [run_passes(one, [RecomputeCheckpoints()]).to_text(sources=False) for one in (loaded, program)]
    assert texts[0] == texts[1]


def again(graph: fx.Graph, target: Any) -> fx.Node:
    return next(node for node in calls_to(graph, target) if node.name.endswith("_again"))


def draw_another_mask(graph: fx.Graph) -> None:
    copy = again(graph, MASK)
    copy.args = (copy.args[0], 17, *copy.args[2:])


def take_another_operand(graph: fx.Graph) -> None:
    copy = again(graph, aten.tanh.default)
    copy.args = (next(node for node in calls_to(graph, aten.tanh.default) if node is not copy),)


def call_another_operator(graph: fx.Graph) -> None:
    again(graph, aten.tanh.default).target = aten.sigmoid.default


@pytest.mark.slow
@pytest.mark.parametrize("change", [draw_another_mask, take_another_operand, call_another_operator])
def test_a_copy_that_is_no_copy_is_refused(change: Callable[[fx.Graph], None]) -> None:
    def recompute_and_change(program: Program) -> Program:
        changed = RecomputeCheckpoints().run(program)
        change(changed.shard_graphs[0])
        return changed

    with pytest.raises(VerifyError, match="dataflow_is_preserved"):
        run_passes(captured_model(Blocks(), 1), [FunctionPass(recompute_and_change)], [Verify()])
