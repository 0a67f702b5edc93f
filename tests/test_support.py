"""What decides which tests run, where and when: a mistake there would leave tests out without a word."""

import sys
from itertools import combinations, product
from logging import getLogger

import pytest
import saved_programs
from distribution import Scheduler, longest_first, scope
from interrupts import Interrupter, fail
from selections import slow, thinned
from tiny_programs import handmade
from worker_processes import free_port, own_ports


def is_slow(case: object) -> bool:
    return [mark.name for mark in case.marks] == ["slow"]  # type: ignore[attr-defined]


def test_slow_cases_are_marked_and_keep_their_arguments() -> None:
    one, other = slow((1, "a"), (2, "b"))
    assert (one.values, other.values) == ((1, "a"), (2, "b")) and is_slow(one) and is_slow(other)


@pytest.mark.parametrize("axes", [([2, 3, 4], "abc", [(), (1,)], [{}, {"x": 1}]), ("ab", "cd")])
def test_a_thinned_product_has_every_case_and_its_fast_ones_every_pair(axes: tuple[list[object], ...]) -> None:
    cases = thinned(*axes)
    assert [case.values for case in cases] == list(product(*axes))
    fast = [case.values for case in cases if not is_slow(case)]
    for i, j in combinations(range(len(axes)), 2):
        assert all(any(c[i] == a and c[j] == b for c in fast) for a, b in product(axes[i], axes[j]))
    assert len(fast) <= max(len(a) * len(b) for a, b in combinations(axes, 2)) + 1


def test_a_file_is_run_by_one_worker_and_functions_of_whole_runs_are_dealt_out() -> None:
    assert scope("tests/test_cli.py::test_show[1]") == scope("tests/test_cli.py::test_opt") == "tests/test_cli.py"
    losses = [f"tests/end_to_end/test_parity.py::test_losses[{i}]" for i in "12"]
    assert {scope(nodeid) for nodeid in losses} == {"tests/end_to_end/test_parity.py::test_losses"}
    long = "tests/end_to_end/test_fuzzed_training.py::test_many_events_between_steps[1]"
    assert scope(long) == long
    assert Scheduler._split_scope(None, losses[0]) == scope(losses[0])  # type: ignore[arg-type]


def test_long_tests_start_first_and_none_is_left_out() -> None:
    nodeids = [
        "tests/ir/test_a.py::a",
        "tests/test_golden.py::b",
        "tests/ir/test_a.py::c",
        "tests/printing/test_d.py::d",
    ]
    order = longest_first(nodeids)
    assert sorted(order) == [0, 1, 2, 3] and order == [1, 3, 0, 2]


def test_ports_of_tests_are_those_of_nobody_else() -> None:
    owners = ["", *(f"gw{i}" for i in range(8))]
    taken = [port for owner in owners for port in own_ports(owner)]
    assert len(taken) == len(set(taken)) > 5000
    assert all(10_000 <= port < 16_000 for port in taken), "others are given to sockets that ask for any port"
    assert own_ports("gw9") == own_ports("gw1"), "more workers share"
    assert len({free_port() for _ in range(20)}) == 20


def test_torch_writes_no_structured_trace_for_pytest() -> None:
    assert not any(type(handler).__module__.startswith("_pytest.") for handler in getLogger("torch.__trace").handlers)


def test_a_shared_program_that_a_test_changes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved_programs, "_SHARED", {})
    program = saved_programs._shared("mine", handmade(2))
    assert saved_programs.changed_programs() == []
    next(iter(program.graphs()[0].nodes)).name = "other"
    assert saved_programs.changed_programs() == ["mine"]


def test_an_interrupter_leaves_no_exception_behind() -> None:
    def handles() -> None:
        for _ in range(2):
            try:
                next(iter(()))
            except StopIteration as end:
                str(end)

    interrupter = Interrupter(lambda filename: filename == __file__)
    for place in range(interrupter.count(handles)):
        with pytest.raises(RuntimeError, match="a failure was put here"):
            interrupter.interrupted(handles, place, fail)
        assert sys.exc_info()[1] is None, interrupter.where
