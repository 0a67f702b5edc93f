import re

import pytest
import torch
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, run_up_to

from mirrorc.errors import PassError
from mirrorc.ir.program import Program
from mirrorc.passes import PlaceVariables
from mirrorc.pipeline.pipeline_text import format_passes, parse_passes
from mirrorc.verifier.verifier import verify

WEIGHTS = [Weight("a", (300,)), Weight("b", (40,)), Weight("c", (200,)), Weight("d", (100,)), Weight("e", (40,))]


def placed(program: Program, *args: object, **options: float) -> Program:
    after = PlaceVariables(*args).run(run_up_to("plan-buckets", program, **options))  # type: ignore[arg-type]
    verify(after)
    return after


def owners(program: Program) -> dict[str, int | None]:
    return {slot.variable: bucket.owner for bucket in program.buckets for slot in bucket.slots}


def test_the_largest_goes_first_to_whom_owns_least() -> None:
    """300; 200; 100 beside 200, which makes 300; the first 40 to the first device, the second one to the other."""
    program = placed(handmade(2, WEIGHTS))
    assert owners(program) == {"a": 0, "c": 1, "d": 1, "e": 0, "b": 1}
    assert owners(placed(handmade(3, WEIGHTS))) == {"a": 0, "c": 1, "d": 2, "e": 2, "b": 2}
    assert set(owners(placed(handmade(1, WEIGHTS))).values()) == {0}
    said = [remark.text for remark in program.remarks[-2:]]
    assert said == [
        "what each device owns, by their bytes, the largest first: cpu:0 2 variables (1.3 KiB) and cpu:1 3 variables (1.3 KiB)",
        "1 bucket became 2, as all of a bucket has one owner",
    ]


def test_a_bucket_is_split_where_owners_differ_and_stays_aligned() -> None:
    before = run_up_to("plan-buckets", handmade(2, WEIGHTS))
    program = placed(handmade(2, WEIGHTS))
    assert len(before.buckets) == 1 and len(program.buckets) == 2
    names = [[slot.variable for slot in bucket.slots] for bucket in program.buckets]
    assert names == [["d", "c", "b"], ["e", "a"]]  # each in the order of backward, by what comes last
    for bucket in program.buckets:
        offsets = [slot.offset for slot in bucket.slots]
        assert offsets == sorted(offsets) and all(offset % 16 == 0 for offset in offsets)
        assert bucket.slots[-1].offset + bucket.slots[-1].num_elements <= bucket.num_elements
    assert sum(bucket.num_elements for bucket in program.buckets) == before.buckets[0].num_elements


def test_by_the_rule_central_the_first_device_owns_all_and_buckets_stay() -> None:
    before = run_up_to("plan-buckets", handmade(3, WEIGHTS), **SMALL_BUCKETS)
    program = placed(handmade(3, WEIGHTS), "central", **SMALL_BUCKETS)
    assert set(owners(program).values()) == {0}
    assert [bucket.slots for bucket in program.buckets] == [bucket.slots for bucket in before.buckets]
    assert set(owners(placed(handmade(3, WEIGHTS), "cpu:2")).values()) == {2}


def test_by_the_rule_cached_small_variables_have_one_place_and_large_ones_are_dealt_out() -> None:
    weights = [Weight("a", (40,)), Weight("b", (100,)), Weight("c", (99,)), Weight("d", (300,)), Weight("e", (250,))]
    before = run_up_to("plan-buckets", handmade(3, weights))
    program = PlaceVariables("cached", small_elements=100).run(before)
    assert owners(program) == {"a": 0, "c": 0, "d": 1, "e": 2, "b": 0}  # 139 elements of small ones are the first's
    assert "those of 100 elements or more by their bytes, smaller ones from one place: cpu:0 3 variables" in str(
        program
    )
    assert set(owners(placed(handmade(3, weights), "cached")).values()) == {0}


def test_what_is_named_counts_as_owned() -> None:
    program = placed(handmade(2, WEIGHTS), "least-loaded", (("a", "cpu:1"), ("c", "cpu:1")))
    assert owners(program) == {"a": 1, "c": 1, "d": 0, "e": 0, "b": 0}
    program = placed(handmade(2, WEIGHTS), "central", (("e", "cpu:1"),))
    assert owners(program) == {"a": 0, "b": 0, "c": 0, "d": 0, "e": 1}


def test_what_an_optimizer_steps_by_itself_is_the_first_devices() -> None:
    weights = [Weight("a", (10,)), Weight("b", (400,), rule=MUON), Weight("c", (10,))]
    assert owners(placed(handmade(2, weights))) == {"a": 1, "b": 0, "c": 1}
    with pytest.raises(
        PassError, match=r"'b' cannot be owned by cpu:1\n  why:  Muon group 0 does not work element by element"
    ):
        placed(handmade(2, weights), "least-loaded", (("b", "cpu:1"),))


def test_buckets_of_two_dtypes_keep_their_order() -> None:
    weights = [Weight("a", (100,)), Weight("b", (100,), torch.float64), Weight("c", (100,)), Weight("d", (100,))]
    program = placed(handmade(2, weights))
    assert owners(program) == {"b": 0, "d": 1, "c": 1, "a": 0}
    assert [[slot.variable for slot in bucket.slots] for bucket in program.buckets] == [["d", "c"], ["b"], ["a"]]


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("central", (("a", "cpu:7"),)), "is given 'cpu:7', as the owner of 'a': there are cpu:0, cpu:1"),
    ],
)
def test_what_is_not_there_is_refused(args: tuple[object, ...], said: str) -> None:
    with pytest.raises(PassError, match=re.escape(said)):
        placed(handmade(2, WEIGHTS), *args)


def test_a_name_of_what_the_program_does_not_read_is_left_aside_and_told() -> None:
    program = placed(handmade(2, WEIGHTS), "central", (("z", "cpu:1"),))
    assert owners(program) == owners(placed(handmade(2, WEIGHTS), "central"))
    assert any("z has no owner, as nothing updates it" in str(remark) for remark in program.remarks)


def test_it_needs_buckets() -> None:
    with pytest.raises(PassError, match="needs a bucket plan: run 'plan-buckets' before it"):
        PlaceVariables().run(handmade(2, WEIGHTS))


def test_its_options_are_text_and_the_table_tells_the_owners() -> None:
    made = PlaceVariables("cpu:1", (("a", "cpu:0"),))
    assert parse_passes(format_passes([made]), {"place-variables": PlaceVariables}) == [made]
    text = placed(handmade(2, WEIGHTS)).to_text()
    assert "AdamW group 0 · to be owned by cpu:1" in text
    assert re.findall(r"(?m)^# bucket \d .* owned by (\S+)", text) == ["cpu:1", "cpu:0"]
