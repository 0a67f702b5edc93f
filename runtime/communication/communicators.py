"""Registry of communicators by link."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from mirrorc.errors import CommunicationError
from mirrorc.ir import ops
from mirrorc.ir.buckets import are_cut
from mirrorc.ir.devices import Device
from mirrorc.ir.links import link_named
from mirrorc.ir.nodes import calls_to, name_of, pack_of
from mirrorc.ir.program import Program
from mirrorc.ir.routes import Route, route_of
from mirrorc.messages.problem import problem
from mirrorc.runtime.communication.base import Communicator
from mirrorc.runtime.communication.rendezvous import Tag

_Class = TypeVar("_Class", bound=type[Communicator])
_communicators: dict[str, type[Communicator]] = {}


def register_communicator(communicator: _Class) -> _Class:
    """Registers a class for the link named by its attribute ``link``.

    Raises:
        ValueError: there is no such link, or another class implements it.
    """
    link = link_named(communicator.link).name
    if _communicators.setdefault(link, communicator) is not communicator:
        raise problem(
            ValueError,
            f"MC4005: {_communicators[link].__name__} implements the link {link!r} already",
            fix=f"give {communicator.__name__} a link of its own",
        )
    return communicator


def unregister_communicator(communicator: type[Communicator]) -> None:
    del _communicators[communicator.link]


def communicators_of(program: Program, timeout_seconds: float) -> dict[str, Communicator]:
    tags: dict[str, dict[Tag, None]] = {}
    routes: dict[str, dict[Route, None]] = {}  # a device sends some, and receives on others
    for module in program.device_graphs.values():
        for node in calls_to(module.graph, *ops.REDUCTIONS, ops.send, ops.recv):
            link = str(node.kwargs["link"])
            link_tags = tags.setdefault(link, {})
            if node.target in ops.REDUCTIONS:
                link_tags[(name_of(node), pack_of(node))] = None
            else:
                routes.setdefault(link, {})[route_of(program, node)] = None
    unit = "pack" if are_cut(program.buckets) else "bucket"
    communicators = {link: communicator_for(link, program.devices, timeout_seconds, unit) for link in tags}
    for link, communicator in communicators.items():
        communicator.prepare(list(tags[link]), list(routes.get(link, {})))
    return communicators


def communicator_for(
    link: str, devices: Sequence[Device], timeout_seconds: float, unit: str = "bucket"
) -> Communicator:
    if link not in _communicators:
        raise problem(
            CommunicationError,
            f"MC4005: nothing implements the link {link!r}",
            fix=f"declare a Communicator with link = {link!r} under @mirrorc.runtime.communication.register_communicator",
        )
    return _communicators[link](devices, timeout_seconds, unit)
