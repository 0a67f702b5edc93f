"""The table of options: a record from outside of the package is an option with its pass, and what is gone says so."""

import dataclasses
import inspect
import math
import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_programs import sgd_step
from torch import nn

import mirrorc
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import listed
from mirrorc.options.option import FORMER as FORMER_OPTIONS
from mirrorc.options.option import Exclusion, Option
from mirrorc.options.table import MODES, OPTIONS, checked_arguments, grouped


@dataclass(frozen=True)
class Remark:
    times: int
    name: str = "remark"
    input_stage: Stage = Stage.PACKED
    output_stage: Stage = Stage.PACKED

    def run(self, program: Program) -> Program:
        return program.with_remarks(*["a toy"] * self.times)


@pytest.fixture
def toy() -> Iterator[Option]:
    option = Option(
        "toy",
        "give a number of times, 0 for none",
        default=0,
        kinds=(int,),
        accepts=lambda times: times >= 0,
        excludes=(Exclusion("exact_order", "it is a toy"), Exclusion("on one device", _one_device, "leave it out")),
        places=lambda times: [mirrorc.after("pack-gradients", Remark(times))],
    )
    OPTIONS.declare(option)
    yield option
    OPTIONS.withdraw("toy")


def _one_device(request: Any) -> str:
    return "it needs two" if len(request.devices) == 1 else ""


EAGER = mirrorc.Compiler(backend="eager")


def compiled(devices: int = 2, **options: Any) -> mirrorc.Step:
    model = nn.Linear(2, 1)
    return sgd_step(model, devices, loss_fn=F.mse_loss, **options)


def test_an_option_from_outside_is_one_record_and_its_pass(toy: Option) -> None:
    with compiled(toy=3) as step:
        step(torch.ones(4, 2), target=torch.ones(4, 1))
        assert str(step.program).count("remark: a toy") == 3
    with compiled() as step:
        step(torch.ones(4, 2), target=torch.ones(4, 1))
        assert "a toy" not in str(step.program)
    model = nn.Linear(2, 1)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss_fn": F.mse_loss}
    planned = mirrorc.plan(model, (torch.ones(4, 2), torch.ones(4, 1)), 2, toy=2, compiler=EAGER, **given)
    assert str(planned).count("remark: a toy") == 2


def test_its_record_refuses(toy: Option) -> None:
    with pytest.raises(TypeError, match="toy is '3': give a number of times"):
        compiled(toy="3")
    with pytest.raises(ValueError, match="toy is -1: give a number of times"):
        compiled(toy=-1)
    with pytest.raises(
        ValueError,
        match="toy=1 cannot be used with exact_order=True\n  why:  it is a toy\n"
        "  fix:  leave toy= out\n  or:   leave exact_order= out",
    ):
        compiled(toy=1, exact_order=True)
    with pytest.raises(
        ValueError, match="toy=1 cannot be used on one device\n  why:  it needs two\n  fix:  leave it out"
    ):
        compiled(1, toy=1)
    with pytest.raises(ValueError, match="there is an option 'toy' already"):
        OPTIONS.declare(toy)


FORMER: dict[str, tuple[Any, str]] = {
    "bucket_cap_mb": (5.0, "communication=mirrorc.Communication(buckets=5.0)"),
    "first_bucket_mb": (
        2.0,
        "communication=mirrorc.Communication(buckets=mirrorc.packing.ByBytes(cap_mb, first_mb=2.0))",
    ),
    "packing": (
        3,
        "communication=mirrorc.Communication(buckets=...), with mirrorc.packing.EqualPacks(n) for a number n",
    ),
    "gradient_order": ("reversed", "communication=mirrorc.Communication(order='reversed')"),
    "all_reduce": ("ring", "communication=mirrorc.Communication(algorithm='ring')"),
    "communication_options": (None, "communication=mirrorc.Communication(buckets=bytes_per_pack / 2**20, timeout="),
    "timeout_seconds": (60.0, "communication=mirrorc.Communication(timeout=60.0)"),
    "activation_memory": (0.5, "memory=mirrorc.Memory(activations=...), such as '50%', '2GiB' or a number of bytes"),
    "add_passes": ([], "compiler=mirrorc.Compiler(add=...)"),
    "disable_passes": (("ring",), "compiler=mirrorc.Compiler(disable=('ring',))"),
    "print_after_all": (True, "debug=mirrorc.Debug(print_after='all')"),
    "record": (False, "the times of the last steps are always recorded; leave it out"),
    "example_inputs": ({}, "call step.prepare(*batch) after mirrorc.compile()"),
    "workers": (None, "distributed=False, to train in this process alone"),
    "world": (2, "call mirrorc.plan(model, batch, world=2, rank=...)"),
    "rank": (1, "call mirrorc.plan(model, batch, world=..., rank=1)"),
    "overlap_next_step": (True, "it gained nothing"),
}
"""Of each former option: a value, and what to write now."""


@pytest.mark.parametrize("name", ["memory", "model", "devices", "batch", "world", "bucket_cap_mb", "exchange"])
def test_names_that_are_taken_cannot_be_declared(name: str) -> None:
    with pytest.raises(ValueError, match=f"there is an option '{name}' already, or was one"):
        OPTIONS.declare(Option(name))


def test_a_group_names_its_fields() -> None:
    with pytest.raises(
        TypeError, match=r"mirrorc\.Debug got an unexpected keyword argument 'dumps'; did you mean 'dump'"
    ):
        mirrorc.Debug(dumps="here")  # type: ignore[call-arg]
    with pytest.raises(
        TypeError, match=r"unexpected keyword argument 'x'; its fields are activations, shard_optimizer"
    ):
        mirrorc.Memory(x=1)  # type: ignore[call-arg]


def test_former_names_say_what_to_write_now() -> None:
    assert FORMER.keys() == FORMER_OPTIONS.keys()
    for name, (value, now) in FORMER.items():
        with pytest.raises(
            TypeError, match=rf"^MC1006: mirrorc.Memory has no '{name}'\n  fix:  (give )?{re.escape(now)}"
        ):
            mirrorc.Memory(**{name: value})
        said = rf"^MC1006: mirrorc.compile\(\) has no option '{name}' any more\n  fix:  (give )?{re.escape(now)}"
        with pytest.raises(TypeError, match=said):
            mirrorc.compile(nn.Linear(2, 1), **{name: value})
        if name not in ("world", "rank"):
            with pytest.raises(TypeError, match=said):
                mirrorc.plan(nn.Linear(2, 1), (), **{name: value})
    with pytest.raises(
        AttributeError, match=r"CommunicationOptions is no part of mirrorc any more: give mirrorc\.Comm"
    ):
        _ = mirrorc.CommunicationOptions  # type: ignore[attr-defined]


def test_fields_of_a_group_are_no_keywords_and_name_it() -> None:
    grouped = [record for record in OPTIONS if record.group]
    assert {record.group for record in grouped} == set(OPTIONS.groups)
    for record in grouped:
        with pytest.raises(TypeError) as caught:
            mirrorc.compile(nn.Linear(2, 1), **{record.name: record.default})
        remedy = f"{record.group}=mirrorc.{OPTIONS.groups[record.group].__name__}({record.name}={record.default!r})"
        assert str(caught.value) == f"MC1005: {record.name!r} is a field of a group\n  fix:  {remedy}"
        assert eval(remedy.partition("=")[2]) == OPTIONS.groups[record.group]()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"microbatch": 2}, "unexpected keyword argument 'microbatch'; did you mean 'microbatches'"),
        ({"device": 2}, "'device'; did you mean 'devices'"),
        ({"bucket": 5.0}, "'bucket'; did you mean communication=mirrorc.Communication(buckets=5.0)"),
        ({"comunication": None}, "'comunication'; did you mean 'communication'"),
        ({"xyz": 2}, "mirrorc.compile() got an unexpected keyword argument 'xyz'"),
        ({"communication": 5.0}, "communication is 5.0: give a mirrorc.Communication, or None"),
        ({"memory": mirrorc.Debug()}, "memory is a Debug: give a mirrorc.Memory, or None"),
        (
            {"compiler": mirrorc.Compiler},
            "compiler is <class 'mirrorc.options.compiler.Compiler'>: give a mirrorc.Compiler, or",
        ),
        ({"debug": {}}, "debug is {}: give a mirrorc.Debug, or None"),
    ],
)
def test_what_is_no_option_or_no_group_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(TypeError, match=re.escape(said)):
        mirrorc.compile(nn.Linear(2, 1), **options)


WRONG: dict[str, Any] = {
    "buckets": "small",
    "order": "random",
    "algorithm": "star",
    "exchange": "sparse",
    "compression": "int8",
    "early_update": "yes",
    "timeout": 0,
    "activations": "half",
    "shard_optimizer": 1,
    "placement": "near",
    "backend": "tvm",
    "capture": "trace",
    "dynamic": "yes",
    "exact_order": 1,
    "cuda_graphs": 1,
    "passes": "ring",
    "add": 3,
    "disable": "ring",
    "dump": 3,
    "print_after": "replicate",
    "progress": 1,
    "check_replicas_every": -1,
}
MORE_WRONG: list[tuple[str, Any]] = [
    ("buckets", None),
    ("buckets", -1.0),
    ("timeout", timedelta(0)),
    ("timeout", math.nan),
    ("timeout", None),
    ("check_replicas_every", None),
    ("print_after", None),
]


def test_groups_refuse_wrong_values_when_they_are_made() -> None:
    """But for what depends on devices, workers or passes."""
    assert {*WRONG, "link", "process_group"} == {record.name for record in OPTIONS if record.group}
    for name, value in [*WRONG.items(), *MORE_WRONG]:
        with pytest.raises((TypeError, ValueError), match=f"{name}( is |=){re.escape(repr(value))}"):
            OPTIONS.groups[OPTIONS[name].group](**{name: value})


@pytest.mark.parametrize("group", OPTIONS.groups.values())
def test_groups_are_frozen_and_take_keywords_alone(group: Any) -> None:
    assert group() == group() and hash(group()) == hash(group())
    (name, *_) = (field.name for field in dataclasses.fields(group))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(group(), name, None)
    with pytest.raises(TypeError, match="positional argument"):
        group(None)


def test_what_was_withdrawn_says_so() -> None:
    with pytest.raises(
        ValueError,
        match=r"MC1006: capture='trace' was withdrawn\n.*\n  fix:  compiler=mirrorc.Compiler\(capture='autograd'\)",
    ):
        mirrorc.Compiler(capture="trace")
    with pytest.raises(ValueError, match="is an option of mirrorc"):
        OPTIONS.withdraw("link")


GIVEN_BESIDE: dict[str, dict[str, Any]] = {
    "debug": {"check_finite": "skip", "dump": "other"},
    "fast-start": {},
    "reproducible": {"dynamic": None},
    "slow-network": {"early_update": False},
}
"""Options beside each mode."""


@pytest.mark.parametrize("mode", MODES)
def test_a_mode_sets_what_is_left_at_its_default(mode: str) -> None:
    plain, _ = checked_arguments(OPTIONS.keywords, {})
    for given in ({}, GIVEN_BESIDE[mode]):
        found, (remark,) = checked_arguments({**OPTIONS.keywords, "mode": mode, **grouped(given)}, {})
        assert found == {**plain, "mode": mode, **MODES[mode], **given}
        own = [f"{name}={value!r}" for name, value in MODES[mode].items() if name not in given]
        assert remark == f"mode={mode!r} sets {listed(own)}"


def test_errors_about_what_a_mode_sets_name_it() -> None:
    said = r"compression='bfloat16' cannot be used with exact_order=True\n.*\n  mode: mode='slow-network' sets compression="
    with pytest.raises(ValueError, match=said):
        compiled(mode="slow-network", exact_order=True)
    with pytest.raises(ValueError, match=r"check_finite=True\n.*\n  mode: mode='debug' sets .*check_finite=True"):
        compiled(mode="debug", scaler=torch.amp.GradScaler("cpu"))


def test_a_mode_sets_nothing_where_all_is_given() -> None:
    given = {"compression": mirrorc.TopK(0.1)}
    found, remarks = checked_arguments({**OPTIONS.keywords, "mode": "slow-network", **grouped(given)}, {})
    assert found["compression"] == mirrorc.TopK(0.1)
    assert remarks == ["mode='slow-network' sets nothing, as all of its options are given"]
    with pytest.raises(
        ValueError, match="mode is 'quick': say 'debug', 'fast-start', 'reproducible', 'slow-network', or"
    ):
        compiled(mode="quick")


@pytest.mark.slow
def test_modes_have_their_effects(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    batch = {"input": torch.ones(4, 2), "target": torch.ones(4, 1)}
    programs = {}
    for mode in (None, *MODES):
        model = nn.Linear(2, 1)
        given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss_fn": F.mse_loss, "mode": mode}
        programs[mode] = str(mirrorc.plan(model, batch, world=mirrorc.World(2), **given))
        assert (tmp_path / "mirrorc_dump" / "program-0").is_dir() == (mode is not None)
        assert (f"mode={mode!r} sets " in programs[mode]) == (mode is not None)
    for mode, said in (("debug", "finite"), ("slow-network", "decompress(")):
        assert [other for other, text in programs.items() if said in text] == [mode]
    for mode in ("debug", "reproducible"):
        assert "Compiler(exact_order=True) leaves out" in programs[mode]


def test_training_together_needs_others() -> None:
    with pytest.raises(ValueError, match="distributed is True, but this process is the only worker\n  fix:  torchrun"):
        compiled(distributed=True)
    for alone in (False, "auto"):
        with compiled(distributed=alone) as step:
            assert step.num_workers == 1


def test_what_a_step_had_once_is_refused_with_the_remedy() -> None:
    with compiled() as step:
        with pytest.raises(
            AttributeError, match=r"nothing is in flight when a call returns\n  fix:  leave step\.synchronize"
        ):
            step.synchronize()
        with pytest.raises(AttributeError, match="'Step' object has no attribute 'sync'"):
            _ = step.sync
        assert not hasattr(step, "synchronize")


def test_defaults_are_those_of_the_function_and_of_groups() -> None:
    parameters = inspect.signature(mirrorc.compile).parameters
    defaults = {name: one.default for name, one in parameters.items() if name not in ("model", "devices", "declared")}
    assert OPTIONS.keywords == defaults
    assert OPTIONS.by_name(defaults, {}) == OPTIONS.defaults
    names = [*defaults, *(field.name for group in OPTIONS.groups.values() for field in dataclasses.fields(group))]
    assert sorted(names) == sorted({*OPTIONS.defaults, *OPTIONS.groups})
