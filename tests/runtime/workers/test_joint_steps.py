"""Steps over several workers, which are processes on this machine: they are those of one process on the batches of all."""

import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
import selections
from worker_processes import LazyOutcomes, outcome, workers
from worker_training import (
    assert_training,
    assert_values,
    evaluation,
    in_one_process,
    reference,
    reference_by_shard,
    training,
)

from mirrorc.packing import ByBytes, EqualPacks

FACTORS = {"options": {"exchange": "factors"}}
CASES: dict[str, dict[str, Any]] = {
    "2 x 1": training([1, 1], [[4, 4], [4, 2]], stepped=1, evaluates=True),
    "2 x 2": training([2, 2], [[4, 4], [7, 1]], optimizer="SGD"),
    "3 x (1, 2, 1)": training([1, 2, 1], [[3, 5, 2], [3, 1, 2]]),
    "checkpointed": training([1, 1], [[4, 3]], model="checkpointed", optimizer="SGD"),
    "one recomputes": {
        "model": "wide",
        "devices": [1, 1],
        "sizes": [[40, 30]],
        "optimizer": "SGD",
        "options": {"activations": 400_000},  # 40 examples take more, 30 do not
    },
    "table": training([2, 1], [[4, 3]], model="table", steps=6, optimizer="SGD"),
    "rows": training([2, 1], [[4, 3], [0, 2]], model="rows", optimizer="SGD"),
    "bound": training([2, 2], [[4, 3]], options={"clip_grad_norm": 0.1}),
    "parts": training([1, 1], [[6, 4]], options={"microbatches": 2}),
    "plain PyTorch": training(
        [2, 2],
        [[4, 3], [3, 5]],
        model="branching",
        options={"capture": "autograd", "buckets": ByBytes(1e-4, 1e-4)},
    ),
    "experts": training(
        [1, 2],
        [[1, 2], [3, 2], [1, 1]],
        model="mixture",
        steps=8,
        options={"capture": "autograd", "buckets": ByBytes(1e-4, 1e-4)},
    ),
    "order": {
        "model": "layers",
        "devices": [1, 1],
        "sizes": [[4, 4], [3, 5]],
        "options": {"exchange": "dense", "buckets": ByBytes(1e-4, 1e-4)},
        "called": [["one", "two"], ["two", "one"]],  # so that gradients become ready in another order
    },
    "packs": training([1, 2], [[4, 4], [3, 5]], options={"buckets": EqualPacks(3)}),
    "packs, bound": training(
        [1, 1], [[4, 3], [0, 5]], options={"clip_grad_norm": 0.1, "order": "reversed", "buckets": EqualPacks(4)}
    ),
    "packs and factors": training(
        [1, 1], [[4, 3]], model="table", options={"early_update": False, "buckets": EqualPacks(2)}
    ),
    "factors, 2 x 1": training([1, 1], [[4, 4], [5, 2], [1, 3]], steps=6, **FACTORS),
    "factors, 2 x 2": training([2, 2], [[4, 3], [4, 5]], model="table", steps=6, **FACTORS),
    "factors, one grows": training([1, 1], [[4, 4], [4, 5]], optimizer="SGD", **FACTORS),
    "factors, empty": training([1, 1], [[0, 3], [4, 2], [3, 0]], model="table", steps=6, **FACTORS),
    "factors, tied": training([1, 1, 1], [[3, 4, 2]], model="tied", optimizer="SGD", **FACTORS),
    "factors, in parts": training([1, 1], [[40, 30], [2, 0]], model="wide", **FACTORS),
    "factors, bound": training(
        [1, 1],
        [[4, 3], [2, 2]],
        model="table",
        options={"exchange": "factors", "clip_grad_norm": 0.1, "microbatches": 2},
    ),
    "random": training([1, 2], [[3, 6]], model="random", optimizer="SGD"),
    "whole": training([1, 2, 1], [[9, 0, 1]], is_whole=True),
    "whole, random": training(
        [1, 2, 1], [[4, 0, 0], [7, 1, 0], [5, 0, 0]], model="random", optimizer="SGD", is_whole=True
    ),
    "empty": training([1, 2, 1], [[0, 0, 2], [3, 5, 2]], options={"return_outputs": True}),
    "empty, random": training([1, 2], [[0, 4]], model="random", optimizer="SGD", steps=1),
}
PLACES: dict[str, dict[str, Any]] = {
    "2 x 1": training([1, 1], [[4, 4], [3, 5]]),
    "2 x 2": training([2, 2], [[4, 6], [7, 5]]),
    "3 x (1, 2, 1)": training([1, 2, 1], [[3, 5, 2], [2, 4, 4]]),
}
NORMALIZED = {  # by SGD: the bias before a normalization has gradients of rounding errors, which others scale up
    f"normalized, {name}": {**given, "model": "statistics", "optimizer": "SGD"} for name, given in PLACES.items()
}
RANDOM = {f"random, {name}": {**given, "model": "random", "optimizer": "SGD"} for name, given in PLACES.items()}
WHOLE = {f"Adafactor, {name}": {**given, "optimizer": "Adafactor"} for name, given in PLACES.items()}
SELDOM = (*NORMALIZED, *RANDOM, *WHOLE)
CASES = {name: {"steps": 5, **given} for name, given in (CASES | NORMALIZED | RANDOM | WHOLE).items()}
FAULTS: dict[str, dict[str, Any]] = {
    "recovers": training(
        [1, 1],
        [[4, 4]],
        steps=6,
        faults=[
            [0, 1, "wrong batch"],
            [1, 1, "wrong batch"],
            [2, 1, "operator"],
            [3, 0, "operator"],
            [4, 1, "rate"],
        ],
    ),
    "loads": training([1, 1], [[4, 4]], model="random", faults=[[1, 1, "evaluates"], [2, 0, "loads"]]),
    "factors, other threads": training([1, 1], [[4, 4]], steps=2, threads=[1, 2], options={"exchange": "factors"}),
    "groups": training([1, 1], [[4, 4]], model="twins"),
    "modes": training([1, 1], [[4, 4]], model="random", steps=3, faults=[[1, 1, "mode"]]),
    "left out": training(
        [1, 1],
        [[4, 4]],
        model="layers",
        steps=1,
        options={"buckets": ByBytes(1e-4, 1e-4)},
        called=[["one", "two"], ["one"]],
    ),
    "leaves": training([1, 1], [[4, 4]], steps=2, faults=[[1, 1, "leave"]]),
    "nothing": training([1, 1], [[0, 0], [4, 0]], steps=2),
    "other model": training([1, 1], [[4, 4]]),
}

SLOW = (
    *(
        "2 x 2",
        "checkpointed",
        "table",
        "bound",
        "parts",
        "plain PyTorch",
        "packs",
        "packs, bound",
        "packs and factors",
    ),
    *("factors, 2 x 1", "factors, 2 x 2", "factors, empty", "factors, tied", "factors, bound"),
    *("whole, random", "rows"),
    *("3 x (1, 2, 1)", "one recomputes", "factors, in parts"),
)
EXACTLY = (1e-12, 2e-12)  # relative and absolute
FAST = (CASES | FAULTS).keys() - {*SLOW, *SELDOM}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("train", given) for name, given in (CASES | FAULTS).items()}
    cases["other model"][1]["train"] = {**FAULTS["other model"], "model": "table"}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST, seldom=SELDOM)


@pytest.mark.slow
def test_workers_without_examples_count_for_nothing(found: Mapping[str, Any]) -> None:
    losses, values = in_one_process(CASES["empty, random"])
    for own in found["empty, random"][:2]:
        assert_training(own, losses, values, *EXACTLY)
    for rank, own in enumerate(found["empty"]):
        sizes = [CASES["empty"]["sizes"][number % 2][rank] for number in range(5)]
        assert own["outputs"] == [[size, 4] for size in sizes]


@pytest.mark.slow
def test_a_step_without_any_example_is_refused_by_all(found: Mapping[str, Any]) -> None:
    losses, values = reference(FAULTS["nothing"], [1])
    for own in found["nothing"][:2]:
        assert own["losses"][0].startswith(
            "ValueError: MC6303: no worker has examples in this call, which needs at least one"
        )
        assert own["losses"][1] == pytest.approx(losses[0], rel=1e-12)
        assert_values(own["values"], values, *EXACTLY)


@pytest.mark.parametrize(
    "case",
    [
        *selections.slow_but(FAST, [case for case in CASES if CASES[case]["model"] != "random" and case not in SELDOM]),
        *selections.exhaustive(*((case,) for case in WHOLE)),
    ],
)
def test_steps_are_those_of_one_process(found: Mapping[str, Any], case: str) -> None:
    given = CASES[case]
    losses, values = reference(given, range(given["steps"]))
    for own in found[case][: len(given["devices"])]:
        assert_training(own, losses, values, *EXACTLY)
        assert set(own["updates"]) <= {float(len(losses))} or given["model"] == "mixture"
    assert len({own["schedule"] for own in found[case][: len(given["devices"])]}) == 1


@pytest.mark.parametrize("case", ["random", *selections.exhaustive(*((case,) for case in RANDOM))])
def test_streams_and_statistics_are_those_of_all_replicas(found: Mapping[str, Any], case: str) -> None:
    losses, values = in_one_process(CASES[case])
    for own in found[case][: len(CASES[case]["devices"])]:
        assert_training(own, losses, values, *EXACTLY)


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", NORMALIZED)
def test_each_shard_is_normalized_by_itself(found: Mapping[str, Any], case: str) -> None:
    """As in plain PyTorch on one device after the other; the model keeps the mean of the replicas' statistics."""
    losses, values = reference_by_shard(CASES[case])
    for own in found[case][: len(CASES[case]["devices"])]:
        assert_training(own, losses, values, *EXACTLY)


@pytest.mark.slow
def test_parts_of_a_batch_have_the_streams_and_statistics_of_one_process(found: Mapping[str, Any]) -> None:
    losses, values = in_one_process(CASES["whole, random"])
    for own in found["whole, random"]:
        assert own["losses"] == pytest.approx(losses, rel=1e-12)
        for each in (
            own["values"],
            values,
        ):  # of a small batch, workers go on from the mean, one process from its replicas' own
            each.pop("1.running_mean", None), each.pop("1.running_var", None)
        assert_values(own["values"], values, *EXACTLY)


@pytest.mark.parametrize("case", selections.slow_but(FAST, [case for case in CASES if case.startswith("factors")]))
def test_factors_give_equal_bits_on_all_workers(found: Mapping[str, Any], case: str) -> None:
    first, *others = found[case][: len(CASES[case]["devices"])]
    assert first["gathered"] >= 1
    assert all(other["values"] == first["values"] for other in others)


@pytest.mark.parametrize(
    ("case", "num_programs"), [("factors, one grows", [1, 2]), *selections.slow(("factors, 2 x 1", [3, 2]))]
)
def test_another_batch_compiles_nothing_elsewhere(found: Mapping[str, Any], case: str, num_programs: list[int]) -> None:
    """Each worker compiles for the sizes of its own batches alone."""
    for own, number in zip(found[case][:2], num_programs, strict=True):
        assert f"{number} compiled program{'s' * (number > 1)}>" in own["step"]


def test_factors_of_machines_that_differ_are_refused_by_all(found: Mapping[str, Any]) -> None:
    for own in found["factors, other threads"][:2]:
        assert (
            "exchange='factors' needs machines and settings that are alike\n  why:  workers 0 and 1 differ in threads"
            in own["losses"][0]
        )
        assert own["losses"][0].startswith("CommunicationError") and own["losses"][0] == own["losses"][1]


def test_a_step_says_which_worker_it_is_of(found: Mapping[str, Any]) -> None:
    assert [own["described"] for own in found["empty"]] == [[0, 3, 4, True], [1, 3, 4, False], [2, 3, 4, False]]


def test_exchanges_are_explained(found: Mapping[str, Any]) -> None:
    for own in found["2 x 1"][:2]:
        assert "exchange over gloo" in own["explained"] and "advice: none is given" in own["explained"]


def test_an_evaluation_is_of_the_own_examples(found: Mapping[str, Any]) -> None:
    for rank, own in enumerate(found["2 x 1"][:2]):
        assert own["evaluated"] == pytest.approx(evaluation(CASES["2 x 1"], own["values"], rank), rel=1e-12)


def test_after_a_failure_on_one_worker_all_go_on(found: Mapping[str, Any]) -> None:
    given = FAULTS["recovers"]
    losses, values = reference(given, [5])
    first, second = found["recovers"][:2]
    for own in (first, second):
        assert own["losses"][5] == pytest.approx(losses[0], rel=1e-12)
        assert_values(own["values"], values, *EXACTLY)
    for number in (0, 1):
        assert second["losses"][number].startswith("ValueError: MC1304: arguments disagree on dim 0")
        assert f"training call {number + 1} has failed\n  why:  worker 1 (" in first["losses"][number]
        assert "it raised ValueError: MC1304: arguments disagree on dim 0" in first["losses"][number]
        assert "No parameter was changed\n  fix:  make the call again, on all workers" in first["losses"][number]
    assert "OSError: the disk is full" in second["losses"][2] and "OSError: the disk is full" in first["losses"][2]
    assert "worker 0 (" in second["losses"][3] and "OSError: the disk is full" in second["losses"][3]
    assert first["losses"][4] == second["losses"][4]
    assert "workers differ in the hyperparameters of their optimizers\n  why:  worker 0" in first["losses"][4]
    assert "lr=0.1" in first["losses"][4] and "lr=0.05" in first["losses"][4]


def test_what_one_worker_writes_does_not_part_the_workers(found: Mapping[str, Any]) -> None:
    one, other = found["loads"][:2]
    assert one["values"] == other["values"] and one["losses"] == other["losses"]
    assert one["values"]["0.bias"] != found["random"][0]["values"]["0.bias"]


def test_other_groups_are_refused_by_all(found: Mapping[str, Any]) -> None:
    errors = [own["error"] for own in found["groups"][:2]]
    assert errors[0] == errors[1] and "group 0: SGD of 0.weight, 0.bias" in errors[0] and "SGD of 1.weight" in errors[0]


def test_buckets_of_other_gradients_are_refused_by_all(found: Mapping[str, Any]) -> None:
    errors = [own["losses"][0] for own in found["left out"][:2]]
    assert (
        errors[0] == errors[1]
        and "CommunicationError: MC6301: workers differ in what their programs exchange" in errors[0]
    )
    assert re.search(r"worker 0 \(.*\) has line \d+: .*two\..*, worker 1 \(.*\) has line \d+: .*one\.", errors[0]), (
        errors[0]
    )
    assert "No parameter was changed\n  fix:  let forward go the same way on all of them" in errors[0]
    assert errors[0].endswith("give all the same seeds (random.seed, numpy.random.seed, torch.manual_seed)")


def test_who_leaves_because_of_an_error_in_the_script_tells_it(found: Mapping[str, Any]) -> None:
    first, second = found["leaves"][:2]
    assert second["error"] == "ValueError: the data is gone"
    assert re.search(
        r"training call 2 has failed\n  why:  worker 1 \(.*\): it has closed its step or module, or its process has ended, after "
        r"ValueError: the data is gone\n  now:  No parameter was changed\n  fix:  end all workers",
        first["losses"][1],
    ), first["losses"]


def test_another_mode_is_refused_by_all(found: Mapping[str, Any]) -> None:
    for own in found["modes"][:2]:
        assert "workers differ in which of their modules are in training mode\n  why:  worker 1" in own["losses"][1]
        assert isinstance(own["losses"][2], float)


def test_another_model_is_refused_by_all(found: Mapping[str, Any]) -> None:
    errors = [own["error"] for own in found["other model"][:2]]
    assert errors[0] == errors[1] and "workers differ in the arguments of mirrorc.compile" in errors[0]
    assert "model: Mlp" in errors[0] and "model: Table" in errors[0]


@pytest.mark.slow
@pytest.mark.parametrize("fault", selections.slow_but(["kill"], ["kill", "end", "stop"]))
def test_a_worker_that_is_gone_is_named(tmp_path: Any, fault: str) -> None:
    given = training(
        [1, 2, 1],
        [[4, 4, 4]],
        faults=[[2, 2, fault]],
        ends=True,
        options={"timeout": 10.0 if fault == "stop" else 60.0},
    )
    num_ended = 0 if fault == "end" else 1
    own = outcome(tmp_path, workers("train", given), num_ended=num_ended)
    for survivor in own[:2]:
        *made, error = survivor["losses"]
        assert len(made) == 2 and "training call 3 has failed\n  why:  worker 2 (" in error
        assert "No parameter was changed\n  fix:  end all workers, and start them again from a checkpoint" in error
        assert (
            survivor["seconds"] < 30
        )  # on a busy machine; a worker that is gone is not waited for until the time is over


@pytest.mark.slow
def test_a_worker_that_lives_and_does_not_come_is_named(tmp_path: Any) -> None:
    given = training([1, 1, 1], [[4, 4, 4]], faults=[[2, 1, "pause"]], pause=20.0, ends=True, options={"timeout": 8.0})
    own = outcome(tmp_path, workers("train", given))
    for rank in (0, 2):
        *made, error = own[rank]["losses"]
        assert len(made) == 2 and "training call 3 has failed\n  why:  worker 1 (" in error
        assert "it lives, but is behind the others: it is between training calls 2 and 3 (" in error
        assert "make the call again, on all workers" in error
    assert (
        "training call 3 has failed\n  why:  the other workers have given up on this one, worker 1 ("
        in own[1]["losses"][-1]
    )


@pytest.mark.exhaustive
@pytest.mark.parametrize("what", ["kill", "stop", "raise"])
@pytest.mark.parametrize("seed", range(10))
def test_a_worker_that_fails_at_any_moment_is_named(tmp_path: Any, what: str, seed: int) -> None:
    moment, steps = random.Random(f"{what} {seed}").uniform(0, 0.6), 100_000
    given = training(
        [1, 2, 1],
        [[4, 4, 4]],
        steps=steps,
        faults=[[3, 2, f"after {moment} {what}"]],
        ends=True,
        options={"timeout": 10.0 if what == "stop" else 60.0},
    )
    own = outcome(tmp_path, workers("train", given), num_ended=int(what != "raise"))
    values = {}
    for worker in own:
        assert "worker 2 (" in worker["losses"][-1] or worker is own[-1]
        assert worker["seconds"] < 30
        if "are between those before and those after this step" in worker["losses"][-1]:
            continue
        made = len(worker["losses"]) - 1 + ("The update was made here" in worker["losses"][-1])
        assert values.setdefault(made, worker["values"]) == worker["values"]
