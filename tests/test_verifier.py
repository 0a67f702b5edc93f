import dataclasses
import operator
from collections.abc import Callable

import pytest
import torch
from tiny_programs import (
    MUON,
    PASS_NAMES,
    SMALL_BUCKETS,
    Weight,
    captured_two_layers,
    core_pipeline,
    every_stage,
    handmade,
    outputs,
    run_up_to,
    targets,
)
from torch import fx

from mirrorc import ops
from mirrorc.errors import VerifyError
from mirrorc.pass_manager import run_passes
from mirrorc.passes import PlaceGradients, ShareParameters
from mirrorc.program import Bucket, Placement, Program, Stage, UpdateRule
from mirrorc.rules import every_bucket_is_updated_once, no_device_waits_for_ever
from mirrorc.verifier import RULES, Verify, verify

WEIGHTS = [Weight("a", (200,)), Weight("b", (200,)), Weight("c", (200,))]
Mutation = tuple[str, Callable[[Program], Program]]


def at(pass_name: str, change: Callable[[fx.Graph], None]) -> Mutation:
    """A change of the graph (of the first device's graph, once lowered) after a pass."""

    def mutate(program: Program) -> Program:
        graphs = program.graphs()
        change(graphs[0])
        return program

    return pass_name, mutate


def bucket_change(pass_name: str, change: Callable[[tuple[Bucket, ...]], tuple[Bucket, ...]]) -> Mutation:
    return pass_name, lambda program: program.evolve(buckets=change(program.buckets))


def first(graph: fx.Graph, target: object) -> fx.Node:
    return targets(graph, target)[0]


def with_kwargs(node: fx.Node, **kwargs: object) -> None:
    node.kwargs = {**node.kwargs, **kwargs}  # type: ignore[dict-item]


def use_before_definition(graph: fx.Graph) -> None:
    wait = first(graph, ops.wait)
    first(graph, ops.update).append(wait)


def use_a_gradient_twice(graph: fx.Graph) -> None:
    gradient = first(graph, ops.pack).args[0]
    with graph.inserting_before(graph.output_node()):
        graph.call_function(ops.write, (gradient,), {"variable": "a", "replica": 0})


def use_in_flight(graph: fx.Graph) -> None:
    packed = first(graph, ops.pack)
    with graph.inserting_before(graph.output_node()):
        graph.call_function(ops.write, (packed,), {"variable": "a", "replica": 0})


def erase(graph: fx.Graph, *nodes: fx.Node) -> None:
    for node in nodes:
        graph.erase_node(node)


def set_args(node: fx.Node, args: tuple[object, ...]) -> None:
    node.args = args  # type: ignore[assignment]


def move_to_end(graph: fx.Graph, *nodes: fx.Node) -> None:
    for node in nodes:
        graph.output_node().prepend(node)


def write_before_the_wait(graph: fx.Graph, replica: int) -> None:
    """A replica takes the bucket that was launched early first, while others may still run backward."""
    own = [node for node in targets(graph, ops.wait, ops.update) if node.kwargs["replica"] == replica]
    move_to_end(graph, *(node for node in own if node.kwargs["bucket"] == 1))


def sharded(change: Callable[[fx.Graph], None]) -> Mutation:
    """A change of a graph whose parameters are shared."""

    def mutate(program: Program) -> Program:
        shared = ShareParameters().run(program)
        assert targets(shared.mirrored_graph, ops.reduce_scatter)
        verify(shared)
        change(shared.mirrored_graph)
        return shared

    return "schedule-overlap", mutate


def repeat(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        graph.node_copy(node, lambda n: n)


def launch_in_another_order(graph: fx.Graph) -> None:
    one, other = targets(graph, ops.all_reduce)
    other.append(one)


def slots(change: Callable[[Bucket], Bucket]) -> Callable[[tuple[Bucket, ...]], tuple[Bucket, ...]]:
    return lambda buckets: (change(buckets[0]), *buckets[1:])


def shifted(bucket: Bucket, offset: int) -> Bucket:
    *before, last = bucket.slots
    return dataclasses.replace(bucket, slots=(*before, dataclasses.replace(last, offset=offset)))


def output_with(graph: fx.Graph, key: str, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    found = outputs(graph)
    graph.output_node().args = ({**found, key: change(found[key])},)


def drop_a_gradient(graph: fx.Graph) -> None:
    output_with(graph, "gradients", lambda gradients: {name: g for name, g in gradients.items() if name != "a"})


def placed(pass_name: str, change: Callable[[fx.Graph], None]) -> Mutation:
    """A change of a graph whose regions write their gradients into slots."""

    def mutate(_: Program) -> Program:
        program = PlaceGradients().run(run_up_to("outline-regions", two_buckets(), **CAPS))
        first_pass, last_pass = (PASS_NAMES.index(name) for name in ("replicate", pass_name))
        program = run_passes(program, core_pipeline(**CAPS)[first_pass : last_pass + 1])
        verify(program)
        change(program.graphs()[0])
        return program

    return pass_name, mutate


def exchange_slots(graph: fx.Graph) -> None:
    one, other = (next(n for n in targets(graph, ops.slot) if n.kwargs["variable"] == name) for name in ("c", "b"))
    assert one.kwargs.get("replica") == other.kwargs.get("replica")
    one.kwargs, other.kwargs = other.kwargs, one.kwargs


def exchange_gradients(graph: fx.Graph, replicas: tuple[int | None, ...] = (None,)) -> None:
    """The two gradients of bucket 0, which have one shape."""
    for replica in replicas:
        pack = next(n for n in targets(graph, ops.pack) if n.kwargs.get("replica") == replica)
        set_args(pack, pack.args[::-1])


def exchange_between_buckets(graph: fx.Graph) -> None:
    for replica in (0, 1):
        one, other = (node for node in targets(graph, ops.pack) if node.kwargs["replica"] == replica)
        theirs, (mine, *rest) = other.args, one.args
        set_args(one, (theirs[0], *rest))
        set_args(other, (mine, *theirs[1:]))
        other.prepend(one)  # what it packs is there only now


def whole(pass_name: str, change: Callable[[Program], None]) -> Mutation:
    """A change of a program of an optimizer that steps by itself."""

    def mutate(_: Program) -> Program:
        program = whole_optimizer(pass_name)
        change(program)
        return program

    return pass_name, mutate


def broadcast_from_replica_1(program: Program) -> None:
    for graph in program.graphs():
        for node in targets(graph, ops.broadcast):
            with_kwargs(node, root=1)


def broadcast_twice(program: Program) -> None:
    """Every device does, in the same order: the first wait waits for both."""
    for graph in program.graphs():
        broadcast = first(graph, ops.broadcast)
        wait = next(user for user in broadcast.users if user.target is ops.wait)
        with graph.inserting_after(wait):
            again = graph.node_copy(broadcast, lambda node: node)
        with graph.inserting_after(again):
            graph.call_function(ops.wait, (again,), dict(wait.kwargs))


def read_early(graph: fx.Graph) -> None:
    """Backward's last region reads c, of bucket 0, instead of a, which has the same shape."""
    nodes = list(graph.nodes)
    after = nodes[nodes.index(first(graph, ops.all_reduce)) :]
    regions = [node for node in after if node.target is ops.call_region or node.op == "call_module"]
    assert regions
    for region in regions:
        (c,) = (
            node
            for node in targets(graph, ops.read)
            if node.kwargs["variable"] == "c" and node.kwargs.get("replica") == region.kwargs.get("replica")
        )
        region.replace_input_with(region.all_input_nodes[0], c)


def update_before_a_region(graph: fx.Graph) -> None:
    """As soon as bucket 0 is summed, while backward goes on and reads what is in it."""
    read_early(graph)
    update_early(graph)


def update_early(graph: fx.Graph) -> None:
    launched = first(graph, ops.all_reduce)
    for node in reversed(targets(graph, ops.wait, ops.update)):
        if node.kwargs["bucket"] == 0:
            launched.append(node)


def on_every_device(pass_name: str, change: Callable[[fx.Graph], None]) -> Mutation:
    def mutate(program: Program) -> Program:
        for graph in program.graphs():
            change(graph)
        return program

    return pass_name, mutate


ONE_BUCKET = "plan-buckets"
BAD: dict[str, list[Mutation]] = {
    "graphs_are_well_formed": [
        at("insert-update", use_before_definition),
        at("lower-devices", use_before_definition),
    ],
    "slots_are_disjoint": [
        bucket_change(ONE_BUCKET, slots(lambda b: shifted(b, b.slots[0].offset + 1))),
        bucket_change(ONE_BUCKET, slots(lambda b: shifted(b, b.num_elements))),
        bucket_change(ONE_BUCKET, slots(lambda b: dataclasses.replace(b, index=7))),
        bucket_change(ONE_BUCKET, slots(lambda b: dataclasses.replace(b, dtype=torch.float64))),
        bucket_change(ONE_BUCKET, slots(lambda b: dataclasses.replace(b, rule=UpdateRule("SGD group 1", 1)))),
    ],
    "every_gradient_has_one_slot": [
        bucket_change(ONE_BUCKET, slots(lambda b: dataclasses.replace(b, slots=b.slots[:-1]))),
        bucket_change(ONE_BUCKET, lambda buckets: (*buckets, dataclasses.replace(buckets[0], index=len(buckets)))),
        at(ONE_BUCKET, drop_a_gradient),
        at("replicate", drop_a_gradient),
    ],
    "every_bucket_is_packed_once": [
        at("insert-update", lambda graph: with_kwargs(first(graph, ops.pack), bucket=1)),
        at("pack-gradients", lambda graph: with_kwargs(first(graph, ops.pack), replica=1)),
        at("pack-gradients", lambda graph: set_args(first(graph, ops.pack), first(graph, ops.pack).args[:1])),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.pack), bucket=1)),
    ],
    "every_gradient_is_packed_once": [
        at("pack-gradients", use_a_gradient_twice),
        at("insert-update", use_a_gradient_twice),
        at("pack-gradients", lambda g: set_args(first(g, ops.pack), (first(g, ops.pack).args[0],) * 2)),
    ],
    "gradients_are_in_their_own_slots": [
        *(
            change_at("pack-gradients", change)
            for change_at in (at, placed)
            for change in (
                lambda graph: exchange_gradients(graph, (0,)),
                lambda graph: exchange_gradients(graph, (0, 1)),
                exchange_between_buckets,
            )
        ),
        at("schedule-overlap", lambda graph: exchange_gradients(graph, (1,))),
        placed("lower-devices", exchange_gradients),
    ],
    "slots_are_given_for_their_gradients": [
        placed("outline-regions", exchange_slots),
        placed("pack-gradients", exchange_slots),
        placed("pack-gradients", lambda graph: with_kwargs(first(graph, ops.slot), replica=1)),
        placed("lower-devices", exchange_slots),
    ],
    "collectives_are_waited_for_once": [
        at("insert-update", lambda graph: with_kwargs(first(graph, ops.wait), replica=1)),
        at("insert-update", lambda graph: with_kwargs(first(graph, ops.wait), bucket=1)),
        at("insert-update", lambda graph: repeat(graph, first(graph, ops.wait))),
        at("insert-update", lambda graph: set_args(first(graph, ops.update), (first(graph, ops.all_reduce),))),
        at("insert-update", lambda graph: set_args(first(graph, ops.wait), (first(graph, ops.pack),))),
        at("lower-devices", lambda graph: repeat(graph, first(graph, ops.wait))),
    ],
    "buckets_in_flight_are_not_used": [
        at("insert-update", use_in_flight),
        at("lower-devices", use_in_flight),
        at(
            "insert-update",
            lambda graph: set_args(targets(graph, ops.all_reduce)[1], targets(graph, ops.all_reduce)[0].args),
        ),
    ],
    "all_replicas_take_part": [
        at("insert-update", lambda g: set_args(first(g, ops.all_reduce), first(g, ops.all_reduce).args[:1])),
        at("insert-update", lambda g: set_args(first(g, ops.all_reduce), first(g, ops.all_reduce).args[::-1])),
    ],
    "collectives_mean_what_runs": [
        at("insert-all-reduce", lambda graph: with_kwargs(first(graph, ops.all_reduce), op="avg")),
        at("schedule-overlap", lambda graph: with_kwargs(targets(graph, ops.all_reduce)[1], op="max")),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.all_reduce), op="avg")),
        sharded(lambda graph: with_kwargs(first(graph, ops.reduce_scatter), op="avg")),
        whole("insert-update", broadcast_from_replica_1),
        whole("lower-devices", broadcast_from_replica_1),
    ],
    "variables_are_written_after_reads": [
        at("schedule-overlap", update_before_a_region),
        on_every_device("lower-devices", update_before_a_region),
    ],
    "every_bucket_is_updated_once": [
        at("insert-update", lambda graph: erase(graph, first(graph, ops.update))),
        at("insert-update", lambda graph: repeat(graph, first(graph, ops.update))),
        at("lower-devices", lambda graph: erase(graph, first(graph, ops.update))),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.update), bucket=1)),
        at("insert-update", lambda g: set_args(first(g, ops.update), (targets(g, ops.update)[-1].args[0],))),
    ],
    "reductions_fit_the_placement": [
        sharded(lambda graph: setattr(first(graph, ops.reduce_scatter), "target", ops.all_reduce)),
        bucket_change("schedule-overlap", lambda b: (dataclasses.replace(b[0], placement=Placement.SHARED), b[1])),
        bucket_change("lower-devices", lambda b: (b[0], dataclasses.replace(b[1], placement=Placement.SHARED))),
    ],
    "shared_parameters_are_written_last": [
        sharded(lambda graph: move_to_end(graph, first(graph, ops.wait), first(graph, ops.update))),
        sharded(lambda graph: write_before_the_wait(graph, replica=1)),
    ],
    "every_collective_has_a_link": [
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.all_reduce), link=None)),
    ],
    "collectives_have_one_order": [
        at("lower-devices", launch_in_another_order),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.all_reduce), link="copy")),
    ],
    "no_device_waits_for_ever": [whole("lower-devices", broadcast_twice)],
}
CASES = [
    pytest.param(rule, *mutation, id=f"{rule}-{i}") for rule, found in BAD.items() for i, mutation in enumerate(found)
]


def two_buckets() -> Program:
    """Bucket 0 has two gradients of one shape, bucket 1 has one."""
    return handmade(2, WEIGHTS)


CAPS = {"first_bucket_mb": 2048 / 2**20, "bucket_cap_mb": 1024 / 2**20}


@pytest.mark.parametrize(("rule", "pass_name", "mutate"), CASES)
def test_a_program_that_breaks_a_rule_is_refused(
    rule: str, pass_name: str, mutate: Callable[[Program], Program]
) -> None:
    program = run_up_to(pass_name, two_buckets(), **CAPS)
    assert [len(bucket.slots) for bucket in program.buckets] == [2, 1]
    verify(program)
    with pytest.raises(VerifyError, match=f"pass 'mine' gave a program that breaks the rule {rule} of stage"):
        verify(mutate(program), after="mine")


def test_an_update_while_backward_reads_other_parameters_is_allowed() -> None:
    program = run_up_to("schedule-overlap", two_buckets(), **CAPS)
    read_early(program.mirrored_graph)
    verify(program)
    program = run_up_to("schedule-overlap", two_buckets(), **CAPS)
    update_early(program.mirrored_graph)
    verify(program)


def test_every_rule_is_provoked() -> None:
    assert set(BAD) == {rule.__name__ for rules in RULES.values() for rule in rules}


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


def test_the_message_names_the_rule_and_says_what_it_demands() -> None:
    program = run_up_to("insert-update", two_buckets())
    erase(program.mirrored_graph, first(program.mirrored_graph, ops.update))
    with pytest.raises(VerifyError) as caught:
        verify(program)
    text = str(caught.value)
    assert "the program breaks the rule every_bucket_is_updated_once of stage UPDATED: bucket 0 is updated 0" in text
    assert "times on cpu:0" in text and "will not run" in text
    assert str(every_bucket_is_updated_once.__doc__) in text


@dataclasses.dataclass(frozen=True)
class ForgetsAnUpdate:
    name: str = "forgets-an-update"
    input_stage: Stage = Stage.UPDATED
    output_stage: Stage = Stage.UPDATED

    def run(self, program: Program) -> Program:
        erase(program.mirrored_graph, first(program.mirrored_graph, ops.update))
        return program


def test_the_instrument_verifies_after_every_pass() -> None:
    after = PASS_NAMES.index("insert-update") + 1
    pipeline = [*core_pipeline()[:after], ForgetsAnUpdate(), *core_pipeline()[after:]]
    with pytest.raises(
        VerifyError, match=r"'forgets-an-update' gave a program that breaks .* every_bucket_is_updated_once"
    ):
        run_passes(two_buckets(), pipeline, [Verify()])


def test_a_program_without_buckets_drops_every_gradient() -> None:
    """So it may not go past planning, whatever passes a user leaves out."""
    pipeline = [p for p in core_pipeline() if p.name != "plan-buckets"]
    with pytest.raises(VerifyError, match=r"every_gradient_has_one_slot"):
        run_passes(two_buckets(), pipeline, [Verify()])


def whole_optimizer(pass_name: str = "insert-update") -> Program:
    """Two buckets that one optimizer steps by itself, of one size."""
    weights = [Weight("a", (4,), rule=MUON), Weight("b", (4,), rule=MUON)]
    program = run_up_to(pass_name, handmade(2, weights), **SMALL_BUCKETS)
    verify(program)
    return program


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
            assert ops.replica_of(node) == node.args[0].kwargs["replica"]


def test_devices_that_wait_for_each_other_are_found() -> None:
    """One waits for bucket 0 before it launches bucket 1, the other the other way round."""
    program = run_up_to("lower-devices", two_buckets(), **CAPS)
    assert list(no_device_waits_for_ever(program)) == []
    for graph, bucket in zip(program.graphs(), (0, 1), strict=True):
        launches = {ops.bucket_of(node): node for node in targets(graph, ops.all_reduce)}
        waits = {ops.bucket_of(node): node for node in targets(graph, ops.wait)}
        one, other = launches[bucket], launches[1 - bucket]
        graph.output_node().prepend(one)
        one.append(waits[bucket])
        waits[bucket].append(other)
        other.append(waits[1 - bucket])
    (found,) = no_device_waits_for_ever(program)
    assert "cpu:0: all_reduce" in found and "cpu:1: wait" in found
