"""Makes all workers use the chief's order of gradients."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from mirrorc.compilation.choices.joint_choice import JointChoice
from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.workers.team.team import Team


class ChiefGradientOrder(JointChoice):
    """The chief's order of gradients: all workers need the same buckets.

    Orders may differ between workers: they depend on the values of examples in an eager backward, on their number in a
    graph.
    """

    subject = "the order of gradients"

    def __init__(self, options: StepOptions, team: Team | None) -> None:
        super().__init__(options, team)
        self._first: tuple[str, ...] = ()  # of this worker's first program
        self._names: tuple[str, ...] = ()

    def concerns(self, program: Program) -> bool:
        return program.trains and self._options.program_workers.are_several

    def observe(self, program: Program) -> None:
        """Uses the first program, from any front end, because other workers may wait for this worker's proposal."""
        self._first = self._first or tuple(_gradients(program.shard_graphs[0]))

    def propose(self) -> str:
        return json.dumps(self._first)

    def decide(self, proposals: Sequence[str]) -> None:
        self._names = tuple(json.loads(proposals[0]))

    def applies_to(self, program: Program) -> bool:
        return program.workers.gradient_order in ((), self._names)

    def noted_in(self, program: Program) -> Program:
        """Variables that the chief had frozen come last, in reverse order of name: all workers need one order for them,
        too.
        """
        if not self.concerns(program):
            return program
        others = sorted(program.variables.keys() - set(self._names), key=_with_numbers, reverse=True)
        return program.evolve(
            shard_graphs=tuple(_in_order(graph, [*self._names, *others]) for graph in program.shard_graphs),
            workers=replace(program.workers, gradient_order=self._names),
        )


def _gradients(graph: fx.Graph) -> dict[str, fx.Node]:
    output: Any = graph.output_node().args[0]
    return dict(output["gradients"])


def _with_numbers(name: str) -> list[str | int]:
    return [int(part) if number % 2 else part for number, part in enumerate(re.split("([0-9]+)", name))]


def _in_order(graph: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """Other operators keep their positions, because outline-regions cuts backward after a bucket's last gradient."""
    ordered = copied(graph)
    gradients, end = _gradients(ordered), ordered.output_node()
    known = {name: place for place, name in enumerate(names)}
    gradients = {name: gradients[name] for name in sorted(gradients, key=known.__getitem__)}
    for node in gradients.values():
        if node.target is take_gradient:
            end.prepend(node)
    output: Any = end.args[0]
    end.args = ({**output, "gradients": gradients},)
    return ordered
