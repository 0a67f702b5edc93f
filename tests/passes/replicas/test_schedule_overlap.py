from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, run_before, run_up_to, targets

from mirrorc.ir import ops
from mirrorc.ir.program import Stage
from mirrorc.passes import ScheduleOverlap

MOVED = (ops.all_reduce, ops.broadcast, ops.wait)
MANY = [Weight(f"w{i}") for i in range(4)] + [Weight("m", rule=MUON)]


def test_nothing_moves_but_collectives_and_waits() -> None:
    before = run_before("schedule-overlap", handmade(3, MANY, buffer=True), **SMALL_BUCKETS)
    after = ScheduleOverlap().run(before)
    kept = [[n.name for n in p.mirrored_graph.nodes if n.target not in MOVED] for p in (before, after)]
    assert kept[0] == kept[1]
    for node in after.mirrored_graph.nodes:
        twin = next(n for n in before.mirrored_graph.nodes if n.name == node.name)
        assert [n.name for n in node.all_input_nodes] == [n.name for n in twin.all_input_nodes]
    after.mirrored_graph.lint()


def test_launches_keep_the_order_in_which_buckets_become_ready() -> None:
    program = run_up_to("schedule-overlap", handmade(2, MANY), **SMALL_BUCKETS)
    assert [n.kwargs["bucket"] for n in targets(program.mirrored_graph, ops.all_reduce)] == [0, 1, 2, 3, 4]
    assert program.stage is Stage.SCHEDULED


def test_every_replica_waits_in_one_order() -> None:
    graph = run_up_to("schedule-overlap", handmade(3, MANY), **SMALL_BUCKETS).mirrored_graph
    orders = [
        [(n.args[0].target, n.kwargs["bucket"]) for n in targets(graph, ops.wait) if n.kwargs["replica"] == replica]
        for replica in range(3)
    ]
    assert orders[0] == orders[1] == orders[2]
