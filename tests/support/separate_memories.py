"""Logical CPUs with memories of their own, as GPUs have."""

import dataclasses

import pytest
import torch

from mirrorc.ir import devices


def separate_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets each logical CPU say that it is a torch device of its own: torch copies from cpu to cpu:1.

    Steps then need the link "copy", and parameters that are not shared.
    """
    parse = devices._parse_device

    def parse_device(text: str) -> devices.Device:
        device = parse(text)
        number = int(text.rpartition(":")[2])
        return dataclasses.replace(device, torch_device=torch.device("cpu", number)) if number else device

    monkeypatch.setattr(devices, "_parse_device", parse_device)
