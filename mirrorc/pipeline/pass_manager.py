"""The runner that applies passes in order."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from mirrorc.errors import MirrorcError, PassError
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.remarks import Remark
from mirrorc.pipeline.protocol import Instrument, Pass, changes_bits

logger = logging.getLogger(__name__)


def run_passes(program: Program, passes: Sequence[Pass], instruments: Sequence[Instrument] = ()) -> Program:
    """Applies passes in order.

    Raises:
        PassError: a pass is given a program of a stage that it does not take, gives one of another stage than it
            promises, or fails.
    """
    with _collector_paused():
        return _run_all(program, passes, instruments)


@contextlib.contextmanager
def _collector_paused() -> Iterator[None]:
    """Graphs are many small objects that stay: looking for garbage among them took a third of the passes' time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


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
    """Tells instruments of an error; theirs must not hide it."""
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
    return _signed(_with_remark_on_bits(compiler_pass, program, after), program.remarks, compiler_pass.name)


def _with_remark_on_bits(compiler_pass: Pass, before: Program, after: Program) -> Program:
    """The program with a remark on how the pass has changed bits, if it has done anything."""
    how = changes_bits(compiler_pass)
    if not how or (before.graphs() == after.graphs() and before.regions == after.regions):
        return after
    return after.with_remarks(f"this changes bits, as {how}; exact_order=True leaves the pass out")


def _signed(program: Program, known: Sequence[Remark], name: str) -> Program:
    """The program with the pass's name on each remark that was not there before."""
    signed = tuple(r if r.by or r in known else replace(r, by=name) for r in program.remarks)
    return program if signed == program.remarks else program.evolve(remarks=signed)


def _check_input(compiler_pass: Pass, program: Program, passes: Sequence[Pass]) -> None:
    if compiler_pass.input_stage <= program.stage <= _latest_input_stage(compiler_pass):
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


def _latest_input_stage(compiler_pass: Pass) -> Stage:
    first, last = compiler_pass.input_stage, compiler_pass.output_stage
    default = Stage.SCHEDULED if first is Stage.UPDATED and last > first else first
    stage: Stage = getattr(compiler_pass, "latest_input_stage", default)
    return stage
