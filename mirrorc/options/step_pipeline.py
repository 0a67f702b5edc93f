"""The pipeline of a step, checked before anything is compiled."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from mirrorc.errors import PassError
from mirrorc.ir.devices import Device
from mirrorc.ir.workers import Workers
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import listed
from mirrorc.options.option import Request
from mirrorc.options.step_options import why_replicas_are_not_compared
from mirrorc.options.table import OPTIONS
from mirrorc.passes import PASSES, default_pipeline, resolve_sharing
from mirrorc.pipeline.pass_manager import check_order
from mirrorc.pipeline.pipeline_edits import add_passes as put_in
from mirrorc.pipeline.pipeline_edits import check_pass_names, in_exact_order, select_passes
from mirrorc.pipeline.protocol import Pass


def step_pipeline(request: Request, parameters: Mapping[str, Any]) -> tuple[list[Pass], list[str]]:
    """``parameters`` are those of the default pipeline, unused with ``passes=``."""
    base = default_pipeline(**parameters) if request["passes"] is None else request["passes"]
    added = [*OPTIONS.placed(request), *request["add"]]
    pipeline = resolve_sharing(select_passes(put_in(select_passes(base, ()), added), request["disable"]))
    remarks = []
    if request["check_replicas_every"] and not request.workers.are_several:
        why = why_replicas_are_not_compared(request.devices, pipeline)
        remarks += [why] if why else []
    if request["exact_order"]:
        pipeline, remark = in_exact_order(pipeline)
        remarks += [remark] if remark else []
    check_whole(pipeline, request.workers, request.devices, request.asked)
    OPTIONS.check_exclusions(replace(request, pipeline=tuple(pipeline)))
    if request["print_after"] != "all":
        check_pass_names("print_after", request["print_after"], pipeline)
    return pipeline, remarks


def check_whole(
    pipeline: Sequence[Pass], workers: Workers, devices: Sequence[Device], asked: Mapping[str, Any]
) -> None:
    """Raises PassError for a pipeline that cannot compile a step of any model. Runs no pass."""
    try:
        check_order(pipeline)
        for name, why in _missing(pipeline, workers, devices):
            raise problem(
                PassError, f"MC4002: the pass {name!r} is missing", f"{why}", f"add mirrorc.passes.{_class_of(name)}()"
            )
    except PassError as error:
        options = listed(
            f"{o}=" for o in ("passes", "add", "disable", "exact_order") if asked[o] not in (None, (), False)
        )
        code, _, text = str(error).partition(": ")
        what = f"{code}: what {options or 'passes='} gives is no pipeline of a whole step: {text}"
        raise PassError(what) from None


def _missing(pipeline: Sequence[Pass], workers: Workers, devices: Sequence[Device]) -> Iterator[tuple[str, str]]:
    """Missing passes with reasons. None are missing if a pass is from outside, because that pass may do the work."""
    if not all(type(entry) in PASSES.values() for entry in pipeline):
        return
    names = [entry.name for entry in pipeline]
    count = len(devices)
    needed = {
        "plan-buckets": (True, "without it, no gradient has a bucket"),
        "place-variables": (
            "update-at-owner" in names,
            "without it, no parameter has an owner, which 'update-at-owner' needs",
        ),
        "update-at-owner": (
            "spread-copies" in names and "share-parameters" not in names,
            "nothing has an owner whose copies 'spread-copies' could pass on",
        ),
        "share-parameters": (
            workers.are_several and count > 1,
            f"each of {count} devices of this worker, one of several, would send a sum of its own",
        ),
        "reduce-over-workers": (workers.are_several, "without it, no gradient gets to the other workers"),
        "lower-collectives": (count > 1 or workers.are_several, "without it, no collective has a link"),
    }
    for name, (is_needed, why) in needed.items():
        if is_needed and name not in names:
            yield name, why


def _class_of(name: str) -> str:
    return getattr(PASSES[name], "__name__", name)
