"""Captures the graphs of a program with the same Python numbers as inputs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mirrorc.capture.call.dynamic_numbers import ChangingNumbers
from mirrorc.capture.program.captured_graph import CapturedGraph
from mirrorc.errors import CaptureError
from mirrorc.ir.program import Argument, ArgumentKind
from mirrorc.torch_internals import NumbersGivenUp, is_drawn, is_users_file


def captured_with_numbers(
    numbers: ChangingNumbers, capture_all: Callable[[], list[CapturedGraph]], what: str
) -> list[CapturedGraph]:
    """Captures all graphs; a number that cannot be an input of one graph is a constant of all.

    Args:
        numbers: those that are to be inputs; notes which cannot.
        capture_all: captures the graph of each kind of shard.
        what: the name of the model.

    Raises:
        CaptureError: a number that is drawn at random cannot be an input; or what ``capture_all`` raises.
    """
    while True:
        inputs = numbers.inputs
        try:
            graphs = capture_all()
        except NumbersGivenUp as error:
            lasting = [name for name in error.names if not is_drawn(name)]
            if not lasting:
                raise _no_constant(error, what) from None
            numbers.give_up(lasting, error.why, error.words)
            continue
        except CaptureError:  # perhaps for another reason, and then without inputs, too
            if not inputs:
                raise
            with numbers.left_out():
                graphs = capture_all()
            numbers.give_up(inputs, "the capture fails if it may be another number")
            return graphs
        if len({tuple((number.name, number.kind) for number in graph.numbers) for graph in graphs}) == 1 or not inputs:
            return graphs
        numbers.give_up(inputs, "shards of different sizes compute with different numbers")


def _no_constant(error: NumbersGivenUp, what: str) -> CaptureError:
    frame = next((frame for frame in reversed(error.stack) if is_users_file(frame.filename)), None)
    where = f" at {frame.filename}:{frame.lineno}: {frame.line!r}" if frame is not None else ""
    return CaptureError(
        f"forward or loss of {what} draws a number at random{where}, which would be the same in every step of a captured graph, "
        f"because {error.why}. Remedy: draw it with torch, as in torch.rand(()), or draw it before the step and pass it as a "
        "replicated tensor."
    )


def with_numbers_of_each(captured: Sequence[CapturedGraph]) -> list[CapturedGraph]:
    """Has microbatches of different sizes, which one replica runs, take numbers that Python computes otherwise for each size.

    All graphs have the arguments of all, and each uses its own. The numbers of a replica are those of all graphs, one graph after
    the other.
    """
    each = zip(*([number.expression for number in one.numbers] for one in captured), strict=True)
    apart = {index for index, expressions in enumerate(each) if len(set(expressions)) > 1}
    if not apart:
        return list(captured)
    return [_with_numbers(one, place, len(captured), apart) for place, one in enumerate(captured)]


def _with_numbers(one: CapturedGraph, place: int, num_graphs: int, apart: Collection[int]) -> CapturedGraph:
    """A graph with arguments for the numbers of all graphs that differ, of which it takes those at its place."""
    arguments: list[Argument] = []
    taken = {argument.name for argument in one.arguments}
    for argument, own in zip(one.arguments, one.graph.find_nodes(op="placeholder"), strict=True):
        arguments.append(argument)
        if argument.kind is not ArgumentKind.NUMBER or argument.leaf is None or argument.leaf not in apart:
            continue
        last = own
        for other in range(1, num_graphs):
            name, leaf = f"{argument.name}_shard{other}", argument.leaf + other * len(one.numbers)
            while name in taken:
                name += "_"
            arguments.append(Argument(name, ArgumentKind.NUMBER, leaf))
            with one.graph.inserting_after(last):
                last = one.graph.placeholder(name)
            last.meta = dict(own.meta)
            if other == place:
                own.replace_all_uses_with(last)
    return replace(one, arguments=tuple(arguments))


def remarks_on_numbers(captured: Sequence[CapturedGraph]) -> list[str]:
    """Says how Python computes the numbers that it does not read as they are."""
    told, numbers = [], [number for graph in captured for number in graph.numbers]
    for argument in captured[0].arguments:
        if argument.kind is ArgumentKind.NUMBER and argument.leaf is not None:
            text = _shortened(numbers[argument.leaf].text)
            told += [f"{argument.name} is a number: {text}, which Python computes before each step"] if text else []
    return told


_MOST_CHARACTERS = 100


def _shortened(text: str) -> str:
    text = text[1:-1] if text.startswith("(") and _closes_at_end(text) else text
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _closes_at_end(text: str) -> bool:
    """Whether the first bracket is closed by the last character."""
    depth = 0
    for place, character in enumerate(text):
        depth += {"(": 1, ")": -1}.get(character, 0)
        if depth == 0:
            return place == len(text) - 1
    return False
