"""Explains how examples are coupled, in clear cases."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mirrorc.loss_check.evaluation import Evaluated


def reasons_for(
    whole: Evaluated,
    parts: Sequence[Evaluated],
    fitting_reduction: str | None,
    is_normalization: bool,
    is_repeatable: bool,
) -> tuple[str, ...]:
    """``fitting_reduction``: the other ``loss_reduction`` if batch and shards agree with it, else None."""
    if fitting_reduction is not None:
        return (
            f"with loss_reduction={fitting_reduction!r} they are the same: the loss is a {fitting_reduction} over its examples",
        )
    reasons = [
        *_normalizations(whole, is_normalization),
        *_weighted_means(whole, parts),
        *_means_of_nothing(whole, parts),
    ]
    if not is_repeatable:
        reasons.append(
            "the loss of the same batch changes from call to call: forward or the loss reads Python state that it changes where "
            "check_loss cannot put it back, such as an iterator or a queue; compare with that held fixed"
        )
    if whole.observed.unequal_draws:
        names = ", ".join(sorted(whole.observed.unequal_draws))
        reasons.append(
            f"random numbers of {names} differ from run to run: compare with them switched off to see what else differs"
        )
    if not reasons:
        reasons.append(
            "something compares or normalizes examples across the batch (a contrastive term, a statistic over dim 0), or a term "
            "that does not depend on the examples is added once for each replica (with loss_reduction='sum')"
        )
    return tuple(reasons)


def _means_of_nothing(whole: Evaluated, parts: Sequence[Evaluated]) -> list[str]:
    places = [str(i) for i, part in enumerate(parts) if math.isnan(part.loss)]
    if not places or math.isnan(whole.loss):
        return []
    shards = f"shard {places[0]} is" if len(places) == 1 else f"shards {', '.join(places)} is"
    return [
        f"the loss of {shards} not a number, as a mean of nothing is: look for a shard whose examples are all left out, as "
        "padding or by a mask, and divide by a number that is at least 1"
    ]


def _normalizations(whole: Evaluated, is_normalization: bool) -> list[str]:
    num = whole.observed.num_batch_norms
    if not num:
        return []
    calls = "one BatchNorm normalizes" if num == 1 else f"{num} calls of BatchNorm normalize"
    alone = "this is all: with running statistics they are the same" if is_normalization else "this is not all"
    return [
        f"{calls} by the statistics of each replica's shard, not of the whole batch, as in DistributedDataParallel ({alone}); "
        "GroupNorm and LayerNorm do not look at other examples"
    ]


def _weighted_means(whole: Evaluated, parts: Sequence[Evaluated]) -> list[str]:
    reasons: list[str] = []
    for i, (mean, left_out, num_targets) in enumerate(whole.observed.weighted):
        if mean.is_weighted:
            reasons.append(
                f"{mean.function} is a mean weighted by class: a replica divides by the weights of its own targets"
            )
        counts = [part.observed.weighted[i][1:] for part in parts if i < len(part.observed.weighted)]
        if left_out and len({few / many for few, many in counts}) > 1:
            reasons.append(
                f"{mean.function} leaves out the {left_out} of {num_targets} targets that are {mean.ignore_index}, and a replica "
                f"divides by the number that its shard keeps: {', '.join(str(many - few) for few, many in counts)}"
            )
    remedy = "use reduction='sum', and divide by a number that is the same for all shards"
    return [f"{text}; {remedy}" for text in dict.fromkeys(reasons)]
