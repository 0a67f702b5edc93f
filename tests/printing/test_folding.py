import re

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, Weight, captured_model, every_stage, handmade
from torch import nn
from unfolding import body_of, table_of, unfolded

from mirrorc.ir.program import Program, Stage
from mirrorc.packing import ByBytes
from mirrorc.printing.folding import folded, is_mark
from mirrorc.printing.printed_values import spans

SIGN = "    … b"
SCREEN = 60  # lines


def calls_region(line: str) -> bool:
    return "wd_" in line or "return" in line


def layers(number: int) -> list[str]:
    return [
        line
        for bucket, layer in enumerate(range(number - 1, -1, -1))
        for line in (
            f"    d(h.{layer}.up.weight) = bwd_1(slot(h.{layer}.up.weight))   # backward of h.{layer}.up",
            f"    b{bucket}: f32[16] = pack(bucket={bucket}, d(h.{layer}.up.weight))",
        )
    ]


def test_stretches_that_move_on_evenly_are_told_once_and_come_back() -> None:
    lines = ["    loss: f32[] = fwd_0(x)", *layers(31), "    return loss"]
    short = folded(lines, SIGN, calls_region)
    assert short == [*lines[:3], "    … b1 … b30: as b0 (the 2 lines above), for h.29 … h.0", lines[-1]]
    assert [text for _, text in unfolded(short)] == lines
    assert [number for number, _ in unfolded(short)] == [1, 2, 3, *[4] * 60, 5]


@pytest.mark.parametrize("number", [0, 1, 2])
def test_what_comes_less_than_three_times_is_printed_each_time(number: int) -> None:
    assert folded(layers(number), SIGN, calls_region) == layers(number)


def test_what_does_not_move_on_evenly_is_printed() -> None:
    lines = layers(9)
    for place, line in (
        (8, lines[8].replace("h.4.", "h.7.")),  # a layer out of line
        (9, lines[9].replace("b4:", "b7:")),  # a bucket out of line
        (8, lines[8].replace("bwd_1", "bwd_2")),  # another region
        (9, lines[9].replace("f32[16]", "f32[17]")),  # another size
    ):
        changed = [*lines[:place], line, *lines[place + 1 :]]
        short = folded(changed, SIGN, calls_region)
        assert any(line in text for text in short), (line, short)
        assert [text for _, text in unfolded(short)] == changed


def test_numbers_that_are_none_of_buckets_or_layers_stay() -> None:
    lines = [
        f"    b{i}_share: share of f32[20] = wait(bucket={i}, b{i}_pending)  # elements 0 … 9 of 20" for i in range(9)
    ]
    assert folded(lines[::-1], SIGN, calls_region)[1] == "    … b7 … b0: as b8 (the line above)"
    assert [text for _, text in unfolded(folded(lines[::-1], SIGN, calls_region))] == lines[::-1]


def deep(num_layers: int) -> Program:
    weights = [Weight(f"h.{i}.{name}", (40, 8)) for i in range(num_layers) for name in ("up.weight", "down.weight")]
    return handmade(3, [Weight("first"), *weights, Weight("last")], uneven=True)


@pytest.mark.slow
def test_a_deep_model_fits_on_a_screen_at_every_stage_with_buckets_and_nothing_is_lost() -> None:
    caps = {"buckets": ByBytes(2 * 40 * 8 * 4 / 2**20, 1e-6)}
    for name, program in every_stage(deep(32), **caps).items():
        if not program.buckets:
            continue
        short, whole = program.to_text(), program.to_text(fold=False)
        assert table_of(short) == table_of(whole) and table_of(whole).count("# bucket ") == 0
        functions = re.findall(r"(?m)^def (\w+)\(.*\):$", short)  # not those that are like another
        for function in functions if program.stage is Stage.LOWERED else ():  # before, lines of devices are folded, too
            assert body_of(short, function) == body_of(whole, function), (name, function)
        assert any(is_mark(line) for line in short.splitlines()) and not any(map(is_mark, whole.splitlines()))
        if program.device_graphs:
            schedule = [line for line in short.splitlines() if not line.startswith("# remark: ")]
            assert len(schedule) <= SCREEN < len(whole.splitlines()), len(schedule)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.ln, self.fc = nn.LayerNorm(64), nn.Linear(64, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.fc(self.ln(x))


class Blocks(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.h = nn.ModuleList(Block() for _ in range(number))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.h:
            x = block(x)
        return x


LAYER_CAP_MB = (64 * 64 + 64) * 4 / 2**20
"""The cap that gives each linear layer of 64 features a bucket of its own."""


@pytest.mark.slow
def test_a_stretch_is_made_of_whole_blocks() -> None:
    half = 8192 / 2**20  # of a layer: what its norm has is not too little for a bucket
    program = every_stage(captured_model(Blocks(10), columns=64), buckets=ByBytes(half, half))["lower-devices"]
    text = program.to_text()
    whole = program.to_text(fold=False)
    assert table_of(text) == table_of(whole) and body_of(text, "cpu_0") == body_of(whole, "cpu_0")
    lines = text.splitlines()
    marks = [i for i, line in enumerate(lines) if is_mark(line)]
    assert len(marks) == 3 and all(", every 2nd: as b" in lines[i] for i in marks)  # the table, backward and the waits
    for i in marks:
        size = int(lines[i].partition("(the ")[2].split()[0])
        for line in (lines[i + 1], lines[i - size]):
            assert line.startswith("# bucket ") or " = bwd_" in line or " = wait(" in line or line == lines[-1], lines[
                i - size : i + 2
            ]


def test_a_block_that_goes_on_after_the_stretch_is_printed_whole() -> None:
    lines = [*layers(9), "    b9: f32[16] = pack(bucket=9, d(extra))", "    return loss"]
    short = folded(lines, SIGN, calls_region)
    assert short[2:] == ["    … b1 … b7: as b0 (the 2 lines above), for h.7 … h.1", *lines[-4:]]
    assert [text for _, text in unfolded(short)] == lines


@pytest.mark.slow
def test_layers_that_are_named_by_numbers_alone_are_folded() -> None:
    layers = (nn.Sequential(nn.Linear(64, 64), nn.ReLU()) for _ in range(24))
    program = every_stage(
        captured_model(nn.Sequential(*layers, nn.Linear(64, 64)), columns=64),
        buckets=ByBytes(LAYER_CAP_MB, LAYER_CAP_MB),
    )
    text = program["lower-devices"].to_text()
    whole = program["lower-devices"].to_text(fold=False)
    assert body_of(text, "cpu_0") == body_of(whole, "cpu_0")
    unfolded_lines = [line for _, line in unfolded(text.splitlines())]
    assert next(line for line in whole.splitlines() if "  # backward of 17.0" in line) in unfolded_lines
    assert len(text.splitlines()) <= SCREEN, text


def test_devices_that_do_the_same_next_to_each_other_are_told_together() -> None:
    program = every_stage(deep(1), **SMALL_BUCKETS)["insert-all-reduce"]
    text = program.to_text()
    assert (
        "    cpu:0, cpu:1 | loss: f32[] " in text
        and "    cpu:2        | loss: f32[] " in text
        and "fwd_0.shard1(" in text
    )
    assert "    each         | b0: f32[16] " in text and "    all          | b0_pending: " in text


def test_spans() -> None:
    for items, text in (
        (["cpu:0", "cpu:1", "cpu:2", "cpu:5"], "cpu:0 … cpu:2, cpu:5"),
        (["cpu:0", "cpu:1"], "cpu:0, cpu:1"),
        (["cuda:0/0", "cuda:0/1", "cuda:1/0"], "cuda:0/0, cuda:0/1, cuda:1/0"),
        (["0", "2", "3", "4"], "0, 2 … 4"),
    ):
        assert spans(items) == text


@pytest.mark.parametrize(("microbatches", "marks"), [(3, 0), (4, 1), (7, 1)])
def test_microbatches_that_run_the_same_are_told_once_and_come_back(microbatches: int, marks: int) -> None:
    captured = captured_model(nn.Linear(4, 3), 1, rows=2 * microbatches, microbatches=microbatches)
    program = every_stage(captured, microbatches=microbatches)["lower-devices"]
    lines, short = (program.to_text(fold=fold).splitlines() for fold in (False, True))
    found = [line for line in short if line.startswith("    … microbatch")]
    last = f" … {microbatches - 2}" if microbatches > 4 else ""
    assert found == [f"    … microbatch 2{last}: as microbatch 1 (the 6 lines above)"] * marks
    assert [" ".join(text.split()) for _, text in unfolded(short)] == [" ".join(line.split()) for line in lines]
