"""What `mirrorc.compile` takes, option by option: anything else is refused by an error that names option, value and remedy."""

import math
import re
from datetime import timedelta
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirrorc
from mirrorc import all_reduce_algorithms, packing
from mirrorc.options.memory import activation_bound, bound_text
from mirrorc.options.step_options import LONGEST_WAIT_SECONDS
from mirrorc.options.table import OPTIONS, grouped

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
        "list of names": ["cpu:0"],
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
PATHS = {"no text", "a text", "a path", "'auto'", "'mean'", "'skip'", "'copy'", "'eager'", "'cpu:0'"}
NUMBERS = {"1", "2.5", "inf", "numpy's 2.5"}
TAKEN: dict[str, set[str]] = {
    "model": {"model"},
    "devices": {"None", "1", "list of names"},
    "modules": {"None"},
    "optimizer": {"None", "optimizer"},  # without one, a step gives gradients
    "loss_fn": {"None", "function", "model"},
    "loss_reduction": {"'mean'"},
    "return_outputs": BOOLS,
    "microbatches": {"1"},
    "clip_grad_norm": {"None", "0", *NUMBERS, "list of number", "list of None"},
    "clip_grad_value": {"None", "0", *NUMBERS},
    "autocast": {"None", *BOOLS},
    "scaler": {"None"},
    "check_finite": {*BOOLS, "'skip'"},
    "distributed": {"False", "'auto'"},
    "mode": {"None"},
    "program": {"None"},
    **{group: {"None"} for group in OPTIONS.groups},
    "buckets": {*NUMBERS, "'auto'", "function", "model"},
    "order": {"function", "model"},
    "algorithm": {"'auto'"},
    "link": {"None", "'copy'"},
    "exchange": {"'auto'"},
    "compression": {"None"},
    "early_update": BOOLS,
    "process_group": {"None"},
    "timeout": NUMBERS,
    "activations": {"None", "1"},
    "shard_optimizer": BOOLS,
    "placement": {"'auto'", "no dict"},
    "backend": {"'eager'"},
    "capture": {"'auto'"},
    "dynamic": {"None", *BOOLS},
    "exact_order": BOOLS,
    "cuda_graphs": {"False"},
    "passes": {"None"},
    "add": {"no list", "no tuple"},
    "disable": NO_NAMES,
    "dump": {"None", *PATHS},
    "print_after": NO_NAMES,
    "progress": BOOLS,
    "check_replicas_every": {"0", "1"},
}
CALLED = {"devices": ("devices", "device ")}
"""How messages speak of an option: by its name, or of what is in it."""


def compiled(**options: Any) -> mirrorc.Step:
    optimizer = torch.optim.SGD(MODEL.parameters(), lr=0.1)
    given = {"model": MODEL, "devices": ["cpu:0", "cpu:1"], "optimizer": optimizer, "loss_fn": F.mse_loss}
    groups = {name: options.pop(name) for name in OPTIONS.groups if name in options}
    return mirrorc.compile(**{**grouped({**given, "backend": "eager", **options}), **groups})


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
    assert set(TAKEN) == {"model", "devices", *OPTIONS.keywords, *OPTIONS.defaults}
    answers = {f"{option}={name}": fault(option, name, value) for option in TAKEN for name, value in values().items()}
    assert {case: answer for case, answer in answers.items() if answer} == {}


def test_a_step_may_wait_without_a_bound() -> None:
    for seconds in (math.inf, 1e12, numpy.float64(60)):
        with compiled(timeout=seconds) as step:
            assert step(torch.ones(4, 2), target=torch.ones(4, 1)).isfinite()


@pytest.mark.parametrize(
    ("timeout", "seconds"),
    [
        (timedelta(minutes=1.5), 90.0),
        (timedelta(days=1), 86400.0),
        (7, 7.0),
        (math.inf, LONGEST_WAIT_SECONDS),
        (10**400, LONGEST_WAIT_SECONDS),
    ],
)
def test_a_timeout_is_seconds_or_a_timedelta(timeout: Any, seconds: float) -> None:
    with compiled(timeout=timeout) as step:
        assert step._options.timeout_seconds == seconds


@pytest.mark.parametrize(
    ("activations", "bound", "text"),
    [
        (None, None, ""),
        ("100%", None, ""),
        ("50%", 0.5, "'50%'"),
        ("12.5 %", 0.125, "'12.5%'"),
        (" 99% ", 0.99, "'99%'"),
        (1, 1, "1"),
        (4096, 4096, "4096"),
        ("100 B", 100, "100"),
        ("3KiB", 3072, "3072"),
        ("1.5 MiB", 3 * 2**19, "1572864"),
        ("2GiB", 2**31, "2147483648"),
    ],
)
def test_activations_are_bytes_or_a_part(activations: Any, bound: float | None, text: str) -> None:
    found = activation_bound(mirrorc.Memory(activations=activations).activations)
    assert found == bound and type(found) is type(bound)
    assert bound is None or bound_text(bound) == text


@pytest.mark.parametrize(
    "wrong",
    [
        0.5,
        1.0,
        True,
        b"50%",
        0,
        -1,
        "0%",
        "101%",
        "-5%",
        "50",
        "half",
        "0 B",
        "2 PiB",
        "2GB",
        "2iB",
        "GiB",
        "1e9 B",
        "50% 50%",
    ],
)
def test_other_activations_are_refused(wrong: Any) -> None:
    is_of_a_kind = type(wrong) in (int, str)
    said = re.escape(
        f"activations is {wrong!r}: give a size for each device, such as '2GiB' or a number of bytes, a part of"
    )
    with pytest.raises(ValueError if is_of_a_kind else TypeError, match=said):
        mirrorc.Memory(activations=wrong)


FIELDS: dict[str, tuple[Any, dict[str, Any], str, set[str]]] = {
    "Auto.small_bytes": (all_reduce_algorithms.Auto, {}, "algorithm", {"0", "1"}),
    "Auto.exact_order": (all_reduce_algorithms.Auto, {}, "algorithm", BOOLS),
    "ReduceToOne.device": (all_reduce_algorithms.ReduceToOne, {}, "algorithm", {"0", "1"}),
    "ReduceToOne.order": (all_reduce_algorithms.ReduceToOne, {}, "algorithm", {"None"}),
    "ReduceToOne.dtype": (all_reduce_algorithms.ReduceToOne, {}, "algorithm", {"None"}),
    "RoundRobin.num_devices": (all_reduce_algorithms.RoundRobin, {}, "algorithm", {"None", "1"}),
    "HierarchicalCopy.groups": (all_reduce_algorithms.HierarchicalCopy, {}, "algorithm", set()),
    "Tree.device": (all_reduce_algorithms.Tree, {}, "algorithm", {"0", "1"}),
    "ByBytes.cap_mb": (packing.ByBytes, {}, "buckets", NUMBERS),
    "ByBytes.first_mb": (packing.ByBytes, {}, "buckets", NUMBERS),
    "EqualPacks.num_packs": (packing.EqualPacks, {}, "buckets", {"0", "1"}),
    "EqualSplits.num_splits": (packing.EqualSplits, {}, "buckets", {"1"}),
    "TopK.ratio": (mirrorc.TopK, {}, "compression", {"1"}),
    "ClipGradNorm.max_norm": (mirrorc.ClipGradNorm, {}, "clip_grad_norm", {*NUMBERS, "0"}),
    "ClipGradNorm.norm_type": (mirrorc.ClipGradNorm, {"max_norm": 1}, "clip_grad_norm", NUMBERS),
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
