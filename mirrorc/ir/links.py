"""What carries collectives between devices, and which devices each link can join."""

from __future__ import annotations

from collections.abc import Sequence

from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program

LINKS = ("shared-memory", "nccl", "copy")


def best_link(devices: Sequence[Device]) -> tuple[str, str]:
    """The link that devices are joined by if none is asked for; and why it is not a faster one, if it is not."""
    held_by = [device.torch_device for device in devices]
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


def share_one_memory(program: Program) -> bool:
    """Whether all devices reach each other's tensors: logical CPUs do."""
    return all(device.torch_device.type == "cpu" for device in program.devices)


ADDED_IN_WAIT = ("shared-memory", "copy")  # links that move nothing between launch and wait
