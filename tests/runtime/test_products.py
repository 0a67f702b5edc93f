from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mirrorc.program import Bucket, Placement, Slot, UpdateRule
from mirrorc.runtime.products import FactoredBucket, copied_elements, make_share, pieces_of_share
from mirrorc.torch_internals import peak_allocation

RULE = UpdateRule("AdamW group 0", 0)


def bucket_of(shapes: Sequence[tuple[int, int]]) -> Bucket:
    """A bucket of matrices, aligned as `PlanBuckets` does."""
    slots, offset = [], 0
    for i, shape in enumerate(shapes):
        slots.append(Slot(f"w{i}", shape, (shape[1], 1), offset, shape[0] * shape[1]))
        offset += -(-slots[-1].num_elements // 16) * 16
    return Bucket(0, torch.float64, tuple(slots), offset, RULE, Placement.SHARED)


@settings(max_examples=60, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    which=st.lists(st.booleans(), min_size=5, max_size=5),
    rows=st.lists(st.integers(0, 30), min_size=1, max_size=4),
)
def test_shares_are_the_sum_of_all_replicas_gradients(
    shapes: list[tuple[int, int]], which: list[bool], rows: list[int]
) -> None:
    """Whatever is factored, on any number of replicas, with batches of any size; nothing is written outside of a share."""
    bucket, num_replicas = bucket_of(shapes), len(rows)
    factored = [i for i in range(len(shapes)) if which[i]]
    expected = torch.zeros(bucket.num_elements, dtype=torch.float64)
    buckets = []
    for replica, k in enumerate(rows):
        flat = torch.zeros(bucket.num_elements, dtype=torch.float64)
        factors = []
        for i, slot in enumerate(bucket.slots):
            left, right = torch.rand(k, slot.shape[0], dtype=torch.float64).t(), torch.rand(k, slot.shape[1]).double()
            gradient = (left @ right).flatten()
            place = slice(slot.offset, slot.offset + slot.num_elements)
            expected[place] += gradient
            flat[place] = 777.0 if i in factored else gradient  # what nobody made is not looked at
            factors += [(left, right)] if i in factored else []
        buckets.append(FactoredBucket(flat, factors, pieces_of_share(bucket, factored, replica, num_replicas)))
    for replica in reversed(range(num_replicas)):
        before = buckets[0].tensor.clone()
        make_share(buckets, replica)
        start, stop = bucket.share(replica, num_replicas)
        own = torch.zeros(bucket.num_elements, dtype=torch.bool)
        own[start:stop] = True
        assert torch.equal(buckets[0].tensor[~own], before[~own])
    for slot in bucket.slots:
        place = slice(slot.offset, slot.offset + slot.num_elements)
        torch.testing.assert_close(buckets[0].tensor[place], expected[place])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [2, 300])
def test_both_ways_to_multiply_agree(dtype: torch.dtype, k: int) -> None:
    """Few rows are multiplied side by side, many one after the other."""
    bucket = bucket_of([(96, 64)])
    pairs = [(torch.rand(k, 96, dtype=dtype).t(), torch.rand(k, 64, dtype=dtype)) for _ in range(2)]
    flats = [torch.zeros(bucket.num_elements, dtype=dtype) for _ in pairs]
    buckets = [
        FactoredBucket(flat, [pair], pieces_of_share(bucket, [0], replica, 2))
        for replica, (flat, pair) in enumerate(zip(flats, pairs, strict=True))
    ]
    for replica in range(2):
        make_share(buckets, replica)
    expected = sum(left.float() @ right.float() for left, right in pairs)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(flats[0].view(96, 64).float(), expected, rtol=tolerance, atol=tolerance)


def test_no_rows_at_all_give_zeros() -> None:
    bucket = bucket_of([(8, 4)])
    flat = torch.full((bucket.num_elements,), 7.0)
    make_share([FactoredBucket(flat, [(torch.rand(8, 0), torch.rand(0, 4))], pieces_of_share(bucket, [0], 0, 1))], 0)
    assert torch.equal(flat[:32], torch.zeros(32))


@settings(max_examples=40, deadline=None)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=3),
    rows=st.lists(st.integers(1, 10), min_size=1, max_size=4),
)
def test_what_a_share_copies_is_known_before(shapes: list[tuple[int, int]], rows: list[int]) -> None:
    """The elements of factors that are put side by side, counted against what torch allocates."""
    bucket, num_replicas = bucket_of(shapes), len(rows)
    factored = list(range(len(shapes)))
    pairs = [
        [(torch.ones(m, k, dtype=torch.float64), torch.ones(k, n, dtype=torch.float64)) for m, n in shapes]
        for k in rows
    ]
    for replica in range(num_replicas):
        pieces = pieces_of_share(bucket, factored, replica, num_replicas)
        buckets = [FactoredBucket(torch.zeros(bucket.num_elements, dtype=torch.float64), own, pieces) for own in pairs]
        given_ = [own.tensor for own in buckets] + [factor for own in pairs for pair in own for factor in pair]
        taken = peak_allocation(lambda buckets=buckets, replica=replica: make_share(buckets, replica), given_)
        assert taken == 8 * copied_elements(pieces, pairs)
