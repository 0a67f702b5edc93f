"""A link from outside of the package: a record, and the communicator that implements it."""

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from line import Line
from outside_placement import CENTRAL
from summed_by_messages import linked, linked_by_shares
from tiny_programs import Weight, handmade, run_up_to
from torch import nn
from torch.nn import functional as F
from twins import compiled_step, trained_two_layers

import mirrorc
from mirrorc.all_reduce_algorithms import AllReduceAlgorithm, Ring
from mirrorc.analysis.cost.message_costs import message_costs
from mirrorc.errors import CommunicationError, VerifyError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.links import Link, link_names, register_link, unregister_link
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.routes import Route, route_of
from mirrorc.ir.variables import Placement
from mirrorc.packing import ByBytes
from mirrorc.passes import LowerDevices
from mirrorc.runtime.communication import (
    CopyCommunicator,
    communicator_for,
    communicators_of,
    register_communicator,
    unregister_communicator,
)
from mirrorc.verifier.verifier import verify


class ToyCommunicator(CopyCommunicator):
    link = "toy"
    launched: list[tuple[int, int]] = []  # noqa: RUF012 - what all instances were given
    receipts: list[tuple[str, Route]] = []  # noqa: RUF012

    def launch_all_reduce(self, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        self.launched.append((bucket, replica))
        return super().launch_all_reduce(bucket, replica, tensor)

    def launch_receive(self, route: Route) -> None:
        self.receipts.append(("launched", route))
        super().launch_receive(route)

    def receive(self, route: Route) -> torch.Tensor:
        self.receipts.append(("received", route))
        return super().receive(route)


@pytest.fixture(autouse=True)
def toy() -> Iterator[None]:
    register_link(Link("toy", carries=(ops.all_reduce, ops.send), falls_back_to="copy"))
    register_communicator(ToyCommunicator)
    ToyCommunicator.launched.clear()
    ToyCommunicator.receipts.clear()
    yield
    unregister_communicator(ToyCommunicator)
    unregister_link("toy")
    assert "toy" not in link_names()
    with pytest.raises(CommunicationError, match="nothing implements the link 'toy'"):
        communicator_for("toy", (), 1.0)


@pytest.mark.parametrize("num_devices", [3, 2])
def test_a_toy_link_carries_what_it_says(num_devices: int) -> None:
    options: dict[str, Any] = {"disable": ["share-parameters"], "buckets": ByBytes(1e-6, 1e-6)}
    step, found = trained_two_layers(num_devices, link="toy", **options)
    _, expected = trained_two_layers(num_devices, link="copy", **options)
    assert torch.equal(found, expected)
    program = step.program
    verify(program)
    num_buckets = len(program.buckets)
    assert num_buckets > 1 and len(ToyCommunicator.launched) == 3 * num_devices * num_buckets
    text = str(program)
    assert text.count("link=toy") >= num_buckets and "link toy: asked for" in text
    explained = str(step.explain())
    assert "all_reduce over toy, ms" in explained and "toy moves nothing before the wait" in explained
    assert step.memory().total > 0


@pytest.mark.fast
def test_what_it_does_not_carry_goes_over_the_link_that_it_names() -> None:
    step, _ = trained_two_layers(2, link="toy")
    with step:
        program = step.program
    launches = [node for module in program.device_graphs.values() for node in calls_to(module.graph, *ops.REDUCTIONS)]
    assert {(node.target, node.kwargs["link"]) for node in launches} == {(ops.reduce_scatter, "copy")}
    assert not ToyCommunicator.launched
    for node in launches:
        node.kwargs = {**node.kwargs, "link": "toy"}
    with pytest.raises(VerifyError, match="reduce_scatter of bucket 0 cannot go over toy, which does not carry it"):
        verify(program)


def test_a_receipt_is_launched_before_it_is_waited_for() -> None:
    """A ring's receipts, on every route of the program: a link between processes would post them there."""
    without = {"disable": ["share-parameters"], "add": [mirrorc.after("lower-collectives", Ring())]}
    step, _ = trained_two_layers(2, link="toy", **without)
    with step:
        program = step.program
    routes = [
        route_of(program, node)
        for module in program.device_graphs.values()
        for node in calls_to(module.graph, ops.recv)
    ]
    assert routes and len(ToyCommunicator.receipts) == 3 * 2 * len(routes)
    for route in routes:
        assert [what for what, own in ToyCommunicator.receipts if own == route] == ["launched", "received"] * 3


@pytest.mark.fast
def test_mailboxes_are_made_for_receipts_as_well_as_for_sends() -> None:
    program = Ring().run(run_up_to("lower-collectives", handmade(2, [Weight("w", (6,))]), link="toy"))
    program = LowerDevices().run(program)
    received = {route_of(program, n) for m in program.device_graphs.values() for n in calls_to(m.graph, ops.recv)}
    for module in program.device_graphs.values():
        for send in list(calls_to(module.graph, ops.send)):
            module.graph.erase_node(send)
    (communicator,) = communicators_of(program, 1.0).values()
    assert set(communicator._mailboxes) == received != set()


def test_a_link_is_implemented_once() -> None:
    class Another(CopyCommunicator):
        link = "toy"

    with pytest.raises(ValueError, match="ToyCommunicator implements the link 'toy' already"):
        register_communicator(Another)


# A placement that is declared outside of the package: verified, printed, accounted for, and run with the same bits.


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


@pytest.mark.fast
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


# An algorithm of all-reduce that is not in the package is trained with, proved, printed, measured and chosen like the others.


def trained_by_the_line(algorithm: str | AllReduceAlgorithm) -> torch.Tensor:
    step, found = trained_two_layers(3, algorithm=algorithm, disable=["share-parameters"])
    with step:
        if algorithm != "native":
            assert "line for bucket 0" in str(step.program)
            assert len([bucket for bucket in step.explain().buckets if bucket.kind == "send"]) == 4  # 0→1→2 and back
    return found


@pytest.mark.fast
def test_one_more_algorithm_takes_one_class() -> None:
    expected = trained_by_the_line("native")  # it adds in the order of replicas, too
    assert torch.equal(trained_by_the_line(Line()), expected) and torch.equal(
        trained_by_the_line("line:Line"), expected
    )


@pytest.mark.fast
@pytest.mark.parametrize("num_devices", [2, 5])
def test_it_is_proved_and_its_costs_are_known(num_devices: int) -> None:
    for make in (linked, linked_by_shares):
        after = Line().run(make(num_devices, 3, 64 * num_devices))
        verify(after)
        verify(LowerDevices().run(after))
    costs = message_costs(Line().run(linked(num_devices, 16)))
    assert (costs.path_messages, costs.path_bytes) == (2 * (num_devices - 1), 2 * (num_devices - 1) * 64)
