"""Python numbers and symbolic sizes as the same inputs of all graphs of a program, and values of sizes in a call."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from mirrorc.capture.call.changing_inputs import ChangingNumbers
from mirrorc.capture.call.shards import Shards
from mirrorc.capture.diagnostics.python_effects import drawn_number, users_place
from mirrorc.capture.model.model_state import free_name
from mirrorc.capture.program.captured_graph import CapturedGraph
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Argument, ArgumentKind
from mirrorc.messages.wording import listed
from mirrorc.torch_internals import NumbersGivenUp, SizesGivenUp, SizesOfArguments, is_drawn


def captured_with_numbers(
    numbers: ChangingNumbers, capture_all: Callable[[], list[CapturedGraph]], model: str, *, are_sizes_symbolic: bool
) -> list[CapturedGraph]:
    """If a number cannot be an input of one graph, it becomes a constant of all graphs.

    Raises:
        SizesGivenUp: a number cannot be an input beside symbolic sizes; it may be one without them.
    """
    while True:
        inputs = numbers.inputs
        try:
            graphs = capture_all()
        except NumbersGivenUp as error:
            if are_sizes_symbolic and not inputs.isdisjoint(error.names):
                names = listed(error.words or sorted(error.names))
                raise SizesGivenUp(f"{names} changes, too, and cannot be an input beside them: {error.why}") from error
            lasting = [name for name in error.names if not is_drawn(name)]
            if not lasting:
                why = f"it would be the same in every step of a captured graph, because {error.why}"
                raise drawn_number(model, why, users_place(error.stack)) from None
            numbers.give_up(lasting, error.why, error.words)
            continue
        except CaptureError:  # perhaps for another reason, for which a capture without inputs fails, too
            inputs = numbers.inputs  # with numpy's, which the trace has met
            if not inputs or are_sizes_symbolic:
                raise
            with numbers.left_out():
                graphs = capture_all()
            numbers.give_up(inputs, "the capture fails if it may be another number")
            return graphs
        inputs = numbers.inputs
        if len({tuple((number.name, number.kind) for number in graph.numbers) for graph in graphs}) == 1 or not inputs:
            return graphs
        numbers.give_up(inputs, "shards of different sizes compute with different numbers")


def with_numbers_of_each(captured: Sequence[CapturedGraph]) -> list[CapturedGraph]:
    """Adds arguments for numbers that Python computes differently for microbatches of different sizes.

    Each graph gets the arguments of all graphs, and uses its own.
    """
    expressions = zip(*([number.expression for number in graph.numbers] for graph in captured), strict=True)
    apart = {index for index, of_graphs in enumerate(expressions) if len(set(of_graphs)) > 1}
    if not apart:
        return list(captured)
    return [_with_numbers(graph, place, len(captured), apart) for place, graph in enumerate(captured)]


def _with_numbers(captured: CapturedGraph, place: int, num_graphs: int, apart: Collection[int]) -> CapturedGraph:
    arguments: list[Argument] = []
    taken = {argument.name for argument in captured.arguments}
    for argument, first in zip(captured.arguments, captured.graph.find_nodes(op="placeholder"), strict=True):
        arguments.append(argument)
        if argument.kind is not ArgumentKind.NUMBER or argument.leaf is None or argument.leaf not in apart:
            continue
        last = first
        for other in range(1, num_graphs):
            name = free_name(f"{argument.name}_shard{other}", taken)
            arguments.append(Argument(name, ArgumentKind.NUMBER, argument.leaf + other * len(captured.numbers)))
            with captured.graph.inserting_after(last):
                last = captured.graph.placeholder(name)
            last.meta = dict(first.meta)
            if other == place:
                first.replace_all_uses_with(last)
    return replace(captured, arguments=tuple(arguments))


def remarks_on_numbers(captured: Sequence[CapturedGraph]) -> list[str]:
    remarks, numbers = [], [number for graph in captured for number in graph.numbers]
    for argument in captured[0].arguments:
        if argument.kind is ArgumentKind.NUMBER and argument.leaf is not None and numbers[argument.leaf].text:
            text = textwrap.shorten(numbers[argument.leaf].text, _MOST_CHARACTERS, placeholder="...")
            remarks.append(f"{argument.name} is a number: {text}, which Python computes before each step")
    return remarks


_MOST_CHARACTERS = 100


def with_equal_sizes(captured: Sequence[CapturedGraph]) -> list[CapturedGraph]:
    """Gives all graphs the same SIZE arguments; the key of an unused argument is None.

    Raises:
        SizesGivenUp: a graph has symbols, and replicas exchange values.
    """
    names = list(dict.fromkeys(argument.name for graph in captured for argument in _sizes_of(graph)))
    names.sort(key=lambda name: name.startswith("size"))  # symbols come first
    if names and any(next(calls_to(graph.graph, *ops.MEETINGS), None) is not None for graph in captured):
        raise SizesGivenUp("the model asks for values of all replicas")
    return [_with_sizes(graph, names) for graph in captured] if names else list(captured)


def _sizes_of(captured: CapturedGraph) -> list[Argument]:
    return [argument for argument in captured.arguments if argument.kind is ArgumentKind.SIZE]


def _with_sizes(captured: CapturedGraph, names: Sequence[str]) -> CapturedGraph:
    key_of = {size.name: captured.size_keys[size.leaf or 0] for size in _sizes_of(captured)}
    places = {str(node.target): node for node in captured.graph.find_nodes(op="placeholder")}
    batch = [argument for argument in captured.arguments if argument.kind is ArgumentKind.BATCH]
    last = places[batch[-1].name]
    for name in names:
        node = places.get(name)
        if node is None:
            with captured.graph.inserting_after(last):
                node = captured.graph.placeholder(name)
            node.meta["val"] = 0
        else:
            last.append(node)
        last = node
    others = [argument for argument in captured.arguments[len(batch) :] if argument.kind is not ArgumentKind.SIZE]
    sizes = [Argument(name, ArgumentKind.SIZE, index) for index, name in enumerate(names)]
    keys = tuple(key_of.get(name) for name in names)
    return replace(captured, arguments=(*batch, *sizes, *others), size_keys=keys)


@dataclass(frozen=True)
class SymbolicSizes:
    """The sizes of a program whose graphs have symbols.

    Attributes:
        graphs: the symbols of each graph, and the keys of its SIZE arguments.
        microbatches: the sizes of each replica's microbatches, which share one graph; empty for whole shards.
    """

    graphs: tuple[tuple[SizesOfArguments | None, tuple[Any, ...]], ...]
    shard_of_replica: tuple[int | None, ...]
    microbatches: tuple[tuple[int, ...], ...] = ()
    are_split: tuple[bool, ...] = ()

    @property
    def has_symbols(self) -> bool:
        return any(sizes is not None and sizes.symbols for sizes, _ in self.graphs)

    def of_shards(self, shards: Shards) -> list[tuple[int | float, ...]] | None:
        """For each replica, the numbers for its graph's arguments; None if a graph does not fit its shard."""
        if shards.microbatches != self.microbatches:
            return None
        numbers_of_replicas: list[tuple[int | float, ...]] = []
        for replica, shard in enumerate(self.shard_of_replica):
            if (shard is None) is not (shards.num_examples[replica] == 0):
                return None
            if shard is None:
                numbers_of_replicas.append(())
                continue
            sizes, keys = self.graphs[shard]
            numbers = sizes.numbers_for(self._tensors(shards, replica), keys) if sizes is not None else None
            if numbers is None:
                return None
            numbers_of_replicas.append(numbers)
        return numbers_of_replicas

    def sizes_for(self, sizes: Sequence[tuple[int, Any]]) -> Callable[[Shards], tuple[int, ...]]:
        """A function that computes sizes, each of a replica's values, from the shards."""
        of_replica: dict[int, list[Any]] = {}
        for replica, size in sizes:
            of_replica.setdefault(replica, []).append(size)
        functions = {}
        for replica, wanted in of_replica.items():
            shard = self.shard_of_replica[replica]
            arguments = self.graphs[shard][0] if shard is not None else None
            if arguments is not None:
                functions[replica] = arguments.sizes_for(wanted)

        def of_shards(shards: Shards) -> tuple[int, ...]:
            known = {r: iter(function(*self._tensors(shards, r))) for r, function in functions.items()}
            return tuple([next(known[replica]) if replica in known else size for replica, size in sizes])

        return of_shards

    def _tensors(self, shards: Shards, replica: int) -> Sequence[torch.Tensor]:
        if not self.microbatches:
            return shards.tensors[replica]
        size = self.microbatches[replica][0]
        both = zip(shards.tensors[replica], self.are_split, strict=True)
        return [tensor[:size] if is_split else tensor for tensor, is_split in both]
