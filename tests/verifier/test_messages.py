"""What the verifier says, and when it looks."""

import dataclasses
import operator
import re

import pytest
import torch
from broken_programs import (
    CAPS,
    erase,
    first,
    flat_region,
    note_as,
    read_another_variable,
    repeat,
    set_args,
    two_buckets,
)
from tiny_programs import (
    PASS_NAMES,
    SMALL_BUCKETS,
    FunctionPass,
    captured_two_layers,
    core_pipeline,
    outputs,
    run_up_to,
    targets,
)
from torch import fx

from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.value_types import value_type
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.verifier import verifier
from mirrorc.verifier.rules.updates import every_bucket_is_updated_once
from mirrorc.verifier.verifier import VerifiedGraphs, Verify, verify


def test_the_message_names_the_rule_and_says_what_it_demands() -> None:
    program = run_up_to("insert-update", two_buckets())
    erase(program.mirrored_graph, first(program.mirrored_graph, ops.update))
    with pytest.raises(VerifyError) as caught:
        verify(program)
    text = str(caught.value)
    assert (
        "the program breaks the rule every_bucket_is_updated_once of stage UPDATED\n  why:  bucket 0 is updated 0"
        in text
    )
    assert "times on cpu:0" in text and "will not run" in text
    assert " ".join(str(every_bucket_is_updated_once.__doc__).split()).removesuffix(".") in text


def refusal(program: Program, before: Program | None = None) -> tuple[str, list[str]]:
    with pytest.raises(VerifyError) as caught:
        verify(program, after="mine", before=before)
    said, _, shown = str(caught.value).partition("\n\n")
    return said, shown.split("\n") if shown else []


def note_relu_in_another_shape(graph: fx.Graph) -> None:
    node = first(graph, torch.ops.aten.relu.default)
    note_as(graph, node, lambda value: value.unsqueeze(0))


def test_the_message_shows_the_program_around_the_place() -> None:
    """Rule, node, source line and pass, and five lines of the program on either side, as they are printed."""
    program = run_up_to("plan-buckets", captured_two_layers())
    note_relu_in_another_shape(program.shard_graphs[0])
    said, shown = refusal(program)
    assert said.startswith(
        "MC4101: pass 'mine' breaks the rule values_have_their_types of every stage\n  at:   tiny_programs.py:"
    )
    assert re.search(r"tiny_programs\.py:\d+  return self\.fc2\(torch\.relu\(self\.fc1\(x\)\)\)\n", said)
    assert "  why:  fc1_relu is float32[4, 6], but is noted as float32[1, 4, 6]. The rule: " in said
    printed = [line.strip() for line in program.to_text().splitlines()]
    (place,) = (i for i, line in enumerate(shown) if line.startswith("  > "))
    assert shown[place].startswith("  > fc1_relu: f32[1, 4, 6] = aten.relu.default(fc1_addmm)")
    assert place == 2 and len(shown) == 2 + 1 + 5  # two lines come before it
    lines = [line.removeprefix("  > ").strip() for line in shown]
    assert lines == [line for line in printed if line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("pass_name", ["insert-update", "lower-devices"])
def test_at_most_eleven_lines_are_shown(pass_name: str) -> None:
    program = run_up_to(pass_name, captured_two_layers(3), **SMALL_BUCKETS)
    graph = program.graphs()[0]
    repeat(graph, targets(graph, ops.wait)[2])
    said, shown = refusal(program)
    assert "breaks the rule collectives_are_waited_for_once of stage REDUCED and later\n" in said
    assert "  why:  all_reduce of bucket " in said
    assert len(shown) == 11 and [i for i, line in enumerate(shown) if line.startswith("  > ")] == [5]
    assert "_pending: pending f32[" in shown[5] and "= all_reduce(bucket=" in shown[5]
    text = [line.partition("  # ")[0].strip() for line in program.to_text(fold=False).splitlines()]
    assert all(line.removeprefix("  > ").partition("  # ")[0].strip() in text for line in shown)


def test_a_place_in_a_region_is_shown_in_its_body() -> None:
    program = run_up_to("lower-devices", captured_two_layers())
    body = program.regions["bwd_0"].graph_module.graph
    node = first(body, torch.ops.aten.threshold_backward.default)
    note_as(body, node, lambda value: value.unsqueeze(0))
    said, shown = refusal(program)
    assert f"  why:  {node.name} is float32[4, 6], but is noted as" in said
    assert len(shown) == 11 and shown[5].startswith(f"  > {node.name}: f32[1, 4, 6] = aten.threshold_backward.default(")


@pytest.mark.slow
def test_a_region_call_is_shown_with_the_users_line() -> None:
    program, before = (run_up_to("schedule-overlap", captured_two_layers()) for _ in range(2))
    call = next(node for node in targets(program.mirrored_graph, ops.call_region) if node.kwargs["gradients"])
    value = next(n for n in call.all_input_nodes if n.target is operator.getitem)
    other = next(
        n for n in value.args[0].users if n is not value and value_type(n.meta["val"]) == value_type(value.meta["val"])
    )
    call.replace_input_with(value, other)
    said, shown = refusal(program, before)
    assert (
        "breaks the rule dataflow_is_preserved on passes\n  why:  the gradient of " in said
        and " on cpu:0 is computed in another way than before: " in said
        and re.search(r": \w+ is made of \w+, where it was of \w+", said)
    )
    assert any(line.startswith("  > cpu:0 | ") for line in shown)
    assert any("bwd_0(" in line and ", tiny_programs.py:" in line for line in shown)


def test_a_table_is_no_place_in_the_program() -> None:
    program = run_up_to("plan-buckets", two_buckets(), **CAPS)
    said, shown = refusal(program.evolve(buckets=program.buckets[:1]))
    assert "breaks the rule gradients_and_slots_match of stage CAPTURED\n  why:  the gradient of a has no slot" in said
    assert shown == []


def core_pipeline_with(compiler_pass: Pass) -> list[Pass]:
    """The core pipeline with a pass behind the one that first makes programs of its stage."""
    before = {Stage.UPDATED: "insert-update", Stage.SCHEDULED: "schedule-overlap"}[compiler_pass.input_stage]
    place = PASS_NAMES.index(before) + 1
    return [*core_pipeline()[:place], compiler_pass, *core_pipeline()[place:]]


@dataclasses.dataclass(frozen=True)
class ForgetsAnUpdate:
    name: str = "forgets-an-update"
    input_stage: Stage = Stage.UPDATED
    output_stage: Stage = Stage.UPDATED

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        erase(graph, first(graph, ops.update))
        return program.evolve(graph=graph)


@dataclasses.dataclass(frozen=True)
class ClipsGradients:
    changes_dataflow: bool
    name: str = "clip-gradients"
    input_stage: Stage = Stage.CAPTURED
    output_stage: Stage = Stage.CAPTURED

    def run(self, program: Program) -> Program:
        graph = copied(program.shard_graphs[0])
        gradients = outputs(graph)["gradients"]
        clipped = {}
        for name, gradient in gradients.items():
            with graph.inserting_before(graph.output_node()):
                clipped[name] = graph.call_function(torch.ops.aten.clamp.default, (gradient, -1.0, 1.0))
            clipped[name].meta["val"] = gradient.meta["val"]
        graph.output_node().args = ({**outputs(graph), "gradients": clipped},)
        return program.evolve(shard_graphs=(graph,))


@pytest.mark.slow
@pytest.mark.parametrize("place", [0, 1], ids=["before-planning", "after-planning"])
def test_a_pass_that_changes_the_dataflow_says_so(place: int) -> None:
    pipeline = core_pipeline()
    changed = [*pipeline[:place], ClipsGradients(changes_dataflow=True), *pipeline[place:]]
    assert run_passes(captured_two_layers(), changed, [Verify()]).stage is Stage.LOWERED
    changed[place] = ClipsGradients(changes_dataflow=False)
    with pytest.raises(VerifyError) as caught:
        run_passes(captured_two_layers(), changed, [Verify()])
    assert "pass 'clip-gradients' breaks the rule dataflow_is_preserved on passes\n  why:  the gradient of" in str(
        caught.value
    )


def test_a_pass_that_changes_the_dataflow_keeps_all_other_rules() -> None:
    class AlsoForgets(ForgetsAnUpdate):
        changes_dataflow = True

    pipeline = core_pipeline_with(AlsoForgets())
    with pytest.raises(VerifyError, match=r"every_bucket_is_updated_once"):
        run_passes(two_buckets(), pipeline, [Verify()])


@pytest.mark.parametrize("rule", ["input_programs_are_not_changed", "tables_are_preserved"])
def test_a_pass_that_changes_the_dataflow_leaves_tables_and_what_it_is_given_alone(rule: str) -> None:
    class Careless(ClipsGradients):
        def run(self, program: Program) -> Program:
            if rule == "tables_are_preserved":
                ghost = dataclasses.replace(next(iter(program.variables.values())), name="ghost")
                return program.evolve(variables={**program.variables, "ghost": ghost})
            first(program.shard_graphs[0], torch.ops.aten.relu.default).target = torch.ops.aten.tanh.default
            return program

    with pytest.raises(VerifyError, match=f"pass 'clip-gradients' breaks the rule {rule}"):
        run_passes(captured_two_layers(), [Careless(changes_dataflow=True), *core_pipeline()], [Verify()])


def test_a_message_is_made_of_nodes_that_have_no_line() -> None:
    program = run_up_to("insert-update", two_buckets())
    graph = program.mirrored_graph
    with graph.inserting_before(graph.output_node()):
        lonely = graph.call_function(ops.read, (), {"variable": "a", "replica": 0})
        stray = graph.call_function(print, (lonely,))
    lonely.meta["val"] = stray.meta["val"] = None
    said, shown = refusal(program)
    assert "every_operation_is_known" in said
    assert [line for line in shown if line.startswith("  > ") and f"{stray.name} " in line and "= print(a)" in line]


def test_a_message_of_what_was_computed_before_names_the_first_operator_that_differs() -> None:
    before = run_up_to("plan-buckets", captured_two_layers())
    graph = copied(before.shard_graphs[0])
    relu = first(graph, torch.ops.aten.relu.default)
    relu.target = torch.ops.aten.tanh.default
    said, shown = refusal(before.evolve(shard_graphs=(graph,)), before)
    assert f"computed in another way than before: {relu.name} is aten.tanh.default, where aten.relu.default was" in said
    assert [line for line in shown if line.startswith("  > ") and "aten.tanh.default" in line]


def test_a_malformed_graph_is_not_pasted_into_the_message() -> None:
    program = run_up_to("insert-update", two_buckets())
    graph = program.mirrored_graph
    late = first(graph, ops.pack)
    graph.output_node().prepend(late)
    said, shown = refusal(program)
    assert "graphs_are_well_formed" in said and "was used before it has been defined" in said and len(said) < 600
    assert any(line.startswith("  > ") for line in shown)


def test_a_missing_keyword_and_a_missing_type_are_said_with_the_remedy() -> None:
    program = run_up_to("insert-update", two_buckets())
    node = first(program.mirrored_graph, ops.update)
    node.kwargs = {"replica": 0}
    assert f"{node.name} has no keyword bucket, which update needs" in refusal(program)[0]
    program = run_up_to("insert-update", two_buckets())
    del first(program.mirrored_graph, ops.pack).meta["val"]
    assert "no type is noted: make nodes with mirrorc.ir.graph_edits.insert" in refusal(program)[0]


def test_torch_does_not_log_what_the_message_says(caplog: pytest.LogCaptureFixture) -> None:
    program = run_up_to("plan-buckets", captured_two_layers())
    node = first(program.shard_graphs[0], torch.ops.aten.mm.default)
    set_args(node, (node.args[0], node.args[0]))
    assert "cannot take these arguments" in refusal(program)[0]
    assert [record for record in caplog.records if record.levelname == "ERROR"] == []


@pytest.mark.parametrize("in_place", [True, False], ids=["in-place", "in-a-copy"])
def test_a_region_is_checked_again_when_a_pass_changes_it(in_place: bool) -> None:
    """The instrument checks a body once, as most passes leave most of them alone."""

    def flatten(program: Program) -> Program:
        if in_place:
            return flat_region(program)
        region = program.regions["bwd_0"]
        module = fx.GraphModule({}, copied(region.graph_module.graph))
        own = {**program.regions, "bwd_0": dataclasses.replace(region, graph_module=module)}
        return flat_region(program.evolve(regions=own))

    pipeline = core_pipeline_with(FunctionPass(flatten, "flattens", Stage.SCHEDULED, Stage.SCHEDULED))
    rule = "input_programs_are_not_changed" if in_place else "values_have_their_types"
    with pytest.raises(VerifyError, match=f"pass 'flattens' breaks the rule {rule}"):
        run_passes(two_buckets(), pipeline, [Verify()])


@pytest.mark.parametrize("gives_another", [True, False], ids=["another-program", "the-same-program"])
def test_a_pass_that_changes_the_graph_that_it_is_given_is_refused(gives_another: bool) -> None:
    def read_another(program: Program) -> Program:
        read_another_variable(program.mirrored_graph)
        return program.evolve() if gives_another else program

    pipeline = core_pipeline_with(FunctionPass(read_another, "reads-another", Stage.UPDATED, Stage.UPDATED))
    with pytest.raises(VerifyError, match=r"pass 'reads-another' breaks the rule input_programs_are"):
        run_passes(two_buckets(), pipeline, [Verify()])


@pytest.mark.parametrize("change", ["note", "target", "argument", "keyword", "dead"])
def test_a_change_inside_a_region_that_was_checked_is_seen(change: str) -> None:
    checked = VerifiedGraphs()
    program = run_up_to("lower-devices", captured_two_layers())
    verify(program, checked=checked)
    verify(program, checked=checked)
    body = program.regions["bwd_0"].graph_module.graph
    node = first(body, torch.ops.aten.threshold_backward.default)
    if change == "note":
        note_as(body, node, lambda value: value.double())
    elif change == "target":
        node.target = torch.ops.aten.mm.default
    elif change == "argument":
        set_args(node, (*node.args[:2], 0, 0))
    elif change == "keyword":
        node.kwargs = {"no_such": 1}
    else:
        with body.inserting_before(node):
            body.call_function(torch.ops.aten.mm.default, node.args[:1] * 2).meta["val"] = node.meta["val"]
    with pytest.raises(VerifyError, match=r"values_have_their_types"):
        verify(program, checked=checked)


@pytest.mark.parametrize("change", ["variable", "region", "bucket", "number", "replica"])
def test_a_change_of_a_table_of_a_program_that_was_checked_is_seen(change: str) -> None:
    """Also one in place, of which a program that is compared with itself would know nothing."""
    checked = VerifiedGraphs()
    whole = run_up_to("replicate", captured_two_layers())
    program = whole.evolve(variables=dict(whole.variables), regions=dict(whole.regions))
    verify(program, checked=checked)
    verify(program.with_remarks("nothing to do"), checked=checked)
    name, variable = next(iter(program.variables.items()))
    if change == "variable":
        program.variables[name] = dataclasses.replace(variable, shape=(1, *variable.shape))  # type: ignore[index]
    elif change == "region":
        del program.regions["bwd_0"]  # type: ignore[attr-defined]
    elif change == "bucket":
        program = program.evolve(buckets=())
    elif change == "number":
        program = program.evolve(num_examples=(0,) * program.num_replicas)
    else:
        program = program.evolve(devices=program.devices[:-1])
    with pytest.raises(VerifyError):
        verify(program, checked=checked)


def test_a_program_that_a_pass_has_left_as_it_was_is_not_checked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checked, found = VerifiedGraphs(), []
    program = run_up_to("lower-devices", captured_two_layers())
    monkeypatch.setattr(verifier, "_refuse_first", lambda program, violations, rule, after: found.append(rule.name))
    verify(program, before=program, checked=checked)
    assert {"every_bucket_is_updated_once", "values_have_their_types", "dataflow_is_preserved"} < set(found)
    found.clear()
    verify(program.with_remarks("nothing to do"), before=program, checked=checked)
    of_both = {
        "input_programs_are_not_changed",
        "tables_are_preserved",
        "dataflow_is_preserved",
        "meetings_of_workers_are_preserved",
    }
    assert set(found) == of_both


def test_the_instrument_verifies_after_every_pass() -> None:
    pipeline = core_pipeline_with(ForgetsAnUpdate())
    with pytest.raises(VerifyError, match=r"'forgets-an-update' breaks .* every_bucket_is_updated_once"):
        run_passes(two_buckets(), pipeline, [Verify()])
