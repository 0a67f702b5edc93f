"""Rules on clipping: norms count every element once, and all replicas scale alike."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from torch import fx

from mirrorc.analysis.buckets.bucket_parts import GRADIENTS
from mirrorc.analysis.buckets.rescaling import (
    NormOperands,
    Norms,
    factor_of,
    gradient_takers,
    measured_elements,
    norm_in,
    numbers_of,
    rescalings_for,
    scaling_factor,
    taken_by,
)
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, owners_of, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.messages.wording import numbered
from mirrorc.verifier.rules.rule import Order, Violation, calls, rule, scopes

_CLIP_VALUE, _UNSCALE = ops.clip_value.__name__, "unscale"


@rule(since=Stage.SCHEDULED)
def commits_exchange_norms_alike(program: Program) -> Iterator[Violation]:
    """All commits exchange the same number of norms. Norms at one position have one type."""
    commits = [(where, node) for where, graph, _ in scopes(program) for node in calls_to(graph, ops.commit)]
    rows = [[number.kwargs["norm_type"] for number in numbers_of(commit)] for _, commit in commits]
    for (where, commit), row in zip(commits, rows, strict=True):
        if row != rows[0]:
            yield Violation(
                f"{commit.name} on {where(replica_of(commit))} exchanges norms of the types {row}, another one {rows[0]}: "
                "all would wait for numbers that do not come, or take them for others",
                commit,
            )


@rule(since=Stage.SCHEDULED, order=Order.OWNERS)
def gradients_are_unscaled_once(program: Program) -> Iterator[Violation]:
    """If the loss is scaled, the input of each update is divided by the scale once, and so is each norm that is
    reported or bounded. Otherwise nothing is divided.
    """
    is_scaled = Property.UNSCALED in program.properties
    for where, graph, _ in scopes(program):
        for taker in gradient_takers(graph):
            for _, value in taken_by(taker):
                scalings = [scaling_factor(node) for node in rescalings_for(taker, value)]
                factors = [factor_of(factor) for factor in scalings if factor is not None]
                if sum(factor is not None and factor.unscales for factor in factors) != is_scaled:
                    often = "is not divided by the scale of the loss once" if is_scaled else "is divided by a scale"
                    yield Violation(f"what {taker.name} on {where(replica_of(taker))} takes {often}", taker)
        for node in calls_to(graph, ops.tell, ops.clip_factor):
            if norm_in(node.args[0])[1] is not is_scaled:
                often = "is not divided by the scale of the loss" if is_scaled else "is divided by a scale"
                yield Violation(f"the norm that {node.name} on {where(replica_of(node))} takes {often}", node)


@rule(since=Stage.SCHEDULED, order=Order.OWNERS)
def norms_count_every_element_once(program: Program) -> Iterator[Violation]:
    """A norm that is reported or scales gradients counts each element of whole buckets once, summed over all replicas.
    If workers have parts of sums, commits exchange the norms of the parts. A reported name means the same buckets on
    all replicas.
    """
    norms, reported = Norms(program), dict[object, tuple[fx.Node, frozenset[int]]]()
    for where, node in calls(program, ops.tell, ops.clip_factor):
        norm, _ = norm_in(node.args[0])
        measured = norms.of(norm)
        if measured is None:
            yield Violation(f"{node.name} on {where(replica_of(node))} takes {norm.name}, which is no norm", node)
            continue
        buckets = _buckets_of(measured)
        if buckets is None:
            yield Violation(
                f"{node.name} on {where(replica_of(node))} takes {norm.name}, which measures something else than the sums "
                "of gradients",
                node,
            )
            continue
        other, others = (
            reported.setdefault(node.kwargs["what"], (node, buckets)) if node.target is ops.tell else (node, buckets)
        )
        if others != buckets:
            yield Violation(
                f"{node.name} on {where(replica_of(node))} tells the norm of {numbered('bucket', sorted(buckets))}, "
                f"{other.name} that of {numbered('bucket', sorted(others))}, both as {node.kwargs['what']!r}",
                node,
            )
        for bucket in sorted(buckets):
            if not _is_whole(program, bucket, measured):
                yield Violation(
                    f"{norm.name}, which {node.name} on {where(replica_of(node))} takes, does not count each element of "
                    f"bucket {bucket} once",
                    node,
                )


def _buckets_of(measured: NormOperands) -> frozenset[int] | None:
    buckets = [part.bucket if part is not None and part.kind == GRADIENTS else None for part in measured.parts]
    return frozenset(bucket for bucket in buckets if bucket is not None) if None not in buckets else None


def _is_whole(program: Program, bucket: int, measured: NormOperands) -> bool:
    parts = [part for part in measured.parts if part is not None and part.bucket == bucket]
    spans = sorted((span.start, span.stop) for part in parts for span in part.spans)
    are_sums = all(span.replicas == frozenset(program.reduced_replicas) for part in parts for span in part.spans)
    wanted = measured_elements(program, program.buckets[bucket], are_exchanged=measured.is_exchanged)
    place = wanted.start
    for start, stop in spans:
        if start != place:
            return False
        place = stop
    return are_sums and place == wanted.stop and len({part.steps for part in parts}) == 1


@rule(since=Stage.SCHEDULED, order=Order.OWNERS)
def gradients_are_clipped_alike(program: Program) -> Iterator[Violation]:
    """A bucket's gradient is scaled at most once, by a factor computed from its own norm, equally on all replicas. All
    buckets of a norm are scaled by its factor. Either all elements have one bound, or none has a bound.
    """
    norms = Norms(program)
    scaled: dict[int, set[Any]] = defaultdict(set)  # the clippings of each bucket: there must be one
    first: dict[int, fx.Node] = {}
    for where, graph, _ in scopes(program):
        for taker in gradient_takers(graph):
            for bucket, value in taken_by(taker):
                rescalings = rescalings_for(taker, value)
                scaled[bucket].add(tuple(_rescaling(norms, node) for node in rescalings))
                if len(scaled[bucket]) > 1:
                    yield Violation(
                        f"{taker.name} on {where(replica_of(taker))} takes a gradient that is clipped otherwise than on "
                        "another device",
                        taker,
                    )
                first.setdefault(bucket, taker)
    bounds = {i: {step for way in ways for step in way if step[0] == _CLIP_VALUE} for i, ways in scaled.items()}
    for bucket, bound in bounds.items():
        if bound != next(iter(bounds.values())):
            yield Violation(f"the elements of bucket {bucket} have another bound than those of others", first[bucket])
    for bucket, ways in scaled.items():
        factors = [operation for way in ways for operation in way if operation[0] == ops.scale.__name__]
        wrong = next((factor for factor in factors if factor[2] is None or bucket not in factor[2]), None)
        if wrong is not None or len(factors) > len(ways):
            why = "twice" if wrong is None else "by a factor that does not follow from its norm"
            yield Violation(f"the gradient of bucket {bucket} is scaled {why}", first[bucket])
            continue
        for factor in factors:
            others = [other for other in sorted(factor[2]) if not any(factor in way for way in scaled.get(other, ()))]
            if others:
                yield Violation(
                    f"the gradient of bucket {bucket} is scaled by a factor that follows from the norm of "
                    f"{numbered('bucket', others)}, too, which {'is' if len(others) == 1 else 'are'} not scaled by it",
                    first[bucket],
                )


def _rescaling(norms: Norms, node: fx.Node) -> tuple[Any, ...]:
    words = {key: value for key, value in node.kwargs.items() if key != "replica"}
    if node.target is ops.clip_value:
        return (_CLIP_VALUE, tuple(words.items()), None, None)
    factor = factor_of(scaling_factor(node))
    if factor is not None and factor.clips is None:
        return (_UNSCALE, (), None, None)
    norm = norm_in(factor.clips.args[0])[0] if factor is not None and factor.clips is not None else None
    measured = norms.of(norm) if norm is not None else None
    buckets = _buckets_of(measured) if measured is not None else None
    if factor is None or factor.clips is None or measured is None or buckets is None:
        return (ops.scale.__name__, (), None, None)
    return (ops.scale.__name__, factor.clips.kwargs["max_norm"], buckets, measured.norm_type)


@rule(since=Stage.SCHEDULED, order=Order.OWNERS)
def rescaled_memory_is_not_read_again(program: Program) -> Iterator[Violation]:
    """All other reads of a scaled or clipped gradient come before the scaling, because it may overwrite the gradient."""
    for where, graph, _ in scopes(program):
        owners = owners_of(graph)
        for node in calls_to(graph, *ops.RESCALING, ops.update):
            if node.target is ops.update and scaling_factor(node) is None:
                continue
            source: Any = node.args[0]
            for user in source.users:
                if user > node and user is not node:
                    yield Violation(
                        f"{user.name} on {where(owners.get(user))} takes {source.name} after {node.name} may have written its "
                        "memory",
                        user,
                    )
