"""Checks the order of passes by their declared stages and properties."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mirrorc.errors import PassError
from mirrorc.ir.program import Property, Stage
from mirrorc.messages.problem import problem
from mirrorc.pipeline.protocol import Pass, traits_of

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
