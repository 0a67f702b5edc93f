"""Captured programs for GPUs that need not be there: their values are fake tensors of CUDA, which a CUDA build of torch makes.

Backward cannot be captured so, because torch's autograd asks for the GPU. The graphs are those that were captured for CPUs.
"""

from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.ir.devices import Device
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of


def gpus(*names: str) -> tuple[Device, ...]:
    return tuple(Device(name, torch.device(name.partition("/")[0])) for name in names)


def on_gpus(program: Program, devices: tuple[Device, ...]) -> Program:
    """A CAPTURED program for as many GPUs; seeds stay on the host, as a step gives them."""
    home, mode = devices[0].torch_device, FakeTensorMode()

    def moved(value: Any, device: torch.device) -> Any:
        if isinstance(value, torch.device):
            return device
        if not isinstance(value, torch.Tensor):
            return value
        with mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)

    graphs = []
    for own in program.shard_graphs:
        graph, copies = fx.Graph(), {}
        graph.output(graph.graph_copy(own, copies))
        seeds = {copies[node] for node in placeholders_of(own, program.arguments, ArgumentKind.SEED)}
        for node in graph.nodes:
            device = torch.device("cpu") if node in seeds else home
            node.args = fx.node.map_aggregate(node.args, lambda value: moved(value, home))
            node.kwargs = fx.node.map_aggregate(node.kwargs, lambda value: moved(value, home))
            if "val" in node.meta:
                node.meta["val"] = fx.node.map_aggregate(node.meta["val"], lambda value, to=device: moved(value, to))
        graphs.append(graph)
    return program.evolve(devices=devices, shard_graphs=tuple(graphs))
