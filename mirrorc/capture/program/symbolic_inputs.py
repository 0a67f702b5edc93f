"""Makes the graphs of a program that have symbolic sizes take the same arguments, and says what their sizes are in a call."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mirrorc.capture.call.shards import Shards
from mirrorc.capture.program.captured_graph import CapturedGraph
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Argument, ArgumentKind
from mirrorc.torch_internals import SizesGivenUp, SizesOfArguments


def with_equal_sizes(captured: Sequence[CapturedGraph]) -> list[CapturedGraph]:
    """Has all graphs take arguments for sizes of the same names; one that a graph does not need has no value there.

    A name may stand for other sizes in a graph for another kind of shard, each of which has symbols of its own.

    Raises:
        SizesGivenUp: replicas gather rows, of which each graph has to say how many all have.
    """
    names = list(dict.fromkeys(argument.name for one in captured for argument in _sizes_of(one)))
    names.sort(key=lambda name: name.startswith("size"))  # symbols come first
    if names and any(next(calls_to(one.graph, *ops.MEETINGS), None) is not None for one in captured):
        raise SizesGivenUp("the model asks for values of all replicas")
    return [_with_sizes(one, names) for one in captured] if names else list(captured)


def _sizes_of(one: CapturedGraph) -> list[Argument]:
    return [argument for argument in one.arguments if argument.kind is ArgumentKind.SIZE]


def _with_sizes(one: CapturedGraph, names: Sequence[str]) -> CapturedGraph:
    key_of = {own.name: one.size_keys[own.leaf or 0] for own in _sizes_of(one)}
    places = {str(node.target): node for node in one.graph.find_nodes(op="placeholder")}
    batch = [argument for argument in one.arguments if argument.kind is ArgumentKind.BATCH]
    last = places[batch[-1].name]
    for name in names:
        node = places.get(name)
        if node is None:
            with one.graph.inserting_after(last):
                node = one.graph.placeholder(name)
            node.meta["val"] = 0
        else:
            last.append(node)
        last = node
    others = [argument for argument in one.arguments[len(batch) :] if argument.kind is not ArgumentKind.SIZE]
    sizes = [Argument(name, ArgumentKind.SIZE, index) for index, name in enumerate(names)]
    keys = tuple(key_of.get(name) for name in names)
    return replace(one, arguments=(*batch, *sizes, *others), size_keys=keys)


@dataclass(frozen=True)
class SymbolicSizes:
    """The sizes of a program whose graphs have symbols.

    Attributes:
        graphs: the symbols of each graph, and the keys of the numbers that it takes.
        shard_of_replica: which of the graphs each replica runs; None without examples.
        microbatches: how many examples each replica's microbatches have, of which one graph takes all; empty for whole shards.
        are_split: of each argument, whether it is split.
    """

    graphs: tuple[tuple[SizesOfArguments | None, tuple[Any, ...]], ...]
    shard_of_replica: tuple[int | None, ...]
    microbatches: tuple[tuple[int, ...], ...] = ()
    are_split: tuple[bool, ...] = ()

    @property
    def are_there(self) -> bool:
        """Whether there are symbols."""
        return any(sizes is not None and sizes.symbols for sizes, _ in self.graphs)

    def of_shards(self, shards: Shards) -> list[tuple[int | float, ...]] | None:
        """For each replica, the numbers that its graph takes for its shard; None if some graph is not that of its shard."""
        if shards.microbatches != self.microbatches:
            return None
        found: list[tuple[int | float, ...]] = []
        for replica, shard in enumerate(self.shard_of_replica):
            if (shard is None) is not (shards.num_examples[replica] == 0):
                return None
            if shard is None:
                found.append(())
                continue
            sizes, keys = self.graphs[shard]
            numbers = sizes.numbers_for(self._tensors(shards, replica), keys) if sizes is not None else None
            if numbers is None:
                return None
            found.append(numbers)
        return found

    def _tensors(self, shards: Shards, replica: int) -> Sequence[torch.Tensor]:
        """What a replica's graph takes first: its shard, or the first microbatch of it."""
        if not self.microbatches:
            return shards.tensors[replica]
        size = self.microbatches[replica][0]
        both = zip(shards.tensors[replica], self.are_split, strict=True)
        return [tensor[:size] if is_split else tensor for tensor, is_split in both]
