"""Steps over workers that send the largest elements of gradients alone, beside plain PyTorch that keeps the rest alike."""

import re
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import selections
import torch
from gradients_of_workers import Gradients, gradients_of_updates
from torch import nn
from worker_processes import LazyOutcomes, workers
from worker_training import assert_values, batch, made, reference, training, values_of

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, pack_of
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes, EqualPacks

CASES: dict[str, dict[str, Any]] = {
    "2 x 1": training([1, 1], [[4, 4], [4, 2]], top_k=0.1),
    "1 and 2": training([1, 2], [[4, 5]], top_k=0.05, optimizer="SGD"),
    "three": training([2, 1, 1], [[4, 4, 2]], top_k=0.1, options={"check_replicas_every": 1}),
    "packs": training([1, 2], [[4, 4], [0, 5]], top_k=0.1, options={"buckets": EqualPacks(3)}),
    "skips": training(
        [2, 1],
        [[4, 3]],
        top_k=0.1,
        options={"clip_grad_norm": 0.1, "check_finite": "skip"},
        faults=[[1, 1, "not finite"]],
    ),  # a step whose gradients are not finite
    "several buckets": training([1, 2], [[4, 4]], top_k=0.1, options={"buckets": ByBytes(0.0005, 0.0005)}),
    "parts": training([1, 1], [[6, 4]], top_k=0.1, options={"microbatches": 2, "early_update": False}),
    "accumulates": training(
        [1, 1],
        [[4, 4], [4, 0], [4, 4]],
        top_k=0.1,
        optimizer="SGD",
        steps=6,
        accumulates=[0, 2, 3],
        options={"placement": "mirrored"},
    ),  # and copies that each worker has of all parameters
    "scaled": training(
        [2, 1],
        [[4, 3]],
        top_k=0.1,
        optimizer="SGD",
        steps=6,
        faults=[[3, 1, "not finite"]],
        scaler={"init_scale": 1024.0, "growth_interval": 2},
        options={"clip_grad_norm": 0.1},
    ),  # the scale rises and falls between steps
    "plain PyTorch": training(
        [1, 2],
        [[4, 4], [3, 5]],
        top_k=0.1,
        optimizer="SGD",
        options={"capture": "autograd", "buckets": ByBytes(0.0005, 0.0005)},
    ),
    "by itself": training(
        [2, 1], [[4, 4], [5, 3]], top_k=0.2, optimizer="Adafactor", options={"check_replicas_every": 1}
    ),  # an optimizer that does not work element by element
    "recovers": training([1, 2], [[4, 4]], top_k=0.1, optimizer="SGD", faults=[[2, 1, "operator"]]),
}
GIVEN = [{"0.bias": [float(rank + element) for element in range(13)]} for rank in range(3)]
GOES_ON = training([1, 1], [[4, 4]], top_k=0.05, steps=2, unsent=GIVEN)
MANY = training([1, 1], [[8, 8]], top_k=0.1, optimizer="SGD", steps=40, batches=1)
LEAVES = training([1, 1], [[4, 4], [3, 0], [3, 0]], top_k=0.1, optimizer="SGD", decay=1.0)
SLOW = (
    *("2 x 1", "parts", "by itself", "plain PyTorch", "many"),
    *("skips", "recovers"),  # what no exchange does of its own has a fast case in `test_steps_with_payloads`
)


def options_of(case: Mapping[str, Any]) -> dict[str, Any]:
    return {"exchange": "dense", **case.get("options", {})}


def run(case: Mapping[str, Any], how: str = "train") -> list[Any]:
    return workers(how, {**case, "options": options_of(case)})


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: run(case) for name, case in (CASES | {"goes on": GOES_ON, "many": MANY}).items()}
    cases["leaves"] = run(LEAVES, "join")
    cases["one loads"] = run({**GOES_ON, "loads_unsent": [0]})
    return LazyOutcomes(tmp_path_factory.mktemp, cases, cases.keys() - set(SLOW))


def program_of(case: Mapping[str, Any]) -> mirrorc.Program:
    model, optimizer = made("mlp", case.get("optimizer", "AdamW"), seed=0)
    options = {**options_of(case), "compression": mirrorc.TopK(case["top_k"]), "backend": "eager"}
    x, y = batch(0, 0, case["sizes"][0][0])
    world = mirrorc.World(len(case["devices"]), tuple(case["devices"]))
    given = {"optimizer": optimizer, "loss_fn": nn.CrossEntropyLoss(), **grouped(options)}
    return mirrorc.plan(model, ((x,), {"target": y}), world=world, **given)


def parts_sent(case: Mapping[str, Any]) -> list[tuple[list[tuple[str, slice, slice]], int, int]]:
    """For each pack: which elements of which variable lie where in it; how long it is; how many of its elements are sent."""
    program, found = program_of(case), []
    counts = {pack_of(node): node.kwargs["count"] for node in calls_to(program.graphs()[0], ops.gather_largest)}
    for bucket, pack in program.packs:
        pieces = []
        for slot in bucket.slots:
            start, stop = max(slot.offset, pack.start), min(slot.offset + slot.num_elements, pack.stop)
            if start < stop:
                own = slice(start - slot.offset, stop - slot.offset)
                pieces.append((slot.variable, own, slice(start - pack.start, stop - pack.start)))
        found.append((pieces, pack.num_elements, counts[pack.number]))
    return found


def simulated(case: Mapping[str, Any]) -> tuple[nn.Module, list[Gradients], Gradients]:
    """Plain PyTorch in one process: the model after all steps, what each worker has not sent, and the sum of all gradients."""
    model, optimizer = made("mlp", case.get("optimizer", "AdamW"), seed=0)
    parts, parameters = parts_sent(case), dict(model.named_parameters())
    unsent = [{name: torch.zeros_like(own).flatten() for name, own in parameters.items()} for _ in case["devices"]]
    for rank, given in enumerate(case.get("unsent", ())):
        for name, values in given.items():
            unsent[rank % len(unsent)][name] += torch.tensor(values, dtype=torch.float64)
    of_all = {name: torch.zeros_like(own) for name, own in parameters.items()}
    for of_workers in gradients_of_updates(case, model):
        total = {name: torch.zeros_like(own).flatten() for name, own in parameters.items()}
        for kept, gradients in zip(unsent, of_workers, strict=True):
            for name, own in gradients.items():
                kept[name] += own.flatten()
                of_all[name] += own
            for pieces, length, count in parts:
                _send(kept, pieces, length, count, total)
        for name, parameter in parameters.items():
            parameter.grad = total[name].view_as(parameter)
        if "clip_grad_norm" in case.get("options", {}):
            nn.utils.clip_grad_norm_(parameters.values(), case["options"]["clip_grad_norm"])
        optimizer.step()
    return model, unsent, of_all


def _send(
    own: Gradients, pieces: Sequence[tuple[str, slice, slice]], length: int, count: int, total: Gradients
) -> None:
    flat = torch.zeros(length, dtype=torch.float64)
    for name, elements, place in pieces:
        flat[place] = own[name][elements]
    is_sent = torch.zeros(length, dtype=torch.bool)
    is_sent[flat.abs().argsort(descending=True)[:count]] = True
    for name, elements, place in pieces:
        sent = torch.where(is_sent[place], flat[place], 0.0)
        total[name][elements] += sent
        own[name][elements] -= sent


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but([one for one in CASES if one not in SLOW], list(CASES)))
def test_what_is_not_sent_is_added_in_the_next_step(found: Mapping[str, Any], case: str) -> None:
    size = len(CASES[case]["devices"])
    model, unsent, _ = simulated(CASES[case])
    for own, expected in zip(found[case][:size], unsent, strict=True):
        assert own["values"] == found[case][0]["values"]
        assert_values(own["values"], values_of(model), abs=1e-12)
        assert_values(own["unsent"], expected, abs=1e-12)
    exact = reference(CASES[case], range(4))[1]
    assert any(own != pytest.approx(exact[name], rel=1e-9) for name, own in found[case][0]["values"].items())


@pytest.mark.slow
def test_what_was_sent_and_what_was_not_is_the_sum_of_all_gradients(found: Mapping[str, Any]) -> None:
    model, unsent, of_all = simulated(MANY)
    assert_values(found["many"][0]["values"], values_of(model), abs=1e-9)
    for name, total in of_all.items():
        kept = sum(torch.tensor(own["unsent"][name], dtype=torch.float64) for own in found["many"][:2])
        sent = total.flatten() - sum(own[name] for own in unsent)
        assert torch.allclose(sent + kept, total.flatten(), rtol=1e-9, atol=1e-9), name


@pytest.mark.slow
def test_training_comes_as_far_as_with_whole_gradients(found: Mapping[str, Any]) -> None:
    losses, _ = reference(MANY, range(40))
    own = found["many"][0]["losses"]
    assert own[-1] < 0.5 * own[0] and losses[0] - own[-1] > 0.8 * (losses[0] - losses[-1])


@pytest.mark.slow
def test_what_three_workers_had_not_sent_is_dealt_out_to_two(found: Mapping[str, Any]) -> None:
    model, unsent, _ = simulated(GOES_ON)
    for own, expected in zip(found["goes on"][:2], unsent, strict=True):
        assert_values(own["values"], values_of(model), abs=1e-12)
        assert_values(own["unsent"], expected, abs=1e-12)


@pytest.mark.slow
def test_a_failed_step_leaves_all_as_it_was(found: Mapping[str, Any]) -> None:
    for own in found["recovers"][:2]:
        assert [isinstance(loss, float) for loss in own["losses"]] == [True, True, False, True]
        assert "the disk is full" in own["losses"][2]


@pytest.mark.slow
def test_workers_of_which_one_has_loaded_no_state_are_refused_by_all(found: Mapping[str, Any]) -> None:
    for own in found["one loads"][:2]:
        assert "CommunicationError" in own["losses"][0] and "calls of step.load_state_dict()" in own["losses"][0]


@pytest.mark.slow
def test_a_worker_that_has_left_sends_what_it_had_not(found: Mapping[str, Any]) -> None:
    first, second = found["leaves"][:2]
    model, unsent, _ = simulated({**LEAVES, "steps": 3})
    assert first["values"] == second["values"]
    assert_values(first["values"], values_of(model), abs=1e-12)
    assert_values(second["unsent"], unsent[1], abs=1e-12)


@pytest.mark.slow
def test_bytes_with_and_without_are_explained(found: Mapping[str, Any]) -> None:
    for own in found["three"]:
        assert any("of the largest elements, 0.1 of all, which changes numbers" in text for text in own["remarks"])
        assert "gather_largest over gloo" in own["explained"]
        assert re.search(r"compressed: each worker gives [\d.]+ \w+ in\s+place\s+of [\d.]+ \w+", own["explained"])
