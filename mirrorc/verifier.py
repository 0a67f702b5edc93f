"""Checks a program after every pass: which rules hold at which stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from mirrorc import rules
from mirrorc.errors import VerifyError
from mirrorc.pass_manager import Instrument, Pass
from mirrorc.program import Program, Stage

Rule = Callable[[Program], Iterator[str]]

RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.CAPTURED: (rules.graphs_are_well_formed, rules.slots_are_disjoint, rules.every_gradient_has_one_slot),
    Stage.OUTLINED: (rules.slots_are_given_for_their_gradients,),
    Stage.REPLICATED: (),
    Stage.PACKED: (
        rules.every_bucket_is_packed_once,
        rules.every_gradient_is_packed_once,
        rules.gradients_are_in_their_own_slots,
    ),
    Stage.REDUCED: (
        rules.collectives_are_waited_for_once,
        rules.buckets_in_flight_are_not_used,
        rules.all_replicas_take_part,
        rules.collectives_mean_what_runs,
    ),
    Stage.UPDATED: (rules.every_bucket_is_updated_once, rules.variables_are_written_after_reads),
    Stage.SCHEDULED: (rules.reductions_fit_the_placement, rules.shared_parameters_are_written_last),
    Stage.LOWERED: (
        rules.every_collective_has_a_link,
        rules.collectives_have_one_order,
        rules.no_device_waits_for_ever,
    ),
}
"""The rules that begin to hold at each stage; a program keeps the rules of all stages before its own."""


def verify(program: Program, *, after: str = "") -> None:
    """Checks every rule of a program's stage.

    Args:
        after: name of the pass that made the program, for the message.

    Raises:
        VerifyError: names the rule, the place and the pass.
    """
    for stage in Stage:
        if stage > program.stage:
            return
        for rule in RULES[stage]:
            broken = next(rule(program), None)
            if broken is not None:
                by = f"pass {after!r} gave a program that breaks" if after else "the program breaks"
                raise VerifyError(
                    f"{by} the rule {rule.__name__} of stage {stage.name}: {broken}. The rule: {rule.__doc__} The program "
                    "will not run; mend the pass (dump= shows the program after every pass)."
                )


class Verify(Instrument):
    """Verifies the program after every pass."""

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """Raises `VerifyError` if a rule is broken."""
        verify(after, after=compiler_pass.name)
