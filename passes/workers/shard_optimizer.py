"""Shards the optimizer over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Elements
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, is_early, replica_of, users_of_sum
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.ir.variables import SHARE_ELEMENTS
from mirrorc.ir.workers import Workers
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted, numbered
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class ShardOptimizer:
    """Shards updates over W workers, with an all-gather of parameters::

        x_0     = exchange(wait_0, w_0, bucket=0, op=sum)            x_0     = scatter_sums(wait_0, w_0, bucket=0, op=sum)
        (the same for bucket 1)                                      (the same for bucket 1)
        commit(early=True, replica=0)                                commit(early=True, replica=0)
        total_0 = wait(x_0, bucket=0, replica=0)                     part_0  = wait(x_0, bucket=0, replica=0)
        update(total_0, bucket=0, replica=0)                  ->     update(part_0, bucket=0, replica=0)
        total_1 = wait(x_1, bucket=1, replica=0)                     part_1  = wait(x_1, bucket=1, replica=0)
        update(total_1, bucket=1, replica=0)                         update(part_1, bucket=1, replica=0)
                                                                     g_1     = gather_parameters(bucket=1)
                                                                     g_0     = gather_parameters(bucket=0)
                                                                     new_1   = wait(g_1, bucket=1, replica=0)
                                                                     new_0   = wait(g_0, bucket=0, replica=0)

    Each worker has optimizer state for its part only. Buckets are gathered in the order of the next forward. Without an
    early commit they are also updated in that order, so that updates hide the gathers.

    Factors still go to all workers::

        f_0     = gather_factors(p_0, bucket=0, op=sum)              f_0     = gather_factors(p_0, bucket=0, op=sum)
        total_0 = wait(f_0, bucket=0, replica=0)              ->     total_0 = wait(f_0, bucket=0, replica=0)   (its elements)

    If a worker is lost before the last gather, the other workers' parameters are partly updated.

    Needs: exchanged sums, not yet clipped or checked; buckets padded to W equal parts (plan-buckets).
    Guarantees: each element of a sharded bucket is updated by one worker; all workers gather in one order.
    Source: stage 1 of ZeRO (Rajbhandari et al., 2020).
    """

    name: str = field(default="shard-optimizer", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    establishes: ClassVar = (Property.SHARDED,)
    precedes: ClassVar = Property.SHARDED.and_later

    def run(self, program: Program) -> Program:
        if not program.workers.are_several:
            alone = program.evolve(stage=Stage.SCHEDULED)
            return alone.with_remarks("nothing to deal out: there is one worker, which updates all", is_kept=False)
        if Property.EXCHANGED not in program.properties and program.updates:
            raise PassError(
                "MC4003: pass 'shard-optimizer' deals out the sums over all workers, which nobody has made: "
                "'reduce-over-workers' must come before it"
            )
        buckets = tuple(_dealt(program.workers, bucket) for bucket in program.buckets)
        sharded = program.evolve(stage=Stage.SCHEDULED, buckets=buckets)
        if not program.updates:  # an accumulating one uses the memory of the step that updates
            return sharded
        graph = copied(program.mirrored_graph)
        sharded = sharded.evolve(graph=graph, properties=(*program.properties, Property.SHARDED))
        commits_early = any(map(is_early, calls_to(graph, ops.commit)))
        end = min(calls_to(graph, ops.write), default=graph.output_node())  # a step that fails leaves buffers alone
        launches = []
        for bucket in reversed(buckets):
            if bucket.part is not None:
                _deal_out_sum(sharded, bucket)
                for update in [node for node in calls_to(graph, ops.update) if bucket_of(node) == bucket.index]:
                    if not commits_early:
                        end.prepend(update)
                launches.append(insert(sharded, end, ops.gather_parameters, (), {"bucket": bucket.index}))
        for launch in launches:
            for replica in range(program.num_replicas):
                insert(sharded, end, ops.wait, (launch,), {"bucket": bucket_of(launch), "replica": replica})
        return sharded.with_remarks(*_remarks(sharded))


def _dealt(workers: Workers, bucket: Bucket) -> Bucket:
    if not bucket.rule.elementwise:
        return bucket
    length, rest = divmod(bucket.num_elements, workers.num_workers)
    if rest or length % SHARE_ELEMENTS:
        raise problem(
            PassError,
            f"MC4003: the {bucket.num_elements} elements of bucket {bucket.index} have no {workers.num_workers} equal parts",
            "'plan-buckets' pads buckets to whole cache lines for each worker, if the optimizer is sharded",
            "memory=mirrorc.Memory(shard_optimizer=True), which sets Workers.shards_optimizer",
        )
    return replace(bucket, part=Elements(workers.rank * length, (workers.rank + 1) * length))


def _deal_out_sum(program: Program, bucket: Bucket) -> None:
    graph = program.mirrored_graph
    (exchange,) = [node for node in calls_to(graph, *ops.EXCHANGES) if bucket_of(node) == bucket.index]
    launch = exchange
    if exchange.target is ops.exchange:
        words = {"bucket": bucket.index, "op": exchange.kwargs["op"]}
        launch = insert(program, exchange.next, ops.scatter_sums, exchange.args, words)
    for wait in sorted(exchange.users):
        replica = replica_of(wait)
        assert replica is not None, "waits belong to replicas"
        wait.args = (launch,)
        set_type(program, wait)
        used_by = users_of_sum(wait)
        is_empty = not bucket.is_updated_by(replica, program.num_replicas)
        for node in reversed(used_by) if is_empty else ():
            graph.erase_node(node)
        for node in () if is_empty else used_by:
            set_type(program, node)
    if launch is not exchange:
        graph.erase_node(exchange)


def _remarks(program: Program) -> Sequence[str]:
    dealt = [bucket for bucket in program.buckets if bucket.part is not None]
    whole = [bucket for bucket in program.buckets if bucket.part is None]
    workers = program.workers
    summed = [bucket for bucket in dealt if not bucket.is_sent_as_factors]
    sums, parameters = (
        size_text(round(sum(bucket.num_bytes for bucket in sent) * (workers.num_workers - 1) / workers.num_workers))
        for sent in (summed, dealt)
    )
    remarks = []
    if dealt:
        remarks.append(
            f"each of {workers.num_workers} workers updates its part of {counted(len(dealt), 'bucket')}, with the optimizer's "
            f"state of that part alone, and sends {f'{sums} of sums and ' * bool(summed)}{parameters} of new parameters in a "
            "step, however many devices it has; these are gathered in the order in which forward uses them, the reverse of the "
            "plan"
        )
    if whole:
        kinds = " and ".join(sorted({bucket.rule.why_by_itself for bucket in whole}))
        remarks.append(
            f"{numbered('bucket', [bucket.index for bucket in whole])}: updated whole by every worker, because {kinds}"
        )
    return remarks
