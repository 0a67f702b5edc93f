import math
from collections.abc import Sequence
from functools import partial

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st

from mirrorc.analysis.gradients.factored_gradients import FactoredSlot
from mirrorc.ir.buckets import Bucket, Slot
from mirrorc.ir.gradient_forms import PRODUCT, TABLE
from mirrorc.ir.variables import Placement, UpdateRule
from mirrorc.runtime.state.shares import pieces as share_pieces
from mirrorc.runtime.state.shares import product_pieces
from mirrorc.runtime.state.shares.pieces import (
    FactoredBucket,
    UnmadeShare,
    Visit,
    forget_writes,
    make_pieces,
    pieces_of_share,
    temporary_bytes,
)
from mirrorc.torch_internals import peak_allocation

RULE = UpdateRule("AdamW group 0", 0)


def bucket_of(shapes: Sequence[tuple[int, int]]) -> Bucket:
    slots, offset = [], 0
    for i, shape in enumerate(shapes):
        slots.append(Slot(f"w{i}", shape, (shape[1], 1), offset, shape[0] * shape[1]))
        offset += -(-slots[-1].num_elements // 16) * 16
    return Bucket(0, torch.float64, tuple(slots), offset, RULE, Placement.SHARED)


@pytest.mark.slow
@fuzzed(60)
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
    factored = [FactoredSlot(i, PRODUCT) for i in range(len(shapes)) if which[i]]
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
            flat[place] = 777.0 if which[i] else gradient  # what nobody made is not looked at
            cut = k // 2  # two microbatches
            parts = [(left[:, :cut], right[:cut]), (left[:, cut:], right[cut:])]
            factors += [parts] if which[i] else []
        buckets.append(FactoredBucket(flat, factors, pieces_of_share(bucket, factored, replica, num_replicas)))
    for replica in reversed(range(num_replicas)):
        before = buckets[0].tensor.clone()
        make_pieces(buckets[replica].pieces, buckets)
        start, stop = bucket.share(replica, num_replicas)
        own = torch.zeros(bucket.num_elements, dtype=torch.bool)
        own[start:stop] = True
        assert torch.equal(buckets[0].tensor[~own], before[~own])
    for slot in bucket.slots:
        place = slice(slot.offset, slot.offset + slot.num_elements)
        torch.testing.assert_close(buckets[0].tensor[place], expected[place])


@pytest.mark.slow
@fuzzed(12)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=5),
    which=st.lists(st.sampled_from(["product", "table", "whole"]), min_size=5, max_size=5),
    rows=st.lists(st.integers(0, 30), min_size=1, max_size=4).filter(any),
    num_elements=st.integers(1, 300),
)
def test_shares_in_parts_are_shares(
    shapes: list[tuple[int, int]], which: list[str], rows: list[int], num_elements: int
) -> None:
    """The parts of a share, one after the other, are the share; what is made in parts is not written into the bucket."""
    bucket, num_replicas = bucket_of(shapes), len(rows)
    forms = {"product": FactoredSlot, "table": partial(FactoredSlot, details={"padding_idx": -1})}
    factored = [
        forms[kind](i, {"product": PRODUCT, "table": TABLE}[kind])
        for i, kind in enumerate(which[: len(shapes)])
        if kind in forms
    ]
    buckets = []
    for replica, k in enumerate(rows):
        factors = []
        for slot in factored:
            m, n = bucket.slots[slot.place].shape
            right = torch.rand(k, n, dtype=torch.float64)
            left = torch.rand(k, m, dtype=torch.float64).t()
            factors.append([(left, right) if slot.form is PRODUCT else (right, torch.randint(0, m, (k,)))])
        flat = torch.rand(bucket.num_elements, dtype=torch.float64)
        for slot in factored:
            own = bucket.slots[slot.place]
            flat[own.offset : own.offset + own.num_elements] = 0.0
        pieces = pieces_of_share(bucket, factored, replica, num_replicas)
        buckets.append(FactoredBucket(flat, factors if k else (), pieces))
    for replica in range(num_replicas):
        before = buckets[0].tensor.clone()
        start, stop = bucket.share(replica, num_replicas)
        share, found = UnmadeShare(buckets, buckets[replica].pieces, start, stop), []
        if start == stop:
            continue
        memory = torch.full((share.largest_part(num_elements),), math.nan, dtype=torch.float64)

        def take(first: int, part: torch.Tensor, found: list[torch.Tensor] = found) -> None:
            assert first == sum(map(len, found)) and 0 < len(part) <= num_elements
            found.append(part.clone())

        share.make_parts(num_elements, memory, take)
        in_parts = [
            piece
            for piece in share.pieces
            if piece.largest_part(num_elements, [own.factors for own in buckets if own.factors])
        ]
        assert bool(in_parts) == bool(len(memory))
        for piece in in_parts:
            assert torch.equal(buckets[0].tensor[piece.start : piece.stop], before[piece.start : piece.stop])
        buckets[0].tensor[start:stop] = before[start:stop]
        forget_writes(share.pieces)
        torch.testing.assert_close(torch.cat(found), share.make())
        assert len(torch.cat(found)) == stop - start


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("k", [2, 300])
def test_both_ways_to_multiply_agree(dtype: torch.dtype, k: int) -> None:
    """Few rows are multiplied side by side, many one after the other."""
    bucket = bucket_of([(96, 64)])
    pairs = [(torch.rand(k, 96, dtype=dtype).t(), torch.rand(k, 64, dtype=dtype)) for _ in range(2)]
    flats = [torch.zeros(bucket.num_elements, dtype=dtype) for _ in pairs]
    buckets = [
        FactoredBucket(flat, [[pair]], pieces_of_share(bucket, [FactoredSlot(0, PRODUCT)], replica, 2))
        for replica, (flat, pair) in enumerate(zip(flats, pairs, strict=True))
    ]
    for replica in range(2):
        make_pieces(buckets[replica].pieces, buckets)
    expected = sum(left.float() @ right.float() for left, right in pairs)
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(flats[0].view(96, 64).float(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("most", [1, 50, 2**18])
def test_parts_are_visited_in_order_when_they_are_whole(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of factored gradients, among them a table's, and of others, which are added up between them."""
    for module in (share_pieces, product_pieces):
        monkeypatch.setattr(module, "CACHED_ELEMENTS", most)
    bucket = bucket_of([(8, 4), (33, 16), (9, 5), (3, 3)])
    factored = [FactoredSlot(1, PRODUCT), FactoredSlot(2, TABLE, {"padding_idx": -1})]

    def made(num_replicas: int, visited: list[torch.Tensor] | None) -> torch.Tensor:
        torch.manual_seed(0)
        buckets = []
        for replica in range(num_replicas):
            flat = torch.zeros(bucket.num_elements, dtype=torch.float64)
            flat[:32], flat[-16:-7] = replica + 1.0, 5.0
            factors = [[(torch.rand(33, 2).double(), torch.rand(2, 16).double())],
                       [(torch.rand(4, 5).double(), torch.tensor([0, 8, 3, 3]))]]  # fmt: skip
            buckets.append(FactoredBucket(flat, factors, pieces_of_share(bucket, factored, replica, num_replicas)))
        for replica in range(num_replicas):
            make_pieces(
                buckets[replica].pieces,
                buckets,
                None if visited is None else Visit(lambda part: visited.append(part.clone())),
            )
        return buckets[0].tensor

    for num_replicas in (1, 2, 3):
        visited: list[torch.Tensor] = []
        expected, found = made(num_replicas, None), made(num_replicas, visited)
        torch.testing.assert_close(found, expected)
        parts = torch.cat(visited)
        assert torch.equal(parts[parts != 0], found[found != 0]), "in order, each once, with all that is added up"
        assert max(part.numel() for part in visited) <= max(most, 16), "a row is not divided"


def test_no_rows_at_all_give_zeros() -> None:
    bucket = bucket_of([(8, 4)])
    flat = torch.full((bucket.num_elements,), 7.0)
    pieces = pieces_of_share(bucket, [FactoredSlot(0, PRODUCT)], 0, 1)
    make_pieces(pieces, [FactoredBucket(flat, [[(torch.rand(8, 0), torch.rand(0, 4))]], pieces)])
    assert torch.equal(flat[:32], torch.zeros(32))


@pytest.mark.slow
@fuzzed(12)
@given(
    shape=st.tuples(st.integers(1, 60), st.integers(1, 40)),
    batches=st.lists(st.lists(st.integers(0, 30), min_size=3, max_size=3), min_size=1, max_size=4),
    num_replicas=st.integers(1, 3),
    padding_idx=st.integers(-1, 5),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
    forgets=st.lists(st.booleans(), min_size=4, max_size=4),
)
def test_a_tables_gradient_is_what_torch_makes_of_the_rows_step_by_step(
    shape: tuple[int, int],
    batches: list[list[int]],
    num_replicas: int,
    padding_idx: int,
    index_dtype: torch.dtype,
    forgets: list[bool],
) -> None:
    """Nothing of a step is left in the next one's; a table lies between slots that are added up."""
    bucket, kind = bucket_of([(2, 3), shape, (5, 1)]), FactoredSlot(1, TABLE, {"padding_idx": padding_idx})
    before, table, after = (slice(slot.offset, slot.offset + slot.num_elements) for slot in bucket.slots)
    pieces = [pieces_of_share(bucket, [kind], replica, num_replicas) for replica in range(num_replicas)]
    flats = [torch.full((bucket.num_elements,), 777.0, dtype=torch.float64) for _ in range(num_replicas)]
    for sizes, forget in zip(batches, forgets, strict=False):
        expected, buckets = torch.zeros(bucket.num_elements, dtype=torch.float64), []
        for flat, own, size in zip(flats, pieces, sizes, strict=False):
            indices = torch.randint(shape[0], (size, 2), dtype=index_dtype)
            rows = torch.randn(size, 2, shape[1], dtype=torch.float64)
            flat[before], flat[after] = 1.0, 2.0
            expected[before] += 1.0
            expected[after] += 2.0
            gradient = torch.ops.aten.embedding_dense_backward(rows, indices, shape[0], padding_idx, False)
            expected[table] += gradient.flatten()
            parts = [(rows[: size // 2], indices[: size // 2]), (rows[size // 2 :], indices[size // 2 :])]
            buckets.append(FactoredBucket(flat, [parts], own))
        for own in pieces:
            if forget:
                flats[0][table] = 777.0
                forget_writes(own)
        for replica in range(num_replicas):
            make_pieces(buckets[replica].pieces, buckets)
        for place in (before, table, after):
            torch.testing.assert_close(flats[0][place], expected[place], rtol=1e-12, atol=1e-12)


def test_rows_that_no_step_adds_to_are_not_touched() -> None:
    """It is known that they are zero: filling a large table again would cost more than all else."""
    bucket = bucket_of([(50, 4)])
    pieces = pieces_of_share(bucket, [FactoredSlot(0, TABLE)], 0, 1)
    flat = torch.full((bucket.num_elements,), 777.0)
    indices = torch.tensor([3, 7])
    made = FactoredBucket(flat, [[(torch.ones(2, 4), indices)]], pieces)
    make_pieces(made.pieces, [made])
    indices.fill_(0)  # the caller's memory
    assert flat.view(-1, 4)[:50].sum(1).nonzero().flatten().tolist() == [3, 7]
    flat[4 * 20] = 5.0  # as no step would
    make_pieces(pieces, [FactoredBucket(flat, [[(torch.ones(1, 4), torch.tensor([9]))]], pieces)])
    assert flat.view(-1, 4)[:50].sum(1).nonzero().flatten().tolist() == [9, 20]


@pytest.mark.slow
@fuzzed(40)
@given(
    shapes=st.lists(st.tuples(st.integers(1, 60), st.integers(1, 60)), min_size=1, max_size=3),
    rows=st.lists(st.integers(1, 10), min_size=1, max_size=4),
)
def test_what_a_share_copies_is_known_before(shapes: list[tuple[int, int]], rows: list[int]) -> None:
    """The bytes of factors that are put side by side, counted against what torch allocates."""
    bucket, num_replicas = bucket_of(shapes), len(rows)
    factored = [FactoredSlot(i, PRODUCT) for i in range(len(shapes))]
    pairs = [
        [
            [(torch.ones(m, part).double(), torch.ones(part, n).double()) for part in (k, 1)]  # two microbatches
            for m, n in shapes
        ]
        for k in rows
    ]
    for replica in range(num_replicas):
        pieces = pieces_of_share(bucket, factored, replica, num_replicas)
        buckets = [FactoredBucket(torch.zeros(bucket.num_elements, dtype=torch.float64), own, pieces) for own in pairs]
        given_ = [own.tensor for own in buckets] + [
            factor for own in pairs for parts in own for pair in parts for factor in pair
        ]
        taken = peak_allocation(
            lambda buckets=buckets, replica=replica: make_pieces(buckets[replica].pieces, buckets), given_
        )
        assert taken == temporary_bytes(pieces, pairs)
