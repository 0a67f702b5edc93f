import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mirrorc.program import Stage, share_bounds
from tiny_programs import handmade, run_up_to


@given(num_elements=st.integers(0, 10_000), num_shares=st.integers(1, 17))
def test_shares_cover_a_bucket_and_are_disjoint(num_elements: int, num_shares: int) -> None:
    bounds = [share_bounds(num_elements, num_shares, index) for index in range(num_shares)]
    assert bounds[0][0] == 0 and bounds[-1][1] == num_elements
    assert all(stop == start for (_, stop), (start, _) in zip(bounds, bounds[1:], strict=False))
    assert all(start <= stop for start, stop in bounds)
    assert all(start % 64 == 0 for start, stop in bounds if start < stop)


@given(num_elements=st.integers(0, 10_000), num_shares=st.integers(1, 17))
def test_shares_are_balanced(num_elements: int, num_shares: int) -> None:
    sizes = [stop - start for start, stop in (share_bounds(num_elements, num_shares, i) for i in range(num_shares))]
    assert max(sizes) - min(sizes) <= 2 * 64


def test_a_bucket_that_is_not_shared_out_is_every_replicas() -> None:
    (bucket,) = run_up_to("plan-buckets", handmade()).buckets
    assert bucket.share(0) == bucket.share(1) == (0, bucket.num_elements)
    assert not dataclasses.replace(bucket, num_shares=2).has_a_share_for_all()
    assert dataclasses.replace(bucket, num_shares=2, num_elements=128).has_a_share_for_all()
    assert bucket.num_bytes == bucket.num_elements * 4


def test_programs_are_frozen_and_evolve_by_copies() -> None:
    program = handmade()
    later = program.evolve(stage=Stage.OUTLINED)
    assert (program.stage, later.stage) == (Stage.CAPTURED, Stage.OUTLINED) and later.variables is program.variables
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.stage = Stage.LOWERED  # type: ignore[misc]


def test_operations_of_the_ir_cannot_be_called() -> None:
    from mirrorc import ops

    with pytest.raises(TypeError, match="all_reduce is an operation of the IR"):
        ops.all_reduce(torch.zeros(1), bucket=0, op="sum")
