"""Options beside a pipeline of the user's own: each has its effect there, or is refused; and what such a pipeline must have."""

import math
import re
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_programs import FunctionPass, sgd_step
from torch import nn

import mirrorc
from mirrorc import api
from mirrorc.options.table import OPTIONS, grouped
from mirrorc.packing import ByBytes, EqualPacks
from mirrorc.passes import default_pipeline

MODEL = nn.Linear(2, 1)
OPTIMIZER = torch.optim.SGD(MODEL.parameters(), lr=0.1)

GIVEN: dict[str, Any] = {
    "modules": MODEL,
    "optimizer": [torch.optim.Adam(MODEL.parameters())],
    "loss_fn": F.l1_loss,
    "loss_reduction": "sum",
    "return_outputs": True,
    "microbatches": 2,
    "clip_grad_norm": 1.0,
    "clip_grad_value": 1.0,
    "autocast": True,
    "scaler": torch.amp.GradScaler("cpu"),
    "check_finite": True,
    "distributed": False,
    "mode": "reproducible",
    "program": "edited.mirror",
    "buckets": EqualPacks(3),
    "order": "reversed",
    "algorithm": "ring",
    "link": "copy",
    "exchange": "dense",
    "compression": "bfloat16",
    "early_update": False,
    "process_group": object(),
    "timeout": 3.0,
    "activations": "50%",
    "shard_optimizer": True,
    "placement": "central",
    "backend": "inductor",
    "capture": "autograd",
    "dynamic": True,
    "exact_order": True,
    "cuda_graphs": True,
    "add": [mirrorc.after("plan-buckets", mirrorc.passes.RecomputeCheckpoints())],
    "disable": ["schedule-overlap"],
    "dump": "folder",
    "print_after": "all",
    "progress": False,
    "check_replicas_every": 3,
}
"""For each option another value than its default."""
WITHOUT_EFFECT = {
    "modules": "refused, as the model is not a function",
    "distributed": "there are no others in this process",
    "process_group": "refused, as nobody has initialised one",
    "cuda_graphs": "refused, as there is no GPU",
}


class Options:
    def __init__(self, options: Any, model_state: Any) -> None:
        self.made = {one.name: getattr(options, one.name) for one in fields(options)}


def made(**options: Any) -> Mapping[str, Any]:
    given = {"model": MODEL, "devices": 2, "optimizer": OPTIMIZER, "loss_fn": F.mse_loss, "backend": "eager"}
    step: Any = mirrorc.compile(**grouped({**given, "passes": default_pipeline(), **options}))
    return {name: _text(value) for name, value in step.made.items()}


def _text(value: Any) -> str:
    shown = repr(value) if " object at 0x" not in repr(value) else f"{type(value).__name__} {vars(value)}"
    return re.sub(" at 0x[0-9a-f]+", "", shown)


@pytest.mark.slow
def test_every_option_has_its_effect_or_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(api, "Step", Options)
    monkeypatch.chdir(tmp_path)
    assert {*GIVEN, "passes"} == set(OPTIONS.defaults)
    silent, usual = [], made()
    for option, value in GIVEN.items():
        try:
            found = made(**{option: value})
        except (ValueError, TypeError) as error:
            if option not in WITHOUT_EFFECT:
                assert re.match(
                    rf"(?s)MC\d+: {option}=.*(given with passes=|the pipeline given with passes= has not)", str(error)
                )
            continue
        if found == usual and option not in WITHOUT_EFFECT:
            silent.append(option)
    assert silent == []


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"link": "copy"},
            "link='copy' and passes= cannot be combined\n  why:  the pipeline given with passes= decides it\n  "
            "fix:  put mirrorc.passes.LowerCollec",
        ),
        (
            {"buckets": 1},
            "buckets=1 and passes= cannot be combined\n  why:  the pipeline given with passes= decides it\n  "
            "fix:  give mirrorc.passes.PlanBuckets its buckets",
        ),
        (
            {"buckets": ByBytes(first_mb=math.inf)},
            "buckets=ByBytes(cap_mb=25.0, first_mb=inf) and passes= cannot be combined",
        ),
        ({"buckets": EqualPacks(2)}, "buckets=EqualPacks(num_packs=2) and passes= cannot be combined"),
        (
            {"order": "reversed"},
            "order='reversed' and passes= cannot be combined\n  why:  the pipeline given with passes= decides "
            "it\n  fix:  give mirrorc.passes.PlanB",
        ),
        (
            {"early_update": False},
            "early_update=False and passes= cannot be combined\n  why:  the pipeline given with passes= decides "
            "it\n  fix:  put mirrorc.passes.",
        ),
        (
            {"algorithm": "ring"},
            "algorithm='ring' and passes= cannot be combined\n  why:  the pipeline given with passes= decides "
            "it\n  fix:  put mirrorc.all_reduce_algorithms.Ring() behind",
        ),
    ],
)
def test_what_a_pass_of_the_pipeline_says_is_refused_beside_it(options: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=f"^MC1004: {re.escape(said)}") as caught:
        mirrorc.compile(
            MODEL, 2, optimizer=OPTIMIZER, loss_fn=F.mse_loss, **grouped({"passes": default_pipeline(), **options})
        )
    assert "mirrorc.Compiler(add=..., disable=...)" in str(caught.value)


def test_the_time_of_a_wait_is_no_matter_of_the_pipeline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "Step", Options)
    assert made(timeout=7)["timeout_seconds"] == "7.0"


NO_WHOLE = "what passes= gives is no pipeline of a whole step: "


NEEDED = {
    "plan-buckets": "the pass 'plan-buckets' is missing\n  why:  without it, no gradient has a bucket\n  fix:  add mirr",
    "outline-regions": "pass 'factor-gradients' takes programs from OUTLINED to OUTLINED, but is given ",
    "replicate": "pass 'pack-gradients' takes programs from REPLICATED to PACKED, but is given one at OU",
    "pack-gradients": "pass 'insert-all-reduce' takes programs from PACKED to REDUCED, but is given one ",
    "insert-all-reduce": "pass 'insert-update' takes programs from REDUCED to UPDATED, but is given one",
    "insert-update": "pass 'schedule-overlap' takes programs from UPDATED to SCHEDULED, but is given on",
    "lower-collectives": "the pass 'lower-collectives' is missing\n  why:  without it, no collective has a link",
    "lower-devices": "the pipeline ends with a SCHEDULED program, which cannot run\n  why:  it must end at LOWE",
}
OF_OWNERS = {
    "place-variables": "the pass 'place-variables' is missing\n  why:  without it, no parameter has an owner",
    "update-at-owner": "the pass 'update-at-owner' is missing\n  why:  nothing has an owner whose copie",
}
OF_WORKERS = {
    "share-parameters": "the pass 'share-parameters' is missing\n  why:  each of 2 devices",
    "reduce-over-workers": "the pass 'reduce-over-workers' is missing\n  why:  without it, no gradient",
}


@pytest.mark.parametrize("name", NEEDED | OF_OWNERS | OF_WORKERS)
def test_a_pipeline_without_a_needed_pass_is_refused(name: str) -> None:
    options = {"placement": "least-loaded" if name in OF_OWNERS else "auto", "over_workers": name in OF_WORKERS}
    passes = [compiler_pass for compiler_pass in default_pipeline(**options) if compiler_pass.name != name]
    said = NO_WHOLE + (NEEDED | OF_OWNERS | OF_WORKERS)[name]
    with pytest.raises(mirrorc.PassError, match=f"^MC4002: {re.escape(said)}"):
        given = {"optimizer": OPTIMIZER, "loss_fn": F.mse_loss, "compiler": mirrorc.Compiler(passes=passes)}
        mirrorc.plan(MODEL, (), 2, world=mirrorc.World(2, 2) if name in OF_WORKERS else None, **given)


def test_the_options_that_make_a_pipeline_are_named() -> None:
    with pytest.raises(
        mirrorc.PassError, match=r"^MC4002: what disable= gives is no pipeline of a whole step: pass 'pack"
    ):
        mirrorc.compile(
            MODEL, 2, optimizer=OPTIMIZER, loss_fn=F.mse_loss, compiler=mirrorc.Compiler(disable=["replicate"])
        )
    with pytest.raises(mirrorc.PassError, match=r"^MC4002: what passes= gives .* ends with a CAPTURED program"):
        mirrorc.compile(MODEL, 2, optimizer=OPTIMIZER, loss_fn=F.mse_loss, compiler=mirrorc.Compiler(passes=[]))


def test_a_pass_from_outside_may_do_the_work_of_one_that_is_needed() -> None:
    passes = [
        FunctionPass(mirrorc.passes.PlanBuckets().run, "plan") if one.name == "plan-buckets" else one
        for one in default_pipeline()
    ]
    model = nn.Linear(2, 1)
    with sgd_step(model, 2, loss_fn=F.mse_loss, passes=passes) as step:
        assert step(torch.ones(4, 2), target=torch.ones(4, 1)).isfinite()
