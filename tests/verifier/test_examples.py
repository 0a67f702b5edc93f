"""Programs of batches that are too small for all replicas: what is in them, and what the verifier refuses."""

from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_programs import SMALL_BUCKETS, core_pipeline, every_stage, handmade, run_up_to, targets
from torch import fx

from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_region_call, replica_of
from mirrorc.ir.program import Program
from mirrorc.passes import CheckFinite, ShareParameters
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import verify


def ragged(*sizes: int) -> Program:
    shards = tuple(0 if size else None for size in sizes)
    return handmade(len(sizes), buffer=True).evolve(shard_of_replica=shards, num_examples=sizes)


def kinds_on(graph: fx.Graph, replica: int | None) -> set[object]:
    return {node.target for node in graph.nodes if replica_of(node) == replica and node.op != "output"}


@pytest.mark.parametrize("sizes", [(2, 2, 0), (2, 0, 0), (0, 2, 0), (0, 0, 0, 2)])
def test_a_replica_without_examples_takes_part_in_what_follows_backward_alone(sizes: tuple[int, ...]) -> None:
    program = run_passes(ragged(*sizes), core_pipeline(**SMALL_BUCKETS), ())
    for size, module in zip(sizes, program.device_graphs.values(), strict=True):
        graph = module.graph
        packs, regions = targets(graph, ops.pack), [node for node in graph.nodes if is_region_call(node)]
        assert [bool(pack.args) for pack in packs] == [size > 0] * len(program.buckets)
        assert (
            bool(regions) == bool(targets(graph, ops.write)) == bool(graph.find_nodes(op="placeholder")) == (size > 0)
        )
        assert isinstance(graph.output_node().args[0], fx.Node) == (size > 0)
        for operation in (ops.all_reduce, ops.wait, ops.update):
            assert len(targets(graph, operation)) == len(program.buckets)
        assert len(targets(graph, ops.commit)) == 1


def test_every_pass_keeps_it_so() -> None:
    passes = [*core_pipeline(**SMALL_BUCKETS)[:-2], ShareParameters(), CheckFinite(), *core_pipeline()[-2:]]
    program = ragged(2, 2, 0)
    for compiler_pass in passes:
        before, program = program, compiler_pass.run(program)
        verify(program, before=before)
    (commit,) = targets(program.device_graphs["cpu:2"].graph, ops.commit)
    assert commit.kwargs["otherwise"] == "raise", "it decides as the others do, though it has no loss"


def test_every_stage_is_printed_and_saved(tmp_path: Path) -> None:
    program = ragged(0, 2, 0)
    for stage in (program, *every_stage(program).values()):
        text = stage.to_text()
        absent = ["cpu:0 (replica 0) runs", "cpu:2 (replica 2) runs"]
        for who in absent if stage.device_graphs else ["cpu:0, cpu:2 (replicas 0, 2) run"]:
            assert f"# {who} this on none of the batch's 2 examples: " in text
        assert text.count("loss_weight = 2/2, its part of the batch") == 1
        stage.save(tmp_path / "program.mirror")
        loaded = Program.load(tmp_path / "program.mirror")
        assert loaded.to_text() == text and loaded.shard_of_replica == stage.shard_of_replica


def absent(graph: fx.Graph, operation: object) -> fx.Node:
    return next(node for node in targets(graph, operation) if replica_of(node) == 2)


def pack_of_another(graph: fx.Graph) -> None:
    absent(graph, ops.pack).args = targets(graph, ops.pack)[0].args


def pack_nothing(graph: fx.Graph) -> None:
    targets(graph, ops.pack)[0].args = ()


def leave_the_sum(graph: fx.Graph) -> None:
    for node in targets(graph, ops.all_reduce):
        node.args = node.args[:2]


def do_not_commit(graph: fx.Graph) -> None:
    graph.erase_node(absent(graph, ops.commit))


def do_not_update(graph: fx.Graph) -> None:
    graph.erase_node(absent(graph, ops.update))


def read_the_batch(graph: fx.Graph) -> None:
    for node in targets(graph, ops.argument):
        if replica_of(node) == 0:
            with graph.inserting_before(node):
                copy = graph.call_function(ops.argument, (), {**node.kwargs, "replica": 2})
            copy.meta.update(node.meta)


def write_a_buffer(graph: fx.Graph) -> None:
    first = targets(graph, ops.write)[0]
    with graph.inserting_after(first):
        graph.call_function(ops.write, first.args, {**first.kwargs, "replica": 2})


def lose_a_loss(graph: fx.Graph) -> None:
    output = graph.output_node().args[0]
    graph.output_node().args = ({**output, "losses": (output["losses"][0], None, None)},)  # type: ignore[dict-item,index]


@pytest.mark.parametrize(
    ("rule", "change"),
    [
        ("every_bucket_is_packed_once", pack_of_another),
        ("every_bucket_is_packed_once", pack_nothing),
        ("all_replicas_take_part", leave_the_sum),
        ("a_step_commits_once", do_not_commit),
        ("every_bucket_is_updated_once", do_not_update),
        ("replicas_without_examples_run_nothing", read_the_batch),
        ("replicas_without_examples_run_nothing", write_a_buffer),
        ("replicas_without_examples_run_nothing", lose_a_loss),
    ],
)
def test_a_replica_is_there_entirely_or_not_at_all(rule: str, change: Callable[[fx.Graph], None]) -> None:
    program = run_up_to("insert-update", ragged(2, 2, 0), **SMALL_BUCKETS)
    verify(program)
    change(program.mirrored_graph)
    with pytest.raises(VerifyError, match=f"breaks the rule {rule} "):
        verify(program)
