"""Random operators as functions of a seed."""

from __future__ import annotations

import re
import threading
from typing import Any

import torch

from mirrorc.custom_ops.registration import FIXED_STRIDES, register
from mirrorc.torch_internals import schema_of

_MASK_64 = (1 << 64) - 1
_generator_locks: dict[torch.device, threading.Lock] = {}

STATES_LOCK = threading.Lock()
"""Held while a device's thread reads or writes a generator's state.

A reader holds the generator's lock, and may lose the GIL to garbage collection. Another thread would deadlock: torch
waits for that lock while it holds the GIL.
"""


def mix(seed: int, stream: int) -> int:
    """A 63-bit seed for a stream of ``seed``, by the finalizer of SplitMix64 (Steele et al., 2014)."""
    z = (seed + (stream + 1) * 0x9E3779B97F4A7C15) & _MASK_64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK_64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK_64
    return (z ^ (z >> 31)) >> 1


def seed_of_microbatch(seed: torch.Tensor, index: int) -> torch.Tensor:
    """Its stream is beyond those of any program's operations."""
    return torch.tensor(mix(int(seed), 2**32 + index), dtype=torch.int64)


def _draw_mask(
    seed: torch.Tensor, stream: int, size: list[int], keep_probability: float, device: torch.device
) -> torch.Tensor:
    generator = torch.Generator(device).manual_seed(mix(int(seed), stream))
    return torch.empty(size, dtype=torch.bool, device=device).bernoulli_(keep_probability, generator=generator)


register(
    "seeded_mask(Tensor seed, int stream, SymInt[] size, float keep_probability, Device device) -> Tensor",
    _draw_mask,
    lambda seed, stream, size, keep_probability, device: torch.empty(size, dtype=torch.bool, device=device),
    tags=FIXED_STRIDES,
)


_seeded_ops: dict[Any, Any] = {}


def seeded(op: Any) -> Any:
    """The mirrorc operator that runs a random ATen operator under a seed."""
    if op not in _seeded_ops:
        schema = schema_of(op)
        name = "_".join(filter(None, ("seeded", schema.name.removeprefix("aten::"), schema.overload_name)))
        signature = str(schema)[str(schema).index("(") :].replace("(", "(Tensor seed, int stream, ", 1)
        signature = re.sub(r",( \*,)? Generator\? generator(=None)?", "", signature)

        def run(seed: torch.Tensor, stream: int, *args: Any, **kwargs: Any) -> Any:
            return _run_under_seed(op, mix(int(seed), stream), args, kwargs)

        def fake(seed: torch.Tensor, stream: int, *args: Any, **kwargs: Any) -> Any:
            return op(*args, **kwargs)

        _seeded_ops[op] = register(name + signature, run, fake, tags=FIXED_STRIDES)
    return _seeded_ops[op]


def unseeded(op: Any) -> Any:
    return next((drawn for drawn, seeded_op in _seeded_ops.items() if seeded_op is op), None)


def _run_under_seed(op: Any, seed: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    generator = _global_generator(args, kwargs)
    with lock_of(generator.device):
        with STATES_LOCK:
            state = generator.get_state()
            generator.manual_seed(seed)
        try:
            return op(*args, **kwargs)
        finally:
            with STATES_LOCK:
                generator.set_state(state)


def lock_of(device: torch.device) -> threading.Lock:
    return _generator_locks.setdefault(device, threading.Lock())


def _global_generator(args: tuple[Any, ...], kwargs: dict[str, Any]) -> torch.Generator:
    devices = [value.device for value in args if isinstance(value, torch.Tensor)]
    devices += [value for value in (*args, *kwargs.values()) if isinstance(value, torch.device)]
    device = next((d for d in devices if d.type == "cuda"), None)
    if device is None:
        return torch.default_generator
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]
