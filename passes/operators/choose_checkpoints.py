"""Chooses values that backward recomputes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

from torch import fx

from mirrorc.analysis.cost.work import seconds_of_graph
from mirrorc.analysis.graph.cuts import first_of_backward
from mirrorc.analysis.memory.activation_peaks import MACHINE, JointTimeline, Peak
from mirrorc.analysis.memory.segments import Segment, Segments
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import CHECKPOINT, Checkpoint, checkpoint_of, is_compute
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.printing.printed_values import size_text

_NUMBERS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)
_MOST_KEPT = 64
"""The largest average number of saved values per segment: larger segments gain nothing, and cost time."""
_MOST_TRIMS = 48
Levels = tuple[int, ...]
"""The choice of each segment: a number from 1, or 0 to recompute nothing."""


@dataclass(frozen=True)
class ChooseCheckpoints:
    """Puts operators of forward into checkpoints, as if the model had called `torch.utils.checkpoint` there::

        mm    = aten.mm(x, w)                    mm    = aten.mm(x, w)        # checkpoint 0, which keeps it
        tanh  = aten.tanh(mm)           ->       tanh  = aten.tanh(mm)        # checkpoint 0
        ...                                      ...
        grad  = aten.mm(t, tanh)                 grad  = aten.mm(t, tanh)

    Forward is cut into segments where few bytes cross. In each segment, a minimum cut chooses the saved values, at a
    price per byte. A search over segments and prices minimizes recomputation, with the predicted peak
    (`memory.activation_peaks`) within the bound. If no choice is within the bound, it takes the lowest peak.

    Guarantees: every value is the same expression, bit for bit. The model's own checkpoints stay.

    Attributes:
        max_bytes: the bound on each device's activations; None changes nothing.
    """

    max_bytes: int | None = None
    name: str = field(default="choose-checkpoints", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)
    trains_only: ClassVar = True

    def run(self, program: Program) -> Program:
        if self.max_bytes is None:
            return program.with_remarks("nothing is chosen: max_bytes is not set", is_kept=False)
        graphs = tuple(copied(graph) for graph in program.shard_graphs)
        remarks = [_choose(program, graph, self.max_bytes) for graph in graphs]
        return program.evolve(shard_graphs=graphs).with_remarks(remarks[0])


def _choose(program: Program, graph: fx.Graph, max_bytes: int) -> str:
    if first_of_backward(program, graph) is None:
        return "nothing is chosen: nothing is kept for a backward"
    search = _Search(program, graph, max_bytes)
    chosen = search.best()
    for node, checkpoint in chosen.items():
        if is_compute(node):
            node.meta[CHECKPOINT] = checkpoint
    return search.remark(chosen)


class _Search:
    def __init__(self, program: Program, graph: fx.Graph, max_bytes: int) -> None:
        self._graph, self._max_bytes = graph, max_bytes
        self._timeline = JointTimeline(program, graph)
        checkpoints = ((node, checkpoint_of(node)) for node in self._timeline.forward)
        self._of_model = {node: checkpoint for node, checkpoint in checkpoints if checkpoint is not None}
        self._before = self._timeline.peak(self._of_model)
        self._segments = Segments(self._timeline, self._of_model)

    def best(self) -> dict[fx.Node, Checkpoint]:
        if self._before.num_bytes <= self._max_bytes:
            return {}
        tried: list[tuple[tuple[bool, float, int], Sequence[Segment], Levels]] = []
        for number in self._numbers():
            segments = self._segments.cut_into(number)
            for levels, peak in self._tries(segments):
                tried.append((self._rank(peak), segments, levels))
        rank, chosen, its_levels = min(tried, key=lambda attempt: attempt[0])
        return self._checkpoints(chosen, self._trimmed(chosen, its_levels, rank))

    def _numbers(self) -> list[int]:
        most = self._segments.num_saved
        fewest = min(most // _MOST_KEPT, _NUMBERS[-1])
        return sorted({max(1, min(number, most)) for number in _NUMBERS if number >= fewest})

    def _rank(self, peak: Peak) -> tuple[bool, float, int]:
        """Peaks within the bound come first, ordered by time; then other peaks, ordered by memory."""
        exceeds = peak.num_bytes > self._max_bytes
        return exceeds, float(peak.num_bytes) if exceeds else peak.seconds, peak.num_bytes

    def _tries(self, segments: Sequence[Segment]) -> Iterator[tuple[Levels, Peak]]:
        """Bisects the ladder for the first peak within the bound. If the last peak exceeds it, samples the ladder."""
        ladder = _ladder(segments)
        low, high = 0, len(ladder) - 1  # the peak at low exceeds the bound
        peak = self._timeline.peak(self._checkpoints(segments, ladder[high]))
        yield ladder[high], peak
        if peak.num_bytes > self._max_bytes:  # a lower price may still take less, as fewer values return at once
            for place in range(high - high // 8 - 1, low, -(high // 8 + 1)):
                yield ladder[place], self._timeline.peak(self._checkpoints(segments, ladder[place]))
            return
        while high - low > 1:
            middle = (low + high) // 2
            peak = self._timeline.peak(self._checkpoints(segments, ladder[middle]))
            yield ladder[middle], peak
            low, high = (low, middle) if peak.num_bytes <= self._max_bytes else (middle, high)

    def _trimmed(self, segments: Sequence[Segment], levels: Levels, rank: tuple[bool, float, int]) -> Levels:
        order = sorted(range(len(segments)), key=lambda i: (-_seconds(segments[i], levels[i]), i))
        for i in [i for i in order if levels[i]][:_MOST_TRIMS]:
            for level in sorted({0, levels[i] - 1}):
                less = (*levels[:i], level, *levels[i + 1 :])
                trimmed_rank = self._rank(self._timeline.peak(self._checkpoints(segments, less)))
                if trimmed_rank < rank:
                    levels, rank = less, trimmed_rank
                    break
        return levels

    def _checkpoints(self, segments: Sequence[Segment], levels: Levels) -> dict[fx.Node, Checkpoint]:
        number = 1 + max((checkpoint.number for checkpoint in self._of_model.values()), default=-1)
        checkpoints = dict(self._of_model)
        for i, (segment, level) in enumerate(zip(segments, levels, strict=True)):
            if level:
                saved = segment.choices[level - 1].saved
                checkpoints.update((node, Checkpoint(number + i, _operator(node) in saved)) for node in segment.nodes)
        return checkpoints

    def remark(self, chosen: Mapping[fx.Node, Checkpoint]) -> str:
        bound, before = size_text(self._max_bytes), size_text(self._before.num_bytes)
        if not chosen:
            return f"nothing is computed again: {before} are predicted, at most {bound} asked"
        peak = self._timeline.peak(chosen)
        numbers = {checkpoint.number for node, checkpoint in chosen.items() if node not in self._of_model}
        timeline = self._timeline
        again = timeline.again(chosen)
        values = len({timeline.owner(place) for place in again}.intersection(again))
        more = (peak.seconds - self._before.seconds) / max(seconds_of_graph(self._graph, MACHINE), 1e-30)
        return (
            f"{counted(values, 'value')} of forward in {counted(len(numbers), 'checkpoint')} to be computed again, which is "
            f"{100 * more:.1f}% more work: {size_text(peak.num_bytes)} are predicted at the peak, not "
            f"{before}, with at most {bound} asked"
        )


def _ladder(segments: Sequence[Segment]) -> list[Levels]:
    """Levels from no recomputation to the most. Each step raises one segment by one level, the cheapest per byte."""
    steps: list[tuple[float, int, int]] = []
    for i, segment in enumerate(segments):
        before, seconds, price = 0, 0.0, 0.0
        for level, choice in enumerate(segment.choices, 1):
            price = max(price, (choice.seconds - seconds) / (choice.num_bytes - before))
            before, seconds = choice.num_bytes, choice.seconds
            steps.append((price, i, level))
    levels = [0] * len(segments)
    ladder = [tuple(levels)]
    for _, i, level in sorted(steps):
        levels[i] = level
        ladder.append(tuple(levels))
    return ladder


def _seconds(segment: Segment, level: int) -> float:
    return segment.choices[level - 1].seconds if level else 0.0


def _operator(node: fx.Node) -> fx.Node:
    return node if is_compute(node) else node.all_input_nodes[0]
