"""The option ``program``: programs that are saved, edited as text, and run."""

import gzip
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from selections import slow
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.errors import VerifyError
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.program import Program, Stage
from mirrorc.packing import ByBytes

BATCH = torch.randn(12, 6, generator=torch.Generator().manual_seed(0)), torch.arange(12) % 3


MODELS = [nn.Sequential()]  # of the last step


def step_of(
    program: Any = None, *, width: int = 8, devices: int = 2, buckets: float = 0.0003, **options: Any
) -> mirrorc.Step:
    torch.manual_seed(0)
    model = MODELS[0] = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, width), nn.Linear(width, 3)
    )
    options = {"compiler": mirrorc.Compiler(backend="eager", disable=("share-parameters",)), **options}
    return mirrorc.compile(
        model,
        [f"cpu:{i}" for i in range(devices)],
        optimizer=torch.optim.AdamW(model.parameters(), lr=0.01),
        loss_fn=F.cross_entropy,
        communication=mirrorc.Communication(buckets=ByBytes(buckets, buckets)),
        program=program,
        **options,
    )


def trained(step: mirrorc.Step, steps: int = 3) -> list[torch.Tensor]:
    """The losses, then the trained variables."""
    with step:
        losses = [step(BATCH[0], target=BATCH[1]) for _ in range(steps)]
        return [*losses, *(variable.values[0].detach().clone() for variable in step.variables.values())]


def are_same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(map(torch.equal, one, other))


@pytest.fixture(scope="module")
def dumped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the program after each pass."""
    folder = tmp_path_factory.mktemp("dump")
    with step_of(debug=mirrorc.Debug(dump=folder)) as step:
        step.prepare(BATCH[0], target=BATCH[1])
    return folder / "program-0"


def text_after(dumped: Path, compiler_pass: str) -> str:
    (path,) = dumped.glob(f"*-{compiler_pass}.mirror.gz")
    return gzip.decompress(path.read_bytes()).decode()


def moved(text: str, names: Sequence[str], behind: str) -> str:
    """The text with the lines that begin with ``names`` moved behind another."""
    lines = text.split("\n")
    moving = [line for line in lines if line.strip().split(":")[0].split(" ")[0] in names]
    rest = [line for line in lines if line not in moving]
    place = next(i for i, line in enumerate(rest) if line.startswith(f"    {behind}"))
    assert len(moving) == len(names)
    return "\n".join([*rest[: place + 1], *moving, *rest[place + 1 :]])


@pytest.mark.parametrize(
    "passes",
    [["plan-buckets", "schedule-overlap", "lower-devices"], *slow((["capture", "outline-regions"],), (["replicate"],))],
)
def test_a_program_of_any_stage_is_completed_and_trains_the_same_bits(dumped: Path, passes: list[str]) -> None:
    expected = trained(step_of())
    for name in passes:
        (path,) = dumped.glob(f"*-{name}.mirror.gz")
        assert are_same(trained(step_of(path)), expected), name
        program = mirrorc.Program.load(path)
        with step_of(program) as step:
            assert step.prepare(BATCH[0], target=BATCH[1]).stage is Stage.LOWERED
            assert f"what {len(program.passes)} passes make" in str(step.program)


def merged(text: str, first: Bucket, second: Bucket) -> str:
    """The text with the second bucket's slots at the end of the first one, and one bucket less."""
    before, begin, rest = text.partition("buckets = [\n")
    table, end, after = rest.partition("\n]\n")
    one, other, *others = re.split(r"(?m)^    (?=Bucket\()", f"{table}\n")[1:]
    slots = re.findall(r"Slot\(.*?\)", other)
    moved = [re.sub(r"offset=(\d+)", lambda m: f"offset={first.num_elements + int(m[1])}", slot) for slot in slots]
    last = re.findall(r"Slot\(.*?\)", one)[-1]
    one = one.replace(last, ", ".join([last, *moved]))
    total = first.num_elements + second.num_elements
    one = re.sub(rf"num_elements={first.num_elements},(?=\s+rule=)", f"num_elements={total},", one)
    numbered = [re.sub(r"index=\d+", f"index={i}", block) for i, block in enumerate([one, *others])]
    return "".join([before, begin, *(f"    {block}" for block in numbered)]).rstrip() + end + after


def test_buckets_that_are_merged_by_hand_are_reduced_as_one(dumped: Path, tmp_path: Path) -> None:
    text = text_after(dumped, "plan-buckets")
    first, second, *others = mirrorc.parse(text).buckets
    (tmp_path / "merged.mirror").write_text(merged(text, first, second))
    with step_of(tmp_path / "merged.mirror") as step:
        buckets = step.prepare(BATCH[0], target=BATCH[1]).buckets
        assert len(buckets) == 1 + len(others) and len(buckets[0].slots) == len(first.slots) + len(second.slots)
    assert are_same(trained(step_of(tmp_path / "merged.mirror")), trained(step_of()))


def test_a_wait_that_is_moved_later_stays_there(dumped: Path, tmp_path: Path) -> None:
    waits = ["b0_sum_r0", "update_b0_r0", "b0_sum_r1", "update_b0_r1"]
    text = moved(text_after(dumped, "schedule-overlap"), waits, "update_b1_r1")
    (tmp_path / "moved.mirror").write_text(text)
    with step_of(tmp_path / "moved.mirror") as step:
        program = step.prepare(BATCH[0], target=BATCH[1]).to_text(fold=False)
        assert program.index("wait(bucket=1") < program.index("wait(bucket=0")
    assert are_same(trained(step_of(tmp_path / "moved.mirror")), trained(step_of()))


def test_devices_that_would_wait_for_each_other_are_refused(dumped: Path) -> None:
    text = text_after(dumped, "lower-devices")
    first, device, second = text.partition('@device("cpu:1")')
    edited = first + device + moved(second, ["b0_sum", "update_b0"], "update_b1")
    step = step_of(mirrorc.parse(edited))
    with (
        step,
        pytest.raises(VerifyError, match=r"line \d+ of the program's text(?s:.*) would wait for each other forever"),
    ):
        step(BATCH[0], target=BATCH[1])


def test_a_use_before_its_value_is_no_program(dumped: Path) -> None:
    text = moved(text_after(dumped, "schedule-overlap"), ["b0_r0"], "b0_pending")
    with pytest.raises(ValueError, match=r"(?s)the text, line \d+, column \d+\n  why:  no line above gives b0_r0"):
        mirrorc.parse(text)


@pytest.mark.parametrize(
    ("old", "new", "broken"),
    [
        ('region="bwd_0", gradients={0}, replica=0)', 'region="bwd_0", gradients={0}, replica=1)', "replica"),
        ("= all_reduce(b0_r0, b0_r1, ", "= all_reduce(b0_r0, b0_r0, ", "all_reduce"),
        ("= update(b1_sum_r0, bucket=1", "= update(b0_sum_r0, bucket=1", "update"),
    ],
    ids=["a region of another replica", "a sum of one replica", "an update with another bucket"],
)
def test_what_computes_something_else_is_refused_with_its_line(dumped: Path, old: str, new: str, broken: str) -> None:
    text = text_after(dumped, "schedule-overlap")
    pattern = re.escape(old).replace(r"\{0\}", "({.*?})")
    edited = re.sub(pattern, lambda m: new.replace("{0}", m[1] if m.re.groups else ""), text, count=1)
    assert edited != text
    number = next(i for i, (a, b) in enumerate(zip(text.split("\n"), edited.split("\n"), strict=True), 1) if a != b)
    with step_of(mirrorc.parse(edited)) as step, pytest.raises(VerifyError) as caught:
        step(BATCH[0], target=BATCH[1])
    assert broken in str(caught.value) and re.search(r"line \d+ of the program's text", str(caught.value)), str(
        caught.value
    )
    assert abs(int(re.findall(r"line (\d+) of", str(caught.value))[0]) - number) < 90


REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "another model": ("plan-buckets", {"width": 9}, r"variables: .*weight.* differ"),
    "fewer devices": ("plan-buckets", {"devices": 3}, "it has 2 devices, not 3"),
    "other passes": (
        "lower-devices",
        {"check_finite": True},
        r"its pass \d+ is [\w-]+, and that of this step check-finite",
    ),
    "other options": ("schedule-overlap", {"loss_reduction": "sum"}, "loss_reduction is mean, not sum"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_program_of_another_step_is_refused(dumped: Path, case: str) -> None:
    name, options, message = REFUSED[case]
    step = step_of(mirrorc.parse(text_after(dumped, name)), **options)
    with (
        step,
        pytest.raises(ValueError, match=rf"(?s)MC4102: the given program is not of this step\n  why:  .*{message}"),
    ):
        step(BATCH[0], target=BATCH[1])


def test_a_region_that_computes_something_else_is_refused(dumped: Path) -> None:
    text = text_after(dumped, "lower-devices")
    edited = text.replace("aten.relu.default(", "aten.neg.default(", 1)
    assert edited != text
    step = step_of(mirrorc.parse(edited))
    with step, pytest.raises(ValueError, match=r"MC4102: .*\n  why:  region fwd_0 computes something else"):
        step(BATCH[0], target=BATCH[1])


@pytest.mark.slow
def test_calls_of_other_sizes_and_evaluations_compile_as_usual(dumped: Path) -> None:
    (path,) = dumped.glob("*-lower-devices.mirror.gz")
    with step_of(path) as step, step_of() as plain:
        for rows in (12, 7, 12):
            losses = [s(BATCH[0][:rows], target=BATCH[1][:rows]) for s in (step, plain)]
            assert torch.equal(*losses)
        assert torch.equal(*(s.evaluate(BATCH[0], target=BATCH[1]) for s in (step, plain)))
        remarks = [str(remark) for program in step.programs for remark in program.remarks]
        assert [
            remark for remark in remarks if " does not take part: " in remark and "is f32[6, 6], not f32[" in remark
        ]


def test_what_is_no_program_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "short.mirror").write_text(str(Program(Stage.CAPTURED, (), {}, ())))
    with pytest.raises(ValueError, match=r"MC7102: cannot read .*short form"):
        step_of(tmp_path / "short.mirror")
    with pytest.raises(ValueError, match=r"(?s)MC7102: cannot read the file of program=.*nowhere.*why:  No such file"):
        step_of(tmp_path / "nowhere.mirror")
    with pytest.raises(TypeError, match="MC1001: program is 3: give the file of an edited program"):
        step_of(3)
    with pytest.raises(ValueError, match=r"MC1003: program=.* cannot be used with activations="):
        step_of("x.mirror", memory=mirrorc.Memory(activations="50%"))


def test_a_first_call_with_another_batch_is_refused_by_its_sizes(dumped: Path) -> None:
    step = step_of(mirrorc.parse(text_after(dumped, "lower-devices")))
    with (
        step,
        pytest.raises(ValueError, match=r"why:  num_examples is \(6, 6\), not \(4, 4\).*\n  fix:  call the step first"),
    ):
        step(BATCH[0][:8], target=BATCH[1][:8])


def test_a_batch_of_other_sizes_is_refused_until_the_program_has_run(dumped: Path) -> None:
    (path,) = dumped.glob("*-lower-devices.mirror.gz")
    with step_of(path) as step:
        step.accumulate(BATCH[0], target=BATCH[1])
        step.zero_grad()
        with pytest.raises(ValueError, match="MC4102"):
            step(BATCH[0][:8], target=BATCH[1][:8])
        step(BATCH[0], target=BATCH[1])
        step(BATCH[0][:8], target=BATCH[1][:8])


def test_a_layer_that_is_frozen_later_is_compiled_as_usual(dumped: Path) -> None:
    (path,) = dumped.glob("*-lower-devices.mirror.gz")
    with step_of(path) as step:
        step(BATCH[0], target=BATCH[1])
        next(MODELS[0].parameters()).requires_grad_(False)
        step(BATCH[0], target=BATCH[1])
        assert "does not take part: variables: 0.weight differ" in str(step.programs[-1])


@pytest.mark.parametrize(
    "calls", [["__call__", "accumulate"], ["evaluate"]], ids=["accumulates", "has its state elsewhere"]
)
def test_other_calls_compile_as_usual(dumped: Path, calls: list[str]) -> None:
    (path,) = dumped.glob("*-lower-devices.mirror.gz")
    with step_of(path) as step, step_of() as plain:
        for each in (step, plain):
            for call in calls:
                getattr(each, call)(BATCH[0], target=BATCH[1])
        assert torch.equal(step(BATCH[0], target=BATCH[1]), plain(BATCH[0], target=BATCH[1]))
        assert "accumulate" not in calls or "this call accumulates" in str(step.programs[1])


@pytest.mark.parametrize("edit", [("max_norm=1.0", "max_norm=0.001"), ("norm_type=2.0", "norm_type=1.0")])
def test_what_a_step_computes_of_gradients_cannot_be_edited(edit: tuple[str, str]) -> None:
    with step_of(clip_grad_norm=1.0) as step:
        text = step.prepare(BATCH[0], target=BATCH[1]).to_text(complete=True)
    assert edit[0] in text
    step = step_of(mirrorc.parse(text.replace(*edit)), clip_grad_norm=1.0)
    with step, pytest.raises(ValueError, match=r"MC4102: .*\n  why:  .*is new(?s:.*)is missing"):
        step(BATCH[0], target=BATCH[1])
    with step_of(mirrorc.parse(text), clip_grad_norm=1.0) as step, step_of(clip_grad_norm=1.0) as plain:
        assert torch.equal(step(BATCH[0], target=BATCH[1]), plain(BATCH[0], target=BATCH[1]))


@pytest.mark.slow
def test_a_program_with_symbolic_sizes_is_completed(tmp_path: Path) -> None:
    options = {"debug": mirrorc.Debug(dump=tmp_path), "compiler": mirrorc.Compiler(backend="eager", dynamic=True)}
    with step_of(**options) as step:
        step.prepare(BATCH[0], target=BATCH[1])
    for name in ("capture", "outline-regions", "insert-update", "lower-devices"):
        (path,) = (tmp_path / "program-0").glob(f"*-{name}.mirror.gz")
        with step_of(path, compiler=options["compiler"]) as step, step_of(compiler=options["compiler"]) as plain:
            for rows in (12, 8):
                losses = [each(BATCH[0][:rows], target=BATCH[1][:rows]) for each in (step, plain)]
                assert torch.equal(*losses), name
            assert len(step.programs) == 1 and " takes the place of what " in str(step.program), name


@pytest.mark.parametrize("name", ["plan-buckets", *slow(("reduce-over-workers",), ("lower-devices",))])
def test_each_of_several_workers_has_a_program_of_its_own(tmp_path: Path, name: str) -> None:
    def planned(rank: int, **options: Any) -> Program:
        model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
        optimizer, world = torch.optim.AdamW(model.parameters()), mirrorc.World(2, 2)
        eager = mirrorc.Compiler(backend="eager")
        options = {"optimizer": optimizer, "loss_fn": F.cross_entropy, "compiler": eager, **options}
        return mirrorc.plan(model, BATCH, world=world, rank=rank, **options)

    for rank in range(2):
        planned(rank, debug=mirrorc.Debug(dump=tmp_path / str(rank)))
    paths = [next((tmp_path / str(rank) / "program-0").glob(f"*-{name}.mirror.gz")) for rank in range(2)]
    for rank, path in enumerate(paths):
        assert "takes the place" in str(planned(rank, program=path))
        with pytest.raises(ValueError, match="MC4102") as refused:
            planned(1 - rank, program=path)
        assert "workers" in str(refused.value) and "rank" in str(refused.value)
