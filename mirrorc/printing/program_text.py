"""Prints programs.

The printed form::

    text      = heading [ change ] bucket* remark* function+ region*
    heading   = "# mirrorc" [ "· after PASS" ] "· stage STAGE · N devices · N buckets" [ "· MS ms" ]
    change    = "# N nodes" [ "(+N): +N OPERATION, ..." ] ( "# remark of this pass: TEXT" )* [ "# the program is as before" ]
    bucket    = "# bucket INDEX" DTYPE SIZE VARIABLE[SHAPE] ... RULE [ "· shared" ] [ "· ready after REGION" ]
              | "# bucket INDEX" DTYPE SIZE "N gradients" RULE ... ( "#     VARIABLE[SHAPE]" )+
    remark    = "# note: TEXT"
    function  = "def DEVICE(NAME: TYPE, ...):" [ "# " who ] line+ "return NAME, ..."
    who       = DEVICE "runs the same as replica N; ..." | "replica N" | "will run on DEVICE, ..."
    line      = [ DEVICE "|" ] [ VALUE, ... "=" ] OPERATION "(" ARGUMENT, ... ")" [ "# " ( source | NOTE ) ]
    region    = "region NAME(NAME: TYPE, ...):" statement+ "return [NAME, ...]"
    statement = "# " source | [ NAME ":" TYPE "=" ] OPERATOR "(" ARGUMENT, ... ")"
    source    = FILE ":" LINE "  " CODE | MODULE "(" CLASS ")"
    VALUE     = NAME ":" TYPE | NAME | N KIND
    TYPE      = DTYPE "[" SIZE, ... "]" | "pending" TYPE | "share of" TYPE | "(" TYPE, ... ")"
    DTYPE     = "f64" | "f32" | "f16" | "bf16" | "i64" | ... | "bool"

``change`` stands in the files of ``dump=``, which end with it where the pass changed nothing. ``function`` is ``one_device``
up to OUTLINED, ``all_devices`` with a column that names the device of every line up to SCHEDULED, and a function for each
device in LOWERED, where devices that run the same program are printed once. ``source`` is the user's line that the operators come
from, or their module where no line is known. A ``remark`` is one line: line breaks in it are written as ``\\n``.

Values have the same names in every run, on every machine: ``loss``; ``d(fc1.weight)``, a gradient, whose type is that of its
slot in the bucket table; ``b0``, a packed bucket; ``b0_pending``, the same in flight; ``b0_sum``, reduced (``b0_share``, this
device's share of it); ``b0_incoming``, parameters in flight to this device, and ``b0_parameters``, received;
``new(bn.running_mean)``; variables by their own names. Inside regions a value is called by the module and the operator that
it comes from (`mirrorc.capture.value_names`), with ``d_`` before it in backward; what is computed between modules, by the last
module that it is made of. Many values of a kind are counted: ``93 saved`` are activations kept for backward, ``75
variables`` are parameters and buffers read. So a line that calls a region lists its arguments, and its results, by kind; the
region itself has them in the order of their first use. Variables are arguments of a region by the names that they have in
its first call, with ``_`` for what is no letter or digit. Bodies of regions are left out unless asked for.
"""

from __future__ import annotations

import operator
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.program import Bucket, Placement, Program, Region, Stage
from mirrorc.ir.source_lines import source_line
from mirrorc.printing.values import PrintedValues, dtype_name, size_text, type_of

_LISTED_SLOTS = 4  # so many gradients are listed in a bucket's line
_RESULT_WIDTH = 32
_COMMENT_COLUMN = 92
_LINE_WIDTH = 158
_LEAST_COMMENT = 40
_AROUND = 5  # lines shown before and after one that an error is about


@dataclass(frozen=True)
class Line:
    """A line of a graph.

    Attributes:
        text: what it says.
        node: the node that it prints.
        note: said at its end.
        source: the user's line that it comes from: at its end as well, or above it, where an operator is a line.
    """

    text: str
    node: fx.Node
    note: str = ""
    source: str = ""


def program_to_text(
    program: Program,
    *,
    regions: bool = False,
    slots: bool = False,
    sources: bool = True,
    after: str = "",
    milliseconds: float | None = None,
) -> str:
    """A program as text, in the form above.

    Args:
        program: at any stage.
        regions: print the bodies of the regions, too.
        slots: print every gradient of a bucket, each on a line of its own.
        sources: print the user's source lines. Without them, the text stays the same when code moves in its file.
        after: the pass that the heading names.
        milliseconds: the time that the heading gives.
    """
    lines = [_heading(program, after, milliseconds)]
    ready = _ready_after(program)
    for bucket in program.buckets:
        lines += _bucket_lines(bucket, slots, ready.get(bucket.index, ""))
    lines += [f"# note: {on_one_line(remark)}" for remark in program.remarks]
    for shard, graph in enumerate(program.shard_graphs):
        users = [str(d) for d, s in zip(program.devices, program.shard_of_replica, strict=True) if s == shard]
        lines += ["", f"def one_device({_signature(graph)}):  # will run on {', '.join(users)}"]
        lines += _rendered(graph_lines(program, graph), sources)
    if program.graph is not None:
        lines += ["", "def all_devices():", *_rendered(graph_lines(program, program.graph), sources)]
    lines += _device_functions(program, sources)
    for region in program.regions.values() if regions else ():
        lines += ["", *_region_lines(region, sources, _argument_names(program, region))]
    return "\n".join(lines) + "\n"


def region_to_text(region: Region, *, sources: bool = True) -> str:
    """A region's body as text."""
    return "\n".join(_region_lines(region, sources, {})) + "\n"


def on_one_line(text: str) -> str:
    """A text whose line breaks are written as in a Python string."""
    return "".join(repr(char)[1:-1] if char.splitlines() == [""] else char for char in text)


def _region_lines(region: Region, sources: bool, names: Mapping[str, str]) -> list[str]:
    body = region.graph_module.graph
    return [f"region {region.name}({_signature(body, names)}):", *_rendered(_statements(body, names), sources)]


def _argument_names(program: Program, region: Region) -> dict[str, str]:
    """What a region's arguments are called that are arguments of the step, too: fx calls ``input`` ``input_1``."""
    graphs = program.graphs()
    calls = (n for graph in graphs for n in graph.nodes if ops.is_region_call(n) and ops.region_of(n) == region.name)
    call = next(calls, None)
    if call is None:
        return {}
    placeholders = [str(node.target) for node in region.graph_module.graph.nodes if node.op == "placeholder"]
    taken = {node.name for node in region.graph_module.graph.nodes}
    names: dict[str, str] = {}
    for placeholder, value in zip(placeholders, call.args, strict=False):
        if isinstance(value, fx.Node) and (value.op == "placeholder" or value.target is ops.argument):
            name = str(value.kwargs.get("name", value.target))
            names |= {placeholder: name} if name not in taken else {}
    return names


def surroundings(program: Program, node: fx.Node | None) -> str:
    """The lines of the program around a node, its own marked, as a paragraph of a message; empty if it is not printed."""
    graphs = [*program.graphs(), *(region.graph_module.graph for region in program.regions.values())]
    if node is None or not any(node.graph is graph for graph in graphs):
        return ""
    try:
        lines = graph_lines(program, node.graph)
    except (LookupError, TypeError, AttributeError, ValueError, AssertionError):  # too broken to be printed
        return ""
    place_of = {line.node: i for i, line in enumerate(lines)}
    near = next((other for other in _nearest(node) if other in place_of), None)
    if near is None:
        return ""
    place = place_of[near]
    shown = range(max(0, place - _AROUND), min(len(lines), place + _AROUND + 1))
    return "\n\n" + "\n".join(("  > " if i == place else "    ") + _rendered_line(lines[i], True) for i in shown)


def _nearest(node: fx.Node) -> Iterator[fx.Node]:
    """A node, what it uses and what uses it, and so on: for a part of a result, a read, a slot, which have no line."""
    seen = {node: None}
    waiting = deque([node])
    while waiting:
        found = waiting.popleft()
        yield found
        new = [other for other in (*found.all_input_nodes, *found.users) if other not in seen]
        seen.update(dict.fromkeys(new))
        waiting.extend(new)


def _heading(program: Program, after: str, milliseconds: float | None) -> str:
    parts = ["mirrorc", *([f"after {after}"] if after else []), f"stage {program.stage.name}"]
    parts += [_count(len(program.devices), "device"), _count(len(program.buckets), "bucket")]
    parts += [f"{milliseconds:.1f} ms"] if milliseconds is not None else []
    return "# " + " · ".join(parts)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _bucket_lines(bucket: Bucket, full: bool, ready_after: str) -> list[str]:
    slots = [f"{slot.variable}{list(slot.shape)}" for slot in bucket.slots]
    rule = bucket.rule.label + (" · shared" if bucket.placement is Placement.SHARED else "")
    rule += f" · ready after {ready_after}" if ready_after else ""
    head = f"# bucket {bucket.index}  {dtype_name(bucket.dtype)}  {size_text(bucket.num_bytes):>9}"
    if full:
        return [f"{head}  {_count(len(slots), 'gradient')}  {rule}", *(f"#     {slot}" for slot in slots)]
    if len(slots) > _LISTED_SLOTS:
        slots = [slots[0], slots[1], f"… {len(slots) - 3} more …", slots[-1]]
    return [f"{head}  {' '.join(slots)}  {rule}"]


def _ready_after(program: Program) -> dict[int, str]:
    """The region that gives the last gradient of each bucket on the first device, once buckets are packed."""
    found: dict[int, str] = {}
    graphs = program.graphs() if program.stage >= Stage.PACKED else []
    for node in ops.calls(graphs[0], ops.pack) if graphs else ():
        parts = [part for gradient in node.all_input_nodes for part in _made_of(gradient)]
        calls = [part.args[0] for part in parts if part.args]
        regions = [call for call in calls if isinstance(call, fx.Node) and ops.is_region_call(call)]
        found.setdefault(ops.bucket_of(node), ops.region_of(max(regions)) if regions else "")
    return found


def _made_of(gradient: fx.Node) -> list[fx.Node]:
    return gradient.all_input_nodes if gradient.target in ops.FACTORED else [gradient]


def _signature(graph: fx.Graph, names: Mapping[str, str] = MappingProxyType({})) -> str:
    placeholders = [(str(node.target), node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
    return ", ".join(f"{names.get(name, name)}: {type_of(value)}" for name, value in placeholders)


def _device_functions(program: Program, sources: bool) -> list[str]:
    """The devices' programs; those that run the same are printed once."""
    printed: dict[str, list[int]] = {}
    for replica, module in enumerate(program.device_graphs.values()):
        text = "\n".join([_signature(module.graph), *_rendered(graph_lines(program, module.graph), sources)])
        printed.setdefault(text, []).append(replica)
    lines = []
    for text, replicas in printed.items():
        signature, *body = text.split("\n")
        names = [program.devices[replica].name for replica in replicas]
        same = [f"{name} runs the same as replica {r}" for name, r in zip(names[1:], replicas[1:], strict=True)]
        comment = f"  # {'; '.join(same)}" if same else f"  # replica {replicas[0]}"
        lines += ["", f"def {re.sub(r'[^0-9A-Za-z]', '_', names[0])}({signature}):{comment}", *body]
    return lines


def graph_lines(program: Program, graph: fx.Graph) -> list[Line]:
    """The lines of one of a program's graphs: of operators, in regions and before there are regions, else of calls."""
    is_call_graph = program.stage >= Stage.OUTLINED and any(graph is other for other in program.graphs())
    return _calls(program, graph) if is_call_graph else _statements(graph)


def _rendered(lines: Iterable[Line], sources: bool) -> list[str]:
    rendered, last_source = [], ""
    for line in lines:
        if sources and ops.is_compute(line.node) and line.source and line.source != last_source:
            rendered.append(f"    # {line.source}")
            last_source = line.source
        rendered.append("    " + _rendered_line(line, sources))
    return rendered


def _rendered_line(line: Line, sources: bool) -> str:
    source = line.source if sources and not ops.is_compute(line.node) else ""
    comment = line.note or source
    width = _COMMENT_COLUMN - 4
    if not comment:
        return line.text
    text = f"{line.text:<{width}}  # "
    return text + comment[: max(_LEAST_COMMENT, _LINE_WIDTH - 4 - len(text))].rstrip()


_PRINTED = (*ops.FACTORED, ops.pack, *ops.LAUNCHES, ops.send, ops.wait, ops.update, ops.step_optimizer, ops.store)
_FOLDED = (ops.argument, ops.read, ops.slot, ops.write, operator.getitem)  # shown where they are used


def _calls(program: Program, graph: fx.Graph) -> list[Line]:
    """The lines of a graph of region calls and operations of the IR."""
    values = PrintedValues(program, graph)
    width = max(len(device.name) for device in program.devices)
    writes = _write_texts(values, graph)
    lines = []
    for node in graph.nodes:
        text = writes.get(node) if node.target is ops.write else _call_text(values, node)
        if text is None:
            continue
        if graph is program.graph:
            replica = ops.replica_of(node)
            owner = program.devices[replica].name if replica is not None and replica < program.num_replicas else "all"
            text = f"{owner:<{width}} | {text}"
        is_call = ops.is_region_call(node)
        lines.append(Line(text, node, _note(program, node), source_line(node) if is_call else ""))
    output = graph.output_node()
    given: Any = output.args[0]
    lines.append(Line("return loss" if isinstance(given, fx.Node) else f"return {', '.join(given)}", output))
    return lines


def _write_texts(values: PrintedValues, graph: fx.Graph) -> dict[fx.Node, str]:
    """One line for all the writes of a replica, at the first of them."""
    by_replica: dict[int | None, list[fx.Node]] = {}
    for node in ops.calls(graph, ops.write):
        by_replica.setdefault(ops.replica_of(node), []).append(node)
    return {
        nodes[0]: f"write({values.listing(source for node in nodes for source in node.all_input_nodes)})"
        for nodes in by_replica.values()
    }


def _call_text(values: PrintedValues, node: fx.Node) -> str | None:
    if ops.is_region_call(node):
        parts = sorted(node.users, key=lambda user: user.args[1])  # type: ignore[arg-type, return-value]
        results = values.listing(parts, typed=True)
        return f"{results or '_':<{_RESULT_WIDTH}} = {ops.region_of(node)}({values.listing(node.all_input_nodes)})"
    if ops.is_compute(node):
        return f"{values.typed(node):<{_RESULT_WIDTH}} = {node.target}({_shown_arguments(node, values.name)})"
    if node.op != "call_function" or node.target in _FOLDED:
        return None
    if node.target not in _PRINTED:  # nothing that a valid program has; for whoever looks for what is wrong
        return f"{node.name:<{_RESULT_WIDTH}} = {ops.name_of(node)}({_shown_arguments(node, values.name)})"
    arguments = values.listing(node.all_input_nodes)
    if node.target in ops.FACTORED:
        arguments = ", ".join(values.own_name(factor) for factor in node.all_input_nodes)
    if node.target in ops.COLLECTIVES:
        arguments = _distinct(values, node)
    details = [f"bucket={node.kwargs['bucket']}"] if "bucket" in node.kwargs else []
    details += [arguments] if arguments else []
    shown = ("padding_idx", "op", "root", "source", "destination", "link")
    details += [f"{key}={node.kwargs[key]}" for key in shown if node.kwargs.get(key) is not None]
    text = f"{ops.name_of(node)}({', '.join(details)})"
    return f"{values.typed(node):<{_RESULT_WIDTH}} = {text}" if node.users else text


def _distinct(values: PrintedValues, node: fx.Node) -> str:
    """What a collective takes: the name that the value has on every replica."""
    inputs = list(dict.fromkeys(values.name(n) for n in node.all_input_nodes))
    of_all = f" of {len(node.all_input_nodes)} replicas" if len(node.all_input_nodes) > 1 else ""
    return ", ".join(name + of_all for name in inputs)


def _note(program: Program, node: fx.Node) -> str:
    if node.target is ops.update and 0 <= ops.bucket_of(node) < len(program.buckets):
        bucket = program.buckets[ops.bucket_of(node)]
        is_shared = bucket.placement is Placement.SHARED
        return bucket.rule.label + (f", this device's share of {program.num_replicas}" if is_shared else "")
    if node.target is ops.step_optimizer:
        return "the optimizer's own step, once for all replicas"
    return ""


def _statements(graph: fx.Graph, names: Mapping[str, str] = MappingProxyType({})) -> list[Line]:
    """The lines of a graph of operators of torch; ``names`` has those of arguments that are called otherwise in print."""

    def name(node: fx.Node) -> str:
        if node.op == "placeholder":
            return names.get(str(node.target), str(node.target))  # as in the signature
        return str(node.kwargs["variable"]) if node.target is ops.read else node.name

    lines = []
    for node in graph.nodes:
        if node.op == "output":
            lines.append(Line(f"return {_shown(node.args[0], name)}", node))
        elif node.op == "call_function" and node.target is not ops.read:
            target = ops.target_name(node.target)
            kind = type_of(node.meta.get("val"))
            result = f"{node.name}: {kind} = " if kind else ""
            source = source_line(node) if ops.is_compute(node) else ""
            lines.append(Line(f"{result}{target}({_shown_arguments(node, name)})", node, source=source))
    return lines


def _shown_arguments(node: fx.Node, name: Callable[[fx.Node], str]) -> str:
    return ", ".join(
        [*(_shown(a, name) for a in node.args), *(f"{k}={_shown(v, name)}" for k, v in node.kwargs.items())]
    )


def _shown(argument: Any, name: Callable[[fx.Node], str]) -> str:
    if isinstance(argument, fx.Node):
        return name(argument)
    if isinstance(argument, list | tuple):
        return f"[{', '.join(_shown(item, name) for item in argument)}]"
    if isinstance(argument, dict):
        return f"{{{', '.join(f'{key}: {_shown(item, name)}' for key, item in argument.items())}}}"
    if isinstance(argument, torch.dtype):
        return dtype_name(argument)
    return str(argument) if isinstance(argument, torch.device) else repr(argument)
