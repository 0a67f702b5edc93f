"""What a replica learns of its values before it commits."""

import math

import pytest
import torch

from mirrorc.runtime.execution.commit.finite_checks import Examined, examined, sums_are_finite

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64, torch.complex64)


@pytest.mark.parametrize("at_once", [False, True])
def test_one_element_that_is_not_finite_is_enough(at_once: bool) -> None:
    """Whether values are asked for one by one, as on the CPU, or at once, as on a GPU."""
    for bad in (math.nan, math.inf, -math.inf):
        for size in (1, 7, 8, 33, 1000, 5000):
            for dtype in DTYPES:
                good = [examined(torch.ones(size, dtype=other)) for other in DTYPES]
                assert sums_are_finite(good, at_once=at_once)
                for place in {0, size // 2, size - 1}:
                    value = torch.ones(size, dtype=dtype)
                    value[place] = bad
                    assert not sums_are_finite([*good, examined(value)], at_once=at_once), (bad, size, dtype, place)
                    value[(place + 1) % size] = -bad
                    assert not sums_are_finite([examined(value), *good], at_once=at_once)


def test_sums_of_halves_overflow_late_and_nothing_is_finite() -> None:
    value = torch.full((5000,), torch.finfo(torch.float16).max, dtype=torch.float16)
    assert sums_are_finite([examined(value), examined(torch.zeros(0))], at_once=False)
    found = examined(value)
    assert isinstance(found, Examined) and found.value is value and found.total.dtype == torch.float32
