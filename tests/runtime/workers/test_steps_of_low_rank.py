"""Steps over workers that send factors of matrices, beside plain PyTorch that multiplies and keeps the rest alike."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import pytest
import selections
import torch
from gradients_of_workers import Gradients, gradients_of_updates
from torch import nn
from worker_processes import LazyOutcomes, free_port, told
from worker_training import batch, made, reference, values_of

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.runtime.state.gradients.powersgd_factors import KeptFactors

RANK_2 = {"rank": 2, "min_compression_rate": 1.0}
CASES: dict[str, dict[str, Any]] = {
    "2 x 1": {"devices": [1, 1], "sizes": [[4, 4], [4, 2]], "power_sgd": {**RANK_2, "seed": 3}},
    "1 and 2": {"devices": [1, 2], "sizes": [[4, 5]], "power_sgd": RANK_2, "optimizer": "SGD"},
    "three": {
        "devices": [2, 1, 1],
        "sizes": [[4, 4, 2]],
        "power_sgd": {"rank": 1},
        "options": {"check_replicas_every": 1},
    },
    "packs": {"devices": [1, 2], "sizes": [[4, 4], [0, 5]], "power_sgd": RANK_2, "options": {"packing": 3}},
    "packs, later": {
        "devices": [1, 2],
        "sizes": [[3, 5]],
        "power_sgd": {**RANK_2, "start_step": 2},
        "options": {"packing": 3},
    },
    "starts late": {"devices": [1, 2], "sizes": [[4, 4], [3, 5]], "power_sgd": {**RANK_2, "start_step": 2}},
    "skips": {  # a step whose gradients are not finite
        "devices": [2, 1],
        "sizes": [[4, 3]],
        "power_sgd": {**RANK_2, "start_step": 1},
        "options": {"clip_grad_norm": 0.1, "check_finite": "skip"},
        "faults": [[1, 1, "not finite"]],
    },
    "several buckets": {
        "devices": [1, 2],
        "sizes": [[4, 4]],
        "power_sgd": RANK_2,
        "options": {"bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0005},
    },
    "parts": {
        "devices": [1, 1],
        "sizes": [[6, 4]],
        "power_sgd": RANK_2,
        "options": {"microbatches": 2, "early_update": False},
    },
    "accumulates": {  # and copies that each worker has of all parameters
        "devices": [1, 1],
        "sizes": [[4, 4], [3, 0], [2, 5]],
        "power_sgd": RANK_2,
        "optimizer": "SGD",
        "steps": 6,
        "accumulates": [0, 2, 3],
        "options": {"placement": "mirrored"},
    },
    "scaled": {  # the scale rises and falls between steps
        "devices": [2, 1],
        "sizes": [[4, 3]],
        "power_sgd": RANK_2,
        "optimizer": "SGD",
        "steps": 6,
        "faults": [[3, 1, "not finite"]],
        "scaler": {"init_scale": 1024.0, "growth_interval": 2},
        "options": {"clip_grad_norm": 0.1},
    },
    "plain PyTorch": {  # for which each worker needs examples
        "devices": [1, 2],
        "sizes": [[4, 4], [3, 5]],
        "power_sgd": RANK_2,
        "optimizer": "SGD",
        "options": {"capture": "autograd", "bucket_cap_mb": 0.0005, "first_bucket_mb": 0.0005},
    },
    "other threads": {  # so products of the library may have other bits
        "devices": [1, 1],
        "sizes": [[4, 4]],
        "power_sgd": RANK_2,
        "threads": [1, 2],
        "options": {"check_replicas_every": 1},
    },
    "by itself": {  # an optimizer that does not work element by element
        "devices": [3, 1],
        "sizes": [[4, 4], [5, 3]],
        "power_sgd": RANK_2,
        "optimizer": "Adafactor",
        "options": {"check_replicas_every": 1},
    },
    "recovers": {
        "devices": [1, 2],
        "sizes": [[4, 4]],
        "power_sgd": RANK_2,
        "optimizer": "SGD",
        "faults": [[2, 1, "operator"]],
    },
}
GIVEN = [{"2.weight": [float(rank + element % 7) for element in range(117)]} for rank in range(3)]
GOES_ON = {"devices": [1, 1], "sizes": [[4, 4]], "power_sgd": RANK_2, "steps": 2, "unsent": GIVEN}
MANY = {"devices": [1, 1], "sizes": [[8, 8]], "power_sgd": RANK_2, "optimizer": "SGD", "steps": 40, "batches": 1}
LEAVES = {"devices": [1, 1], "sizes": [[4, 4], [3, 0], [3, 0]], "power_sgd": RANK_2, "optimizer": "SGD", "decay": 1.0}
EXACT = {  # gradients have no higher rank than there are examples
    "devices": [1, 2],
    "sizes": [[1, 2]],
    "power_sgd": {"rank": 3, "min_compression_rate": 1.0},
    "optimizer": "SGD",
}
RESUMED = {"devices": [1, 2], "sizes": [[4, 5]], "power_sgd": {**RANK_2, "start_step": 1}, "steps": 5}
SLOW = (
    *("packs", "starts late", "several buckets", "parts", "accumulates", "scaled", "by itself", "plain PyTorch"),
    *(
        "goes on",
        "again",
        "leaves",
        "many",
        "at once",
        "saves",
        "resumes",
        "one resumes",
    ),  # what no exchange does of its own has a fast case in `test_steps_that_send_a_part`
)


def options_of(case: Mapping[str, Any]) -> dict[str, Any]:
    return {"exchange": "dense", **case.get("options", {})}


def run(case: Mapping[str, Any], how: str = "train", **more: Any) -> list[Any]:
    port, size = free_port(), len(case["devices"])
    given = {**case, "model": "mlp", "options": options_of(case), **more}
    return [*({"variables": told(rank, size, port), how: given} for rank in range(size)), *[None] * (3 - size)]


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    """What came of each case in each process."""
    folder = str(tmp_path_factory.mktemp("states"))
    more = {"goes on": GOES_ON, "many": MANY, "exact": EXACT, "at once": RESUMED, "again": RESUMED}
    cases = {name: run(case) for name, case in (CASES | more).items()}
    cases["saves"] = run(RESUMED, steps=3, saves=folder)
    cases["resumes"] = run(RESUMED, first=3, loads=folder)
    cases["one resumes"] = run(RESUMED, first=3, loads=folder, loads_unsent=[0])
    cases["leaves"] = run(LEAVES, "join")
    return LazyOutcomes(tmp_path_factory.mktemp, cases, cases.keys() - set(SLOW), limit_seconds=250)


def matrices_of(case: Mapping[str, Any]) -> list[str]:
    """The parameters of whose gradients factors are sent."""
    model, optimizer = made("mlp", case.get("optimizer", "AdamW"), seed=0)
    options = {**options_of(case), "compression": mirrorc.PowerSGD(**case["power_sgd"]), "backend": "eager"}
    step = mirrorc.compile(
        model,
        optimizer=optimizer,
        loss_fn=nn.CrossEntropyLoss(),
        world=mirrorc.World(len(case["devices"]), tuple(case["devices"])),
        **options,
    )
    x, y = batch(0, 0, case["sizes"][0][0])
    (graph, *_) = step.prepare(x, target=y).graphs()
    return [name for node in calls_to(graph, ops.exchange_low_rank) for name in node.kwargs["matrices"]]  # type: ignore[union-attr]


def simulated(case: Mapping[str, Any]) -> tuple[nn.Module, list[Gradients], Gradients]:
    """Plain PyTorch in one process: the model after all steps, what each worker has not sent, and the sum of all gradients."""
    model, optimizer = made("mlp", case.get("optimizer", "AdamW"), seed=0)
    option, names, parameters = case["power_sgd"], matrices_of(case), dict(model.named_parameters())
    unsent = [{name: torch.zeros_like(own) for name, own in parameters.items()} for _ in case["devices"]]
    for rank, given in enumerate(case.get("unsent", ())):
        for name, values in given.items():
            unsent[rank % len(unsent)][name] += torch.tensor(values, dtype=torch.float64).view_as(parameters[name])
    of_all = {name: torch.zeros_like(own) for name, own in parameters.items()}
    factors = {
        name: KeptFactors().begin_with(
            name, parameters[name].shape[1], option["rank"], option.get("seed", 0), torch.float64
        )
        for name in names
    }
    for num_done, of_workers in enumerate(gradients_of_updates(case, model)):
        for kept, gradients in zip(unsent, of_workers, strict=True):
            for name, own in gradients.items():
                kept[name] += own
                of_all[name] += own
        for name, parameter in parameters.items():
            own = [worker[name] for worker in unsent]
            is_short = name in names and num_done >= option.get("start_step", 0)
            parameter.grad = _sent(own, factors, name) if is_short else sum(own)  # type: ignore[assignment]
            for one in own if not is_short else ():
                one.zero_()
        if "clip_grad_norm" in case.get("options", {}):
            nn.utils.clip_grad_norm_(parameters.values(), case["options"]["clip_grad_norm"])
        optimizer.step()
    return model, unsent, of_all


def _sent(own: list[torch.Tensor], factors: Gradients, name: str) -> torch.Tensor:
    """The sum of what workers send of one matrix each, which is taken from what they have."""
    base = torch.linalg.qr(sum(one @ factors[name] for one in own)).Q
    rights = [one.T @ base for one in own]
    for one, right in zip(own, rights, strict=True):
        one -= base @ right.T
    total = sum(rights)
    factors[name] = torch.linalg.qr(total).Q
    return base @ total.T  # type: ignore[no-any-return]


def assert_close(own: Mapping[str, Any], expected: Mapping[str, Any], abs: float = 1e-12) -> None:
    assert own.keys() == expected.keys()
    for name, values in expected.items():
        given = values.flatten().tolist() if isinstance(values, torch.Tensor) else values
        assert own[name] == pytest.approx(given, rel=1e-9, abs=abs), name


@pytest.mark.parametrize("case", selections.slow_but([one for one in CASES if one not in SLOW], list(CASES)))
def test_what_factors_leave_out_is_added_in_the_next_step(found: Mapping[str, Any], case: str) -> None:
    size = len(CASES[case]["devices"])
    model, unsent, _ = simulated(CASES[case])
    for own, expected in zip(found[case][:size], unsent, strict=True):
        assert own["values"] == found[case][0]["values"]
        assert_close(own["values"], values_of(model))
        assert_close(own["unsent"], {name: expected.pop(name) for name in own["unsent"]})
        assert not any(one.any() for one in expected.values()), "what is sent whole leaves nothing"
    exact = reference({**CASES[case], "model": "mlp"}, range(4))[1]
    assert any(own != pytest.approx(exact[name], rel=1e-9) for name, own in found[case][0]["values"].items())


def test_matrices_of_no_higher_rank_are_updated_as_without(found: Mapping[str, Any]) -> None:
    _, exact = reference({**EXACT, "model": "mlp"}, range(4))
    for own in found["exact"][:2]:
        assert_close(own["values"], exact, abs=1e-10)
        assert all(abs(one) < 1e-10 for values in own["unsent"].values() for one in values)
        assert any("of rank 3" in text and "2.weight (9 x 13" in text for text in own["remarks"])


@pytest.mark.slow
def test_what_was_sent_and_what_was_not_is_the_sum_of_all_gradients(found: Mapping[str, Any]) -> None:
    model, unsent, of_all = simulated(MANY)
    assert_close(found["many"][0]["values"], values_of(model), abs=1e-8)
    assert matrices_of(MANY) and max(own[name].abs().max() for own in unsent for name in matrices_of(MANY)) > 1e-3
    for name, total in of_all.items():
        kept = sum(torch.tensor(own["unsent"][name], dtype=torch.float64) for own in found["many"][:2])
        sent = total.flatten() - sum(own[name].flatten() for own in unsent)
        assert torch.allclose(sent + kept, total.flatten(), rtol=1e-8, atol=1e-8), name


@pytest.mark.slow
def test_training_comes_as_far_as_with_whole_gradients(found: Mapping[str, Any]) -> None:
    losses, _ = reference({**MANY, "model": "mlp"}, range(40))
    own = found["many"][0]["losses"]
    assert own[-1] < 0.5 * own[0] and losses[0] - own[-1] > 0.8 * (losses[0] - losses[-1])


@pytest.mark.slow
def test_what_three_workers_had_not_sent_is_dealt_out_to_two(found: Mapping[str, Any]) -> None:
    model, unsent, _ = simulated(GOES_ON)
    for own, expected in zip(found["goes on"][:2], unsent, strict=True):
        assert_close(own["values"], values_of(model))
        assert_close(own["unsent"], expected)


@pytest.mark.slow
def test_two_runs_have_the_same_bits(found: Mapping[str, Any]) -> None:
    for one, other in zip(found["at once"][:2], found["again"][:2], strict=True):
        assert (one["values"], one["unsent"], one["losses"]) == (other["values"], other["unsent"], other["losses"])


@pytest.mark.slow
def test_a_run_that_goes_on_from_its_states_has_the_same_bits(found: Mapping[str, Any]) -> None:
    for at_once, resumed in zip(found["at once"][:2], found["resumes"][:2], strict=True):
        assert resumed["losses"] == at_once["losses"][3:]
        assert (resumed["values"], resumed["unsent"]) == (at_once["values"], at_once["unsent"])


@pytest.mark.slow
def test_workers_of_which_one_has_loaded_no_state_are_refused_by_all(found: Mapping[str, Any]) -> None:
    for own in found["one resumes"][:2]:
        assert "CommunicationError" in own["losses"][0] and "steps of compression=mirrorc.PowerSGD" in own["losses"][0]


def test_a_failed_step_leaves_all_as_it_was(found: Mapping[str, Any]) -> None:
    for own in found["recovers"][:2]:
        assert [isinstance(loss, float) for loss in own["losses"]] == [True, True, False, True]
        assert "the disk is full" in own["losses"][2]


@pytest.mark.slow
def test_a_worker_that_has_left_sends_what_it_had_not(found: Mapping[str, Any]) -> None:
    first, second = found["leaves"][:2]
    model, unsent, _ = simulated({**LEAVES, "steps": 3})
    assert first["values"] == second["values"]
    assert_close(first["values"], values_of(model))
    assert_close(second["unsent"], unsent[1])


ALIKE = "sums of low rank are products of the library, which has the same bits on all workers: their machines are alike"
UNLIKE = "sums of low rank are made element by element: "


@pytest.mark.parametrize(
    ("case", "text", "by_library"),
    [
        ("2 x 1", ALIKE, True),
        pytest.param("many", ALIKE, True, marks=pytest.mark.slow),
        ("three", UNLIKE + "worker 0 has 2 devices, worker 1 has 1", False),
        ("other threads", UNLIKE + "workers 0 and 1 differ in threads of a device: 1 and 2", False),
    ],
)
def test_workers_that_are_alike_use_products_of_the_library(
    found: Mapping[str, Any], case: str, text: str, by_library: bool
) -> None:
    for own in filter(None, found[case]):
        assert any(text in remark for remark in own["remarks"])
        assert f"by_library={by_library}" in own["program"] and f"by_library={not by_library}" not in own["program"]


def test_bytes_with_and_without_are_explained(found: Mapping[str, Any]) -> None:
    for own in found["three"]:
        assert any("of rank 1, which changes numbers: each of 3 workers sends" in text for text in own["remarks"])
        assert "exchange_low_rank over gloo" in own["explained"]
        assert re.search(r"compressed: each worker gives [\d.]+ \w+ in\s+place\s+of [\d.]+ \w+", own["explained"])
