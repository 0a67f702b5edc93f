"""What a program's nodes are bound to."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program, Stage
from mirrorc.runtime.codegen.graph_function import Constant
from mirrorc.runtime.execution.binding import Binder


def test_constants_of_the_host_stay_there() -> None:
    """A kernel that was compiled for a number on the host gets a pointer of the device else. Meta stands for a GPU."""
    constants = {"on_host": torch.tensor(2.0), "on_device": torch.ones(3, device="meta")}
    program = Program(Stage.LOWERED, (Device("meta:0", torch.device("meta")),), {}, ())
    nothing: Any = None
    binder = Binder(program, [{}], nothing, constants, {})
    graph = fx.Graph()
    for name, constant in constants.items():
        bound = binder.bind(0, graph.call_function(ops.read, (), {"variable": name}))
        assert isinstance(bound, Constant) and bound.value.device == constant.device
