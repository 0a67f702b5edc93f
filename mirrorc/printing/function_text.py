"""Prints the functions of devices. If a function is like an earlier one, only differing lines are printed."""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType

from torch import fx

from mirrorc.ir.nodes import is_region_call, region_of, region_title
from mirrorc.ir.program import ArgumentKind, Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.printing.bucket_names import BucketNames
from mirrorc.printing.folding import folded
from mirrorc.printing.graph_text import Line, graph_lines, rendered
from mirrorc.printing.line_comments import share_comment
from mirrorc.printing.message_folds import messages_folded
from mirrorc.printing.printed_values import type_of
from mirrorc.printing.variants import device_column, device_names, groups, heading, num_examples, variants_of_mirrored

_LinesOf = Callable[[fx.Graph], list[Line]]
_VARIANT = re.compile(r"\.shard\d+$")
_CALLED = re.compile(r"(?:.*? = )?(?P<operation>[A-Za-z_][\w.]*)\(")
_MOST_DIFFERING = 2 / 3  # of a function's lines; if more lines differ, the whole function is printed
_SIGN = "    … b"
_NO_CALLS = ("    # -- ", "    return ")


def signature(graph: fx.Graph, names: Mapping[str, str] = MappingProxyType({})) -> str:
    """``NAME: TYPE, ...``; ``names`` maps arguments to other printed names."""
    placeholders = [(str(node.target), node.meta.get("val")) for node in graph.nodes if node.op == "placeholder"]
    return ", ".join(f"{names.get(name, name)}: {type_of(value)}" for name, value in placeholders)


def _signature(program: Program, graph: fx.Graph) -> str:
    """Counts activations that forward has saved, if only calls read them."""
    kept = {argument.name for argument in program.arguments if argument.kind is ArgumentKind.SAVED}
    if program.stage is Stage.CAPTURED or not kept:
        return signature(graph)
    nodes = graph.find_nodes(op="placeholder")
    shown = [f"{node.target}: {type_of(node.meta.get('val'))}" for node in nodes if node.target not in kept]
    number = len(nodes) - len(shown)  # 0 on a device without examples
    return ", ".join([*shown, *([counted(number, "activation")] if number else [])])


def function_lines(
    program: Program, lines_of: _LinesOf, bucket_names: BucketNames, *, sources: bool, fold: bool
) -> list[str]:
    if fold:
        unfolded = lines_of
        lines_of = lambda graph: messages_folded(program, bucket_names, unfolded(graph))  # noqa: E731
    lines: list[str] = []
    absent = [replica for replica, index in enumerate(program.shard_of_replica) if index is None]
    for shard, graph in enumerate(program.shard_graphs):
        users = [replica for replica, index in enumerate(program.shard_of_replica) if index == shard]
        above = heading(program, users) if users else []
        above += heading(program, absent) if absent and graph is program.shard_graphs[-1] else []
        body = rendered(lines_of(graph), sources)
        lines += ["", *above, f"def one_device({_signature(program, graph)}):", *_stretches(program, body, fold)]
    if program.graph is not None:
        above = [line for replicas in variants_of_mirrored(program) for line in heading(program, replicas)]
        whole = lines_of(program.graph)
        whole = _devices_folded(program, whole) if fold else [_with_share(program, line, False) for line in whole]
        lines += ["", *above, "def all_devices():", *_stretches(program, rendered(whole, sources), fold)]
    return [*lines, *_device_functions(program, lines_of, sources, fold)]


def _stretches(program: Program, body: list[str], fold: bool) -> list[str]:
    if not fold or program.stage <= Stage.OUTLINED:
        return body
    first = {*map(region_title, program.regions), "wait", "microbatch", "microbatch_seed"}
    return folded(body, _SIGN, lambda line: line.startswith(_NO_CALLS) or _operation_of_line(line) in first)


def _operation_of_line(line: str) -> str:
    match = _CALLED.match(line.partition("  # ")[0].rpartition(" | ")[2].strip())
    return match["operation"] if match else ""


def _with_share(program: Program, line: Line, others: bool, replica: int | None = None) -> Line:
    line_replica = replica if replica is not None else line.node.kwargs.get("replica")
    comment = share_comment(program, line.node, line_replica, others) if isinstance(line_replica, int) else ""
    return replace(line, comment=comment) if comment else line


def _devices_folded(program: Program, lines: Sequence[Line]) -> list[Line]:
    runs = [(device, list(run)) for device, run in itertools.groupby(lines, lambda line: line.device)]
    merged: list[Line] = []
    while runs:
        device, run = runs[0]
        texts = [(line.text, line.comment) for line in run]
        alike = [device]
        for other, others in runs[1:] if device not in ("", "all") else ():
            if [(line.text, line.comment) for line in others] != texts or other in ("all", *alike):
                break
            alike.append(other)
        runs = runs[len(alike) :]
        column = device_column(program, alike)
        merged += [replace(_with_share(program, line, len(alike) > 1), device=column) for line in run]
    return merged


@dataclass(frozen=True)
class _Function:
    replicas: Sequence[int]
    name: str
    signature: str
    lines: Sequence[Line]


def _device_functions(program: Program, lines_of: _LinesOf, sources: bool, fold: bool) -> list[str]:
    printed: list[str] = []
    known: list[_Function] = []
    for function in _functions(program, lines_of):
        above = ["", *heading(program, function.replicas)]
        others = len(function.replicas) > 1
        lines = [_with_share(program, line, others, function.replicas[0]) for line in function.lines]
        base, differing = None, None
        if fold:
            variants = ((other, _differing(other.lines, function.lines)) for other in known)
            base, differing = next(((other, places) for other, places in variants if places is not None), (None, None))
        comment = f"  # as {base.name}, but for these lines{_variant_note(function)}" if base is not None else ""
        if differing is not None:
            lines = [replace(lines[i], above=()) for i in differing] + [lines[-1]]
        else:
            known.append(function)
        body = _stretches(program, rendered(lines, sources), fold)
        printed += [*above, f"def {function.name}({function.signature}):{comment}", *body]
    return printed


def _variant_note(function: _Function) -> str:
    titles = (region_title(region_of(line.node)) for line in function.lines if is_region_call(line.node))
    title = next((title for title in titles if "." in title), "")
    return f"; {title} is {title.partition('.')[0]} for this shape of a shard" if title else ""


def function_names(program: Program) -> list[str]:
    """The name of each device's function in the text of a LOWERED program."""
    functions = _functions(program, lambda graph: graph_lines(program, graph))
    return [
        function.name
        for replica in range(program.num_replicas)
        for function in functions
        if replica in function.replicas
    ]


def _functions(program: Program, lines_of: _LinesOf) -> list[_Function]:
    modules = list(program.device_graphs.values())
    lines = [lines_of(module.graph) for module in modules]
    signatures = [_signature(program, module.graph) for module in modules]
    texts = [tuple((line.text, line.comment) for line in body) for body in lines]
    keys = [(signatures[r], texts[r], num_examples(program, r)) for r in range(len(modules))]
    names = device_names(program, range(len(modules)))
    return [
        _Function(g, re.sub(r"[^0-9A-Za-z]", "_", names[g[0]]), signatures[g[0]], lines[g[0]]) for g in groups(keys)
    ]


def operation_of(text: str) -> str:
    """The operation or region that a line calls, without ``.shardN``; the line itself if it calls nothing."""
    match = _CALLED.match(text)
    return _VARIANT.sub("", match["operation"]) if match else text


def _differing(base: Sequence[Line], lines: Sequence[Line]) -> list[int] | None:
    """Indices of the lines of each operation with a line unlike ``base``; None to print the whole function."""
    operations = [operation_of(line.text) for line in lines]
    if operations != [operation_of(line.text) for line in base]:
        return None
    texts = [[(line.text, line.comment) for line in part] for part in (base, lines)]
    differ = {operation for operation, text, other in zip(operations, *texts, strict=True) if text != other}
    places = [i for i, operation in enumerate(operations) if operation in differ]
    return places if len(places) <= _MOST_DIFFERING * len(lines) else None
