"""Sends only the updated rows of a table."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from mirrorc.analysis.gradients.sparse_update_rows import bytes_of_rows_sent, most_rows
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.devices import have_shared_memory
from mirrorc.ir.graph_edits import copied, insert
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of
from mirrorc.ir.program import Program, Property, Stage
from mirrorc.printing.printed_values import size_text


@dataclass(frozen=True)
class SendRows:
    """Sends and stores only the updated rows of a table, if its optimizer takes rows::

        new = step_optimizer(sum, buckets=(0,), replica=0)       new = step_optimizer(sum, buckets=(0,), replica=0)
        b = broadcast(new[0], bucket=0, root=0)                  rows = updated_rows(new[0], sum, bucket=0, replica=0)
        w   = wait(b, bucket=0, replica=0)                 ->    b = broadcast(rows, bucket=0, root=0)
        w_1 = wait(b, bucket=0, replica=1)                       w   = wait(b, bucket=0, replica=0)
        store(w_1, bucket=0, replica=1)                          w_1 = wait(b, bucket=0, replica=1)
                                                                 store_rows(w_1, sum_1, bucket=0, replica=1)

    Every device has gathered the rows' indices (``sum_1`` on replica 1). If the optimizer may update rows outside of
    the gradient, or a step may update all rows, the whole table is sent.

    Guarantees: all devices have the same parameters, bit for bit. The pass may run twice.

    Attributes:
        most_in_one_memory: the largest fraction of a table's rows to send within one memory, where whole copies are
            fast (benchmarks/README.md).
    """

    most_in_one_memory: float = 1 / 8
    name: str = field(default="send-rows", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    trains_only: ClassVar = True
    updates_only: ClassVar = True
    precedes: ClassVar = Property.LINKED.and_later

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        sent = program.evolve(stage=Stage.SCHEDULED, graph=graph)
        remarks, has_rows = [], False
        for broadcast in list(calls_to(graph, ops.broadcast)):
            bucket = program.buckets[bucket_of(broadcast)]
            if not bucket.rule.takes_rows:
                continue
            if broadcast.all_input_nodes[0].target is ops.updated_rows:  # by this pass, when it ran before
                has_rows = True
                continue
            why_not = self._why_whole(program, bucket)
            if not why_not:
                _send_rows(sent, broadcast)
            remarks.append(_remark(bucket, bytes_of_rows_sent(program, bucket.index), why_not))
        if not remarks and not has_rows:
            return sent.with_remarks("no rows are sent: no device has a copy of a table of rows", is_kept=False)
        return sent.with_remarks(*remarks)

    def _why_whole(self, program: Program, bucket: Bucket) -> str:
        rows, rows_of_table = most_rows(program, bucket.index), bucket.slots[0].shape[0]
        if not bucket.rule.writes_rows:
            return f"a step of {bucket.rule.label} may write other rows than those of the gradient"
        if rows >= rows_of_table:
            return "they may be all rows"
        if have_shared_memory(program.devices) and rows > self.most_in_one_memory * rows_of_table:
            return "devices of one memory copy the whole faster than so many rows"
        return ""


def _remark(bucket: Bucket, rows: int, why_not: str) -> str:
    table, whole, most = bucket.slots[0].variable, size_text(bucket.num_bytes), size_text(rows)
    if why_not:
        return f"bucket {bucket.index}: all of {table} is sent, {whole}, and not its rows, {most} at most: {why_not}"
    return (
        f"bucket {bucket.index}: of {table}, the rows that {bucket.rule.label} writes are sent to each other device, at most "
        f"{most} in place of {whole}"
    )


def _send_rows(program: Program, broadcast: fx.Node) -> None:
    index, root = bucket_of(broadcast), broadcast.kwargs["root"]
    (new,) = broadcast.all_input_nodes
    step, place = new.args
    assert isinstance(step, fx.Node), "an optimizer of rows steps by itself"
    operands = (new, step.args[place])  # type: ignore[index]
    rows = insert(program, broadcast, ops.updated_rows, operands, {"bucket": index, "replica": root})
    broadcast.args = (rows,)
    sums = _gathered(program, index)
    for wait in list(broadcast.users):
        for store in list(wait.users):
            words: dict[str, Any] = {"bucket": index, "replica": replica_of(store)}
            insert(program, store, ops.store_rows, (wait, sums[replica_of(store)]), words)
            store.graph.erase_node(store)


def _gathered(program: Program, index: int) -> dict[int | None, fx.Node]:
    waits = [node for node in calls_to(program.mirrored_graph, ops.wait) if bucket_of(node) == index]
    launches = (ops.all_gather, ops.gather_factors)
    return {replica_of(node): node for node in waits if node.all_input_nodes[0].target in launches}
