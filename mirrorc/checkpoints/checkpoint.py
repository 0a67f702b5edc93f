"""`save_checkpoint` and `load_checkpoint`, in the format of `torch.distributed.checkpoint`."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import pickle
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mirrorc.calls.training_state import KEYS
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import listed
from mirrorc.step import Step
from mirrorc.user.restore import put_back_after

_STRUCTURE = "structure"
_TENSOR = "mirrorc.tensor"  # the one key of a dict that stands for a tensor


def save_checkpoint(step: Step, folder: str | os.PathLike[str], **others: Any) -> None:
    """Saves `Step.state_dict` and ``others`` in a folder, whole or not at all; all workers call it.

    An earlier checkpoint is replaced once the new one is on the disk. Worker 0 saves the common state, and each worker
    its own part, so all workers must see the folder. `torch.distributed.checkpoint` can read it: ``dcp.load`` with
    ``{"model": model.state_dict()}`` loads only the model.

    Args:
        others: objects with a ``state_dict``, such as a scheduler, or values, such as the epoch; worker 0's are saved.

    Raises:
        ValueError: the folder exists and is not a checkpoint, or ``others`` has a reserved name.
        OSError: it cannot be written; the earlier checkpoint is unchanged.
        ExecutionError, CommunicationError: as `Step.state_dict`; or another worker failed.
    """
    whole = Path(folder)
    unfinished, old = beside(whole, "unfinished"), beside(whole, "old")
    state = step.state_dict()
    own = {"worker": state.pop("worker")}
    taken = others.keys() & {*state, *own}
    if taken:
        raise problem(
            ValueError,
            f"MC7004: {listed(sorted(map(repr, taken)))} is a name of the step's own state",
            fix=f"mirrorc.save_checkpoint(step, folder, my_{min(taken)}=...)",
        )
    with _on_all(step):
        if step.is_chief:
            if whole.exists() and not is_checkpoint(whole):
                raise problem(
                    ValueError,
                    f"MC7004: save_checkpoint() would replace {whole}, which is no checkpoint",
                    fix="mirrorc.save_checkpoint(step, 'run/last'), a folder that is new or an earlier checkpoint",
                )
            shutil.rmtree(unfinished, ignore_errors=True)
            unfinished.mkdir(parents=True)
    with _on_all(step):
        write(unfinished / f"worker-{step.rank}", own)
        if step.is_chief:
            saved = {
                name: value.state_dict() if hasattr(value, "state_dict") else value for name, value in others.items()
            }
            write(unfinished, {**state, **saved})
    with _on_all(step):
        if step.is_chief:
            sync(unfinished)
            shutil.rmtree(old, ignore_errors=True)
            if whole.exists():
                os.rename(whole, old)
            os.rename(unfinished, whole)
            sync(whole.parent)
            shutil.rmtree(old, ignore_errors=True)


def load_checkpoint(step: Step, folder: str | os.PathLike[str], **others: Any) -> dict[str, Any]:
    """Loads a checkpoint of `save_checkpoint` into a step, see `Step.load_state_dict`; all workers call it.

    It unpickles data: load only checkpoints that you trust.

    Args:
        others: objects with ``load_state_dict``, by the keywords of `save_checkpoint`.

    Returns:
        All other saved values, and the states of objects missing in ``others``.

    Raises:
        FileNotFoundError: there is no checkpoint.
        TypeError, ValueError, ExecutionError: as `Step.load_state_dict`; or ``others`` has an object that was not
            saved. Nothing was changed.
    """
    whole = Path(folder)
    if not whole.exists() and is_checkpoint(beside(whole, "old")):
        whole = beside(whole, "old")  # a process ended between the two renames
    if not is_checkpoint(whole):
        why = "a torch.save file is read by torch.load"
        fix = "mirrorc.load_checkpoint(step, 'run/last'), the folder that save_checkpoint was given"
        raise problem(FileNotFoundError, f"MC7004: {whole} has no checkpoint of mirrorc.save_checkpoint", why, fix)
    common = read(whole)
    num_workers = sum(1 for _ in whole.glob("worker-*"))
    states = [{**common, **read(whole / f"worker-{rank}")} for rank in range(num_workers)]
    saved = {name: value for name, value in common.items() if name not in KEYS}
    lacking = [name for name in others if name not in saved]
    if lacking:
        why = f"beside the step it has {listed(sorted(saved))}"
        fix = "mirrorc.load_checkpoint(...), with the keywords that save_checkpoint had"
        raise problem(ValueError, f"MC7004: the checkpoint has no {listed(map(repr, lacking))}", why, fix)
    undo: list[Callable[[], object]] = []
    try:
        for name, holder in others.items():
            before = copy.deepcopy(holder.state_dict())
            undo.append(functools.partial(holder.load_state_dict, before))
            holder.load_state_dict(saved.pop(name))
        step.load_state_dict([{name: state[name] for name in KEYS} for state in states])
    except BaseException:
        with put_back_after(reversed(undo)):
            raise
    return saved


@contextlib.contextmanager
def _on_all(step: Step) -> Iterator[None]:
    """A stage that all workers end together. If one fails, all raise an error."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:  # noqa: BLE001 - it is raised once the others know
        failure = error
    cluster = step._options.cluster
    if cluster is not None and cluster.num_workers > 1:
        said = f"{type(failure).__name__}: {failure}" if failure is not None else ""
        texts = cluster.all_say(said, timeout_seconds=step._options.timeout_seconds)
        rank, text = next(((rank, text) for rank, text in enumerate(texts) if text), (0, ""))
        if text and failure is None:
            raise problem(
                CommunicationError,
                f"MC7005: worker {rank} could not save its part of the checkpoint",
                text,
                "df -h, on its machine, and save again",
                now="an earlier one stays",
            )
    if failure is not None:
        raise failure


# Folders of `torch.distributed.checkpoint` with trees of tensors and other objects


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
