"""The shapes, strides and dtypes of a shard or microbatch, on which graphs are specialized."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.call.shards import Shards
from mirrorc.errors import CaptureError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import is_dense, mark_symbolic

ShardTypes = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


def shard_types(shard: Sequence[torch.Tensor], device: torch.device) -> ShardTypes:
    """The types of a shard's tensors on a device. A copy to the device makes tensors with gaps or overlaps dense."""
    moved = [t if t.device == device or is_dense(t) else torch.empty_like(t, device="meta") for t in shard]
    return tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in moved)


def types_run(shards: Shards, call: Call, devices: Sequence[Device]) -> Iterator[list[ShardTypes]]:
    """Yields a list for each replica: the types of its shard or microbatches; empty without examples."""
    for replica, (tensors, device) in enumerate(zip(shards.tensors, devices, strict=True)):
        if not shards.num_examples[replica]:
            yield []
            continue
        types = shard_types(tensors, device.torch_device)
        sizes = shards.microbatches[replica] if shards.microbatches else ()
        yield _types_of_microbatches(types, call, sizes) if sizes else [types]


SymbolicDims = tuple[frozenset[int], ...]
"""The symbolic dimensions of each tensor of a call."""


def graphs_to_capture(
    shards: Shards, call: Call, devices: Sequence[Device], symbolic: SymbolicDims = ()
) -> tuple[list[ShardTypes], tuple[tuple[int, ...], ...]]:
    """Returns the distinct types to capture, and the indices of each replica's graphs among them.

    Types that differ only in symbolic sizes share a graph.
    """
    types_of = list(types_run(shards, call, devices))
    kind_of = {types: _kind(types, symbolic) for types_of_replica in types_of for types in types_of_replica}
    first = {kind: types for types, kind in reversed(kind_of.items())}
    kinds = list(dict.fromkeys(kind_of.values()))
    distinct = [first[kind] for kind in kinds]
    if not distinct:
        distinct = [_stand_in_types(shard_types(shards.tensors[0], devices[0].torch_device), call)]
    return distinct, tuple(tuple(kinds.index(kind_of[types]) for types in of_replica) for of_replica in types_of)


def _kind(types: ShardTypes, symbolic: SymbolicDims) -> Any:
    if not symbolic:
        return types
    return tuple(
        (tuple(None if dim in dims and n >= FEWEST_SYMBOLIC else n for dim, n in enumerate(shape)), dtype)
        if dims
        else (shape, stride, dtype)
        for (shape, stride, dtype), dims in zip(types, symbolic, strict=True)
    )


FEWEST_SYMBOLIC = 2
"""The smallest symbolic size: torch specializes graphs on 0 and 1."""


def mark_symbolic_dims(tensors: Sequence[torch.Tensor], symbolic: SymbolicDims) -> None:
    for tensor, dims in zip(tensors, symbolic, strict=False):
        mark_symbolic(tensor, [dim for dim in sorted(dims) if tensor.shape[dim] >= FEWEST_SYMBOLIC])


def examples_of(types: ShardTypes, device: torch.device) -> list[torch.Tensor]:
    return [torch.empty_strided(size, stride, dtype=dtype, device=device) for size, stride, dtype in types]


def data_of(shards: Shards, call: Call, devices: Sequence[Device]) -> list[list[torch.Tensor]]:
    data = []
    for replica, types in enumerate(types_run(shards, call, devices)):
        sizes = shards.microbatches[replica] if shards.microbatches else ()
        begin = 0
        for i in range(len(types)):
            end = begin + sizes[i] if sizes else None
            tensors = zip(shards.tensors[replica], call.leaves, strict=True)
            part = [tensor[begin:end] if leaf.split and sizes else tensor for tensor, leaf in tensors]
            data.append([tensor.detach().to(devices[0].torch_device) for tensor in part])
            begin = end or 0
    return data


def leaves_of(
    distinct: Sequence[ShardTypes], data: Sequence[Sequence[torch.Tensor]] | None, device: torch.device, model_name: str
) -> list[Sequence[torch.Tensor]]:
    """Tensors of each of the ``distinct`` types: the first in ``data``; uninitialized if ``data`` is None.

    Raises:
        CaptureError: ``data`` lacks one of the types.
    """
    if data is None:
        return [examples_of(types, device) for types in distinct]
    first = {shard_types(part, device): part for part in reversed(data)}
    if any(types not in first for types in distinct):
        raise problem(
            CaptureError,
            "MC1305: this worker has no examples in this call, and needs at least one",
            f"with capture='autograd' it runs {model_name} once for each new kind of batch",
            (
                "DataLoader(..., drop_last=True) on all workers, without step.join()",
                "compiler=mirrorc.Compiler(capture='dynamo'), whose error names the line to change",
            ),
        )
    return [first[types] for types in distinct]


def _types_of_microbatches(types: ShardTypes, call: Call, sizes: Sequence[int]) -> list[ShardTypes]:
    return [
        tuple(
            (torch.Size((size, *shape[1:])) if leaf.split else shape, stride, dtype)
            for (shape, stride, dtype), leaf in zip(types, call.leaves, strict=True)
        )
        for size in sizes
    ]


STAND_IN_SIZE = 2
"""The number of examples in the graph of a worker without examples: normalization needs two."""


def _stand_in_types(types: ShardTypes, call: Call) -> ShardTypes:
    for _ in range(STAND_IN_SIZE):
        types = grown_types(types, call)
    return types


def grown_types(types: ShardTypes, call: Call) -> ShardTypes:
    """The types of a shard with one more example: dense, with the same order of dimensions in memory."""
    grown = []
    for (size, stride, dtype), leaf in zip(types, call.leaves, strict=True):
        shape = [size[0] + 1, *size[1:]] if leaf.split else list(size)
        strides, step = [0] * len(shape), 1
        for dim in sorted(range(len(shape)), key=lambda dim: (stride[dim], -dim)):  # the innermost first
            strides[dim] = step
            step *= shape[dim]
        grown.append((torch.Size(shape), tuple(strides), dtype))
    return tuple(grown)
