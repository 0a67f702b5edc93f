"""Replicas that meet in forward and backward: what the verifier says of programs in which they would not."""

from itertools import pairwise

import pytest
from broken_meetings import (
    meeting_stages,
    stages_of_worker,
    stay_away,
    waits_before_a_meeting,
    with_another_value,
)
from selections import slow_but

from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.verifier.verifier import verify


@pytest.mark.slow
@pytest.mark.parametrize("rows", slow_but([7, 1], [8, 7, 1]))
@pytest.mark.parametrize("num_devices", slow_but([1, 3], [1, 2, 3]))
def test_programs_whose_replicas_meet_are_valid_after_each_pass(rows: int, num_devices: int) -> None:
    for program in meeting_stages(rows, num_devices).values():
        verify(program)


@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 1, 0])
def test_programs_whose_replicas_meet_other_workers_are_valid_after_each_pass(rows: int) -> None:
    stages = list(stages_of_worker(rows).values())
    for before, after in pairwise(stages):
        verify(after, before=before)


@pytest.mark.slow
def test_a_pass_must_not_have_a_worker_stay_away() -> None:
    before, after = (stages_of_worker(0)["lower-devices"] for _ in range(2))
    stay_away(after)
    with pytest.raises(
        VerifyError, match=r"(?s)meetings_of_workers_are_preserved.*met the others in sum_over_replicas 0, rows"
    ):
        verify(after, before=before)


@pytest.mark.slow
def test_devices_that_would_wait_for_a_bucket_and_for_a_meeting_are_refused() -> None:
    program = meeting_stages()["lower-devices"]
    waits_before_a_meeting(program)
    with pytest.raises(VerifyError, match="no_device_waits_forever"):
        verify(program)


@pytest.mark.slow
@pytest.mark.parametrize("pass_name", ["replicate", "schedule-overlap", "lower-devices"])
def test_a_pass_must_not_change_what_they_meet_with(pass_name: str) -> None:
    before, after = (meeting_stages()[pass_name] for _ in range(2))
    verify(after, before=before)
    with_another_value(after)
    with pytest.raises(
        VerifyError, match=r"(?s)dataflow_is_preserved.*value for sum_over_replicas 0 on cpu:1 is computed in another"
    ):
        verify(after, before=before)


def test_forward_and_backward_are_cut_where_they_meet() -> None:
    program = meeting_stages()["outline-regions"]
    (graph,) = program.shard_graphs
    numbers = [node.kwargs["number"] for node in calls_to(graph, *ops.MEETINGS)]
    kinds = [node.target for node in calls_to(graph, *ops.MEETINGS)]
    assert numbers == [0, 1, 2, 3]
    assert kinds == [ops.sum_over_replicas, ops.rows_of_replicas, ops.own_rows_of_sum, ops.sum_over_replicas]
    assert any("pieces of forward, cut where replicas meet" in remark.text for remark in program.remarks)
