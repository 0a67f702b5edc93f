"""Splits the tensors of a call into a shard for each replica."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import NoReturn

import torch

from mirrorc.analysis.communication.worker_meetings import RowsElsewhere
from mirrorc.capture.call.call_arguments import Call, Leaf
from mirrorc.messages.problem import problem


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
        fewest: the smallest shard or microbatch, if the batch has as many examples. For a `PerReplica` it limits
            microbatches only.
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
