"""Removes passes from a pipeline, and inserts others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from mirrorc.messages.problem import problem
from mirrorc.messages.wording import guess
from mirrorc.pipeline.protocol import Pass, traits_of

_LISTING = "the command `mirrorc passes` lists all that there are"


def select_passes(passes: Sequence[Pass], disabled: Sequence[str]) -> list[Pass]:
    for compiler_pass in passes:
        _check_pass("passes", compiler_pass)
    check_pass_names("disable", disabled, passes)
    return [compiler_pass for compiler_pass in passes if compiler_pass.name not in disabled]


def in_exact_order(passes: Sequence[Pass]) -> tuple[list[Pass], str]:
    """The passes that do not change bits, and a remark with the names of the others."""
    left_out = [compiler_pass.name for compiler_pass in passes if traits_of(compiler_pass).changes_bits]
    exact = [compiler_pass for compiler_pass in passes if not traits_of(compiler_pass).changes_bits]
    return exact, f"Compiler(exact_order=True) leaves out {', '.join(left_out)}" if left_out else ""


def for_evaluation(passes: Sequence[Pass]) -> list[Pass]:
    return [compiler_pass for compiler_pass in passes if not traits_of(compiler_pass).trains_only]


def for_gradients(passes: Sequence[Pass]) -> list[Pass]:
    return [compiler_pass for compiler_pass in passes if not traits_of(compiler_pass).updates_only]


def for_accumulation(passes: Sequence[Pass]) -> list[Pass]:
    return [compiler_pass for compiler_pass in for_gradients(passes) if not traits_of(compiler_pass).sums_only]


def check_pass_names(option: str, names: Sequence[str], passes: Sequence[Pass]) -> None:
    known = [compiler_pass.name for compiler_pass in passes]
    for name in names:
        if name not in known:
            raise problem(
                ValueError,
                f"MC4004: {option} names {name!r}, which is no pass of the pipeline",
                fix=guess(name, known, _LISTING),
            )


@dataclass(frozen=True)
class Placed:
    """A pass to insert beside the pass named ``anchor``."""

    compiler_pass: Pass
    anchor: str
    is_after: bool


def before(anchor: str, compiler_pass: Pass) -> Placed:
    """Places a pass before the one named ``anchor``, for ``mirrorc.compile(..., compiler=Compiler(add=[...]))``."""
    return Placed(compiler_pass, anchor, is_after=False)


def after(anchor: str, compiler_pass: Pass) -> Placed:
    """Places a pass after the one named ``anchor``, for ``mirrorc.compile(..., compiler=Compiler(add=[...]))``."""
    return Placed(compiler_pass, anchor, is_after=True)


def add_passes(passes: Sequence[Pass], additions: Sequence[Placed]) -> list[Pass]:
    """Inserts passes in order. An inserted pass may be the anchor of a later one."""
    result = list(passes)
    for placed in additions:
        if not isinstance(placed, Placed):
            raise problem(
                TypeError,
                f"MC4004: add holds {placed!r}, without a place",
                fix="add=[mirrorc.after('pack-gradients', MyPass())], or mirrorc.before",
            )
        _check_pass("add", placed.compiler_pass)
        names = [compiler_pass.name for compiler_pass in result]
        if placed.anchor not in names:
            raise problem(
                ValueError,
                f"MC4004: add places {placed.compiler_pass.name!r} next to {placed.anchor!r}, which is no pass of the pipeline",
                fix=guess(placed.anchor, names, _LISTING),
            )
        result.insert(names.index(placed.anchor) + placed.is_after, placed.compiler_pass)
    return result


def _check_pass(option: str, compiler_pass: object) -> None:
    if isinstance(compiler_pass, type) or not isinstance(compiler_pass, Pass):
        raise problem(
            TypeError,
            f"MC4004: {option} holds {compiler_pass!r}, which is no pass",
            "a pass has name, input_stage, output_stage and run(program)",
            "mirrorc.passes.PlanBuckets(), or an object of a class of your own, with parentheses",
        )
