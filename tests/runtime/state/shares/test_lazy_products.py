"""What is said of products before they are made is what is found when they are."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st

from mirrorc.analysis.gradients.factored_gradients import FactoredSlot
from mirrorc.analysis.gradients.tiled_updates import is_bounded_by_factors, is_measured_by_factors
from mirrorc.ir.buckets import Bucket, Slot
from mirrorc.ir.gradient_forms import PRODUCT
from mirrorc.ir.variables import Placement, UpdateRule
from mirrorc.runtime.state.shares.gradient_shares import make_or_leave, make_share, pieces_of_share
from mirrorc.runtime.state.shares.lazy_pieces import UnmadePieces, are_finite, norm_of_unmade
from mirrorc.runtime.state.shares.lazy_products import bytes_to_measure
from mirrorc.runtime.state.shares.pieces import FactoredBucket, Leaves, Visit

Shape = tuple[int, int]


NOTHING = Visit(lambda part: None)


def buckets_of(
    shapes: Sequence[Shape], rows: Sequence[int], exponent: int = 0, dtype: torch.dtype = torch.float32
) -> list[FactoredBucket]:
    """A bucket of products on each replica, in memory that holds sevens; each replica has so many examples, in two parts."""
    slots, offset = [], 0
    for i, shape in enumerate(shapes):
        slots.append(Slot(f"w{i}", shape, (shape[1], 1), offset, shape[0] * shape[1]))
        offset += -(-slots[-1].num_elements // 16) * 16
    bucket = Bucket(0, dtype, tuple(slots), offset, UpdateRule("AdamW group 0", 0), Placement.SHARED)
    factored = [FactoredSlot(i, PRODUCT) for i in range(len(shapes))]
    found = []
    for replica, k in enumerate(rows):
        factors = []
        for m, n in shapes:
            left = torch.randn(k, m, dtype=torch.float64).mul_(10.0**exponent).to(dtype).t()
            right, cut = torch.randn(k, n).to(dtype), k // 2
            factors.append([(left[:, :cut], right[:cut]), (left[:, cut:], right[cut:])])
        flat = torch.full((offset,), 7.0, dtype=dtype)
        found.append(FactoredBucket(flat, factors, pieces_of_share(bucket, factored, replica, len(rows))))
    return found


def left_unmade(buckets: Sequence[FactoredBucket], replica: int, leaves: Leaves | None = None) -> UnmadePieces | None:
    """Makes a replica's share, without what is left of it."""
    return make_or_leave(buckets, replica, NOTHING, leaves or (lambda size, dtype: size[2] > 0))


@fuzzed(60)
@given(
    shapes=st.lists(st.sampled_from([(40, 60), (17, 5), (1, 90), (64, 64)]), min_size=1, max_size=4),
    rows=st.lists(st.integers(0, 4), min_size=1, max_size=4),
    exponent=st.integers(-25, 15),
)
def test_a_norm_is_that_of_the_products(shapes: list[Shape], rows: list[int], exponent: int) -> None:
    """On any number of replicas, with batches of any size, in numbers as small and as large as factors may be."""
    buckets = buckets_of(shapes, rows, exponent)
    unmade = [one for r in range(len(rows)) if (one := left_unmade(buckets, r)) is not None]
    assert all(torch.equal(one.tensor, torch.full_like(one.tensor, 7.0)) for one in buckets) or sum(rows) == 0
    norm = norm_of_unmade(unmade) if unmade else None
    for one in unmade:
        one.make()
    expected = []
    for place in range(len(shapes)):
        parts = [part for bucket in buckets for part in bucket.factors[place]]
        expected.append(sum(left.double() @ right.double() for left, right in parts))
    exact = torch.cat([one.flatten() for one in expected]).norm().item()  # type: ignore[union-attr]
    assert norm is None or norm == pytest.approx(exact, rel=1e-6)
    assert norm is not None or exact == 0.0 or exact < 1e-30
    offset = 0
    for one in expected:
        found = buckets[0].tensor[offset : offset + one.numel()].view(one.shape)  # type: ignore[union-attr]
        torch.testing.assert_close(found, one.float(), rtol=1e-4, atol=1e-5 * 10.0**exponent)  # type: ignore[union-attr]
        offset += -(-one.numel() // 16) * 16  # type: ignore[union-attr]


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e25])
def test_no_norm_is_told_of_what_may_not_be_finite(value: float) -> None:
    buckets = buckets_of([(40, 60)], [2, 2])
    left, right = buckets[1].factors[0][1]
    left[0, 0], right[0, 0] = value, 1e14
    unmade = [left_unmade(buckets, r) for r in range(2)]
    assert norm_of_unmade([one for one in unmade if one]) is None
    assert not are_finite([one for one in unmade if one])


@pytest.mark.parametrize("small", [0.0, 1e-3, 1e-9])
def test_what_cancels_is_measured_with_more_digits_or_not_at_all(small: float) -> None:
    (bucket,) = buckets_of([(40, 60)], [2])
    (left, right), (others, more) = bucket.factors[0]
    others.copy_(-left)
    more.copy_(right * (1.0 + small))
    unmade = left_unmade([bucket], 0)
    assert unmade is not None
    norm, exact = norm_of_unmade([unmade]), (left.double() @ right.double() + others.double() @ more.double()).norm()
    assert norm is None if small < 1e-6 else norm == pytest.approx(exact.item(), rel=1e-6)


@fuzzed(60)
@given(
    dtype=st.sampled_from([torch.float32, torch.float64, torch.bfloat16, torch.float16]),
    rows=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    exponent=st.integers(-40, 40),
)
def test_what_is_said_to_be_finite_is(dtype: torch.dtype, rows: list[int], exponent: int) -> None:
    buckets = buckets_of([(40, 60), (30, 8)], rows, exponent, dtype)
    unmade = [one for r in range(len(rows)) if (one := left_unmade(buckets, r)) is not None]
    said = are_finite(unmade)
    for one in unmade:
        one.make()
    assert not said or bool(buckets[0].tensor.isfinite().all())
    assert said or exponent > 0, "small numbers are known to be finite"


@pytest.mark.parametrize("factor", [0.25, -3.0])
def test_products_are_made_times_a_factor(factor: float) -> None:
    """Exactly so for a power of two; the rest of the share is multiplied, and what others make is left alone."""
    made, scaled = (buckets_of([(40, 60), (3, 3), (17, 5)], [2, 3]) for _ in range(2))
    for one, other in zip(made, scaled, strict=True):
        for parts, others in zip(one.factors, other.factors, strict=True):
            for (left, right), (same_left, same_right) in zip(parts, others, strict=True):
                same_left.copy_(left)
                same_right.copy_(right)
    for replica in range(2):
        make_share(made, replica)
    unmade = left_unmade(scaled, 0, lambda size, dtype: size[0] > 9)
    end = scaled[0].pieces[-1].stop
    assert unmade is not None and unmade.rest_is_small
    unmade.make_scaled(factor)
    torch.testing.assert_close(scaled[0].tensor[:end], made[0].tensor[:end] * factor, rtol=1e-5, atol=1e-6)
    if factor == 0.25:
        assert torch.equal(scaled[0].tensor[:end], made[0].tensor[:end] * factor)
    assert torch.equal(scaled[0].tensor[end:], torch.full_like(scaled[0].tensor[end:], 7.0))


def test_products_are_left_where_their_factors_are_smaller() -> None:
    assert is_measured_by_factors((1024, 2048, 16), torch.float32)
    assert not is_measured_by_factors((1024, 2048, 16), torch.float64), "nothing more exact measures them"
    assert not is_measured_by_factors((1024, 2048, 128), torch.float32), "the squares of the factors take longer"
    assert not is_measured_by_factors((1024, 2048, 0), torch.float32), "zeros, which have no factors"
    assert is_bounded_by_factors((1024, 2048, 128), torch.float64)
    assert not is_bounded_by_factors((1024, 2048, 1024), torch.float64)
    assert not is_bounded_by_factors((1024, 2048, 128), torch.complex64)


def test_joined_factors_are_counted() -> None:
    buckets = buckets_of([(40, 60), (4, 4)], [1, 1])
    for replica, bucket in enumerate(buckets):
        unmade = left_unmade(buckets, replica, is_measured_by_factors)
        counted = bytes_to_measure(bucket.pieces, [one.factors for one in buckets])
        assert (unmade is not None) == (counted > 0)
        if unmade is not None:
            norm_of_unmade([unmade])
            assert counted == sum(f.nbytes for one in unmade.products for pair in one.pairs for f in pair)
