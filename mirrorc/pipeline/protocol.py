"""What a pass is, and what may look on while passes run."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

from mirrorc.ir.program import Program, Stage


@runtime_checkable
class Pass(Protocol):
    """A step of compilation: a frozen dataclass whose fields are its options.

    Attributes:
        name: kebab-case, the name of its file.
        input_stage: the stage of the program that it takes.
        output_stage: the stage of the program that it gives.

    A pass that takes later stages as well says up to which by an attribute ``latest_input_stage``. One that takes UPDATED
    programs and gives later ones need not say that it takes SCHEDULED ones, too: they are UPDATED ones in another order, made by
    several passes, each of which may be left out.

    A pass that means to change what is computed (how a gradient is made, or what is made of a bucket before its reduction or
    update) says so by an attribute ``changes_dataflow = True``; of all others the verifier demands that the loss, every
    gradient, every bucket's way to its update and every written buffer stay the same expressions.

    A pass after which a step may give other bits, because numbers are rounded or added up otherwise, says how by an attribute
    ``changes_bits``: a clause, such as ``"terms are added in another order"``. The dump shows it, and `mirrorc.compile` leaves
    the pass out if ``exact_order=True``. Where such a pass has nothing to do, it gives the graphs that it was given.
    """

    @property
    def name(self) -> str: ...
    @property
    def input_stage(self) -> Stage: ...
    @property
    def output_stage(self) -> Stage: ...

    def run(self, program: Program) -> Program:
        """The program after this pass. The program given is not changed."""
        ...


def changes_bits(compiler_pass: Pass) -> str:
    """How a pass changes the bits of a step; empty if it does not."""
    return str(getattr(compiler_pass, "changes_bits", ""))


class Instrument:
    """Looks on while passes run; subclasses override what they need."""

    def start(self, program: Program) -> None:
        """Before the first pass; an exception from here stops the compilation."""

    def refused(self, program: Program, error: Exception) -> None:
        """An instrument's `start` has raised an error, which follows."""

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """After each pass; an exception from here stops the compilation."""

    def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
        """A pass cannot take the program, or it or an instrument after it has raised an error, which follows."""

    def finish(self, program: Program) -> None:
        """After the last pass."""
