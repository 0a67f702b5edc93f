"""Folders of `torch.distributed.checkpoint` with trees of tensors and other objects."""

from __future__ import annotations

import os
import pickle
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

_STRUCTURE = "structure"
_TENSOR = "mirrorc.tensor"  # the one key of a dict that stands for a tensor


def beside(folder: Path, what: str) -> Path:
    return folder.with_name(f".{folder.name}.{what}")


def is_checkpoint(folder: Path) -> bool:
    return (folder / ".metadata").is_file() and (folder / "worker-0" / ".metadata").is_file()


def write(folder: Path, tree: Mapping[str, Any]) -> None:
    """Writes a tree of dicts, lists and tuples: tensors by their paths (``model.0.weight``), all else as one object."""
    from torch.distributed import checkpoint as dcp  # imports take a second

    tensors: dict[str, Any] = {}
    structure = _without_tensors(dict(tree), "", tensors)
    with _alone():
        writer = dcp.FileSystemWriter(folder, sync_files=True)
        dcp.save({**tensors, _STRUCTURE: pickle.dumps(structure)}, storage_writer=writer, no_dist=True)


def read(folder: Path) -> dict[str, Any]:
    from torch.distributed import checkpoint as dcp
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

    reader = dcp.FileSystemReader(folder)
    values: dict[str, Any] = {
        name: torch.empty(value.size, dtype=value.properties.dtype)
        if isinstance(value, TensorStorageMetadata)
        else None
        for name, value in reader.read_metadata().state_dict_metadata.items()
    }
    with _alone():
        dcp.load(values, storage_reader=reader, no_dist=True)
    tree: dict[str, Any] = _with_tensors(pickle.loads(values[_STRUCTURE]), values)
    return tree


def sync(path: Path) -> None:
    """Waits until the names in a folder are on the disk."""
    number = os.open(path, os.O_RDONLY)
    try:
        os.fsync(number)
    finally:
        os.close(number)


def _alone() -> warnings.catch_warnings:
    """Silences torch's warning about saving and loading in one process."""
    return warnings.catch_warnings(action="ignore", category=UserWarning)


def _without_tensors(value: Any, path: str, tensors: dict[str, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        tensors[path] = value.detach()
        return {_TENSOR: path}
    within = f"{path}." if path else ""
    if isinstance(value, Mapping):
        return {key: _without_tensors(item, f"{within}{key}", tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_without_tensors(item, f"{within}{index}", tensors) for index, item in enumerate(value))
    return value


def _with_tensors(value: Any, tensors: Mapping[str, Any]) -> Any:
    if isinstance(value, dict):
        if value.keys() == {_TENSOR}:
            return tensors[value[_TENSOR]]
        return {key: _with_tensors(item, tensors) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_with_tensors(item, tensors) for item in value)
    return value
