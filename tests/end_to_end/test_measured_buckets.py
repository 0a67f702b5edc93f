"""Training with ``bucket_cap_mb="auto"``."""

import json
import os
import threading
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from selections import slow_but
from torch import nn

import mirrorc
from mirrorc.ir.program import Program, Stage
from mirrorc.passes import PlanBuckets, default_pipeline
from mirrorc.runtime.tuning import bucket_sizes
from mirrorc.runtime.tuning.microbenchmark import Configuration, Layout

WIDTH = 500  # five layers of a little less than a MiB: a class of 4 MiB


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(5)))


def batch(num_examples: int = 6) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(num_examples)
    return torch.randn(num_examples, WIDTH, generator=generator), torch.randn(num_examples, WIDTH, generator=generator)


def compiled(num_devices: int = 2, model: nn.Module | None = None, **options: Any) -> mirrorc.Step:
    model = model or make_model()
    optimizer = options.pop("optimizer", torch.optim.AdamW)(model.parameters(), lr=1e-3)
    devices = [f"cpu:{i}" for i in range(num_devices)]
    defaults = {"loss_fn": nn.functional.mse_loss, "backend": "eager", "timeout_seconds": 60.0, "bucket_cap_mb": "auto"}
    return mirrorc.compile(model, devices, optimizer=optimizer, **{**defaults, **options})


def prepared(*args: Any, **options: Any) -> mirrorc.Program:
    x, y = batch()
    with compiled(*args, **options) as step:
        return step.prepare(x, target=y)


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Configuration]:
    """In place of measurements: small buckets are best. Lists what was measured."""
    casts: list[Configuration] = []

    def seconds(configuration: Configuration, layouts: Sequence[Layout], scale: float) -> list[float]:
        casts.append(configuration)
        return [1.0 / len(layout) for layout in layouts]

    monkeypatch.setattr(bucket_sizes, "measured_seconds", seconds)
    return casts


@pytest.mark.parametrize("num_devices", slow_but([2], [2, 3]))
def test_sizes_are_measured_once_for_a_machine_and_give_the_same_program_ever_after(
    num_devices: int, measured: list[Configuration]
) -> None:
    first = prepared(num_devices)
    assert len(measured) == 1 and len(first.buckets) == 5
    assert measured[0].shares_parameters and measured[0].link == "shared-memory" and measured[0].group == 0
    assert prepared(num_devices).to_text() == first.to_text() and len(measured) == 1


@pytest.mark.slow
def test_another_number_of_devices_optimizer_or_link_is_measured_for_itself(measured: list[Configuration]) -> None:
    for options in ({}, {"num_devices": 3}, {"optimizer": torch.optim.SGD}, {"link": "copy"}):
        prepared(**options)
    prepared(disable_passes=["share-parameters"])
    found = [(len(c.devices), type(c.optimizer).__name__, c.link, c.shares_parameters) for c in measured]
    assert found == [
        (2, "AdamW", "shared-memory", True),
        (3, "AdamW", "shared-memory", True),
        (2, "SGD", "shared-memory", True),
        (2, "AdamW", "copy", True),
        (2, "AdamW", "shared-memory", False),
    ]


class OwnOptimizer(torch.optim.SGD):
    """A subclass, so that mirrorc runs it by itself."""


def test_an_optimizer_that_runs_by_itself_is_left_out_of_the_measurement(measured: list[Configuration]) -> None:
    assert len(prepared(optimizer=OwnOptimizer).buckets) == 5
    assert [(configuration.group, configuration.shares_parameters) for configuration in measured] == [(None, False)]


def test_pinned_numbers_give_the_same_program_apart_from_the_remark(measured: list[Configuration]) -> None:
    auto = prepared()
    [remark] = [remark.text for remark in auto.remarks if remark.text.startswith("bucket sizes by measurement")]
    assert remark.startswith(
        "bucket sizes by measurement: bucket_cap_mb=1, first_bucket_mb=1 (give these to pin them); "
    )
    pinned = prepared(bucket_cap_mb=1, first_bucket_mb=1)
    assert auto.to_text(regions=True).replace(f"# remark: {remark}\n", "") == pinned.to_text(regions=True)
    assert len(measured) == 1


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", slow_but([2], [1, 2, 3]))
def test_training_is_that_with_the_numbers_bit_for_bit(num_devices: int, measured: list[Configuration]) -> None:
    sizes = (
        {"bucket_cap_mb": 25.0, "first_bucket_mb": 1.0}
        if num_devices == 1
        else {"bucket_cap_mb": 1, "first_bucket_mb": 1}
    )
    found = []
    for options in ({}, sizes):
        model, (x, y) = make_model(), batch(7)
        with compiled(num_devices, model, **options) as step:
            losses = [step(x, target=y) for _ in range(3)]
        found.append([*losses, *(parameter.detach() for parameter in model.parameters())])
    assert all(map(torch.equal, *found))


def test_one_device_measures_nothing_and_says_so(measured: list[Configuration]) -> None:
    program = prepared(1)
    assert measured == []
    assert (
        "bucket sizes not measured, as one device has nobody to communicate with: bucket_cap_mb=25, first_bucket_mb=1"
        in [remark.text for remark in program.remarks]
    )
    assert program.buckets == prepared(1, bucket_cap_mb=25.0).buckets


def test_all_programs_of_a_step_have_one_plan(measured: list[Configuration], monkeypatch: pytest.MonkeyPatch) -> None:
    with compiled() as step:
        programs = [step.prepare(batch(6)[0], target=batch(6)[1])]
        monkeypatch.setenv("MIRRORC_CACHE_DIR", os.environ["MIRRORC_CACHE_DIR"] + "-gone")
        programs.append(step.prepare(batch(9)[0], target=batch(9)[1]))
    assert len(measured) == 1 and programs[0].buckets == programs[1].buckets
    assert programs[0].remarks[0] == programs[1].remarks[0]


def test_nothing_is_read_or_measured_before_the_first_call(
    measured: list[Configuration], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucket_sizes, "MeasurementCache", lambda *_: pytest.fail("it was looked for"))
    with compiled():
        assert measured == []


def test_a_dump_has_the_remark_and_can_be_replayed_without_the_cache(
    measured: list[Configuration], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program = prepared(dump=tmp_path)
    folder = tmp_path / "program-0"
    remark = "bucket sizes by measurement: bucket_cap_mb=1, first_bucket_mb=1"
    assert all(remark in (folder / name).read_text() for name in ("00-capture.txt", "06-plan-buckets.txt", "index.md"))
    captured = mirrorc.Program.load(folder / "00-capture.json.gz")
    assert captured.remarks[0].text.startswith(remark)
    monkeypatch.setenv("MIRRORC_CACHE_DIR", str(tmp_path / "none"))
    replayed = PlanBuckets(bucket_cap_mb=1, first_bucket_mb=1).run(captured)
    assert [bucket.slots for bucket in replayed.buckets] == [bucket.slots for bucket in program.buckets]


@dataclass(frozen=True)
class Fails:
    """A pass that fails."""

    name: str = field(default="fails", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)

    def run(self, program: Program) -> Program:
        raise RuntimeError("not today")


def test_a_reproducer_has_the_numbers(measured: list[Configuration], tmp_path: Path) -> None:
    with pytest.raises(mirrorc.MirrorcError, match="Reproduce it with"):
        prepared(dump=tmp_path, add_passes=[mirrorc.before("plan-buckets", Fails())])
    (record,) = tmp_path.glob("*/reproducer.json")
    assert ",plan-buckets{bucket_cap_mb=1.0" in json.loads(record.read_text())["pipeline"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"bucket_cap_mb": "fast"}, ("bucket_cap_mb is 'fast'", "positive number of MiB", "'auto'")),
        ({"bucket_cap_mb": "fast", "passes": []}, ("bucket_cap_mb is 'fast'",)),
        ({"bucket_cap_mb": "Auto"}, ("bucket_cap_mb is 'Auto'",)),
        ({"first_bucket_mb": "auto", "bucket_cap_mb": 25}, ("first_bucket_mb is 'auto'", "positive number of MiB")),
        ({"first_bucket_mb": 2.0}, ("chooses the size of the first bucket, too", "is 2.0", "leave it out")),
        ({"passes": default_pipeline()}, ("no part in a pipeline given with passes=", "PlanBuckets", "add_passes")),
        ({"disable_passes": ["plan-buckets"]}, ("'plan-buckets', which disable_passes leaves out",)),
    ],
    ids=str,
)
def test_where_nothing_can_be_chosen_it_is_refused(options: dict[str, Any], words: tuple[str, ...]) -> None:
    with pytest.raises((TypeError, ValueError)) as caught:
        compiled(**options)
    assert all(word in str(caught.value) for word in words)


def test_a_pass_is_given_numbers_alone() -> None:
    with pytest.raises(ValueError, match="bucket_cap_mb is 'auto': give a positive number of MiB"):
        PlanBuckets(bucket_cap_mb="auto")  # type: ignore[arg-type]


def test_a_measurement_that_fails_leaves_model_and_threads_as_they_were(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise MemoryError("no room")

    model, (x, y) = make_model(), batch()
    places = [parameter.data_ptr() for parameter in model.parameters()]
    with compiled(model=model) as step, monkeypatch.context() as patch:
        patch.setattr("mirrorc.runtime.tuning.microbenchmark._update", fail)
        num_threads = threading.active_count()
        with pytest.raises(
            mirrorc.ExecutionError, match="could not measure bucket sizes on cpu:0, cpu:1: MemoryError: no room"
        ):
            step(x, target=y)
        assert threading.active_count() == num_threads
        assert places == [parameter.data_ptr() for parameter in model.parameters()]
        patch.undo()
        assert step(x, target=y).isfinite()


@pytest.mark.slow
def test_a_real_measurement_draws_nothing_and_is_looked_up_by_the_next_step() -> None:
    model, (x, y) = make_model(), batch()
    state, num_threads = torch.get_rng_state(), torch.get_num_threads()
    with compiled(model=model) as step:
        text = step.prepare(x, target=y).to_text()
        assert torch.equal(torch.get_rng_state(), state) and torch.get_num_threads() == num_threads
        loss = step(x, target=y)
    (file,) = Path(os.environ["MIRRORC_CACHE_DIR"]).iterdir()
    before = file.read_bytes()
    with compiled() as step, warnings.catch_warnings():
        warnings.simplefilter("error")
        assert step.prepare(x, target=y).to_text() == text
        assert torch.equal(step(x, target=y), loss)
    assert file.read_bytes() == before
    assert list(json.loads(before)["result"]["milliseconds"]) == ["1", "25"]
