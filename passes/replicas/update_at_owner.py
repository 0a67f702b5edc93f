"""Updates each bucket on its owner only."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from torch import fx

from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of, users_of_sum
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.ir.type_inference import set_type
from mirrorc.ir.variables import Placement
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import numbered


@dataclass(frozen=True)
class UpdateAtOwner:
    """Replaces N equal updates of a bucket by one update on its owner and N - 1 copies::

        ar = all_reduce(p_0, p_1, bucket=0, op=sum)           r = reduce(p_0, p_1, bucket=0, op=sum, root=1)
        commit(replica=0); commit(replica=1)                  commit(replica=0); commit(replica=1)
        w_0 = wait(ar, bucket=0, replica=0)                   wait(r, bucket=0, replica=0)               # gets nothing
        update(w_0, bucket=0, replica=0)                ->    w_1 = wait(r, bucket=0, replica=1)
        w_1 = wait(ar, bucket=0, replica=1)                   update(w_1, bucket=0, replica=1)
        update(w_1, bucket=0, replica=1)                      b = broadcast(updated(bucket=0, replica=1), bucket=0, root=1)
                                                              v_0 = wait(b, bucket=0, replica=0)
                                                              wait(b, bucket=0, replica=1)
                                                              store(v_0, bucket=0, replica=0)

    Only the owner has optimizer state. Each device first updates the buckets that it owns, then stores copies of the
    others.

    Needs: an owner for each bucket (place-variables).
    Guarantees: the bits are those of an update on each device; every copy is written once.
    Source: TensorFlow's CentralStorageStrategy and tensorpack.
    """

    name: str = field(default="update-at-owner", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    establishes: ClassVar = (Property.PLACED,)
    precedes: ClassVar = Property.PLACED.and_later

    def run(self, program: Program) -> Program:
        if program.workers.are_several:
            raise problem(
                PassError,
                f"MC4003: pass 'update-at-owner' works in one process, and this step has {program.workers.num_workers} workers",
                "a device cannot update parameters of another process",
                ("leave 'update-at-owner' out of the pipeline", "train in one process"),
            )
        if program.num_replicas == 1:
            alone = program.evolve(stage=Stage.SCHEDULED)
            return alone.with_remarks("nothing to leave to an owner: there is one device", is_kept=False)
        if program.leaves_gradients:
            return program.evolve(stage=Stage.SCHEDULED).with_remarks(
                "nothing is updated here, so owners have nothing to do", is_kept=False
            )
        without = [bucket.index for bucket in program.buckets if bucket.owner is None]
        if without:
            raise PassError(
                f"MC4003: pass 'update-at-owner' was given {numbered('bucket', without)} without an owner: run "
                "'place-variables' behind 'plan-buckets'"
            )
        graph = copied(program.mirrored_graph)
        buckets = tuple(replace(bucket, placement=Placement.OWNED) for bucket in program.buckets)
        owned = program.evolve(graph=graph, buckets=buckets, stage=Stage.SCHEDULED)
        if program.accumulates:
            return owned.with_remarks("nothing is updated here, so owners have nothing to do", is_kept=False)
        for all_reduce in list(calls_to(graph, ops.all_reduce)):
            _reduce_to_owner(owned, buckets[bucket_of(all_reduce)], all_reduce)
        for update in list(calls_to(graph, ops.update)):
            _give_copies(owned, buckets[bucket_of(update)], update)
        return owned.with_remarks(*_remarks(owned))


def _remarks(program: Program) -> list[str]:
    owners = sorted({bucket.owner for bucket in program.buckets if bucket.owner is not None})
    names = [str(program.devices[owner]) for owner in owners]
    who = (
        f"{names[0]} alone sums up, updates and has the optimizer's state"
        if len(names) == 1
        else "each bucket's owner alone sums it up, updates it and has its optimizer state"
    )
    return [f"{who}; all other devices write a copy of what was updated, once a step, behind all updates of their own"]


def _reduce_to_owner(program: Program, bucket: Bucket, all_reduce: fx.Node) -> None:
    graph = program.mirrored_graph
    reduce = insert(program, all_reduce, ops.reduce, all_reduce.args, {**all_reduce.kwargs, "root": bucket.owner})
    for wait in list(all_reduce.users):
        used_by = users_of_sum(wait)
        wait.args = (reduce,)
        set_type(program, wait)
        for node in reversed(used_by) if replica_of(wait) != bucket.owner else ():
            graph.erase_node(node)
    graph.erase_node(all_reduce)


def _give_copies(program: Program, bucket: Bucket, update: fx.Node) -> None:
    end = program.mirrored_graph.output_node()
    tag: dict[str, Any] = {"bucket": bucket.index}
    new = insert(program, update.next, ops.updated, (), tag | {"replica": bucket.owner})
    launch = insert(program, new.next, ops.broadcast, (new,), tag | {"root": bucket.owner})
    for replica in range(program.num_replicas):
        value = insert(program, end, ops.wait, (launch,), tag | {"replica": replica})
        if replica != bucket.owner:
            insert(program, end, ops.store, (value,), tag | {"replica": replica})
