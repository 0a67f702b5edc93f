"""The table of options: a record from outside of the package is an option with its pass, and what is gone says so."""

import inspect
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_programs import sgd_step
from torch import nn

import mirrorc
from mirrorc.ir.program import Program, Stage
from mirrorc.options.option import Exclusion, Option
from mirrorc.options.table import OPTIONS


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


def test_its_record_refuses(toy: Option) -> None:
    with pytest.raises(TypeError, match="toy is '3': give a number of times"):
        compiled(toy="3")
    with pytest.raises(ValueError, match="toy is -1: give a number of times"):
        compiled(toy=-1)
    with pytest.raises(
        ValueError, match="toy=1 cannot be used with exact_order=True: it is a toy; leave out one of them"
    ):
        compiled(toy=1, exact_order=True)
    with pytest.raises(ValueError, match="toy=1 cannot be used on one device: it needs two; leave it out"):
        compiled(1, toy=1)
    with pytest.raises(ValueError, match="there is an option 'toy' already"):
        OPTIONS.declare(toy)


def test_names_that_are_no_options_are_refused() -> None:
    with pytest.raises(TypeError, match="unexpected keyword argument 'microbatch'; did you mean 'microbatches'"):
        compiled(microbatch=2)
    with pytest.raises(TypeError, match="'device'; did you mean 'devices'"):
        compiled(device=2)
    with pytest.raises(TypeError, match="has no option 'overlap_next_step' any more: it gained nothing"):
        compiled(overlap_next_step=True)
    with pytest.raises(ValueError, match=r"bucket_cap_mb='auto' was withdrawn: .* leave it out"):
        compiled(buckets="auto")
    with pytest.raises(ValueError, match=r"capture='trace' was withdrawn: .* train with capture='autograd'"):
        compiled(capture="trace")
    with pytest.raises(ValueError, match="is an option of mirrorc"):
        OPTIONS.withdraw("link")


def test_what_a_step_had_once_is_refused_with_the_remedy() -> None:
    with compiled() as step:
        with pytest.raises(AttributeError, match="nothing is in flight when a call returns; leave it out"):
            step.synchronize()
        with pytest.raises(AttributeError, match="'Step' object has no attribute 'sync'"):
            _ = step.sync
        assert not hasattr(step, "synchronize")


def test_defaults_are_those_of_the_function() -> None:
    parameters = inspect.signature(mirrorc.compile).parameters
    defaults = {name: one.default for name, one in parameters.items() if name not in ("model", "devices", "declared")}
    assert OPTIONS.defaults == defaults
