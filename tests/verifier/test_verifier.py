import inspect
import operator
from collections.abc import Callable

import pytest
from broken_programs import BAD, CAPS, first, read_early, two_buckets, update_early, whole_optimizer
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
from mirrorc.verifier.rules import no_device_waits_for_ever
from mirrorc.verifier.verifier import GRAPHS_FIRST, GRAPHS_LAST, LAST, RELATIONS, RULES, Verify, rules, verify

CASES = [
    pytest.param(rule, *mutation, id=f"{rule}-{i}") for rule, found in BAD.items() for i, mutation in enumerate(found)
]


KINDS = {
    **{rule.__name__: f"of stage {stage.name}( and later)?" for stage, found in RULES.items() for rule in found},
    **{rule.__name__: "of every stage" for rule in (*LAST, *GRAPHS_FIRST, *GRAPHS_LAST)},
    **{rule.__name__: "on passes" for rule in RELATIONS},
}
RELATION_NAMES = {rule.__name__ for rule in RELATIONS}


@pytest.mark.parametrize(("rule", "pass_name", "mutate"), CASES)
def test_a_program_that_breaks_a_rule_is_refused(
    rule: str, pass_name: str, mutate: Callable[[Program], Program]
) -> None:
    program, before = (run_up_to(pass_name, two_buckets(), **CAPS) for _ in range(2))
    assert [len(bucket.slots) for bucket in program.buckets] == [2, 1]
    verify(program, before=before)
    mutant = mutate(program)
    with pytest.raises(VerifyError, match=f"pass 'mine' gave a program that breaks the rule {rule} {KINDS[rule]}:"):
        verify(mutant, after="mine", before=before if rule in RELATION_NAMES else None)


def test_an_update_while_backward_reads_other_parameters_is_allowed() -> None:
    program = run_up_to("schedule-overlap", two_buckets(), **CAPS)
    read_early(program.mirrored_graph)
    verify(program)
    program = run_up_to("schedule-overlap", two_buckets(), **CAPS)
    update_early(program.mirrored_graph)
    verify(program)


def test_every_rule_is_provoked() -> None:
    lists = [*RULES.values(), LAST, GRAPHS_FIRST, GRAPHS_LAST, RELATIONS]
    assert set(BAD) == {rule.__name__ for found in lists for rule in found} and all(BAD.values())
    assert len(KINDS) == sum(map(len, lists))


def test_every_rule_is_in_a_list() -> None:
    """A rule that nobody lists is never checked."""
    assert set(KINDS) == {name for name in rules.__all__ if inspect.isgeneratorfunction(getattr(rules, name))}
    assert all(inspect.getdoc(getattr(rules, name)) for name in KINDS)


def test_every_stage_has_its_list_of_rules() -> None:
    assert list(RULES) == list(Stage)


@pytest.mark.parametrize("options", [{}, SMALL_BUCKETS], ids=["one-bucket", "many-buckets"])
@pytest.mark.parametrize("num_devices", [1, 2, 3, 4])
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
    with pytest.raises(VerifyError, match=r"every_gradient_has_one_slot"):
        run_passes(two_buckets(), pipeline, [Verify()])


def test_an_optimizer_that_is_given_buckets_in_another_order_is_refused() -> None:
    program = whole_optimizer()
    step = first(program.mirrored_graph, ops.step_optimizer)
    step.args = step.args[::-1]
    with pytest.raises(VerifyError):
        verify(program)


def test_parameters_stored_into_another_bucket_are_refused() -> None:
    program = whole_optimizer()
    one, other = targets(program.mirrored_graph, ops.store)
    one.args, other.args = other.args, one.args
    with pytest.raises(VerifyError):
        verify(program)


def test_a_collective_without_a_link_does_not_reach_the_runtime() -> None:
    pipeline = [p for p in core_pipeline() if p.name != "lower-collectives"]
    with pytest.raises(VerifyError):
        run_passes(two_buckets(), pipeline, [Verify()])


def test_getitems_belong_to_the_replica_of_their_source() -> None:
    graph = run_up_to("replicate", two_buckets()).mirrored_graph
    for node in graph.nodes:
        if node.target is operator.getitem:
            assert replica_of(node) == node.args[0].kwargs["replica"]


def test_devices_that_wait_for_each_other_are_found() -> None:
    """One waits for bucket 0 before it launches bucket 1, the other the other way round."""
    program = run_up_to("lower-devices", two_buckets(), **CAPS)
    assert list(no_device_waits_for_ever(program)) == []
    for graph, bucket in zip(program.graphs(), (0, 1), strict=True):
        launches = {bucket_of(node): node for node in targets(graph, ops.all_reduce)}
        waits = {bucket_of(node): node for node in targets(graph, ops.wait)}
        one, other = launches[bucket], launches[1 - bucket]
        graph.output_node().prepend(one)
        one.append(waits[bucket])
        waits[bucket].append(other)
        other.append(waits[1 - bucket])
    (found,) = no_device_waits_for_ever(program)
    assert "cpu:0: b1_pending" in str(found) and "cpu:1: b1_sum" in str(found)
