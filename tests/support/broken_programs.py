"""Valid programs broken in just one way each, by the rule that is to refuse them.

Long for one file, because it is one table with what its entries need; `mutations` breaks programs in more ways, at random places.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from broken_meetings import (
    alone,
    attend_besides,
    attend_twice,
    behind_other_rows,
    behind_too_many_rows,
    meeting,
    stages_of_worker,
    stay_away,
    under_one_number,
    under_other_numbers,
    wait_for_workers_before_a_meeting,
    waits_before_a_meeting,
    with_fewer_rows,
)
from module_programs import Noisy, cut_module, stages
from payloads import FirstElements
from tiny_programs import (
    MUON,
    PASS_NAMES,
    SMALL_BUCKETS,
    Gated,
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
from mirrorc.analysis.graph.dying_arguments import reserved_argument
from mirrorc.capture.eager.autograd_front_end import AutogradFrontEnd
from mirrorc.compression import TopK
from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket, Elements, Pack
from mirrorc.ir.nodes import bucket_of, calls_to, is_region_call, region_calls, region_of, replica_of
from mirrorc.ir.program import Accumulation, ArgumentKind, Program, placeholders_of
from mirrorc.ir.variables import Placement, Synchronization, UpdateRule, Variable
from mirrorc.ir.workers import Workers, World
from mirrorc.packing import ByBytes, EqualPacks
from mirrorc.passes import (
    CheckFinite,
    ClipGradients,
    PlaceGradients,
    ReserveMemory,
    ReuseArguments,
    ShareParameters,
    UnscaleGradients,
    default_pipeline,
)
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


def sharded(change: Callable[[fx.Graph], object]) -> Mutation:
    return changing(ShareParameters().run, on_first_graph(change), "schedule-overlap")


def owned(change: Callable[[fx.Graph], object], pass_name: str = "update-at-owner", **options: Any) -> Mutation:
    def make(_: Program) -> Program:
        return every_stage(handmade(2, WEIGHTS), placement="least-loaded", **CAPS, **options)[pass_name]

    def change_at_owner(program: Program) -> None:
        graphs = program.graphs()
        change(graphs[program.buckets[0].owner or 0] if len(graphs) > 1 else graphs[0])

    return changing(make, change_at_owner)


def take_parameters_before_their_update(graph: fx.Graph) -> None:
    taken = first(graph, ops.updated)
    (update,) = [node for node in targets(graph, ops.update) if bucket_of(node) == bucket_of(taken)]
    update.prepend(taken)


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


def with_packs(*elements: tuple[int, int, int]) -> Callable[[Program], Program]:
    packs = tuple(Pack(*numbers) for numbers in elements)
    return plan_otherwise(lambda bucket: replace(bucket, packs=packs))


def unpack_in_another_order(graph: fx.Graph) -> None:
    unpack = first(graph, ops.unpack)
    set_args(unpack, unpack.args[::-1])


def name_packs_in_another_order(graph: fx.Graph) -> None:
    output = graph.output_node()
    found: Any = output.args[0]
    set_args(output, ({**found, "packed": found["packed"][::-1]},))


def reduce_the_other_pack(graph: fx.Graph) -> None:
    one, other, *_ = targets(graph, ops.all_reduce)
    set_args(other, one.args)


def write_into_a_pack_in_flight(graph: fx.Graph) -> None:
    """The region that gives the gradient in both packs runs once more behind the first."""
    packed = targets(graph, ops.pack)[0]
    call = next(node for node in region_calls(graph) if any(given.target is ops.slot for given in node.all_input_nodes))
    with packed.graph.inserting_after(packed):
        again = packed.graph.node_copy(call, lambda node: node)
    again.meta = dict(call.meta)


def exchange_packs_in_another_order(graph: fx.Graph) -> None:
    one, other = targets(graph, ops.exchange)[:2]
    other.append(one)
    for wait in sorted(one.users):
        if wait < one:
            one.append(wait)


def dealt_out(change: Callable[[Program], object], pass_name: str = "lower-devices", **options: Any) -> Mutation:
    """As `over_workers`, of a program whose workers each update a part of every bucket."""
    workers = replace(WORKER_1, shards_optimizer=True)
    return over_workers(change, pass_name, workers=workers, shard_optimizer=True, **options)


def clip_by_the_own_norm(graph: fx.Graph) -> None:
    factor, own = first(graph, ops.clip_factor), first(graph, ops.norm)
    set_args(factor, (own,))


def tell_the_own_norm(graph: fx.Graph) -> None:
    set_args(first(graph, ops.tell), (first(graph, ops.norm),))


def measure_a_share_twice(graph: fx.Graph) -> None:
    norm = first(graph, ops.norm)
    set_args(norm, (*norm.args, norm.args[0]))


def compressed(change: Callable[[fx.Graph], object], pass_name: str = "lower-devices", **options: Any) -> Mutation:
    """As `over_workers`, on all devices of a program whose workers send sums in bfloat16."""
    return over_workers(on_all_devices(change), pass_name, compression="bfloat16", **options)


def use_what_is_compressed(graph: fx.Graph) -> None:
    total = first(graph, ops.decompress)
    with graph.inserting_before(total):
        taken = graph.call_function(torch.ops.aten.neg.default, total.args)
    taken.meta["val"] = total.all_input_nodes[0].meta["val"]


def decompress_another_bucket(graph: fx.Graph) -> None:
    one, other = targets(graph, ops.decompress)[:2]
    one.kwargs, other.kwargs = other.kwargs, one.kwargs


def sent_in_part(change: Callable[[fx.Graph], object], pass_name: str = "lower-devices") -> Mutation:
    """As `over_workers`, on all devices of a program whose workers send a part of each sum."""
    return over_workers(on_all_devices(change), pass_name, compression=TopK(0.1))


def sent_as_payload(change: Callable[[fx.Graph], object]) -> Mutation:
    """As `over_workers`, on all devices of a program whose workers send a payload."""
    return over_workers(on_all_devices(change), compression=FirstElements())


def use_what_was_not_sent(graph: fx.Graph) -> None:
    """An operator takes a sum with what was not sent before, where its largest elements alone are to be."""
    own = first(graph, ops.add_unsent)
    with graph.inserting_after(own):
        taken = graph.call_function(torch.ops.aten.neg.default, (own,))
    taken.meta["val"] = own.meta["val"]


def leave_out_what_was_not_sent(graph: fx.Graph) -> None:
    own = first(graph, ops.add_unsent)
    own.replace_all_uses_with(own.all_input_nodes[0])
    graph.erase_node(own)


def update_the_part_of_another_worker(program: Program) -> Program:
    length = program.buckets[0].num_elements // 3
    first = replace(program.buckets[0], part=Elements(0, length))
    return program.evolve(buckets=(first, *program.buckets[1:]))


def leave_parameters_behind(graph: fx.Graph) -> None:
    launch = first(graph, ops.gather_parameters)
    erase(graph, *launch.users, launch)


def gather_in_another_order(graph: fx.Graph) -> None:
    one, other = targets(graph, ops.gather_parameters)
    other.append(one)


def gather_before_the_update(graph: fx.Graph) -> None:
    (launch,) = [node for node in targets(graph, ops.gather_parameters) if bucket_of(node) == 0]
    update = next((node for node in targets(graph, ops.update) if bucket_of(node) == 0), None)
    if update is not None:  # a device may have no share of a small part
        launch.append(update)


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


def keep_a_variable(graph: fx.Graph) -> None:
    node = first(graph, ops.keep)
    node.replace_input_with(node.all_input_nodes[0], first(graph, ops.read))


def keep_a_view_of_a_region(program: Program) -> None:
    """The first value that is kept is a view of what its region is given."""
    part = first(program.graphs()[0], ops.keep).all_input_nodes[0]
    body = program.regions[region_of(part.args[0])].graph_module.graph  # type: ignore[arg-type]
    results: Any = body.output_node().args[0]
    view = next(node for node in body.nodes if node.target is torch.ops.aten.t.default)
    body.output_node().args = (tuple(view if i == part.args[1] else result for i, result in enumerate(results)),)


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


def send_a_whole_gradient(graph: fx.Graph) -> None:
    pack = first(graph, ops.gather_factors).all_input_nodes[0]
    gradient, *others = pack.all_input_nodes
    set_args(pack, (insert_clone(gradient), *others))


def make_the_whole_sum(program: Program) -> Program:
    """All elements are said to be made of the factors that all have sent, and not those that this worker updates."""
    place = next(bucket.index for bucket in program.buckets if bucket.is_sent_as_factors)
    return plan_otherwise(lambda b: replace(b, part=None) if b.index == place else b)(program)


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


def first_take(program: Program) -> fx.Node:
    graphs = [region.graph_module.graph for region in program.regions.values()]
    return next(node for graph in graphs for node in calls_to(graph, take_gradient))


def take_a_gradient_again(program: Program) -> None:
    node = first_take(program)
    with node.graph.inserting_before(node):
        node.graph.call_function(take_gradient, node.args).meta.update(node.meta)


def call_a_region_again(program: Program) -> None:
    call = next(node for node in region_calls(program.shard_graphs[0]) if region_of(node).startswith("bwd"))
    with call.graph.inserting_before(call):
        call.graph.node_copy(call)


def begin_with_another_tangent(program: Program) -> None:
    """Takes a gradient of a backward that begins with another gradient of the loss than for those taken behind it."""
    node = first_take(program)
    with node.graph.inserting_before(node):
        other = node.graph.call_function(torch.ops.aten.neg.default, (node.args[2],))
    other.meta.update(node.args[2].meta)  # type: ignore[union-attr]
    node.args = (*node.args[:2], other, *node.args[3:])


def compute_of_which_backward(program: Program) -> None:
    node = first_take(program)
    with node.graph.inserting_before(node):
        token = node.graph.call_function(torch.ops.aten.clone.default, (node.args[1],))
    token.meta.update(node.args[1].meta)  # type: ignore[union-attr]
    for taking in calls_to(node.graph, take_gradient):
        taking.args = (taking.args[0], token, *taking.args[2:])


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


def write_other_rows(program: Program) -> Program:
    return plan_otherwise(lambda bucket: with_rule(bucket, writes_rows=False))(
        with_update_rules(program, writes_rows=False)
    )


def send_gradient_rows(graph: fx.Graph) -> None:
    for rows in targets(graph, ops.updated_rows):
        set_args(rows, (rows.args[1], rows.args[1]))


def take_rows_by_another_sum(graph: fx.Graph) -> None:
    for rows in targets(graph, ops.updated_rows):
        new, gradient = rows.all_input_nodes
        set_args(rows, (new, insert_clone(gradient)))


def store_rows_by_another_sum(graph: fx.Graph) -> None:
    for store in targets(graph, ops.store_rows):
        set_args(store, (store.args[0], store.args[0]))


def store_gradient_rows(graph: fx.Graph) -> None:
    for store in targets(graph, ops.store_rows):
        set_args(store, (store.args[1], store.args[1]))


def send_all_for_rows(graph: fx.Graph) -> None:
    for rows in targets(graph, ops.updated_rows):
        rows.replace_all_uses_with(rows.all_input_nodes[0])


def forget_to_store_rows(graph: fx.Graph) -> None:
    erase(graph, *targets(graph, ops.store_rows))


def plan_otherwise(change: Callable[[Bucket], Bucket]) -> Callable[[Program], Program]:
    return lambda program: program.evolve(buckets=tuple(map(change, program.buckets)))


def with_rule(bucket: Bucket, **changes: object) -> Bucket:
    return replace(bucket, rule=replace(bucket.rule, **changes)) if bucket.rule.takes_rows else bucket


def _gathered_of_another(graph: fx.Graph) -> tuple[fx.Node, tuple[fx.Node, ...]]:
    one, other = targets(graph, ops.gather_factors)
    return other, one.args  # type: ignore[return-value]


def exchange_in_another_order(graph: fx.Graph) -> None:
    one, other = targets(graph, ops.exchange)
    other.append(one)


def use_what_is_exchanged(graph: fx.Graph) -> None:
    launch = first(graph, ops.exchange)
    with graph.inserting_after(launch):
        graph.call_function(torch.ops.aten.clone.default, (launch.args[0],))


def leave_an_exchange_out(graph: fx.Graph) -> None:
    launch = targets(graph, ops.exchange)[0]
    for wait in list(launch.users):
        wait.replace_all_uses_with(next(n for n in launch.all_input_nodes if replica_of(n) == replica_of(wait)))
        graph.erase_node(wait)
    graph.erase_node(launch)


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
    return replace(bucket, slots=(*before, replace(last, offset=offset)))


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


def in_parts(change: Callable[[fx.Graph], object], pass_name: str = "lower-devices") -> Mutation:
    def make(_: Program) -> Program:
        captured = captured_model(nn.Linear(40, 30), 2, 8, columns=40)
        return every_stage(captured, min_factored_elements=0, part_elements=150)[pass_name]

    return changing(make, on_first_graph(change))


def look_at_what_is_made_in_parts(graph: fx.Graph) -> None:
    wait = first(graph, ops.update).args[0]
    with graph.inserting_after(wait):
        found = graph.call_function(ops.norm, (wait,), {"norm_type": 1.0})
    found.meta["val"] = wait.meta["val"].norm()


def look_beside_a_bound(graph: fx.Graph, *, at_the_bounded: bool) -> None:
    update = first(graph, ops.update)
    wait = update.args[0]
    with graph.inserting_after(wait):
        bounded = graph.call_function(ops.clip_value, (wait,), {"max_value": 0.1, "replica": 0})
    bounded.meta["val"] = wait.meta["val"]
    update.replace_input_with(wait, bounded)
    with graph.inserting_after(bounded):
        found = graph.call_function(ops.norm, (bounded if at_the_bounded else wait,), {"norm_type": 2.0})
    found.meta["val"] = wait.meta["val"].norm()


def call_instead(graph: fx.Graph, name: str, other: str) -> None:
    call = next(node for node in targets(graph, ops.call_region) if node.kwargs["region"] == name)
    with_kwargs(call, region=other)


def return_an_earlier_gradient(graph: fx.Graph) -> None:
    call = next(node for node in targets(graph, ops.call_region) if node.kwargs["region"] == "bwd_0")
    output_with(graph, "writes", lambda writes: {**writes, "stat": next(filter(gradient_of, call.users))})


def placed(pass_name: str, change: Callable[[fx.Graph], object]) -> Mutation:
    def make(_: Program) -> Program:
        program = PlaceGradients().run(run_up_to("outline-regions", two_buckets(), **CAPS))
        first_pass, last_pass = (PASS_NAMES.index(name) for name in ("replicate", pass_name))
        return run_passes(program, core_pipeline(**CAPS)[first_pass : last_pass + 1])

    return changing(make, on_first_graph(change), pass_name)


def exchange_slots(graph: fx.Graph) -> None:
    one, other = (next(n for n in targets(graph, ops.slot) if n.kwargs["variable"] == name) for name in ("c", "b"))
    assert one.kwargs.get("replica") == other.kwargs.get("replica")
    one.kwargs, other.kwargs = other.kwargs, one.kwargs


def exchange_gradients(graph: fx.Graph, replicas: tuple[int | None, ...] = (None,)) -> None:
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


def update_before_a_region(graph: fx.Graph) -> None:
    """As soon as bucket 0 is summed, while backward goes on and reads what is in it."""
    read_early(graph)
    update_early(graph)


def wait_early(graph: fx.Graph, *operations: object) -> None:
    launched = first(graph, ops.all_reduce)
    for node in reversed(targets(graph, *(operations or (ops.wait,)))):
        if node.kwargs["bucket"] == 0:
            launched.append(node)


def optimize_before_the_commit(program: Program) -> None:
    graph = program.graphs()[0]
    first(graph, ops.step_optimizer).append(first(graph, ops.commit))


def update_early(graph: fx.Graph) -> None:
    wait_early(graph, ops.wait, ops.update)


def insert_before_output(graph: fx.Graph, target: Any, like: fx.Node, *args: Any) -> None:
    with graph.inserting_before(graph.output_node()):
        node = graph.create_node("get_attr" if isinstance(target, str) else "call_function", target, args)
    node.meta["val"] = like.meta["val"]


def a_function_of_python(graph: fx.Graph) -> None:
    loss = next(node for node in graph.nodes if node.target is operator.getitem)
    insert_before_output(graph, operator.add, loss, loss, 1)


def use_a_view_after_the_update(graph: fx.Graph) -> None:
    """The view was made before the update, and is of what the update has written."""
    read = first(graph, ops.read)
    with graph.inserting_after(read):
        view = graph.call_function(torch.ops.aten.alias.default, (read,))
    view.meta["val"] = read.meta["val"]
    insert_before_output(graph, torch.ops.aten.neg.default, read, view)


def use_a_view_while_others_update(graph: fx.Graph) -> None:
    """The last replica uses a view of a parameter after its last launch, for which others wait before they write."""
    read, wait = (targets(graph, operation)[-1] for operation in (ops.read, ops.reduce_scatter))
    with graph.inserting_after(read):
        view = graph.call_function(torch.ops.aten.alias.default, (read,))
    with graph.inserting_after(wait):
        used = graph.call_function(torch.ops.aten.neg.default, (view,))
    view.meta["val"] = used.meta["val"] = read.meta["val"]


def an_operator_that_writes(graph: fx.Graph) -> None:
    packed = first(graph, ops.pack)
    insert_before_output(graph, torch.ops.aten.mul_.Tensor, packed, packed, 2)


def write_slots_after_the_pack(graph: fx.Graph) -> None:
    """The region that gave bucket 0 its gradients runs once more, while the bucket is in flight."""
    packed = first(graph, ops.pack)
    call = packed.args[0].args[0]
    assert any(node.target is ops.slot for node in call.all_input_nodes)
    with graph.inserting_before(graph.output_node()):
        graph.node_copy(call, lambda node: node)


def step_once_more(program: Program) -> None:
    graph = program.graphs()[0]
    with graph.inserting_before(graph.output_node()):
        graph.node_copy(first(graph, ops.step_optimizer), lambda node: node)


def change_each(target: object, **kwargs: object) -> Callable[[Program], None]:
    def change(graph: fx.Graph) -> None:
        for node in targets(graph, target):
            with_kwargs(node, **kwargs)

    return on_all_devices(change)


def forget_to_receive(graph: fx.Graph) -> None:
    for received in targets(graph, ops.recv):
        if bucket_of(received) == 0 and replica_of(received) in (None, 1):
            (wait,) = received.users
            total = first(graph, ops.wait)
            assert bucket_of(total) == 0
            wait.replace_all_uses_with(total)
            erase(graph, wait, received)


def send_gradients(program: Program) -> None:
    for graph in program.graphs():
        for node in targets(graph, ops.send):
            step, place = node.args[0].args
            set_args(node, (step.args[place],))  # the sum that the optimizer is given


def send_another_buckets_parameters(program: Program) -> None:
    one, other = (node for node in targets(program.graphs()[0], ops.send) if node.kwargs["destination"] == 1)
    last = one if other < one else other
    last.append(one)
    one.args = other.args


def send_another_bucket(program: Program) -> None:
    send = first(program.graphs()[0], ops.send)
    with_kwargs(send, bucket=1 - bucket_of(send))


def receive_before_taking_part(program: Program) -> None:
    """Replica 1 waits for parameters that replica 0 can only send when replica 1 has launched its reduction."""
    graph = program.graphs()[1]
    received = first(graph, ops.recv)
    (wait,) = received.users
    launch = next(n for n in targets(graph, ops.all_reduce) if bucket_of(n) == bucket_of(received))
    launch.prepend(received)
    launch.prepend(wait)


def note_as(graph: fx.Graph, node: fx.Node, change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    value = node.meta["val"]
    with value.fake_mode:
        node.meta = {**node.meta, "val": change(value)}


def noted(target: object, change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[fx.Graph], None]:
    return lambda graph: note_as(graph, first(graph, target), change)


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


def feed_the_other_replica(graph: fx.Graph) -> None:
    call = first(graph, ops.call_region)
    theirs = next(n for n in targets(graph, ops.argument) if n.kwargs == {"name": "x", "replica": 1})
    call.replace_input_with(call.args[0], theirs)


def wait_for_the_other_replica(graph: fx.Graph) -> None:
    one, other = (n for n in targets(graph, ops.update) if bucket_of(n) == 0)
    one.args, other.args = other.args, one.args


def read_another_variable(graph: fx.Graph) -> None:
    read = next(n for n in targets(graph, ops.read) if n.kwargs["variable"] == "b")
    with_kwargs(read, variable="c")


def exchange_what_a_region_is_given(graph: fx.Graph) -> None:
    """The region of bucket 0 makes two gradients of one shape, each from a variable of that shape."""
    call = next(node for node in graph.nodes if is_region_call(node) and "b" in node.kwargs["gradients"])
    one, tangent, other = call.args
    assert (one.target, other.target) == (ops.read, ops.read)
    set_args(call, (other, tangent, one))


def give_another_loss(graph: fx.Graph) -> None:
    (other,) = placeholders_of(graph, two_buckets().arguments, ArgumentKind.LOSS_WEIGHT)
    graph.output_node().args = (other,)


def on_every_device(pass_name: str, change: Callable[[fx.Graph], object]) -> Mutation:
    return pass_name, on_all_devices(change)


def with_first_slot(bucket: Bucket, **changes: object) -> Bucket:
    first_slot, *rest = bucket.slots
    return replace(bucket, slots=(replace(first_slot, **changes), *rest))  # type: ignore[arg-type]


def written(program: Program, name: str) -> Variable:
    return replace(program.variables[name], synchronization=Synchronization.PER_REPLICA)


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


def write_an_argument(program: Program) -> Program:
    graph = program.graphs()[0]
    calls = [node for node in graph.nodes if node.op == "call_module" or node.target is ops.call_region]
    call, place = next(
        (call, i)
        for call in calls
        for i, given in enumerate(call.args)
        if isinstance(given, fx.Node) and given.target is ops.read
    )
    body = program.regions[region_of(call)].graph_module.graph
    placeholder = [node for node in body.nodes if node.op == "placeholder"][place]
    with body.inserting_before(body.output_node()):
        node = body.call_function(torch.ops.aten.zero_.default, (placeholder,))
    node.meta["val"] = placeholder.meta["val"]
    return program


def reusing(pass_name: str, change: Callable[[Program, fx.Node], None]) -> Mutation:
    """A change of a program whose region bwd_0 writes into an argument that dies there: is given the write."""

    def change_write(program: Program) -> None:
        body = program.regions["bwd_0"].graph_module.graph
        change(program, next(node for node in body.nodes if node.name.startswith("reuse_")))

    def make(_: Program) -> Program:
        return up_to(pass_name, captured_model(Gated()), reuse_arguments=ReuseArguments(min_bytes=0))

    return changing(make, change_write, "pack-gradients")


def reserving(pass_name: str, change: Callable[[Program], None]) -> Mutation:
    """A change of a program in which two results of region fwd_0 lie in reserved memory at the same time."""

    def make(_: Program) -> Program:
        return up_to(pass_name, captured_model(Gated()), reserve_memory=ReserveMemory(min_bytes=0))

    return changing(make, change, "pack-gradients")


def reserve_one_memory_for_two(program: Program) -> None:
    for graph in program.graphs():
        for node in targets(graph, ops.reserved):
            with_kwargs(node, number=0)


def look_at_reserved_memory(program: Program) -> None:
    graph = program.graphs()[0]
    call = targets(graph, ops.reserved)[0].next
    while not is_region_call(call):
        call = call.next
    part = next(user for user in call.users if any(is_region_call(other) for other in user.users))
    with graph.inserting_after(part):
        graph.call_function(torch.ops.aten.alias.default, (part,)).meta["val"] = part.meta["val"]


def give_back_a_view_of_reserved_memory(program: Program) -> None:
    """A region of backward gives its caller a view of what lies in reserved memory, besides what it gave before."""
    graph = program.graphs()[0]
    call = next(node for node in graph.nodes if is_region_call(node) and region_of(node) == "bwd_0")
    body = program.regions["bwd_0"].graph_module.graph
    reserved = _in_reserved_memory(program, graph)
    place = next(i for i, given in enumerate(call.args) if given.name in reserved)  # type: ignore[union-attr]
    output, argument = body.output_node(), body.find_nodes(op="placeholder")[place]
    with body.inserting_before(output):
        view = body.call_function(torch.ops.aten.alias.default, (argument,))
    view.meta["val"] = argument.meta["val"]
    output.args = ((*output.args[0], view),)  # type: ignore[misc]
    for node in (node for each in program.graphs() for node in each.nodes):
        if is_region_call(node) and region_of(node) == "bwd_0":
            node.meta["val"] = (*node.meta["val"], argument.meta["val"])


def _in_reserved_memory(program: Program, graph: fx.Graph) -> set[str]:
    found = set()
    for call in {next(iter(node.users)) for node in targets(graph, ops.reserved)}:
        body = program.regions[region_of(call)].graph_module.graph
        places = {part.name: reserved_argument(body, part.args[1]) for part in call.users}
        lying = {name: call.args[place] for name, place in places.items() if place is not None}
        found |= {name for name, given in lying.items() if given.target is ops.reserved}  # type: ignore[union-attr]
    return found


def reserve_for_two_calls(program: Program) -> None:
    graph = program.graphs()[0]
    one, other = targets(graph, ops.reserved)[:2]
    other.replace_all_uses_with(one)


def read_before_it_is_written(program: Program) -> None:
    body = program.regions["fwd_0"].graph_module.graph
    argument = next(node for node in body.nodes if node.name.startswith("reserved_"))
    with body.inserting_after(body.find_nodes(op="placeholder")[-1]):
        body.call_function(torch.ops.aten.neg.default, (argument,)).meta["val"] = argument.meta["val"]


def read_the_overwritten(_: Program, write: fx.Node) -> None:
    reader = next(user for user in write.users if user.op == "call_function")
    reader.replace_input_with(write, write.args[0])  # type: ignore[arg-type]


def assert_the_written(program: Program, write: fx.Node) -> None:
    """A check of the step looks at the argument as well, so that it does not die in the region."""
    graph = program.graphs()[0]
    call = next(node for node in targets(graph, ops.call_region) if region_of(node) == "bwd_0")
    place = write.graph.find_nodes(op="placeholder").index(write.args[0])
    with graph.inserting_before(call):
        truth = graph.call_function(torch.ops.aten.all.default, (call.args[place],))
    truth.meta["val"] = call.args[place].meta["val"].all()  # type: ignore[union-attr]


ONE_BUCKET = "plan-buckets"


def check_at_the_end(graph: fx.Graph) -> None:
    packed = first(graph, ops.pack)
    owner = {key: packed.kwargs[key] for key in ("replica",) if key in packed.kwargs}
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(ops.check, (packed,), {"text": "too late", **owner})
    node.meta["val"] = None


def check_after_the_commit(_: Program) -> Program:
    """One device launches nothing, so that nothing else is late."""
    program = run_up_to("schedule-overlap", handmade(1, WEIGHTS), **CAPS)
    graph = program.mirrored_graph
    with graph.inserting_after(first(graph, ops.commit)):
        node = graph.call_function(ops.check, (first(graph, ops.pack),), {"text": "too late", "replica": 0})
    node.meta["val"] = None
    return program


def gather_losses(graph: fx.Graph, num: int, **options: Any) -> None:
    output: Any = graph.output_node().args[0]
    for loss in (output["losses"] if isinstance(output, dict) else [output])[:num]:
        owner = {key: loss.args[0].kwargs[key] for key in ("replica",) if key in loss.args[0].kwargs}
        with graph.inserting_after(loss):
            node = graph.call_function(ops.gather, (loss,), {"output": "loss", "how": "averaged"} | options | owner)
        node.meta["val"] = None


def gather_in_two_ways(graph: fx.Graph) -> None:
    gather_losses(graph, 2)
    with_kwargs(first(graph, ops.gather), how="summed")


def checked(change: Callable[[fx.Graph], object]) -> Mutation:
    return changing(CheckFinite().run, on_first_graph(change), "schedule-overlap")


def look_at_a_sum_twice(graph: fx.Graph) -> None:
    _, *_, loss = first(graph, ops.commit).all_input_nodes
    set_args(loss, (first(graph, ops.wait),))


def use_the_truth_elsewhere(graph: fx.Graph) -> None:
    with graph.inserting_before(graph.output_node()):
        node = graph.call_function(torch.ops.aten.logical_not.default, (first(graph, ops.is_finite),))
    node.meta["val"] = first(graph, ops.is_finite).meta["val"]


def be_told_of_nothing(graph: fx.Graph) -> None:
    for commit in targets(graph, ops.commit):
        set_args(commit, ())
        with_kwargs(commit, otherwise=None)


def leave_in_flight(_: Program) -> Program:
    """A replica that needs no sum waits for it when the step may have ended."""
    program = CheckFinite("skip").run(whole_optimizer("schedule-overlap"))
    verify(program)
    graph = program.mirrored_graph
    wait = next(node for node in targets(graph, ops.wait) if not node.users)
    targets(graph, ops.commit)[-1].append(wait)
    return program


def wait_on_one_side(graph: fx.Graph) -> None:
    first(graph, ops.commit).prepend(first(graph, ops.wait))


def after_passes(change: Callable[[fx.Graph], object], *passes: Pass) -> Mutation:
    return changing(lambda program: run_passes(program, passes), on_first_graph(change), "schedule-overlap")


def scaled(change: Callable[[fx.Graph], object]) -> Mutation:
    return after_passes(change, ShareParameters(), UnscaleGradients(), CheckFinite("skip"))


def accumulating(change: Callable[[fx.Graph], object]) -> Mutation:
    def make(_: Program) -> Program:
        return run_up_to("insert-update", two_buckets().evolve(accumulation=Accumulation.ADDS), **CAPS)

    return changing(make, on_first_graph(change), "insert-update")


def leaving_gradients(change: Callable[[fx.Graph], object]) -> Mutation:
    def make(_: Program) -> Program:
        rule = gradient_rule(is_sparse=False, may_be_unused=False)
        weights = [replace(weight, rule=rule) for weight in WEIGHTS]
        program = handmade(2, weights).evolve(accumulation=Accumulation.GRADIENTS)
        return run_up_to("insert-update", program, **CAPS)

    return changing(make, on_first_graph(change), "insert-update")


def leave_another_bucket(graph: fx.Graph) -> None:
    one, other = targets(graph, ops.add_to_grad)
    set_args(one, other.args)


def after_accumulation(change: Callable[[fx.Graph], object]) -> Mutation:
    def make(_: Program) -> Program:
        return run_up_to("insert-all-reduce", two_buckets().evolve(accumulation=Accumulation.ENDS), **CAPS)

    return changing(make, on_first_graph(change), "insert-all-reduce")


def accumulate_another_replica(graph: fx.Graph) -> None:
    one, other = targets(graph, ops.accumulate)[:2]
    assert bucket_of(one) == bucket_of(other)
    set_args(one, other.args)


def reduce_what_was_packed(graph: fx.Graph) -> None:
    total = first(graph, ops.add_accumulated)
    total.replace_all_uses_with(total.args[0])  # type: ignore[arg-type]


def clipped(change: Callable[[fx.Graph], object]) -> Mutation:
    return after_passes(change, ShareParameters(), ClipGradients(1.0))


def scale_by_the_norm(graph: fx.Graph) -> None:
    scaled = first(graph, ops.scale)
    set_args(scaled, (scaled.args[0], scaled.args[1].all_input_nodes[0]))  # type: ignore[union-attr]


def divide_a_norm(graph: fx.Graph) -> None:
    told = first(graph, ops.tell)
    with graph.inserting_before(told):
        scale = graph.call_function(ops.loss_scale, (), {"replica": 0})
        scale.meta["val"] = told.args[0].meta["val"]  # type: ignore[union-attr]
        norm = graph.call_function(torch.ops.aten.div.Tensor, (told.args[0], scale))
    norm.meta["val"] = scale.meta["val"]
    told.replace_input_with(told.args[0], norm)  # type: ignore[arg-type]


def scaling_of(update: fx.Node) -> tuple[fx.Node, fx.Node]:
    scale = update.all_input_nodes[0]
    return scale, scale.all_input_nodes[0]


def measure_one_share_less(graph: fx.Graph) -> None:
    norm = first(graph, ops.norm)
    set_args(norm, norm.args[1:])


BAD: dict[str, list[Mutation]] = {
    "packs_make_up_their_buckets": [
        cut(with_packs((0, 0, 312), (1, 320, 624)), "plan-buckets"),
        cut(with_packs((0, 0, 312), (1, 300, 624)), "plan-buckets"),
        cut(with_packs((0, 0, 312), (1, 312, 620)), "plan-buckets"),
        cut(with_packs((0, 0, 312), (1, 312, 312), (2, 312, 624)), "plan-buckets"),
        cut(with_packs((0, 0, 312), (2, 312, 624)), "plan-buckets"),
        cut(with_packs((1, 0, 312), (1, 312, 624)), "plan-buckets"),
    ],
    "packs_keep_their_order": [
        cut_at(name_packs_in_another_order, "pack-gradients"),
        cut_at(unpack_in_another_order, "insert-all-reduce"),
    ],
    "a_checked_step_misses_nothing": [
        checked(lambda graph: set_args(first(graph, ops.commit), first(graph, ops.commit).args[1:])),
        checked(lambda graph: set_args(targets(graph, ops.commit)[1], targets(graph, ops.commit)[1].args[:-1])),
        checked(lambda graph: with_kwargs(first(graph, ops.commit), otherwise="skip")),
        checked(look_at_a_sum_twice),
        checked(use_the_truth_elsewhere),
        checked(be_told_of_nothing),
    ],
    "gradients_are_accumulated_once": [
        accumulating(lambda graph: erase(graph, first(graph, ops.accumulate))),
        accumulating(lambda graph: repeat(graph, first(graph, ops.accumulate))),
        accumulating(accumulate_another_replica),
    ],
    "accumulated_gradients_are_added_once": [
        after_accumulation(reduce_what_was_packed),
        after_accumulation(lambda graph: repeat(graph, first(graph, ops.add_accumulated))),
    ],
    "gradients_are_left_once": [
        leaving_gradients(lambda graph: erase(graph, first(graph, ops.add_to_grad))),
        leaving_gradients(lambda graph: repeat(graph, first(graph, ops.add_to_grad))),
        leaving_gradients(lambda graph: with_kwargs(first(graph, ops.add_to_grad), replica=1)),
        leaving_gradients(leave_another_bucket),
    ],
    "norms_count_every_element_once": [
        clipped(measure_one_share_less),
        owned(tell_the_own_norm, "clip-gradients", max_grad_norm=1.0),
        dealt_out(on_all_devices(clip_by_the_own_norm), max_grad_norm=1.0),
        dealt_out(on_all_devices(measure_a_share_twice), max_grad_norm=1.0),
    ],
    "gradients_are_clipped_alike": [
        clipped(scale_by_the_norm),
        clipped(lambda graph: with_kwargs(first(graph, ops.clip_factor), max_norm=2.0)),
    ],
    "gradients_are_unscaled_once": [
        clipped(divide_a_norm),
        scaled(lambda graph: first(graph, ops.update).replace_input_with(*scaling_of(first(graph, ops.update)))),
    ],
    "rescaled_memory_is_not_read_again": [clipped(lambda graph: repeat(graph, first(graph, ops.scale)))],
    "commits_exchange_norms_alike": [clipped(lambda graph: set_args(first(graph, ops.commit), ()))],
    "nothing_is_in_flight_at_a_checked_commit": [("schedule-overlap", leave_in_flight)],
    "waits_are_on_the_same_side_of_the_commit": [
        at("schedule-overlap", wait_on_one_side),
        at("lower-devices", wait_on_one_side),
    ],
    "sizes_are_arguments": [
        (ONE_BUCKET, lambda _: without_sizes(symbolic_program())),
        (ONE_BUCKET, lambda _: with_raw_symbol(symbolic_program())),
    ],
    "regions_take_their_sizes": [
        ("outline-regions", lambda _: with_untold_region(run_up_to("outline-regions", symbolic_program()))),
    ],
    "outputs_are_gathered_alike": [
        at("replicate", lambda graph: gather_losses(graph, 1)),
        at("insert-update", gather_in_two_ways),
        at("schedule-overlap", lambda graph: [gather_losses(graph, 2) for _ in range(2)] and None),
        at("lower-devices", lambda graph: gather_losses(graph, 1)),
    ],
    "values_are_kept_alike": [
        *(
            of_module(on_first_graph(change), pass_name)
            for change in (
                lambda graph: erase(graph, targets(graph, ops.keep)[-1]),
                lambda graph: with_kwargs(first(graph, ops.keep), number=1),
                lambda graph: first(graph, ops.keep).prepend(targets(graph, ops.keep)[-1]),
            )
            for pass_name in ("", "replicate", "lower-devices")
        ),
        of_module(on_first_graph(lambda graph: exchange_inputs(*targets(graph, ops.keep)[:2])), "lower-devices"),
        ("lower-devices", on_all_devices(keep_of_training)),
    ],
    "kept_values_have_memory_of_their_own": [
        *(of_module(on_first_graph(keep_a_variable), pass_name) for pass_name in ("", "replicate", "lower-devices")),
        of_module(keep_a_view_of_a_region, "lower-devices"),
    ],
    "gradients_of_outputs_are_used": [
        of_module(on_first_graph(ignore_an_output), pass_name, is_backward=True)
        for pass_name in ("", "replicate", "lower-devices")
    ],
    "checks_come_first": [
        ("schedule-overlap", check_after_the_commit),
        at("insert-all-reduce", check_at_the_end),
        at("schedule-overlap", check_at_the_end),
        at("lower-devices", check_at_the_end),
    ],
    "graphs_are_well_formed": [
        at("insert-update", use_before_definition),
        at("lower-devices", use_before_definition),
    ],
    "slots_are_disjoint": [
        bucket_change(ONE_BUCKET, slots(lambda b: shifted(b, b.slots[0].offset + 1))),
        bucket_change(ONE_BUCKET, slots(lambda b: shifted(b, b.num_elements))),
        bucket_change(ONE_BUCKET, slots(lambda b: replace(b, index=7))),
        bucket_change(ONE_BUCKET, slots(lambda b: replace(b, dtype=torch.float64))),
        bucket_change(ONE_BUCKET, slots(lambda b: replace(b, rule=UpdateRule("SGD group 1", 1)))),
    ],
    "slots_fit_their_variables": [
        bucket_change(ONE_BUCKET, slots(lambda b: with_first_slot(b, shape=(100, 2)))),
        bucket_change(ONE_BUCKET, slots(lambda b: with_first_slot(b, strides=(2,)))),
        bucket_change("lower-devices", slots(lambda b: with_first_slot(b, num_elements=100))),
    ],
    "graphs_are_those_of_the_stage": [
        ("replicate", lambda program: program.evolve(graph=None)),
        ("lower-devices", lambda program: program.evolve(device_graphs={})),
        ("lower-devices", lambda p: p.evolve(device_graphs=dict(reversed(list(p.device_graphs.items()))))),
        (ONE_BUCKET, lambda program: program.evolve(shard_of_replica=(0,))),
        (ONE_BUCKET, lambda program: program.evolve(shard_of_replica=(0, 1))),
    ],
    "references_lead_somewhere": [
        *(
            cut_at(lambda graph: with_kwargs(first(graph, ops.pack), pack=2), name)
            for name in ("pack-gradients", "lower-devices")
        ),
        at("replicate", lambda graph: with_kwargs(first(graph, ops.read), variable="no-such")),
        at("pack-gradients", lambda graph: with_kwargs(first(graph, ops.pack), bucket=9)),
        ("replicate", lambda program: program.evolve(regions={})),
        at("replicate", lambda graph: with_kwargs(first(graph, ops.call_region), gradients={"a": 9})),
        bucket_change(ONE_BUCKET, slots(lambda b: replace(b, slots=()))),
        bucket_change(ONE_BUCKET, slots(lambda b: with_first_slot(b, variable="no-such"))),
        ("insert-update", lambda program: program.evolve(buckets=program.buckets[:1])),
    ],
    "operations_have_their_arguments": [
        *(
            at(pass_name, lambda graph, target=target: set_args(first(graph, target), ()))
            for pass_name in ("insert-update", "lower-devices")
            for target in (ops.wait, ops.update)
        ),
        whole("insert-update", lambda p: set_args(first(p.graphs()[0], ops.step_optimizer), ())),
        whole("insert-update", lambda p: set_args(first(p.graphs()[0], ops.store), ())),
    ],
    "arguments_are_in_order": [
        at("replicate", lambda graph: with_kwargs(first(graph, ops.argument), replica=1)),
        ("lower-devices", lambda program: program.evolve(arguments=program.arguments[::-1])),
        (ONE_BUCKET, lambda program: program.evolve(arguments=program.arguments[:1])),
    ],
    "replicas_factor_the_same_gradients": [at("pack-gradients", factor_on_one_replica)],
    "factors_are_not_variables": [at("outline-regions", multiply_a_variable)],
    "regions_hold_operators_alone": [
        *((pass_name, call_from_a_region) for pass_name in ("outline-regions", "lower-devices")),
    ],
    "regions_write_only_their_memory": [
        *(at(pass_name, an_operator_that_writes) for pass_name in ("pack-gradients", "lower-devices")),
        ("replicate", write_an_argument),
        ("lower-devices", write_an_argument),
        reusing("reuse-arguments", read_the_overwritten),
        reusing("lower-devices", read_the_overwritten),
        reusing("reuse-arguments", assert_the_written),
    ],
    "reserved_values_do_not_overlap": [
        *(
            reserving(pass_name, reserve_one_memory_for_two)
            for pass_name in ("reserve-memory", "replicate", "lower-devices")
        ),
        reserving("schedule-overlap", look_at_reserved_memory),
        reserving("reserve-memory", reserve_for_two_calls),
        reserving("reserve-memory", give_back_a_view_of_reserved_memory),
        *(reserving(pass_name, read_before_it_is_written) for pass_name in ("reserve-memory", "lower-devices")),
    ],
    "some_replica_has_examples": [
        (ONE_BUCKET, lambda program: program.evolve(num_examples=(0, 0))),
        (ONE_BUCKET, lambda program: program.evolve(num_examples=(4, 0))),
        (ONE_BUCKET, lambda program: program.evolve(shard_of_replica=(0, None))),
    ],
    "replicas_without_examples_run_nothing": [
        *((name, lambda p: p.evolve(num_examples=(4, 0))) for name in ("replicate", "insert-update", "lower-devices")),
        *(
            at(pass_name, lambda g: output_with(g, "losses", lambda losses: (losses[0], None)))  # type: ignore[index]
            for pass_name in ("replicate", "insert-update")
        ),
        at("lower-devices", lambda graph: setattr(graph.output_node(), "args", (None,))),
    ],
    "results_belong_to_their_replicas": [
        at("pack-gradients", lambda graph: with_kwargs(first(graph, ops.pack), replica=1)),
        *(
            at(pass_name, lambda g: output_with(g, "losses", lambda losses: (losses[0],) * 2))  # type: ignore[index]
            for pass_name in ("replicate", "insert-update")
        ),
        at("pack-gradients", lambda g: output_with(g, "packed", lambda packed: packed[::-1])),  # type: ignore[index]
    ],
    "losses_are_for_training": [
        (ONE_BUCKET, lambda _: evaluation(keeps_loss=True)),
        (ONE_BUCKET, lambda _: evaluation(keeps_rules=True)),
        (ONE_BUCKET, lambda program: evaluation().evolve(buckets=program.buckets)),
    ],
    "tables_are_preserved": [
        (ONE_BUCKET, lambda program: program.evolve(num_examples=(3, 5))),
        (ONE_BUCKET, lambda program: program.evolve(variables={**program.variables, "a": written(program, "a")})),
        ("lower-devices", lambda program: program.evolve(variables={**program.variables, "a": written(program, "a")})),
    ],
    "gradients_and_slots_match": [
        bucket_change(ONE_BUCKET, slots(lambda b: replace(b, slots=b.slots[:-1]))),
        bucket_change(ONE_BUCKET, lambda buckets: (*buckets, replace(buckets[0], index=len(buckets)))),
        at(ONE_BUCKET, drop_a_gradient),
        at("replicate", drop_a_gradient),
    ],
    "every_bucket_is_packed_once": [
        *(
            cut_at(lambda graph: set_args(targets(graph, ops.pack)[1], targets(graph, ops.pack)[1].args[:1]), name)
            for name in ("pack-gradients", "lower-devices")
        ),
        at("insert-update", lambda graph: with_kwargs(first(graph, ops.pack), bucket=1)),
        at("pack-gradients", lambda graph: set_args(first(graph, ops.pack), first(graph, ops.pack).args[:1])),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.pack), bucket=1)),
    ],
    "every_gradient_is_packed_once": [
        at("pack-gradients", use_a_gradient_twice),
        at("insert-update", use_a_gradient_twice),
        at("pack-gradients", lambda g: set_args(first(g, ops.pack), (first(g, ops.pack).args[0],) * 2)),
    ],
    "gradients_are_in_their_slots": [
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
    "slots_are_for_their_gradients": [
        placed("outline-regions", exchange_slots),
        placed("pack-gradients", exchange_slots),
        placed("pack-gradients", lambda graph: with_kwargs(first(graph, ops.slot), replica=1)),
        placed("lower-devices", exchange_slots),
    ],
    "collectives_are_waited_for_once": [
        *(
            cut_at(lambda graph: with_kwargs(first(graph, ops.wait), pack=1), name)
            for name in ("insert-all-reduce", "lower-devices")
        ),
        at("insert-update", lambda graph: with_kwargs(first(graph, ops.wait), replica=1)),
        at("insert-update", lambda graph: with_kwargs(first(graph, ops.wait), bucket=1)),
        at("insert-update", lambda graph: repeat(graph, first(graph, ops.wait))),
        at("insert-update", lambda graph: set_args(first(graph, ops.update), (first(graph, ops.all_reduce),))),
        at("insert-update", lambda graph: set_args(first(graph, ops.wait), (first(graph, ops.pack),))),
        at("lower-devices", lambda graph: repeat(graph, first(graph, ops.wait))),
    ],
    "buckets_in_flight_are_not_used": [
        *(cut_at(reduce_the_other_pack, name) for name in ("insert-all-reduce", "lower-devices")),
        sending(on_all_devices(lambda graph: set_args(*_gathered_of_another(graph)))),
        over_workers(on_all_devices(lambda graph: set_args(first(graph, ops.exchange), (first(graph, ops.pack),)))),
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
    "collectives_match_their_tags": [
        *(gathering(on_all_devices(send_gradient_rows), pass_name) for pass_name in ("send-rows", "lower-devices")),
        at("insert-all-reduce", lambda graph: with_kwargs(first(graph, ops.all_reduce), op="avg")),
        at("schedule-overlap", lambda graph: with_kwargs(targets(graph, ops.all_reduce)[1], op="max")),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.all_reduce), op="avg")),
        sharded(lambda graph: with_kwargs(first(graph, ops.reduce_scatter), op="avg")),
        whole("insert-update", change_each(ops.broadcast, root=1)),
        whole("lower-collectives", send_another_buckets_parameters),
        whole("lower-devices", send_another_buckets_parameters),
        whole("lower-devices", send_another_bucket),
    ],
    "every_operation_is_known": [
        *(at(pass_name, a_function_of_python) for pass_name in ("replicate", "insert-update", "lower-devices")),
        at("replicate", lambda g: insert_before_output(g, "weight", first(g, ops.read))),
    ],
    "nothing_is_written_in_flight": [
        cut_at(write_into_a_pack_in_flight),
        *(placed(pass_name, write_slots_after_the_pack) for pass_name in ("schedule-overlap", "lower-devices")),
        whole("lower-collectives", step_once_more),
        whole("lower-devices", step_once_more),
    ],
    "every_send_is_received": [
        *(
            whole(pass_name, change)
            for pass_name in ("lower-collectives", "lower-devices")
            for change in (
                on_all_devices(lambda g: erase(g, *targets(g, ops.send)[:1])),
                on_all_devices(lambda g: [repeat(g, node) for node in targets(g, ops.send)[:1]]),
                change_each(ops.send, destination=0),
                change_each(ops.send, destination=2),
                change_each(ops.recv, source=1),
                on_all_devices(forget_to_receive),
            )
        ),
        whole("lower-devices", lambda p: with_kwargs(first(p.graphs()[0], ops.send), link="copy")),
    ],
    "replicas_meet_only_in_collectives": [
        at("replicate", feed_the_other_replica),
        at("schedule-overlap", feed_the_other_replica),
        at("insert-update", wait_for_the_other_replica),
        at("replicate", lambda graph: with_kwargs(first(graph, ops.read), replica=2)),
    ],
    "values_have_their_types": [
        *(
            at(pass_name, noted(ops.read, change))
            for pass_name in ("plan-buckets", "replicate", "lower-devices")
            for change in (torch.Tensor.double, lambda value: value.unsqueeze(0), lambda value: value[::2])
        ),
        at("insert-update", noted(ops.wait, torch.Tensor.double)),
        at("lower-devices", noted(ops.wait, lambda value: value[1:])),
        placed("replicate", noted(ops.slot, torch.Tensor.half)),
        *((pass_name, flat_region) for pass_name in ("outline-regions", "replicate")),
        sharded(noted(ops.wait, lambda value: value[:-1])),
    ],
    "dataflow_is_preserved": [
        *(at(p, read_another_variable) for p in ("plan-buckets", "outline-regions", "insert-update", "lower-devices")),
        *(at(p, exchange_what_a_region_is_given) for p in ("replicate", "schedule-overlap", "lower-devices")),
        at("lower-devices", give_another_loss),
    ],
    "variables_are_written_after_reads": [
        at("insert-update", use_a_view_after_the_update),
        at("lower-devices", use_a_view_after_the_update),
        at("schedule-overlap", update_before_a_region),
        on_every_device("lower-devices", update_before_a_region),
    ],
    "updates_in_parts_take_shares_alone": [
        in_parts(look_at_what_is_made_in_parts),
        in_parts(lambda graph: look_beside_a_bound(graph, at_the_bounded=False)),
        in_parts(lambda graph: look_beside_a_bound(graph, at_the_bounded=True)),
        in_parts(lambda graph: with_kwargs(first(graph, ops.update), part_elements=0)),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.update), part_elements=150)),
        at("lower-collectives", lambda graph: with_kwargs(first(graph, ops.update), part_elements=150)),
    ],
    "a_step_commits_once": [
        at("insert-update", lambda graph: erase(graph, first(graph, ops.commit))),
        at("lower-devices", lambda graph: erase(graph, first(graph, ops.commit))),
        at("insert-update", lambda graph: repeat(graph, first(graph, ops.commit))),
        at("lower-devices", lambda graph: first(graph, ops.pack).prepend(first(graph, ops.commit))),
        at("schedule-overlap", lambda graph: first(graph, ops.all_reduce).prepend(first(graph, ops.commit))),
        at("schedule-overlap", lambda graph: first(graph, ops.update).append(first(graph, ops.commit))),
        at("lower-devices", lambda graph: first(graph, ops.update).append(first(graph, ops.commit))),
        at("schedule-overlap", update_early),
        whole("lower-devices", optimize_before_the_commit),
        over_workers(on_all_devices(lambda graph: first(graph, ops.exchange).append(first(graph, ops.commit)))),
        over_workers(on_all_devices(lambda graph: with_kwargs(first(graph, ops.commit), early=False))),
        over_workers(lambda program: with_kwargs(first(program.graphs()[1], ops.commit), early=False)),
        over_workers(
            on_all_devices(lambda graph: first(graph, ops.commit).append(next(iter(first(graph, ops.exchange).users)))),
            early_update=False,
        ),
        on_every_device("lower-devices", lambda graph: with_kwargs(first(graph, ops.commit), early=True)),
    ],
    "every_bucket_is_updated_once": [
        sending(make_the_whole_sum, is_dealt=True),
        *(cut_at(unpack_in_another_order, name) for name in ("insert-update", "schedule-overlap", "lower-devices")),
        whole("lower-collectives", send_gradients),
        whole("lower-devices", send_gradients),
        over_workers(on_all_devices(leave_an_exchange_out)),
        over_workers(on_all_devices(leave_an_exchange_out), "reduce-over-workers"),
        over_workers(lambda program: program.evolve(workers=Workers())),
        at("insert-update", lambda graph: erase(graph, first(graph, ops.update))),
        at("insert-update", lambda graph: repeat(graph, first(graph, ops.update))),
        at("lower-devices", lambda graph: erase(graph, first(graph, ops.update))),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.update), bucket=1)),
        at("insert-update", lambda g: set_args(first(g, ops.update), (targets(g, ops.update)[-1].args[0],))),
        gathering(on_all_devices(store_gradient_rows)),
        gathering(on_all_devices(send_all_for_rows)),
        gathering(on_all_devices(forget_to_store_rows)),
    ],
    "reductions_fit_the_placement": [
        sharded(lambda graph: setattr(first(graph, ops.reduce_scatter), "target", ops.all_reduce)),
        bucket_change("schedule-overlap", lambda b: (replace(b[0], placement=Placement.SHARED), b[1])),
        bucket_change("lower-devices", lambda b: (b[0], replace(b[1], placement=Placement.SHARED))),
        owned(
            lambda graph: with_kwargs(first(graph, ops.reduce), root=1 - int(first(graph, ops.reduce).kwargs["root"]))
        ),
        owned(lambda graph: setattr(first(graph, ops.reduce), "target", ops.reduce_scatter)),
    ],
    "owners_update_alone": [
        owned(take_parameters_before_their_update),
        owned(take_parameters_before_their_update, "lower-devices"),
    ],
    "shared_parameters_are_written_last": [
        sharded(use_a_view_while_others_update),
        sharded(lambda graph: move_to_end(graph, first(graph, ops.wait), first(graph, ops.update))),
        sharded(lambda graph: write_before_the_wait(graph, replica=1)),
    ],
    "links_join_their_devices": [
        sharded(lambda graph: with_kwargs(first(graph, ops.reduce_scatter), link="nccl")),
        on_every_device(
            "lower-devices", lambda graph: [with_kwargs(n, link="nccl") for n in targets(graph, ops.all_reduce)]
        ),
        on_every_device(
            "lower-devices", lambda graph: [with_kwargs(n, link="no-such") for n in targets(graph, ops.all_reduce)]
        ),
    ],
    "every_collective_has_a_link": [
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.all_reduce), link=None)),
    ],
    "collectives_have_the_same_order": [
        at("lower-devices", launch_in_another_order),
        at("lower-devices", lambda graph: with_kwargs(first(graph, ops.all_reduce), link="copy")),
    ],
    "microbatches_make_up_the_shards": [
        microbatched("place-gradients", lambda program: program.evolve(microbatches=((4,), (2, 2)))),
        microbatched("place-gradients", lambda program: program.evolve(microbatches=((2, 3), (2, 2)))),
        microbatched("place-gradients", lambda program: program.evolve(shard_of_microbatch=((0, 0), (0, 1)))),
        microbatched("lower-devices", lambda program: program.evolve(microbatches=((2, 2),))),
    ],
    "each_microbatch_gives_its_factors": [
        factored(lambda factors: factors[:2]),
        factored(lambda factors: factors + factors[:2]),
        factored(lambda factors: factors[:2] * 2),
    ],
    "each_microbatch_is_taken_once": [
        microbatched("replicate", on_first_graph(lambda graph: with_kwargs(first(graph, ops.microbatch), index=1))),
        microbatched("lower-devices", on_first_graph(lambda graph: with_kwargs(first(graph, ops.microbatch), index=1))),
        microbatched("lower-devices", lambda program: program.evolve(microbatches=((1, 3), (2, 2)))),
    ],
    "gradients_are_added_where_they_are": [
        microbatched(
            "accumulate-microbatches", on_first_graph(lambda graph: call_instead(graph, "bwd_0", "bwd_0_adding"))
        ),
        microbatched(
            "accumulate-microbatches", on_first_graph(lambda graph: call_instead(graph, "bwd_0_adding", "bwd_0"))
        ),
        microbatched("accumulate-microbatches", on_first_graph(return_an_earlier_gradient)),
    ],
    "a_program_belongs_to_a_worker": [
        over_workers(lambda program: program.evolve(workers=Workers((1, 2, 1), 0))),
        over_workers(lambda program: program.evolve(workers=Workers((1, 2, 1), 3)), "share-parameters"),
        over_workers(lambda program: program.evolve(workers=Workers((0, 2, 1), 1)), "plan-buckets"),
    ],
    "buckets_are_exchanged_in_the_order_of_the_plan": [
        cut(on_all_devices(exchange_packs_in_another_order), "reduce-over-workers", over_workers=True),
        over_workers(on_all_devices(exchange_in_another_order)),
        over_workers(on_all_devices(exchange_in_another_order), "reduce-over-workers"),
        ("lower-devices", lambda program: program.evolve(workers=Workers((2, 1), 0))),
    ],
    "workers_exchange_their_sums": [
        over_workers(on_all_devices(lambda graph: with_kwargs(first(graph, ops.exchange), op="avg"))),
        over_workers(
            on_all_devices(lambda graph: set_args(first(graph, ops.exchange), first(graph, ops.exchange).args[::-1])),
            "reduce-over-workers",
        ),
        over_workers(on_all_devices(use_what_is_exchanged), "reduce-over-workers"),
        over_workers(on_all_devices(use_what_is_exchanged)),
    ],
    "compressed_sums_are_decompressed": [
        compressed(use_what_is_compressed),
        compressed(decompress_another_bucket),
        compressed(lambda graph: repeat(graph, first(graph, ops.compress))),
        compressed(lambda graph: repeat(graph, first(graph, ops.compress)), "compress-exchange"),
    ],
    "parts_include_the_residual": [
        sent_as_payload(use_what_was_not_sent),
        sent_as_payload(leave_out_what_was_not_sent),
        sent_in_part(use_what_was_not_sent),
        sent_in_part(leave_out_what_was_not_sent),
        sent_in_part(lambda graph: repeat(graph, first(graph, ops.add_unsent))),
        sent_in_part(lambda graph: repeat(graph, first(graph, ops.add_unsent)), "send-largest"),
    ],
    "workers_update_equal_parts_in_their_order": [
        dealt_out(update_the_part_of_another_worker),
        dealt_out(update_the_part_of_another_worker, "shard-optimizer"),
        dealt_out(lambda program: program.evolve(workers=replace(program.workers, shards_optimizer=False))),
        over_workers(lambda program: program.evolve(workers=replace(program.workers, shards_optimizer=True))),
    ],
    "sums_reach_their_updates": [
        over_workers(on_all_devices(lambda graph: setattr(first(graph, ops.exchange), "target", ops.scatter_sums))),
    ],
    "new_parameters_are_gathered_once": [
        dealt_out(on_all_devices(leave_parameters_behind)),
        dealt_out(on_all_devices(leave_parameters_behind), "shard-optimizer"),
        dealt_out(on_all_devices(gather_in_another_order)),
        dealt_out(on_all_devices(gather_before_the_update)),
    ],
    "workers_send_their_factors": [
        sending(on_all_devices(send_a_whole_gradient)),
        sending(on_all_devices(send_a_copy)),
    ],
    "updates_leave_out_unused_parameters": [
        plain(functools.partial(leave_out, False)),
        plain(functools.partial(leave_out, False), "plan-buckets"),
        ("plan-buckets", functools.partial(leave_out, True)),
        ("lower-devices", functools.partial(leave_out, True)),
    ],
    "a_gradient_is_taken_once": [
        plain(take_a_gradient_again),
        plain(take_a_gradient_again, "outline-regions"),
        plain(call_a_region_again, "outline-regions"),
        plain(begin_with_another_tangent),
    ],
    "regions_take_gradients_by_tokens": [plain(compute_of_which_backward)],
    "sparse_tables_have_separate_buckets": [
        gathering(plan_otherwise(lambda bucket: with_rule(bucket, elementwise=True))),
        gathering(
            plan_otherwise(lambda bucket: replace(bucket, slots=bucket.slots * 2) if bucket.rule.takes_rows else bucket)
        ),
    ],
    "rows_stay_rows": [
        gathering(on_all_devices(functools.partial(pack_a_whole_gradient, True))),
        gathering(on_all_devices(add_up_rows)),
        gathering(on_all_devices(add_up_rows), "insert-all-reduce"),
        gathering(on_all_devices(send_rows), "insert-all-reduce"),
    ],
    "stored_rows_are_those_of_the_step": [
        *(gathering(write_other_rows, pass_name) for pass_name in ("send-rows", "lower-devices")),
        gathering(on_all_devices(take_rows_by_another_sum)),
        gathering(on_all_devices(store_rows_by_another_sum)),
    ],
    "devices_gather_their_factors": [
        gathering(on_all_devices(gather_a_copy)),
        gathering(on_all_devices(functools.partial(pack_a_whole_gradient, False))),
        gathering(plan_otherwise(lambda bucket: replace(bucket, gathers_factors=False))),
    ],
    "no_device_waits_forever": [whole("lower-devices", receive_before_taking_part), meeting(waits_before_a_meeting)],
    "replicas_meet_alike": [
        *(
            meeting(change, pass_name)
            for change in (under_other_numbers, alone, with_fewer_rows)
            for pass_name in ("replicate", "lower-devices")
        ),
        meeting(under_one_number, "replicate"),
        meeting(behind_other_rows, stages=stages_of_worker),
        meeting(behind_too_many_rows, stages=stages_of_worker),
    ],
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
