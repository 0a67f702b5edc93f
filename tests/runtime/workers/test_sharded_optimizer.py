"""Steps whose optimizer is dealt out to workers are those of one process; what the optimizer shows is whole or refused."""

import re
from collections.abc import Mapping
from typing import Any

import pytest
import selections
import torch
from sharded_training import State, state_of
from torch import nn
from worker_processes import LazyOutcomes, outcome, workers
from worker_training import assert_training, assert_values, in_one_process, made, training, values_of, whole

from mirrorc.packing import ByBytes

SMALL = {"options": {"buckets": ByBytes(0.001, 0.0005)}}
FACTORS = {**SMALL["options"], "exchange": "factors"}
TWO: dict[str, Any] = training([1, 1], [[4, 4], [4, 4], [0, 4]], **SMALL)
USES = ("state", "own step", "copy", "pickle", "read", "gather", "state")
CASES: dict[str, dict[str, Any]] = {
    "2 x 1": {**TWO, "events": [[3, None, use] for use in USES]},
    "2 x 1 again": {**TWO},
    "2 x 2": training([2, 2], [[4, 4], [7, 1]], optimizer="SGD", **SMALL),
    "3 x (1, 2, 1)": training([1, 2, 1], [[3, 5, 2], [3, 1, 2]], **SMALL),
    "factors, 2 x 1": {**TWO, "options": FACTORS},
    "factors, 3 x (1, 2, 1)": training(
        [1, 2, 1], [[3, 5, 2], [0, 5, 2]], options=FACTORS, events=[[3, None, "keep"], [3, None, "load"]]
    ),
    "factors, 2 x 2": training([2, 2], [[4, 4], [7, 1]], optimizer="SGD", options=FACTORS),
    "factors, table": training(
        [2, 1], [[4, 3], [2, 5]], model="table", optimizer="SGD", options={"exchange": "factors", "microbatches": 2}
    ),
    "table": training([2, 1], [[4, 3]], model="table", optimizer="SGD"),
    "rows": training([1, 2], [[4, 3], [2, 5]], model="rows", optimizer="SGD"),
    "parts": {**TWO, "options": {"microbatches": 2, "clip_grad_value": 0.01}},
    "experts": training(
        [1, 2],
        [[1, 2], [3, 2], [1, 1]],
        model="mixture",
        steps=8,
        options={"capture": "autograd"},
        events=[[3, None, "gather"], [5, None, "keep"], [5, None, "load"]],
    ),
    "moved": {**TWO, "events": [[2, None, "move"]]},
    "chief shifts": {**TWO, "events": [[2, 0, "shift"]]},
    "loaded": {**TWO, "events": [[2, None, "keep"], [4, None, "load"]], "steps": 6},
    "frozen": {**TWO, "events": [[2, None, "gather"], [2, None, "freeze"]]},
    "frozen, dealt": {**TWO, "events": [[2, None, "freeze"], [3, None, "free"]]},
    "clears one": {**TWO, "events": [[2, 0, "clear"], [2, 1, "clear one"]], "ends": True},
    "clears half": {**TWO, "events": [[2, 0, "clear"], [2, 1, "write"], [2, None, "freeze"]]},
    "chief clears": {**TWO, "events": [[2, 0, "clear"], [2, None, "gather"]]},
    "chief gathers": {**TWO, "events": [[2, 0, "gather"]], "ends": True},
    "joins": {**TWO, "events": [[4, None, "join and gather"]], "ends": True},
    "random": training([1, 2], [[3, 6]], model="random", optimizer="SGD"),
}
SENT = ("factors, 2 x 1", "factors, 3 x (1, 2, 1)", "factors, 2 x 2", "factors, table")
FAST = ("2 x 1", "2 x 1 again", SENT[1], "parts", "loaded", "frozen, dealt")
PARITY = (
    "2 x 1",
    "2 x 1 again",
    "2 x 2",
    "3 x (1, 2, 1)",
    *SENT,
    "table",
    "rows",
    "parts",
    "experts",
    "moved",
    "chief shifts",
)
FROZEN = ("frozen", "frozen, dealt")
CLOSE = (1e-10, 1e-12)  # relative and absolute


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("shard", given) for name, given in CASES.items()}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST)


def reference(given: dict[str, Any], steps: Any) -> tuple[list[float], dict[str, list[float]], Any]:
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=0)
    bound, losses = given.get("options", {}).get("clip_grad_value"), []
    for number in steps:
        for at, _, what in given.get("events", ()):
            if at == number and what == "shift":
                model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            if at == number and what in ("freeze", "free"):
                for parameter in next(iter(model.children())).parameters():
                    parameter.requires_grad_(what == "free")
        x, y = whole(number, given["sizes"][number % len(given["sizes"])])
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        if bound is not None:
            nn.utils.clip_grad_value_(model.parameters(), bound)
        optimizer.step()
        losses.append(loss.item())
    return losses, values_of(model), state_of(optimizer)


def assert_state(actual: State, expected: State) -> None:
    assert actual.keys() == expected.keys()
    for number, entries in expected.items():
        assert_values(actual[number], entries, *CLOSE)


@pytest.mark.slow
@pytest.mark.parametrize("case", selections.slow_but(FAST, (*PARITY, *FROZEN)))
def test_steps_and_state_are_those_of_one_process(found: Mapping[str, Any], case: str) -> None:
    """Also where buckets become others than those for which the state is dealt out, because of other sizes or parameters."""
    given = CASES[case]
    losses, values, state = reference(given, range(given.get("steps", 5)))
    for own in found[case][: len(given["devices"])]:
        assert_training(own, losses, values, *CLOSE)
        assert_state(own["states"][-1], state)
        launched = ["scatter_sums", "gather_parameters", *(["gather_factors"] if case in SENT else [])]
        assert all(f"{name} over gloo" in own["explained"] for name in launched)
        assert "= gather_parameters(" in own["program"] and "= exchange(" not in own["program"]
    assert len({own["schedule"] for own in found[case][: len(given["devices"])]}) == 1


@pytest.mark.slow
def test_streams_and_statistics_are_those_of_all_replicas(found: Mapping[str, Any]) -> None:
    losses, values = in_one_process({**CASES["random"], "steps": 5})
    for own in found["random"][:2]:
        assert own["losses"] == pytest.approx(losses, rel=1e-9)
        assert_values(own["values"], values, *CLOSE)


@pytest.mark.slow
def test_two_runs_have_the_same_bits(found: Mapping[str, Any]) -> None:
    for one, other in zip(found["2 x 1"][:2], found["2 x 1 again"][:2], strict=True):
        assert one["losses"] == other["losses"]
        assert one["values"] == other["values"]
        assert one["states"][-1] == other["states"][-1]


@pytest.mark.parametrize("case", selections.slow_but(FAST, ("2 x 1", "2 x 2", "3 x (1, 2, 1)", *SENT)))
def test_all_workers_have_the_same_bits(found: Mapping[str, Any], case: str) -> None:
    values = [own["values"] for own in found[case][: len(CASES[case]["devices"])]]
    assert all(own == values[0] for own in values)


@pytest.mark.parametrize(("case", "num_entries"), [("2 x 1", 2), *selections.slow(("2 x 2", 1), ("3 x (1, 2, 1)", 2))])
def test_a_worker_has_its_part_of_the_state_alone(found: Mapping[str, Any], case: str, num_entries: int) -> None:
    """Parts have gaps between parameters, and the padding that makes them equal; numbers are for each bucket and parameter."""
    num_workers = len(CASES[case]["devices"])
    num_bytes = 8 * num_entries * sum(map(len, found[case][0]["values"].values()))
    for own in found[case][:num_workers]:
        assert own["actual"] <= num_bytes / num_workers + 8 * 2 * 6 * 64
        assert 0 <= own["held"] - own["actual"] < 150


def test_state_is_whole_or_refused(found: Mapping[str, Any]) -> None:
    remedy = "but with shard_optimizer=True each worker has a part of it\n  fix:  step.gather_optimizer_state() on all"
    for own in found["2 x 1"][:2]:
        assert [text.partition(f", {remedy}")[0] for text in own["said"]] == [
            "ExecutionError: MC6402: AdamW.state_dict() was called",
            "ExecutionError: MC6402: AdamW.step() was called",
            "ExecutionError: MC6402: the optimizer is copied or saved",
            "ExecutionError: MC6402: the optimizer is copied or saved",
            "ExecutionError: MC6402: the optimizer's state is used (norm)",
        ]
        assert all(remedy in text for text in own["said"])
        _, _, state = reference(CASES["2 x 1"], range(3))
        assert_state(own["states"][0], state)


def test_each_worker_takes_its_part_of_what_is_loaded(found: Mapping[str, Any]) -> None:
    losses, values, state = reference(CASES["loaded"], [0, 1, 4, 5])
    for own in found["loaded"][:2]:
        assert own["losses"][:2] + own["losses"][4:] == pytest.approx(losses, rel=1e-10)
        assert_values(own["values"], values, *CLOSE)
        assert_state(own["states"][-1], state)


@pytest.mark.slow
def test_workers_that_have_written_different_things_take_over_the_chiefs(found: Mapping[str, Any]) -> None:
    """The chief clears the optimizer's state, the other one writes a parameter, and what is left is dealt out anew."""
    chief, other = found["clears half"][:2]
    assert all(isinstance(loss, float) for own in (chief, other) for loss in own["losses"])
    assert chief["losses"] == other["losses"] and chief["values"] == other["values"]


@pytest.mark.slow
def test_workers_that_have_cleared_unlike_state_are_refused(found: Mapping[str, Any]) -> None:
    """One clears all, the other that of one parameter."""
    for own in found["clears one"][:2]:
        assert own["losses"][2].startswith("CommunicationError: MC6301: workers differ in what their programs exchange")


@pytest.mark.slow
def test_workers_that_differ_are_told(found: Mapping[str, Any]) -> None:
    for own in found["chief clears"][:2]:
        assert own["said"][0].startswith(
            "CommunicationError: MC6401: cannot gather the optimizer's state: workers have states of different steps"
        )
        assert all(isinstance(loss, float) for loss in own["losses"])
    assert found["chief clears"][0]["values"] == found["chief clears"][1]["values"]
    chief, other = found["chief gathers"][:2]
    for error in (chief["said"][0], other["losses"][2]):
        assert error.startswith("CommunicationError: MC6301: workers differ in what they call")
        assert "step.gather_optimizer_state()" in error
    for own in found["joins"][:2]:
        assert "step.gather_optimizer_state() was called inside of step.join()" in own["said"][0]


@pytest.mark.slow
def test_a_worker_that_is_lost_behind_the_commit_leaves_parameters_between_steps(tmp_path: Any) -> None:
    given = {**TWO, "events": [[2, 1, "die"]], "ends": True}
    (one,) = outcome(tmp_path, workers("shard", given, num_processes=2), num_ended=1)
    assert "training call 3 has failed\n  why:  worker 1 (" in one["losses"][2]
    assert re.search(
        r"The update had begun: parameters are between those before and those after this step: buckets 0.* were updated in part",
        one["losses"][2],
    )


@pytest.mark.slow
def test_workers_that_have_left_update_their_part(tmp_path: Any) -> None:
    given = training([1, 2, 1], [[3, 5, 2], [3, 0, 2], [0, 0, 4]], decay=0.7, options={"shard_optimizer": True})
    model, optimizer = made("mlp", "AdamW", seed=0)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for number in range(3):
        x, y = whole(number, given["sizes"][number])  # type: ignore[index]
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        scheduler.step()
    for own in outcome(tmp_path, workers("join", given)):
        assert_values(own["values"], values_of(model), *CLOSE)
