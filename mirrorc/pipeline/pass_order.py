"""Which passes may follow each other, by the stages and properties that they declare."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from mirrorc.errors import PassError
from mirrorc.ir.program import Property, Stage
from mirrorc.pipeline.protocol import Pass, traits_of


def check_input(compiler_pass: Pass, stage: Stage, properties: Collection[Property], passes: Sequence[Pass]) -> None:
    """Refuses a program that a pass does not take.

    Args:
        compiler_pass: the pass.
        stage, properties: of the program that it is given.
        passes: the pipeline, for the remedy.

    Raises:
        PassError: says what the pass takes, what it is given, and the remedy.
    """
    if compiler_pass.input_stage <= stage <= traits_of(compiler_pass).latest_input_stage:
        _check_properties(compiler_pass, properties, passes)
        return
    wanted = compiler_pass.input_stage
    makers = [p.name for p in passes if p.input_stage < p.output_stage is wanted and p is not compiler_pass]
    remedy = f"run {makers[0]!r} before it" if makers else f"add a pass that gives {wanted.name}"
    given = f"is given one at {stage.name}"
    if stage is compiler_pass.output_stage:
        given, remedy = f"the program is already {stage.name}", f"leave {compiler_pass.name!r} out"
    elif stage > wanted:
        remedy = "move it to an earlier place in the pipeline"
    raise PassError(
        f"pass {compiler_pass.name!r} takes programs from {wanted.name} to {compiler_pass.output_stage.name}, but {given}; "
        f"{remedy}"
    )


def check_order(passes: Sequence[Pass]) -> None:
    """Refuses a pipeline in which a pass would be given a program that it does not take, whatever the captured program.

    What passes declare is all that is looked at. A property that a pass requires and none declares is left to the run, as a pass
    may establish one without a word.

    Raises:
        PassError: says which pass, why, and the remedy; or that the program would not be LOWERED in the end.
    """
    stage, declared = Stage.CAPTURED, set[Property]()
    for compiler_pass in passes:
        required = {one for one in traits_of(compiler_pass).requires if not _is_declared(one, passes)}
        check_input(compiler_pass, stage, declared | required, passes)
        stage = compiler_pass.output_stage
        declared |= set(traits_of(compiler_pass).establishes)
    check_end(stage)


def check_end(stage: Stage) -> None:
    """Refuses a program that has not been compiled to the end.

    Raises:
        PassError: names its stage and the remedy.
    """
    if stage is not Stage.LOWERED:
        raise PassError(
            f"the pipeline ends with a {stage.name} program, which cannot run: it must end at LOWERED, as 'lower-devices' gives "
            "it"
        )


def _is_declared(wanted: Property, passes: Sequence[Pass]) -> bool:
    return any(wanted in traits_of(one).establishes for one in passes)


def _check_properties(compiler_pass: Pass, properties: Collection[Property], passes: Sequence[Pass]) -> None:
    traits = traits_of(compiler_pass)
    for wanted in traits.requires:
        if wanted not in properties:
            makers = [p.name for p in passes if wanted in traits_of(p).establishes]
            remedy = f"run {makers[0]!r} before it" if makers else f"add a pass that establishes {wanted}"
            raise PassError(f"pass {compiler_pass.name!r} takes {wanted.value} programs, but this one is not; {remedy}")
    for early in traits.precedes:
        if early in properties:
            is_own = early in traits.establishes
            remedy = f"leave {compiler_pass.name!r} out" if is_own else "move it to an earlier place in the pipeline"
            raise PassError(
                f"pass {compiler_pass.name!r} takes programs that are not {early.value} yet, but the program is already "
                f"{early.value}; {remedy}"
            )
