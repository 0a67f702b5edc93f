"""Runs passes in order, and checks the order by their declared stages and properties."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import replace

from mirrorc.errors import MirrorcError, PassError
from mirrorc.ir.graph_edits import collector_paused
from mirrorc.ir.program import Program, Property, Remark, Stage
from mirrorc.messages.problem import has_code, problem
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


_EARLIER = "move it to an earlier place, in passes= or by mirrorc.before(...)"


def check_input(compiler_pass: Pass, stage: Stage, properties: Collection[Property], passes: Sequence[Pass]) -> None:
    """Raises `PassError` if the pass does not accept this stage and these properties."""
    if compiler_pass.input_stage <= stage <= traits_of(compiler_pass).latest_input_stage:
        _check_properties(compiler_pass, properties, passes)
        return
    wanted = compiler_pass.input_stage
    makers = [p.name for p in passes if p.input_stage < p.output_stage is wanted and p is not compiler_pass]
    remedy = f"run {makers[0]!r} before it" if makers else f"add a pass that gives {wanted.name}"
    actual = f"is given one at {stage.name}"
    if stage is compiler_pass.output_stage:
        actual, remedy = f"the program is already {stage.name}", f"leave {compiler_pass.name!r} out"
    elif stage > wanted:
        remedy = _EARLIER
    raise problem(
        PassError,
        f"MC4002: pass {compiler_pass.name!r} takes programs from {wanted.name} to "
        f"{compiler_pass.output_stage.name}, but {actual}",
        fix=remedy,
    )


def check_order(passes: Sequence[Pass]) -> None:
    """Raises `PassError` if a pass would refuse its input, or the last stage is not LOWERED.

    A required property that no pass declares is checked only when the pipeline runs.
    """
    stage, declared = Stage.CAPTURED, set[Property]()
    for compiler_pass in passes:
        undeclared = {required for required in traits_of(compiler_pass).requires if not _is_declared(required, passes)}
        check_input(compiler_pass, stage, declared | undeclared, passes)
        stage = compiler_pass.output_stage
        declared |= set(traits_of(compiler_pass).establishes)
    check_end(stage)


def check_end(stage: Stage) -> None:
    """Raises `PassError` unless the last stage is LOWERED."""
    if stage is not Stage.LOWERED:
        raise problem(
            PassError,
            f"MC4002: the pipeline ends with a {stage.name} program, which cannot run",
            "it must end at LOWERED",
            "mirrorc.passes.LowerDevices() at its end",
        )


def _is_declared(wanted: Property, passes: Sequence[Pass]) -> bool:
    return any(wanted in traits_of(compiler_pass).establishes for compiler_pass in passes)


def _check_properties(compiler_pass: Pass, properties: Collection[Property], passes: Sequence[Pass]) -> None:
    traits = traits_of(compiler_pass)
    for wanted in traits.requires:
        if wanted not in properties:
            makers = [p.name for p in passes if wanted in traits_of(p).establishes]
            remedy = f"run {makers[0]!r} before it" if makers else f"add a pass that establishes {wanted}"
            raise problem(
                PassError,
                f"MC4002: pass {compiler_pass.name!r} takes {wanted.value} programs, but this one is not",
                fix=remedy,
            )
    for early in traits.precedes:
        if early in properties:
            is_establisher = early in traits.establishes
            remedy = f"leave {compiler_pass.name!r} out" if is_establisher else _EARLIER
            raise problem(
                PassError,
                f"MC4002: pass {compiler_pass.name!r} takes programs that are not {early.value} yet",
                "this one is already",
                remedy,
            )
