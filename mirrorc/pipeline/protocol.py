"""The interfaces of passes and of the instruments that observe them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Protocol, runtime_checkable

from mirrorc.ir.program import Program, Property, Stage


@runtime_checkable
class Pass(Protocol):
    """A step of compilation: a frozen dataclass whose fields are its options.

    Attributes:
        name: kebab-case, the name of its file.
        input_stage: the stage of the program that it takes.
        output_stage: the stage of the program that it gives.

    What else a pass may say of itself, by attributes that it need not have, is in `Traits`, with what holds if it does not.
    """

    @property
    def name(self) -> str: ...
    @property
    def input_stage(self) -> Stage: ...
    @property
    def output_stage(self) -> Stage: ...

    def run(self, program: Program) -> Program:
        """Returns the program after this pass; must not change the given program."""
        ...


@dataclass(frozen=True)
class Traits:
    """What a pass may say of itself besides, by attributes of these names.

    Attributes:
        latest_input_stage: the last stage of the programs that it takes. By default its input stage; a pass that gives a later
            stage takes those that refine its input stage, too: one from UPDATED to LOWERED takes SCHEDULED programs.
        requires: what must be true of the program that it takes.
        establishes: what is true of the program that it gives, and of all after it.
        precedes: what must not be true yet of the program that it takes.
        changes_dataflow: whether it means to change what is computed: how a gradient is made, or what is made of a bucket before
            its reduction or update. Of all others the verifier demands that the loss, every gradient, every bucket's way to
            its update and every written buffer stay the same expressions.
        changes_bits: how a step may give other bits after it, because numbers are rounded or added up otherwise: a clause, such
            as ``"terms are added in another order"``; empty if it does not. The dump shows it, and `mirrorc.compile` leaves
            the pass out if ``exact_order=True``. Where such a pass has nothing to do, it gives the graphs that it was given.
    """

    latest_input_stage: Stage
    requires: tuple[Property, ...] = ()
    establishes: tuple[Property, ...] = ()
    precedes: tuple[Property, ...] = ()
    changes_dataflow: bool = False
    changes_bits: str = ""


def traits_of(compiler_pass: Pass) -> Traits:
    """What a pass says of itself, with the defaults of what it does not say."""
    first, last = compiler_pass.input_stage, compiler_pass.output_stage
    refining = [stage for stage in Stage if stage.refines is first and last > first]
    said = {
        each.name: getattr(compiler_pass, each.name) for each in fields(Traits) if hasattr(compiler_pass, each.name)
    }
    return Traits(**{"latest_input_stage": max([first, *refining]), **said})


class Instrument:
    """Observes a run of passes; subclasses override the methods that they need."""

    def start(self, program: Program) -> None:
        """Called before the first pass; an exception stops the compilation."""

    def refused(self, program: Program, error: Exception) -> None:
        """Called when an instrument's `start` has raised an error, before the error is raised to the caller."""

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """Called after each pass; an exception stops the compilation."""

    def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
        """Called when a pass cannot take the program, or when the pass or an instrument's `after_pass` has raised an error.

        The error is raised to the caller afterwards.
        """

    def finish(self, program: Program) -> None:
        """Called after the last pass."""
