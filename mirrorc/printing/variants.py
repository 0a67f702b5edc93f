"""Groups devices with equal programs, and prints the lines above their function."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from itertools import accumulate

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, replica_of, target_name
from mirrorc.ir.program import Accumulation, ArgumentKind, Program, Property
from mirrorc.messages.source_lines import module_of, source_line
from mirrorc.messages.wording import counted, listed
from mirrorc.printing.printed_values import range_text, spans, type_of

EACH = "each"
"""Stands in the device column of a line that every device runs."""


def device_column(program: Program, devices: Sequence[str]) -> str:
    if len(devices) == 1:
        return devices[0]
    return EACH if len(devices) == program.num_replicas else spans(devices)


def device_names(program: Program, replicas: Iterable[int]) -> list[str]:
    return [program.devices[replica].name for replica in replicas]


def groups(keys: Iterable[Hashable]) -> list[list[int]]:
    """Groups replicas with equal keys, in the order of each group's first replica."""
    replicas_of: dict[Hashable, list[int]] = {}
    for replica, key in enumerate(keys):
        replicas_of.setdefault(key, []).append(replica)
    return list(replicas_of.values())


def variants_of_mirrored(program: Program) -> list[list[int]]:
    """Groups the mirrored graph's replicas by types of arguments and numbers of examples."""
    types: list[list[tuple[str, str]]] = [[] for _ in program.devices]
    for node in calls_to(program.mirrored_graph, ops.argument):
        replica = replica_of(node)
        if replica is not None and replica < len(types):
            types[replica].append((str(node.kwargs["name"]), type_of(node.meta.get("val"))))
    return groups((tuple(of_replica), num_examples(program, replica)) for replica, of_replica in enumerate(types))


def num_examples(program: Program, replica: int) -> int | None:
    return program.num_examples[replica] if len(program.num_examples) == program.num_replicas else None


def heading(program: Program, replicas: Sequence[int]) -> list[str]:
    """The lines above a function. Facts that hold for all are only above the first function with examples."""
    is_first = program.first_present in replicas
    several = len(replicas) > 1
    numbers = spans(program.local_replicas[replica] for replica in replicas)
    who = f"# {spans(device_names(program, replicas))} (replica{'s' if several else ''} {numbers})"
    whose = "this worker's" if program.workers.are_several else "the batch's"
    verb = "run this" if several else "runs this"
    count = num_examples(program, replicas[0])
    if count is None:
        return [f"{who} {verb}", *_seed_lines(program, is_first)]
    total, each = sum(program.num_examples), " each" if several else ""
    if count == 0:
        they = "they add" if several else "it adds"
        return [f"{who} {verb} on none of {whose} {counted(total, 'example')}: {they} zeros to each sum"]
    return [
        f"{who} {verb} on {count} of {whose} {total} example{'s' if total > 1 else ''}{each}",
        *_example_lines(program, replicas),
        *(_tangent_lines(program, is_first) if program.takes_tangents else []),
        *([_weight_line(program, count, total, is_first)] if program.trains else []),
        *_seed_lines(program, is_first),
    ]


def _example_lines(program: Program, replicas: Sequence[int]) -> list[str]:
    ends = list(accumulate(program.num_examples))
    parts = [
        f"{program.devices[replica].name} {range_text(ends[replica] - program.num_examples[replica], ends[replica])}"
        for replica in replicas
    ]
    return wrapped("examples by their place in the batch, from 0: ", parts)


_OF_CALLS = {
    Accumulation.ADDS: " · examples of this call / of the first since the last update",
    Accumulation.ENDS: " · examples of this call / of all since the last update",
}


def _tangent_lines(program: Program, is_first: bool) -> list[str]:
    tangents = [a.name for a in program.arguments if a.kind is ArgumentKind.TANGENT]
    kept = sum(a.kind is ArgumentKind.SAVED for a in program.arguments)
    if not is_first:
        return []
    of_outputs = wrapped("this replica's part of the gradients of outputs, which autograd gives: ", tangents)
    return [*of_outputs, *([f"#   {counted(kept, 'activation')}: what forward of this batch has kept"] if kept else [])]


def _weight_line(program: Program, examples: int, total: int, is_first: bool) -> str:
    name = next((a.name for a in program.arguments if a.kind is ArgumentKind.LOSS_WEIGHT), "loss_weight")
    if program.takes_tangents:
        why = ": the parameters' gradients of the batch's loss are sums over replicas"
        weight = "the worker's weight in the sum over workers" if program.workers.are_several else "1"
        return f"#   {name} = {weight}{why if is_first else ''}"
    scaled = " · loss_scale" if Property.UNSCALED in program.properties else ""
    if program.loss_reduction == "mean":
        scaled += _OF_CALLS.get(program.accumulation, "")
    if program.loss_reduction == "sum":
        why = ": the loss is a sum over examples, so that of the batch is the sum over replicas"
        return f"#   {name} = 1{scaled}{why if is_first else ''}"
    if program.workers.are_several:
        why = ", its part of all examples: backward begins with it, so the gradient of their mean loss is the sum over replicas"
        everyone = f"(examples of all {program.workers.num_workers} workers in this step)"
        return f"#   {name} = {examples}/{everyone}{scaled}{why if is_first else ''}"
    why = ", its part of the batch: backward begins with it, so the gradient of the batch's mean loss is the sum over replicas; "
    why += "the returned loss is weighted alike"
    return f"#   {name} = {examples}/{total}{scaled}{why if is_first else ''}"


def _seed_lines(program: Program, is_first: bool) -> list[str]:
    name = next((a.name for a in program.arguments if a.kind is ArgumentKind.SEED), None)
    if name is None:
        return []
    where = listed(_random_modules(program))
    why = f": each replica draws random numbers of its own{where and f', in {where}'}; the step's seed is one draw of torch's "
    why += "default generator"
    why += ", on worker 0" if program.workers.are_several else ""
    return [f"#   {name} = mix(seed of the step, number of the replica){why if is_first else ''}"]


def _random_modules(program: Program) -> list[str]:
    bodies = [region.graph_module.graph for region in program.regions.values() if region.phase == "forward"]
    nodes = (node for graph in bodies or program.shard_graphs for node in graph.nodes)
    seeded = (node for node in nodes if target_name(node.target).startswith(_SEEDED))
    return list(dict.fromkeys(module_of(node) or source_line(node) for node in seeded))


_SEEDED = "mirrorc.seeded_"  # the beginning of the names of all random operators
_WIDTH = 158


def wrapped(title: str, parts: Sequence[str]) -> list[str]:
    """A comment ``#   TITLE part, part, ...``. Further lines are indented more."""
    lines, line = [], f"#   {title}"
    for i, part in enumerate(parts):
        piece = part + (", " if i + 1 < len(parts) else "")
        if len(line) + len(piece.rstrip()) > _WIDTH and not line.endswith(title) and line.strip("# "):
            lines.append(line.rstrip())
            line = "#       "
        line += piece
    return [*lines, line]
