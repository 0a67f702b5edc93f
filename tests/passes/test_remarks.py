"""Every pass says what it did and why, or why it did nothing."""

import pytest
from tiny_programs import MUON, SMALL_BUCKETS, Weight, captured_two_layers, handmade

from mirrorc.ir.program import Program, Remark
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes


def remarks_of(program: Program, **options: object) -> dict[str, list[str]]:
    pipeline = default_pipeline(**options)  # type: ignore[arg-type]
    said: dict[str, list[str]] = {compiler_pass.name: [] for compiler_pass in pipeline}
    for remark in run_passes(program, pipeline).remarks:
        said[remark.by].append(remark.text)
    return said


@pytest.mark.slow
def test_every_pass_says_what_it_did() -> None:
    mixed = [Weight("a"), Weight("b", rule=MUON), Weight("c", (5, 5))]
    for program, options in (
        (captured_two_layers(2), SMALL_BUCKETS | {"min_factored_elements": 0}),
        (captured_two_layers(2, rows=2), {"min_factored_elements": 0}),
        (captured_two_layers(4, rows=6), {}),
        (handmade(3, mixed, uneven=True, buffer=True), SMALL_BUCKETS),
    ):
        said = remarks_of(program, **options)
        for name, texts in said.items():
            assert texts, name
            assert all(text and not text.endswith(".") and len(text) < 400 for text in texts), (name, texts)
        assert said == remarks_of(program, **options)


def test_a_pass_that_does_nothing_says_why() -> None:
    said = remarks_of(captured_two_layers(1))
    assert all(said.values()), said
    for name, why in {
        "factor-gradients": "no gradient stays factors: 4 of fewer than 131072 elements",
        "insert-all-reduce": "no all-reduce: one replica has nothing to reduce",
        "schedule-overlap": "nothing to move: one device communicates with nobody",
        "share-parameters": "nothing to share: there is one device",
        "lower-collectives": "no link: there is no collective",
    }.items():
        assert said[name] == [why]


@pytest.mark.slow
def test_gradients_are_counted_by_what_becomes_of_them() -> None:
    said = remarks_of(captured_two_layers(2, rows=2), min_factored_elements=10)
    assert said["factor-gradients"] == [
        "2 of 4 gradients (0.2 KiB of 0.2 KiB) leave their regions as factors (0.1 KiB on each device), so that each device "
        "can make its own share of them; the others are made whole: 2 of fewer than 10 elements",
        "this changes bits, as a share of such a gradient is one sum over the examples of all replicas; Compiler(exact_order="
        "True) leaves the pass out",
    ]
    assert said["place-gradients"] == [
        "of 4 gradients, 0 computed into their slots by the operator that makes them, 2 written there at the end of their "
        "region, 2 left as factors"
    ]


def test_few_remarks_stay_with_the_program() -> None:
    remarks = run_passes(captured_two_layers(2), default_pipeline(**SMALL_BUCKETS)).remarks
    kept = [remark.by for remark in remarks if remark.is_kept]
    assert len(kept) < 10 and {"plan-buckets", "share-parameters", "lower-collectives"} <= set(kept) < {
        r.by for r in remarks
    }


def test_a_plain_text_is_a_remark() -> None:
    program = handmade(2)
    assert program.evolve(remarks=("why",)).remarks == (Remark("why"),) == program.with_remarks("why").remarks
