"""`save_checkpoint` and `load_checkpoint`, in the format of `torch.distributed.checkpoint`."""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mirrorc.calls.training_state import KEYS
from mirrorc.checkpoints.folders import beside, is_checkpoint, read, sync, write
from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import listed
from mirrorc.step import Step
from mirrorc.user.restore import put_back_after


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
