"""Adds up buckets over workers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from mirrorc.analysis.buckets.rescaling import gradient_takers, taken_by
from mirrorc.analysis.gradients.factored_gradients import stays_factored
from mirrorc.analysis.gradients.sent_factors import factor_bytes
from mirrorc.errors import PassError
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Pack, are_cut
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, pack_keywords, pack_of, replica_of, users_of_sum
from mirrorc.ir.program import Accumulation, Program, Property, Stage
from mirrorc.ir.routes import replica_at
from mirrorc.ir.type_inference import set_type
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import counted, listed, numbered
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class ReduceOverWorkers:
    """Inserts an `exchange` per bucket, which adds up the workers' sums::

        rs_0   = reduce_scatter(p_0, q_0, bucket=0, ...)        rs_0   = reduce_scatter(p_0, q_0, bucket=0, ...)
        bwd_1 ...                                               bwd_1 ...
        rs_1   = reduce_scatter(p_1, q_1, bucket=1, ...)        rs_1   = reduce_scatter(p_1, q_1, bucket=1, ...)
        commit(replica=0)                                       wait_0 = wait(rs_0, bucket=0, replica=0)
        wait_1 = wait(rs_1, bucket=1, replica=0)          ->    x_0    = exchange(wait_0, w_0, bucket=0, op=sum)
        update(wait_1, bucket=1, replica=0)                     (the same for bucket 1)
        wait_0 = wait(rs_0, bucket=0, replica=0)                commit(early=True, replica=0)
        update(wait_0, bucket=0, replica=0)                     total_0 = wait(x_0, bucket=0, replica=0)
                                                                update(total_0, bucket=0, replica=0)
                                                                total_1 = wait(x_1, bucket=1, replica=0)
                                                                update(total_1, bucket=1, replica=0)

    Without ``early_update``, or if updates need all sums, the waits for sums precede the commit::

                                                                total_0 = wait(x_0, bucket=0, replica=0)
                                                                total_1 = wait(x_1, bucket=1, replica=0)
                                                                commit(replica=0)
                                                                update(total_1, bucket=1, replica=0)
                                                                update(total_0, bucket=0, replica=0)

    A bucket sent as factors has a `gather_factors` of the packed buckets of all replicas::

        rs_0   = reduce_scatter(p_0, q_0, bucket=0, ...)        f_0    = gather_factors(p_0, q_0, bucket=0, op=sum)
        wait_0 = wait(rs_0, bucket=0, replica=0)          ->    total_0 = wait(f_0, bucket=0, replica=0)

    A device waits for its share at the launch of the next bucket, so that backward does not stop for a straggler.

    All workers exchange in the order of the bucket plan, so they cannot deadlock. Everything that can fail on one
    worker precedes its commit. If a connection is lost after an early commit, the runtime refuses the partly updated
    parameters.

    Needs: shared parameters, if workers have several devices.
    Guarantees: each bucket is exchanged once, in the order of the plan; updates take sums over all workers.

    Attributes:
        early_update: commit before the sums arrive, and update each bucket when its sum arrives.
        needs_all_sums: why updates need all sums, such as ``clip_grad_norm``; empty if they do not.
    """

    early_update: bool = True
    needs_all_sums: str = ""
    name: str = field(default="reduce-over-workers", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    sums_only: ClassVar = True
    establishes: ClassVar = (Property.EXCHANGED,)
    precedes: ClassVar = Property.EXCHANGED.and_later

    def run(self, program: Program) -> Program:
        if not program.workers.are_several:
            alone = program.evolve(stage=Stage.SCHEDULED)
            return alone.with_remarks("nothing to exchange: there is one worker", is_kept=False)
        for bucket in program.buckets:
            _check(program, bucket)
        graph = copied(program.mirrored_graph)
        program = program.evolve(
            stage=Stage.SCHEDULED, graph=graph, properties=(*program.properties, Property.EXCHANGED)
        )
        sums = _sums(program)
        commit, last = min(calls_to(graph, ops.commit)), None
        for bucket, pack in program.packs:
            if bucket.is_sent_as_factors:
                last = _gather(program, bucket, pack, sums[pack.number], commit, last)
                continue
            launch = _exchange(program, bucket, pack, sums, last)
            for value in sums[pack.number]:
                words = {**pack_keywords(bucket, pack), "replica": replica_of(value)}
                users = [user for user in value.users if user is not launch]
                total = insert(program, min([commit, *users]), ops.wait, (launch,), words)
                for user in users:
                    user.replace_input_with(value, total)
            last = launch
        may_be_early = self.early_update and not self.needs_all_sums and not program.leaves_gradients
        is_early = may_be_early and _update_early(graph)
        return program.with_remarks(*_remarks(program), self._commit_remark(program, is_early))

    def _commit_remark(self, program: Program, is_early: bool) -> str:
        order = "workers exchange in the order of the bucket plan, the same on all of them"
        if is_early:
            return (
                f"{order}; they commit when all have launched everything, and update each bucket when its sum is there, while "
                "others are in flight: if a connection is lost then, parameters are between two steps (early_update=False "
                "commits after all sums)"
            )
        if self.early_update:
            why = f"{self.needs_all_sums or 'what a pass has put before it'} needs them"
        else:
            why = "another worker may be gone (early_update=False)"
        if program.leaves_gradients:
            why = "a call that fails leaves the user's gradients as they were"
        return f"{order}; all sums are waited for before the commit, because {why}"


def _check(program: Program, bucket: Bucket) -> None:
    if program.num_replicas > 1 and not bucket.placement.value.updates_by_shares:
        raise problem(
            PassError,
            f"MC6103: the {program.num_replicas} devices of this worker each sum all of bucket {bucket.index}",
            "the worker would send it once for each device",
            ("give each worker one device", "on logical CPUs, keep 'share-parameters' in the pipeline"),
        )


def _sums(program: Program) -> list[list[fx.Node]]:
    graph = program.mirrored_graph
    if program.num_replicas > 1:
        sums: list[list[fx.Node]] = [[] for _ in program.packs]
        waits = filter(_is_sum, calls_to(graph, ops.wait))
        for node in sorted(waits, key=lambda node: replica_at(program, node)):  # a device that waits for all comes last
            sums[pack_of(node)].append(node)
        return sums
    ends = program.accumulation is Accumulation.ENDS
    packs = {pack_of(node): node for node in calls_to(graph, ops.add_accumulated if ends else ops.pack)}
    for taker in gradient_takers(graph):
        for index, value in taken_by(taker):
            taken = value.args if value.target is ops.unpack else (value,)
            if tuple(packs[pack.number] for pack in program.buckets[index].launch_units) != taken:
                raise problem(
                    PassError,
                    f"MC4003: {value.name} is computed of bucket {index} before it is exchanged",
                    "it is not said whether it is computed of each worker's gradients or of their sum",
                    "place the pass that makes it after 'reduce-over-workers', where it takes the sum",
                )
    return [[packs[pack.number]] for _, pack in program.packs]


def _is_sum(wait: fx.Node) -> bool:
    return all(launch.target in ops.REDUCTIONS for launch in wait.all_input_nodes)


def _exchange(
    program: Program, bucket: Bucket, pack: Pack, sums: Sequence[Sequence[fx.Node]], last: fx.Node | None
) -> fx.Node:
    values = sums[pack.number]
    place = values[0]
    if values[0].target is ops.wait:
        ready = [parts[0].all_input_nodes[0] for parts in sums[pack.number : pack.number + 2]]
        place = max(ready)
    place = max(place, last) if last is not None else place
    if values[0].target is ops.wait:
        for value in values:
            place.append(value)
            place = value
            set_type(program, value)
    return insert(program, place.next, ops.exchange, tuple(values), {**pack_keywords(bucket, pack), "op": "sum"})


def _gather(
    program: Program, bucket: Bucket, pack: Pack, sums: Sequence[fx.Node], commit: fx.Node, last: fx.Node | None
) -> fx.Node:
    first, graph = sums[0], program.mirrored_graph
    packed: Any = first.all_input_nodes[0].args if first.target is ops.wait else (first,)
    for packed_bucket in packed:
        if packed_bucket.target is not ops.pack or not all(map(stays_factored, packed_bucket.args)):
            raise problem(
                PassError,
                f"MC4003: {packed_bucket.name} of bucket {bucket.index} needs whole gradients, but workers send them as factors",
                "it cannot be computed from factors",
                "communication=mirrorc.Communication(exchange='dense')",
            )
    launched = first.all_input_nodes[0] if first.target is ops.wait else first
    place = max(launched, last) if last is not None else launched
    launch = insert(
        program, place.next, ops.gather_factors, tuple(packed), {**pack_keywords(bucket, pack), "op": "sum"}
    )
    for value in sums:
        users = [user for user in value.users if user is not launch]
        words = {**pack_keywords(bucket, pack), "replica": replica_of(value)}
        total = insert(program, min([commit, *users]), ops.wait, (launch,), words)
        for user in users:
            user.replace_input_with(value, total)
        if value.target is ops.wait:
            graph.erase_node(value)
    if launched.target in ops.REDUCTIONS:
        graph.erase_node(launched)
    return launch


def _update_early(graph: fx.Graph) -> bool:
    """Moves waits for workers' sums, and their users, after the commits. Returns False, without changes, if a commit
    needs a sum.
    """
    places: dict[fx.Node, int] = {}
    for number, launch in enumerate(calls_to(graph, *ops.EXCHANGES)):
        for wait in launch.users:
            places |= dict.fromkeys((wait, *users_of_sum(wait)), number)
    commits = list(calls_to(graph, ops.commit))
    if not places or not places.keys().isdisjoint(commits):
        return False
    end = min(calls_to(graph, ops.write), default=graph.output_node())  # a step that fails leaves buffers alone
    for node in sorted(places, key=lambda node: (places[node], node)):
        end.prepend(node)
    for commit in commits:
        commit.kwargs = {**commit.kwargs, "early": True}
    return True


def _remarks(program: Program) -> list[str]:
    dense = [bucket for bucket in program.buckets if not bucket.is_sent_as_factors]
    gathered = [bucket for bucket in program.buckets if bucket.is_sent_as_factors]
    whole = [bucket for bucket in program.buckets if program.updates and not bucket.rule.elementwise]
    kinds = [(dense, _sums_remark), (gathered, _factors_remark), (whole, _whole_remark)]
    return [say(program, buckets) for buckets, say in kinds if buckets]


def _whole_remark(program: Program, buckets: Sequence[Bucket]) -> str:
    names = numbered("bucket", [bucket.index for bucket in buckets])
    rules = listed(dict.fromkeys(bucket.rule.label for bucket in buckets))
    return (
        f"{names}: every worker runs {rules} by itself, from the same sums and the same stream of random numbers, and workers "
        "compare the parameters before each step"
    )


def _factors_remark(program: Program, buckets: Sequence[Bucket]) -> str:
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    sent = sum(factor_bytes(pack) for pack in _packs(program, buckets))
    made = "its part of the sum" if program.workers.shards_optimizer else "the sum"
    return (
        f"{counted(len(buckets), 'bucket')} ({size_text(num_bytes)}) sent as factors: this worker's are {size_text(sent)}, and "
        f"every worker makes {made} from those of all, in the order of ranks"
    )


def _packs(program: Program, buckets: Sequence[Bucket]) -> list[fx.Node]:
    wanted = {bucket.index for bucket in buckets}
    return [node for node in calls_to(program.mirrored_graph, ops.pack) if bucket_of(node) in wanted]


def _sums_remark(program: Program, buckets: Sequence[Bucket]) -> str:
    workers = program.workers
    num_bytes = sum(bucket.num_bytes for bucket in buckets)
    sent = round(2 * num_bytes * (workers.num_workers - 1) / workers.num_workers)
    number, per = sum(len(bucket.launch_units) for bucket in buckets), "pack" if are_cut(program.buckets) else "bucket"
    first = ", which its devices have added up first" if program.num_replicas > 1 else ""
    return (
        f"{counted(number, 'exchange')}, one per {per}{first}: {size_text(num_bytes)}, of which each of "
        f"{workers.num_workers} workers sends {size_text(sent)} in a step (in a ring, with as much received), however many "
        "devices it has"
    )
