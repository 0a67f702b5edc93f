"""Steps over workers that send sums in a narrower dtype, beside plain PyTorch that rounds gradients and their sum alike."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn
from worker_processes import LazyOutcomes, outcome, workers
from worker_training import assert_values, batch, made, reference, training, values_of

from mirrorc.packing import ByBytes, EqualPacks

pytestmark = pytest.mark.slow

CASES: dict[str, dict[str, Any]] = {
    "2 x 1": training([1, 1], [[4, 4], [4, 2]], compression="bfloat16"),
    "2 x 2": training([2, 2], [[6, 1]], compression="float16", optimizer="SGD"),
    "packs": training([1, 2], [[4, 4], [0, 5]], compression="bfloat16", options={"buckets": EqualPacks(3)}),
    "bound": training(
        [2, 1],
        [[4, 3]],
        compression="float16",
        options={"clip_grad_norm": 0.1, "check_finite": True, "early_update": False},
    ),
    "several buckets": training([1, 1], [[4, 4]], compression="bfloat16", options={"buckets": ByBytes(0.0005, 0.0005)}),
    "parts": training([1, 1], [[6, 4]], compression="bfloat16", options={"microbatches": 2, "check_replicas_every": 1}),
    "by itself": training(
        [2, 1], [[4, 4], [5, 3]], compression="bfloat16", optimizer="Adafactor", options={"check_replicas_every": 1}
    ),  # an optimizer that does not work element by element
    "recovers": training(
        [1, 2], [[4, 4]], compression="bfloat16", optimizer="SGD", steps=3, faults=[[0, 1, "operator"]]
    ),
}
THREE = training([1, 2, 1], [[4, 5, 3]], compression="bfloat16", optimizer="SGD", steps=6)
APART = training([1, 1], [[4, 4]], compression="bfloat16", steps=1)
SLOW = ("2 x 1", "packs", "bound", "parts", "by itself")


def given_to_workers(case: Mapping[str, Any], **more: Any) -> dict[str, Any]:
    options = {"exchange": "dense", "compression": case["compression"], **case.get("options", {}), **more}
    return {**case, "options": options}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("train", given_to_workers(case)) for name, case in (CASES | {"three": THREE}).items()}
    cases["apart"] = workers("train", given_to_workers(APART))
    cases["apart"][1]["train"] = given_to_workers(APART, compression="float16")
    return LazyOutcomes(tmp_path_factory.mktemp, cases, cases.keys() - set(SLOW))


def simulated(case: Mapping[str, Any]) -> dict[str, list[float]]:
    """Plain PyTorch in one process: the gradient of each worker's part of the mean is rounded, and so is the sum of two."""
    model, optimizer = made("mlp", case.get("optimizer", "AdamW"), seed=0)
    dtype, options = getattr(torch, case["compression"]), case.get("options", {})
    failed = [step for step, _, _ in case.get("faults", ())]
    for number in range(case.get("steps", 4)):
        if number in failed:
            continue
        sizes = case["sizes"][number % len(case["sizes"])]
        sums: list[list[torch.Tensor]] = []
        for worker, size in enumerate(sizes):
            x, y = batch(number, worker, size)
            loss = nn.functional.cross_entropy(model(x), y, reduction="sum") / sum(sizes)
            sums.append([own.to(dtype) for own in torch.autograd.grad(loss, list(model.parameters()))])
        for parameter, *own in zip(model.parameters(), *sums, strict=True):
            parameter.grad = (own[0] + own[1]).to(parameter.dtype)
        if "clip_grad_norm" in options:
            nn.utils.clip_grad_norm_(model.parameters(), options["clip_grad_norm"])
        optimizer.step()
    return values_of(model)


@pytest.mark.parametrize("case", [*CASES])
def test_gradients_are_rounded_on_their_worker_and_once_more_in_the_sum(found: Mapping[str, Any], case: str) -> None:
    first, second = found[case][:2]
    assert first["values"] == second["values"]
    assert_values(first["values"], simulated(CASES[case]), rel=1e-9, abs=1e-12)
    exact = reference(CASES[case], range(CASES[case].get("steps", 4)))[1]
    assert any(own != pytest.approx(exact[name], rel=1e-9, abs=1e-12) for name, own in first["values"].items())


def test_three_workers_have_equal_bits_near_the_exact_ones(found: Mapping[str, Any]) -> None:
    first, *others = found["three"]
    assert all(other["values"] == first["values"] for other in others)
    _, exact = reference(THREE, range(THREE["steps"]))
    assert_values(first["values"], exact, rel=0.02, abs=0.005)


def test_a_failed_step_leaves_all_as_it_was(found: Mapping[str, Any]) -> None:
    for own in found["recovers"][:2]:
        assert [isinstance(loss, float) for loss in own["losses"]] == [False, True, True]
        assert "the disk is full" in own["losses"][0]


def test_bytes_that_are_sent_are_explained(found: Mapping[str, Any]) -> None:
    for own in found["three"]:
        assert any("6 exchanges" in text or "exchange in bfloat16" in text for text in own["remarks"])
        elements = sum(map(len, own["values"].values()))
        assert f"{2 * elements / 1024:.1f} KiB" in own["explained"] and "exchange over gloo" in own["explained"]
        assert re.search(r"compressed: each worker gives [\d.]+ \w+ in\s+place\s+of [\d.]+ \w+", own["explained"])


def test_workers_that_compress_otherwise_are_refused_by_all(found: Mapping[str, Any]) -> None:
    errors = [own["error"] for own in found["apart"][:2]]
    assert errors[0] == errors[1] and "workers differ in the arguments of mirrorc.compile" in errors[0]
    assert "CompressExchange(dtype='bfloat16'" in errors[0] and "CompressExchange(dtype='float16'" in errors[0]


def test_a_worker_that_leaves_early_adds_nothing(tmp_path: Any) -> None:
    case = training([1, 1], [[4, 4], [3, 0], [5, 0]], compression="bfloat16", optimizer="SGD", decay=1.0)
    first, second = outcome(tmp_path, workers("join", given_to_workers(case), num_processes=2))
    assert first["values"] == second["values"]
    assert_values(first["values"], simulated({**case, "steps": 3}), rel=1e-9, abs=1e-12)
