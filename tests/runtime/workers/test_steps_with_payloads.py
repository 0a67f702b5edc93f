"""Steps over workers that send payloads: the example's PowerSGD beside plain PyTorch that multiplies and keeps the rest alike."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import selections
import torch
from gradients_of_workers import Gradients, gradients_of_updates
from power_sgd import PowerSGD
from torch import nn
from worker_processes import LazyOutcomes, workers
from worker_training import asked, assert_values, batch, made, reference, training, values_of

import mirrorc
from mirrorc.analysis.communication.compressed_sums import gradients_of_pack
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, pack_of
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes, EqualPacks

RANK_2 = {"rank": 2, "min_rate": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "2 x 1": training([1, 1], [[4, 4], [4, 2]], power_sgd={**RANK_2, "seed": 3}),
    "three": training([2, 1, 1], [[4, 4, 2]], power_sgd={"rank": 1}, options={"check_replicas_every": 1}),
    "packs": training([1, 2], [[4, 4], [0, 5]], power_sgd=RANK_2, options={"buckets": EqualPacks(3)}),
    "skips": training(
        [2, 1],
        [[4, 3]],
        power_sgd=RANK_2,
        options={"clip_grad_norm": 0.1, "check_finite": "skip"},
        faults=[[1, 1, "not finite"]],
    ),  # a step whose gradients are not finite
    "several buckets": training([1, 2], [[4, 4]], power_sgd=RANK_2, options={"buckets": ByBytes(0.0005, 0.0005)}),
    "accumulates": training(
        [1, 1], [[4, 4], [3, 0], [2, 5]], power_sgd=RANK_2, optimizer="SGD", steps=6, accumulates=[0, 2, 3]
    ),
    "scaled": training(
        [2, 1],
        [[4, 3]],
        power_sgd=RANK_2,
        optimizer="SGD",
        steps=6,
        faults=[[3, 1, "not finite"]],
        scaler={"init_scale": 1024.0, "growth_interval": 2},
        options={"clip_grad_norm": 0.1},
    ),  # the scale rises and falls between steps
    "other threads": training(
        [1, 1], [[4, 4]], power_sgd=RANK_2, threads=[1, 2], options={"check_replicas_every": 1}
    ),  # so matrix products may have other bits
    "recovers": training([1, 2], [[4, 4]], power_sgd=RANK_2, optimizer="SGD", faults=[[2, 1, "operator"]]),
}
FAILS = training([1, 1], [[4, 4]], payload="FirstElements", faults=[[1, 1, "payload"]])
FAILS["options"] = {"buckets": ByBytes(0.0005, 0.0005)}
MANY = training([1, 1], [[8, 8]], power_sgd=RANK_2, optimizer="SGD", steps=40, batches=1)
EXACT = training(
    [1, 2], [[1, 2]], power_sgd={"rank": 3, "min_rate": 1.0}, optimizer="SGD"
)  # gradients have no higher rank than there are examples
RESUMED = training([1, 2], [[4, 5]], power_sgd=RANK_2, steps=5)
FAST = ("2 x 1", "skips", "recovers", "fails", "other names")


def options_of(case: Mapping[str, Any]) -> dict[str, Any]:
    return {"exchange": "dense", **case.get("options", {})}


def run(case: Mapping[str, Any], **more: Any) -> list[Any]:
    return workers("train", {**case, "options": options_of(case), **more})


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    folder = str(tmp_path_factory.mktemp("states"))
    more = {"fails": FAILS, "many": MANY, "exact": EXACT, "at once": RESUMED}
    cases = {name: run(case) for name, case in (CASES | more).items()}
    cases["other names"] = run({**FAILS, "payload": "OtherNames", "steps": 1})
    cases["saves"] = run(RESUMED, steps=3, saves=folder)
    cases["resumes"] = run(RESUMED, first=3, loads=folder)
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST)


def matrices_of(case: Mapping[str, Any]) -> list[str]:
    model, optimizer = made("mlp", case.get("optimizer", "AdamW"), seed=0)
    options = {**asked(case), **options_of(case)}
    x, y = batch(0, 0, case["sizes"][0][0])
    world = mirrorc.World(len(case["devices"]), tuple(case["devices"]))
    given = {"optimizer": optimizer, "loss_fn": nn.CrossEntropyLoss(), **grouped(options)}
    program, names = mirrorc.plan(model, ((x,), {"target": y}), world=world, **given), []
    for node in calls_to(program.graphs()[0], ops.exchange_payload):
        bucket, pack = program.packs[pack_of(node)]
        gradients = gradients_of_pack(bucket, pack, torch.empty(pack.num_elements, dtype=bucket.dtype, device="meta"))
        names += [name for name, gradient in gradients.items() if options["compression"].is_factored(gradient)]
    return names


def simulated(case: Mapping[str, Any]) -> tuple[nn.Module, list[Gradients], Gradients]:
    """Plain PyTorch in one process: the model after all steps, what each worker has not sent, and the sum of all gradients."""
    model, optimizer = made("mlp", case.get("optimizer", "AdamW"), seed=0)
    payload, names, parameters = PowerSGD(**case["power_sgd"]), matrices_of(case), dict(model.named_parameters())
    unsent = [{name: torch.zeros_like(own) for name, own in parameters.items()} for _ in case["devices"]]
    of_all = {name: torch.zeros_like(own) for name, own in parameters.items()}
    factors = {name: payload.first_factor(name, parameters[name]) for name in names}
    for of_workers in gradients_of_updates(case, model):
        for kept, gradients in zip(unsent, of_workers, strict=True):
            for name, own in gradients.items():
                kept[name] += own
                of_all[name] += own
        for name, parameter in parameters.items():
            parts = [worker[name] for worker in unsent]
            parameter.grad = _sent(parts, factors, name) if name in names else sum(parts)  # type: ignore[assignment]
            for part in parts if name not in names else ():
                part.zero_()
        if "clip_grad_norm" in case.get("options", {}):
            nn.utils.clip_grad_norm_(parameters.values(), case["options"]["clip_grad_norm"])
        optimizer.step()
    return model, unsent, of_all


def _sent(parts: list[torch.Tensor], factors: Gradients, name: str) -> torch.Tensor:
    base = torch.linalg.qr(sum(part @ factors[name] for part in parts)).Q
    rights = [part.T @ base for part in parts]
    for part, right in zip(parts, rights, strict=True):
        part -= base @ right.T
    total = sum(rights)
    factors[name] = torch.linalg.qr(total).Q
    return base @ total.T  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but([name for name in FAST if name in CASES], list(CASES)))
def test_what_factors_leave_out_is_added_in_the_next_step(outcomes: Mapping[str, Any], case: str) -> None:
    size = len(CASES[case]["devices"])
    model, unsent, _ = simulated(CASES[case])
    for outcome, expected in zip(outcomes[case][:size], unsent, strict=True):
        assert outcome["values"] == outcomes[case][0]["values"]
        assert_values(outcome["values"], values_of(model), abs=1e-12)
        assert_values(outcome["unsent"], {name: expected.pop(name) for name in outcome["unsent"]}, abs=1e-12)
        assert not any(rest.any() for rest in expected.values()), "what is sent whole leaves nothing"
    exact = reference(CASES[case], range(4))[1]
    assert any(own != pytest.approx(exact[name], rel=1e-9) for name, own in outcomes[case][0]["values"].items())


@pytest.mark.slow
def test_matrices_of_no_higher_rank_are_updated_as_without(outcomes: Mapping[str, Any]) -> None:
    _, exact = reference(EXACT, range(4))
    for outcome in outcomes["exact"][:2]:
        assert_values(outcome["values"], exact, abs=1e-10)
        assert all(abs(number) < 1e-10 for values in outcome["unsent"].values() for number in values)


@pytest.mark.slow
def test_what_was_sent_and_what_was_not_is_the_sum_of_all_gradients(outcomes: Mapping[str, Any]) -> None:
    model, unsent, of_all = simulated(MANY)
    assert_values(outcomes["many"][0]["values"], values_of(model), abs=1e-8)
    assert matrices_of(MANY) and max(own[name].abs().max() for own in unsent for name in matrices_of(MANY)) > 1e-3
    for name, total in of_all.items():
        kept = sum(torch.tensor(own["unsent"][name], dtype=torch.float64) for own in outcomes["many"][:2])
        sent = total.flatten() - sum(own[name].flatten() for own in unsent)
        assert torch.allclose(sent + kept, total.flatten(), rtol=1e-8, atol=1e-8), name


@pytest.mark.slow
def test_training_comes_as_far_as_with_whole_gradients(outcomes: Mapping[str, Any]) -> None:
    exact, _ = reference(MANY, range(40))
    losses = outcomes["many"][0]["losses"]
    assert losses[-1] < 0.5 * losses[0] and exact[0] - losses[-1] > 0.8 * (exact[0] - exact[-1])


@pytest.mark.slow
def test_a_run_that_goes_on_from_its_states_has_the_same_bits(outcomes: Mapping[str, Any]) -> None:
    for at_once, resumed in zip(outcomes["at once"][:2], outcomes["resumes"][:2], strict=True):
        assert resumed["losses"] == at_once["losses"][3:]
        assert (resumed["values"], resumed["unsent"]) == (at_once["values"], at_once["unsent"])


@pytest.mark.slow
def test_a_failed_step_leaves_all_as_it_was(outcomes: Mapping[str, Any]) -> None:
    for outcome in outcomes["recovers"][:2]:
        assert [isinstance(loss, float) for loss in outcome["losses"]] == [True, True, False, True]
        assert "the disk is full" in outcome["losses"][2]


@pytest.mark.slow
def test_a_payload_that_fails_on_a_worker_fails_the_step_of_all(outcomes: Mapping[str, Any]) -> None:
    """And the worker that waits for its next round goes on with the next step."""
    for outcome in outcomes["fails"][:2]:
        assert [isinstance(loss, float) for loss in outcome["losses"]] == [True, False, True, True]
        assert "exchange() of compression=FirstElements(part=10) failed" in outcome["losses"][1]
        assert "why: ValueError: the code" in " ".join(outcome["losses"][1].split())
        assert outcome["values"] == outcomes["fails"][0]["values"]


@pytest.mark.slow
def test_a_state_of_other_gradients_is_refused(outcomes: Mapping[str, Any]) -> None:
    for outcome in outcomes["other names"][:2]:
        assert "exchange() returned a state for 'nobody', which is none of" in outcome["losses"][0]


@pytest.mark.slow
def test_bytes_with_and_without_are_explained(outcomes: Mapping[str, Any]) -> None:
    for outcome in outcomes["2 x 1"][:2]:
        text = "of PowerSGD(rank=2, min_rate=1.0, seed=3), which changes numbers: each of 2 workers sends"
        assert any(text in remark for remark in outcome["remarks"])
        assert "exchange_payload over gloo" in outcome["explained"]
        assert re.search(r"compressed: each worker gives [\d.]+ \w+ in\s+place\s+of [\d.]+ \w+", outcome["explained"])
