"""The runner that applies passes in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mirrorc.errors import MirrorcError, PassError
from mirrorc.garbage import collector_paused
from mirrorc.ir.program import Program, Property
from mirrorc.ir.remarks import Remark
from mirrorc.pipeline.protocol import Instrument, Pass, traits_of

logger = logging.getLogger(__name__)


def run_passes(program: Program, passes: Sequence[Pass], instruments: Sequence[Instrument] = ()) -> Program:
    """Applies passes in order.

    Raises:
        PassError: a pass is given a program of a stage that it does not take, gives one of another stage than it
            promises, or fails.
    """
    with collector_paused():
        return _run_all(program, passes, instruments)


def _run_all(program: Program, passes: Sequence[Pass], instruments: Sequence[Instrument]) -> Program:
    try:
        for instrument in instruments:
            instrument.start(program)
    except Exception as error:
        _tell([instrument.refused for instrument in instruments], program, error)
        raise
    for compiler_pass in passes:
        try:
            _check_input(compiler_pass, program, passes)
            started = time.perf_counter()
            after = _run(compiler_pass, program)
            seconds = time.perf_counter() - started
            for instrument in instruments:
                instrument.after_pass(compiler_pass, program, after, seconds)
        except Exception as error:
            _tell([instrument.failed for instrument in instruments], compiler_pass, program, error)
            raise
        program = after
    for instrument in instruments:
        instrument.finish(program)
    return program


def _tell(listeners: Sequence[Callable[..., None]], *news: object) -> None:
    """Tells instruments of an error; errors of the instruments themselves must not hide it."""
    for listener in listeners:
        try:
            listener(*news)
        except Exception as error:  # noqa: BLE001 - said, and another is being raised
            logger.warning("what went wrong was not noted everywhere: %s: %s", type(error).__name__, error)


def _run(compiler_pass: Pass, program: Program) -> Program:
    try:
        after = compiler_pass.run(program)
    except MirrorcError:
        raise
    except Exception as error:
        raise PassError(
            f"pass {compiler_pass.name!r} failed on a {program.stage.name} program: {type(error).__name__}: {error}"
        ) from error
    if not isinstance(after, Program):
        raise PassError(f"pass {compiler_pass.name!r} gave a {type(after).__name__}: run() must return a Program")
    if after.stage is not compiler_pass.output_stage:
        raise PassError(
            f"pass {compiler_pass.name!r} gave a {after.stage.name} program but promises "
            f"{compiler_pass.output_stage.name}; set the stage with program.evolve(stage=...)"
        )
    if not isinstance(after.remarks, tuple) or not all(isinstance(remark, Remark) for remark in after.remarks):
        raise PassError(
            f"pass {compiler_pass.name!r} gave a program whose remarks are {after.remarks!r:.200}: they must be a tuple of "
            "texts; add one with program.with_remarks('why')"
        )
    told = _signed(_with_remark_on_bits(compiler_pass, program, after), program.remarks, compiler_pass.name)
    return _with_properties(told, program, compiler_pass)


def _with_remark_on_bits(compiler_pass: Pass, before: Program, after: Program) -> Program:
    """The program with a remark on how the pass has changed bits, if it has done anything."""
    how = traits_of(compiler_pass).changes_bits
    if not how or (before.graphs() == after.graphs() and before.regions == after.regions):
        return after
    return after.with_remarks(f"this changes bits, as {how}; exact_order=True leaves the pass out")


def _signed(program: Program, known: Sequence[Remark], name: str) -> Program:
    """The program with the pass's name on each remark that was not there before."""
    signed = tuple(r if r.by or r in known else replace(r, by=name) for r in program.remarks)
    return program if signed == program.remarks else program.evolve(remarks=signed)


def _check_input(compiler_pass: Pass, program: Program, passes: Sequence[Pass]) -> None:
    if compiler_pass.input_stage <= program.stage <= traits_of(compiler_pass).latest_input_stage:
        _check_properties(compiler_pass, program, passes)
        return
    makers = [p.name for p in passes if p.output_stage is compiler_pass.input_stage and p is not compiler_pass]
    remedy = f"run {makers[0]!r} before it" if makers else f"add a pass that gives {compiler_pass.input_stage.name}"
    given = f"is given one at {program.stage.name}"
    if program.stage is compiler_pass.output_stage:
        given, remedy = f"the program is already {program.stage.name}", f"leave {compiler_pass.name!r} out"
    elif program.stage > compiler_pass.input_stage:
        remedy = "move it to an earlier place in the pipeline"
    raise PassError(
        f"pass {compiler_pass.name!r} takes programs from {compiler_pass.input_stage.name} to "
        f"{compiler_pass.output_stage.name}, but {given}; {remedy}"
    )


def _check_properties(compiler_pass: Pass, program: Program, passes: Sequence[Pass]) -> None:
    traits = traits_of(compiler_pass)
    for wanted in traits.requires:
        if wanted not in program.properties:
            makers = [p.name for p in passes if wanted in traits_of(p).establishes]
            remedy = f"run {makers[0]!r} before it" if makers else f"add a pass that establishes {wanted}"
            raise PassError(f"pass {compiler_pass.name!r} takes {wanted.value} programs, but this one is not; {remedy}")
    for early in traits.precedes:
        if early in program.properties:
            is_own = early in traits.establishes
            remedy = f"leave {compiler_pass.name!r} out" if is_own else "move it to an earlier place in the pipeline"
            raise PassError(
                f"pass {compiler_pass.name!r} takes programs that are not {early.value} yet, but the program is already "
                f"{early.value}; {remedy}"
            )


def _with_properties(program: Program, before: Program, compiler_pass: Pass) -> Program:
    """The program with what has become true of it noted; passes need not do that themselves."""
    known = {*before.properties, *program.properties, *traits_of(compiler_pass).establishes}
    properties = tuple(each for each in Property if each in known)
    return program if properties == program.properties else program.evolve(properties=properties)
