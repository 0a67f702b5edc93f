"""The order in which the workers of a step take gradients: one for all of them."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import fx

from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.workers.team.team import Team


class ReadyOrder:
    """The order in which the chief's backward has made gradients, found at the first training call and kept from then on.

    All workers must put gradients into the same buckets, but each finds out an order of its own. A backward that runs as plain
    PyTorch goes by the values of the worker's examples, and a graph goes by their number: that of one example may have other
    operators, as in attention, and make gradients in another order. So each worker tells the others its order at the first call,
    and all go by that of the chief.

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
        """Brings the gradients of a captured program into this order, and notes it there.

        Variables that it does not name were frozen when the chief told it. Their gradients come behind, by their names, as all
        that a program has besides may differ between workers; of layers with numbers the last comes first, as in backward.
        """
        if not program.trains or not self._are_several:
            return program
        self._own = self._own or tuple(_gradients(program.shard_graphs[0]))
        self._choose()
        names = self._own if self._names is None else self._names
        others = sorted(program.variables.keys() - set(names), key=_with_numbers, reverse=True)
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


def _with_numbers(name: str) -> list[str | int]:
    """A key by which layer 10 comes behind layer 9."""
    return [int(part) if number % 2 else part for number, part in enumerate(re.split("([0-9]+)", name))]


def _in_order(graph: fx.Graph, names: Sequence[str]) -> fx.Graph:
    """A captured graph whose output lists gradients in this order; those of plain PyTorch are taken in it, too.

    Other operators stay where they are: outline-regions cuts backward where all gradients of a bucket are there.
    """
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
