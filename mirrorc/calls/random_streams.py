"""The random streams of this process: torch's, Python's and NumPy's."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from mirrorc.ir.devices import Device

KEYS = ("torch", "cuda", "python", "numpy")


def random_state(devices: Sequence[Device]) -> dict[str, Any]:
    """The states of the default generators, as tensors and numbers alone: ``weights_only=True`` loads them."""
    numpy_state = np.random.get_state(legacy=False)
    numpy_state["state"]["key"] = torch.from_numpy(numpy_state["state"]["key"].astype(np.int64))
    return {
        "torch": torch.get_rng_state(),
        "cuda": [torch.cuda.get_rng_state(gpu) for gpu in _gpus(devices)],
        "python": random.getstate(),
        "numpy": numpy_state,
    }


def load_random_state(state: Mapping[str, Any], devices: Sequence[Device]) -> None:
    """GPUs that the earlier run did not have keep their streams."""
    numpy_state = {**state["numpy"], "state": {**state["numpy"]["state"]}}
    numpy_state["state"]["key"] = numpy_state["state"]["key"].numpy().astype(np.uint32)
    np.random.set_state(numpy_state)
    random.setstate(_as_tuples(state["python"]))
    torch.set_rng_state(state["torch"])
    for gpu, own in zip(_gpus(devices), state["cuda"], strict=False):
        torch.cuda.set_rng_state(own, gpu)


def _gpus(devices: Sequence[Device]) -> list[torch.device]:
    """Each GPU once: several logical devices may share a GPU."""
    return list(dict.fromkeys(device.torch_device for device in devices if device.torch_device.type == "cuda"))


def _as_tuples(value: Any) -> Any:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value
