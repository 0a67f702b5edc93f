"""Makes a step depend on finite losses and gradients."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from mirrorc.analysis.buckets.rescaling import before_rescaling, gradient_takers, is_checked, taken_by
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.type_rules import OTHERWISE
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted


@dataclass(frozen=True)
class CheckFinite:
    """Moves everything except writes before the commit, which then checks losses and gradients::

        commit(replica=0)                                     wait_0 = wait(rs_0, bucket=0, replica=0)
        commit(replica=1)                                     f_0 = is_finite(wait_0, replica=0)
        wait_0 = wait(rs_0, bucket=0, replica=0)        ->    (the same on replica 1)
        update(wait_0, bucket=0, replica=0)                   g_0 = is_finite(loss_0, replica=0)
        (the same on replica 1)                               commit(f_0, g_0, otherwise=raise, replica=0)
                                                              commit(f_1, g_1, otherwise=raise, replica=1)
                                                              update(wait_0, bucket=0, replica=0)
                                                              (the same on replica 1)

    The commit combines the checks of all replicas. In programs that accumulate, "raise" checks packed gradients, and
    "skip" does nothing.

    Guarantees: each replica's loss, and every gradient of an update, is checked. With loss scaling only gradients are
        checked, as in torch's GradScaler.

    Attributes:
        otherwise: at a non-finite value, "raise" an error, or "skip" the update and return the loss.
    """

    otherwise: str = "raise"
    name: str = field(default="check-finite", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    establishes: ClassVar = (Property.CHECKED,)
    precedes: ClassVar = Property.CHECKED.and_later

    def __post_init__(self) -> None:
        if self.otherwise not in OTHERWISE:
            raise ValueError(f"MC1002: otherwise is {self.otherwise!r}: say 'raise' or 'skip'")

    @property
    def updates_only(self) -> bool:
        return self.otherwise == "skip"

    def run(self, program: Program) -> Program:
        if any(map(is_checked, calls_to(program.mirrored_graph, ops.commit))):
            raise problem(
                PassError,
                "MC4003: pass 'check-finite' was given a program that is checked already",
                fix="leave one 'check-finite' out of the pipeline",
            )
        graph = copied(program.mirrored_graph)
        program = program.evolve(stage=Stage.SCHEDULED, graph=graph)
        commits = list(calls_to(graph, ops.commit))
        num_moved = _move_before(commits[0])
        checks: dict[int | None, list[fx.Node]] = {replica_of(commit): [] for commit in commits}
        sums = {before_rescaling(value) for taker in gradient_takers(graph) for _, value in taken_by(taker)}
        for value in sorted(sums):
            checks[replica_of(value)].append(_looked_at(program, value.next, value, replica_of(value)))
        is_scaled = Property.UNSCALED in program.properties
        losses: Any = graph.output_node().args[0]
        for commit in commits:
            replica: Any = replica_of(commit)
            loss = losses["losses"][replica]  # None on a replica without examples
            if loss is not None and not is_scaled:
                checks[replica].append(_looked_at(program, commits[0], loss, replica))
            commit.args = (*checks[replica], *commit.args)  # truth values come before numbers
            commit.kwargs = {**commit.kwargs, "otherwise": self.otherwise}
        checked = program.evolve(properties=(*program.properties, Property.CHECKED))
        return checked.with_remarks(_remark(program, self.otherwise, num_moved, is_scaled))


def _remark(program: Program, otherwise: str, num_moved: int, is_scaled: bool) -> str:
    buckets = counted(len(program.buckets), "reduced bucket")
    looked_at = (
        f"{buckets} {'is' if len(program.buckets) == 1 else 'are'}"
        if is_scaled
        else f"{buckets} and every device's loss are"
    )
    checks = f"{looked_at} looked at before the commit"
    moved = f", before which {counted(num_moved, 'wait')} moved" if num_moved else ""
    then = {"raise": "raises an error and changes nothing", "skip": "leaves the updates out and returns its loss"}
    return f"{checks}{moved}: a step in which any of them is not finite, on whichever device, {then[otherwise]}"


def _move_before(commit: fx.Node) -> int:
    """Moves all but writers, rescalings, and users of these or of commits before a commit. Counts moved waits."""
    late = set(calls_to(commit.graph, ops.commit))
    num_moved, nodes = 0, list(commit.graph.nodes)
    for node in nodes[nodes.index(commit) :]:
        if node.op == "output" or node in late:
            continue
        is_late = node.target in ops.WRITERS or node.target in ops.RESCALING or node.target is ops.updated
        if is_late or not late.isdisjoint(node.all_input_nodes):
            late.add(node)
        else:
            commit.prepend(node)
            num_moved += node.target is ops.wait
    return num_moved


def _looked_at(program: Program, before: fx.Node, value: fx.Node, replica: int | None) -> fx.Node:
    return insert(program, before, ops.is_finite, (value,), {"replica": replica})
