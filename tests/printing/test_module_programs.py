"""Programs of forward and of backward of a module say what they are, to a reader who has seen neither."""

import functools

import pytest
import torch
from module_programs import Noisy, cut_module, cut_programs, lowered, stages
from torch import nn
from torch.testing import FileCheck

from mirrorc.ir.program import Program, Stage
from mirrorc.ir.workers import World


@functools.cache
def captured() -> dict[str, Program]:
    return cut_programs(4)


@functools.cache
def text_of(name: str, *, regions: bool = False) -> str:
    return lowered(captured()[name]).to_text(regions=regions)


def test_a_forward_says_what_it_keeps_and_for_whom() -> None:
    FileCheck().check("# mirrorc · stage LOWERED · 2 devices · forward of a module").check(
        "def cpu_0(x: f32[2, 4], seed: i64[]):"
    ).check("# forward of layer … head").check_not("loss").check("gather(1 activation, output=outputs[0]").check(
        "keep(4 activations)"
    ).check("  # for backward").check("# -- buffers may be written from here on").check_not("gradient").run(
        text_of("forward")
    )


def test_a_backward_says_what_it_takes_and_who_gets_the_gradients() -> None:
    FileCheck().check("# mirrorc · stage LOWERED · 2 devices · backward of a module · 1 bucket").check("p.grad").check(
        "#   this replica's part of the gradients of outputs, which autograd gives: d_outputs_0, d_outputs_1"
    ).check("#   4 activations: what forward of this batch has kept").check(
        "#   loss_weight = 1: the parameters' gradients of the batch's loss are sums over replicas"
    ).check(
        "def cpu_0(x: f32[2, 4], loss_weight: f32[], d_outputs_0: f32[2, 3], d_outputs_1: f32[], 4 activations):"
    ).check(
        "5 gradients                      = bwd_0(loss_weight, d_outputs_1, d_outputs_0, x, head.weight, layer.weight, "
        "4 activations, 4 slots)"
    ).check("# backward of head … layer").check("gather(d(x), output=gradient of x, how=concatenated)").check(
        "# -- autograd gets the gradients from here on: commit waits until all devices are done with backward"
    ).check("add_to_grad(bucket=0, b0_sum)").check("  # autograd adds it to p.grad").run(text_of("backward"))
    assert "backward of the loss" not in text_of("backward") and "evaluation" not in text_of("backward")


def test_a_backward_to_an_argument_alone_has_regions_of_backward() -> None:
    FileCheck().check("# mirrorc · stage LOWERED · 2 devices · backward of a module\n").check(
        "d(x)                             = bwd_0(d_outputs_1, d_outputs_0, head.weight, layer.weight, 4 activations)"
    ).check("# backward").check("gather(d(x), output=gradient of x").check("region bwd_0(").run(
        text_of("backward to x", regions=True)
    )
    assert "loss" not in text_of("backward to x")


@pytest.mark.slow
def test_a_captured_backward_lists_what_it_takes_and_later_ones_count_it() -> None:
    for program in stages(captured()["backward"]):
        text = program.to_text()
        assert ("layer_addmm: f32[2, 6]" in text) == (program.stage is Stage.CAPTURED)
        assert ("layer.weight, 4 activations" in text) == (program.stage >= Stage.OUTLINED)
        assert "return loss" not in text


def test_the_weight_of_a_worker_is_known_when_it_runs() -> None:
    backward = cut_module(Noisy(), torch.randn(4, 4), 2, workers=World(2, 2).worker(1)).backward
    assert "#   loss_weight = the worker's weight in the sum over workers: " in backward.to_text()


def test_a_device_without_examples_takes_nothing() -> None:
    program = lowered(cut_module(Noisy(), torch.randn(2, 4), 3).backward)
    assert "\ndef cpu_2():\n" in program.to_text(fold=False)


def test_nothing_is_said_of_activations_if_none_are_kept() -> None:
    both = cut_module(nn.Linear(4, 3), torch.randn(4, 4), 2)
    assert "forward of a module" in heading(both.forward) and "activation" not in lowered(both.backward).to_text()


def heading(program: Program) -> str:
    return program.to_text().partition("\n")[0]
