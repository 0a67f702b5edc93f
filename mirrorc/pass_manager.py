"""What a pass is, and the runner that applies passes in order."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from mirrorc.errors import MirrorcError, PassError
from mirrorc.program import Program, Stage


@runtime_checkable
class Pass(Protocol):
    """A step of compilation: a frozen dataclass whose fields are its options.

    Attributes:
        name: kebab-case, the name of its file.
        input_stage: the earliest stage that it takes; later ones, up to its output stage, will do as well.
        output_stage: the stage of the program that it gives.
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


class Instrument:
    """Looks on while passes run; subclasses override what they need."""

    def start(self, program: Program) -> None:
        """Before the first pass."""

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """After each pass; an exception from here stops the compilation."""


def run_passes(program: Program, passes: Sequence[Pass], instruments: Sequence[Instrument] = ()) -> Program:
    """Applies passes in order.

    Raises:
        PassError: a pass is given a program of a stage that it does not take, gives one of another stage than it
            promises, or fails.
    """
    for instrument in instruments:
        instrument.start(program)
    for compiler_pass in passes:
        _check_input(compiler_pass, program, passes)
        started = time.perf_counter()
        try:
            after = compiler_pass.run(program)
        except MirrorcError:
            raise
        except Exception as error:
            raise PassError(
                f"pass {compiler_pass.name!r} failed on a {program.stage.name} program: {type(error).__name__}: {error}"
            ) from error
        seconds = time.perf_counter() - started
        if after.stage is not compiler_pass.output_stage:
            raise PassError(
                f"pass {compiler_pass.name!r} gave a {after.stage.name} program but promises "
                f"{compiler_pass.output_stage.name}; set the stage with program.evolve(stage=...)"
            )
        for instrument in instruments:
            instrument.after_pass(compiler_pass, program, after, seconds)
        program = after
    return program


def select_passes(passes: Sequence[Pass], disabled: Sequence[str]) -> list[Pass]:
    """The passes without those named.

    Raises:
        ValueError: a name that no pass has.
        TypeError: something that is no pass.
    """
    for compiler_pass in passes:
        if isinstance(compiler_pass, type) or not isinstance(compiler_pass, Pass):
            raise TypeError(
                f"{compiler_pass!r} is no pass: a pass has name, input_stage, output_stage and run(program)"
            )
    names = [compiler_pass.name for compiler_pass in passes]
    unknown = [name for name in disabled if name not in names]
    if unknown:
        raise ValueError(f"disable_passes names {unknown[0]!r}, which is no pass of the pipeline: {', '.join(names)}")
    return [compiler_pass for compiler_pass in passes if compiler_pass.name not in disabled]


def _check_input(compiler_pass: Pass, program: Program, passes: Sequence[Pass]) -> None:
    if compiler_pass.input_stage <= program.stage <= compiler_pass.output_stage:
        return
    makers = [p.name for p in passes if p.output_stage is compiler_pass.input_stage and p is not compiler_pass]
    remedy = f"run {makers[0]!r} before it" if makers else f"add a pass that gives {compiler_pass.input_stage.name}"
    if program.stage > compiler_pass.output_stage:
        remedy = "move it to an earlier place in the pipeline"
    raise PassError(
        f"pass {compiler_pass.name!r} takes programs from {compiler_pass.input_stage.name} to "
        f"{compiler_pass.output_stage.name}, but is given one at {program.stage.name}; {remedy}"
    )
