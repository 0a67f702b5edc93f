from typing import Any

import pytest
import torch
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade_of_worker, targets

from mirrorc import World
from mirrorc.analysis.communication.worker_meetings import schedule_hash
from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of
from mirrorc.ir.program import Program
from mirrorc.packing import EqualPacks
from mirrorc.passes import CompressExchange, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import Verify, verify

WEIGHTS = [Weight("a", (300,)), Weight("b", (300,)), Weight("c", (2,))]


def program_of(world: World, rank: int = 0, weights: list[Weight] = WEIGHTS, **options: Any) -> Program:
    given = {**({} if "buckets" in options else SMALL_BUCKETS), "compression": "bfloat16", **options}
    return run_passes(
        handmade_of_worker(world, rank, weights), default_pipeline(over_workers=True, **given), [Verify()]
    )


def remarks(program: Program) -> list[str]:
    return [remark.text for remark in program.remarks if remark.by == "compress-exchange"]


@pytest.mark.parametrize("devices", [1, 2])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_are_narrow_between_workers_alone(devices: int, dtype: str) -> None:
    program = program_of(World(2, devices), compression=dtype)
    for graph in program.graphs():
        for launch in targets(graph, ops.exchange):
            (own,) = launch.all_input_nodes
            assert own.target is ops.compress and own.meta["val"].dtype is getattr(torch, dtype)
            assert own.all_input_nodes[0].target is (ops.pack if devices == 1 else ops.wait)
            assert own.all_input_nodes[0].meta["val"].dtype is torch.float32
        for update in targets(graph, ops.update):
            (total,) = update.all_input_nodes
            assert total.target is ops.decompress and total.meta["val"].dtype is torch.float32
            assert bucket_of(total) == bucket_of(update)


@pytest.mark.parametrize(
    ("options", "taker"),
    [
        ({"check_finite": True}, ops.is_finite),
        ({"scales_loss": True}, ops.is_finite),
        ({"max_grad_norm": 1.0}, ops.norm),
        ({"max_grad_value": 1.0}, ops.clip_value),
    ],
)
@pytest.mark.parametrize("devices", [1, 2])
def test_what_looks_at_sums_has_them_in_their_own_dtype(options: dict[str, Any], taker: Any, devices: int) -> None:
    for graph in program_of(World(2, devices), **options).graphs():
        wide = [s for node in targets(graph, taker) for s in node.all_input_nodes if s.target is not ops.commit]
        of_buckets = [source for source in wide if "bucket" in source.kwargs]
        assert of_buckets and all(source.target is ops.decompress for source in of_buckets)


def test_bytes_with_and_without_are_told_and_marked_in_the_dump() -> None:
    program = program_of(World(3))
    assert remarks(program)[0].startswith(
        "3 exchanges in bfloat16, which changes numbers: each of 3 workers sends 1.6 KiB"
    )
    assert remarks(program)[0].endswith("in place of 3.2 KiB")
    assert str(program).count("rounded for the wire: this changes numbers") == 3


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_packs_and_other_optimizers_are_compressed(devices: int) -> None:
    cut = program_of(World(2, devices), buckets=EqualPacks(3))
    alone = program_of(World(2, devices), weights=[Weight("a", (30, 10), rule=MUON), Weight("b", (4, 10), rule=MUON)])
    for graph in cut.graphs():
        (whole,) = targets(graph, ops.unpack)
        assert [given.target for given in whole.args] == [ops.decompress] * 3  # type: ignore[union-attr]
    (taker,) = targets(alone.graphs()[0], ops.step_optimizer)
    assert all(given.target is ops.decompress for given in taker.all_input_nodes)


@pytest.mark.slow
def test_workers_that_compress_otherwise_differ_in_what_they_exchange() -> None:
    hashes = {schedule_hash(program_of(World(2), compression=one)) for one in ("bfloat16", "float16", None)}
    assert len(hashes) == 3


def test_another_dtype_is_refused() -> None:
    with pytest.raises(ValueError, match=r"dtype is 'float8': say 'bfloat16' or 'float16'"):
        CompressExchange("float8")


@pytest.mark.slow
def test_an_update_from_what_is_still_narrow_is_refused() -> None:
    program = program_of(World(2))
    (graph,) = program.graphs()
    total = targets(graph, ops.decompress)[0]
    total.replace_all_uses_with(total.all_input_nodes[0])
    graph.erase_node(total)
    with pytest.raises(VerifyError):
        verify(program)
