"""The pass send-rows: which broadcasts of a table with sparse gradients carry rows alone, and why others do not."""

from dataclasses import replace

import pytest
from broken_programs import LooksUp
from tiny_programs import SMALL_BUCKETS, captured_model, handmade, run_up_to, targets

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Program
from mirrorc.passes import LowerCollectives, SendRows, SpreadCopies, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import select_passes
from mirrorc.verifier.verifier import Verify, verify


def whole(num_devices: int, rows: int = 8, *, writes_rows: bool = True) -> Program:
    captured = captured_model(LooksUp(), num_devices, rows)
    variables = {
        name: replace(one, update=replace(one.update, writes_rows=one.update.writes_rows and writes_rows))
        if one.update is not None
        else one
        for name, one in captured.variables.items()
    }
    passes = select_passes(default_pipeline(**SMALL_BUCKETS), ["share-parameters"])
    names = [one.name for one in passes]
    return run_passes(captured.evolve(variables=variables), passes[: names.index("send-rows")])


def said(program: Program) -> list[str]:
    return [remark.text for remark in program.remarks if remark.by == "send-rows"]


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [2, 3])
def test_rows_are_broadcast_and_stored_by_what_each_device_has_gathered(num_devices: int) -> None:
    program = run_passes(whole(num_devices), [SendRows()])
    graph = program.mirrored_graph
    (step,), (rows,), (broadcast,) = (targets(graph, t) for t in (ops.step_optimizer, ops.updated_rows, ops.broadcast))
    (new,) = step.users
    assert rows.args == (new, step.args[0])
    assert broadcast.args == (rows,)
    assert not targets(graph, ops.store)
    stores = targets(graph, ops.store_rows)
    assert [replica_of(store) for store in stores] == list(range(1, num_devices))
    for store in stores:
        received, gathered = store.args
        assert received.args == (broadcast,)
        assert replica_of(received) == replica_of(gathered) == replica_of(store)
        assert gathered.args[0].target is ops.all_gather and bucket_of(gathered) == bucket_of(store)
    lowered = run_passes(program, [LowerCollectives()])
    assert [send.args for send in targets(lowered.mirrored_graph, ops.send)] == [(rows_of(lowered),)] * (
        num_devices - 1
    )


def rows_of(program: Program):  # type: ignore[no-untyped-def]
    (rows,) = targets(program.mirrored_graph, ops.updated_rows)
    return rows


ALL = "all of table.weight is sent, 5.9 KiB, and not its rows, "


@pytest.mark.slow
@pytest.mark.parametrize(
    ("one", "rows", "writes_rows", "text"),
    [
        (SendRows(), 8, True, "SGD group 0 writes are sent to each other device, at most 0.6 KiB in place of 5.9 KiB"),
        (SendRows(), 10, True, f"{ALL}0.8 KiB at most: devices of one memory copy the whole faster than so many rows"),
        (SendRows(most_in_one_memory=1), 10, True, "at most 0.8 KiB in place of 5.9 KiB"),
        (SendRows(most_in_one_memory=1), 76, True, f"{ALL}5.9 KiB at most: they may be all rows"),
        (SendRows(), 8, False, f"{ALL}0.6 KiB at most: a step of SGD group 0 may write other rows than those of the"),
    ],
)
def test_a_remark_has_the_bytes_of_both(one: SendRows, rows: int, writes_rows: bool, text: str) -> None:
    program = run_passes(whole(2, rows, writes_rows=writes_rows), [one])
    (said_of_table,) = said(program)
    assert text in said_of_table
    assert bool(targets(program.mirrored_graph, ops.updated_rows)) is ("in place of" in text)
    verify(program)


def test_what_is_no_table_of_rows_is_broadcast_whole() -> None:
    program = run_passes(run_up_to("schedule-overlap", handmade(2)), [SendRows()])
    assert said(program) == ["no rows are sent: no device has a copy of a table of rows"]


@pytest.mark.slow
@pytest.mark.parametrize("again", [SendRows(), SendRows(most_in_one_memory=1)], ids=["the same", "another bound"])
def test_a_second_run_keeps_what_the_first_has_done(again: SendRows) -> None:
    once = run_passes(whole(3), [SendRows()])
    twice = run_passes(once, [again], [Verify()])
    assert twice.to_text() == once.to_text()
    assert said(twice) == said(once)


def test_a_second_run_with_a_larger_bound_sends_the_rows_of_tables_that_the_first_has_left_whole() -> None:
    program = run_passes(whole(2, 10), [SendRows(), SendRows(most_in_one_memory=1)], [Verify()])
    assert [targets(program.mirrored_graph, target) != [] for target in (ops.updated_rows, ops.store)] == [True, False]
    assert [ALL in text for text in said(program)] == [True, False]


@pytest.mark.slow
def test_rows_are_not_cut_into_chunks() -> None:
    """How many there are is known in a step alone."""
    program = run_passes(whole(3), [SendRows()])
    spread = SpreadCopies(min_elements=1, within_one_memory=True).run(program)
    assert len(targets(spread.mirrored_graph, ops.broadcast)) == 1
    assert not targets(spread.mirrored_graph, ops.send)
