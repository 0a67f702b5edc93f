"""Bytes of sums between devices, by what joins them."""

from dataclasses import replace

import pytest

from mirrorc.analysis.cost.link_speed import bytes_of_sum_received
from mirrorc.ir.links import link_named


@pytest.mark.parametrize(("link", "expected"), [("shared-memory", 75.0), ("nccl", 150.0), ("copy", 300.0)])
def test_bytes_that_a_device_receives(link: str, expected: float) -> None:
    assert bytes_of_sum_received(link_named(link), 100, 4) == expected
    assert bytes_of_sum_received(replace(link_named(link), name="other"), 100, 1) == 0.0
