"""A placement that is declared outside of the package: verified, printed, accounted for, and run with the same bits."""

from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import torch
from outside_placement import CENTRAL
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import Placement
from mirrorc.packing import ByBytes


@dataclass(frozen=True)
class UpdateCentrally:
    name: str = field(default="update-centrally", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        placement = cast(Placement, SimpleNamespace(value=CENTRAL))
        end = graph.output_node()
        for wait in sorted(calls_to(graph, ops.wait), key=lambda node: -cast(int, node.kwargs["bucket"])):
            end.prepend(wait)
            for update in list(wait.users):
                if replica_of(update) == 0:
                    end.prepend(update)
                else:
                    graph.erase_node(update)
        buckets = tuple(replace(bucket, placement=placement) for bucket in program.buckets)
        return program.evolve(graph=graph, buckets=buckets, stage=Stage.SCHEDULED)


def trained(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, mirrorc.Step]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 40), nn.ReLU(), nn.Linear(40, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    options |= {"buckets": ByBytes(0.001, 0.001)}
    step = compiled_step(model, F.cross_entropy, optimizer=optimizer, **options)
    for _ in range(3):
        step(torch.randn(8, 16), target=torch.randint(4, (8,)))
    return model, optimizer, step


def test_a_placement_from_outside_is_verified_printed_and_run() -> None:
    model, optimizer, _ = trained(disable=["share-parameters"])
    central = mirrorc.after("schedule-overlap", UpdateCentrally())
    found, own_optimizer, step = trained(disable=["share-parameters"], add=[central])
    for wanted, parameter in zip(model.parameters(), found.parameters(), strict=True):
        assert torch.equal(parameter, wanted)
        for key, value in optimizer.state[wanted].items():
            assert torch.equal(own_optimizer.state[parameter][key], value)
    program = step.program
    assert len(program.buckets) > 1 and str(program).count("AdamW group 0 · central") == len(program.buckets)
    (shared,) = step.memory().shared
    num_bytes = sum(bucket.num_bytes for bucket in program.buckets)
    scalars = 4 * (len(program.buckets) + sum(len(bucket.slots) for bucket in program.buckets))
    assert (shared.parameters, shared.optimizer_state) == (num_bytes, 2 * num_bytes + scalars)
