"""The order in which the workers of a step take gradients from backwards of plain PyTorch: one for all of them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import fx

from mirrorc.custom_ops.opaque_calls import take_gradient
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.options import StepOptions
from mirrorc.runtime.workers.team import Team


class ReadyOrder:
    """The order in which the chief's backward has made gradients, found at the first training call and kept from then on.

    A worker finds out its order by a run, which goes by the values of its own examples, but all workers must put gradients into
    the same buckets. So each tells the others its order at the first call, and all go by that of the chief.

    Args:
        options: of the step.

    Attributes:
        team: the workers that train together; None for those of a world that is not there.
    """

    def __init__(self, options: StepOptions) -> None:
        self._are_several = options.program_workers.are_several
        self.team: Team | None = None
        self._is_in_call = False
        self._own: tuple[str, ...] = ()  # of the first program
        self._names: tuple[str, ...] | None = None  # of all workers

    @contextmanager
    def asked(self) -> Iterator[None]:
        """A block in which all workers are in a training call, so that they can be asked."""
        self._is_in_call = True
        try:
            yield
        finally:
            self._is_in_call = False

    def keeps(self, program: Program) -> bool:
        """Whether a program has the order of all workers; it may have been compiled without asking them."""
        if program.trains and self._are_several:
            self._choose()
        return self._names in (None, program.workers.gradient_order) or not program.workers.gradient_order

    def put_into(self, program: Program) -> Program:
        """Brings the gradients of a captured program into this order, if plain PyTorch makes them, and notes it there."""
        if not program.trains or not self._are_several:
            return program
        self._own = self._own or tuple(_gradients(program.shard_graphs[0]))
        self._choose()
        if next(calls_to(program.shard_graphs[0], take_gradient), None) is None:
            return program
        names = self._own if self._names is None else self._names
        others = [name for name in reversed([*program.variables]) if name not in names]  # which were frozen then
        return program.evolve(
            shard_graphs=tuple(_in_order(graph, [*names, *others]) for graph in program.shard_graphs),
            workers=replace(program.workers, gradient_order=names),
        )

    def _choose(self) -> None:
        """Tells the order of the first program if nothing was told yet, whatever has captured it: others may wait for that."""
        if self._names is None and self.team is not None and self._is_in_call:
            told = self.team.words.kept_texts("the order of gradients", json.dumps(self._own))
            self._names = tuple(json.loads(told[0]))


def _gradients(graph: fx.Graph) -> dict[str, fx.Node]:
    output: Any = graph.output_node().args[0]
    return dict(output["gradients"])


def _in_order(graph: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """A captured graph whose gradients are taken in this order."""
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
