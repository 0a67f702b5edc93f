"""Logical devices, and their names."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from mirrorc.messages.problem import problem

_NAME = re.compile(r"(?P<type>cpu|cuda)(:(?P<index>\d+))?(/(?P<part>\d+))?")
_REMEDY = "name devices like 'cpu:0', 'cuda:1', or 'cuda:0/1' for the second logical device on GPU 0"


def parse_devices(devices: int | Sequence[str | torch.device] | None) -> tuple[Device, ...]:
    """Logical devices from names, or from a number of GPUs (of CPUs if torch sees no GPU). None means all GPUs, or one
    CPU.
    """
    if devices is None:
        count = torch.cuda.device_count()
        devices = [f"cuda:{i}" for i in range(count)] or ["cpu:0"]
    elif isinstance(devices, bool | str | bytes | torch.Tensor) or not isinstance(devices, int | Iterable):
        raise problem(
            TypeError, f"MC1101: devices is {devices!r}: give a list of names, a number, or None", fix=_REMEDY
        )
    elif isinstance(devices, int):
        devices = _numbered(devices, torch.cuda.device_count())
    parsed = tuple(_parse_device(name) for name in devices)
    if not parsed:
        raise problem(ValueError, "MC1101: devices is empty: a program needs at least one device", fix=_REMEDY)
    seen: set[str] = set()
    for device in parsed:
        if device.name in seen:
            raise problem(
                ValueError,
                f"MC1103: device {device.name!r} is named twice",
                "every replica needs a device of its own",
                _REMEDY,
            )
        seen.add(device.name)
    if len({device.torch_device.type for device in parsed}) > 1:
        names = ", ".join(device.name for device in parsed)
        raise problem(
            ValueError,
            f"MC1103: devices mix CPUs and GPUs ({names}): replicas must run at one speed",
            fix=("devices=['cpu:0', 'cpu:1']", "devices=['cuda:0', 'cuda:1']"),
        )
    return parsed


def _numbered(number: int, num_gpus: int) -> list[str]:
    if 0 < num_gpus < number:
        gpus = "1 GPU" if num_gpus == 1 else f"{num_gpus} GPUs"
        raise problem(
            ValueError,
            f"MC1102: devices is {number}, but torch sees {gpus}",
            fix=(
                "devices=['cpu:0', 'cpu:1'], logical CPUs",
                "devices=['cuda:0', 'cuda:0/1'], logical devices of one GPU",
            ),
        )
    return [f"{'cuda' if num_gpus else 'cpu'}:{i}" for i in range(number)]


def _parse_device(name: str | torch.device) -> Device:
    if not isinstance(name, str | torch.device):
        raise problem(TypeError, f"MC1101: device {name!r} is a {type(name).__name__}, not a name", fix=_REMEDY)
    match = _NAME.fullmatch(str(name))
    if match is None:
        raise problem(ValueError, f"MC1101: unknown device {str(name)!r}", fix=_REMEDY)
    index = int(match["index"] or 0)
    if match["type"] == "cpu":
        if match["part"]:
            raise problem(
                ValueError,
                f"MC1101: unknown device {str(name)!r}",
                "CPU devices are logical already",
                f"use 'cpu:{index}'",
            )
        return Device(f"cpu:{index}", torch.device("cpu"))
    count = torch.cuda.device_count()
    if index >= count:
        visible = f"{count} GPU(s)" if count else "no GPU"
        raise problem(
            ValueError, f"MC1102: device {str(name)!r} is absent: torch sees {visible} on this machine", fix=_REMEDY
        )
    part = f"/{int(match['part'])}" if match["part"] and int(match["part"]) else ""
    return Device(f"cuda:{index}{part}", torch.device("cuda", index))


def have_shared_memory(devices: Iterable[Device]) -> bool:
    return len({device.memory for device in devices}) == 1


@dataclass(frozen=True)
class Device:
    name: str
    torch_device: torch.device

    @property
    def memory(self) -> str:
        """Equal for devices that share memory: logical CPUs, or logical devices on one GPU."""
        return "cpu" if self.torch_device.type == "cpu" else str(self.torch_device)

    @property
    def is_asynchronous(self) -> bool:
        return self.torch_device.type == "cuda"

    def __str__(self) -> str:
        return self.name
