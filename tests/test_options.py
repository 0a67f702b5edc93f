"""What `mirrorc.compile` takes, option by option: anything else is refused by an error that names option, value and remedy."""

from __future__ import annotations

import inspect
import math
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirrorc

MODEL = nn.Linear(2, 1)


def values() -> dict[str, Any]:
    """Of all kinds, by name; made anew for each option, as an iterator is used up."""
    return {
        "None": None,
        "True": True,
        "False": False,
        "0": 0,
        "1": 1,
        "-1": -1,
        "2.5": 2.5,
        "-2.5": -2.5,
        "nan": math.nan,
        "inf": math.inf,
        "numpy's 2.5": numpy.float64(2.5),
        "numpy's True": numpy.bool_(True),
        "no text": "",
        "a text": "30",
        "a path": Path("folder"),
        "'auto'": "auto",
        "'mean'": "mean",
        "'skip'": "skip",
        "'copy'": "copy",
        "'eager'": "eager",
        "'cpu:0'": "cpu:0",
        "bytes": b"30",
        "no list": [],
        "no dict": {},
        "no set": set[str](),
        "list of text": ["30"],
        "list of number": [1],
        "list of None": [None],
        "list of pass": [mirrorc.passes.Replicate()],
        "list of name": ["replicate"],
        "list of device": ["cpu:0"],
        "tuple of text": ("30",),
        "no tuple": (),
        "dict": {"a": 1},
        "iterator": iter(["replicate"]),
        "object": object(),
        "class": int,
        "function": F.mse_loss,
        "tensor": torch.tensor(1.0),
        "tensors": torch.ones(2),
        "array": numpy.array([1, 2]),
        "model": MODEL,
        "optimizer": torch.optim.SGD(MODEL.parameters(), lr=0.1),
    }


NO_NAMES = {"no list", "no set", "no tuple", "list of name"}
BOOLS = {"True", "False"}
TAKEN: dict[str, set[str]] = {
    "model": {"model"},
    "devices": {"None", "1", "list of device"},
    "optimizer": {"optimizer"},
    "loss_fn": {"None", "function", "model"},
    "loss_reduction": {"'mean'"},
    "backend": {"'eager'"},
    "dump": {"None", "no text", "a text", "a path", "'auto'", "'mean'", "'skip'", "'copy'", "'eager'", "'cpu:0'"},
    "print_after": NO_NAMES,
    "print_after_all": BOOLS,
    "passes": {"None", "no list", "no tuple", "list of pass"},
    "add_passes": {"no list", "no tuple"},
    "disable_passes": NO_NAMES,
    "bucket_cap_mb": {"None", "0", "1", "2.5", "inf", "numpy's 2.5", "'auto'"},
    "first_bucket_mb": {"None", "1", "2.5", "inf", "numpy's 2.5"},
    "packing": {"None", "0", "1", "function", "model"},
    "gradient_order": {"function", "model"},
    "link": {"None", "'copy'"},
    "all_reduce": {"'auto'"},
    "communication_options": {"None"},
    "exact_order": BOOLS,
    "capture": {"'auto'"},
    "timeout_seconds": {"1", "2.5", "inf", "numpy's 2.5"},
    "record": BOOLS,
    "cuda_graphs": {"False"},
    "return_outputs": BOOLS,
    "microbatches": {"1"},
    "activation_memory": {"None", "1"},
    "progress": BOOLS,
    "autocast": {"None", *BOOLS},
    "scaler": {"None"},
    "clip_grad_norm": {"None", "0", "1", "2.5", "inf", "numpy's 2.5", "list of number", "list of None"},
    "clip_grad_value": {"None", "0", "1", "2.5", "inf", "numpy's 2.5"},
    "check_finite": {*BOOLS, "'skip'"},
    "check_replicas_every": {"None", "0", "1"},
    "example_inputs": {"None"},
    "process_group": {"None"},
    "workers": {"None", "'auto'"},
    "world": {"None"},
    "rank": {"None"},
    "exchange": {"'auto'"},
    "early_update": BOOLS,
    "dynamic": BOOLS | {"None"},
    "compression": {"None"},
    "shard_optimizer": BOOLS,
    "overlap_next_step": BOOLS,
    "placement": {"'auto'", "no dict"},
}
CALLED = {"devices": ("devices", "device "), "example_inputs": ("example_inputs", "target")}
"""How messages speak of an option: by its name, or of what is in it."""


def compiled(**options: Any) -> mirrorc.Step:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    given = {"model": MODEL, "devices": ["cpu:0", "cpu:1"], "optimizer": optimizer, "loss_fn": F.mse_loss}
    return mirrorc.compile(**{**given, "backend": "eager", **options})


def fault(option: str, name: str, value: Any) -> str:
    """What is wrong with the answer to one value of one option; else empty."""
    try:
        compiled(**{option: value}).close()
    except (TypeError, ValueError) as error:
        text, parts = str(error), list(value) if isinstance(value, list | tuple | dict | numpy.ndarray) else []
        shown = (
            *map(repr, [value, *parts]),
            type(value).__name__,
            "missing",
            "is empty",
            "the class",
            "unknown device",
        )
        is_named = any(word in text for word in CALLED.get(option, (option,))) and any(one in text for one in shown)
        return "refused" if name in TAKEN[option] else "" if is_named else f"{type(error).__name__}: {text}"
    return "" if name in TAKEN[option] else "accepted"


def test_values_of_a_wrong_kind_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(TAKEN) == set(inspect.signature(mirrorc.compile).parameters)
    answers = {f"{option}={name}": fault(option, name, value) for option in TAKEN for name, value in values().items()}
    assert {case: answer for case, answer in answers.items() if answer} == {}


def test_a_step_may_wait_without_a_bound() -> None:
    for seconds in (math.inf, 1e12, numpy.float64(60)):
        with compiled(timeout_seconds=seconds) as step:
            assert step(torch.ones(4, 2), target=torch.ones(4, 1)).isfinite()


def test_early_updates_of_a_given_pipeline_are_its_own_matter() -> None:
    with pytest.raises(ValueError, match=r"early_update=False has no part in a pipeline given with passes=: put "):
        compiled(early_update=False, passes=mirrorc.passes.default_pipeline())
