"""Checksums that compare replicated values without sending them."""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch

from mirrorc.cluster.consistency import digest
from mirrorc.ir.program import Program
from mirrorc.runtime.state.replica_check import checksums

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")


def updated_as_a_whole(program: Program) -> list[str]:
    """Parameters of optimizers that are not element-wise. Each worker runs such an optimizer by itself."""
    return [slot.variable for bucket in program.buckets if not bucket.rule.elementwise for slot in bucket.slots]


def checksums_of(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    rows = checksums(list(tensors.values())).tolist() if tensors else []
    return {name: f"checksum {digest(str(row)):x}" for name, row in zip(tensors, rows, strict=True)}


def checksums_of_state(
    optimizers: Sequence[torch.optim.Optimizer], named: Iterable[tuple[str, torch.Tensor]]
) -> dict[str, str]:
    names = {id(tensor): name for name, tensor in named}
    entries = {
        f"{key}{where} of {names.get(id(parameter), 'another parameter')}": value
        for optimizer in optimizers
        for parameter, entries_of_parameter in optimizer.state.items()
        for key, whole in entries_of_parameter.items()
        for where, value in _values_in(whole, "", {})
    }
    checksums = checksums_of({name: value for name, value in entries.items() if isinstance(value, torch.Tensor)})
    others = {name: value for name, value in entries.items() if isinstance(value, str)}
    return dict(sorted((checksums | others).items()))


def _values_in(value: Any, path: str, known: dict[int, tuple[str, Any]]) -> Iterator[tuple[str, torch.Tensor | str]]:
    """Paths, and tensors or texts, of a nested value. Texts are equal in all processes."""
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
        parts = {f"[{key!r}]": item for key, item in value.items()}
    elif isinstance(value, list | tuple):
        parts = {f"[{i}]": item for i, item in enumerate(value)}
    elif isinstance(value, torch.Generator):
        parts = {".get_state()": value.get_state()}
    elif isinstance(value, np.ndarray) and value.dtype.hasobject:
        parts = {f"[{i}]": item for i, item in enumerate(value.ravel().tolist())}
    elif type(value).__repr__ is object.__repr__ or (dataclasses.is_dataclass(value) and not isinstance(value, type)):
        parts = {f".{name}": item for name, item in _attributes(value).items()}
    if not parts:
        yield path, _stable_text(value)
    elif id(value) in known:
        yield path, f"the {type(value).__name__} {known[id(value)][0]}"
    else:
        known[id(value)] = path, value
        yield path, f"{type(value).__name__} of {len(parts)}"
        for where, item in parts.items():
            yield from _values_in(item, path + where, known)


def _attributes(value: Any) -> dict[str, Any]:
    slots = [name for kind in type(value).__mro__ for name in vars(kind).get("__slots__", ())]
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(value, "__dict__", {})


def _stable_text(value: Any) -> str:
    """A text that is equal in all processes: without addresses, with sorted sets, and with digests of arrays, because
    repr() may truncate them.
    """
    if isinstance(value, Set):
        return f"{{{', '.join(sorted(map(_stable_text, value)))}}}"
    text = _ADDRESS.sub("", repr(value))
    is_array = callable(getattr(value, "tobytes", None))
    return f"{text} {hashlib.sha256(value.tobytes()).hexdigest()[:16]}" if is_array else text
