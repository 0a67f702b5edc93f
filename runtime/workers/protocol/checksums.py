"""What tells the bits of what every worker has a copy of, by name, so that workers can compare them without sending them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from mirrorc.ir.program import Program
from mirrorc.runtime.state.replica_check import checksums
from mirrorc.runtime.workers.protocol.header import digest

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def updated_as_a_whole(program: Program) -> list[str]:
    """The parameters that optimizers update that are not element-wise; each worker runs these by itself."""
    return [slot.variable for bucket in program.buckets if not bucket.rule.elementwise for slot in bucket.slots]


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """A checksum of each tensor, by name."""
    rows = checksums(list(tensors.values())).tolist() if tensors else []
    return {name: f"checksum {digest(str(row)):x}" for name, row in zip(tensors, rows, strict=True)}


def checksums_of_state(
    optimizers: Sequence[torch.optim.Optimizer], named: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    """What tells the bits of the optimizers' state, by entry and parameter.

    Args:
        optimizers: the user's.
        named: the variables, with their names.
    """
    names = {id(tensor): name for name, tensor in named}
    entries = {
        f"{key}{where} of {names.get(id(parameter), 'another parameter')}": value
        for optimizer in optimizers
        for parameter, own in optimizer.state.items()
        for key, whole in own.items()
        for where, value in _values_in(whole, "", {})
    }
    found = checksums_of({name: value for name, value in entries.items() if isinstance(value, torch.Tensor)})
    others = {name: value for name, value in entries.items() if isinstance(value, str)}
    return dict(sorted((found | others).items()))


def _values_in(value: Any, path: str, known: dict[int, tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor | str]]:
    """The tensors in a value, and texts that tell the rest of it in each process alike, with where each is in it.

    Args:
        value: any: objects are told by their attributes, unless they have a text of their own.
        path: where it is.
        known: what was told before, where, by ids; it is kept, and not told again.
    """
    if isinstance(value, torch.Tensor) and value.layout is torch.sparse_coo:
        yield f"{path} sizes", str(list(value.shape))
        yield f"{path} indices", value._indices()
        yield f"{path} values", value._values()
        return
    if isinstance(value, torch.Tensor):
        yield path, value
        return
    parts: dict[str, Any] = {}
    if isinstance(value, Mapping):
        parts = {f"[{key!r}]": own for key, own in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"[{i}]": own for i, own in enumerate(value)}
    elif isinstance(value, torch.Generator):
        parts = {".get_state()": value.get_state()}
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        parts = {f"[{i}]": own for i, own in enumerate(value.ravel().tolist())}
    elif type(value).__repr__ is object.__repr__ or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        parts = {f".{name}": own for name, own in _attributes(value).items()}
    if not parts:
        yield path, _told(value)
    elif id(value) in known:
        yield path, f"the {type(value).__name__} {known[id(value)][0]}"
    else:
        known[id(value)] = path, value
        yield path, f"{type(value).__name__} of {len(parts)}"
        for where, own in parts.items():
            yield from _values_in(own, path + where, known)


def _attributes(value: Any) -> dict[str, Any]:
    """The attributes of an object, those in slots, too."""
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _told(value: Any) -> str:
    """A text of a value without addresses and in one order, with a digest of its bytes where the text may leave some out."""
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_told, value)))}}}"
    text = _ADDRESS.sub("", repr(value))
    is_array = callable(getattr(value, "tobytes", None))
    return f"{text} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}" if is_array else text
