"""A link from outside of the package: a record, and the communicator that implements it."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_programs import Weight, handmade, run_up_to
from twins import trained_two_layers

import mirrorc
from mirrorc.all_reduce_algorithms import Ring
from mirrorc.errors import CommunicationError, VerifyError
from mirrorc.ir import ops
from mirrorc.ir.links import Link, link_names, register_link, unregister_link
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.routes import Route, route_of
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


@pytest.mark.slow
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


@pytest.mark.slow
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


def test_mailboxes_are_made_for_receipts_as_well_as_for_sends() -> None:
    program = Ring().run(run_up_to("lower-collectives", handmade(2, [Weight("w", (6,))]), link="toy"))
    program = LowerDevices().run(program)
    received = {route_of(program, n) for m in program.device_graphs.values() for n in calls_to(m.graph, ops.recv)}
    for module in program.device_graphs.values():
        for send in list(calls_to(module.graph, ops.send)):
            module.graph.erase_node(send)
    (communicator,) = communicators_of(program, 1.0).values()
    assert set(communicator._mailboxes) == received != set()


@pytest.mark.slow
def test_a_link_is_implemented_once() -> None:
    class Another(CopyCommunicator):
        link = "toy"

    with pytest.raises(ValueError, match="ToyCommunicator implements the link 'toy' already"):
        register_communicator(Another)
