from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, run_up_to, targets
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS, PARAMETERS, BucketParts, Part
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.program import Program

aten = torch.ops.aten


def reduced(num_devices: int = 2) -> Program:
    program = run_up_to("lower-collectives", handmade(num_devices, [Weight("w", (16,))]), link="copy")
    return program.evolve(graph=copied(program.mirrored_graph))


def value(program: Program, target: Any, *args: Any) -> fx.Node:
    return insert(program, program.mirrored_graph.output_node(), target, args)


def spans(part: Part | None) -> list[tuple[int, int, set[int]]] | None:
    return [(span.start, span.stop, set(span.replicas)) for span in part.spans] if part is not None else None


def test_packs_sums_and_shares() -> None:
    program = reduced(3)
    parts, packs = BucketParts(program), targets(program.mirrored_graph, ops.pack)
    assert [spans(parts.of(pack)) for pack in packs] == [[(0, 16, {replica})] for replica in range(3)]
    for wait in targets(program.mirrored_graph, ops.wait):
        part = parts.of(wait)
        assert part is not None and part.holds(GRADIENTS, 0, 0, 16, range(3))
        assert not part.holds(GRADIENTS, 1, 0, 16, range(3)) and not part.holds(PARAMETERS, 0, 0, 16)
        assert not part.holds(GRADIENTS, 0, 0, 16, range(2)) and not part.holds(GRADIENTS, 0, 0, 8, range(3))


def test_sums_in_a_wider_dtype_are_the_same_elements_when_they_are_cast_back() -> None:
    program = reduced()
    packs = targets(program.mirrored_graph, ops.pack)

    def cast(node: fx.Node, dtype: torch.dtype) -> fx.Node:
        return insert(program, program.mirrored_graph.output_node(), aten._to_copy.default, (node,), {"dtype": dtype})

    wide = value(program, aten.add.Tensor, *(cast(pack, torch.float64) for pack in packs))
    mixed = value(program, aten.add.Tensor, cast(packs[0], torch.float64), packs[1])
    narrow = value(program, aten.add.Tensor, *(cast(pack, torch.bfloat16) for pack in packs))
    again, rounded, other = (cast(node, torch.float32) for node in (wide, narrow, cast(wide, torch.bfloat16)))
    parts = BucketParts(program)
    assert spans(parts.of(wide)) == spans(parts.of(again)) == [(0, 16, {0, 1})]
    assert [len(part.steps) for part in map(parts.of, (wide, again, rounded, other)) if part] == [1, 0, 2, 3]
    assert parts.of(mixed) is None


def test_slices_sums_and_concatenations() -> None:
    program = reduced()
    one, other = targets(program.mirrored_graph, ops.pack)
    low, high = (value(program, aten.slice.Tensor, one, 0, start, start + 8) for start in (0, 8))
    theirs = value(program, aten.slice.Tensor, other, 0, -8)
    added = value(program, aten.add.Tensor, high, theirs)
    whole = value(program, aten.cat.default, [low, added])
    cut = value(program, aten.slice.Tensor, whole, 0, 4, 12)
    parts = BucketParts(program)
    assert spans(parts.of(theirs)) == [(8, 16, {1})]
    assert spans(parts.of(added)) == [(8, 16, {0, 1})]
    assert spans(parts.of(whole)) == [(0, 8, {0}), (8, 16, {0, 1})]
    assert spans(parts.of(cut)) == [(4, 8, {0}), (8, 12, {0, 1})]
    twice = value(program, aten.cat.default, [low, low])
    found = BucketParts(program).of(twice)
    assert found is not None and not found.holds(GRADIENTS, 0, 0, 16)


@pytest.mark.parametrize(
    "wrong",
    [
        lambda p, one, other: value(p, aten.add.Tensor, one, one),  # a replica's own gradients twice
        lambda p, one, other: value(
            p, aten.add.Tensor, value(p, aten.slice.Tensor, one, 0, 0, 8), value(p, aten.slice.Tensor, other, 0, 8, 16)
        ),
        lambda p, one, other: value(p, aten.add.Tensor, one, value(p, aten.mul.Tensor, other, 2.0)),
        lambda p, one, other: value(p, aten.slice.Tensor, one, 0, 0, 16, 2),
    ],
)
def test_what_is_no_sum_of_different_replicas_is_no_part(wrong: Callable[..., fx.Node]) -> None:
    program = reduced()
    assert BucketParts(program).of(wrong(program, *targets(program.mirrored_graph, ops.pack))) is None


def test_operators_that_change_a_part_are_its_steps() -> None:
    program = reduced()
    one, _ = targets(program.mirrored_graph, ops.pack)
    same, scaled = value(program, aten.clone.default, one), value(program, aten.mul.Tensor, one, 2.0)
    found = [BucketParts(program).of(node) for node in (one, same, scaled)]
    assert [part is not None and len(part.steps) for part in found] == [0, 0, 1]
    assert spans(found[2]) == spans(found[0])


def test_parameters_are_followed_from_the_replica_that_has_made_them() -> None:
    weights = [Weight("a", rule=MUON), Weight("b", rule=MUON)]
    for name in ("insert-update", "lower-collectives", "lower-devices"):
        program = run_up_to(name, handmade(3, weights), **SMALL_BUCKETS)
        parts = BucketParts(program)
        stores = [store for graph in program.graphs() for store in targets(graph, ops.store)]
        assert len(stores) == 4
        for store in stores:
            part = parts.of(store.args[0])
            assert part is not None and part.holds(PARAMETERS, store.kwargs["bucket"], 0, 16, [0])
