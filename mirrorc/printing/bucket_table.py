"""Prints the bucket table."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.analysis.buckets.slots_of_values import packed_slots
from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import calls_to, is_region_call, pack_of, region_of, region_title
from mirrorc.ir.program import Program, Stage
from mirrorc.printing.folding import folded
from mirrorc.printing.printed_values import dtype_name, range_text, size_text
from mirrorc.printing.variants import wrapped

_LAYER = re.compile(r"((?:[A-Za-z_]\w*\.)+)(\d+)\.([\w.]+)")
SENT_AS_FACTORS = "sent as factors"

PLANNED = "to be owned by"
"""Precedes the owner's name until a pass moves the update to the owner."""

_LISTED_SHARES = 8  # the most shares that a folded table lists; of more, it lists the first two and the last
_WIDTH = 158
_INDENT = "#   "
_MORE = "#       "  # the beginning of a line that continues the one before


def table_lines(program: Program, *, slots: bool, fold: bool) -> list[str]:
    """The bucket table, then a line of hyperparameters per optimizer group."""
    ready = ready_after(program)
    lines: list[str] = []
    for bucket in program.buckets:
        last = max(pack.number for pack in bucket.launch_units)
        lines += [_row(program, bucket, ready.get(last, "")), *_members(bucket, slots)]
        lines += [*_packs(bucket, ready), *_shares(program, bucket, fold)]
    lines = folded(lines, "# … bucket ", lambda line: line.startswith("# bucket ")) if fold else lines
    labels = dict.fromkeys(bucket.rule.label for bucket in program.buckets)
    held = ((label, program.optimizer_groups[label]) for label in labels if label in program.optimizer_groups)
    return [
        *lines,
        *(f"# optimizer {label}: {values} (at compilation; a step reads param_groups anew)" for label, values in held),
    ]


def _row(program: Program, bucket: Bucket, ready_after: str) -> str:
    placement = bucket.placement.value.in_table
    if bucket.owner is not None and 0 <= bucket.owner < program.num_replicas:
        placement = f"{placement if bucket.has_owner else PLANNED} {program.devices[bucket.owner]}"
    rule = bucket.rule.label + (f" · {placement}" if placement else "")
    rule += f" · {SENT_AS_FACTORS}" if bucket.is_sent_as_factors else ""
    rule += f" · ready after {ready_after}" if ready_after else ""
    head = f"# bucket {bucket.index}  {dtype_name(bucket.dtype)}  {size_text(bucket.num_bytes):>9}"
    return f"{head}  {len(bucket.slots)} gradient{'s' if len(bucket.slots) != 1 else ''}  {rule}"


@dataclass
class _Members:
    """Equal gradients ``names`` in consecutive layers of a bucket: ``path``, numbers ``first`` to ``last``."""

    path: str
    first: int
    last: int
    names: list[str]

    def title(self) -> str:
        if not self.path:
            return ""
        layers = f"{self.path}{self.first}"
        return f"{layers}: " if self.first == self.last else f"{layers} … {self.path}{self.last}: "


def _members(bucket: Bucket, slots: bool) -> list[str]:
    if slots:
        return [f"#     {slot.variable}{list(slot.shape)}" for slot in bucket.slots]
    lines: list[str] = []
    for members in _alike(_layers(bucket)):
        line = _INDENT + members.title()
        for i, name in enumerate(members.names):
            if len(line) + len(name) > _WIDTH and i:
                lines.append(line.rstrip())
                line = _MORE
            line += name + " "
        lines.append(line.rstrip())
    return lines


def _layers(bucket: Bucket) -> list[_Members]:
    layers: list[_Members] = []
    for slot in bucket.slots:
        match = _LAYER.fullmatch(slot.variable)
        path, number, name = (match[1], int(match[2]), match[3]) if match else ("", 0, slot.variable)
        if not layers or (layers[-1].path, layers[-1].first) != (path, number):
            layers.append(_Members(path, number, number, []))
        layers[-1].names.append(f"{name}{list(slot.shape)}")
    return layers


def _alike(layers: Iterable[_Members]) -> list[_Members]:
    joined: list[_Members] = []
    for layer in layers:
        last = joined[-1] if joined else None
        if last is not None and layer.path and (last.path, last.names) == (layer.path, layer.names):
            step = layer.first - last.last
            if abs(step) == 1 and (last.first == last.last or (last.last - last.first) * step > 0):
                last.last = layer.first
                continue
        joined.append(layer)
    return joined


def _packs(bucket: Bucket, ready: Mapping[int, str]) -> list[str]:
    parts = []
    for pack in bucket.packs:
        after = ready.get(pack.number, "").rpartition(" in ")[2]
        parts.append(f"p{pack.number} {range_text(pack.start, pack.stop)}" + (f" after {after}" if after else ""))
    return wrapped(f"packs, of elements 0 … {bucket.num_elements - 1}: ", parts) if bucket.packs else []


def _shares(program: Program, bucket: Bucket, fold: bool) -> list[str]:
    if bucket.has_owner or (not bucket.updates_by_shares and bucket.part is None):
        return []
    parts = [
        f"{device.name} {range_text(*bucket.updated(replica, program.num_replicas))}"
        for replica, device in enumerate(program.devices)
    ]
    if fold and len(parts) > _LISTED_SHARES:
        parts = [*parts[:2], "…", parts[-1]]
    of = f"elements 0 … {bucket.num_elements - 1}"
    if bucket.part is not None:
        of = f"this worker's elements {range_text(bucket.part.start, bucket.part.stop)} of {bucket.num_elements}"
    return wrapped(f"shares, of {of}: ", parts)


def ready_after(program: Program) -> dict[int, str]:
    last_gradients: dict[int, str] = {}
    graphs = program.graphs() if program.stage >= Stage.PACKED else []
    graphs = graphs[program.first_present :] if program.stage is Stage.LOWERED else graphs
    for node in calls_to(graphs[0], ops.pack) if graphs else ():
        if pack_of(node) not in last_gradients and node.args:
            names = [slot.variable for slot in packed_slots(program, node)]
            last_gradients[pack_of(node)] = _last_gradient(node, names)
    return last_gradients


def _last_gradient(pack: fx.Node, names: Sequence[str]) -> str:
    last: tuple[fx.Node, str] | None = None
    for gradient, name in itertools.zip_longest(pack.all_input_nodes, names, fillvalue=""):
        if not isinstance(gradient, fx.Node):
            continue
        for part in gradient.all_input_nodes if gradient.target in ops.FACTORED else [gradient]:
            call = part.args[0] if part.args else None
            if isinstance(call, fx.Node) and is_region_call(call) and (last is None or not call < last[0]):
                last = call, name
    return f"d({last[1]}) in {region_title(region_of(last[0]))}" if last is not None else ""
