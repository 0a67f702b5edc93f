"""What is said of tables before their rows are added is what is found when they are."""

import math
from collections.abc import Callable
from functools import partial

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st

from mirrorc.analysis.gradients.factored_gradients import FactoredSlot
from mirrorc.ir.buckets import Bucket, Slot
from mirrorc.ir.gradient_forms import TABLE
from mirrorc.ir.variables import Placement, UpdateRule, share_bounds
from mirrorc.runtime.state.shares.deferred_tables import (
    DeferredTable,
    are_finite,
    bytes_of_tables,
    bytes_to_measure_tables,
    norm_of_tables,
    select_rows,
)
from mirrorc.runtime.state.shares.pieces import (
    FactoredBucket,
    MadeShare,
    Visit,
    bounding_by,
    make_pieces,
    pieces_of_share,
    scaling_by,
)
from mirrorc.runtime.state.shares.product_pieces import TablePiece
from mirrorc.torch_internals import peak_allocation

Shape = tuple[int, int]


def buckets_of(
    shapes: list[Shape],
    rows: list[int],
    paddings: list[int],
    dtype: torch.dtype = torch.float64,
    index_dtype: torch.dtype = torch.int64,
) -> list[FactoredBucket]:
    """A bucket of tables on each replica, in memory that was never written; each replica has so many examples, in two parts."""
    slots, offset = [], 0
    for i, shape in enumerate(shapes):
        slots.append(Slot(f"w{i}", shape, (shape[1], 1), offset, shape[0] * shape[1]))
        offset += -(-slots[-1].num_elements // 16) * 16
    bucket = Bucket(0, dtype, tuple(slots), offset, UpdateRule("AdamW group 0", 0), Placement.SHARED)
    factored = [FactoredSlot(i, TABLE, {"padding_idx": paddings[i]}) for i in range(len(shapes))]
    found = []
    for replica, k in enumerate(rows):
        factors = []
        for num_rows, width in shapes:
            parts = [
                (torch.randn(n, width, dtype=dtype), torch.randint(num_rows, (n,), dtype=index_dtype))
                for n in (k // 2, k - k // 2)
            ]
            factors.append(parts)
        pieces = pieces_of_share(bucket, factored, replica, len(rows))
        found.append(FactoredBucket(torch.zeros(offset, dtype=dtype), factors, pieces))
    return found


def deferred_of(buckets: list[FactoredBucket]) -> list[DeferredTable]:
    deferred: list[DeferredTable] = []
    visit = Visit(lambda part: None, defer=lambda *piece: deferred.append(DeferredTable(*piece)))  # type: ignore[arg-type]
    for replica in range(len(buckets)):
        make_pieces(buckets[replica].pieces, buckets, visit)
    return deferred


@pytest.mark.slow
@fuzzed(60)
@given(
    shapes=st.lists(st.sampled_from([(200, 6), (150, 6), (90, 5), (4, 3)]), min_size=1, max_size=4),
    rows=st.lists(st.integers(0, 12), min_size=1, max_size=3).filter(any),
    paddings=st.lists(st.integers(-1, 3), min_size=4, max_size=4),
    index_dtype=st.sampled_from([torch.int32, torch.int64]),
)
def test_a_norm_is_that_of_the_tables(
    shapes: list[Shape], rows: list[int], paddings: list[int], index_dtype: torch.dtype
) -> None:
    """Rows that are added to one another count as their sum; shares begin within rows."""
    buckets = buckets_of(shapes, rows, paddings, index_dtype=index_dtype)
    deferred, whole = deferred_of(buckets), buckets[0].tensor
    norm = norm_of_tables(deferred) if deferred else 0.0
    assert norm is not None and (not deferred or are_finite(deferred))
    made = whole.norm().item()  # what was too small, or had too many rows, to be deferred
    for table in deferred:
        table.make()
    assert math.hypot(norm, made) == pytest.approx(whole.norm().item(), rel=1e-12)
    expected = torch.zeros_like(whole)
    for place, (num_rows, width) in enumerate(shapes):
        start = sum(-(-m * n // 16) * 16 for m, n in shapes[:place])
        for bucket in buckets:
            for values, indices in bucket.factors[place]:
                gradient = torch.ops.aten.embedding_dense_backward(values, indices, num_rows, paddings[place], False)
                expected[start : start + num_rows * width] += gradient.flatten()
    torch.testing.assert_close(whole, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("look", [list, select_rows, norm_of_tables])
def test_tables_are_those_that_are_made_at_once(look: Callable[[list[DeferredTable]], object]) -> None:
    """Whatever was asked of them before; nothing of them is left in the next step."""
    buckets = buckets_of([(200, 6), (3, 3), (90, 5)], [3, 4], [-1, 0, 2])
    make_pieces(buckets[0].pieces, buckets)
    make_pieces(buckets[1].pieces, buckets)
    expected = buckets[0].tensor.clone()
    deferred = deferred_of(buckets)
    look(deferred)
    for table in deferred:
        table.make()
    assert len(deferred) == 3
    torch.testing.assert_close(buckets[0].tensor, expected)
    make_pieces(buckets[0].pieces, buckets)
    make_pieces(buckets[1].pieces, buckets)
    assert torch.equal(buckets[0].tensor, expected)


@pytest.mark.parametrize(
    ("change", "same"),
    [(scaling_by(0.5), lambda whole: whole * 0.5), (bounding_by(0.3), partial(torch.clamp, min=-0.3, max=0.3))],
)
def test_rows_of_a_step_alone_are_changed_where_they_lie(change: Visit, same: object) -> None:
    """Each once, also those that several rows were added to."""
    for num_replicas in (1, 2, 3):
        buckets = buckets_of([(200, 6), (3, 3), (90, 5)], [9] * num_replicas, [-1, 0, 2])
        whole = buckets[0].tensor
        for _, indices in (part for bucket in buckets for parts in bucket.factors for part in parts):
            indices[1:3] = indices[0]
        for replica in range(num_replicas):
            make_pieces(buckets[replica].pieces, buckets)
        expected = same(whole)  # type: ignore[operator]
        for replica, bucket in enumerate(buckets):
            start, stop = share_bounds(whole.numel(), num_replicas, replica)
            assert MadeShare(bucket.pieces, start).visit(whole[start:stop], change)
        assert torch.equal(whole, expected)


def test_a_share_of_which_little_is_known_is_not_visited() -> None:
    (bucket,) = buckets_of([(200, 6)], [150], [-1])
    changed = Visit(lambda part: part.zero_(), writes=True)
    assert not MadeShare().visit(bucket.tensor, changed), "nothing is known"
    assert not MadeShare(bucket.pieces).visit(bucket.tensor, changed), "nothing was made yet"
    make_pieces(bucket.pieces, [bucket])
    assert not MadeShare(bucket.pieces).visit(bucket.tensor, changed), "there are many rows"
    bucket.pieces[0].visit_made(bucket.tensor, changed)
    assert not bucket.tensor.any(), "then all of the table is visited"


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e38])
def test_what_may_not_be_finite_is_not_said_to_be(value: float) -> None:
    buckets = buckets_of([(200, 6)], [2, 2], [-1], torch.float32)
    rows, indices = buckets[1].factors[0][1]
    rows[0, 0] = value
    indices.fill_(3)  # in the first share
    deferred = deferred_of(buckets)
    assert not are_finite(deferred)
    assert norm_of_tables(deferred[1:]) is not None
    norm = norm_of_tables(deferred)
    assert norm is None if not math.isfinite(value) else norm == pytest.approx(value)


def test_tables_are_deferred_where_a_step_adds_few_rows() -> None:
    def has_few_rows(num_rows: int, num_added: int, dtype: torch.dtype) -> bool:
        piece = TablePiece(0, num_rows * 2, 0, slice(0, num_rows), slice(0, 2))
        return piece.has_few_rows([(torch.ones(num_added, 2, dtype=dtype), torch.ones(num_added))])

    assert has_few_rows(100, 49, torch.float32)
    assert not has_few_rows(100, 50, torch.float32)
    assert not has_few_rows(100, 0, torch.float32), "no example at all"
    assert not has_few_rows(100, 2, torch.complex64)


@pytest.mark.slow
def test_what_is_copied_to_measure_tables_is_counted() -> None:
    """But for numbers of rows, which are small."""
    buckets = buckets_of([(2000, 600), (4, 4)], [100, 100], [-1, -1])
    for bucket in buckets:
        for _, indices in bucket.factors[0]:
            indices.copy_(torch.arange(len(indices)) * (2000 // len(indices)))
    deferred = [table for table in deferred_of(buckets) if table.piece in buckets[0].pieces]
    factors = [bucket.factors for bucket in buckets]
    given_ = [tensor for own in factors for parts in own for part in parts for tensor in part]
    taken = peak_allocation(lambda: norm_of_tables(deferred), given_)
    kept, counted = (count(buckets[0].pieces, factors) for count in (bytes_of_tables, bytes_to_measure_tables))
    assert 0.9 * taken < counted + kept < 1.1 * taken
    (rows,) = select_rows(deferred)
    assert 0.9 * rows.nbytes < kept < 1.1 * rows.nbytes
