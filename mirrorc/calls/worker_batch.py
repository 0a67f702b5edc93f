"""This worker's shard of a batch."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from mirrorc.capture.call.argument_markers import BatchDim, PerReplica, replicated
from mirrorc.capture.call.call_arguments import Leaf, Structure, flatten_call, rebuild
from mirrorc.capture.call.shards import shard_sizes
from mirrorc.cluster import find_place
from mirrorc.ir.workers import Workers, World
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted

_T = TypeVar("_T")


def shard_batch(batch: _T, *, devices_per_worker: int | Sequence[int] = 1, process_group: Any = None) -> _T:
    """This worker's shard of a batch that every worker has whole. With a step, use `Step.shard_batch`.

    The batch is split along dim 0 among the replicas of all workers, in the order of ranks, into sizes that differ by
    at most one. If it is too small for all replicas, the last workers get tensors without examples; a step accepts
    these. The rank comes from `mirrorc.cluster.find_place`. Nothing is communicated.

    Args:
        batch: a tensor, or nested containers of tensors with equally many examples in dim 0. `mirrorc.replicated`
            values, tensors without dimensions and other objects stay as they are. A `mirrorc.PerReplica` has a value
            for each replica of all workers; this worker gets its own. Lists of examples are split by items.
        devices_per_worker: the number of devices of each worker; a sequence of numbers if they differ.
        process_group: as for `mirrorc.Communication`.

    Returns:
        The same containers of views of the tensors; in a process on its own, the batch itself.

    Raises:
        TypeError, ValueError: tensors disagree on dim 0, the batch cannot be split, a worker would have none of its
            packed sequences, or the description of the workers is wrong. All workers raise the same error.
    """
    place = find_place(process_group)
    return part_of_worker(batch, World(place.num_workers, devices_per_worker).worker(place.rank))


def part_of_worker(batch: _T, workers: Workers, fewest: int = 1) -> _T:
    """See `shard_batch`. Each replica gets at least ``fewest`` examples if the batch has enough."""
    if not workers.are_several:
        return batch
    call = flatten_call(["batch"], (batch,), {})
    is_split = [leaf.split and (leaf.tensor is None or leaf.tensor.dim() > 0) for leaf in call.leaves]
    to_split = tuple(leaf for leaf, splits in zip(call.leaves, is_split, strict=True) if splits)
    sizes = shard_sizes(dataclasses.replace(call, leaves=to_split), workers.num_all_replicas, fewest)
    (structure,), _ = call.structure
    _refuse_sequences_of_none(structure, sizes, workers)
    parts = [
        leaf.tensor if leaf.column or (leaf.split and not splits) else _part(leaf, sizes, workers)
        for leaf, splits in zip(call.leaves, is_split, strict=True)
    ]
    shard: _T = rebuild(structure, parts, call.plain)
    return shard


def _part(leaf: Leaf, sizes: Sequence[int], workers: Workers) -> Any:
    first, number = workers.first_replica, workers.devices_per_worker[workers.rank]
    begins = [0, *itertools.accumulate(sizes)]
    if leaf.counts_items:
        of_replicas = [slice(begins[i], begins[i + 1]) for i in range(first, first + number)]
        return of_replicas if leaf.tensor is None else slice(begins[first], begins[first + number])
    mark = _mark_of(leaf)
    if leaf.tensor is None:
        return PerReplica([mark(tensor) for tensor in leaf.per_replica[first : first + number]])
    if not leaf.split:
        return mark(leaf.tensor)
    return mark(leaf.tensor.narrow(0, begins[first], begins[first + number] - begins[first]))


def _mark_of(leaf: Leaf) -> Callable[[torch.Tensor], Any]:
    if not leaf.split:
        return replicated
    return functools.partial(BatchDim, dim=0) if leaf.is_moved else lambda tensor: tensor


def _refuse_sequences_of_none(structure: Structure, sizes: Sequence[int], workers: Workers) -> None:
    ends = list(itertools.accumulate(workers.devices_per_worker))
    numbers = [sum(sizes[end - number : end]) for end, number in zip(ends, workers.devices_per_worker, strict=True)]
    if not all(numbers) and _has_packed(structure):
        raise problem(
            ValueError,
            f"MC6303: worker {numbers.index(0)} would get none of the packed sequences of {counted(sum(sizes), 'example')}",
            "torch has no PackedSequence without sequences",
            ("pass the padded tensor and the lengths", "leave the batch out on all workers"),
        )


def _has_packed(structure: Structure) -> bool:
    if structure[0] in ("leaf", "plain", "constant"):
        return False
    return structure[0] == "packed sequence" or any(map(_has_packed, structure[2]))
