"""Turns collectives into what the link between the devices offers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import fx

from mirrorc import ops
from mirrorc.program import Device, Program, Stage

LINKS = ("shared-memory", "nccl", "copy")


@dataclass(frozen=True)
class LowerCollectives:
    """Gives every collective the link that carries it out::

        all_reduce(pack, pack_1, bucket=0, op=sum)    ->    all_reduce(pack, pack_1, bucket=0, op=sum, link=shared-memory)

    Logical CPUs share memory: each device sums its share of the bucket, straight from the others' buckets. GPUs that are
    all distinct use NCCL; logical devices on one GPU copy.

    Needs: collectives in the graph.
    Guarantees: every collective has a link that its devices can use.

    Attributes:
        link: use this link, one of LINKS, instead of the best.
    """

    link: str | None = None
    name: str = field(default="lower-collectives", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)

    def __post_init__(self) -> None:
        if self.link is not None and self.link not in LINKS:
            raise ValueError(f"link is {self.link!r}: give one of {', '.join(LINKS)}, or None for the best")

    def run(self, program: Program) -> Program:
        link, remark = self._choose(program)
        graph = fx.Graph()
        values: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(program.mirrored_graph, values)
        graph.output(fx.node.map_arg(program.mirrored_graph.output_node().args[0], values.__getitem__))
        found = False
        for node in ops.calls(graph, *ops.COLLECTIVES):
            chosen = "copy" if link == "nccl" and node.target is ops.broadcast else link
            node.kwargs = {**node.kwargs, "link": chosen}
            found = True
        remarks = (*program.remarks, remark) if found and remark else program.remarks
        return program.evolve(stage=Stage.SCHEDULED, graph=graph, remarks=remarks)

    def _choose(self, program: Program) -> tuple[str, str]:
        if self.link is not None:
            check_link(self.link, program.devices)
            return self.link, f"link {self.link}: asked for"
        held_by = [device.torch_device for device in program.devices]
        if held_by[0].type == "cpu":
            return "shared-memory", ""
        if len(set(held_by)) < len(held_by):
            return "copy", "link copy instead of nccl: some devices share one GPU"
        return "nccl", ""


def check_link(link: str | None, devices: Sequence[Device]) -> None:
    """Refuses a link that does not exist or cannot join these devices; None, for the best one, always can.

    Raises:
        ValueError: names the devices and the remedy.
    """
    if link is None:
        return
    if link not in LINKS:
        raise ValueError(f"all_reduce is {link!r}: give one of {', '.join(LINKS)}, or None for the best")
    held_by = [device.torch_device for device in devices]
    kind = {"shared-memory": "cpu", "nccl": "cuda"}.get(link, held_by[0].type)
    if held_by[0].type != kind:
        names = ", ".join(device.name for device in devices)
        raise ValueError(f"all_reduce={link!r} cannot join {names}; use 'copy', or None for the best")
    if link == "nccl" and len(set(held_by)) < len(held_by):
        raise ValueError("all_reduce='nccl' needs a GPU for each replica; use 'copy' for devices on one GPU")
