"""Programs whose replicas meet in forward and backward, and ways to break them."""

from collections.abc import Callable

import torch
from tiny_programs import SMALL_BUCKETS, captured_model, every_stage, targets
from torch import fx, nn

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import call
from mirrorc.ir.nodes import replica_of
from mirrorc.ir.program import Program
from mirrorc.ir.workers import World
from mirrorc.verifier.verifier import verify


class Meeting(nn.Module):
    """Centers its features over the whole batch, and tells each example how near to all others it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        h = h - mirrorc.all_reduce(h.mean(0), "mean") + mirrorc.replica_id()
        near = (h @ mirrorc.all_gather(h).t()).sum(1, keepdim=True)
        return self.last(torch.tanh(h * near))


def meeting_stages(rows: int = 8, num_devices: int = 2) -> dict[str, Program]:
    return every_stage(captured_model(Meeting(), num_devices, rows), **SMALL_BUCKETS)


def stages_of_worker(rows: int = 8) -> dict[str, Program]:
    workers = World(2, 2).worker(1)
    return every_stage(captured_model(Meeting(), 2, rows, workers=workers), over_workers=True, **SMALL_BUCKETS)


def meeting(
    change: Callable[[Program], object],
    pass_name: str = "lower-devices",
    stages: Callable[[], dict[str, Program]] = meeting_stages,
) -> tuple[str, Callable[[Program], Program]]:
    def mutate(_: Program) -> Program:
        program = stages()[pass_name]
        verify(program)
        change(program)
        return program

    return "pack-gradients", mutate


def met_by(program: Program, replica: int, *which: object) -> list[fx.Node]:
    """The meetings of a replica, in order, which these operations are, or any."""
    graphs = program.graphs()
    if len(graphs) == 1:
        return [node for node in targets(graphs[0], *(which or ops.MEETINGS)) if replica_of(node) == replica]
    return targets(graphs[replica], *(which or ops.MEETINGS))


def with_another_value(program: Program) -> None:
    node = met_by(program, 1, ops.sum_over_replicas)[0]
    (given,) = node.all_input_nodes
    with node.graph.inserting_before(node):
        twice = node.graph.call_function(torch.ops.aten.add.Tensor, (given, given))
    twice.meta["val"] = given.meta["val"]
    node.replace_input_with(given, twice)


def waits_before_a_meeting(program: Program) -> None:
    """One device waits for a bucket's sum before a meeting in backward, and the other one launches all sums behind that."""
    here, there = met_by(program, 0)[-1], met_by(program, 1)[-1]
    early, late = (next(w for w in targets(own.graph, ops.wait) if w.kwargs["bucket"] == 0) for own in (here, there))
    here.prepend(early)
    there.append(late)
    for launch in reversed(targets(there.graph, *ops.COLLECTIVES)):
        if launch < there:
            there.append(launch)


def behind_other_rows(program: Program) -> None:
    node = met_by(program, 1, ops.rows_of_replicas)[0]
    node.kwargs = {**node.kwargs, "before": 7}


def attend_twice(program: Program) -> None:
    first, second, *_ = targets(program.graphs()[0], ops.attend)
    second.kwargs = {**second.kwargs, "number": first.kwargs["number"]}


def stay_away(program: Program) -> None:
    """A worker without examples does not attend a meeting for which the others wait."""
    graph = program.graphs()[0]
    graph.erase_node(targets(graph, ops.attend)[0])


def attend_besides(program: Program) -> None:
    """Replicas meet, and one of them attends as well."""
    node = met_by(program, 0)[0]
    words = {"number": 9, "meeting": "sum_over_replicas", "shape": (5,), "dtype": torch.float32}
    with node.graph.inserting_before(node):
        call(node.graph, ops.attend, (), words).meta["val"] = None


def wait_for_workers_before_a_meeting(program: Program) -> None:
    """A device waits for what it exchanges with the other worker, all of which comes before its last meeting."""
    last = met_by(program, 0)[-1]
    launches = targets(last.graph, ops.exchange)
    behind = [node for node in last.graph.nodes if node > last]
    end = next(user for user in launches[0].users if user.target is ops.wait)
    for node in behind[: behind.index(end) + 1]:
        if node.target is not ops.commit and last not in _needed(node):
            last.prepend(node)


def _needed(node: fx.Node) -> set[fx.Node]:
    found = {node}
    todo = [node]
    while todo:
        for source in todo.pop().all_input_nodes:
            if source not in found:
                found.add(source)
                todo.append(source)
    return found
