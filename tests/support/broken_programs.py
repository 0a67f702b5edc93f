"""Valid programs that are broken in a way that is no kind of `mutations`, by the rule that is to refuse them."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from broken_meetings import (
    attend_besides,
    attend_twice,
    behind_other_rows,
    meeting,
    stages_of_worker,
    stay_away,
    wait_for_workers_before_a_meeting,
)
from module_programs import Noisy, cut_module, stages
from tiny_programs import (
    MUON,
    PASS_NAMES,
    SMALL_BUCKETS,
    Weight,
    captured_model,
    captured_two_layers,
    core_pipeline,
    every_stage,
    handmade,
    outputs,
    run_up_to,
    targets,
)
from torch import fx, nn

from mirrorc.analysis.buckets.slots_of_values import gradient_of
from mirrorc.capture.eager.autograd_front_end import AutogradFrontEnd
from mirrorc.compression import TopK
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import region_calls, region_of
from mirrorc.ir.program import Accumulation, ArgumentKind, Program, placeholders_of
from mirrorc.ir.workers import Workers, World
from mirrorc.packing import ByBytes, EqualPacks
from mirrorc.passes import CheckFinite, PlaceGradients, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.user.optimizer_groups import gradient_rule
from mirrorc.verifier.verifier import verify

WEIGHTS = [Weight("a", (200,)), Weight("b", (200,)), Weight("c", (200,))]
Mutation = tuple[str, Callable[[Program], Program]]


def two_buckets() -> Program:
    """Bucket 0 has two gradients of one shape, bucket 1 has one."""
    return handmade(2, WEIGHTS)


def symbolic_program() -> Program:
    """The examples of a batch are counted by symbols."""
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    return captured_model(model, symbolic=(frozenset({0}), frozenset({0})))


def without_sizes(program: Program) -> Program:
    return program.evolve(arguments=tuple(a for a in program.arguments if a.kind is not ArgumentKind.SIZE))


def with_raw_symbol(program: Program) -> Program:
    graph = program.shard_graphs[0]
    size = next(n for n in graph.find_nodes(op="placeholder") if not isinstance(n.meta["val"], torch.Tensor))
    node = next(n for n in graph.nodes if n.op == "call_function" and n.args)
    node.kwargs = {**node.kwargs, "size": size.meta["val"]}
    return program


def with_untold_region(program: Program) -> Program:
    for name, region in program.regions.items():
        body = region.graph_module.graph
        places = list(body.find_nodes(op="placeholder"))
        idle = [node for node in places if not node.users and not isinstance(node.meta["val"], torch.Tensor)]
        if idle:
            call = next(n for n in region_calls(program.shard_graphs[0]) if region_of(n) == name)
            place = places.index(idle[0])
            call.args = (*call.args[:place], *call.args[place + 1 :])
            body.erase_node(idle[0])
            return program
    raise AssertionError("some region has a size that it reads in types alone")


CAPS = {"buckets": ByBytes(2048 / 2**20, 2048 / 2**20)}
WORKER_1 = World(3, (1, 2, 1)).worker(1)


def whole_optimizer(pass_name: str = "insert-update") -> Program:
    weights = [Weight("a", (4,), rule=MUON), Weight("b", (4,), rule=MUON)]
    program = run_up_to(pass_name, handmade(2, weights), **SMALL_BUCKETS)
    verify(program)
    return program


def changing(
    make: Callable[[Program], Program], change: Callable[[Program], object], pass_name: str = "lower-devices"
) -> Mutation:
    """A change of another valid program, made from that of a pass; the change may return a new one."""

    def mutate(given: Program) -> Program:
        program = make(given)
        verify(program)
        changed = change(program)
        return changed if isinstance(changed, Program) else program

    return pass_name, mutate


def on_first_graph(change: Callable[[fx.Graph], object]) -> Callable[[Program], Program]:
    def change_first(program: Program) -> Program:
        change(program.graphs()[0])
        return program

    return change_first


def on_all_devices(change: Callable[[fx.Graph], object]) -> Callable[[Program], Program]:
    def change_all(program: Program) -> Program:
        for graph in program.graphs():
            change(graph)
        return program

    return change_all


def at(pass_name: str, change: Callable[[fx.Graph], object]) -> Mutation:
    return pass_name, on_first_graph(change)


def first(graph: fx.Graph, target: object) -> fx.Node:
    return targets(graph, target)[0]


def with_kwargs(node: fx.Node, **kwargs: object) -> None:
    node.kwargs = {**node.kwargs, **kwargs}  # type: ignore[dict-item]


def erase(graph: fx.Graph, *nodes: fx.Node) -> None:
    for node in nodes:
        graph.erase_node(node)


def set_args(node: fx.Node, args: tuple[object, ...]) -> None:
    node.args = args  # type: ignore[assignment]


def over_workers(
    change: Callable[[Program], object],
    pass_name: str = "lower-devices",
    weights: Sequence[Weight] = WEIGHTS,
    workers: Workers = WORKER_1,
    **options: Any,
) -> Mutation:
    """A change of worker 1's program, which has two of the devices of three workers."""
    options = {"over_workers": True, **CAPS, **options}
    return changing(lambda _: every_stage(handmade(2, weights).evolve(workers=workers), **options)[pass_name], change)


def cut(change: Callable[[Program], object], pass_name: str = "lower-devices", **options: Any) -> Mutation:
    """A change of a program with one bucket of three gradients, which is cut into two packs: the second gradient lies in both."""

    def make(_: Program) -> Program:
        captured = handmade(2, WEIGHTS)
        if options.get("over_workers"):
            captured = captured.evolve(workers=WORKER_1)
        program = every_stage(captured, buckets=EqualPacks(2), **options)[pass_name]
        assert [len(bucket.packs) for bucket in program.buckets] == [2]
        return program

    return changing(make, change)


def cut_at(change: Callable[[fx.Graph], object], pass_name: str = "lower-devices", **options: Any) -> Mutation:
    return cut(on_first_graph(change), pass_name, **options)


def unpack_in_another_order(graph: fx.Graph) -> None:
    unpack = first(graph, ops.unpack)
    set_args(unpack, unpack.args[::-1])


def compressed(change: Callable[[fx.Graph], object], pass_name: str = "lower-devices", **options: Any) -> Mutation:
    """As `over_workers`, on all devices of a program whose workers send sums in bfloat16."""
    return over_workers(on_all_devices(change), pass_name, compression="bfloat16", **options)


def sent_in_part(change: Callable[[fx.Graph], object], pass_name: str = "lower-devices") -> Mutation:
    """As `over_workers`, on all devices of a program whose workers send a part of each sum."""
    return over_workers(on_all_devices(change), pass_name, compression=TopK(0.1))


def sending(
    change: Callable[[Program], object], pass_name: str = "lower-devices", *, is_dealt: bool = False
) -> Mutation:
    """A change of worker 1's program, which has two devices and sends the factors of two gradients to worker 0.

    With ``is_dealt``, each of them updates a part of every bucket.
    """
    workers = replace(World(2, 2).worker(1), sent_as_factors=("0.weight", "2.weight"), shards_optimizer=is_dealt)
    options: dict[str, Any] = {"over_workers": True, "shard_optimizer": is_dealt, **SMALL_BUCKETS}

    def make(_: Program) -> Program:
        model = nn.Sequential(nn.Linear(4, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))
        return every_stage(captured_model(model).evolve(workers=workers), **options)[pass_name]

    return changing(make, change)


def of_module(change: Callable[[Program], object], pass_name: str = "", *, is_backward: bool = False) -> Mutation:
    """A change of a program of forward, or of backward, of a module; without ``pass_name``, of the one that is cut."""

    def make(_: Program) -> Program:
        both = cut_module(Noisy(), torch.randn(5, 4), 2)
        program = both.backward if is_backward else both.forward
        made = (one for one in stages(program) if one.passes[-1:] == (pass_name,)) if pass_name else iter([program])
        return next(made)

    return changing(make, change)


def keep_of_training(graph: fx.Graph) -> None:
    loss: Any = graph.output_node().args[0]
    with graph.inserting_after(loss):
        graph.call_function(ops.keep, (loss,), {"number": 0}).meta["val"] = None


def exchange_inputs(one: fx.Node, other: fx.Node) -> None:
    one.args, other.args = other.args, one.args


def ignore_an_output(graph: fx.Graph) -> None:
    """Backward begins with one output's gradient alone."""
    one = next(node for node in graph.nodes if str(node.kwargs.get("name", node.target)) == "d_outputs_1")
    weight = next(node for node in graph.nodes if str(node.kwargs.get("name", node.target)) == "loss_weight")
    one.replace_all_uses_with(weight)


def insert_clone(value: fx.Node) -> fx.Node:
    with value.graph.inserting_after(value):
        copy = value.graph.call_function(torch.ops.aten.clone.default, (value,))
    copy.meta.update(value.meta)
    return copy


def send_a_copy(graph: fx.Graph) -> None:
    launch = first(graph, ops.gather_factors)
    set_args(launch, (insert_clone(launch.all_input_nodes[0]),))


class LooksUp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer = nn.Embedding(300, 5, sparse=True), nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.table((x.abs() * 5).long() % 300).sum(1))


def up_to(pass_name: str, captured: Program, *, left_out: str = "", **instead: Pass) -> Program:
    """The program after this pass of the default pipeline, in which some are left out or are others."""
    passes = [instead.get(own.name.replace("-", "_"), own) for own in default_pipeline() if own.name != left_out]
    return run_passes(captured, passes[: [own.name for own in passes].index(pass_name) + 1])


def gathering(change: Callable[[Program], object], pass_name: str = "lower-devices") -> Mutation:
    """A change of a program whose two devices gather rows of a table, and the factors of another gradient."""

    def make(_: Program) -> Program:
        captured = captured_model(LooksUp()).evolve(gathered=("layer.weight",))
        return up_to(pass_name, captured, left_out="share-parameters")

    return changing(make, change)


def plain(change: Callable[[Program], object], pass_name: str = "lower-devices") -> Mutation:
    """A change of a program whose backward runs as plain PyTorch."""

    def make(_: Program) -> Program:
        model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
        return up_to(pass_name, captured_model(model, front_end=AutogradFrontEnd()))

    return changing(make, change)


def with_update_rules(program: Program, **changes: object) -> Program:
    variables = {
        name: replace(variable, update=replace(variable.update, **changes)) if variable.update is not None else variable
        for name, variable in program.variables.items()
    }
    return program.evolve(variables=variables)


def leave_out(is_left_out: bool, program: Program) -> Program:
    program = with_update_rules(program, may_be_unused=is_left_out)
    return plan_otherwise(lambda bucket: replace(bucket, rule=replace(bucket.rule, may_be_unused=is_left_out)))(program)


def gather_a_copy(graph: fx.Graph) -> None:
    launch = first(graph, ops.all_gather)
    packed = launch.all_input_nodes[0]
    launch.replace_input_with(packed, insert_clone(packed))


def pack_a_whole_gradient(table: bool, graph: fx.Graph) -> None:
    gradient = first(graph, ops.index_add if table else ops.product)
    made = insert_clone(gradient)
    pack = next(node for node in gradient.users if node is not made)
    pack.replace_input_with(gradient, made)


def send_rows(graph: fx.Graph) -> None:
    packed = next(node for node in targets(graph, ops.pack) if "table" in str(node.args))
    with graph.inserting_after(packed):
        doubled = graph.call_function(torch.ops.aten.add.Tensor, (packed, packed))
    doubled.meta.update(packed.meta)


def add_up_rows(graph: fx.Graph) -> None:
    next(
        node for node in targets(graph, ops.all_gather) if "table" in str(node.all_input_nodes[0].args)
    ).target = ops.all_reduce


def take_rows_by_another_sum(graph: fx.Graph) -> None:
    for rows in targets(graph, ops.updated_rows):
        new, gradient = rows.all_input_nodes
        set_args(rows, (new, insert_clone(gradient)))


def plan_otherwise(change: Callable[[Bucket], Bucket]) -> Callable[[Program], Program]:
    return lambda program: program.evolve(buckets=tuple(map(change, program.buckets)))


def repeat(graph: fx.Graph, node: fx.Node) -> None:
    with graph.inserting_after(node):
        graph.node_copy(node, lambda n: n)


def output_with(graph: fx.Graph, key: str, change: Callable[[dict[str, object]], dict[str, object]]) -> None:
    found = outputs(graph)
    graph.output_node().args = ({**found, key: change(found[key])},)


def drop_a_gradient(graph: fx.Graph) -> None:
    output_with(graph, "gradients", lambda gradients: {name: g for name, g in gradients.items() if name != "a"})


def evaluation(*, keeps_loss: bool = False, keeps_rules: bool = False) -> Program:
    """A program of forward alone, with a loss that is returned, or with rules of an optimizer."""
    program = two_buckets()
    (graph,) = program.shard_graphs
    output_with(graph, "gradients", lambda gradients: {})
    if not keeps_loss:
        output_with(graph, "loss", lambda loss: None)  # type: ignore[arg-type, return-value]
    for node in reversed(list(graph.nodes)):
        if node.op == "call_function" and not node.users:
            graph.erase_node(node)
    (weight,) = placeholders_of(graph, program.arguments, ArgumentKind.LOSS_WEIGHT)
    graph.erase_node(weight)
    variables = {name: replace(one, update=None) for name, one in program.variables.items()}
    return program.evolve(
        arguments=tuple(one for one in program.arguments if one.kind is not ArgumentKind.LOSS_WEIGHT),
        variables=program.variables if keeps_rules else variables,
    )


def microbatched(pass_name: str, change: Callable[[Program], Program]) -> Mutation:
    def make(_: Program) -> Program:
        return every_stage(captured_two_layers(2, 8, 2), microbatches=2, **SMALL_BUCKETS)[pass_name]

    return changing(make, change, "pack-gradients")


def factored(change: Callable[[tuple[Any, ...]], tuple[Any, ...]]) -> Mutation:
    """A change of a factored gradient's operands, on two devices, each of which runs two microbatches."""

    def make(_: Program) -> Program:
        captured = captured_model(nn.Linear(40, 30), 2, 8, columns=40, microbatches=2)
        return every_stage(captured, microbatches=2, min_factored_elements=0)["lower-devices"]

    def change_operands(graph: fx.Graph) -> None:
        product = first(graph, ops.product)
        set_args(product, change(product.args))

    return changing(make, on_first_graph(change_operands), "pack-gradients")


def return_an_earlier_gradient(graph: fx.Graph) -> None:
    call = next(node for node in targets(graph, ops.call_region) if node.kwargs["region"] == "bwd_0")
    output_with(graph, "writes", lambda writes: {**writes, "stat": next(filter(gradient_of, call.users))})


def placed(pass_name: str, change: Callable[[fx.Graph], object]) -> Mutation:
    def make(_: Program) -> Program:
        program = PlaceGradients().run(run_up_to("outline-regions", two_buckets(), **CAPS))
        first_pass, last_pass = (PASS_NAMES.index(name) for name in ("replicate", pass_name))
        return run_passes(program, core_pipeline(**CAPS)[first_pass : last_pass + 1])

    return changing(make, on_first_graph(change), pass_name)


def whole(pass_name: str, change: Callable[[Program], object]) -> Mutation:
    return changing(lambda _: whole_optimizer(pass_name), change, pass_name)


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


def wait_early(graph: fx.Graph, *operations: object) -> None:
    launched = first(graph, ops.all_reduce)
    for node in reversed(targets(graph, *(operations or (ops.wait,)))):
        if node.kwargs["bucket"] == 0:
            launched.append(node)


def update_early(graph: fx.Graph) -> None:
    wait_early(graph, ops.wait, ops.update)


def step_once_more(program: Program) -> None:
    graph = program.graphs()[0]
    with graph.inserting_before(graph.output_node()):
        graph.node_copy(first(graph, ops.step_optimizer), lambda node: node)


def note_as(graph: fx.Graph, node: fx.Node, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    value = node.meta["val"]
    with value.fake_mode:
        node.meta = {**node.meta, "val": change(value)}


def flat_region(program: Program) -> Program:
    """Region bwd_0 gives its gradient in another shape; its callers do not know."""
    graph = program.regions["bwd_0"].graph_module.graph
    output = graph.output_node()
    result = output.args[0][0]
    with graph.inserting_before(output):
        flat = graph.call_function(torch.ops.aten.unsqueeze.default, (result, 0))
    flat.meta["val"] = result.meta["val"].unsqueeze(0)
    output.args = ((flat, *output.args[0][1:]),)
    return program


def read_another_variable(graph: fx.Graph) -> None:
    read = next(n for n in targets(graph, ops.read) if n.kwargs["variable"] == "b")
    with_kwargs(read, variable="c")


def multiply_a_variable(graph: fx.Graph) -> None:
    read = first(graph, ops.read)
    with graph.inserting_before(graph.output_node()):
        product = graph.call_function(ops.product, (read, read), {"bucket": 0, "variable": "a"})
    product.meta["val"] = read.meta["val"]


def factor_on_one_replica(graph: fx.Graph) -> None:
    packed = first(graph, ops.pack)
    gradient = packed.args[0]
    with graph.inserting_before(packed):
        tags = {**packed.kwargs, "variable": next(iter(gradient.args[0].kwargs["gradients"]))}
        product = graph.call_function(ops.product, (gradient, gradient), tags)
    product.meta["val"] = gradient.meta["val"]
    packed.replace_input_with(gradient, product)


def call_from_a_region(program: Program) -> Program:
    body = program.regions["fwd_0"].graph_module.graph
    with body.inserting_before(body.output_node()):
        body.call_function(ops.call_region, (), {"region": "fwd_0", "gradients": {}})
    return program


ONE_BUCKET = "plan-buckets"


def checked(change: Callable[[fx.Graph], object]) -> Mutation:
    return changing(CheckFinite().run, on_first_graph(change), "schedule-overlap")


def use_the_truth_elsewhere(graph: fx.Graph) -> None:
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(torch.ops.aten.logical_not.default, (first(graph, ops.is_finite),))
    node.meta["val"] = first(graph, ops.is_finite).meta["val"]


def leaving_gradients(change: Callable[[fx.Graph], object]) -> Mutation:
    def make(_: Program) -> Program:
        rule = gradient_rule(is_sparse=False, may_be_unused=False)
        weights = [replace(weight, rule=rule) for weight in WEIGHTS]
        program = handmade(2, weights).evolve(accumulation=Accumulation.GRADIENTS)
        return run_up_to("insert-update", program, **CAPS)

    return changing(make, on_first_graph(change), "insert-update")


BAD: dict[str, list[Mutation]] = {
    "packs_keep_their_order": [cut_at(unpack_in_another_order, "insert-all-reduce")],
    "a_checked_step_misses_nothing": [checked(use_the_truth_elsewhere)],
    "gradients_are_left_once": [leaving_gradients(lambda graph: with_kwargs(first(graph, ops.add_to_grad), replica=1))],
    "sizes_are_arguments": [
        (ONE_BUCKET, lambda _: without_sizes(symbolic_program())),
        (ONE_BUCKET, lambda _: with_raw_symbol(symbolic_program())),
    ],
    "regions_take_their_sizes": [
        ("outline-regions", lambda _: with_untold_region(run_up_to("outline-regions", symbolic_program())))
    ],
    "values_are_kept_alike": [
        *(
            of_module(on_first_graph(lambda graph: erase(graph, targets(graph, ops.keep)[-1])), pass_name)
            for pass_name in ("", "replicate", "lower-devices")
        ),
        of_module(on_first_graph(lambda graph: exchange_inputs(*targets(graph, ops.keep)[:2])), "lower-devices"),
        ("lower-devices", on_all_devices(keep_of_training)),
    ],
    "gradients_of_outputs_are_used": [
        of_module(on_first_graph(ignore_an_output), pass_name, is_backward=True)
        for pass_name in ("", "replicate", "lower-devices")
    ],
    "nothing_is_written_in_flight": [
        whole(pass_name, step_once_more) for pass_name in ("lower-collectives", "lower-devices")
    ],
    "replicas_factor_the_same_gradients": [at("pack-gradients", factor_on_one_replica)],
    "factors_are_not_variables": [at("outline-regions", multiply_a_variable)],
    "regions_hold_operators_alone": [
        *((pass_name, call_from_a_region) for pass_name in ("outline-regions", "lower-devices"))
    ],
    "some_replica_has_examples": [(ONE_BUCKET, lambda program: program.evolve(num_examples=(0, 0)))],
    "losses_are_for_training": [
        (ONE_BUCKET, lambda _: evaluation(keeps_loss=True)),
        (ONE_BUCKET, lambda _: evaluation(keeps_rules=True)),
        (ONE_BUCKET, lambda program: evaluation().evolve(buckets=program.buckets)),
    ],
    "gradients_and_slots_match": [at(pass_name, drop_a_gradient) for pass_name in (ONE_BUCKET, "replicate")],
    "slots_are_for_their_gradients": [
        placed("pack-gradients", lambda graph: with_kwargs(first(graph, ops.slot), replica=1))
    ],
    "replicas_meet_only_in_collectives": [
        at("replicate", lambda graph: with_kwargs(first(graph, ops.read), replica=2))
    ],
    "microbatches_make_up_the_shards": [
        microbatched("place-gradients", lambda program: program.evolve(microbatches=((4,), (2, 2)))),
        microbatched("place-gradients", lambda program: program.evolve(microbatches=((2, 3), (2, 2)))),
        microbatched("place-gradients", lambda program: program.evolve(shard_of_microbatch=((0, 0), (0, 1)))),
        microbatched("lower-devices", lambda program: program.evolve(microbatches=((2, 2),))),
    ],
    "each_microbatch_gives_its_factors": [factored(lambda factors: factors[:2] * 2)],
    "gradients_are_added_where_they_are": [
        microbatched("accumulate-microbatches", on_first_graph(return_an_earlier_gradient))
    ],
    "a_program_belongs_to_a_worker": [
        over_workers(lambda program: program.evolve(workers=Workers((0, 2, 1), 1)), "plan-buckets")
    ],
    "workers_exchange_their_sums": [
        over_workers(
            on_all_devices(lambda graph: set_args(first(graph, ops.exchange), first(graph, ops.exchange).args[::-1])),
            "reduce-over-workers",
        )
    ],
    "compressed_sums_are_decompressed": [
        compressed(lambda graph: repeat(graph, first(graph, ops.compress)), pass_name)
        for pass_name in ("compress-exchange", "lower-devices")
    ],
    "parts_include_the_residual": [
        sent_in_part(lambda graph: repeat(graph, first(graph, ops.add_unsent)), pass_name)
        for pass_name in ("send-largest", "lower-devices")
    ],
    "workers_update_equal_parts_in_their_order": [
        over_workers(lambda program: program.evolve(workers=replace(program.workers, shards_optimizer=True)))
    ],
    "sums_reach_their_updates": [
        over_workers(on_all_devices(lambda graph: setattr(first(graph, ops.exchange), "target", ops.scatter_sums)))
    ],
    "workers_send_their_factors": [sending(on_all_devices(send_a_copy))],
    "updates_leave_out_unused_parameters": [
        plain(functools.partial(leave_out, False)),
        plain(functools.partial(leave_out, False), "plan-buckets"),
        ("plan-buckets", functools.partial(leave_out, True)),
        ("lower-devices", functools.partial(leave_out, True)),
    ],
    "rows_stay_rows": [
        gathering(on_all_devices(functools.partial(pack_a_whole_gradient, True))),
        gathering(on_all_devices(add_up_rows)),
        gathering(on_all_devices(add_up_rows), "insert-all-reduce"),
        gathering(on_all_devices(send_rows), "insert-all-reduce"),
    ],
    "stored_rows_are_those_of_the_step": [gathering(on_all_devices(take_rows_by_another_sum))],
    "devices_gather_their_factors": [
        gathering(on_all_devices(gather_a_copy)),
        gathering(on_all_devices(functools.partial(pack_a_whole_gradient, False))),
        gathering(plan_otherwise(lambda bucket: replace(bucket, gathers_factors=False))),
    ],
    "replicas_meet_alike": [meeting(behind_other_rows, stages=stages_of_worker)],
    "workers_without_examples_attend": [
        meeting(attend_twice, stages=lambda: stages_of_worker(0)),
        meeting(attend_besides, stages=stages_of_worker),
        meeting(attend_besides),
    ],
    "meetings_of_workers_are_preserved": [
        meeting(stay_away, pass_name, stages=lambda: stages_of_worker(0))
        for pass_name in ("replicate", "lower-devices")
    ],
    "workers_meet_before_they_wait": [meeting(wait_for_workers_before_a_meeting, stages=stages_of_worker)],
}
