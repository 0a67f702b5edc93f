"""Prints programs.

The printed form::

    text      = heading bucket* remark* function+ region*
    heading   = "# mirrorc · after PASS · stage STAGE · N devices · N buckets · MS ms"
    bucket    = "# bucket INDEX  DTYPE  SIZE  VARIABLE[SHAPE] ...  RULE"
    remark    = "# note: TEXT"
    function  = "def DEVICE(NAME: TYPE, ...):" [ "# DEVICE runs the same as replica N" ] line+
    line      = [ DEVICE "|" ] [ NAME, ... "=" ] OPERATION "(" ARGUMENT, ... ")" [ "# FILE:LINE  CODE" ]
    region    = "region NAME(NAME: TYPE, ...):" statement+

Devices that run the same program are printed once. Values have the same names in every run: ``loss``; ``b0``, a packed
bucket; ``b0_pending``, the same in flight; ``b0_sum``, reduced; variables by their own names. Long lists are counted:
``93 saved`` are activations kept for backward, ``75 variables`` are parameters and buffers read. Bodies of regions are left
out unless asked for.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc import ops
from mirrorc.program import Bucket, Placement, Program, Stage
from mirrorc.source_lines import source_line

_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_LISTED = 4  # so many values of one kind are listed by name, more are counted
_LISTED_WIDTH = 48  # and no more than fit in so many columns
_LISTING_ORDER = (
    "argument",
    "loss",
    "gradient",
    "variable",
    "bucket",
    "pending",
    "reduced",
    "token",
    "write",
    "saved",
    "slot",
)
_ALWAYS_LISTED = ("argument", "bucket", "pending", "reduced", "token")
_WRITTEN = {"gradient": "d({})", "write": "new({})"}
_COUNTED = {"saved": "saved", "write": "new buffers"}
_COMMENT_COLUMN = 84
_LINE_WIDTH = 150


def program_to_text(
    program: Program, *, regions: bool = False, after: str = "", milliseconds: float | None = None
) -> str:
    """A program as text, in the form above. ``regions=True`` adds the bodies of the regions."""
    lines = [_heading(program, after, milliseconds)]
    lines += [_bucket_line(bucket, regions) for bucket in program.buckets]
    lines += [f"# note: {remark}" for remark in program.remarks]
    for shard, graph in enumerate(program.shard_graphs):
        users = [str(d) for d, s in zip(program.devices, program.shard_of_replica, strict=True) if s == shard]
        lines += ["", f"def one_device({_signature(graph)}):  # will run on {', '.join(users)}"]
        lines += _body(program, graph) if program.stage is Stage.OUTLINED else _statements(graph)
    if program.graph is not None:
        lines += ["", "def all_devices():", *_body(program, program.graph)]
    lines += _device_functions(program)
    if regions:
        for region in program.regions.values():
            graph = region.graph_module.graph
            lines += ["", f"region {region.name}({_signature(graph)}):", *_statements(graph)]
    return "\n".join(lines) + "\n"


def _heading(program: Program, after: str, milliseconds: float | None) -> str:
    parts = ["mirrorc", *([f"after {after}"] if after else []), f"stage {program.stage.name}"]
    parts += [_count(len(program.devices), "device"), _count(len(program.buckets), "bucket")]
    parts += [f"{milliseconds:.1f} ms"] if milliseconds is not None else []
    return "# " + " · ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _bucket_line(bucket: Bucket, full: bool) -> str:
    slots = [f"{slot.variable}{list(slot.shape)}" for slot in bucket.slots]
    if len(slots) > _LISTED and not full:
        slots = [slots[0], slots[1], f"… {len(slots) - 3} more …", slots[-1]]
    dtype, size = _DTYPES.get(bucket.dtype, bucket.dtype), _size(bucket.num_bytes)
    return f"# bucket {bucket.index}  {dtype}  {size:>9}  {' '.join(slots)}  {bucket.rule.label}"


def _size(num_bytes: int) -> str:
    if num_bytes < 2**20:
        return f"{num_bytes / 2**10:.1f} KiB"
    return f"{num_bytes / 2**20:.1f} MiB"


def type_of(value: Any) -> str:
    """A value's type: ``f32[2, 3]``, ``pending f32[8]``, a tuple of types, or nothing."""
    if isinstance(value, ops.Pending):
        return f"pending {type_of(value.value)}"
    if isinstance(value, torch.Tensor):
        return f"{_DTYPES.get(value.dtype, value.dtype)}[{', '.join(str(size) for size in value.shape)}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(type_of(v) for v in value)})"
    return type(value).__name__ if value is not None else ""


def _signature(graph: fx.Graph) -> str:
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    return ", ".join(f"{node.target}: {type_of(node.meta.get('val'))}" for node in placeholders)


def _device_functions(program: Program) -> list[str]:
    """The devices' programs; those that run the same are printed once."""
    printed: dict[str, list[int]] = {}
    for replica, module in enumerate(program.device_graphs.values()):
        text = "\n".join([_signature(module.graph), *_body(program, module.graph)])
        printed.setdefault(text, []).append(replica)
    lines = []
    for text, replicas in printed.items():
        signature, *body = text.split("\n")
        names = [program.devices[replica].name for replica in replicas]
        same = [f"{name} runs the same as replica {r}" for name, r in zip(names[1:], replicas[1:], strict=True)]
        comment = f"  # {'; '.join(same)}" if same else f"  # replica {replicas[0]}"
        lines += ["", f"def {re.sub(r'[^0-9A-Za-z]', '_', names[0])}({signature}):{comment}", *body]
    return lines


_PRINTED = (ops.pack, *ops.COLLECTIVES, ops.wait, ops.update, ops.step_optimizer, ops.store)


class _Names:
    """What the values of a graph of calls are, and how they are printed."""

    def __init__(self, program: Program, graph: fx.Graph) -> None:
        self.kinds: dict[fx.Node, tuple[str, str]] = {}  # node -> (kind, name)
        self._arguments = {argument.name: argument for argument in program.arguments}
        for node in graph.nodes:
            self.kinds[node] = self._classify(node)
        for kind, name, node in _results(program, graph):
            self.kinds[node] = (kind, name)

    def _classify(self, node: fx.Node) -> tuple[str, str]:
        bucket = node.kwargs.get("bucket")
        if node.op == "placeholder" or node.target is ops.argument:
            return "argument", str(node.kwargs.get("name", node.target))
        if node.target is ops.read:
            return "variable", str(node.kwargs["variable"])
        if node.target is ops.slot:
            return "slot", f"slot({node.kwargs['variable']})"
        if node.target is ops.pack:
            return "bucket", f"b{bucket}"
        if node.target in ops.COLLECTIVES:
            return "pending", f"b{bucket}_pending"
        if node.target is ops.wait:
            source = node.args[0]
            assert isinstance(source, fx.Node)
            given = {ops.all_reduce: "sum", ops.reduce_scatter: "share"}.get(source.target, "parameters")  # type: ignore[arg-type]
            return "reduced", f"b{bucket}_{given}"
        return ("token", "updated") if node.target is ops.step_optimizer else ("saved", node.name)

    def listing(self, nodes: Iterable[fx.Node]) -> str:
        """Values by name; saved ones, and many of a kind, by number."""
        groups: dict[str, list[str]] = {}
        for node in nodes:
            kind, name = self.kinds[node]
            groups.setdefault(kind, []).append(name)
        parts: list[str] = []
        for kind, names in sorted(groups.items(), key=lambda group: _LISTING_ORDER.index(group[0])):
            listed = ", ".join(_WRITTEN.get(kind, "{}").format(name) for name in names)
            is_short = len(names) <= _LISTED and len(listed) <= _LISTED_WIDTH
            if kind != "saved" and (is_short or kind in _ALWAYS_LISTED or len(names) == 1):
                parts.append(listed)
            else:
                parts.append(f"{len(names)} {_COUNTED.get(kind, kind + 's')}")
        return ", ".join(parts)


def _results(program: Program, graph: fx.Graph) -> Iterable[tuple[str, str, fx.Node]]:
    """The gradients, losses and new values of per-replica variables, found from what uses them."""
    slots = {bucket.index: [slot.variable for slot in bucket.slots] for bucket in program.buckets}
    for node in graph.nodes:
        if node.target is ops.pack:
            for name, gradient in zip(slots[ops.bucket_of(node)], node.args, strict=True):
                yield "gradient", name, gradient
        elif node.target is ops.write:
            yield "write", str(node.kwargs["variable"]), node.args[0]
    output = graph.output_node().args[0]
    if isinstance(output, fx.Node):
        yield "loss", "loss", output
        return
    assert isinstance(output, dict)

    def as_nodes(value: Any) -> Sequence[fx.Node]:
        return [value] if isinstance(value, fx.Node) else value

    for key, kind in (("gradients", "gradient"), ("writes", "write")):
        for name, value in output.get(key, {}).items():
            yield from ((kind, name, node) for node in as_nodes(value))
    yield from (("loss", "loss", node) for node in as_nodes(output.get("losses", output.get("loss"))))


def _body(program: Program, graph: fx.Graph) -> list[str]:
    """The lines of a graph of region calls and operations of the IR."""
    names = _Names(program, graph)
    width = max(len(device.name) for device in program.devices)
    lines = []
    writes = _write_texts(names, graph)
    for node in graph.nodes:
        text = writes.get(node) if node.target is ops.write else _call_text(names, node)
        if text is None:
            continue
        if graph is program.graph:
            replica = ops.replica_of(node)
            owner = program.devices[replica].name if replica is not None else "all"
            text = f"{owner:<{width}} | {text}"
        comment = _comment(program, node)
        text = f"    {text}"
        lines.append(f"{text:<{_COMMENT_COLUMN}}  # {comment}"[:_LINE_WIDTH].rstrip() if comment else text)
    output = graph.output_node().args[0]
    lines.append("    return loss" if isinstance(output, fx.Node) else "    return " + ", ".join(output))  # type: ignore[arg-type]
    return lines


def _write_texts(names: _Names, graph: fx.Graph) -> dict[fx.Node, str]:
    """One line for all the writes of a replica, at the first of them."""
    by_replica: dict[int | None, list[fx.Node]] = {}
    for node in ops.calls(graph, ops.write):
        by_replica.setdefault(ops.replica_of(node), []).append(node)
    return {
        nodes[0]: f"write({names.listing(source for node in nodes for source in node.all_input_nodes)})"
        for nodes in by_replica.values()
    }


def _call_text(names: _Names, node: fx.Node) -> str | None:
    if node.op == "call_module" or node.target is ops.call_region:
        target = str(node.target) if node.op == "call_module" else str(node.kwargs["region"])
        results = names.listing(sorted(node.users, key=lambda user: user.args[1]))  # type: ignore[arg-type, return-value]
        return f"{results or '_':<26} = {target}({names.listing(node.all_input_nodes)})"
    if node.op != "call_function" or node.target not in _PRINTED:
        return None
    arguments = names.listing(node.all_input_nodes)
    if node.target in ops.COLLECTIVES:
        arguments = _collective(names, node)
    bucket = f"bucket={node.kwargs['bucket']}, " if "bucket" in node.kwargs else ""
    text = f"{ops.name_of(node)}({bucket}{arguments})"
    return f"{names.kinds[node][1]:<26} = {text}" if node.users else text


def _collective(names: _Names, node: fx.Node) -> str:
    details = [f"{key}={node.kwargs[key]}" for key in ("op", "root", "link") if node.kwargs.get(key) is not None]
    inputs = list(dict.fromkeys(names.kinds[n][1] for n in node.all_input_nodes))
    of_all = f" of {len(node.all_input_nodes)} replicas" if len(node.all_input_nodes) > 1 else ""
    return ", ".join([name + of_all for name in inputs] + details)


def _comment(program: Program, node: fx.Node) -> str:
    if node.target is ops.update:
        bucket = program.buckets[ops.bucket_of(node)]
        is_shared = bucket.placement is Placement.SHARED
        return bucket.rule.label + (f", this device's share of {program.num_replicas}" if is_shared else "")
    if node.target is ops.step_optimizer:
        return "the optimizer's own step, once for all replicas"
    return source_line(node) if node.op == "call_module" or node.target is ops.call_region else ""


def _statements(graph: fx.Graph) -> list[str]:
    """The lines of a graph of ATen operators."""

    def show(argument: Any) -> str:
        if isinstance(argument, fx.Node):
            return str(argument.kwargs["variable"]) if argument.target is ops.read else argument.name
        if isinstance(argument, list | tuple):
            return f"[{', '.join(show(item) for item in argument)}]"
        if isinstance(argument, dict):
            return f"{{{', '.join(f'{key}: {show(item)}' for key, item in argument.items())}}}"
        return str(argument) if isinstance(argument, torch.dtype | torch.device) else repr(argument)

    lines, last_source = [], ""
    for node in graph.nodes:
        if node.op == "output":
            lines.append(f"    return {show(node.args[0])}")
        elif node.op == "call_function" and node.target is not ops.read:
            source = source_line(node)
            if source and source != last_source:
                lines.append(f"    # {source}")
                last_source = source
            arguments = [show(a) for a in node.args] + [f"{k}={show(v)}" for k, v in node.kwargs.items()]
            target = str(node.target) if isinstance(node.target, torch._ops.OpOverload) else ops.name_of(node)
            lines.append(f"    {node.name}: {type_of(node.meta.get('val'))} = {target}({', '.join(arguments)})")
    return lines
