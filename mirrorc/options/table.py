"""The table of `mirrorc.compile`'s options, with their kinds, passes and exclusions."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from types import NoneType
from typing import Any, Literal, get_args

import torch

from mirrorc.ir.program import Program
from mirrorc.messages.wording import listed
from mirrorc.options.communication import Communication
from mirrorc.options.compiler import Compiler
from mirrorc.options.debug import Debug
from mirrorc.options.memory import Memory
from mirrorc.options.option import WITHOUT_OPTIMIZER, Exclusion, NeededPasses, Option, Options, Request, records_of
from mirrorc.runtime.state.optimizers.loss_scale import is_in_use

LossReduction = Literal["mean", "sum"]
FiniteCheck = bool | Literal["skip"]
Distributed = bool | Literal["auto"]
Mode = Literal["debug", "fast-start", "reproducible", "slow-network"]

MODES: Mapping[str, Mapping[str, Any]] = {
    "debug": {"backend": "eager", "exact_order": True, "check_finite": True, "dump": "mirrorc_dump"},
    "fast-start": {"backend": "eager"},
    "reproducible": {"exact_order": True},
    "slow-network": {"compression": "bfloat16"},
}


def _uses_float16_parameters(request: Request) -> str:
    parameters = request.asked["model"].named_parameters()
    name = next((name for name, p in parameters if p.requires_grad and p.dtype == torch.float16), None)
    if name is None:
        return ""
    return f"gradients are divided by the scale, for which 16 bits are too few, and the parameter {name!r} is float16"


_CLIP_PASSES = NeededPasses(("clip-gradients",), "put mirrorc.passes.ClipGradients() there, after ShareParameters")

OPTIONS = Options(
    [
        Option("modules"),
        Option("optimizer"),
        Option("loss_fn", "give a function loss_fn(output, target)", kinds=(Callable, NoneType)),
        Option(
            "loss_reduction",
            "say 'mean' or 'sum', as the loss does over its examples",
            "mean",
            kinds=(),
            texts=get_args(LossReduction),
        ),
        Option("return_outputs", "say True, for loss, outputs = step(...), or False", default=False, kinds=(bool,)),
        Option(
            "microbatches",
            "give a number of parts, 1 to run each shard at once",
            1,
            kinds=(int,),
            accepts=lambda parts: parts >= 1,
            passes=NeededPasses(
                ("accumulate-microbatches",),
                "put mirrorc.passes.AccumulateMicrobatches() there, before Replicate",
                may_be_in_passes=True,
            ),
        ),
        Option("clip_grad_norm", passes=_CLIP_PASSES, excludes=(WITHOUT_OPTIMIZER,)),
        Option("clip_grad_value", passes=_CLIP_PASSES, excludes=(WITHOUT_OPTIMIZER,)),
        Option("autocast"),
        Option(
            "scaler",
            "give a torch.amp.GradScaler, or None",
            kinds=(torch.amp.GradScaler, NoneType),
            passes=NeededPasses(("unscale-gradients", "check-finite"), "leave passes= out"),
            excludes=(
                WITHOUT_OPTIMIZER,
                Exclusion(
                    "by two steps",
                    lambda r: "each counts and changes its scale as update() does" if is_in_use(r["scaler"]) else "",
                    "give each step a GradScaler of its own, close() the other step, or train both optimizers in one step, "
                    "optimizer=[first, second]",
                ),
                Exclusion(
                    "check_finite",
                    "the scaler skips each step whose gradients are not finite, and check_finite says "
                    "what happens to such a step, too",
                ),
                Exclusion("cuda_graphs", "the host looks at what is finite in every step, and a graph runs without it"),
                Exclusion(
                    "with a model in float16",
                    _uses_float16_parameters,
                    "keep parameters in float32 and compute in float16 by autocast=torch.float16 (torch's GradScaler refuses "
                    "them, too)",
                ),
            ),
        ),
        Option(
            "check_finite",
            "say True, to raise an error where a loss or gradient is not finite, 'skip', to leave such updates out, or False",
            False,
            kinds=(bool,),
            texts=("skip",),
            passes=NeededPasses(("check-finite",), "put mirrorc.passes.CheckFinite() there, after ShareParameters"),
            excludes=(
                Exclusion(
                    "without optimizer=",
                    lambda r: "" if r["check_finite"] != "skip" or r["optimizer"] else "there is no update to skip",
                    "check_finite=True, which raises an error and changes nothing",
                ),
            ),
        ),
        Option(
            "distributed",
            "say True, to train together with other workers, False, to train in this process alone, or 'auto'",
            "auto",
            kinds=(bool,),
            texts=("auto",),
        ),
        Option(
            "program",
            "give the file of an edited program, a Program, or None",
            kinds=(str, os.PathLike, Program, NoneType),
            excludes=(Exclusion("activations", "the bound chooses among programs of its own"),),
        ),
        Option("mode", f"say {', '.join(map(repr, MODES))}, or None", kinds=(NoneType,), texts=tuple(MODES)),
    ],
    groups=(Communication, Memory, Compiler, Debug),
)


def checked_arguments(asked: Mapping[str, Any], declared: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The checked arguments of `mirrorc.compile` by option, including those set by ``mode``; and remarks."""
    asked = OPTIONS.by_name(asked, declared)
    OPTIONS.check_kinds(asked)
    if asked["mode"] is None:
        return asked, []
    preset = {name: value for name, value in MODES[asked["mode"]].items() if not OPTIONS[name].is_asked(asked[name])}
    if os.environ.get("MIRRORC_DUMP"):
        preset.pop("dump", None)
    sets = listed(OPTIONS[name].text(value) for name, value in preset.items())
    return {**asked, **preset}, [f"mode={asked['mode']!r} sets {sets or 'nothing, as all of its options are given'}"]


def grouped(options: Mapping[str, Any]) -> dict[str, Any]:
    """Keywords of `mirrorc.compile` from options by name: options of a group go into the group's dataclass."""
    keywords = dict(options)
    for keyword, group in OPTIONS.groups.items():
        fields = {record.name: keywords.pop(record.name) for record in records_of(group) if record.name in keywords}
        if fields:
            keywords[keyword] = group(**fields)
    return keywords
