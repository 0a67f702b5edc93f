"""Lets a step return while its last buckets are in flight; the next one updates them where it first reads their parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from mirrorc.analysis.communication.handed_over import readers_of
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, is_early, region_calls, replica_of, users_of_sum
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.messages.wording import numbered


@dataclass(frozen=True)
class OverlapNextStep:
    """Hands the loss over before the updates of the last buckets, and awaits these updates where the next step needs them::

        fwd_0                                                    await_update(bucket=1, replica=0)
        fwd_1                                                    fwd_0
        bwd_0                                                    fwd_1
        x_0     = exchange(pack_0, bucket=0, op=sum)             bwd_0
        bwd_1                                                    x_0     = exchange(pack_0, bucket=0, op=sum)
        x_1     = exchange(pack_1, bucket=1, op=sum)             bwd_1
        commit(early=True, replica=0)                            x_1     = exchange(pack_1, bucket=1, op=sum)
        total_0 = wait(x_0, bucket=0, replica=0)           ->    commit(early=True, replica=0)
        update(total_0, bucket=0, replica=0)                     total_0 = wait(x_0, bucket=0, replica=0)
        total_1 = wait(x_1, bucket=1, replica=0)                 update(total_0, bucket=0, replica=0)
        update(total_1, bucket=1, replica=0)                     hand_over(replica=0)
                                                                 total_1 = wait(x_1, bucket=1, replica=0)
                                                                 update(total_1, bucket=1, replica=0)

    What comes behind `hand_over` is not done when the step returns. The next call of the program does it, up to a bucket's
    update, where it finds `await_update` of the bucket; every other call, and `mirrorc.step.Step.synchronize`, does all of it
    first.

    Handed over are the buckets that are launched behind the last region: nothing of this step is left to hide them. The other
    ones are updated meanwhile. If `PlanBuckets` has put the buckets that come last into the order in which forward reads their
    parameters (``by_need``), and `OutlineRegions` has cut forward there (``cuts_forward``), each is awaited when it is needed;
    otherwise all are when forward begins. A bucket whose last pack alone is launched there is handed over with all its packs.

    Where workers update parts of buckets (see `ShardOptimizer`), all is updated when a step returns, and the gathers of new
    parameters are in flight, those that forward needs first at the head::

        g_1   = gather_parameters(bucket=1)                          g_1   = gather_parameters(bucket=1)
        g_0   = gather_parameters(bucket=0)                          g_0   = gather_parameters(bucket=0)
        new_1 = wait(g_1, bucket=1, replica=0)                ->     hand_over(replica=0)
        new_0 = wait(g_0, bucket=0, replica=0)                       new_1 = wait(g_1, bucket=1, replica=0)
                                                                     new_0 = wait(g_0, bucket=0, replica=0)

    Needs: early commits, as reduce-over-workers makes them, whose waits and updates come in the order of the plan. A bucket that
        is sent as factors, and one whose optimizer does not work element by element, is not handed over; but the gather of
        a bucket's parameters is, however its gradients were sent.
    Guarantees: nothing reads a parameter of a bucket before `await_update` of it, nor fills the bucket. Only waits and updates
        behind the commit are moved.
    """

    name: str = field(default="overlap-next-step", init=False)
    input_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    updates_only: ClassVar = True
    precedes: ClassVar = (Property.CLIPPED, Property.UNSCALED, Property.CHECKED, Property.LINKED)

    def run(self, program: Program) -> Program:
        if not program.workers.are_several:
            return program.with_remarks(
                "nothing to hand over: there is one worker, and no bucket is in flight when a step returns"
            )
        if Property.EXCHANGED not in program.properties:
            raise PassError(
                "pass 'overlap-next-step' hands over sums that are in flight to other workers, and nothing is: "
                "'reduce-over-workers' must come before it"
            )
        is_dealt = Property.SHARDED in program.properties
        if program.workers.shards_optimizer and not is_dealt and not program.accumulates:
            raise PassError(
                "pass 'overlap-next-step' hands over gathers of new parameters where workers update parts of buckets, and there "
                "is none: 'shard-optimizer' must come before it"
            )
        graph = copied(program.mirrored_graph)
        if not all(map(is_early, calls_to(graph, ops.commit))):
            return program.with_remarks("nothing to hand over: all sums are needed before the commit")
        buckets = _gathered(program) if is_dealt else [one for one in program.buckets if _can_be_late(graph, one)]
        if not buckets:
            return program.with_remarks(
                "nothing to hand over: every worker updates all buckets whole"
                if is_dealt
                else "nothing to hand over: no bucket that is sent whole, and updated element by element, is launched behind the "
                "last region"
            )
        overlapped = program.evolve(graph=graph)
        late = _moved_behind(graph, [bucket.index for bucket in buckets], is_dealt=is_dealt)
        for replica in range(program.num_replicas):
            insert(overlapped, late, ops.hand_over, (), {"replica": replica})
        return overlapped.with_remarks(*_remarks(buckets, _await(overlapped, buckets), is_dealt=is_dealt))


def _can_be_late(graph: fx.Graph, bucket: Bucket) -> bool:
    """Whether a bucket, or the last pack of it, is launched behind all regions, and its update needs nothing but its own sum."""
    launches = [node for node in calls_to(graph, *ops.EXCHANGES_OF_SUMS) if bucket_of(node) == bucket.index]
    regions = region_calls(graph)  # a worker without examples has none
    return bucket.rule.elementwise and bool(launches) and (not regions or launches[-1] > regions[-1])


def _gathered(program: Program) -> list[Bucket]:
    """The buckets whose new parameters are gathered, in the order in which that is launched."""
    return [program.buckets[bucket_of(node)] for node in calls_to(program.mirrored_graph, ops.gather_parameters)]


def _moved_behind(graph: fx.Graph, buckets: Sequence[int], *, is_dealt: bool) -> fx.Node:
    """Moves waits for the sums of buckets, and what takes these, or for their parameters, to the end of the graph, bucket by
    bucket, in the order in which the last pack of each is launched; gives the first of them."""
    given = (ops.gather_parameters,) if is_dealt else ops.EXCHANGES_OF_SUMS
    launches = [node for node in calls_to(graph, *given) if bucket_of(node) in buckets]
    last = {bucket_of(launch): launch for launch in launches}
    moved = {
        node: bucket_of(launch) for launch in launches for wait in launch.users for node in (wait, *users_of_sum(wait))
    }
    in_order = sorted(moved, key=lambda node: (last[moved[node]], node))
    for node in in_order:
        graph.output_node().prepend(node)
    return in_order[0]


def _await(program: Program, buckets: Sequence[Bucket]) -> list[int]:
    """Awaits each bucket's update before what first needs it; gives the buckets that are awaited before all regions."""
    graph = program.mirrored_graph
    at_once = []
    for bucket in buckets:
        for replica in range(program.num_replicas):
            first = readers_of(graph, bucket, replica)[0]
            words = {"bucket": bucket.index, "replica": replica}
            awaited = insert(program, first, ops.await_update, (), words)
            regions = [node for node in region_calls(graph) if replica_of(node) == replica]
            if regions and awaited < regions[0]:
                at_once.append(bucket.index)
    return list(dict.fromkeys(at_once))


def _remarks(buckets: Sequence[Bucket], at_once: Sequence[int], *, is_dealt: bool) -> list[str]:
    several = numbered("bucket", sorted(bucket.index for bucket in buckets))
    verb, their = ("is", "its") if len(buckets) == 1 else ("are", "their")
    where = f"; {numbered('bucket', sorted(at_once))} when forward begins" if at_once else ""
    return [
        f"a step returns while new parameters of {several} are in flight; the next one waits for them where it first reads them"
        f"{where}"
        if is_dealt
        else f"a step returns while {several} {verb} in flight; the next one waits for {their} sums, and updates, where it first "
        f"reads {their} parameters{where}",
        "what mirrorc does not see needs step.synchronize() first: direct reads and copies of parameters and of the optimizer's "
        "state",
    ]
