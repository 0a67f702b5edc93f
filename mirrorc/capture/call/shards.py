"""Splits the tensors of a call into a shard for each replica. Graphs are specialized on the types of shards."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any, NoReturn

import torch

from mirrorc.analysis.communication.worker_meetings import RowsElsewhere
from mirrorc.capture.call.call_arguments import Call, Leaf
from mirrorc.errors import CaptureError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import is_dense, mark_symbolic


@dataclasses.dataclass(frozen=True)
class Shards:
    """A split batch.

    Attributes:
        num_examples: the size of each shard; 0 for the last replicas if the batch is small.
        microbatches: the sizes of each shard's microbatches; empty if no shard is divided.
        rows_elsewhere: the rows gathered by other workers; None until they report.
    """

    tensors: tuple[tuple[torch.Tensor, ...], ...]
    num_examples: tuple[int, ...]
    microbatches: tuple[tuple[int, ...], ...] = ()
    rows_elsewhere: RowsElsewhere | None = None

    @property
    def fewest_examples(self) -> int:
        return min([*self.num_examples, *(size for sizes in self.microbatches for size in sizes)])

    @property
    def have_one_example(self) -> bool:
        return 1 in self.num_examples or any(1 in sizes for sizes in self.microbatches)

    @property
    def have_unequal_parts(self) -> bool:
        return any(len(set(sizes)) > 1 for sizes in self.microbatches)

    def by_microbatch(self, call: Call) -> Shards:
        if not self.microbatches:
            return self
        parts: list[tuple[torch.Tensor, ...]] = []
        for tensors, sizes in zip(self.tensors, self.microbatches, strict=True):
            columns = [
                tensor.split_with_sizes(sizes) if leaf.split else [tensor] * len(sizes)
                for tensor, leaf in zip(tensors, call.leaves, strict=True)
            ]
            parts += zip(*columns, strict=True)
        return Shards(tuple(parts), tuple(size for sizes in self.microbatches for size in sizes))


def split_call(
    call: Call, num_replicas: int, *, fewest: int = 1, microbatches: int = 1, may_be_empty: bool = False
) -> Shards:
    """Splits the tensors of a call along dim 0, into shards whose sizes differ by at most one.

    A batch too small for all replicas is split among the first replicas.

    Args:
        fewest: the smallest microbatch, and shard outside of a `PerReplica`, if the batch has as many examples.
    """
    sizes = shard_sizes(call, num_replicas, fewest, may_be_empty=may_be_empty)
    columns: list[Sequence[torch.Tensor]] = []
    begins = [sum(sizes[:replica]) for replica in range(num_replicas)]
    for leaf in call.leaves:
        if leaf.column:
            parts_of_list = [leaf.of_items(begin, size) for begin, size in zip(begins, sizes, strict=True)]
            columns.append([_resolved(tensor).detach() for tensor in parts_of_list])
        elif leaf.tensor is None:
            columns.append([_resolved(tensor).detach() for tensor in leaf.per_replica])
        elif leaf.split:
            columns.append(_resolved(leaf.tensor).split_with_sizes(sizes))
        else:
            columns.append([_resolved(leaf.tensor).detach()] * num_replicas)
    parts = tuple(tuple(filter(None, _even_part_sizes(size, microbatches, fewest))) for size in sizes)
    is_whole = all(len(part_sizes) <= 1 for part_sizes in parts)
    if not is_whole:
        _refuse_microbatches(call)
    return Shards(tuple(zip(*columns, strict=True)), sizes, () if is_whole else parts)


def shard_sizes(call: Call, num_replicas: int, fewest: int = 1, *, may_be_empty: bool = False) -> tuple[int, ...]:
    """The sizes of the shards of `split_call`, with the same errors.

    Concatenated consecutive shards, split again among as many replicas, have the same sizes.
    """
    for leaf in call.leaves:
        tensors = leaf.column or (leaf.per_replica if leaf.tensor is None else (leaf.tensor,))
        for tensor in tensors:
            _refuse_layout(tensor, leaf.path)
            if tensor.requires_grad:
                raise problem(
                    ValueError,
                    f"MC1308: argument {leaf.path!r} requires a gradient, and would get none",
                    "a step trains parameters alone; a module of mirrorc.data_parallel takes such tensors, but in no list",
                    (f"{leaf.path}.detach()", "if another model has computed it, compile one module that holds both"),
                )
    is_split = any(leaf.tensor is None and leaf.split for leaf in call.leaves)
    sizes = _shard_sizes(call, num_replicas, 1 if is_split else fewest)
    if not may_be_empty and not any(sizes):
        _refuse_empty(next(leaf for leaf in call.leaves if leaf.split))
    return sizes


def _refuse_microbatches(call: Call) -> None:
    for leaf in call.leaves:
        if leaf.counts_items or (leaf.tensor is None and not leaf.split):
            raise problem(
                ValueError,
                f"MC1307: argument {leaf.path!r} cannot be cut into microbatches",
                "a microbatch is rows of each tensor, and this is a list of examples, or a tensor without them in dim 0",
                ("leave microbatches= out", "step.accumulate(...) with smaller batches"),
            )


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    """Materializes lazy conjugates and negatives, because compiled regions read raw memory."""
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor


def _refuse_layout(tensor: torch.Tensor, path: str) -> None:
    if tensor.is_nested:
        raise problem(
            ValueError,
            f"MC1303: argument {path!r} is a nested tensor, which cannot be split",
            fix=f"{path}.to_padded_tensor(0.0), with a mask if what is padded counts",
        )
    if tensor.layout is not torch.strided:
        raise problem(
            ValueError,
            f"MC1303: argument {path!r} has the layout {tensor.layout}, and only dense tensors are split",
            fix=(f"{path}.to_dense()", "pass its parts as tensors with a row for each example"),
        )
    if tensor.is_quantized:
        raise problem(
            ValueError,
            f"MC1303: argument {path!r} is a quantized tensor, which cannot be split",
            fix=f"{path}.dequantize()",
        )
    if tensor.is_meta:
        raise problem(
            ValueError,
            f"MC1303: argument {path!r} is on the meta device and has no values",
            fix=f"torch.empty_like({path}, device='cpu'), and fill it",
        )


def _shard_sizes(call: Call, num_replicas: int, fewest: int) -> tuple[int, ...]:
    wanted: tuple[int, ...] | None = None
    first = ""
    for leaf in call.leaves:
        if not leaf.split:
            continue
        sizes = _sizes_of(leaf, num_replicas, fewest)
        if wanted is None:
            wanted, first = sizes, leaf.path
        elif sizes != wanted:
            is_in_all = sum(wanted) != sum(sizes)
            texts = [str(sum(each)) if is_in_all else " + ".join(map(str, each)) for each in (wanted, sizes)]
            fixes = (_if_in_dim_1(leaf, sum(wanted)) or _if_listed(first, leaf.path)) + _if_offsets(first, leaf.path)
            raise problem(
                ValueError,
                f"MC1304: arguments disagree on dim 0: {first!r} has {texts[0]} examples, {leaf.path!r} has {texts[1]}",
                "each tensor is split along dim 0, the batch",
                (
                    *fixes,
                    f"mirrorc.replicated({leaf.path}), if it is no batch",
                    f"print({first}.shape, {leaf.path}.shape), which must agree in dim 0 if both are batches",
                ),
            )
    if wanted is None:
        raise problem(
            ValueError,
            "MC1306: the call has no tensor to split",
            "data parallelism splits tensor arguments along dim 0",
            ("torch.tensor(batch), as an argument", "leave mirrorc.replicated() out around the batch"),
        )
    return wanted


def _if_in_dim_1(leaf: Leaf, number: int) -> tuple[str, ...]:
    has_examples = leaf.tensor is not None and leaf.tensor.dim() > 1 and leaf.tensor.size(1) == number
    return (f"mirrorc.batch_dim({leaf.path}, 1), if its dim 1 is the batch",) if has_examples else ()


def _if_listed(*paths: str) -> tuple[str, ...]:
    lists = [path.partition("[")[0] for path in paths if "[" in path]
    return (f"mirrorc.examples({lists[0]}), if each item of {lists[0]!r} is one example",) if lists else ()


def _if_offsets(*paths: str) -> tuple[str, ...]:
    if not any("offsets" in path for path in paths):
        return ()
    return (
        "give each bag a row of 2-D indices, filled with padding_idx, in place of offsets",
        "mirrorc.PerReplica([mirrorc.replicated(indices0), ...]), mirrorc.PerReplica([offsets0, ...])",
    )


def _sizes_of(leaf: Leaf, num_replicas: int, fewest: int) -> tuple[int, ...]:
    if leaf.tensor is None:
        if len(leaf.per_replica) != num_replicas:
            raise problem(
                ValueError,
                f"MC1307: argument {leaf.path!r} is a PerReplica of {len(leaf.per_replica)} values, but there "
                f"are {num_replicas} replicas",
                fix=f"mirrorc.PerReplica([...]) of {num_replicas} values, one for each device",
            )
        if any(tensor.dim() == 0 for tensor in leaf.per_replica):
            raise problem(
                ValueError,
                f"MC1307: argument {leaf.path!r} is a PerReplica of scalars",
                "they have no dim 0 to count examples by",
                "mirrorc.PerReplica([value[None] for value in values])",
            )
        return tuple(tensor.size(0) for tensor in leaf.per_replica)
    if leaf.tensor.dim() == 0:
        raise problem(
            ValueError,
            f"MC1306: argument {leaf.path!r} is a scalar tensor and cannot be split along dim 0",
            fix=f"mirrorc.replicated({leaf.path})",
        )
    return _even_part_sizes(leaf.tensor.size(0), num_replicas, fewest)


def _refuse_empty(leaf: Leaf) -> NoReturn:
    why = "a call needs at least one"
    leave_out = f"if len({leaf.path}):, around the call, which leaves the empty batch out"
    if leaf.tensor is None:
        raise problem(ValueError, f"MC1305: argument {leaf.path!r} has no examples on any replica", why, leave_out)
    raise problem(
        ValueError,
        f"MC1305: argument {leaf.path!r} has no examples, its dim 0 is 0",
        why,
        (leave_out, f"mirrorc.replicated({leaf.path}), if it is no batch"),
    )


@functools.lru_cache(maxsize=256)
def _even_part_sizes(total: int, num_parts: int, fewest: int) -> tuple[int, ...]:
    used = max(1, min(num_parts, total // fewest))
    return tuple(total // used + (i < total % used) if i < used else 0 for i in range(num_parts))


ShardTypes = tuple[tuple[torch.Size, tuple[int, ...], torch.dtype], ...]


def shard_types(shard: Sequence[torch.Tensor], device: torch.device) -> ShardTypes:
    """A copy to the device makes tensors with gaps or overlaps dense."""
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
    """Tensors of each of the ``distinct`` types: the first in ``data``; uninitialized if ``data`` is None."""
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
