import functools
from pathlib import Path

import pytest
import torch
from saved_programs import HANDMADE, LARGE_MODELS, SMALL_MODELS, stages_of
from selections import slow
from tiny_programs import SMALL_BUCKETS, TwoLayers, Weight, captured_two_layers, every_stage, handmade, run_up_to

import mirrorc
from mirrorc import Program
from mirrorc.ir.nodes import region_title
from mirrorc.ir.program import Stage
from mirrorc.options.table import grouped
from mirrorc.printing.graph_text import graph_lines
from mirrorc.printing.printed_program import PrintedLine, PrintedProgram, PrintedValue, split_list
from mirrorc.printing.program_text import program_to_text
from mirrorc.printing.reader import read_program_text

FORMS = [
    {"regions": True, "slots": True, "sources": True},
    {"regions": True, "slots": True, "sources": False},
    {"regions": False, "slots": False, "sources": True},
    {"regions": False, "slots": False, "sources": False, "fold": False},
]


@functools.cache
def programs(models: tuple[str, ...]) -> dict[str, Program]:
    found = {f"{model} after {name}": p for model in models for name, p in stages_of(model).items()}
    for kind in HANDMADE.keys() - {"names"}:
        stages = every_stage(HANDMADE[kind](), **SMALL_BUCKETS)
        found.update({f"{kind} after {name}": p for name, p in stages.items()})
    return found


def single_spaced(text: str) -> str:
    return " ".join(text.split())


def as_printed(line: PrintedLine) -> str:
    return line.text + (f" # {line.comment}" if line.comment else "")


OTHER_MODELS = tuple(sorted({*SMALL_MODELS, *LARGE_MODELS} - {"mlp", "conv"}))


@pytest.mark.slow
@pytest.mark.parametrize("models", [("mlp", "conv"), *slow((OTHER_MODELS,))], ids=["two", "others"])
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_nothing_is_lost_in_reading_any_program_of_any_stage(form: dict[str, bool], models: tuple[str, ...]) -> None:
    assert {program.stage for program in programs(models).values()} == set(Stage)
    for name, program in programs(models).items():
        text = program_to_text(program, after="a-pass", milliseconds=1.25, **form)
        read = read_program_text(text)
        assert (read.stage, read.num_devices) == (program.stage.name, program.num_replicas), name
        assert (read.after, read.milliseconds) == ("a-pass", 1.2), name
        assert read.remarks == tuple(str(remark) for remark in program.remarks if remark.is_kept), name
        assert_same_devices(read, program)
        assert_same_buckets(read, program)
        if form["slots"]:  # else a line may stand for several
            assert_all_lines(read, text)
        titles = [region_title(region) for region in program.regions]
        assert list(read.regions) == (titles if form["regions"] else []), name


def assert_same_devices(read: PrintedProgram, program: Program) -> None:
    names = [device.name for device in program.devices]
    assert sorted(read.devices) == names
    for device, function in read.function_of.items():
        graph = program.graph
        if program.device_graphs:
            graph = program.device_graphs[device].graph
        elif program.shard_graphs:
            graph = program.shard_graphs[program.shard_of_replica[names.index(device)]]
        assert graph is not None
        *lines, last = graph_lines(program, graph)
        texts = [single_spaced(line.text) for line in lines if line.device in ("", "all", device)]
        assert [single_spaced(line.text) for line in read.lines_of(device)] == texts
        assert f"return {function.outcome}" == last.text


def assert_same_buckets(read: PrintedProgram, program: Program) -> None:
    assert len(read.buckets) == len(program.buckets)
    for printed, bucket in zip(read.buckets, program.buckets, strict=True):
        assert (printed.index, printed.rule) == (bucket.index, bucket.rule.label)
        assert printed.num_gradients == len(bucket.slots)
        assert printed.placement is bucket.placement
        assert bool(printed.ready_after) == (program.stage >= Stage.PACKED)
        assert not printed.last_gradient or printed.last_gradient in bucket.slot_of
        slots = [(slot.variable, str(list(slot.shape))) for slot in bucket.slots]
        assert [(gradient.variable, gradient.shape) for gradient in printed.gradients] == slots


def assert_all_lines(read: PrintedProgram, text: str) -> None:
    lines = text.splitlines()
    devices = {line.number: line.device for function in read.functions for line in function.lines}
    devices |= {line.number: "" for region in read.regions.values() for line in region.statements}
    found = {line.number: as_printed(line) for function in read.functions for line in function.lines}
    found |= {line.number: as_printed(line) for region in read.regions.values() for line in region.statements}
    openings = {part.number: part.name for part in (*read.functions, *read.regions.values())}
    assert openings.keys() == {i for i, line in enumerate(lines, 1) if line.startswith(("def ", "region "))}
    assert all(f" {name}(" in lines[number - 1] for number, name in openings.items())
    for number, line in enumerate(lines, 1):
        if number in found:
            column = f"{devices[number]} | " if devices[number] else ""
            assert single_spaced(column + found[number]) == single_spaced(line)
        else:
            assert not line or line.startswith(("#", "    # ", "    return ", "def ", "region ")), line


@pytest.mark.slow
def test_names_of_modules_may_be_odd() -> None:
    names = ["layers.e = f.weight", "größe.☃", "a, b.weight", "it's.weight", "x[1].weight", "1.weight"]
    for program in every_stage(handmade(2, [Weight(name) for name in names]), **SMALL_BUCKETS).values():
        read = read_program_text(program.to_text(slots=True))
        assert_same_devices(read, program)
        assert_same_buckets(read, program)
        assert_same_buckets(read_program_text(program.to_text()), program)


@pytest.mark.slow
def test_the_parts_of_a_line() -> None:
    read = read_program_text(every_stage(captured_two_layers())["lower-devices"].to_text())
    forward, backward, pack, launch, commit, wait, update = read.functions[0].lines
    assert (
        forward.results == (PrintedValue("loss", "f32[]"), PrintedValue("activations", count=6))
        and forward.operation == "fwd_0"
    )
    assert (
        forward.arguments == ("x", "target", "fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias") and not forward.details
    )
    assert (
        backward.results == (PrintedValue("gradients", count=4),)
        and backward.comment == "backward of the loss, fc2 … fc1"
    )
    assert pack.details == {"bucket": "0"} and pack.arguments == ("4 gradients",)
    assert launch.results == (PrintedValue("b0_pending", "pending f32[96]"),) and launch.arguments == ("b0",)
    assert launch.details == {"bucket": "0", "op": "sum", "link": "shared-memory"}
    assert commit.operation == "commit" and not (commit.results or commit.arguments or commit.details)
    assert wait.results == (PrintedValue("b0_share", "share of f32[96]"),)
    assert update.results == () and update.comment == "SGD group 0, this device's share of 2"
    assert read.functions[0].arguments[0] == PrintedValue("x", "f32[4, 4]") and read.functions[0].outcome == "loss"


def test_devices_of_a_lowered_program_have_their_names() -> None:
    read = read_program_text(run_up_to("lower-devices", handmade(12, uneven=True)).to_text())
    assert read.devices == tuple(f"cpu:{i}" for i in range(12))
    assert [function.devices for function in read.functions] == [tuple(f"cpu:{i}" for i in range(11)), ("cpu:11",)]
    text = run_up_to("lower-devices", handmade(2)).to_text().replace("# cpu:0, cpu:1 (", "# cuda:0/1, cuda:1 (")
    assert read_program_text(text).devices == ("cuda:0/1", "cuda:1")


def test_every_device_has_its_lines_of_a_mirrored_program() -> None:
    program = run_up_to("insert-all-reduce", handmade(3), **SMALL_BUCKETS)
    read = read_program_text(program.to_text())
    assert len(read.functions) == 1 and read.devices == ("cpu:0", "cpu:1", "cpu:2")
    for device in read.devices:
        operations = [line.operation for line in read.lines_of(device)]
        assert operations == ["fwd_0", *["bwd_0", "pack", "all_reduce", "wait", "bwd_1", "pack", "all_reduce", "wait"]]


def test_gradients_that_are_printed_together_are_read_one_by_one() -> None:
    weights = [Weight(f"h.{i}.{name}", (3, 4)) for i in range(6) for name in ("up.weight", "up.bias", "down.weight")]
    program = run_up_to("pack-gradients", handmade(2, [Weight("first"), *weights, Weight("2.last")]))
    text = program.to_text()
    assert "#   h.5 … h.0: down.weight[3, 4] up.bias[3, 4] up.weight[3, 4]\n" in text
    (short,), (full,) = (read_program_text(printed).buckets for printed in (text, program.to_text(slots=True)))
    assert short.gradients == full.gradients and len(short.gradients) == short.num_gradients == 20
    assert (short.dtype, short.size, short.rule) == (full.dtype, full.size, full.rule)
    assert (short.ready_after, short.last_gradient) == (full.ready_after, full.last_gradient) == ("bwd_0", "first")


def test_lists_are_split_at_their_own_commas() -> None:
    assert split_list("a, b[1, 2], (c, {d: e, f: g}), h='x, y', [i, 'it\\'s, (']") == (
        "a",
        "b[1, 2]",
        "(c, {d: e, f: g})",
        "h='x, y'",
        "[i, 'it\\'s, (']",
    )
    assert split_list("") == () and split_list(" ") == () and split_list("d(it's), b") == ("d(it's)", "b")


LOWERED = run_up_to("lower-devices", handmade(2), **SMALL_BUCKETS).to_text(regions=True, slots=True)
LINES = LOWERED.splitlines()


def place(start: str) -> int:
    return next(i for i, line in enumerate(LINES) if line.startswith(start))


DEF, B0, REGION = place("def") + 1, place("    b0: ") + 1, place("region bwd_0") + 1
BAD = {
    "no program": (LOWERED, "hello\n", 1, "hello", "# mirrorc · stage STAGE"),
    "empty": (LOWERED, "", 1, "''", "# mirrorc · stage STAGE"),
    "wrong number of buckets": ("2 buckets", "3 buckets", 5, "fc1.weight[4, 2]", "3 buckets up to here"),
    "bucket row": ("# bucket 1  f32", "# bucket 1 f32", 4, "# bucket 1 f32", "'# bucket INDEX"),
    "fact of a bucket": (" · ready after", " · made by", 2, "made by d(fc2.weight)", "'RULE · shared"),
    "missing gradient": ("#     fc2.weight[3]\n", "", 2, "# bucket 0", "1 gradients up to here"),
    "gradient without shape": ("#     fc2.weight[3]", "#     fc2.weight", 3, "fc2.weight", "VARIABLE[SHAPE]"),
    "text in between": ("\n# cpu:0, ", "what\n# cpu:0, ", DEF - 2, "what", "an empty line"),
    "function": ("def cpu_0(", "fun cpu_0(", DEF, "fun cpu_0(", "def NAME("),
    "nobody runs it": (
        "# cpu:0, cpu:1 (replicas 0, 1) run this\n",
        "",
        DEF - 1,
        "def cpu_0(",
        "(replicas N, ...) run this",
    ),
    "like no other": (
        "loss_weight: f32[]):\n",
        "loss_weight: f32[]):  # as cpu_7, but\n",
        DEF,
        "as cpu_7",
        "as NAME, but",
    ),
    "type of an argument": ("(x: f32[2, 4]", "(x: f32[2, ", DEF, "f32[2, ", "NAME: TYPE"),
    "call": ("= pack(bucket=0", "= pack[bucket=0", B0, "pack[", "OPERATION(ARGUMENT"),
    "type of a result": ("    b0: f32[16] ", "    b0: f32[1 6] ", B0, "f32[1 6]", "types such as"),
    "indentation": ("    b0: ", "  b0: ", B0, "  b0", "four columns in"),
    "result of a region": ("return [", "return (", place("    return [") + 1, "return (", "return [NAME, ...]"),
    "region twice": ("region bwd_0", "region fwd_0", REGION, "fwd_0", "another name"),
}


@pytest.mark.parametrize("name", BAD)
def test_malformed_text_is_refused_with_its_line_and_what_was_expected(name: str) -> None:
    piece, replacement, number, shown, expected = BAD[name]
    assert piece in LOWERED
    text = LOWERED.replace(piece, replacement)
    with pytest.raises(ValueError) as caught:
        read_program_text(text)
    message = str(caught.value)
    assert f"line {number} is " in message and shown in message and expected in message
    assert "print it anew with program.to_text()" in message


@pytest.mark.parametrize("kept", [place("def") + 2, len(LINES) - 1])
def test_a_text_that_is_cut_off_says_so(kept: int) -> None:
    with pytest.raises(ValueError, match=rf"is cut off after line {kept}, .*\n.*return"):
        read_program_text("\n".join(LINES[:kept]))


def test_a_function_after_a_region_is_refused() -> None:
    region = LOWERED[LOWERED.index("\nregion fwd_0") :]
    head, functions = (
        LOWERED[: LOWERED.index("\n# cpu:0")],
        LOWERED[LOWERED.index("\n# cpu:0") : LOWERED.index("\nregion")],
    )
    for text, expected in (
        (head + region, "a function before all regions"),
        (head + functions + region + functions, "functions come before"),
    ):
        with pytest.raises(ValueError, match=expected):
            read_program_text(text)


@pytest.mark.slow
def test_dumps_of_passes_are_read_but_for_those_that_leave_the_program_out(tmp_path: Path) -> None:
    weights = TwoLayers()
    optimizer = torch.optim.SGD(weights.parameters(), lr=0.1)
    options = {"loss_fn": torch.nn.functional.cross_entropy, "backend": "eager", "dump": tmp_path}
    with mirrorc.compile(weights, 1, optimizer=optimizer, **grouped(options)) as step:
        last = step.prepare(torch.zeros(4, 4), target=torch.zeros(4, dtype=torch.int64))
    texts = [path.read_text(encoding="utf-8") for path in sorted((tmp_path / "program-0").glob("*.txt"))]
    as_before = [text for text in texts if "# the program is as before" in text]
    read = [read_program_text(text) for text in texts if text not in as_before]
    assert len(as_before) > 0 and {program.stage for program in read} == {stage.name for stage in Stage}
    assert all(program.after and program.report for program in read)
    plain = read_program_text(last.to_text(regions=True))
    assert (read[-1].buckets[0].rule, read[-1].devices, read[-1].regions.keys()) == (
        plain.buckets[0].rule,
        plain.devices,
        plain.regions.keys(),
    )
    with pytest.raises(ValueError, match="this dump says that the pass before has left the same one"):
        read_program_text(as_before[0])


def test_only_text_is_read() -> None:
    with pytest.raises(TypeError, match=r"is a Program: give a str, such as program\.to_text\(\)"):
        read_program_text(handmade(1))  # type: ignore[arg-type]
