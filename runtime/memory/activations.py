"""Liveness of values in a device's lowered graph, and their peak."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from torch import fx

from mirrorc.analysis.buckets.rescaling import has_exclusive_memory, is_known_by_rows, truths_of
from mirrorc.analysis.communication.compressed_sums import num_bytes_sent, writes_for_all
from mirrorc.analysis.gradients.factored_gradients import (
    factor_values,
    factored_slots,
    left_to_shares,
    pack_of_gradients,
    stays_factored,
)
from mirrorc.analysis.gradients.sent_factors import factor_bytes, factors_of_shares, packs_of
from mirrorc.analysis.gradients.sparse_update_rows import bytes_of_rows_sent, gives_indices_alone, is_of_rows, most_rows
from mirrorc.analysis.gradients.tiled_updates import part_elements_of
from mirrorc.analysis.graph.aliases import viewed
from mirrorc.ir import ops
from mirrorc.ir.devices import have_shared_memory
from mirrorc.ir.links import SumPlace, link_named
from mirrorc.ir.nodes import bucket_of, is_compute, is_region_call, name_of, pack_of, region_of
from mirrorc.ir.operation import Handlers
from mirrorc.ir.program import ArgumentKind, Program
from mirrorc.printing.printed_values import PrintedValues, type_of
from mirrorc.runtime.codegen.graph_function import last_uses
from mirrorc.runtime.memory.dry_run import Block, DryRun, Held
from mirrorc.runtime.memory.ledger import Ledger, Where
from mirrorc.runtime.state.gradients.sparse_rows import bytes_of_rows
from mirrorc.runtime.state.shares.deferred_tables import bytes_of_tables, bytes_to_measure_tables
from mirrorc.runtime.state.shares.pieces import (
    AllFactors,
    Piece,
    largest_part_of_share,
    pieces_of_share,
    temporary_bytes,
)
from mirrorc.torch_internals import num_bytes_now, size_now, storage_bytes_now

Count = Callable[[Sequence[Piece], AllFactors], int]
"""Counts bytes, from a share's pieces and all replicas' factors; see `temporary_bytes`."""


Memory = tuple[tuple[Block, ...], int]
"""The blocks of a node's value, and its temporary bytes."""

accounts: Handlers[Callable[[Walk, fx.Node], Memory]] = Handlers("account for the memory of")
"""Handlers by operation. Without a handler, the value is a new block."""


class Walk:
    """Simulates a device's generated function, with a `Block` in place of each value's memory.

    ``temporary_bytes``: bucket -> temporary bytes per element of its update.
    """

    def __init__(
        self, program: Program, replica: int, dry_runs: Mapping[str, DryRun], temporary_bytes: Mapping[int, float]
    ) -> None:
        self.program, self.replica = program, replica
        self.dry_runs, self.temporary_bytes = dry_runs, temporary_bytes
        self.graph = list(program.device_graphs.values())[replica].graph
        self.device = program.devices[replica].torch_device
        self.names = PrintedValues(program, self.graph)
        self.ledger = Ledger()
        self.saved = {argument.name for argument in program.arguments if argument.kind is ArgumentKind.SAVED}
        self.of_gradients = _nodes_of_gradients(self.graph)
        self.values: dict[fx.Node, tuple[Block, ...]] = {}

    def run(self) -> Ledger:
        dying = last_uses(self.graph)
        for node in self.graph.nodes:
            if node.op == "output":
                break
            if is_region_call(node):
                self._call_region(node, dying[node])
                continue
            if node.target is operator.getitem and is_region_call(node.args[0]):
                continue  # unpacked with the call
            self.ledger.holds_gradients = node in self.of_gradients
            blocks, temporary = self._call(node)
            self.values[node] = blocks
            self.ledger.hold(blocks)
            self._note_with((node, None), temporary, name_of(node))
            for source in dying[node]:
                self.ledger.drop(self.values[source])
            if not node.users and node.op != "placeholder":
                self.ledger.drop(blocks)
            self.ledger.holds_gradients = False
        self.ledger.end()
        return self.ledger

    def _note_with(self, where: Where, temporary: int, name: str) -> None:
        passing = [Block(temporary, f"temporaries of {name}", "")] if temporary else []
        self.ledger.hold(passing)
        self.ledger.note(where)
        self.ledger.drop(passing)

    def _call_region(self, node: fx.Node, dying: Sequence[fx.Node]) -> None:
        dry_run = self.dry_runs[region_of(node)]
        arguments: list[Any] = list(node.args)
        blocks: dict[Held, tuple[Block, ...]] = {i: self.values[argument] for i, argument in enumerate(arguments)}
        parts = sorted(node.users, key=lambda part: part.args[1])  # type: ignore[arg-type, return-value]
        names = {dry_run.results[i]: self.names.name(part) for i, part in reversed(list(enumerate(parts)))}
        gradients = {dry_run.results[i] for i, part in enumerate(parts) if self._is_gradient(part)}
        held = set(blocks)
        self.ledger.hold(block for place in held for block in blocks[place])  # the list of arguments
        self.ledger.drop(block for source in dying for block in self.values[source])
        for step in dry_run.steps:
            for allocation in step.taken:
                name = names.get(allocation, f"{allocation.name} of {node.target}")
                blocks[allocation] = (replace(allocation, name=name),)
                self.ledger.gradients.update(blocks[allocation] if allocation in gradients else ())
                self.ledger.hold(blocks[allocation])
                held.add(allocation)
            self._note_with((node, step), step.workspace, step.call)
            self.ledger.drop(block for place in step.dropped for block in blocks[place])
            held.difference_update(step.dropped)
        for part, result in zip(parts, dry_run.results, strict=True):
            self.values[part] = blocks[result] if result is not None else ()
            self.ledger.hold(self.values[part])
        self.ledger.note((node, None))
        self.ledger.drop(block for place in held for block in blocks[place])
        self.values[node] = ()

    def _is_gradient(self, result: fx.Node) -> bool:
        """A result of backward that only sums and updates use: a gradient, or a factor of one."""
        is_backward = self.program.regions[region_of(result.args[0])].phase == "backward"  # type: ignore[arg-type]
        return is_backward and bool(result.users) and all(user in self.of_gradients for user in result.users)

    def _call(self, node: fx.Node) -> Memory:
        if node.op == "placeholder" and node.target in self.saved:
            blocks = self._new(node)
            self.ledger.hold(blocks)  # by the caller, until backward ends
            return blocks, 0
        if node.op == "placeholder":
            # the caller's memory on the CPU; a copy of the caller's on a GPU
            return (self._new(node) if self.device.type != "cpu" else ()), 0
        if node.target is operator.getitem:
            source: Any = node.args[0]
            parts = self.values[source]
            return (parts[node.args[1]],) if len(parts) == len(source.meta["val"]) else parts, 0  # type: ignore[index]
        if is_compute(node):
            source = viewed(node)
            return (self._of([source]) if source is not None else self._new(node)), 0
        return accounts.of(node.target)(self, node) if node.target in accounts else (self._new(node), 0)

    def _new(self, node: fx.Node) -> tuple[Block, ...]:
        values = node.meta["val"] if isinstance(node.meta["val"], list | tuple) else [node.meta["val"]]
        name = self.names.name(node)
        tensors = (value for value in values if isinstance(value, torch.Tensor))
        return tuple(Block(storage_bytes_now(tensor), name, type_of(tensor)) for tensor in tensors)

    def _of(self, nodes: Iterable[Any]) -> tuple[Block, ...]:
        return tuple(block for node in nodes if isinstance(node, fx.Node) for block in self.values[node])

    @accounts(
        ops.read,
        ops.loss_scale,
        ops.slot,
        ops.reserved,
        ops.recv,
        ops.step_optimizer,
        ops.updated,
        ops.store,
        ops.store_rows,
        ops.accumulate,
        ops.add_to_grad,
        ops.add_unsent,
        ops.write,
        ops.check,
        ops.gather,
        ops.tell,
    )
    def _nothing_new(self, node: fx.Node) -> Memory:
        return (), 0  # persistent, or counted elsewhere

    @accounts(ops.keep)
    def _keep(self, node: fx.Node) -> Memory:
        self.ledger.hold(self._of(node.args))  # until backward ends
        return (), 0

    @accounts(ops.microbatch, ops.add_accumulated, ops.is_finite)
    def _operands(self, node: fx.Node) -> Memory:
        return self._of(node.args), 0  # a view; in the bucket; live until the commit, which may read it

    @accounts(ops.FACTORED)
    def _factored(self, node: fx.Node) -> Memory:
        return (self._of(node.args) if stays_factored(node) else self._new(node)), 0

    @accounts(ops.pack)
    def _pack(self, node: fx.Node) -> Memory:
        if left := left_to_shares(node):
            return self._of(left), 0  # the other gradients are in the bucket
        if self.program.buckets[bucket_of(node)].rule.takes_rows:
            return self._rows(node, [node])
        if not (factored := factored_slots(node)):
            return (), 0
        gradients: Any = [node.args[slot.place] for slot in factored]
        pieces = pieces_of_share(self.program.buckets[bucket_of(node)], factored, 0, 1)
        return (), temporary_bytes(pieces, [[factor_values(gradient) for gradient in gradients]])

    @accounts(ops.unpack)
    def _unpack(self, node: fx.Node) -> Memory:
        return (self._new(node) if any(map(_is_apart, node.all_input_nodes)) else self._of(node.args)), 0

    @accounts(ops.MEETINGS)
    def _meeting(self, node: fx.Node) -> Memory:
        """Holds a copy for other replicas, and the sum over workers, until the end of the step."""
        (source,) = node.all_input_nodes
        value = source.meta["val"]
        self.ledger.hold([Block(num_bytes_now(value), f"copy of {self.names.name(source)}", type_of(value))])
        if self.program.meets_workers and self.replica == self.program.first_present:
            whole = node.meta["val"] if node.target is ops.rows_of_replicas else value
            self.ledger.hold([Block(num_bytes_now(whole), f"sum of {self.names.name(source)}", type_of(whole))])
        return self._new(node), 0

    @accounts(ops.attend)
    def _attend(self, node: fx.Node) -> Memory:
        words: Any = node.kwargs
        num_bytes = math.prod(words["shape"]) * words["dtype"].itemsize
        self.ledger.hold([Block(num_bytes, node.name, f"{words['dtype']}{list(words['shape'])}")])
        return (), 0

    @accounts(ops.compress)
    def _compress(self, node: fx.Node) -> Memory:
        if self.replica:
            return (), 0
        num_bytes = sum(num_bytes_sent(self.program, launch) for launch in node.users)
        return (Block(num_bytes, self.names.name(node), "compressed sums"),), 0

    @accounts(ops.decompress)
    def _decompress(self, node: fx.Node) -> Memory:
        return (() if writes_for_all(self.program, node, self.replica) else self._new(node)), 0

    @accounts(ops.gather_largest)
    def _gather_largest(self, node: fx.Node) -> Memory:
        """Accounts for the top-k workspace, and for workers' messages until the end of the step, on the first device."""
        if self.replica:
            return (), 0
        _, pack = self.program.packs[pack_of(node)]
        sent, count = num_bytes_sent(self.program, node), cast("int", node.kwargs["count"])
        num_messages = 1 + self.program.workers.num_workers
        self.ledger.hold([Block(num_messages * sent, self.names.name(node), "largest elements")])
        magnitudes = pack.num_elements * node.meta["val"].value.dtype.itemsize
        return (), magnitudes + count * (magnitudes // pack.num_elements + torch.int64.itemsize)

    @accounts(ops.exchange_payload)
    def _exchange_payload(self, node: fx.Node) -> Memory:
        if self.replica:
            return (), 0
        bucket, pack = self.program.packs[pack_of(node)]
        num_bytes = pack.num_elements * bucket.dtype.itemsize + num_bytes_sent(self.program, node)
        self.ledger.hold([Block(num_bytes, self.names.name(node), "payloads")])
        return (), 0

    @accounts(ops.gather_factors)
    def _gather_factors(self, node: fx.Node) -> Memory:
        """Accounts for workers' messages until the end of the step, on the first device. Assumes equal lengths."""
        operands = self._of(node.args)
        if self.program.num_replicas > 1:
            self.ledger.hold(operands)  # until the last device's launch, at an unknown time
        if self.replica:
            return (), 0
        packs = packs_of(self.program, bucket_of(node))
        num_messages = 1 + self.program.workers.num_workers
        messages = Block(num_messages * sum(map(factor_bytes, packs)), self.names.name(node), "messages of factors")
        self.ledger.hold([messages])
        return (), 0

    @accounts(ops.scatter_sums)
    def _scatter_sums(self, node: fx.Node) -> Memory:
        self._offer(node)
        received = Block(self.program.buckets[bucket_of(node)].num_bytes, self.names.name(node), "sums of all workers")
        return (() if self.replica else (received,)), 0

    @accounts(ops.gather_parameters)
    def _gather_parameters(self, node: fx.Node) -> Memory:
        part = self.program.buckets[bucket_of(node)].part
        if self.replica or part is None:
            return (), 0
        size = (part.stop - part.start) * self.program.buckets[bucket_of(node)].dtype.itemsize
        return (Block(size, self.names.name(node), "parameters of this worker's part"),), 0

    @accounts(ops.REDUCTIONS, ops.exchange, ops.send)
    def _offer(self, node: fx.Node) -> Memory:
        operands = self._of(node.args)
        if link_named(node.kwargs["link"]).keeps_operands:
            self.ledger.leave(operands)
        else:
            self.ledger.hold(operands)  # others may need them until the end of the step
        return (), 0

    def _rows(self, node: fx.Node, packs: Sequence[fx.Node]) -> Memory:
        if not node.users:
            return (), 0
        bucket = self.program.buckets[bucket_of(node)]
        if gives_indices_alone(node):
            size = most_rows(self.program, bucket.index) * torch.int64.itemsize
            return (Block(size, self.names.name(node), f"indices of rows of {bucket.slots[0].variable}"),), 2 * size
        size, temporary = bytes_of_rows(bucket, sum(map(factor_bytes, packs)))
        return (Block(size, self.names.name(node), f"rows of {bucket.slots[0].variable}"),), temporary

    @accounts(ops.updated_rows)
    def _updated_rows(self, node: fx.Node) -> Memory:
        return self._new_rows(node), 0

    def _new_rows(self, node: fx.Node) -> tuple[Block, ...]:
        bucket = self.program.buckets[bucket_of(node)]
        size = bytes_of_rows_sent(self.program, bucket.index)
        return (Block(size, self.names.name(node), f"rows of {bucket.slots[0].variable}"),)

    @accounts(ops.wait)
    def _wait(self, node: fx.Node) -> Memory:
        launch: Any = node.args[0]
        if (
            launch.target in (ops.all_gather, ops.gather_factors)
            and self.program.buckets[bucket_of(node)].rule.takes_rows
        ):
            times = self.program.workers.num_workers if launch.target is ops.gather_factors else 1
            return self._rows(node, packs_of(self.program, bucket_of(node)) * times)
        if launch.target is ops.recv:
            source = self.program.devices[launch.kwargs["source"]].torch_device
            if source == self.device:
                return (), 0
            return (self._new_rows(node) if is_of_rows(launch) else self._new(node)), 0
        if launch.target is ops.gather_parameters:
            return (), 0
        if launch.target in ops.EXCHANGES_OF_PARTS:
            new = self._new(node) if node.users and not writes_for_all(self.program, node, self.replica) else ()
            return new, 0
        if launch.target is ops.all_gather:
            return (), self._bytes_to_gather(node)
        place = link_named(launch.kwargs["link"]).sum_place
        if place is SumPlace.ADDITIONAL:
            new = self._new(node)
            return new, max(block.num_bytes for block in new) if self._has_other_devices() else 0
        operand: Any = launch.args[0]
        if operand.target is ops.pack:
            if part_elements_of(node) is not None:
                return (), 0
            of_tables = self._temporary_bytes(operand, bytes_of_tables) if self._defers_tables(node) else 0
            rows = (Block(of_tables, self.names.name(node), "rows of tables"),) if of_tables else ()
            return rows, self._temporary_bytes(operand)
        has_sum = self.replica == 0 or place is SumPlace.EACH
        return (self._of([operand]) if has_sum else ()), 0

    def _bytes_to_gather(self, wait: fx.Node) -> int:
        packs = [pack for pack in packs_of(self.program, bucket_of(wait)) if pack.args]
        factors = [[factor_values(gradient) for gradient in left_to_shares(pack)] for pack in packs]
        pieces = pieces_of_share(self.program.buckets[bucket_of(wait)], factored_slots(packs[0]), 0, 1)
        copies = sum(map(factor_bytes, packs)) if self._has_other_devices() else 0
        return size_now(temporary_bytes(pieces, factors)) + copies

    def _defers_tables(self, wait: fx.Node) -> bool:
        return wait.target is ops.wait and is_known_by_rows(wait) and self.device.type == "cpu"

    def _bytes_to_measure(self, values: Iterable[fx.Node]) -> int:
        packs = [value.all_input_nodes[0].all_input_nodes[0] for value in values if self._defers_tables(value)]
        return sum(self._temporary_bytes(pack, bytes_to_measure_tables) for pack in packs)

    def _has_other_devices(self) -> bool:
        return not have_shared_memory(self.program.devices)

    def _temporary_bytes(self, pack: fx.Node, count: Count = temporary_bytes) -> int:
        index = bucket_of(pack)
        first = pack_of_gradients(self.program, index)  # this device may have no examples
        if not left_to_shares(first):
            return 0
        factors = factors_of_shares(self.program, index)
        bucket, num_replicas = self.program.buckets[index], self.program.num_replicas
        pieces = pieces_of_share(bucket, factored_slots(first), self.replica, num_replicas)
        return size_now(count(pieces, factors))

    @accounts(ops.clip_factor, ops.microbatch_seed)
    def _number(self, node: fx.Node) -> Memory:
        return self._new(node), 0

    @accounts(ops.norm)
    def _norm(self, node: fx.Node) -> Memory:
        return self._new(node), self._bytes_to_measure(node.all_input_nodes)

    @accounts(ops.RESCALING)
    def _rescale(self, node: fx.Node) -> Memory:
        return (self._of(node.args[:1]) if has_exclusive_memory(node.args[0]) else self._new(node)), 0

    @accounts(ops.commit)
    def _commit(self, node: fx.Node) -> Memory:
        return (), self._bytes_to_measure(flag.all_input_nodes[0] for flag in truths_of(node))

    @accounts(ops.update)
    def _update(self, node: fx.Node) -> Memory:
        bucket = self.program.buckets[bucket_of(node)]
        start, stop = bucket.updated(self.replica, self.program.num_replicas)
        self.ledger.leave(self._of(node.args[:1]))  # as the parameter's gradient
        number: Any = node.kwargs.get("part_elements")
        if number is None:
            return (), round(self.temporary_bytes[bucket.index] * (stop - start))
        pack = pack_of_gradients(self.program, bucket.index)
        pieces = pieces_of_share(bucket, factored_slots(pack), self.replica, self.program.num_replicas)
        factors = factors_of_shares(self.program, bucket.index)
        part = largest_part_of_share(pieces, (start, stop), number, factors)
        return (), self._temporary_bytes(pack) + round(self.temporary_bytes[bucket.index] * part)


def _nodes_of_gradients(graph: fx.Graph) -> set[fx.Node]:
    nodes: set[fx.Node] = set()
    for node in graph.nodes:
        begins = "bucket" in node.kwargs or node.target in ops.FACTORED
        if not is_region_call(node) and (begins or any(source in nodes for source in node.all_input_nodes)):
            nodes.add(node)
    return nodes


def _is_apart(pack: fx.Node) -> bool:
    if pack.target is not ops.wait:
        return pack.target not in (ops.pack, ops.add_accumulated, ops.decompress)
    (launch,) = pack.all_input_nodes
    if launch.target in ops.REDUCTIONS:
        return link_named(launch.kwargs["link"]).sum_place is SumPlace.ADDITIONAL
    return launch.target not in ops.EXCHANGES
