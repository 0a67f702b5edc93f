"""What `mirrorc.compile` takes, option by option: anything else is refused by an error that names option, value and remedy."""

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
from mirrorc import all_reduce_algorithms, packing
from mirrorc.options.table import grouped

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
        "list of name": ["schedule-overlap"],
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
    "passes": {"None"},
    "add": {"no list", "no tuple"},
    "disable": NO_NAMES,
    "order": {"function", "model"},
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
    "activations": {"None", "1"},
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
    "placement": {"'auto'", "no dict"},
    "buckets": {"None", "0", "1", "function", "model"},
}
CALLED = {"devices": ("devices", "device "), "example_inputs": ("example_inputs", "target")}
"""How messages speak of an option: by its name, or of what is in it."""


def compiled(**options: Any) -> mirrorc.Step:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    given = {"model": MODEL, "devices": ["cpu:0", "cpu:1"], "optimizer": optimizer, "loss_fn": F.mse_loss}
    return mirrorc.compile(**grouped({**given, "backend": "eager", **options}))


def fault(option: str, name: str, value: Any) -> str:
    try:
        compiled(**{option: value}).close()
    except (TypeError, ValueError, mirrorc.PassError) as error:
        text, parts = str(error), list(value) if isinstance(value, list | tuple | dict | numpy.ndarray) else []
        shown = (
            *map(repr, [value, *parts]),
            type(value).__name__,
            "missing",
            "is empty",
            "the class",
            "unknown device",
            "no pipeline of a whole step",
        )
        is_named = any(word in text for word in CALLED.get(option, (option,))) and any(one in text for one in shown)
        return "refused" if name in TAKEN[option] else "" if is_named else f"{type(error).__name__}: {text}"
    return "" if name in TAKEN[option] else "accepted"


@pytest.mark.slow
def test_values_of_a_wrong_kind_are_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert set(TAKEN) == set(inspect.signature(mirrorc.compile).parameters) - {"declared"}
    answers = {f"{option}={name}": fault(option, name, value) for option in TAKEN for name, value in values().items()}
    assert {case: answer for case, answer in answers.items() if answer} == {}


def test_a_step_may_wait_without_a_bound() -> None:
    for seconds in (math.inf, 1e12, numpy.float64(60)):
        with compiled(timeout_seconds=seconds) as step:
            assert step(torch.ones(4, 2), target=torch.ones(4, 1)).isfinite()


NUMBERS = {"1", "2.5", "inf", "numpy's 2.5"}
FIELDS: dict[str, tuple[Any, dict[str, Any], str, set[str]]] = {
    "Auto.small_bytes": (all_reduce_algorithms.Auto, {}, "all_reduce", {"0", "1"}),
    "Auto.exact_order": (all_reduce_algorithms.Auto, {}, "all_reduce", BOOLS),
    "ReduceToOne.device": (all_reduce_algorithms.ReduceToOne, {}, "all_reduce", {"0", "1"}),
    "ReduceToOne.order": (all_reduce_algorithms.ReduceToOne, {}, "all_reduce", {"None"}),
    "ReduceToOne.dtype": (all_reduce_algorithms.ReduceToOne, {}, "all_reduce", {"None"}),
    "RoundRobin.num_devices": (all_reduce_algorithms.RoundRobin, {}, "all_reduce", {"None", "1"}),
    "HierarchicalCopy.groups": (all_reduce_algorithms.HierarchicalCopy, {}, "all_reduce", set()),
    "Tree.device": (all_reduce_algorithms.Tree, {}, "all_reduce", {"0", "1"}),
    "ByBytes.cap_mb": (packing.ByBytes, {}, "packing", NUMBERS),
    "ByBytes.first_mb": (packing.ByBytes, {}, "packing", NUMBERS),
    "EqualPacks.num_packs": (packing.EqualPacks, {}, "packing", {"0", "1"}),
    "EqualSplits.num_splits": (packing.EqualSplits, {}, "packing", {"1"}),
    "TopK.ratio": (mirrorc.TopK, {}, "compression", {"1"}),
    "ClipGradNorm.max_norm": (mirrorc.ClipGradNorm, {}, "clip_grad_norm", {*NUMBERS, "0"}),
    "ClipGradNorm.norm_type": (mirrorc.ClipGradNorm, {"max_norm": 1}, "clip_grad_norm", NUMBERS),
    "CommunicationOptions.bytes_per_pack": (
        mirrorc.CommunicationOptions,
        {},
        "communication_options",
        {"0", "1"},
    ),
    "CommunicationOptions.timeout_seconds": (
        mirrorc.CommunicationOptions,
        {},
        "communication_options",
        {*NUMBERS, "None"},
    ),
    "CommunicationOptions.implementation": (mirrorc.CommunicationOptions, {}, "communication_options", {"'auto'"}),
}
"""Of each class that an option takes: its other arguments, the option, and which values are taken."""


def test_classes_of_options_refuse_values_of_a_wrong_kind_by_name() -> None:
    """Where the object is made, or where it is given to `mirrorc.compile`."""
    faults = {}
    for path, (kind, besides, option, taken) in FIELDS.items():
        name = path.partition(".")[2]
        for label, value in values().items():
            try:
                compiled(**{option: kind(**{**besides, name: value})}).close()
            except (TypeError, ValueError) as error:
                if label in taken or name not in str(error) or repr(value) not in str(error):
                    faults[f"{path}={label}"] = f"{type(error).__name__}: {error}"
            else:
                if label not in taken:
                    faults[f"{path}={label}"] = "accepted"
    assert faults == {}
    classes = {kind for kind, *_ in FIELDS.values()}
    assert {*all_reduce_algorithms.ALGORITHMS.values()} - classes <= {
        all_reduce_algorithms.ALGORITHMS[name] for name in ("native", "ring", "halving-doubling")
    }
