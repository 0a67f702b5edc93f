import dataclasses
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_programs import handmade, run_up_to

from mirrorc.ir import ops
from mirrorc.ir.program import Stage
from mirrorc.ir.variables import Placement, share_bounds


@given(num_elements=st.integers(0, 10_000), num_shares=st.integers(1, 17))
def test_shares_cover_a_bucket_and_are_disjoint(num_elements: int, num_shares: int) -> None:
    bounds = [share_bounds(num_elements, num_shares, index) for index in range(num_shares)]
    assert bounds[0][0] == 0 and bounds[-1][1] == num_elements
    assert all(stop == start for (_, stop), (start, _) in pairwise(bounds))
    assert all(start <= stop for start, stop in bounds)
    assert all(start % 64 == 0 for start, stop in bounds if start < stop)


@given(num_elements=st.integers(0, 10_000), num_shares=st.integers(1, 17))
def test_shares_are_balanced(num_elements: int, num_shares: int) -> None:
    sizes = [stop - start for start, stop in (share_bounds(num_elements, num_shares, i) for i in range(num_shares))]
    assert max(sizes) - min(sizes) <= 2 * 64


def test_a_bucket_that_is_not_shared_out_is_every_replicas() -> None:
    (bucket,) = run_up_to("plan-buckets", handmade()).buckets
    assert bucket.share(0, 2) == bucket.share(1, 2) == (0, bucket.num_elements)
    shared = dataclasses.replace(bucket, placement=Placement.SHARED, num_elements=200)
    assert [shared.share(replica, 2) for replica in (0, 1)] == [(0, 128), (128, 200)]
    assert bucket.num_bytes == bucket.num_elements * 4


def test_programs_are_frozen_and_evolve_by_copies() -> None:
    program = handmade()
    later = program.evolve(stage=Stage.OUTLINED)
    assert (program.stage, later.stage) == (Stage.CAPTURED, Stage.OUTLINED) and later.variables is program.variables
    with pytest.raises(dataclasses.FrozenInstanceError):
        program.stage = Stage.LOWERED  # type: ignore[misc]


def test_operations_of_the_ir_cannot_be_called() -> None:
    with pytest.raises(TypeError, match="all_reduce is an operation of the IR"):
        ops.all_reduce(torch.zeros(1), bucket=0, op="sum")
