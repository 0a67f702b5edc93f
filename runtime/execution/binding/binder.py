"""Binds each node of a device's graph to a function over memory, regions and links."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.buckets.bucket_parts import BucketParts
from mirrorc.analysis.buckets.rescaling import before_rescaling, is_known_by_rows
from mirrorc.analysis.gradients.factored_gradients import is_left_to_shares, slots_left_as_factors, stays_factored
from mirrorc.analysis.gradients.sparse_update_rows import gives_indices_alone
from mirrorc.analysis.gradients.tiled_updates import part_elements_of
from mirrorc.custom_ops.random import seed_of_microbatch
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.gradient_forms import details_of, form_of
from mirrorc.ir.nodes import bucket_of, is_compute, pack_of
from mirrorc.ir.operation import Handlers
from mirrorc.ir.program import Program
from mirrorc.ir.routes import route_of
from mirrorc.runtime.codegen.graph_function import Constant, TwoPartCall
from mirrorc.runtime.codegen.regions import RegionFunction
from mirrorc.runtime.communication import Communicator
from mirrorc.runtime.communication.replica_values import ReplicaValues
from mirrorc.runtime.execution.binding.eager_backward import asking
from mirrorc.runtime.execution.binding.step_outputs import StepOutputs
from mirrorc.runtime.execution.commit.commit_point import CommitPoint
from mirrorc.runtime.execution.commit.finite_checks import CheckedCommit, Examined, ExaminedShare, examined
from mirrorc.runtime.execution.commit.part_visitors import SumVisitor, Visitor, visit_of_all, visiting, visitors_of
from mirrorc.runtime.execution.commit.update_progress import UpdateProgress, is_noted
from mirrorc.runtime.state.accumulation_state import ProgramState
from mirrorc.runtime.state.gradients.sparse_rows import add_up_rows, note_rows, rows_written, write_rows
from mirrorc.runtime.state.shares.deferred_tables import DeferredTables
from mirrorc.runtime.state.shares.pieces import (
    FactoredBucket,
    MadeShare,
    Piece,
    UnmadeShare,
    make_pieces,
    make_whole,
    pieces_of_share,
)
from mirrorc.runtime.workers.buckets.exchanges import Exchanges
from mirrorc.runtime.workers.buckets.replica_values import WorkerValues
from mirrorc.torch_internals import copy_each

binds: Handlers[Callable[[Binder, int, fx.Node], Any]] = Handlers("run")
"""By operation, handlers that return the function of a node on a replica, or a `Constant`.

The function gets the node's operands and keywords.
"""

binds_waits: Handlers[Callable[[Binder, int, fx.Node], Any]] = Handlers("wait for")
"""Handlers for waits, by launch operation, if these need a function of their own."""


class Binder:
    """The functions of a lowered program's nodes, for the current layout of memory.

    Attributes:
        visitors: (wait, node that reads its share) -> the visitor that runs the node part by part.
        deferred: wait -> its gradients of embedding tables that are deferred until the update.
        summed_pieces: the ``pieces`` whose memory other workers' sums may overwrite.
    """

    def __init__(
        self,
        program: Program,
        regions: Sequence[Mapping[str, RegionFunction]],
        state: ProgramState,
        constants: Mapping[str, torch.Tensor],
        communicators: Mapping[str, Communicator],
        commit: CommitPoint,
        outputs: StepOutputs,
        replica_values: ReplicaValues | WorkerValues,
        progress: UpdateProgress | None = None,
        unused: Callable[[int], Set[int]] = lambda _bucket: frozenset(),
    ) -> None:
        self.program, self.regions, self.state, self.unused = program, regions, state, unused
        self._constants, self.communicators, self._commit = constants, communicators, commit
        self._outputs, self._progress, self._replica_values = outputs, progress, replica_values
        self.pieces: list[Piece] = []
        self.summed_pieces: list[Piece] = []
        self.visitors: dict[tuple[Any, fx.Node], Visitor] = {}
        self.deferred: dict[Any, DeferredTables] = {}
        self.all_deferred: list[DeferredTables] = []
        self._shares: dict[tuple[int, int], MadeShare] = {}
        self.parts = BucketParts(program)

    def few_made(self, replica: int, gradient: Any) -> MadeShare:
        """The finished share of a gradient; empty if the gradient's reduction has other sources than packs."""
        value = before_rescaling(gradient)
        sources = [value]
        if value.target is ops.wait and value.all_input_nodes[0].target in (ops.reduce_scatter, ops.gather_factors):
            sources = value.all_input_nodes[0].all_input_nodes
        if any(source.target is not ops.pack for source in sources):
            return MadeShare()
        return self._shares.get((bucket_of(value), replica), MadeShare())

    def forget_deferred(self) -> None:
        for deferred in self.all_deferred:
            deferred.forget()

    def exchanges(self, launch: fx.Node) -> Exchanges:
        exchanges = self.communicators[str(launch.kwargs["link"])]
        assert isinstance(exchanges, Exchanges), "a link between workers"
        return exchanges

    def bind(self, replica: int, node: fx.Node) -> Any:
        if node.op == "call_module":
            return asking(self.program, node, self.regions[replica][str(node.target)])
        if node.target is operator.getitem or is_compute(node):
            return node.target
        bound = binds.of(node.target)(self, replica, node)
        if self._progress is not None and is_noted(node):
            return self._progress.noting(node, bound)
        return bound

    @binds(ops.read)
    def _bind_read(self, replica: int, node: fx.Node) -> Constant | Callable[..., torch.Tensor]:
        name = str(node.kwargs["variable"])
        if name in self._constants:
            constant = self._constants[name]
            device = self.program.devices[replica].torch_device
            # not between devices of two types: a region on a GPU may use a CPU scalar
            local_constant = constant.to(device) if constant.device.type == device.type else constant
            return Constant(local_constant) if local_constant is constant else _following(constant, local_constant)
        return Constant(self.state.store.read_by(self.program.variables[name])[replica])

    @binds(ops.check)
    def _bind_check(self, replica: int, node: fx.Node) -> Callable[..., None]:
        text = str(node.kwargs["text"])

        def check(condition: torch.Tensor, **_: Any) -> None:
            if not condition.item():  # waits for a GPU: an assert of its own would end the process's use of it
                raise AssertionError(text)

        return check

    @binds(ops.gather)
    def _bind_gather(self, replica: int, node: fx.Node) -> Callable[..., object]:
        return self._outputs.part(replica, node)

    @binds(ops.keep)
    def _bind_keep(self, replica: int, node: fx.Node) -> Callable[..., None]:
        return self._outputs.keeping(replica)

    @binds(ops.ATTENDED)
    def _bind_meeting(self, replica: int, node: fx.Node) -> TwoPartCall:
        values = self._replica_values
        return TwoPartCall(
            functools.partial(values.arrive, node, replica), functools.partial(values.leave, node, replica)
        )

    @binds(ops.microbatch)
    def _bind_microbatch(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        sizes: Any = node.kwargs["sizes"]
        index: Any = node.kwargs["index"]
        start, size = sum(sizes[:index]), sizes[index]
        return lambda argument, **_: argument.narrow(0, start, size)

    @binds(ops.microbatch_seed)
    def _bind_microbatch_seed(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        return lambda seed, index, **_: seed_of_microbatch(seed, index)

    @binds(ops.slot)
    def _bind_slot(self, replica: int, node: fx.Node) -> Constant:
        flat = self.state.buckets[bucket_of(node)]
        names = [slot.variable for slot in self.program.buckets[bucket_of(node)].slots]
        return Constant(flat.gradient_slots[replica][names.index(str(node.kwargs["variable"]))])

    @binds(ops.pack)
    def _bind_pack(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor | FactoredBucket]:
        flat = self.state.buckets[bucket_of(node)]
        if flat.bucket.rule.takes_rows:
            return self._pack_of_rows(replica, node)
        slots, whole = flat.gradient_slots[replica], flat.gradients[replica]
        if self.program.buckets[bucket_of(node)].is_cut:
            return pack_of_cut_bucket(node, self.program.buckets[bucket_of(node)], slots, whole)
        factored = slots_left_as_factors(self.program, bucket_of(node))
        left = [slot.place for slot in factored]
        plain = [i for i in range(len(slots)) if i not in left]
        is_left = is_left_to_shares(node)
        is_gathered = flat.bucket.gathers_factors
        share = (replica, self.program.num_replicas) if is_left and not is_gathered else (0, 1)
        pieces = pieces_of_share(flat.bucket, factored, *share) if factored else []
        self.pieces += pieces
        if is_left or self.program.num_replicas == 1:
            self._shares[(bucket_of(node), replica)] = MadeShare(pieces, flat.bucket.made(*share)[0])
        if any(user.target not in (ops.gather_factors, ops.all_gather) for user in node.users):
            self.summed_pieces += pieces
        if not node.args:
            of_shares = FactoredBucket(whole, (), pieces) if factored and is_left else None
            return _zeros(whole, [slots[i] for i in plain] if of_shares is not None else [whole], of_shares)

        def pack(*gradients: Any, **_: Any) -> torch.Tensor | FactoredBucket:
            # backward has written others into their slots
            outside = [i for i in plain if gradients[i] is not slots[i]]
            if outside:
                copy_each([slots[i] for i in outside], [gradients[i] for i in outside])
            if not factored:
                return whole
            bucket = FactoredBucket(whole, [gradients[i] for i in left], pieces)
            if is_left:
                return bucket
            make_whole(bucket, is_summed=self.program.num_replicas > 1)
            return whole

        return pack

    def _pack_of_rows(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor | FactoredBucket]:
        """The function sums sparse rows if a user of the pack needs the sum."""
        flat, is_left = self.state.buckets[bucket_of(node)], is_left_to_shares(node)
        whole, details = flat.gradients[replica], slots_left_as_factors(self.program, bucket_of(node))[0].details

        def pack(*gradients: Any, **_: Any) -> torch.Tensor | FactoredBucket:
            bucket = FactoredBucket(whole, gradients, ())
            return bucket if is_left else add_up_rows(flat, [bucket], replica, details)

        return pack

    def _wait_for_rows(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor | None]:
        """The function sums sparse rows, or collects row indices, only if a node uses the result."""
        collective: Any = node.args[0]
        communicator, bucket = self.communicators[str(collective.kwargs["link"])], bucket_of(node)
        flat, pack = self.state.buckets[bucket], pack_of(node)
        is_used = bool(node.users)
        find = note_rows if gives_indices_alone(node) else add_up_rows
        details = slots_left_as_factors(self.program, bucket)[0].details

        def wait(pending: Any, **_: Any) -> torch.Tensor | None:
            buckets = communicator.wait_factors(pack, replica, pending)
            return find(flat, buckets, replica, details) if is_used else None

        return wait

    def _wait_for_factors(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        collective: Any = node.args[0]
        communicator, bucket = self.communicators[str(collective.kwargs["link"])], bucket_of(node)
        whole, pack = self.state.buckets[bucket].gradients[replica], pack_of(node)

        def wait(pending: Any, **_: Any) -> torch.Tensor:
            gathered = communicator.wait_factors(pack, replica, pending)
            make_pieces(gathered[replica].pieces, [FactoredBucket(whole, bucket.factors, ()) for bucket in gathered])
            return whole

        return wait

    @binds(ops.FACTORED)
    def _bind_factored(self, replica: int, node: fx.Node) -> Callable[..., Any]:
        form, details, shape = form_of(node), details_of(node), node.meta["val"].shape
        if stays_factored(node):
            return lambda *factors, **_: form.parts(factors)
        return lambda *factors, **_: form.make_sum(operator.call, factors, shape, **details)

    @binds(ops.REDUCTIONS)
    def _bind_reduction(self, replica: int, node: fx.Node) -> Callable[..., Any]:
        communicator, pack = self.communicators[str(node.kwargs["link"])], pack_of(node)
        root: Any = node.kwargs.get("root")
        launch: Any = {
            ops.all_reduce: communicator.launch_all_reduce,
            ops.reduce_scatter: communicator.launch_reduce_scatter,
            ops.reduce: functools.partial(communicator.launch_reduce, root=root),
            ops.all_gather: communicator.launch_factors,
        }[node.target]  # type: ignore[index]

        return lambda local, **_: launch(pack, replica, local)

    @binds(ops.gather_factors)
    def _bind_gather_factors(self, replica: int, node: fx.Node) -> Callable[..., None]:
        exchanges, pack = self.exchanges(node), pack_of(node)
        return lambda local, **_: exchanges.launch_gather(pack, replica, local)

    @binds(ops.exchange)
    def _bind_exchange(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        exchanges, (bucket, pack) = self.exchanges(node), self.program.packs[pack_of(node)]
        gradients = self.state.buckets[bucket.index].gradients[0]  # where the devices have added up their shares
        whole: torch.Tensor | None = gradients[pack.start : pack.stop] if bucket.is_cut else gradients
        if any(value.target is ops.compress for value in node.all_input_nodes):
            whole = None  # they have compressed them elsewhere

        def exchange(local_sum: torch.Tensor, **_: Any) -> torch.Tensor:
            exchanges.launch_exchange(pack.number, whole)
            return local_sum

        return exchange

    @binds(ops.scatter_sums)
    def _bind_scatter_sums(self, replica: int, node: fx.Node) -> Callable[..., None]:
        exchanges, bucket = self.exchanges(node), bucket_of(node)
        whole = self.state.buckets[bucket].gradients[0]  # where the devices have added up their shares
        return lambda local_sum, **_: exchanges.launch_scatter(bucket, whole)

    @binds(ops.gather_parameters)
    def _bind_gather_parameters(self, replica: int, node: fx.Node) -> Callable[..., None]:
        exchanges, bucket = self.exchanges(node), bucket_of(node)
        whole = self.state.buckets[bucket].parameters[0]
        return lambda **_: exchanges.launch_parameters(bucket, whole)

    @binds(ops.send)
    def _bind_send(self, replica: int, node: fx.Node) -> Callable[..., None]:
        communicator, route = self.communicators[str(node.kwargs["link"])], route_of(self.program, node)
        return lambda value, **_: communicator.send(route, value)

    @binds(ops.recv)
    def _bind_recv(self, replica: int, node: fx.Node) -> Callable[..., None]:
        communicator, route = self.communicators[str(node.kwargs["link"])], route_of(self.program, node)
        return lambda **_: communicator.launch_receive(route)

    @binds(ops.wait)
    def _bind_wait(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor | UnmadeShare | None]:
        collective = node.args[0]
        assert isinstance(collective, fx.Node)
        communicator, pack = self.communicators[str(collective.kwargs["link"])], pack_of(node)
        if collective.target in binds_waits:
            return binds_waits.of(collective.target)(self, replica, node)
        if collective.target is ops.recv:
            route = route_of(self.program, collective)
            return lambda pending, **_: communicator.receive(route)
        if collective.target in (ops.scatter_sums, ops.gather_parameters, ops.exchange):
            return self._wait_for_workers(replica, node, collective)
        if self.program.buckets[bucket_of(node)].rule.takes_rows and collective.target in (
            ops.all_gather,
            ops.gather_factors,
        ):
            return self._wait_for_rows(replica, node)
        if collective.target is ops.all_gather:
            return self._wait_for_factors(replica, node)
        if part_elements_of(node) is not None:
            return lambda pending, **_: communicator.wait_unmade(pack, replica, pending)
        is_cpu = not self.program.devices[replica].is_asynchronous  # a GPU would start a kernel for each part
        visitors = visitors_of(node) if is_cpu and collective.target in (ops.reduce_scatter, ops.gather_factors) else {}
        if visitors:
            self.visitors |= {(node, user): visitor for user, visitor in visitors.items()}
            deferred = None
            if is_known_by_rows(node):
                deferred = self.deferred[node] = DeferredTables(visit_of_all(list(visitors.values())))
                self.all_deferred.append(deferred)
            return visiting(communicator, pack, replica, list(visitors.values()), deferred)
        if collective.target is ops.gather_factors:
            exchanges = self.exchanges(collective)
            return lambda pending, **_: exchanges.wait_gather(pack, replica)
        root: Any = collective.kwargs.get("root")
        waits: dict[Any, Callable[..., torch.Tensor]] = {
            ops.all_reduce: communicator.wait_all_reduce,
            ops.reduce_scatter: communicator.wait_reduce_scatter,
            ops.reduce: functools.partial(communicator.wait_reduce, root=root),
        }
        wait_for = waits[collective.target]
        return lambda pending, **_: wait_for(pack, replica, pending=pending)

    def _wait_for_workers(self, replica: int, node: fx.Node, launch: fx.Node) -> Callable[..., torch.Tensor | None]:
        exchanges, pack = self.exchanges(launch), pack_of(node)
        if launch.target is ops.exchange:
            return lambda pending, **_: exchanges.wait_exchange(pack, replica, pending)
        if launch.target is ops.gather_parameters:
            return lambda pending, **_: exchanges.wait_parameters(pack, replica)
        flat = self.state.buckets[bucket_of(node)]
        elements = flat.bucket.updated(replica, self.program.num_replicas)
        return lambda pending, **_: exchanges.wait_scatter(pack, replica, flat.gradients[0], elements)

    @binds(ops.unpack)
    def _bind_unpack(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        return lambda *packs, **_: side_by_side(packs)

    @binds(ops.is_finite)
    def _bind_is_finite(self, replica: int, node: fx.Node) -> Callable[..., Examined | ExaminedShare]:
        visitor = self.visitors.get((node.args[0], node))
        if isinstance(visitor, SumVisitor):
            deferred = self.deferred.get(node.args[0])
            return lambda value, **_: ExaminedShare(value, visitor, deferred)
        return lambda value, **_: examined(value)

    @binds(ops.commit)
    def _bind_commit(self, replica: int, node: fx.Node) -> TwoPartCall:
        commit = self._commit
        if isinstance(commit, CheckedCommit):
            arrive = functools.partial(commit.arrive_with, replica)
            return TwoPartCall(arrive, functools.partial(commit.commit_if_finite, replica), may_end=True)
        return TwoPartCall(functools.partial(commit.arrive, replica), functools.partial(commit.leave, replica))

    @binds(ops.step_optimizer)
    def _bind_step_optimizer(self, replica: int, node: fx.Node) -> Callable[..., tuple[torch.Tensor, ...]]:
        def step_optimizer(*gradients: torch.Tensor, buckets: Sequence[int], **_: Any) -> tuple[torch.Tensor, ...]:
            left_out = [self.unused(index) for index in buckets]
            self.state.optimizers.step_by_itself(buckets, *gradients, unused=left_out)
            return tuple(self.state.buckets[index].parameters[replica] for index in buckets)

        return step_optimizer

    @binds(ops.updated)
    def _bind_updated(self, replica: int, node: fx.Node) -> Constant:
        return Constant(self.state.buckets[bucket_of(node)].parameters[replica])

    @binds(ops.store)
    def _bind_store(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        parameters = self.state.buckets[bucket_of(node)].parameters[replica]
        return lambda value, **_: parameters.copy_(value)

    @binds(ops.updated_rows)
    def _bind_updated_rows(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        flat = self.state.buckets[bucket_of(node)]
        return lambda parameters, gradient, **_: rows_written(flat, replica)

    @binds(ops.store_rows)
    def _bind_store_rows(self, replica: int, node: fx.Node) -> Callable[..., None]:
        flat = self.state.buckets[bucket_of(node)]
        return lambda rows, gradient, **_: write_rows(flat, replica, rows)

    @binds(ops.write)
    def _bind_write(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        variable = self.state.store.values(str(node.kwargs["variable"]))[replica]
        return lambda value, **_: variable.copy_(value)

    @binds(ops.reserved)
    def _bind_reserved(self, replica: int, node: fx.Node) -> Callable[..., torch.Tensor]:
        details: Any = (node.kwargs[key] for key in ("number", "shape", "dtype"))
        block = functools.partial(self.state.reserved.block, replica, *details)  # other programs may make it larger
        return lambda **_: block()


def _following(constant: torch.Tensor, copy: torch.Tensor) -> Callable[..., torch.Tensor]:
    version = constant._version

    def read(**_: Any) -> torch.Tensor:
        nonlocal version
        if constant._version != version:
            version = constant._version
            copy.copy_(constant)
        return copy

    return read


def _zeros(
    whole: torch.Tensor, plain: Sequence[torch.Tensor], of_shares: FactoredBucket | None
) -> Callable[..., torch.Tensor | FactoredBucket]:

    def pack(**_: Any) -> torch.Tensor | FactoredBucket:
        for part in plain:
            part.zero_()
        return whole if of_shares is None else of_shares

    return pack


def pack_of_cut_bucket(
    node: fx.Node, bucket: Bucket, slots: Sequence[torch.Tensor], whole: torch.Tensor
) -> Callable[..., torch.Tensor]:
    """The first pack with elements of a gradient copies the whole gradient into its slot, unless a region has written
    it there. Later packs must not copy it again, because elements of earlier packs may be sums by then.
    """
    pack = next(candidate for candidate in bucket.packs if candidate.number == pack_of(node))
    elements = whole[pack.start : pack.stop]
    if not node.args:
        return lambda **_: elements.zero_()
    place = {slot.variable: i for i, slot in enumerate(bucket.slots)}
    pack_slots = [slots[place[slot.variable]] for slot in bucket.slots_in(pack)]
    to_copy = [i for i, gradient in enumerate(node.args) if not _is_copied_before(gradient, node)]

    def run(*gradients: Any, **_: Any) -> torch.Tensor:
        outside = [i for i in to_copy if gradients[i] is not pack_slots[i]]
        if outside:
            copy_each([pack_slots[i] for i in outside], [gradients[i] for i in outside])
        return elements

    return run


def _is_copied_before(gradient: Any, pack: fx.Node) -> bool:
    return any(other.target is ops.pack and other < pack for other in gradient.users)


def side_by_side(packs: Sequence[torch.Tensor]) -> torch.Tensor:
    """A view if consecutive packs are adjacent in memory, else a copy."""
    first = packs[0]
    end = first.data_ptr()
    for pack in packs:
        if pack.data_ptr() != end or pack.untyped_storage().data_ptr() != first.untyped_storage().data_ptr():
            return torch.cat(list(packs))
        end += pack.numel() * pack.itemsize
    return first.as_strided((sum(pack.numel() for pack in packs),), (1,))
