import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mirrorc.pass_manager import Pass
from mirrorc.pass_specs import format_passes, parse_passes
from mirrorc.passes import PASSES, LowerCollectives, OutlineRegions, PlanBuckets, default_pipeline
from mirrorc.program import Program, Stage


@dataclass(frozen=True)
class MyPass:
    words: tuple[str, ...] = ()
    name: str = field(default="mine", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)

    def run(self, program: Program) -> Program:
        return program


def test_every_pass_has_its_name() -> None:
    assert {name: make().name for name, make in PASSES.items()} == {name: name for name in PASSES}
    assert [compiler_pass.name for compiler_pass in default_pipeline()] == list(PASSES)


@given(
    st.floats(min_value=1e-6, allow_nan=False),
    st.floats(min_value=1e-6, allow_nan=False),
    st.sampled_from([None, "copy"]),
)
def test_a_pipeline_survives_as_text(cap: float, first: float, link: str | None) -> None:
    passes = default_pipeline(bucket_cap_mb=cap, first_bucket_mb=first, all_reduce=link)
    assert parse_passes(format_passes(passes), PASSES) == passes


def test_defaults_are_left_out() -> None:
    text = format_passes([PlanBuckets(bucket_cap_mb=math.inf), OutlineRegions(), LowerCollectives(link="copy")])
    assert text == "plan-buckets{bucket_cap_mb=inf},outline-regions,lower-collectives{link='copy'}"


def test_a_pass_of_ones_own_is_named_by_its_module(monkeypatch: pytest.MonkeyPatch) -> None:
    mine: list[Pass] = [MyPass(("a", "b,c"))]
    text = format_passes(mine)
    assert text == f"{__name__}:MyPass{{words=('a', 'b,c')}}"
    assert parse_passes(text, PASSES) == mine


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("plan", r"there is no pass 'plan': there are plan-buckets, .*, and module:Class"),
        (
            "plan-buckets{cap=3}",
            r"'plan-buckets' does not take these options .*cap.*; it has: bucket_cap_mb, first_bucket_mb",
        ),
        (
            "plan-buckets{bucket_cap_mb}",
            r"the options of 'plan-buckets', 'bucket_cap_mb', are not option=value with plain values: an option has no name",
        ),
        ("plan-buckets{bucket_cap_mb=open('x')}", r"are not option=value with plain values"),
        ("plan-buckets{bucket_cap_mb=-1}", r"bucket_cap_mb is -1: give a positive number"),
        ("plan-buckets outline", r"is no pass: write name, or name\{option=value"),
        ("plan-buckets{", r"is no pass"),
        ("nowhere.at.all:Pass", r"the pass 'nowhere.at.all:Pass' cannot be imported: .*; run from where"),
        (f"{__name__}:Missing", r"cannot be imported"),
    ],
)
def test_malformed_pipelines_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_passes(text, PASSES)


def test_nothing_is_no_pass() -> None:
    assert parse_passes("", PASSES) == [] and parse_passes("replicate,", PASSES)[0].name == "replicate"
