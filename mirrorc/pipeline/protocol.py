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

    A pass may have further, optional attributes, which `Traits` lists with their defaults.
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
    """The optional attributes of a pass, by these names.

    Attributes:
        latest_input_stage: the last stage of the programs that it takes. The default is its input stage. A pass that gives a
            later stage also takes stages that refine its input stage: one from UPDATED to LOWERED takes SCHEDULED programs.
        requires: the properties that the program it takes must have.
        establishes: the properties of the program that it gives, and of all later programs.
        precedes: the properties that the program it takes must not have yet.
        changes_dataflow: whether it intentionally changes what is computed, such as how a gradient is made or what is applied to
            a bucket before its reduction or update. For all other passes, the verifier requires that the expressions of the
            loss, of every gradient, of every written buffer and of every bucket's way to its update stay the same.
        changes_bits: how it may change the bits of a step's results, because numbers are rounded or added differently: a clause,
            such as ``"terms are added in another order"``; empty if bits stay the same. The dump shows it, and
            `mirrorc.compile` leaves the pass out if ``exact_order=True``. If such a pass has nothing to do, it must return the
            graphs unchanged.
        trains_only: whether it is about gradients, buckets or updates alone, so that the pipeline of an evaluation, which has
            none of these, is without it.
        updates_only: whether it is about updates alone, so that the pipeline of a program that accumulates is without it.
    """

    latest_input_stage: Stage
    requires: tuple[Property, ...] = ()
    establishes: tuple[Property, ...] = ()
    precedes: tuple[Property, ...] = ()
    changes_dataflow: bool = False
    changes_bits: str = ""
    trains_only: bool = False
    updates_only: bool = False


def traits_of(compiler_pass: Pass) -> Traits:
    """The optional attributes of a pass, with defaults for those that it does not have."""
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
