"""Steps that workers compile together: one that fails on a worker fails on all at once, and the next one is as if it had not."""

import os
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from worker_processes import LazyOutcomes, free_port, outcome, told, workers

pytestmark = pytest.mark.slow

GOOD = ["", "", ""]
ATTEMPTS: dict[str, list[list[str]]] = {
    "on one worker": [GOOD, ["", "optimizer", ""], ["", "value", ""], ["value", "", ""], GOOD],
    "on all": [["optimizer", "optimizer", "optimizer"], ["value", "kind", "value"], GOOD],
    "in a capture": [["", "", "capture"], GOOD],
    "of one that is interrupted": [GOOD, ["", "", "interrupt"], ["kind", "", ""], GOOD],
    "in what is sent": [["unsendable", "unsendable", "unsendable"], GOOD],
    "for devices": [["devices", "", ""], GOOD],
}
FIRST = {
    f"in the first call, a wrong {how}": [how if rank == number % 3 else "" for rank in range(3)]
    for number, how in enumerate(("model", "optimizer", "name", "kind", "communication", "distributed", "mode"))
}
ATTEMPTS |= {name: [ways, GOOD] for name, ways in FIRST.items()}
ORDERS = {
    f"in another order {how}": [[how, f"{how}, backwards", how], [how] * 3]
    for how in ("by option", "by function", "by plan", "by pass")
}
NAMED = {"in parts": ("microbatches", "1", "2"), "in shards": ("shard_optimizer", "False", "True")}
DIFFER: dict[str, list[list[str]]] = {"with other options": [["", "differs", ""], GOOD], **ORDERS}
DIFFER |= {how: [["", how, ""], GOOD] for how in NAMED}
FAST = ("on one worker", "in a capture", *list(FIRST)[:3])
FAILED = "failed in mirrorc.compile, which all workers call together\n  why:  "


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Any]:
    cases = {name: workers("compiles", attempts, size=3) for name, attempts in (ATTEMPTS | DIFFER).items()}
    return LazyOutcomes(tmp_path_factory.mktemp, cases, FAST)


def of_each(found: Mapping[str, Any], case: str) -> list[tuple[Any, ...]]:
    return list(zip(*(own["attempts"] for own in found[case]), strict=True))


@pytest.mark.parametrize("case", [*ATTEMPTS])
def test_a_step_that_one_worker_cannot_compile_is_refused_by_all_and_leaves_no_trace(
    found: Mapping[str, Any], case: str
) -> None:
    expected = None
    for ways, results in zip(ATTEMPTS[case], of_each(found, case), strict=True):
        if not any(ways):
            expected = expected or results[0]
            assert isinstance(expected, list) and all(own == expected for own in results)
            continue
        for way, own in zip(ways, results, strict=True):
            assert isinstance(own, str)
            if way and sum(map(bool, ways)) == 1:  # of several, some may hear of the others' first
                assert FAILED not in own and not own.startswith("CommunicationError"), own
            elif not way and case != "in a capture":
                failing = next(rank for rank, other in enumerate(ways) if other)
                assert own.startswith(f"CommunicationError: MC6201: worker {failing} "), own


def test_who_has_failed_and_why_is_told_to_all(found: Mapping[str, Any]) -> None:
    first, second = found["on one worker"][0]["attempts"][1:3]
    assert FAILED + "ValueError: " in first and "worker 1 " in first
    assert first.endswith("mend that, and call mirrorc.compile again on all workers")
    assert FAILED + "ValueError: MC1002: microbatches" in second


@pytest.mark.parametrize("case", [*FIRST])
def test_those_who_wait_in_their_first_call_are_told_why_one_fails_before_it_has_looked_at_its_model(
    found: Mapping[str, Any], case: str
) -> None:
    results = found[case]
    failing = next(rank for rank, how in enumerate(FIRST[case]) if how)
    own = results[failing]["attempts"][0]
    for rank in {0, 1, 2} - {failing}:
        assert f"{FAILED}{' '.join(own.split())}".rstrip(".") in results[rank]["attempts"][0]


def test_a_worker_that_ends_before_it_comes_to_compile_is_named_to_all_others(tmp_path: Path) -> None:
    case = workers("compiles", [GOOD, ["", "", "kill"]], size=3)
    (_, first), (_, second) = (own["attempts"] for own in outcome(tmp_path, case, num_ended=1))
    assert first.startswith("CommunicationError: MC6203: worker 2 ") and first == second
    assert first.endswith(
        "does not come to mirrorc.compile\n  why:  its process has ended\n  fix:  end all workers, and start them again"
    )


ENDS = """
import mirrorc, torch
if mirrorc.cluster.join(timeout=60).rank:
    raise ValueError("there is no data")
model = torch.nn.Linear(2, 1)
mirrorc.compile(model, optimizer=torch.optim.SGD(model.parameters(), lr=0.1), loss_fn=torch.nn.MSELoss())
"""


def test_what_ends_the_script_of_a_worker_that_has_joined_is_told_to_those_who_compile() -> None:
    port = free_port()
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", ENDS], env={**os.environ, **told(rank, 2, port)}, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]
    try:
        said = [process.communicate(timeout=100)[1] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert "ValueError: there is no data" in said[1]
    assert "CommunicationError: MC6203: worker 1 " in said[0]
    assert (
        "does not come to mirrorc.compile\n  why:  its process has ended, after ValueError: there is no data\n"
        in said[0]
    )


def test_after_different_options_all_may_compile_again_with_the_same_scaler(found: Mapping[str, Any]) -> None:
    refused, trained = of_each(found, "with other options")
    assert all(
        own.startswith("CommunicationError: MC6301: workers differ in the arguments of mirrorc.compile")
        for own in refused
    )
    assert isinstance(trained[0], list) and all(own == trained[0] for own in trained)


@pytest.mark.parametrize("case", NAMED)
def test_an_option_that_differs_is_told_by_its_own_name(found: Mapping[str, Any], case: str) -> None:
    (name, first, second), refused = NAMED[case], of_each(found, case)[0]
    differ = rf"worker 0 \(.*\) has {name}: {first}, worker 1 \(.*\) has {name}: {second}"
    assert all(re.search(differ, own) for own in refused), refused[0]


@pytest.mark.parametrize("case", [case for case in ORDERS if not case.endswith("pass")])
def test_buckets_that_one_worker_fills_or_launches_in_another_order_are_refused_by_all(
    found: Mapping[str, Any], case: str
) -> None:
    """By an option before anything is compiled; what a function, or a plan of a pipeline of one's own, does shows in programs."""
    refused, trained = of_each(found, case)
    assert refused[0] == refused[1] == refused[2]
    if case.endswith("option"):
        differ = "the arguments of mirrorc.compile\n.*order='ready'.*order='reversed'"
    else:
        differ = r"what their programs exchange\n  why:  worker 0 \(.*\) has line 1: .*, worker 1 \(.*\) has line 1: "
    assert re.match(f"CommunicationError: MC6301: workers differ in {differ}", refused[0]), refused[0]
    if not case.endswith("option"):
        one, other = re.findall(r"line 1: .*?: (weight|bias)\[", refused[0])
        assert one != other, refused[0]
    assert isinstance(trained[0], list) and all(own == trained[0] for own in trained)


def test_launches_against_the_plan_are_refused_by_the_verifier_and_told_to_all(found: Mapping[str, Any]) -> None:
    refused, trained = of_each(found, "in another order by pass")
    assert refused[1].startswith("VerifyError: MC4101: pass 'move-first-launch' breaks the rule buckets_are_")
    assert refused[0] == refused[2] and refused[0].startswith(
        "CommunicationError: MC6201: training call 1 has failed\n  why:  worker 1 ("
    )
    assert "VerifyError: MC4101: pass 'move-first-launch' breaks" in refused[0]
    assert isinstance(trained[0], list) and all(own == trained[0] for own in trained)


def test_what_cannot_be_sent_of_an_optimizer_is_named(found: Mapping[str, Any]) -> None:
    own, *others = of_each(found, "in what is sent")[0]
    assert own.startswith("ValueError: MC6403: what worker 0 has in its optimizers cannot be sent to the other workers")
    assert "['param_groups'][0]['schedule'], a function, cannot be saved" in own
    assert all("CommunicationError" in other and "worker 0 " in other and "'schedule'" in other for other in others)


def test_a_model_that_one_worker_cannot_capture_is_told_to_those_who_call_the_step(found: Mapping[str, Any]) -> None:
    first, second, own = of_each(found, "in a capture")[0]
    assert own.startswith("UnreadableError")
    assert "worker 2 " in first and "UnreadableError" in first
    assert "worker 2 " in second and "UnreadableError" in second
