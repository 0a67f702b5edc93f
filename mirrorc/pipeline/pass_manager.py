"""Runs passes in order."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from mirrorc.errors import MirrorcError, PassError
from mirrorc.ir.graph_edits import collector_paused
from mirrorc.ir.program import Program, Property, Remark
from mirrorc.messages.problem import has_code, problem
from mirrorc.pipeline.pass_order import check_input
from mirrorc.pipeline.protocol import Instrument, Pass, traits_of

logger = logging.getLogger(__name__)


def run_passes(program: Program, passes: Sequence[Pass], instruments: Sequence[Instrument] = ()) -> Program:
    """Applies passes in order.

    Raises:
        PassError: a pass refuses its input's stage or properties, returns a wrong stage, or fails.
    """
    with collector_paused():
        return _run_all(program, passes, instruments)


def _run_all(program: Program, passes: Sequence[Pass], instruments: Sequence[Instrument]) -> Program:
    try:
        for instrument in instruments:
            instrument.start(program)
    except Exception as error:
        _notify([instrument.refused for instrument in instruments], program, error)
        raise
    for compiler_pass in passes:
        try:
            check_input(compiler_pass, program.stage, program.properties, passes)
            started = time.perf_counter()
            after = _run(compiler_pass, program)
            seconds = time.perf_counter() - started
            for instrument in instruments:
                instrument.after_pass(compiler_pass, program, after, seconds)
        except Exception as error:
            _notify([instrument.failed for instrument in instruments], compiler_pass, program, error)
            raise
        program = after
    for instrument in instruments:
        instrument.finish(program)
    return program


def _notify(listeners: Sequence[Callable[..., None]], *news: object) -> None:
    """Only logs errors of ``listeners``, because these must not hide the first error."""
    for listener in listeners:
        try:
            listener(*news)
        except Exception as error:  # noqa: BLE001 - logged, and another is being raised
            logger.warning("what went wrong was not noted everywhere: %s: %s", type(error).__name__, error)


def _run(compiler_pass: Pass, program: Program) -> Program:
    try:
        after = compiler_pass.run(program)
    except Exception as error:
        if isinstance(error, MirrorcError) or has_code(error):
            raise
        raise problem(
            PassError,
            f"MC4001: pass {compiler_pass.name!r} failed on a {program.stage.name} program: {type(error).__name__}: {error}",
            fix=(
                "of a pass of your own, the traceback above has the line",
                "of a pass of mirrorc, report it with the output of mirrorc doctor",
            ),
        ) from error
    if not isinstance(after, Program):
        raise PassError(
            f"MC4001: pass {compiler_pass.name!r} gave a {type(after).__name__}: run() must return a Program"
        )
    if after.stage is not compiler_pass.output_stage:
        raise problem(
            PassError,
            f"MC4001: pass {compiler_pass.name!r} gave a {after.stage.name} program but promises "
            f"{compiler_pass.output_stage.name}",
            fix="set the stage with program.evolve(stage=...)",
        )
    if not isinstance(after.remarks, tuple) or not all(isinstance(remark, Remark) for remark in after.remarks):
        raise problem(
            PassError,
            f"MC4001: pass {compiler_pass.name!r} gave a program whose remarks are {after.remarks!r:.200}",
            "they must be a tuple of texts",
            "program.with_remarks('why')",
        )
    noted = _signed(_with_remark_on_bits(compiler_pass, program, after), program.remarks, compiler_pass.name)
    return _with_properties(noted, program, compiler_pass).evolve(passes=(*program.passes, compiler_pass.name))


def _with_remark_on_bits(compiler_pass: Pass, before: Program, after: Program) -> Program:
    how = traits_of(compiler_pass).changes_bits
    if not how or (before.graphs() == after.graphs() and before.regions == after.regions):
        return after
    return after.with_remarks(f"this changes bits, as {how}; Compiler(exact_order=True) leaves the pass out")


def _signed(program: Program, known: Sequence[Remark], name: str) -> Program:
    signed = tuple(r if r.by or r in known else replace(r, by=name) for r in program.remarks)
    return program if signed == program.remarks else program.evolve(remarks=signed)


def _with_properties(program: Program, before: Program, compiler_pass: Pass) -> Program:
    known = {*before.properties, *program.properties, *traits_of(compiler_pass).establishes}
    properties = tuple(each for each in Property if each in known)
    return program if properties == program.properties else program.evolve(properties=properties)
