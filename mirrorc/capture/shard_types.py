"""The shapes, strides and dtypes of the tensors of a shard, or of a microbatch, on which graphs are specialized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from mirrorc.capture.arguments import Call
from mirrorc.capture.shards import Shards
from mirrorc.ir.devices import Device
from mirrorc.torch_internals import is_dense

ShardTypes = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


def shard_types(shard: Sequence[torch.Tensor], device: torch.device) -> ShardTypes:
    """The shapes, strides and dtypes on which a graph is specialized: those that a replica's tensors have on its device.

    A tensor with gaps or overlaps becomes dense when it is moved to another device.
    """
    moved = [t if t.device == device or is_dense(t) else torch.empty_like(t, device="meta") for t in shard]
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in moved)


def types_run(shards: Shards, call: Call, devices: Sequence[Device]) -> Iterator[list[ShardTypes]]:
    """For each replica, the types of the tensors of each graph that it runs."""
    for replica, (tensors, device) in enumerate(zip(shards.tensors, devices, strict=True)):
        if not shards.num_examples[replica]:
            yield []
            continue
        types = shard_types(tensors, device.torch_device)
        sizes = shards.microbatches[replica] if shards.microbatches else ()
        yield _types_of_microbatches(types, call, sizes) if sizes else [types]


def graphs_to_capture(
    shards: Shards, call: Call, devices: Sequence[Device]
) -> tuple[list[ShardTypes], tuple[tuple[int, ...], ...]]:
    """The distinct types for which graphs are captured; and for each replica, the places there of those that it runs.

    Of several workers, one may have no examples: it captures a graph that none of its replicas runs, because its plan of buckets
    is that of workers that have some.
    """
    types_of = list(types_run(shards, call, devices))
    distinct = list(dict.fromkeys(types for own in types_of for types in own))
    if not distinct:
        distinct = [_stand_in_types(shard_types(shards.tensors[0], devices[0].torch_device), call)]
    return distinct, tuple(tuple(distinct.index(types) for types in own) for own in types_of)


def examples_of(types: ShardTypes, device: torch.device) -> list[torch.Tensor]:
    """Tensors of these types, of any values."""
    return [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in types]


def _types_of_microbatches(types: ShardTypes, call: Call, sizes: Sequence[int]) -> list[ShardTypes]:
    """The types of a shard's microbatches, each a view of the shard: the strides are the shard's."""
    return [
        tuple(
            (torch.Size((size, *shape[1:])) if leaf.split else shape, stride, dtype)
            for (shape, stride, dtype), leaf in zip(types, call.leaves, strict=True)
        )
        for size in sizes
    ]


STAND_IN_SIZE = 2
"""How many examples the graph is captured with that stands in for those of a batch without examples: normalizations over the
batch take no fewer."""


def _stand_in_types(types: ShardTypes, call: Call) -> ShardTypes:
    """The types of a shard with `STAND_IN_SIZE` examples, made of those of one without examples."""
    for _ in range(STAND_IN_SIZE):
        types = grown_types(types, call)
    return types


def grown_types(types: ShardTypes, call: Call) -> ShardTypes:
    """The types of a shard with one example more, laid out in the same order of dimensions."""
    grown = []
    for (size, stride, dtype), leaf in zip(types, call.leaves, strict=True):
        shape = [size[0] + 1, *size[1:]] if leaf.split else list(size)
        strides, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):  # the innermost first
            strides[dim] = step
            step *= shape[dim]
        grown.append((torch.Size(shape), tuple(strides), dtype))
    return tuple(grown)
