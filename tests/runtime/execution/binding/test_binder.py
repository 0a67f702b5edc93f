"""What a program's nodes are bound to."""

from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program, Stage
from mirrorc.runtime.codegen.graph_function import Constant
from mirrorc.runtime.execution.binding.binder import Binder, _following


def test_constants_of_the_host_stay_there() -> None:
    """A kernel that was compiled for a number on the host gets a pointer of the device else. Meta stands for a GPU."""
    constants = {"on_host": torch.tensor(2.0), "on_device": torch.ones(3, device="meta")}
    program = Program(Stage.LOWERED, (Device("meta:0", torch.device("meta")),), {}, ())
    nothing: Any = None
    binder = Binder(program, [{}], nothing, constants, {}, nothing, nothing, nothing)
    graph = fx.Graph()
    for name, constant in constants.items():
        bound = binder.bind(0, graph.call_function(ops.read, (), {"variable": name}))
        assert isinstance(bound, Constant) and bound.value.device == constant.device


def test_a_copy_of_a_constant_follows_what_is_written_into_it() -> None:
    """The weights of a teacher on another GPU, say, which are averaged between steps."""
    constant = torch.ones(3)
    copy = constant.clone()
    read = _following(constant, copy)
    assert read() is copy and read().tolist() == [1, 1, 1]
    for value in (2.0, 5.0):
        constant.lerp_(torch.full((3,), value), 1.0)
        assert read() is copy and read().tolist() == [value] * 3
    copy.zero_()
    assert read().tolist() == [0, 0, 0]  # it is copied once for each write
