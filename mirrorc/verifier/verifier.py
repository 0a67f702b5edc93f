"""Checks a program after every pass: which rules hold at which stage."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from torch import fx

from mirrorc.errors import VerifyError
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.source_lines import source_line
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.printing.excerpt import surroundings
from mirrorc.verifier import rules
from mirrorc.verifier.checked_graphs import Checked, _all_graphs
from mirrorc.verifier.rules import Violation
from mirrorc.verifier.rules.dataflow import KnownFlows

Rule = Callable[[Program], Iterator[Violation]]
GraphRule = Callable[[Program, fx.Graph], Iterator[Violation]]
Relation = Callable[[Program, Program, KnownFlows], Iterator[Violation]]

RULES: dict[Stage, tuple[Rule, ...]] = {
    Stage.CAPTURED: (
        rules.graphs_are_those_of_the_stage,
        rules.references_lead_somewhere,
        rules.operations_have_their_arguments,
        rules.every_operation_is_known,
        rules.arguments_are_in_order,
        rules.slots_are_disjoint,
        rules.slots_fit_their_variables,
        rules.every_gradient_has_one_slot,
        rules.regions_hold_operators_alone,
        rules.regions_write_only_slots,
    ),
    Stage.OUTLINED: (rules.slots_are_given_for_their_gradients, rules.factors_are_not_variables),
    Stage.REPLICATED: (rules.results_are_each_replicas_own,),
    Stage.PACKED: (
        rules.every_bucket_is_packed_once,
        rules.every_gradient_is_packed_once,
        rules.gradients_are_in_their_own_slots,
        rules.replicas_factor_the_same_gradients,
    ),
    Stage.REDUCED: (
        rules.collectives_are_waited_for_once,
        rules.buckets_in_flight_are_not_used,
        rules.nothing_is_written_in_flight,
        rules.all_replicas_take_part,
        rules.collectives_mean_what_runs,
        rules.every_send_is_received,
        rules.links_join_their_devices,
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

LAST: tuple[Rule, ...] = (rules.replicas_meet_only_in_collectives,)
GRAPHS_FIRST: tuple[GraphRule, ...] = (rules.graphs_are_well_formed,)
GRAPHS_LAST: tuple[GraphRule, ...] = (rules.values_have_their_types,)
"""The rules of every stage, on the program and on each of its graphs, regions' bodies included: the one that the others need,
and those that are checked last, because what breaks them often breaks another, which says better what is wrong."""

RELATIONS: tuple[Callable[[Program, Program, KnownFlows], Iterator[Violation]], ...] = (
    rules.tables_are_kept,
    rules.dataflow_is_kept,
)
"""The rules on the programs before and after a pass."""


def verify(
    program: Program,
    *,
    after: str = "",
    before: Program | None = None,
    checked: Checked | None = None,
    keeps_dataflow: bool = True,
) -> None:
    """Checks every rule of a program's stage.

    Args:
        program: at any stage.
        after: name of the pass that made the program, for the message.
        before: the program that the pass was given, to check that what is computed has stayed the same.
        checked: what need not be checked again; what is in this program is added.
        keeps_dataflow: whether the pass must leave alone what is computed.

    Raises:
        VerifyError: names the rule, the node, its source line and the pass, and shows the program around it.
    """
    if checked is not None:
        checked.look_again()
        if before is not None:
            _refuse_first(
                program, _changed_in_place(before, checked), given_programs_are_not_changed, "on passes", after
            )
    bodies = [region.graph_module.graph for region in program.regions.values()]
    plain = program.graphs() if program.stage < Stage.OUTLINED else []  # what is in them depends on no table
    graphs = [] if plain else program.graphs()
    graphs += [graph for graph in (*plain, *bodies) if checked is None or not checked.has(graph)]
    for graph_rule in GRAPHS_FIRST:
        for graph in graphs:
            _refuse_first(program, graph_rule(program, graph), graph_rule, "of every stage", after)
    for stage in Stage:
        for rule in RULES[stage] if stage <= program.stage else ():
            since = f"of stage {stage.name}" + (" and later" if stage < program.stage else "")
            _refuse_first(program, rule(program), rule, since, after)
    for rule in LAST:
        _refuse_first(program, rule(program), rule, "of every stage", after)
    for graph_rule in GRAPHS_LAST:
        for graph in graphs:
            _refuse_first(program, graph_rule(program, graph), graph_rule, "of every stage", after)
    flows = checked.flows if checked is not None else KnownFlows()
    for relation in RELATIONS if before is not None else ():
        if keeps_dataflow or relation is not rules.dataflow_is_kept:
            _refuse_first(program, relation(before, program, flows), relation, "on passes", after)  # type: ignore[arg-type]
    if checked is not None:
        checked.add(program)


def given_programs_are_not_changed(program: Program) -> None:
    """A pass gives a new program and leaves the graphs of the one that it is given alone; `graph_edits.copied` copies one."""


def _changed_in_place(before: Program, checked: Checked) -> Iterator[Violation]:
    if any(checked.was_changed(graph) for graph in _all_graphs(before)):
        yield Violation(
            "a graph of the program that the pass was given is no longer as it was, nor is it where it is saved"
        )


def _refuse_first(
    program: Program, violations: Iterator[Violation], rule: Callable[..., object], kind: str, after: str
) -> None:
    try:
        violation = next(violations, None)
    except (LookupError, TypeError, AttributeError, ValueError, AssertionError, StopIteration, RecursionError) as error:
        violation = Violation(f"it cannot be checked, as the program is malformed ({type(error).__name__}: {error})")
    if violation is None:
        return
    by = f"pass {after!r} gave a program that breaks" if after else "the program breaks"
    line = source_line(violation.node) if violation.node is not None else ""
    at = f" (at {line})" if line else ""
    raise VerifyError(
        f"{by} the rule {rule.__name__} {kind}: {violation}{at}. The rule: {_statement(rule)} The program "
        f"will not run; mend the pass (dump= shows the program after every pass).{surroundings(program, violation.node)}"
    )


def _statement(rule: Callable[..., object]) -> str:
    return " ".join((rule.__doc__ or "").partition("\n\n")[0].split())


class Verify(Instrument):
    """Verifies the captured program, and the program after every pass."""

    def __init__(self) -> None:
        self._checked = Checked()

    def start(self, program: Program) -> None:
        """Raises `VerifyError` if the program given to the first pass breaks a rule."""
        verify(program, checked=self._checked)

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """Raises `VerifyError` if a rule is broken."""
        keeps_dataflow = not getattr(compiler_pass, "changes_dataflow", False)
        verify(after, after=compiler_pass.name, before=before, checked=self._checked, keeps_dataflow=keeps_dataflow)
