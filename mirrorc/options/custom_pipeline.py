"""What a pipeline of the user's own leaves of the other options, and what it must have before anything is compiled."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from mirrorc.errors import PassError
from mirrorc.ir.devices import Device
from mirrorc.ir.workers import Workers
from mirrorc.messages.wording import listed
from mirrorc.options.tf_communication import CommunicationOptions
from mirrorc.passes import PASSES
from mirrorc.pipeline.pass_order import check_order
from mirrorc.pipeline.protocol import Pass

_REMEDIES = {
    "bucket_cap_mb": "give mirrorc.passes.PlanBuckets its numbers there",
    "first_bucket_mb": "give mirrorc.passes.PlanBuckets its numbers there",
    "packing": "give mirrorc.passes.PlanBuckets its packing there",
    "gradient_order": "give mirrorc.passes.PlanBuckets its gradient_order there",
    "link": "put mirrorc.passes.LowerCollectives(link={given!r}) there, and give it to FactorGradients and SpreadCopies, too",
    "early_update": "put mirrorc.passes.ReduceOverWorkers(early_update={given!r}) there",
    "communication_options": "give mirrorc.passes.PlanBuckets the size of buckets, LowerCollectives the link, and put an "
    "algorithm of mirrorc.all_reduce_algorithms behind it; timeout_seconds= is an option of its own",
}
"""What to do in place of options that a pass of the pipeline has. Options that check more refuse a pipeline themselves."""


def check_beside_pipeline(asked: Mapping[str, Any], function: Callable[..., Any]) -> None:
    """Refuses options of passes beside a pipeline that has these passes with options of their own.

    Args:
        asked: the arguments of `mirrorc.compile`, by name.
        function: whose they are, for their defaults.

    Raises:
        ValueError: names the option and the remedy.
    """
    if asked["passes"] is None:
        return
    parameters = inspect.signature(function).parameters
    for option, remedy in _REMEDIES.items():
        given, default = asked[option], parameters[option].default
        is_open = given is default or (isinstance(given, str) and given == default)
        if is_open or (isinstance(given, CommunicationOptions) and not given.options().keys() - {"timeout_seconds"}):
            continue
        shown = f"={given!r}" if isinstance(given, str | bool | int | float) else "="
        raise ValueError(
            f"{option}{shown} has no part in a pipeline given with passes=: {remedy.format(given=given)}, or use add_passes and "
            "disable_passes in place of passes"
        )


def check_whole(
    pipeline: Sequence[Pass], workers: Workers, devices: Sequence[Device], asked: Mapping[str, Any]
) -> None:
    """Refuses a pipeline that cannot make a step of any model, as its list alone shows.

    Args:
        pipeline: the passes of the step.
        workers: of the step.
        devices: of this worker.
        asked: the arguments of `mirrorc.compile`, by name, which the message names.

    Raises:
        PassError: says which pass is missing or at the wrong place, and the remedy.
    """
    try:
        check_order(pipeline)
        for name, why in _missing(pipeline, workers, devices):
            raise PassError(f"the pass {name!r} is missing, and {why}; add mirrorc.passes.{_class_of(name)}()")
    except PassError as error:
        given = listed(f"{o}=" for o in ("passes", "add_passes", "disable_passes", "exact_order") if asked[o])
        raise PassError(f"what {given or 'passes='} gives is no pipeline of a whole step: {error}") from None


def _missing(pipeline: Sequence[Pass], workers: Workers, devices: Sequence[Device]) -> Iterator[tuple[str, str]]:
    """The passes that are needed and not there, and why; none beside passes from outside, which may do their work."""
    if not all(type(one) in PASSES.values() for one in pipeline):
        return
    names = [one.name for one in pipeline]
    count = len(devices)
    needed = {
        "plan-buckets": (True, "no gradient has a bucket without"),
        "place-variables": (
            "update-at-owner" in names,
            "no variable has an owner without, which 'update-at-owner' needs",
        ),
        "update-at-owner": (
            "spread-copies" in names and "share-parameters" not in names,
            "nothing has an owner whose copies 'spread-copies' could pass on",
        ),
        "share-parameters": (
            workers.are_several and count > 1,
            f"each of {count} devices of this worker, one of several, would send a sum of its own",
        ),
        "reduce-over-workers": (workers.are_several, "no gradient gets to the other workers without"),
        "lower-collectives": (count > 1 or workers.are_several, "no collective has a link without"),
    }
    for name, (is_needed, why) in needed.items():
        if is_needed and name not in names:
            yield name, why


def _class_of(name: str) -> str:
    return getattr(PASSES[name], "__name__", name)
