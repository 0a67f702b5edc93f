"""Prints what a device does with each of four packing plans, side by side: the schedules of docs/compiler/packing.md.

    python examples/packing_schedules.py

The programs are those of one of two workers that are not there. They are compiled, and run on nothing.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import fx, nn

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.nodes import is_region_call, region_of
from mirrorc.ir.program import Program
from mirrorc.packing import ByBytes, EqualPacks, EqualSplits, Gradient


def by_layers(gradients: Sequence[Gradient]) -> list[list[str]]:
    """A plan of one's own: the gradients of each layer together."""
    return [list(own) for _, own in itertools.groupby((one.name for one in gradients), lambda name: name.split(".")[0])]


PLANS: dict[str, Any] = {
    "ByBytes(0.04, 0.01)": ByBytes(cap_mb=0.04, first_mb=0.01),
    "EqualPacks(3)": EqualPacks(3),
    "EqualSplits(3)": EqualSplits(3),
    "by_layers": by_layers,
}
WIDTH = 26


class Net(nn.Module):
    """Three layers, of about as many parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(16, 256), nn.Linear(256, 32), nn.Linear(32, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.second(torch.relu(self.first(x)))))


def program_of(buckets: Any) -> Program:
    """The lowered program of worker 0 of 2 with a plan; matrices are decayed, biases are not."""
    torch.manual_seed(0)
    model = Net()
    decayed = [parameter for parameter in model.parameters() if parameter.dim() > 1]
    others = [parameter for parameter in model.parameters() if parameter.dim() == 1]
    optimizer = torch.optim.AdamW([{"params": decayed}, {"params": others, "weight_decay": 0.0}])
    batch = ((torch.zeros(8, 16),), {"target": torch.zeros(8, dtype=torch.int64)})
    return mirrorc.plan(
        model,
        batch,
        ["cpu:0"],
        world=mirrorc.World(2),
        optimizer=optimizer,
        loss_fn=nn.functional.cross_entropy,
        communication=mirrorc.Communication(buckets=buckets, exchange="dense"),
        compiler=mirrorc.Compiler(backend="eager"),
    )


def schedule(program: Program) -> Iterator[str]:
    """What the device does, a line for each region, launch, wait and update."""
    (module,) = program.device_graphs.values()
    for node in module.graph.nodes:
        if is_region_call(node):
            yield region_of(node)
        elif node.target is ops.exchange:
            yield f"{_name(node)} goes"
        elif node.target is ops.wait:
            yield f"    wait for {_name(node)}"
        elif node.target is ops.update:
            yield f"    update b{node.kwargs['bucket']}"


def _name(node: fx.Node) -> str:
    pack = node.kwargs.get("pack")
    return f"b{node.kwargs['bucket']}" + (f" pack {pack}" if pack is not None else "")


def table() -> Iterator[str]:
    """The lines of the page."""
    columns = [[name, "-" * (WIDTH - 2), *schedule(program_of(plan))] for name, plan in PLANS.items()]
    for row in itertools.zip_longest(*columns, fillvalue=""):
        yield "".join(f"{cell:<{WIDTH}}" for cell in row).rstrip()


if __name__ == "__main__":
    print("\n".join(table()))
