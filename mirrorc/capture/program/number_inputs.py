"""Captures the graphs of a program with the same Python numbers as inputs."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mirrorc.capture.call.changing_numbers import ChangingNumbers
from mirrorc.capture.diagnostics.python_effects import drawn_number, users_place
from mirrorc.capture.model.model_state import free_name
from mirrorc.capture.program.captured_graph import CapturedGraph
from mirrorc.errors import CaptureError
from mirrorc.ir.program import Argument, ArgumentKind
from mirrorc.messages.wording import listed
from mirrorc.torch_internals import NumbersGivenUp, SizesGivenUp, is_drawn


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
                raise _no_constant(error, model) from None
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


def _no_constant(error: NumbersGivenUp, model: str) -> CaptureError:
    why = f"it would be the same in every step of a captured graph, because {error.why}"
    return drawn_number(model, why, users_place(error.stack))


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
