"""The time of the compiler grows in proportion to the program: passes, verifier and printing, counted in calls."""

import sys
from collections.abc import Sequence
from typing import Any

import pytest
from deep_program import deep_program
from selections import slow

from mirrorc.dumps.files import PassReport
from mirrorc.ir.program import Program
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.verifier.verifier import Verify


class Printing(Instrument):
    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        PassReport(compiler_pass.name, after, before, seconds * 1e3).text()


def num_calls(num_nodes: int, bucket_cap_mb: float, instruments: Sequence[Instrument]) -> int:
    program = deep_program(num_nodes, num_devices=2)
    pipeline = default_pipeline(buckets=ByBytes(bucket_cap_mb, bucket_cap_mb))
    calls = 0

    def count(frame: Any, event: str, argument: Any) -> None:
        nonlocal calls
        calls += event in ("call", "c_call")

    traced = sys.getprofile()
    sys.setprofile(count)
    try:
        run_passes(program, pipeline, instruments)
    finally:
        sys.setprofile(traced)
    return calls


@pytest.mark.slow
@pytest.mark.parametrize("bucket_cap_mb", [25, *slow((0.02,))], ids=["one bucket", "a bucket for each layer"])
def test_twice_the_layers_take_twice_the_calls(bucket_cap_mb: float) -> None:
    num_calls(50, bucket_cap_mb, [Verify(), Printing()])  # fills caches
    small, medium, large = (num_calls(number, bucket_cap_mb, [Verify(), Printing()]) for number in (200, 400, 800))
    # The ratio is 2.00 to 2.03. A search through all variables for each gradient, which there was once, made it 2.07.
    assert (large - medium) / (medium - small) < 2.05


@pytest.mark.slow
def test_twice_as_many_gradients_of_a_bucket_take_twice_the_calls_of_passes() -> None:
    small, medium, large = (num_calls(number, 25, []) for number in (800, 1600, 3200))
    # The ratio is 2.00. Sizes of a bucket's gradients, which were added up anew for each gradient, made it 2.5.
    assert (large - medium) / (medium - small) < 2.05
