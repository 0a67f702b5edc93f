import functools
import importlib
import inspect
import operator
import pkgutil
from collections.abc import Callable, Iterator

import pytest
from broken_programs import BAD, CAPS, read_early, two_buckets, update_early, wait_early
from mutants import Examiner
from mutations import KINDS
from mutations.places import copied_program
from mutations.programs import Source, handmade_sources
from refused_mutants import REFUSALS
from selections import slow_but
from tiny_programs import (
    MUON,
    SMALL_BUCKETS,
    Weight,
    captured_two_layers,
    core_pipeline,
    every_stage,
    handmade,
    run_up_to,
    targets,
)

from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.verifier import rules as rules_folder
from mirrorc.verifier.rules.ordering import no_device_waits_forever
from mirrorc.verifier.rules.rule import Order, Rule, Scope, Violation, rule, rules, withdraw
from mirrorc.verifier.verifier import Verify, verify

CASES = [
    pytest.param(rule, *mutation, id=f"{rule}-{i}") for rule, found in BAD.items() for i, mutation in enumerate(found)
]


RULES = {rule.name: rule for rule in rules()}
PASS_RULES = {name for name, rule in RULES.items() if rule.scope is Scope.PASS}


def kind_of(rule: Rule) -> str:
    if rule.scope is Scope.PASS:
        return "on passes"
    return f"of stage {rule.since.name}( and later)?" if rule.since is not None else "of every stage"


@functools.cache
def valid(pass_name: str) -> Program:
    program, before = (run_up_to(pass_name, two_buckets(), **CAPS) for _ in range(2))
    assert [len(bucket.slots) for bucket in program.buckets] == [2, 1]
    verify(program, before=before)
    return before


@pytest.mark.parametrize(("rule", "pass_name", "mutate"), CASES)
def test_a_program_that_breaks_a_rule_is_refused(
    rule: str, pass_name: str, mutate: Callable[[Program], Program]
) -> None:
    before = valid(pass_name)
    mutant = mutate(copied_program(before, in_regions=True))
    with pytest.raises(VerifyError, match=f"pass 'mine' breaks the rule {rule} {kind_of(RULES[rule])}\n"):
        verify(mutant, after="mine", before=before if rule in PASS_RULES else None)


@pytest.fixture(scope="module")
def examiners() -> dict[str, Examiner]:
    """By subject; filled by `examiner`."""
    return {}


@pytest.fixture(scope="module")
def sources() -> dict[str, Source]:
    return {source.name: source for source in handmade_sources((2,))}


@pytest.fixture
def examiner(subject: str, sources: dict[str, Source], examiners: dict[str, Examiner]) -> Examiner:
    if subject not in examiners:
        source = sources[subject.rpartition(" after ")[0].removesuffix(", parameters not shared")]
        examiners[subject] = Examiner(next(one for one in source.subjects() if str(one) == subject))
    return examiners[subject]


@pytest.mark.parametrize(
    ("rule", "kind", "subject", "reason"),
    [(rule, *mutant.split(" | "), "")[:4] for rule, mutants in REFUSALS.items() for mutant in mutants],
)
def test_a_mutant_is_refused_by_the_rule_that_it_breaks(
    rule: str, kind: str, subject: str, reason: str, examiner: Examiner
) -> None:
    assert any(name == rule and reason in why for name, why in examiner.refusals(KINDS[kind]))


def test_a_sum_while_backward_runs_is_allowed_and_an_update_is_not() -> None:
    program = run_up_to("schedule-overlap", two_buckets(), **CAPS)
    read_early(program.mirrored_graph)
    verify(program)
    program = run_up_to("schedule-overlap", two_buckets(), **CAPS)
    wait_early(program.mirrored_graph)
    verify(program)
    update_early(program.mirrored_graph)
    with pytest.raises(VerifyError, match="a_step_commits_once"):
        verify(program)


def test_every_rule_is_provoked() -> None:
    assert BAD.keys() | REFUSALS.keys() == set(RULES)


def test_every_rule_in_the_folder_is_registered() -> None:
    """A rule that nobody registers is never checked."""
    found = set()
    for module in pkgutil.iter_modules(rules_folder.__path__):
        own = vars(importlib.import_module(f"{rules_folder.__name__}.{module.name}"))
        found |= {name for name, value in own.items() if _is_check(value) and value.__module__.endswith(module.name)}
    assert set(RULES) == found
    assert {rule.since for rule in RULES.values() if rule.since is not None} == set(Stage), "each stage brings rules"


def _is_check(value: object) -> bool:
    if not inspect.isgeneratorfunction(value) or value.__name__.startswith("_"):
        return False
    first = next(iter(inspect.signature(value).parameters), "")
    return first in ("program", "before") and "Violation" in str(inspect.signature(value).return_annotation)


def test_rules_that_others_stand_on_are_checked_first() -> None:
    orders = [rule.order for rule in rules() if rule.scope is not Scope.PASS]
    assert orders == sorted(orders) and orders[0] is Order.FORM and orders[-1] is Order.TYPES
    assert rules()[0].name == "graphs_are_well_formed"
    assert [rule.name for rule in rules()][-2:] == ["tables_are_preserved", "dataflow_is_preserved"]
    in_the_middle = [rule.since for rule in rules() if rule.order is Order.MEANING and rule.scope is Scope.PROGRAM]
    assert in_the_middle == sorted(in_the_middle, key=int)


def test_a_rule_from_outside_is_checked_and_taken_back() -> None:
    program = run_up_to("pack-gradients", two_buckets(), **CAPS)

    @rule(since=Stage.PACKED)
    def buckets_are_small(program: Program) -> Iterator[Violation]:
        """No bucket has more than one element."""
        for graph in program.graphs():
            yield from (Violation("it is large", node) for node in targets(graph, ops.pack))

    try:
        verify(run_up_to("replicate", two_buckets(), **CAPS))
        with pytest.raises(
            VerifyError,
            match=r"the rule buckets_are_small of stage PACKED\n  why:  it is large. The rule: No bucket has more",
        ):
            verify(program)
        with pytest.raises(ValueError, match="there is a rule 'buckets_are_small' already"):
            rule(since=Stage.LOWERED)(buckets_are_small)
    finally:
        withdraw(buckets_are_small)
    verify(program)
    with pytest.raises(ValueError, match="has no docstring"):
        rule()(lambda program: iter(()))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("num_devices", slow_but([1, 3], [1, 2, 3, 4]))
def test_valid_programs_pass_at_every_stage(num_devices: int, options: dict[str, float]) -> None:
    weights = [Weight("m", (2, 2), rule=MUON), Weight("n", (300,), rule=MUON)]
    for program in (
        handmade(num_devices, buffer=True),
        handmade(num_devices, weights),
        handmade(num_devices, uneven=num_devices > 1),
        captured_two_layers(num_devices, rows=7),
    ):
        verify(program)
        for name, found in every_stage(program, **options).items():
            verify(found, after=name)
        assert found.stage is Stage.LOWERED


def test_a_program_without_buckets_drops_every_gradient() -> None:
    """So it may not go past planning, whatever passes a user leaves out."""
    pipeline = [p for p in core_pipeline() if p.name != "plan-buckets"]
    with pytest.raises(VerifyError, match=r"gradients_and_slots_match"):
        run_passes(two_buckets(), pipeline, [Verify()])


def test_a_collective_without_a_link_does_not_reach_the_runtime() -> None:
    pipeline = [p for p in core_pipeline() if p.name != "lower-collectives"]
    with pytest.raises(VerifyError):
        run_passes(two_buckets(), pipeline, [Verify()])


def test_getitems_belong_to_the_replica_of_their_source() -> None:
    graph = run_up_to("replicate", two_buckets()).mirrored_graph
    for node in graph.nodes:
        if node.target is operator.getitem:
            assert replica_of(node) == node.args[0].kwargs["replica"]


@pytest.mark.slow
def test_devices_that_wait_for_each_other_are_found() -> None:
    """One waits for bucket 0 before it launches bucket 1, the other the other way round."""
    program = run_up_to("lower-devices", two_buckets(), **CAPS)
    assert list(no_device_waits_forever(program)) == []
    for graph, bucket in zip(program.graphs(), (0, 1), strict=True):
        launches = {bucket_of(node): node for node in targets(graph, ops.all_reduce)}
        waits = {bucket_of(node): node for node in targets(graph, ops.wait)}
        one, other = launches[bucket], launches[1 - bucket]
        graph.output_node().prepend(one)
        one.append(waits[bucket])
        waits[bucket].append(other)
        other.append(waits[1 - bucket])
    (found,) = no_device_waits_forever(program)
    assert "cpu:0: b1_pending" in str(found) and "cpu:1: b1_sum" in str(found)
