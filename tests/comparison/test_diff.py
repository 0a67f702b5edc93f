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
from mirrorc.dumps.files import PassReport
from mirrorc.ir.variables import UpdateRule
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import select_passes
from mirrorc.printing.program_text import ProgramPrinter

LARGE = [Weight("large", (512,))]  # every device has a share of it
THREE_BUCKETS = {"buckets": ByBytes(0.0005, 0.0005)}


def lowered(program: Program, *without: str, **options: Any) -> Program:
    return run_passes(program, select_passes(default_pipeline(**options), without))


@functools.cache
def mlp(*without: str, devices: int = 2, **options: Any) -> Program:
    return lowered(on_devices(captured("mlp"), devices), *without, **options)


def parts_of(found: str) -> list[str]:
    """What stands above the hunks of a comparison: buckets, functions and regions."""
    assert not found or found.startswith("--- old\n+++ new\n@@ -")
    return re.findall(r"(?m)^@@ -\S+ \+\S+ @@ ?(.*)$", found)


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
            text = ProgramPrinter(program).text(regions=True)
            again = ProgramPrinter(program).text(regions=True, after=name, milliseconds=17.5)
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
CHANGES: dict[str, Change] = {  # two programs, and parts of them that differ
    "smaller buckets": (
        mlp,
        lambda: mlp(**THREE_BUCKETS),
        ["bucket 0", "bucket 1", "bucket 2", "def cpu_0"],
    ),
    "larger buckets": (
        lambda: mlp(**THREE_BUCKETS),
        mlp,
        ["bucket 1", "def cpu_0"],
    ),
    "other boundaries": (
        lambda: mlp(buckets=ByBytes(0.00055, 0.0002)),
        lambda: mlp(buckets=ByBytes(0.00055, 0.0003)),
        ["bucket 0", "bucket 1"],
    ),
    "more devices": (
        lambda: mlp(devices=2),
        lambda: on_devices_program(3),
        ["def cpu_0"],
    ),
    "one device": (
        lambda: mlp(devices=2),
        lambda: mlp(devices=1),
        ["bucket 0", "def cpu_0"],
    ),
    "an uneven batch": (
        lambda: lowered(handmade(3, LARGE)),
        lambda: lowered(handmade(3, LARGE, uneven=True)),
        ["def cpu_0", "def cpu_2"],
    ),
    "an even batch": (
        lambda: lowered(handmade(3, LARGE, uneven=True)),
        lambda: lowered(handmade(3, LARGE)),
        ["def cpu_2"],
    ),
    "another link": (
        lambda: mlp(**THREE_BUCKETS),
        lambda: mlp(**THREE_BUCKETS, link="copy"),
        ["def cpu_0"],
    ),
    "parameters not shared": (
        lambda: mlp(**THREE_BUCKETS),
        lambda: mlp("share-parameters", **THREE_BUCKETS),
        ["bucket 0", "bucket 1", "bucket 2", "def cpu_0"],
    ),
    "no overlap": (
        lambda: mlp("share-parameters", **THREE_BUCKETS),
        lambda: mlp("share-parameters", "schedule-overlap", **THREE_BUCKETS),
        ["def cpu_0"],
    ),
    "overlap": (
        lambda: mlp("share-parameters", "schedule-overlap", **THREE_BUCKETS),
        lambda: mlp("share-parameters", **THREE_BUCKETS),
        ["def cpu_0"],
    ),
    "gradients not written in place": (
        mlp,
        lambda: mlp("place-gradients"),
        ["def cpu_0"],
    ),
    "another optimizer": (
        lambda: lowered(handmade(2)),
        lambda: lowered(handmade(2, [Weight("fc1.weight", (4, 2), rule=SGD), Weight("fc2.weight", (3,), rule=SGD)])),
        ["bucket 0", "def cpu_1"],
    ),
    "an optimizer that runs by itself": (
        lambda: lowered(handmade(2, [Weight("a")])),
        lambda: lowered(handmade(2, [Weight("a", rule=MUON)])),
        ["bucket 0", "def cpu_0"],
    ),
    "another dtype": (
        lambda: lowered(handmade(2, [Weight("a"), Weight("b")])),
        lambda: lowered(handmade(2, [Weight("a"), Weight("b", dtype=torch.bfloat16)])),
        ["bucket 0", "bucket 1"],
    ),
    "another shape": (
        lambda: lowered(handmade(2, [Weight("a", (500,)), Weight("b")])),
        lambda: lowered(handmade(2, [Weight("a", (999,)), Weight("b")])),
        ["bucket 0", "def cpu_0"],
    ),
    "another order": (
        lambda: lowered(handmade(2, [Weight("a"), Weight("b"), Weight("c")])),
        lambda: lowered(handmade(2, [Weight("b"), Weight("a"), Weight("c")])),
        ["bucket 0"],
    ),
    "more weights": (
        lambda: lowered(handmade(2, [Weight("a")])),
        lambda: lowered(handmade(2, [Weight("a"), *(Weight(f"w{i}") for i in range(12))])),
        ["bucket 0"],
    ),
    "fewer weights": (
        lambda: lowered(handmade(2, [Weight("a"), Weight("b")]), **SMALL_BUCKETS),
        lambda: lowered(handmade(2, [Weight("a")]), **SMALL_BUCKETS),
        ["bucket 0", "bucket 1"],
    ),
    "another model": (
        lambda: lowered(handmade(2, [Weight(f"old{i}") for i in range(9)]), **SMALL_BUCKETS),
        lambda: lowered(handmade(2, [Weight("new0"), Weight("new1")]), **SMALL_BUCKETS),
        ["bucket 0", "bucket 8"],
    ),
    "another buffer": (
        lambda: lowered(handmade(2)),
        lambda: lowered(handmade(2, buffer=True)),
        ["def cpu_0"],
    ),
    "a stage": (
        lambda: run_up_to("insert-update", handmade(2)),
        lambda: run_up_to("schedule-overlap", handmade(2)),
        [""],
    ),
}


def on_devices_program(number: int) -> Program:
    program = captured("mlp")
    return lowered(program.evolve(shard_graphs=program.shard_graphs[:1], shard_of_replica=(0,) * number))


SGD = UpdateRule("SGD group 0", 0)


@pytest.mark.parametrize("name", CHANGES)
def test_every_change_is_shown_below_its_bucket_function_or_region(name: str) -> None:
    make_old, make_new, expected = CHANGES[name]
    old, new = make_old(), make_new()
    found = parts_of(diff_programs(old, new))
    assert set(expected) <= set(found), found
    assert diff_programs(new, old) and diff_programs(old, new, regions=True)


@pytest.mark.slow
def test_the_changes_of_each_pass_are_seen() -> None:
    for before, after in itertools.pairwise(stages_of("mlp").values()):
        texts = [program.to_text(regions=True, slots=True) for program in (before, after)]
        unlike = [re.sub(r"(?m)^    # (?!-- ).*\n", "", text) for text in texts]
        assert bool(diff_texts(*texts)) == (unlike[0] != unlike[1])


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
    assert set(parts_of(diff_programs(old, new, regions=True))) == {"region fwd_0", "region bwd_0"}


BASE = mlp(**THREE_BUCKETS).to_text(slots=True, sources=False)
LINES = BASE.splitlines()


def test_lines_are_those_of_the_two_texts() -> None:
    text = BASE.replace("reduce_scatter", "all_reduce")
    found = diff_texts(BASE, text).splitlines()
    assert found[:2] == ["--- old", "+++ new"]
    new = text.splitlines()
    for i, line in enumerate(found):
        match = re.fullmatch(r"@@ -(\d+),(\d+) \+(\d+),(\d+) @@ def cpu_[01]", line)
        if match:
            start, length, new_start, new_length = map(int, match.groups())
            hunk = found[i + 1 : next((j for j in range(i + 1, len(found)) if found[j].startswith("@@")), len(found))]
            assert [part[1:] for part in hunk if part[0] in " -"] == LINES[start - 1 : start - 1 + length]
            assert [part[1:] for part in hunk if part[0] in " +"] == new[new_start - 1 : new_start - 1 + new_length]
    assert sum(line.startswith("+ ") for line in found) == 6


@pytest.mark.slow
def test_a_long_comparison_is_cut_and_says_how_much_is_left_out() -> None:
    weights = [Weight(f"w{i}", (16,)) for i in range(400)]
    old, new = (lowered(handmade(2, [Weight(w.name, shape) for w in weights])) for shape in ((16,), (17,)))
    lines = diff_programs(old, new).splitlines()
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
    assert parts_of(diff_texts(old, new)) == ["region body_3", "region body_140"]
    assert len(compared) == 2 and sum(compared) <= 2 * 2 * 5  # the lines that differ, and two before and after each


@pytest.mark.slow
def test_a_huge_region_that_changes_altogether_is_compared_from_where_it_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    texts = [
        long_text(statements=2).replace("region body_0(x: f32[4]):", body) for body in map(huge_region, ("f32", "f64"))
    ]
    found = diff_texts(*texts)
    assert parts_of(found) == ["region body_0"]
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
    if not text.startswith("# mirrorc · "):
        with pytest.raises(ValueError, match="the new text cannot be compared: line 1 is"):
            diff_texts(BASE, text)
        return
    found = diff_texts(BASE, text), diff_texts(text, BASE)
    assert bool(found[0]) == bool(found[1])
    assert found[0] or [line for line in text.split("\n") if line] == [line for line in LINES if line]


def test_what_is_no_program_is_refused() -> None:
    program, step = mlp(), TwoLayers()
    with pytest.raises(TypeError, match=r"old is a TwoLayers: give a Program, such as step\.program"):
        diff_programs(step, program)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="new is a str: give a Program"):
        diff_programs(program, program.to_text())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"the old text cannot be compared: line 1 is 'x'"):
        diff_texts("x", BASE)
    with pytest.raises(ValueError, match=r"the new text cannot be compared: line 1 is 'y'"):
        diff_texts(BASE, "y")
