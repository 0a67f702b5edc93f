"""The comments beside and above the lines of a graph."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from torch import fx

from mirrorc.analysis.buckets.rescaling import is_checked, numbers_of
from mirrorc.analysis.buckets.slots_of_values import gradient_of, is_partial, slot_arguments
from mirrorc.analysis.communication.compressed_sums import num_bytes_sent
from mirrorc.analysis.gradients.eager_gradients import taken_gradients
from mirrorc.analysis.gradients.factored_gradients import Maker, maker_of, stays_factored
from mirrorc.analysis.gradients.sparse_update_rows import most_rows
from mirrorc.analysis.gradients.tiled_updates import is_made_in_updates
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.gradient_forms import FORMS, GradientForm
from mirrorc.ir.nodes import (
    bucket_of,
    calls_to,
    is_compute,
    is_early,
    is_of,
    is_region_call,
    origin_of,
    pack_of,
    region_calls,
    region_of,
    replica_of,
)
from mirrorc.ir.operation import Kind
from mirrorc.ir.program import LOSS_OUTPUT, ArgumentKind, Program
from mirrorc.ir.type_rules import awaited_elements
from mirrorc.ir.variables import Role
from mirrorc.printing.printed_values import range_text, size_text, type_of

_OTHERWISE = {"raise": "ends here with an error", "skip": "ends here and returns its loss: no update is made"}


class LineComments:
    def __init__(self, program: Program) -> None:
        self._program = program
        # in the order in which the forward reads them
        self._place = {name: i for i, name in enumerate(program.variables)}
        self._common = _common_beginning(program)

    def of(self, node: fx.Node) -> str:
        if is_region_call(node):
            return self._modules(node)
        if is_of(node, Kind.FACTORED):
            return _factored(self._program, node)
        comment = _COMMENTS.get(node.target)
        return comment(self._program, node) if comment is not None else ""

    def _modules(self, call: fx.Node) -> str:
        program = self._program
        region = program.regions.get(region_of(call))
        if region is None:
            return ""
        is_forward = region.phase == "forward"
        reads = {str(node.kwargs["variable"]) for node in call.all_input_nodes if node.target is ops.read}
        about = (name for name in (reads if is_forward else _made_by(program, call)) if name in self._place)
        parameters = (name for name in about if program.variables[name].role is Role.PARAMETER)
        names = sorted(parameters, key=self._place.__getitem__, reverse=not is_forward)
        modules = list(dict.fromkeys(name.rpartition(".")[0] or name for name in names))
        span = " … ".join(module.removeprefix(self._common) for module in [*modules[:1], *modules[1:][-1:]])
        if is_forward:
            loss = " and the loss" if _gives_loss(program, call) else ""
            return f"forward of {span}{loss}" if span else f"forward{loss}"
        if span and taken_gradients(region.graph_module.graph):
            return f"backward of {span}, as plain PyTorch makes it"
        has_loss = program.has_loss and any(_is_loss_weight(program, origin_of(node)) for node in call.all_input_nodes)
        subject = ", ".join([*(["the loss"] if has_loss else []), *([span] if span else [])])
        return f"backward of {subject}" if subject else "backward"


def _gives_loss(program: Program, call: fx.Node) -> bool:
    """In training, the loss comes from the last forward call; in an evaluation, from the call whose loss is gathered."""
    if program.has_loss:
        replica = replica_of(call)
        forward = (n for n in region_calls(call.graph) if replica_of(n) == replica and _is_forward(program, n))
        return call is list(forward)[-1]
    gathered = (user for part in call.users for user in part.users if user.target is ops.gather)
    return any(node.kwargs["output"] == LOSS_OUTPUT for node in gathered)


def _is_forward(program: Program, call: fx.Node) -> bool:
    region = program.regions.get(region_of(call))
    return region is not None and region.phase == "forward"


def share_comment(program: Program, node: fx.Node, replica: int, others: bool) -> str:
    """The elements that a `wait` returns on one device; empty for a whole bucket.

    ``others``: the line stands for other devices, too; the bucket table has their shares.
    """
    launch = node.args[0] if node.target is ops.wait and node.args else None
    bucket = _bucket(program, node) if isinstance(launch, fx.Node) else None
    elements_here = awaited_elements(program, launch, replica) if bucket is not None else None
    if bucket is None or elements_here is None:
        return ""
    start, stop = elements_here
    if bucket.has_owner:
        where = f"{program.devices[bucket.owner or 0]} alone gets the sum"
        return where if start == stop or others else ""
    elements = f"elements {range_text(start, stop)}" if start < stop else "no elements"
    where = f" on {program.devices[replica].name}, others: see bucket {bucket.index}" if others else ""
    return f"{elements} of {bucket.num_elements}{where}"


def explanations(program: Program, graph: fx.Graph) -> dict[fx.Node, list[str]]:
    """Explanations of slots, of factored gradients, and of the first writes of parameters, by the node below."""
    return {**_of_slots(program, graph), **_of_factors(program, graph), **_of_writing(program, graph)}


def _of_slots(program: Program, graph: fx.Graph) -> dict[fx.Node, list[str]]:
    if graph is not program.graphs()[0]:
        return {}  # only the first graph explains slots
    taking = (call for call in region_calls(graph) if any(node.target is ops.slot for node in call.all_input_nodes))
    first = next(taking, None)
    text = "a slot is a gradient's place in its bucket's memory: backward writes there (\"in place\")"
    return {first: [text]} if first is not None else {}


def _of_factors(program: Program, graph: fx.Graph) -> dict[fx.Node, list[str]]:
    gradients = [node for node in calls_to(graph, *ops.FACTORED) if maker_of(node) is Maker.SHARES]
    is_sent = all(user.target is ops.gather_factors for node in gradients for pack in node.users for user in pack.users)
    whose = "this worker's replicas'" if program.workers.are_several and not is_sent else "all replicas'"
    when = " or ".join(sorted({"in the update" if is_made_in_updates(node) else "at the wait" for node in gradients}))
    makes = "the first device makes it" if program.leaves_gradients else "each device makes its own share of it"
    text = f"a factored gradient is not made here: {when} {makes}, of {whose} factors"
    return ({gradients[0]: [text]} if gradients else {}) | _of_gathered(program, graph)


def _of_gathered(program: Program, graph: fx.Graph) -> dict[fx.Node, list[str]]:
    lines: dict[str, fx.Node] = {}
    for node in calls_to(graph, *ops.FACTORED):
        bucket = _bucket(program, node)
        if maker_of(node) is Maker.GATHERED and bucket is not None:
            rows, whole = "the device that steps adds up the rows", "each device makes the sum"
            lines.setdefault(rows if bucket.rule.takes_rows else whole, node)
    return {
        node: [f"a gathered gradient is not made here: at the wait {made} of it, of all replicas' factors"]
        for made, node in lines.items()
    }


def _of_writing(program: Program, graph: fx.Graph) -> dict[fx.Node, list[str]]:
    commit = next(calls_to(graph, ops.commit), None)
    if commit is None:
        return {}
    piece, written = ("backward", "parameters") if program.trains or program.takes_tangents else ("forward", "buffers")
    written = "accumulated gradients" if program.accumulates else written
    written = "gradients of the user's parameters" if program.leaves_gradients else written
    who = f"{piece} is done" if program.num_replicas == 1 else f"commit waits until all devices are done with {piece}"
    here = " on this worker" if program.workers.are_several else ""
    rest = f"nothing stops the step{here} any more"
    if is_early(commit):
        who = f"{who}, on all other workers, too"
    if is_early(commit) or any(calls_to(graph, ops.gather_parameters)):
        rest = "only a lost connection may fail it"
    begun = "autograd gets the gradients" if program.takes_tangents else f"{written} may be written"
    lines = {commit: [f"{begun} from here on: {who}; a failure before it changes nothing, and behind it {rest}"]}
    if is_checked(commit):
        where = "" if program.num_replicas == 1 else " on every device"
        where = " on every device of all workers" if program.workers.are_several else where
        otherwise = _OTHERWISE.get(str(commit.kwargs.get("otherwise")), "")
        lines[commit].insert(0, f"unless all of this is finite{where}, the step {otherwise}")
    late = [wait for wait in calls_to(graph, ops.wait) if wait > commit]
    waits = [wait for wait in late if wait.all_input_nodes[0].target in ops.REDUCTIONS]
    order = list(dict.fromkeys(bucket_of(node) for node in waits))
    if len(order) > 1 and order == sorted(order, reverse=True):
        lines[waits[0]] = [
            "the bucket that was launched last is waited for first, and the others in the reverse order of their launches"
        ]
    return lines


def _bucket(program: Program, node: fx.Node) -> Bucket | None:
    index = bucket_of(node)
    return program.buckets[index] if 0 <= index < len(program.buckets) else None


def _common_beginning(program: Program) -> str:
    first = {name.partition(".")[0] for name, variable in program.variables.items() if variable.role is Role.PARAMETER}
    return f"{next(iter(first))}." if len(first) == 1 else ""


def _is_loss_weight(program: Program, node: fx.Node) -> bool:
    if node.op != "placeholder" and node.target is not ops.argument:
        return False
    name = str(node.kwargs.get("name", node.target))
    return any(argument.kind is ArgumentKind.LOSS_WEIGHT and argument.name == name for argument in program.arguments)


def _made_by(program: Program, call: fx.Node) -> set[str]:
    gradients: Any = call.kwargs.get("gradients") or {}
    factored = (user for part in call.users for user in part.users if user.target in ops.FACTORED)
    partial = {gradient_of(part) for part in call.users if is_partial(program, part)}
    return {*(gradients.keys() - partial), *(str(node.kwargs["variable"]) for node in factored)}


def _factored(program: Program, node: fx.Node) -> str:
    form = FORMS.get(node.target)
    types = [type_of(factor.meta.get("val")) for factor in node.args if isinstance(factor, fx.Node)]
    made_of = _sum(form, types) if form is not None else ", ".join(types)
    maker = maker_of(node)
    if maker is Maker.SHARES and is_made_in_updates(node):
        return f"{made_of}, made by shares in the update"
    maker = Maker.GATHERED if maker is Maker.SHARES and program.leaves_gradients else maker
    return f"{made_of}, made {maker.value}" if maker is not None else made_of


def _sum(form: GradientForm, types: Sequence[str]) -> str:
    """A sum over factors that counts equal terms: ``4 x (f32[8, 2] @ f32[2, 8])``."""
    parts = [form.expression(*part) for part in form.parts(types)]
    if len(parts) == 1:
        return parts[0]
    counts = [(part, sum(1 for _ in alike)) for part, alike in itertools.groupby(parts)]
    return " + ".join(f"{number} x ({part})" if number > 1 else part for part, number in counts)


def _packed(program: Program, node: fx.Node) -> str:
    if not node.args:
        return "zeros: this device has no examples"
    counts = {"in place": 0, "copied": 0, "factored": 0}
    in_place: dict[fx.Node, set[int]] = {}
    for gradient in node.args:
        if isinstance(gradient, fx.Node):
            counts[_way_of(gradient, in_place)] += 1
    kinds = [way for way, number in counts.items() if number]
    return ", ".join(f"{counts[way]} {way}" for way in (kinds if len(kinds) < 2 else counts))


def _way_of(gradient: fx.Node, in_place: dict[fx.Node, set[int]]) -> str:
    if stays_factored(gradient):
        return "factored"
    call = origin_of(gradient).args[0] if gradient.args else None
    if is_compute(gradient) or not isinstance(call, fx.Node) or not is_region_call(call):
        return "copied"
    if call not in in_place:
        in_place[call] = _places_in_slots(call)
    return "in place" if gradient.args[1:] and gradient.args[1] in in_place[call] else "copied"


def _places_in_slots(call: fx.Node) -> set[int]:
    gradients: Any = call.kwargs.get("gradients") or {}
    slots = {str(slot.kwargs["variable"]) for _, slot in slot_arguments(call)}
    return {place for name, place in gradients.items() if name in slots}


def _updated(program: Program, node: fx.Node) -> str:
    bucket = _bucket(program, node)
    if bucket is None:
        return ""
    if bucket.has_owner:
        return f"{bucket.rule.label}, once for all replicas"
    is_share = bucket.placement.value.updates_by_shares
    part = f", worker {program.workers.rank}'s part of {program.workers.num_workers}" if bucket.part is not None else ""
    return bucket.rule.label + part + (f", this device's share of {program.num_replicas}" if is_share else "")


def _of_all_factors(program: Program, node: fx.Node) -> str:
    bucket = _bucket(program, node)
    part = ", of which each makes its part" if bucket is not None and bucket.part is not None else ""
    return f"those of {program.workers.num_workers} workers, one product or sum of all{part}"


def _optimizer_step(program: Program, node: fx.Node) -> str:
    running: Any = node.kwargs["buckets"]
    names = dict.fromkeys(_optimizer_of(program.buckets[index]) for index in running)
    if len({*names, *map(_optimizer_of, program.buckets)}) == 1:
        return "the optimizer's own step, once for all replicas"
    whose = [f"{name}'s" for name in names]
    return f"{' and '.join(whose)} own step, once for all replicas"


def _rows(program: Program, node: fx.Node) -> str:
    bucket = _bucket(program, node)
    if bucket is None or not bucket.rule.takes_rows:
        return ""
    return f"the rows that the gradient has, at most {most_rows(program, bucket.index)} of {bucket.slots[0].shape[0]}"


def _optimizer_of(bucket: Bucket) -> str:
    return bucket.rule.label.partition(" group ")[0]


def _gathered(node: fx.Node) -> str:
    return f"{type_of(node.all_input_nodes[0].meta.get('val'))}, this device's part" if node.all_input_nodes else ""


def _of_present(program: Program) -> str:
    count = len(program.present)
    return f"of all {count} devices" if count == program.num_replicas else f"of the {count} devices that have examples"


def _of_payload(program: Program, node: fx.Node) -> str:
    sent, whole = num_bytes_sent(program, node), program.packs[pack_of(node)]
    num_bytes = whole[1].num_elements * whole[0].dtype.itemsize
    return (
        f"{size_text(sent)} in place of {size_text(num_bytes)} summed over {program.workers.num_workers} workers: this changes "
        "numbers"
    )


_COMMENTS: Mapping[Any, Callable[[Program, fx.Node], str]] = MappingProxyType(
    {
        ops.check: lambda program, node: f"or the step stops: {node.kwargs['text']!r}",
        ops.gather: lambda program, node: _gathered(node),
        ops.keep: lambda program, node: "for backward",
        ops.add_to_grad: lambda program, node: "autograd adds it to p.grad" if program.takes_tangents else "",
        ops.sum_over_replicas: lambda program, node: f"{_of_present(program)}, awaited here",
        ops.rows_of_replicas: lambda program, node: f"{_of_present(program)}, awaited here",
        ops.own_rows_of_sum: lambda program, node: f"{_of_present(program)}, awaited here; its own rows",
        ops.pack: _packed,
        ops.update: _updated,
        ops.compress: lambda program, node: "rounded for the wire: this changes numbers",
        ops.add_unsent: lambda program, node: "what earlier steps have not sent",
        ops.gather_largest: lambda program, node: (
            f"the largest {node.kwargs['count']} elements of each of {program.workers.num_workers} workers: this changes numbers"
        ),
        ops.exchange_payload: _of_payload,
        ops.exchange: lambda program, node: f"summed over {program.workers.num_workers} workers",
        ops.scatter_sums: lambda program, node: (
            f"summed over {program.workers.num_workers} workers, each gets its part"
        ),
        ops.gather_parameters: lambda program, node: (
            f"each of {program.workers.num_workers} workers has updated its part"
        ),
        ops.gather_factors: _of_all_factors,
        ops.step_optimizer: _optimizer_step,
        ops.updated_rows: _rows,
        ops.store_rows: _rows,
        ops.commit: lambda program, node: (
            f"norms of all {program.workers.num_all_replicas} devices of {program.workers.num_workers} workers"
            if program.has_sharded_optimizer and numbers_of(node)
            else ""
        ),
    }
)


def owner_of(program: Program, node: fx.Node) -> str:
    """The device of a node of the mirrored graph; ``all`` for collectives."""
    replica = replica_of(node)
    return program.devices[replica].name if replica is not None and replica < program.num_replicas else "all"
