from typing import Any

import pytest
import torch
from payloads import FirstElements
from tiny_programs import SMALL_BUCKETS, Weight, handmade_of_worker, targets

from mirrorc import World
from mirrorc.analysis.communication.compressed_sums import gradients_of_pack
from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.packing import EqualPacks
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier.verifier import Verify, verify

WEIGHTS = [Weight("a", (30, 40)), Weight("b", (40,)), Weight("c", (3, 4)), Weight("d", (20, 3, 5))]


def program_of(world: World, weights: list[Weight] = WEIGHTS, **options: Any) -> Program:
    options = {"compression": FirstElements(), **options}
    return run_passes(
        handmade_of_worker(world, weights=weights), default_pipeline(over_workers=True, **options), [Verify()]
    )


def remarks(program: Program) -> str:
    return " ".join(remark.text for remark in program.remarks if remark.by == "send-payload")


@pytest.mark.parametrize("devices", [1, 2])
def test_a_payload_is_sent_with_what_was_not_sent_before(devices: int) -> None:
    for graph in program_of(World(2, devices)).graphs():
        (launch,) = targets(graph, ops.exchange_payload)
        (own,) = launch.all_input_nodes
        assert own.target is ops.add_unsent
        assert own.all_input_nodes[0].target is (ops.pack if devices == 1 else ops.wait)


def test_a_bucket_of_which_it_is_no_shorter_is_sent_as_it_is() -> None:
    program = program_of(World(2), weights=[Weight("a", (300,)), Weight("b", (1,))], **SMALL_BUCKETS)
    (graph,) = program.graphs()
    assert len(targets(graph, ops.exchange_payload)) == len(targets(graph, ops.exchange)) == 1
    assert "1 exchange of FirstElements(part=10), which changes numbers: each of 2 workers sends 0.1 KiB" in remarks(
        program
    )
    assert "sent whole, or as factors: the payload would be no fewer bytes" in remarks(program)


def test_a_gradient_that_is_cut_comes_as_its_pieces() -> None:
    program, elements = program_of(World(2), buckets=EqualPacks(3)), {"a": 0, "b": 0, "c": 0, "d": 0}
    for bucket, pack in program.packs:
        flat = torch.arange(pack.num_elements) + pack.start
        for name, piece in gradients_of_pack(bucket, pack, flat).items():
            slot = bucket.slot_of[name]
            assert piece.flatten()[0] == max(slot.offset, pack.start)
            assert piece.shape == slot.shape or (piece.dim() == 1 and piece.numel() < slot.num_elements)
            elements[name] += piece.numel()
    assert elements == {"a": 1200, "b": 40, "c": 12, "d": 300}


@pytest.mark.parametrize(
    ("options", "taker"),
    [
        ({"check_finite": True}, ops.is_finite),
        ({"scales_loss": True}, ops.is_finite),
        ({"max_grad_norm": 1.0}, ops.norm),
    ],
)
def test_what_looks_at_sums_has_what_all_have_sent(options: dict[str, Any], taker: Any) -> None:
    for graph in program_of(World(2, 2), **options).graphs():
        sums = [own for node in targets(graph, taker) for own in node.all_input_nodes if "bucket" in own.kwargs]
        assert sums and all(own.all_input_nodes[0].target is ops.exchange_payload for own in sums)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        ({"payload": ""}, "its keyword payload is '', no text of a payload"),
        ({"num_bytes": 0}, "its keyword num_bytes is 0, but it sends fewer than"),
        ({"num_bytes": 10**6}, "its keyword num_bytes is 1000000, but it sends fewer than"),
    ],
)
def test_other_keywords_are_refused(words: dict[str, Any], why: str) -> None:
    program = program_of(World(2))
    (launch,) = targets(program.graphs()[0], ops.exchange_payload)
    launch.kwargs = {**launch.kwargs, **words}
    with pytest.raises(VerifyError) as error:
        verify(program)
    assert why in str(error.value)
