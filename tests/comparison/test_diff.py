import difflib
import functools
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from saved_programs import LARGE_MODELS, SMALL_MODELS, captured, on_devices, stages_of
from selections import slow
from tiny_programs import MUON, SMALL_BUCKETS, TwoLayers, Weight, captured_model, handmade, run_up_to
from torch import nn

from mirrorc import Program
from mirrorc.comparison.diff import diff_programs, diff_texts
from mirrorc.dumps.pass_report import PassReport
from mirrorc.ir.variables import UpdateRule
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import select_passes
from mirrorc.printing.program_text import program_to_text
from mirrorc.printing.reader import read_program_text

LARGE = [Weight("large", (512,))]  # every device has a share of it
THREE_BUCKETS = {"buckets": ByBytes(0.0005, 0.0005)}


def lowered(program: Program, *without: str, **options: Any) -> Program:
    return run_passes(program, select_passes(default_pipeline(**options), without))


@functools.cache
def mlp(*without: str, devices: int = 2, **options: Any) -> Program:
    return lowered(on_devices(captured("mlp"), devices), *without, **options)


def sentences(found: str) -> list[str]:
    words, _, lines = found.partition("\n\n")
    assert not found or lines.startswith("--- old\n+++ new\n@@ -")
    return words.splitlines()


@pytest.mark.slow
@pytest.mark.parametrize(
    "models",
    [["mlp", "conv"], *slow((sorted({*SMALL_MODELS, *LARGE_MODELS} - {"mlp", "conv"}),))],
    ids=["two", "others"],
)
def test_a_program_is_equal_to_itself_at_every_stage_and_in_every_form(models: list[str]) -> None:
    for model in models:
        for name, program in stages_of(model).items():
            assert diff_programs(program, program) == "" and diff_programs(program, program, regions=True) == "", (
                model,
                name,
            )
            text = program_to_text(program, regions=True)
            again = program_to_text(program, regions=True, after=name, milliseconds=17.5)
            assert diff_texts(text, again) == "" and diff_texts(again, text) == "", (model, name)


def test_what_a_dump_says_of_a_pass_does_not_count() -> None:
    programs = list(stages_of("mlp").values())
    for before, after in itertools.pairwise(programs):
        text = PassReport("a-pass", after, before, 1.5).text()
        if "# the program is as before" not in text:
            regions = "\nregion " in text
            assert "# the" not in text and diff_texts(text, after.to_text(regions=regions)) == ""


@pytest.mark.slow
def test_source_lines_and_where_they_are_do_not_count() -> None:
    for name, program in stages_of("mlp").items():
        text = program.to_text(regions=True)
        moved = re.sub(r"tiny_models\.py:(\d+)", "elsewhere.py:7", text)
        assert moved != text, name
        assert diff_texts(text, moved) == diff_texts(text, program.to_text(regions=True, sources=False)) == "", name


Change = tuple[Callable[[], Program], Callable[[], Program], list[str]]
CHANGES: dict[str, Change] = {
    "smaller buckets": (
        mlp,
        lambda: mlp(**THREE_BUCKETS),
        [
            "bucket 0 was split into buckets 0, 1 and 2",
            "1 gradient moved from bucket 0 to bucket 1: second.weight",
            "3 gradients moved from bucket 0 to bucket 2: second.bias, first.weight and first.bias",
            "bucket 0 shrank from 1.8 KiB to 0.2 KiB",
            "reduce_scatter of buckets 1 and 2 is new, on every device",
            "regions bwd_1 and bwd_2 are new, on every device",
            "remark gone: plan-buckets: 6 gradients in one bucket",
            "remark gone: schedule-overlap: the reduction of bucket 0 stays exposed: backward ends where it begins",
        ],
    ),
    "larger buckets": (
        lambda: mlp(**THREE_BUCKETS),
        mlp,
        [
            "buckets 0, 1 and 2 were merged into bucket 0",
            "1 gradient moved from bucket 1 to bucket 0: second.weight",
            "reduce_scatter of buckets 1 and 2 is gone, on every device",
            "regions bwd_1 and bwd_2 are gone, on every device",
        ],
    ),
    "other boundaries": (
        lambda: mlp(buckets=ByBytes(0.00055, 0.0002)),
        lambda: mlp(buckets=ByBytes(0.00055, 0.0003)),
        ["1 gradient moved from bucket 1 to bucket 0: last.bias"],
    ),
    "more devices": (
        lambda: mlp(devices=2),
        lambda: on_devices_program(3),
        ["1 device added: cpu:2"],
    ),
    "one device": (
        lambda: mlp(devices=2),
        lambda: mlp(devices=1),
        [
            "1 device removed: cpu:1",
            "bucket 0 is mirrored now: every device has its own copy of the parameters and updates it whole",
            "reduce_scatter of bucket 0 is gone",
        ],
    ),
    "an uneven batch": (
        lambda: lowered(handmade(3, LARGE)),
        lambda: lowered(handmade(3, LARGE, uneven=True)),
        ["argument x is f32[1, 4] instead of f32[2, 4], on cpu:2", "cpu:2 no longer runs the same program as cpu:0"],
    ),
    "an even batch": (
        lambda: lowered(handmade(3, LARGE, uneven=True)),
        lambda: lowered(handmade(3, LARGE)),
        ["argument x is f32[2, 4] instead of f32[1, 4], on cpu:2", "cpu:2 now runs the same program as cpu:0"],
    ),
    "another link": (
        lambda: mlp(**THREE_BUCKETS),
        lambda: mlp(**THREE_BUCKETS, link="copy"),
        [
            "link copy instead of shared-memory for reduce_scatter of buckets 0, 1 and 2, on every device",
            "remark new: lower-collectives: link copy: asked for; nothing moves before the wait, which does all the work",
        ],
    ),
    "parameters not shared": (
        lambda: mlp(**THREE_BUCKETS),
        lambda: mlp("share-parameters", **THREE_BUCKETS),
        [
            "buckets 0, 1 and 2 are mirrored now: every device has its own copy of the parameters and updates it whole",
            "all_reduce instead of reduce_scatter for buckets 0, 1 and 2, on every device",
            "updates run in the order of buckets 0, 1, 2 instead of 2, 1, 0, on cpu:1",
        ],
    ),
    "no overlap": (
        lambda: mlp("share-parameters", **THREE_BUCKETS),
        lambda: mlp("share-parameters", "schedule-overlap", **THREE_BUCKETS),
        ["the waits for buckets 0, 1 and 2 come earlier, that of bucket 0 before bwd_1 now, on every device"],
    ),
    "overlap": (
        lambda: mlp("share-parameters", "schedule-overlap", **THREE_BUCKETS),
        lambda: mlp("share-parameters", **THREE_BUCKETS),
        ["the waits for buckets 0, 1 and 2 come later, that of bucket 0 after bwd_2 now, on every device"],
    ),
    "gradients not written in place": (
        mlp,
        lambda: mlp("place-gradients"),
        ["bwd_0 is given 6 slots no longer, on every device"],
    ),
    "another optimizer": (
        lambda: lowered(handmade(2)),
        lambda: lowered(handmade(2, [Weight("fc1.weight", (4, 2), rule=SGD), Weight("fc2.weight", (3,), rule=SGD)])),
        ["bucket 0 is updated by SGD group 0 instead of AdamW group 0"],
    ),
    "an optimizer that runs by itself": (
        lambda: lowered(handmade(2, [Weight("a")])),
        lambda: lowered(handmade(2, [Weight("a", rule=MUON)])),
        [
            "bucket 0 is updated by Muon group 0 instead of AdamW group 0",
            "all_reduce instead of reduce_scatter for bucket 0, on every device",
            "the optimizer's own step is new, on cpu:0",
        ],
    ),
    "another dtype": (
        lambda: lowered(handmade(2, [Weight("a"), Weight("b")])),
        lambda: lowered(handmade(2, [Weight("a"), Weight("b", dtype=torch.bfloat16)])),
        [
            "bucket 0 was split into buckets 0 and 1",
            "1 gradient moved from bucket 0 to bucket 1: a",
            "1 gradient has another shape or dtype: b is bf16[4] instead of f32[4]",
            "remark new: plan-buckets: 2 kinds of bucket: a bucket holds one dtype and one update rule",
        ],
    ),
    "another shape": (
        lambda: lowered(handmade(2, [Weight("a", (500,)), Weight("b")])),
        lambda: lowered(handmade(2, [Weight("a", (999,)), Weight("b")])),
        [
            "1 gradient has another shape or dtype: a is f32[999] instead of f32[500]",
            "bucket 0 grew from 2.1 KiB to 4.0 KiB",
        ],
    ),
    "another order": (
        lambda: lowered(handmade(2, [Weight("a"), Weight("b"), Weight("c")])),
        lambda: lowered(handmade(2, [Weight("b"), Weight("a"), Weight("c")])),
        ["the order of the gradients in bucket 0 changed: a comes before b now"],
    ),
    "more weights": (
        lambda: lowered(handmade(2, [Weight("a")])),
        lambda: lowered(handmade(2, [Weight("a"), *(Weight(f"w{i}") for i in range(12))])),
        ["12 gradients new in bucket 0: w11, w10, w9 and 9 more"],
    ),
    "fewer weights": (
        lambda: lowered(handmade(2, [Weight("a"), Weight("b")]), **SMALL_BUCKETS),
        lambda: lowered(handmade(2, [Weight("a")]), **SMALL_BUCKETS),
        ["bucket 0 is gone, with its gradients: b", "1 bucket with another number: 1 is 0 now"],
    ),
    "another model": (
        lambda: lowered(handmade(2, [Weight(f"old{i}") for i in range(9)]), **SMALL_BUCKETS),
        lambda: lowered(handmade(2, [Weight("new0"), Weight("new1")]), **SMALL_BUCKETS),
        [
            "bucket 0 is new, with new gradients: new1",
            "bucket 1 is new, with new gradients: new0",
            "buckets 0, 1, 2 and 6 more are gone",
        ],
    ),
    "another buffer": (
        lambda: lowered(handmade(2)),
        lambda: lowered(handmade(2, buffer=True)),
        ["at the end of the step it writes new(stat) instead of nothing, on every device"],
    ),
    "a stage": (
        lambda: run_up_to("insert-update", handmade(2)),
        lambda: run_up_to("schedule-overlap", handmade(2)),
        ["the stage changed from UPDATED to SCHEDULED"],
    ),
}


def on_devices_program(number: int) -> Program:
    program = captured("mlp")
    return lowered(program.evolve(shard_graphs=program.shard_graphs[:1], shard_of_replica=(0,) * number))


SGD = UpdateRule("SGD group 0", 0)


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_said(name: str) -> None:
    make_old, make_new, expected = CHANGES[name]
    found = sentences(diff_programs(make_old(), make_new()))
    assert [sentence for sentence in expected if sentence not in found] == [], found
    order = [found.index(sentence) for sentence in expected]
    assert order == sorted(order), found


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_seen_from_both_sides_at_every_later_stage(name: str) -> None:
    make_old, make_new, _ = CHANGES[name]
    old, new = make_old(), make_new()
    assert sentences(diff_programs(new, old)) and sentences(diff_programs(old, new, regions=True))


@pytest.mark.slow
def test_the_changes_of_each_pass_are_seen() -> None:
    stages = list(stages_of("mlp").values())
    for before, after in itertools.pairwise(stages):
        texts = [program.to_text(regions=True, slots=True) for program in (before, after)]
        assert bool(diff_texts(*texts)) == (read_program_text(texts[0]) != read_program_text(texts[1]))


class Net(nn.Module):
    def __init__(self, activation: nn.Module) -> None:
        super().__init__()
        self.fc1, self.activation, self.fc2 = nn.Linear(4, 6), activation, nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(self.activation(self.fc1(x)))


@pytest.mark.slow
def test_bodies_of_regions_are_compared_if_asked_for() -> None:
    old, new = (lowered(captured_model(Net(activation))) for activation in (nn.Tanh(), nn.Sigmoid()))
    assert diff_programs(old, new) == "only the bodies of regions differ: pass regions=True to see how\n"
    found = sentences(diff_programs(old, new, regions=True))
    assert [re.sub(r"\d+", "N", sentence) for sentence in found] == [
        "region fwd_N changed: N of its N statements are new, N of N are gone; it gives other values",
        "region bwd_N changed: N of its N statements are new, N of N are gone; argument activation_sigmoid is new; "
        "argument activation_tanh is gone",
    ]
    texts = old.to_text(slots=True, sources=False), old.to_text(regions=True, slots=True, sources=False)
    assert sentences(diff_texts(*texts)) == [
        "bodies of regions are printed in the new text alone and were not compared"
    ]


@pytest.mark.slow
def test_a_captured_graph_is_compared_statement_by_statement() -> None:
    old, new = (captured_model(Net(activation)) for activation in (nn.Tanh(), nn.ReLU()))
    (found,) = sentences(diff_programs(old, new))
    assert re.fullmatch(
        r"the graph of one device changed: \d+ of its \d+ statements are new, \d+ of \d+ are gone", found
    )


BASE = mlp("share-parameters", **THREE_BUCKETS).to_text(slots=True, sources=False)
LINES = BASE.splitlines()


def swapped(one: str, other: str) -> str:
    i, j = (next(i for i, line in enumerate(LINES) if piece in line) for piece in (one, other))
    lines = list(LINES)
    lines[i], lines[j] = lines[j], lines[i]
    return "\n".join(lines) + "\n"


def moved(piece: str, before: str) -> str:
    lines = list(LINES)
    line = lines.pop(next(i for i, line in enumerate(lines) if piece in line))
    lines.insert(next(i for i, line in enumerate(lines) if before in line), line)
    return "\n".join(lines) + "\n"


EDITS = {
    "launches swapped": (
        swapped("b0_pending: ", "b1_pending: "),
        ["collectives are launched in the order of buckets 1, 0 instead of 0, 1, on every device"],
    ),
    "launch later": (
        moved("b0_pending: ", before="b1: "),
        ["the launch for bucket 0 comes later, after bwd_1 now, on every device"],
    ),
    "wait earlier": (
        moved("wait(bucket=0", before="bwd_2("),
        ["the wait for bucket 0 comes earlier, before bwd_2 now, on every device"],
    ),
    "wait past an update": (
        moved("wait(bucket=2", before="update(bucket=1"),
        ["the wait for bucket 2 comes earlier, before the update of bucket 1 now, on every device"],
    ),
    "updates swapped": (
        swapped("update(bucket=0", "update(bucket=1"),
        ["updates run in the order of buckets 1, 0 instead of 0, 1, on every device"],
    ),
    "update earlier": (
        moved("update(bucket=0", before="bwd_2("),
        ["the update of bucket 0 comes earlier, before bwd_2 now, on every device"],
    ),
    "regions swapped": (
        swapped("bwd_1(", "bwd_2("),
        ["regions run in the order bwd_2, bwd_1 instead of bwd_1, bwd_2, on every device"],
    ),
    "no launch": (
        re.sub(r".*all_reduce\(bucket=1.*\n", "", BASE),
        ["all_reduce of bucket 1 is gone, on every device"],
    ),
    "no wait": (
        re.sub(r".*wait\(bucket=2.*\n", "", BASE),
        ["the wait for bucket 2 is gone, on every device"],
    ),
    "no update": (
        re.sub(r".*update\(bucket=1.*\n", "", BASE),
        ["update of bucket 1 is gone, on every device"],
    ),
    "another algorithm": (
        BASE.replace("link=shared-memory", "link=shared-memory, algorithm=ring"),
        ["algorithm ring instead of none for all_reduce of buckets 0, 1 and 2, on every device"],
    ),
    "more activations": (
        BASE.replace("9 activations ", "12 activations "),
        ["fwd_0 gives 12 activations instead of 9 activations, on every device"],
    ),
    "argument renamed": (
        BASE.replace("(x: f32", "(pixels: f32"),
        ["argument pixels is new, on every device", "argument x is gone, on every device"],
    ),
    "ready earlier": (
        re.sub(r"(ready after .* in) bwd_2", r"\1 bwd_1", BASE),
        ["bucket 2 is ready after bwd_1 instead of bwd_2"],
    ),
    "no such words": (
        BASE.replace("b2: f32[", "b2: f16["),
        ["no device, bucket, collective or region changed, but these lines did"],
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", EDITS)
def test_every_edit_is_said_and_nothing_else(name: str) -> None:
    text, expected = EDITS[name]
    assert text != BASE
    assert sentences(diff_texts(BASE, text)) == expected


def test_gradients_that_move_are_grouped_and_counted() -> None:
    weights = [Weight(f"w{i}", (16,)) for i in range(20)]
    caps = [{"buckets": ByBytes(number * 64 / 2**20, number * 64 / 2**20)} for number in (10, 16)]
    found = sentences(diff_programs(*(lowered(handmade(2, weights), **options) for options in caps)))
    assert "6 gradients moved from bucket 1 to bucket 0: w9, w8, w7 and 3 more" in found
    assert not [sentence for sentence in found if "merged" in sentence or "split" in sentence]


@pytest.mark.slow
def test_a_plan_that_changes_altogether_is_said_in_few_words() -> None:
    weights = [Weight(f"w{i}", (16,)) for i in range(100)]
    one, many = (lowered(handmade(2, weights), **options) for options in ({}, SMALL_BUCKETS))
    many = many.with_remarks(*(f"w{i} has a bucket of its own" for i in range(100)))
    found = sentences(diff_programs(one, many))
    assert found[0] == "bucket 0 was split into buckets 0, 1, 2 and 97 more"
    assert "reduce_scatter of buckets 1, 2, 3 and 96 more is new, on every device" in found
    assert any(re.fullmatch("9[0-9] more remarks are new", sentence) for sentence in found)
    assert len(found) < 30 and max(map(len, found)) < 200


def test_lines_are_those_of_the_two_texts() -> None:
    text, _ = EDITS["another algorithm"]
    found = diff_texts(BASE, text).partition("\n\n")[2].splitlines()
    assert found[:2] == ["--- old", "+++ new"]
    new = text.splitlines()
    for i, line in enumerate(found):
        match = re.fullmatch(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@", line)
        if match:
            start, length, new_start, new_length = map(int, match.groups())
            hunk = found[i + 1 : next((j for j in range(i + 1, len(found)) if found[j].startswith("@@")), len(found))]
            assert [part[1:] for part in hunk if part[0] in " -"] == LINES[start - 1 : start - 1 + length]
            assert [part[1:] for part in hunk if part[0] in " +"] == new[new_start - 1 : new_start - 1 + new_length]
    assert sum(line.startswith("+ ") for line in found) == 3


@pytest.mark.slow
def test_a_long_comparison_is_cut_and_says_how_much_is_left_out() -> None:
    weights = [Weight(f"w{i}", (16,)) for i in range(400)]
    old, new = (lowered(handmade(2, [Weight(w.name, shape) for w in weights])) for shape in ((16,), (17,)))
    lines = diff_programs(old, new).partition("\n\n")[2].splitlines()
    assert len(lines) == 201
    shown = sum(line[0] in "+-" for line in lines[2:-1])
    texts = [program.to_text(slots=True, sources=False).splitlines() for program in (old, new)]
    differing = sum(line[0] in "+-" for line in list(difflib.unified_diff(*texts, n=0, lineterm=""))[2:])
    assert lines[-1] == f"... and {differing - shown} more lines that differ are left out here"


def long_text(*, statements: int = 300, changed: frozenset[int] = frozenset()) -> str:
    head = LINES[: LINES.index("    return loss") + 1]
    bodies = []
    for region in range(160):
        body = [
            f"    v_{i}: f32[{1 + (i == 7 and region in changed)}] = aten.add.Tensor(v_{i - 1}, x)"
            for i in range(statements)
        ]
        bodies += ["", f"region body_{region}(x: f32[4]):", *body, f"    return [v_{statements - 1}]"]
    return "\n".join([*head, *bodies]) + "\n"


@pytest.mark.slow
def test_lines_of_equal_regions_are_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[int] = []
    matcher = difflib.SequenceMatcher

    def counting(junk: Any, one: list[str], other: list[str]) -> difflib.SequenceMatcher[str]:
        compared.append(len(one) + len(other))
        return matcher(junk, one, other)

    old, new = long_text(), long_text(changed=frozenset({3, 140}))
    assert len(old.splitlines()) > 48_000 and diff_texts(old, old) == ""
    monkeypatch.setattr(difflib, "SequenceMatcher", counting)
    found = sentences(diff_texts(old, new))
    assert found == [f"region body_{i} changed: 1 of its 300 statements are new, 1 of 300 are gone" for i in (3, 140)]
    assert len(compared) == 2 and sum(compared) <= 2 * 2 * 5  # the lines that differ, and two before and after each


@pytest.mark.slow
def test_a_huge_region_that_changes_altogether_is_compared_from_where_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [
        long_text(statements=2).replace("region body_0(x: f32[4]):", body) for body in map(huge_region, ("f32", "f64"))
    ]
    found = diff_texts(*texts)
    assert "region body_0 changed: 30000 of its 30002 statements are new, 30000 of 30002 are gone" in found
    assert re.search(r"\.\.\. and 59\d\d\d more lines that differ are left out here\n$", found)


def huge_region(dtype: str) -> str:
    return "\n".join(
        ["region body_0(x: f32[4]):", *(f"    w_{i}: {dtype}[{i}] = aten.neg.default(x)" for i in range(30_000))]
    )


def mutated(lines: list[str], kind: str, i: int, j: int) -> list[str]:
    lines = list(lines)
    if kind == "drop":
        del lines[i]
    elif kind == "double":
        lines.insert(i, lines[i])
    elif kind == "swap":
        lines[i], lines[j] = lines[j], lines[i]
    else:
        lines[i] = lines[i].replace("1", "2")
    return lines


@pytest.mark.slow
@fuzzed(300)
@given(
    st.sampled_from(["drop", "double", "swap", "digit"]), st.integers(0, len(LINES) - 1), st.integers(0, len(LINES) - 1)
)
def test_any_edit_is_refused_or_seen(kind: str, i: int, j: int) -> None:
    text = "\n".join(mutated(LINES, kind, i, j)) + "\n"
    try:
        read_program_text(text)
    except ValueError as error:
        with pytest.raises(ValueError, match="the new text cannot be compared") as caught:
            diff_texts(BASE, text)
        assert str(error).removeprefix("MC7104: ") in str(caught.value)
        return
    found = diff_texts(BASE, text)
    assert bool(found) == (text != BASE) and bool(diff_texts(text, BASE)) == bool(found)
    assert not found or sentences(found)


def test_what_is_no_program_is_refused() -> None:
    program, step = mlp(), TwoLayers()
    with pytest.raises(TypeError, match=r"old is a TwoLayers: give a Program, such as step\.program"):
        diff_programs(step, program)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="new is a str: give a Program"):
        diff_programs(program, program.to_text())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the old text cannot be compared: .*line 1 is 'x'"):
        diff_texts("x", BASE)
    with pytest.raises(ValueError, match=r"the new text cannot be compared: .*line 1 is 'x'"):
        diff_texts("x", "x")


def test_gradients_are_all_known_where_they_are_printed_together() -> None:
    weights = [Weight(f"w{i}", (16,)) for i in range(9)]
    old, new = (lowered(handmade(2, weights[:n])).to_text() for n in (9, 8))
    assert "1 gradient gone from bucket 0: w8" in sentences(diff_texts(old, new))
    more = lowered(handmade(2, weights), **SMALL_BUCKETS).to_text()
    assert "bucket 0 was split into buckets 0, 1, 2 and 6 more" in sentences(diff_texts(old, more))


def test_hyperparameters_at_compilation_are_compared() -> None:
    program = mlp("share-parameters").evolve(optimizer_groups={"AdamW group 0": "lr=0.1, eps=1e-08"})
    other = program.evolve(optimizer_groups={"AdamW group 0": "lr=0.2, eps=1e-08"})
    assert sentences(diff_programs(program, other)) == [
        "AdamW group 0 was compiled with lr=0.2, eps=1e-08 instead of lr=0.1, eps=1e-08"
    ]
    assert program.buckets == other.buckets


@pytest.mark.slow
def test_gradients_that_are_left_as_factors_are_named() -> None:
    def program(min_elements: int) -> Program:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 30), nn.ReLU(), nn.Linear(30, 3))
        return run_passes(captured_model(model, 2, 8, columns=40), default_pipeline(min_factored_elements=min_elements))

    whole, factored = program(10_000), program(0)
    said, *remarks = sentences(diff_programs(whole, factored))
    assert said == "d(0.weight) is left as factors, of which each device makes its share, on every device"
    assert any(remark.startswith("remark new: factor-gradients: 1 of 4 gradients") for remark in remarks)
    said, *remarks = sentences(diff_programs(factored, whole))
    assert said == "d(0.weight) is made whole, no longer left as factors, on every device"
    assert all(remark.startswith(("remark new: ", "remark gone: ")) for remark in remarks)
