import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from golden_programs import (
    GOLDEN,
    MADE_BY,
    MODELS,
    NUM_DEVICES,
    PLACED,
    UPDATE,
    VERSIONS,
    difference,
    golden_program,
    placed_text,
    versions,
)

import mirrorc
from mirrorc.options.table import grouped

SCRIPT = Path(__file__).parent / "support" / "golden_programs.py"
LOWERED = [f"{name}-{num_devices}.txt" for name in MODELS for num_devices in NUM_DEVICES]
FILES = [*LOWERED, *PLACED, *MADE_BY]
SEEDS = ("1", "2")


@pytest.fixture(scope="module")
def made_elsewhere(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The folders in which processes have written all programs, by what their hashes began with."""
    folders = {seed: tmp_path_factory.mktemp(f"hash-seed-{seed}") for seed in SEEDS}
    processes = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), "--into", str(folder)],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": seed},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for seed, folder in folders.items()
    ]
    for process in processes:
        output, _ = process.communicate(timeout=280)
        assert process.returncode == 0, output
    return folders


def golden_text(file: str) -> str:
    if file in MADE_BY:
        return MADE_BY[file]()
    if file in PLACED:
        return placed_text(file)
    name, num_devices = file.removesuffix(".txt").rsplit("-", 1)
    return golden_program(name, int(num_devices)).to_text(slots=True, sources=False)


def assert_golden(file: str, text: str) -> None:
    found = difference(file, text)
    made_with = (GOLDEN / VERSIONS).read_text(encoding="utf-8")
    if found and made_with != versions():
        here, there = (", ".join(text.splitlines()) for text in (versions(), made_with))
        pytest.skip(f"{file} was made with {there} and is otherwise with {here}: {found.splitlines()[2]}")
    assert not found, found


@pytest.mark.slow
@pytest.mark.parametrize(
    "file",
    [pytest.param(file, marks=[pytest.mark.slow] if file.startswith(("bert", "gpt2")) else []) for file in FILES],
)
def test_the_program_of_a_whole_model_is_as_it_was(file: str) -> None:
    assert_golden(file, golden_text(file))


@pytest.mark.slow
def test_programs_depend_neither_on_the_order_of_hashes_nor_on_the_number_of_threads(
    made_elsewhere: dict[str, Path],
) -> None:
    for file in FILES:
        texts = {(folder / file).read_text(encoding="utf-8") for folder in made_elsewhere.values()}
        assert texts == {golden_text(file)}, file
    expected = sorted([*FILES, VERSIONS])
    assert all(sorted(path.name for path in folder.iterdir()) == expected for folder in made_elsewhere.values())


def test_every_file_has_a_model() -> None:
    expected = sorted([*FILES, VERSIONS])
    assert sorted(path.name for path in GOLDEN.iterdir()) == expected, f"{UPDATE} does not remove files: do it"


@pytest.mark.slow
def test_compile_makes_the_same_program() -> None:
    golden = MODELS["digits"]
    model = golden.make().train()
    with mirrorc.compile(
        model,
        ["cpu:0", "cpu:1"],
        optimizer=golden.optimizer(model),
        loss_fn=golden.loss_fn,
        **grouped({"backend": "eager", **golden.buckets}),
    ) as step:
        lines = step.prepare(**golden.inputs(golden.num_examples(2))).to_text(slots=True, sources=False).splitlines()
    facts = [
        line for line in lines if line.startswith(("# remark: buffers norm1.", "# remark: norm1 and norm2 normalize"))
    ]
    assert len(facts) == 2, "which a program that is captured without a step does not have"
    expected = golden_program("digits", 2).to_text(slots=True, sources=False).splitlines()
    assert [line for line in lines if line not in facts] == expected


def test_a_changed_program_is_explained_and_says_how_to_renew_the_file() -> None:
    text = (GOLDEN / "resnet18-2.txt").read_text(encoding="utf-8")
    assert difference("resnet18-2.txt", text) == ""
    found = difference("resnet18-2.txt", text.replace("link=shared-memory", "link=copy"))
    assert UPDATE in found and "tests/golden/resnet18-2.txt" in found
    assert " @@ def cpu_0\n" in found and re.search(r"(?m)^\+.*reduce_scatter.*link=copy", found)
    assert UPDATE in difference("no-such-model-2.txt", text)


@pytest.mark.slow
def test_buckets_of_the_golden_programs_are_several_so_that_the_schedule_shows() -> None:
    heading = "# mirrorc · stage LOWERED · {} device"
    for file in LOWERED:
        first = (GOLDEN / file).read_text(encoding="utf-8").splitlines()[0]
        num_devices = file.removesuffix(".txt").rsplit("-", 1)[1]
        assert first.startswith(heading.format(num_devices)) and int(first.split(" · ")[3].split()[0]) >= 4
