"""Tracks elements of buckets through values outside of regions."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, is_computed, pack_of, target_name
from mirrorc.ir.program import Program
from mirrorc.ir.routes import replica_at, route_of, sends_in

GRADIENTS, PARAMETERS, ROWS = "gradients", "parameters", "rows of parameters"
_SAME_ELEMENTS = (torch.ops.aten.clone.default, torch.ops.aten.alias.default, torch.ops.aten.detach.default)
"""Operators that copy or return all elements unchanged."""
_CAST = torch.ops.aten._to_copy.default


@dataclass(frozen=True)
class Span:
    """A range of a bucket's elements.

    ``replicas``, numbered over all workers, have computed the summed gradients, or updated the parameters.
    """

    start: int
    stop: int
    replicas: frozenset[int]


@dataclass(frozen=True)
class Part:
    """The elements of a bucket in a 1-D value.

    Attributes:
        kind: GRADIENTS, PARAMETERS, or ROWS: parameters in the gradient's rows only.
        steps: operators that have changed the elements since the pack, sum or update.
    """

    kind: str
    bucket: int
    spans: tuple[Span, ...]
    steps: tuple[Any, ...] = ()

    @property
    def num_elements(self) -> int:
        return sum(span.stop - span.start for span in self.spans)

    def holds(self, kind: str, bucket: int, start: int, stop: int, replicas: Iterable[int] | None = None) -> bool:
        """True for exactly these elements and replicas (None: any)."""
        if (self.kind, self.bucket) != (kind, bucket) or not self.spans:
            return False
        are_those = replicas is None or all(span.replicas == frozenset(replicas) for span in self.spans)
        return are_those and [(start, stop)] == _joined((span.start, span.stop) for span in self.spans)


def _joined(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, stop in spans:
        if joined and joined[-1][1] == start:
            joined[-1] = (joined[-1][0], stop)
        else:
            joined.append((start, stop))
    return joined


class BucketParts:
    """The elements of buckets in each value of a program, across replicas.

    A torch operator without a rule here counts as a step that changes the elements of its first argument.
    """

    def __init__(self, program: Program) -> None:
        self._program = program
        self._part_of: dict[fx.Node, Part | None] = {}
        self._sent = {route_of(program, node): node for graph in program.graphs() for node in sends_in(graph)}

    def of(self, value: Any) -> Part | None:
        """The bucket elements in a value; None if there are none, or if they are unknown."""
        if not isinstance(value, fx.Node):
            return None
        waiting, entered = [value], set()
        while waiting:  # without recursion, because a ring nests values as deep as it has rounds
            node = waiting[-1]
            missing = [n for n in self._sources(node) if n not in self._part_of and n not in entered]
            entered.add(node)
            if missing and node not in self._part_of:
                waiting += missing
            else:
                self._part_of.setdefault(node, self._part(node))
                waiting.pop()
        return self._part_of[value]

    def _sources(self, node: fx.Node) -> list[fx.Node]:
        if is_computed(node):
            return list(node.all_input_nodes)
        if node.target is not ops.wait or not node.args or not isinstance(node.args[0], fx.Node):
            return []
        launch = node.args[0]
        if launch.target is ops.recv:
            sent = self._sent.get(route_of(self._program, launch))
            return sent.all_input_nodes[:1] if sent is not None else []
        if launch.target in (ops.gather_factors, ops.scatter_sums):
            return list(launch.all_input_nodes)
        if launch.target in ops.EXCHANGES:
            replica = replica_at(self._program, node)
            return [operand for operand in launch.all_input_nodes if replica_at(self._program, operand) == replica][:1]
        return launch.all_input_nodes[:1] if launch.target is ops.broadcast else []

    def _part(self, node: fx.Node) -> Part | None:
        if is_computed(node):
            return self._computed(node)
        if node.target is ops.pack:
            return self._of_pack(node, [replica_at(self._program, node)])
        if node.target is ops.updated:
            return self._whole(PARAMETERS, bucket_of(node), [replica_at(self._program, node)])
        if node.target is operator.getitem:
            step, place = node.args
            if not isinstance(step, fx.Node) or step.target is not ops.step_optimizer:
                return None
            index: Any = step.kwargs["buckets"][place]  # type: ignore[index]
            return self._whole(PARAMETERS, index, [replica_at(self._program, step)])
        return self._awaited(node) if node.target is ops.wait else None

    def _awaited(self, wait: fx.Node) -> Part | None:
        launch = wait.args[0]
        if not isinstance(launch, fx.Node):
            return None
        if launch.target in (ops.recv, ops.broadcast):
            (source,) = self._sources(wait) or (None,)
            return self._part_of.get(source) if source is not None else None
        if launch.target in (ops.gather_factors, ops.scatter_sums):
            return self._summed_over_workers(wait, launch)
        if launch.target in ops.EXCHANGES:
            return self._exchanged(self._sources(wait), bucket_of(launch))
        if launch.target not in ops.REDUCTIONS:
            return None
        whole = self._of_pack(launch, range(self._program.num_replicas))
        if launch.target in ops.SHARED_OUT and whole is not None:
            bucket, replica = self._program.buckets[whole.bucket], replica_at(self._program, wait)
            return _cut(whole, *bucket.share(replica, self._program.num_replicas))
        return whole

    def _exchanged(self, sources: list[fx.Node], bucket: int) -> Part | None:
        part = self._exact(sources[0]) if sources else None
        local, everyone = frozenset(self._program.local_replicas), range(self._program.workers.num_all_replicas)
        if part is None or (part.kind, part.bucket) != (GRADIENTS, bucket):
            return None
        if any(span.replicas != local for span in part.spans):
            return None
        return replace(part, spans=tuple(replace(span, replicas=frozenset(everyone)) for span in part.spans))

    def _summed_over_workers(self, wait: fx.Node, launch: fx.Node) -> Part | None:
        program, index, are_factors = self._program, bucket_of(launch), launch.target is ops.gather_factors
        bucket = self._bucket(index)
        if bucket is None:
            return None
        are_shares = not are_factors and program.num_replicas > 1 and bucket.reduces_by_shares
        steps: set[tuple[Any, ...]] = set()
        for source in launch.all_input_nodes:
            replica, part = replica_at(program, source), self._exact(source)
            start, stop = bucket.share(replica, program.num_replicas) if are_shares else (0, bucket.num_elements)
            summed = [program.workers.first_replica + replica] if are_factors else program.local_replicas
            if part is None or (are_factors and part.steps):
                return None
            if (are_factors or start < stop) and not part.holds(GRADIENTS, index, start, stop, summed):
                return None
            steps.add(part.steps)
        if not are_factors and len(steps) != 1:
            return None
        everyone = frozenset(range(program.workers.num_all_replicas))
        whole = Part(GRADIENTS, index, (Span(0, bucket.num_elements, everyone),), steps.pop() if steps else ())
        if are_factors and not bucket.reduces_by_shares and bucket.part is None:
            return whole
        return _cut(whole, *bucket.updated(replica_at(program, wait), program.num_replicas))

    def _bucket(self, index: int) -> Bucket | None:
        return self._program.buckets[index] if 0 <= index < len(self._program.buckets) else None

    def _whole(self, kind: str, index: int, replicas: Iterable[int]) -> Part | None:
        bucket, first = self._bucket(index), self._program.workers.first_replica
        if bucket is None:
            return None
        return Part(kind, index, (Span(0, bucket.num_elements, frozenset(first + replica for replica in replicas)),))

    def _of_pack(self, node: fx.Node, replicas: Iterable[int]) -> Part | None:
        whole = self._whole(GRADIENTS, bucket_of(node), replicas)
        if whole is None:
            return None
        packs = self._program.buckets[whole.bucket].launch_units
        elements = next((pack for pack in packs if pack.number == pack_of(node)), None)
        return _cut(whole, elements.start, elements.stop) if elements is not None else None

    def _computed(self, node: fx.Node) -> Part | None:
        if node.target in (ops.norm, ops.is_finite):
            return None
        if node.target is ops.updated_rows:
            return self._rows(node)
        if node.target is ops.unpack:
            return _concatenated(_sent_alike([self._exact(source) for source in node.all_input_nodes]))
        if node.target is torch.ops.aten.cat.default:
            return _concatenated([self._exact(source) for source in node.args[0]])  # type: ignore[union-attr, arg-type]
        first, *others = node.args or (None,)
        part, exact = (find(first) if isinstance(first, fx.Node) else None for find in (self._part_of.get, self._exact))
        if part is None or node.target in _SAME_ELEMENTS or node.target is ops.add_accumulated:
            return part
        if part.kind == ROWS:
            return None  # their elements are known only at run time
        if node.target is torch.ops.aten.slice.Tensor and exact is not None:
            return _sliced(exact, *others, **node.kwargs)
        other = self._exact(others[0]) if others and isinstance(others[0], fx.Node) else None
        if node.target is torch.ops.aten.add.Tensor and exact is not None and other is not None and not node.kwargs:
            return _added(exact, other)
        keywords = {key: value for key, value in node.kwargs.items() if key not in ("replica", "pack")}
        if self._narrows_again(part, first, node, keywords):
            return replace(part, steps=part.steps[:-1])
        return replace(part, steps=(*part.steps, named_step(node.target, tuple(others), keywords)))

    def _rows(self, node: fx.Node) -> Part | None:
        parameters, gradient = (self._part_of.get(source) for source in node.args)  # type: ignore[arg-type]
        index, bucket = bucket_of(node), self._bucket(bucket_of(node))
        if parameters is None or gradient is None or bucket is None or parameters.steps:
            return None
        is_sum = gradient.holds(GRADIENTS, index, 0, bucket.num_elements, self._program.reduced_replicas)
        is_whole = is_sum and parameters.holds(PARAMETERS, index, 0, bucket.num_elements)
        return replace(parameters, kind=ROWS) if is_whole else None

    def _narrows_again(self, part: Part, value: Any, node: fx.Node, keywords: Mapping[str, Any]) -> bool:
        """True for a cast back from a wider dtype: the pair of casts only rounds sums."""
        if node.target is not _CAST or set(keywords) != {"dtype"} or not part.steps:
            return False
        narrow, wide = keywords["dtype"], value.meta["val"].dtype
        *earlier, last = part.steps
        casts = [step for step in earlier if step[0] == target_name(_CAST)]
        was_narrow = casts[-1] == _named_cast(narrow) if casts else narrow == self._program.buckets[part.bucket].dtype
        return last == _named_cast(wide) and was_narrow and torch.promote_types(narrow, wide) == wide

    def _exact(self, node: fx.Node) -> Part | None:
        part, value = self._part_of.get(node), node.meta.get("val")
        if part is None or not isinstance(value, torch.Tensor):
            return None
        return part if value.shape == (part.num_elements,) else None


def named_step(target: Any, others: tuple[Any, ...], keywords: Mapping[str, Any] | None = None) -> tuple[str, str]:
    """An item of `Part.steps`. All nodes among the arguments count as equal."""
    return target_name(target), repr(fx.node.map_arg((others, dict(keywords or {})), lambda n: "value"))


def _named_cast(dtype: torch.dtype) -> tuple[str, str]:
    return named_step(_CAST, (), {"dtype": dtype})


def slots_in(program: Program, part: Part) -> Iterator[tuple[str, int, int, int]]:
    """For each slot: its variable, the bucket offset of its first element here, and its start and stop in the value."""
    place = 0
    for span in part.spans:
        for slot in program.buckets[part.bucket].slots:
            first, last = max(span.start, slot.offset), min(span.stop, slot.offset + slot.num_elements)
            if first < last:
                yield slot.variable, first, place + first - span.start, place + last - span.start
        place += span.stop - span.start


def _cut(part: Part, start: int, stop: int) -> Part:
    spans, place = [], 0
    for span in part.spans:
        length = span.stop - span.start
        first, last = max(start - place, 0), min(stop - place, length)
        if first < last:
            spans.append(replace(span, start=span.start + first, stop=span.start + last))
        place += length
    return replace(part, spans=tuple(spans))


def _sliced(part: Part, dim: Any = 0, start: Any = None, end: Any = None, step: Any = 1) -> Part | None:
    if dim not in (0, -1) or step != 1:
        return None
    first, last, _ = slice(start, end).indices(part.num_elements)
    return _cut(part, first, max(first, last))


def _concatenated(parts: list[Part | None]) -> Part | None:
    first = parts[0] if parts else None
    if first is None or any(p is None or replace(p, spans=()) != replace(first, spans=()) for p in parts):
        return None
    return replace(first, spans=tuple(span for part in parts if part is not None for span in part.spans))


def _sent_alike(parts: list[Part | None]) -> list[Part | None]:
    """If only some packs have the step `add_unsent`, adds it to all, so that they can be joined."""
    name = target_name(ops.add_unsent)
    steps = {part.steps for part in parts if part is not None}
    in_part = [ways for ways in steps if any(step[0] == name for step in ways)]
    if (
        len(steps) != 2
        or len(in_part) != 1
        or {tuple(s for s in ways if s[0] != name) for ways in steps} != steps - {*in_part}
    ):
        return parts
    return [replace(part, steps=in_part[0]) if part is not None else None for part in parts]


def _added(part: Part, other: Part) -> Part | None:
    if part.kind != GRADIENTS or replace(part, spans=()) != replace(other, spans=()):
        return None
    spans = list(_pairwise_sums(part, other))
    return replace(part, spans=tuple(s for s in spans if s is not None)) if None not in spans else None


def _pairwise_sums(first: Part, other: Part) -> Iterator[Span | None]:
    cuts = [[0, *accumulate(span.stop - span.start for span in part.spans)] for part in (first, other)]
    if cuts[0][-1] != cuts[1][-1]:
        yield None
        return
    for start, stop in pairwise(sorted({*cuts[0], *cuts[1]})):
        (left,), (right,) = _cut(first, start, stop).spans, _cut(other, start, stop).spans
        is_sum = (left.start, left.stop) == (right.start, right.stop) and not left.replicas & right.replicas
        yield replace(left, replicas=left.replicas | right.replicas) if is_sum else None
