"""What a pass is, and the runner that applies passes in order."""

from __future__ import annotations

import contextlib
import gc
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from mirrorc.errors import MirrorcError, PassError
from mirrorc.ir.program import Program, Stage

logger = logging.getLogger(__name__)


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
        """Before the first pass; an exception from here stops the compilation."""

    def refused(self, program: Program, error: Exception) -> None:
        """An instrument's `start` has raised an error, which follows."""

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """After each pass; an exception from here stops the compilation."""

    def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
        """A pass cannot take the program, or it or an instrument after it has raised an error, which follows."""

    def finish(self, program: Program) -> None:
        """After the last pass."""


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
    if not isinstance(after.remarks, tuple) or not all(isinstance(remark, str) for remark in after.remarks):
        raise PassError(
            f"pass {compiler_pass.name!r} gave a program whose remarks are {after.remarks!r:.200}: they must be a tuple of "
            "texts; add one with program.evolve(remarks=(*program.remarks, 'why'))"
        )
    return after


def select_passes(passes: Sequence[Pass], disabled: Sequence[str]) -> list[Pass]:
    """The passes without those named.

    Raises:
        ValueError: a name that no pass has.
        TypeError: something that is no pass.
    """
    for compiler_pass in passes:
        _check_pass(compiler_pass)
    check_pass_names("disable_passes", disabled, passes)
    return [compiler_pass for compiler_pass in passes if compiler_pass.name not in disabled]


def check_pass_names(option: str, names: Sequence[str], passes: Sequence[Pass]) -> None:
    """Refuses names that no pass of a pipeline has.

    Raises:
        TypeError: one name is given instead of a sequence of names.
        ValueError: no pass has such a name; says which there are.
    """
    if isinstance(names, str):
        raise TypeError(f"{option} is {names!r}: give a sequence of names, such as ({names!r},)")
    known = [compiler_pass.name for compiler_pass in passes]
    for name in names:
        if name not in known:
            raise ValueError(f"{option} names {name!r}, which is no pass of the pipeline: {', '.join(known)}")


@dataclass(frozen=True)
class Placed:
    """A pass that is to be added to a pipeline; made by `before` and `after`.

    Attributes:
        compiler_pass: the pass.
        anchor: name of the pass next to which it goes.
        is_after: whether it goes after it.
    """

    compiler_pass: Pass
    anchor: str
    is_after: bool


def before(anchor: str, compiler_pass: Pass) -> Placed:
    """Places a pass before the one of this name, for ``mirrorc.compile(..., add_passes=[...])``."""
    return Placed(compiler_pass, anchor, is_after=False)


def after(anchor: str, compiler_pass: Pass) -> Placed:
    """Places a pass after the one of this name, for ``mirrorc.compile(..., add_passes=[...])``."""
    return Placed(compiler_pass, anchor, is_after=True)


def add_passes(passes: Sequence[Pass], additions: Sequence[Placed]) -> list[Pass]:
    """The passes with others put in, in the order given; one may be placed next to another that was put in before.

    Raises:
        TypeError: something is not placed, or is no pass.
        ValueError: no pass has the name of an anchor.
    """
    result = list(passes)
    for placed in additions:
        if not isinstance(placed, Placed):
            raise TypeError(
                f"add_passes holds {placed!r}: say where it goes, with mirrorc.after('pack-gradients', it) or mirrorc.before"
            )
        _check_pass(placed.compiler_pass)
        names = [compiler_pass.name for compiler_pass in result]
        if placed.anchor not in names:
            raise ValueError(
                f"add_passes places {placed.compiler_pass.name!r} next to {placed.anchor!r}, which is no pass of the pipeline: "
                f"{', '.join(names)}"
            )
        result.insert(names.index(placed.anchor) + placed.is_after, placed.compiler_pass)
    return result


def _check_pass(compiler_pass: object) -> None:
    if isinstance(compiler_pass, type) or not isinstance(compiler_pass, Pass):
        raise TypeError(f"{compiler_pass!r} is no pass: a pass has name, input_stage, output_stage and run(program)")


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
