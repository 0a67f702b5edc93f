"""Messages and additions that replace one all_reduce or reduce_scatter."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.graph_edits import insert
from mirrorc.ir.links import carrier_of
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Program

aten = torch.ops.aten
_WORDS = ("bucket", "pack")  # keywords that name the summed values


@dataclass(frozen=True)
class Held:
    """Consecutive elements of a bucket or pack on a replica: its gradients, or a sum.

    Attributes:
        node: None if there are no elements; a receive until its value is used.
        start, stop: offsets in the bucket or pack.
        is_packed: it depends on no message, so it is ready when the bucket is packed.
    """

    node: fx.Node | None
    replica: int
    start: int
    stop: int
    is_packed: bool = False


class Traffic:
    """Inserts messages and computations.

    Nodes that need only packed buckets are inserted at the launch. All others are inserted at the replica's wait, so
    that more of backward runs before them. A received value is awaited at its first use: a device sends everything it
    can before it waits. Empty values are not sent.

    Attributes:
        number: the pack's number if the bucket is cut, else the bucket's.
        by_shares: True if each replica needs only its share of the sum.
    """

    def __init__(self, program: Program, launch: fx.Node, first_round: int = 0) -> None:
        self._bucket = program.buckets[bucket_of(launch)]
        self._words = {name: launch.kwargs[name] for name in _WORDS if launch.kwargs.get(name) is not None}
        self.number: int = [*self._words.values()][-1]  # type: ignore[assignment]
        self.num_elements: int = launch.all_input_nodes[0].meta["val"].numel()
        self.num_replicas = program.num_replicas
        self.by_shares = launch.target is ops.reduce_scatter
        self._program, self._launch = program, launch
        self._packed = launch.all_input_nodes
        self._waits: dict[Any, fx.Node] = {replica_of(wait): wait for wait in launch.users}
        self._received: dict[fx.Node, fx.Node] = {}  # the wait for each receipt that is in use
        self._link = carrier_of(str(launch.kwargs["link"]), ops.send)
        self._round = first_round

    def next_round(self) -> None:
        """Begins a round. Rounds distinguish messages of the same chunk between the same replicas."""
        self._round += 1

    def chunks(self, count: int) -> list[tuple[int, int]]:
        """Bounds of ``count`` nearly equal chunks. With ``by_shares`` and one chunk per replica, chunks are the shares."""
        length = self.num_elements
        if self.by_shares and count == self.num_replicas:
            return [self.share(replica) for replica in range(count)]
        return [(length * i // count, length * (i + 1) // count) for i in range(count)]

    def share(self, replica: int) -> tuple[int, int]:
        return self._bucket.share(replica, self.num_replicas) if self.by_shares else (0, self.num_elements)

    def own(self, replica: int, start: int = 0, stop: int | None = None) -> Held:
        whole = Held(self._packed[replica], replica, 0, self.num_elements, is_packed=True)
        return self.cut(whole, start, whole.stop if stop is None else stop)

    def cut(self, held: Held, start: int, stop: int) -> Held:
        """The elements ``start`` to ``stop`` of a value; both are offsets in the bucket or pack."""
        if (start, stop) == (held.start, held.stop):
            return held
        if start == stop or held.node is None:
            return replace(held, node=None, start=start, stop=stop)
        place = (self._value(held), 0, start - held.start, stop - held.start)
        return replace(held, node=self._compute(held, aten.slice.Tensor, place), start=start, stop=stop)

    def send(self, held: Held, destination: int, chunk: int = 0) -> Held:
        """Sends a value; ``chunk`` distinguishes messages between the same replicas in a round."""
        if held.node is None:
            return replace(held, replica=destination)
        tag = {**self._words, "chunk": chunk, "round": self._round, "link": self._link}
        begins, ends = self._place(held), self._launch if held.is_packed else self._waits[destination]
        value, ends_of_send = self._value(held), {"destination": destination, "replica": held.replica}
        insert(self._program, begins, ops.send, (value,), {**tag, **ends_of_send})
        receipt = insert(self._program, ends, ops.recv, (), {**tag, "source": held.replica, "replica": destination})
        return Held(receipt, destination, held.start, held.stop)

    def _value(self, held: Held) -> fx.Node:
        """Waits for a received value at its first use."""
        node = held.node
        assert node is not None, "it has elements"
        if node.target is not ops.recv:
            return node
        if node not in self._received:
            words = {**self._words, "replica": held.replica}
            self._received[node] = insert(self._program, self._waits[held.replica], ops.wait, (node,), words)
        return self._received[node]

    def add(self, value: Held, other: Held) -> Held:
        if value.node is None:
            return value
        operands = (self._value(value), self._value(other))
        is_packed = value.is_packed and other.is_packed
        both = replace(value, is_packed=is_packed)
        return replace(both, node=self._compute(both, aten.add.Tensor, operands))

    def add_all(self, values: Sequence[Held]) -> Held:
        total = values[0]
        for value in values[1:]:
            total = self.add(total, value)
        return total

    def cast(self, held: Held, dtype: torch.dtype) -> Held:
        if held.node is None or self.dtype_of(held) == dtype:
            return held
        return replace(held, node=self._compute(held, aten._to_copy.default, (self._value(held),), dtype=dtype))

    def dtype_of(self, held: Held) -> torch.dtype:
        return self._bucket.dtype if held.node is None else self._value(held).meta["val"].dtype

    def divided(self, held: Held, divisor: int) -> Held:
        if held.node is None:
            return held
        return replace(held, node=self._compute(held, aten.div.Tensor, (self._value(held), divisor)))

    def joined(self, values: Iterable[Held]) -> Held:
        parts = sorted(values, key=lambda held: (held.start, held.stop))
        some = [held for held in parts if held.node is not None]
        if len(some) < 2:
            return some[0] if some else parts[0]
        whole = replace(some[0], stop=some[-1].stop, is_packed=all(held.is_packed for held in some))
        return replace(whole, node=self._compute(whole, aten.cat.default, ([*map(self._value, some)],)))

    def collected(self, replica: int, sums: Sequence[Held]) -> list[Held]:
        """The elements of the sum that a replica needs, in pieces. Missing elements are sent to it.

        ``sums`` have each element at least once; the first replica that has an element sends it.
        """
        start, stop = self.share(replica)
        pieces, place = [Held(None, replica, start, start)], start
        while place < stop:
            holders = [held for held in sums if held.start <= place < held.stop]
            source = next((held for held in holders if held.replica == replica), holders[0])
            piece = self.cut(source, place, min(source.stop, stop))
            place = piece.stop
            pieces.append(piece if piece.replica == replica else self.send(piece, replica, chunk=len(pieces) - 1))
        return pieces

    def finish(self, results: Sequence[Held]) -> None:
        for replica, wait in self._waits.items():
            result = results[replica]
            value = self._value(result) if result.node is not None else None  # unused values are awaited, too
            if wait.users:
                wait.replace_all_uses_with(value or self._nothing(replica))
            wait.graph.erase_node(wait)
        self._launch.graph.erase_node(self._launch)

    def _nothing(self, replica: int) -> fx.Node:
        """An empty value: even the norm of an empty share needs an operand."""
        gradient = self.own(replica)
        start, _ = self.share(replica)
        return self._compute(gradient, aten.slice.Tensor, (self._value(gradient), 0, start, start))

    def _place(self, held: Held) -> fx.Node:
        return self._launch if held.is_packed else self._waits[held.replica]

    def _compute(self, held: Held, target: Any, args: tuple[Any, ...], **kwargs: Any) -> fx.Node:
        return insert(self._program, self._place(held), target, args, kwargs)
