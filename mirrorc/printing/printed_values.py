"""The printed names and types of values, and of spans of numbered things."""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, TypeGuard

import torch
from torch import fx

from mirrorc.analysis.buckets.slots_of_values import gradient_of, is_partial, packed_slots
from mirrorc.ir import ops
from mirrorc.ir.gradient_forms import FORMS
from mirrorc.ir.names import filled, of_all_replicas
from mirrorc.ir.nodes import (
    bucket_of,
    calls_to,
    is_compute,
    is_region_call,
    operation_name,
    origin_of,
    part_keywords,
    region_of,
    replica_of,
)
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import LOSS_OUTPUT, ArgumentKind, Program, gradient_output
from mirrorc.ir.type_rules import awaited_elements
from mirrorc.printing.bucket_names import BucketNames
from mirrorc.torch_internals import is_symbolic, text_of_size

aten = torch.ops.aten

_NUMBERED = re.compile(r"(|.*\D)(0|[1-9]\d*)")
_LEAST_SPAN = 3  # shorter ones are listed


def spans(items: Iterable[object]) -> str:
    """``cpu:0 … cpu:3, cpu:6`` for names, ``0 … 3, 6`` for numbers."""
    parts: list[str] = []
    for _, indexed in itertools.groupby(enumerate(map(str, items)), _run_of):
        run = [name for _, name in indexed]
        parts += [f"{run[0]} … {run[-1]}"] if len(run) >= _LEAST_SPAN else run
    return ", ".join(parts)


def _run_of(indexed: tuple[int, str]) -> tuple[object, ...]:
    """Equal for neighbours whose names end in consecutive numbers."""
    index, name = indexed
    match = _NUMBERED.fullmatch(name)
    return (match[1], int(match[2]) - index) if match is not None else (index,)


def range_text(start: int, stop: int) -> str:
    return "none" if start == stop else f"{start}" if stop == start + 1 else f"{start} … {stop - 1}"


_DTYPES = {
    torch.float64: "f64", torch.float32: "f32", torch.float16: "f16", torch.bfloat16: "bf16", torch.int64: "i64",
    torch.int32: "i32", torch.int16: "i16", torch.int8: "i8", torch.uint8: "u8", torch.bool: "bool",
    torch.complex64: "c64", torch.complex128: "c128",
}  # fmt: skip
_LISTED = 4  # the most values of one kind that are listed by name; more are counted
_LISTED_WIDTH = 48  # the most characters of such a list
_LISTING_ORDER = (
    "argument", "loss", "gradient", "variable", "bucket", "pending", "reduced", "computed", "parameters", "write", "factor",
    "activation", "activation gradient", "saved", "slot",
)  # fmt: skip
_ALWAYS_LISTED = ("argument", "bucket", "pending", "reduced", "computed", "parameters")
_WRITTEN = {"gradient": "d({})", "write": "new({})"}
_COUNTED = {
    "write": ("new buffer", "new buffers"),
    "activation gradient": ("d(activation)", "d(activations)"),
    "saved": ("value", "values"),
}
_NEVER_LISTED = ("saved", "factor", "activation", "activation gradient")


def dtype_name(dtype: torch.dtype) -> str:
    """Such as ``f32``, ``bf16``, ``i64``."""
    return _DTYPES.get(dtype, str(dtype).removeprefix("torch."))


def size_text(num_bytes: int) -> str:
    """Such as ``40.1 KiB``, ``4.0 MiB``."""
    return f"{num_bytes / 2**20:.1f} MiB" if num_bytes >= 2**20 else f"{num_bytes / 2**10:.1f} KiB"


def type_of(value: Any, num_shared: int | None = None) -> str:
    """Such as ``f32[2, 3]``, ``pending f32[8]``, ``(f32[2], i64[])``; empty for None.

    ``num_shared``: for a device's share, the number of elements of all shares; its type is the same on every device.
    """
    if num_shared is not None and isinstance(value, torch.Tensor) and value.dim() == 1:
        return f"share of {dtype_name(value.dtype)}[{num_shared}]"
    if isinstance(value, ops.Pending):
        return f"pending {type_of(value.value)}"
    if isinstance(value, torch.Tensor):
        return f"{dtype_name(value.dtype)}[{', '.join(map(text_of_size, value.shape))}]"
    if is_symbolic(value):
        return f"size[{text_of_size(value)}]"
    if isinstance(value, list | tuple):
        return f"({', '.join(type_of(v) for v in value)})"
    return type(value).__name__ if value is not None else ""


class PrintedValues:
    """The kind and printed name of each value in a graph of calls."""

    def __init__(self, program: Program, graph: fx.Graph, bucket_names: BucketNames | None = None) -> None:
        self._program = program
        self._saved = {argument.name for argument in program.arguments if argument.kind is ArgumentKind.SAVED}
        self.kinds: dict[fx.Node, tuple[str, str]] = {}  # node -> (kind, name)
        results = {node: (kind, name) for kind, name, node in _results(program, graph)}
        for node in graph.nodes:
            self.kinds[node] = results.get(node) or self._classify(node)
        self._bucket_names = bucket_names or BucketNames(program)
        for node in graph.nodes if program.buckets else ():
            if name := self._bucket_names.of(node):
                self.kinds[node] = (self.kinds[node][0], name)
        self._name_computed(graph)

    def _classify(self, node: fx.Node) -> tuple[str, str]:
        operation = operation_of(node.target)
        if operation is None:
            return self._classify_other(node)
        if operation.kind is Kind.COMPUTE and not operation.called:
            return "computed", ""  # named by `_name_computed`
        if isinstance(operation.operands, str):
            return "saved", node.name
        if operation.symbol is ops.argument and node.kwargs["name"] in self._saved:
            return "activation", str(node.kwargs["name"])
        return operation.value, filled(operation.called, node.args, node.kwargs) or node.name

    def _classify_other(self, node: fx.Node) -> tuple[str, str]:
        if node.op == "placeholder":
            return "activation" if node.target in self._saved else "argument", str(node.target)
        if is_compute(node):
            return "computed", ""
        of_part = part_keywords(node.target, node.args)
        if of_part is None:
            variable = gradient_of(node)
            if variable is None:
                return self._saved_kind(node), node.name
            return "gradient", f"{variable}, in part" if is_partial(self._program, node) else variable
        operation, words = of_part
        return operation.value, filled(operation.called, (), words)

    def _saved_kind(self, node: fx.Node) -> str:
        if node.users and all(user.target in ops.FACTORED for user in node.users):
            return "factor"
        call = node.args[0] if node.args else None
        region = self._program.regions.get(region_of(call)) if _is_call(call) else None
        is_backward = region is not None and region.phase == "backward"
        return "activation gradient" if is_backward and node.name.startswith("d_") else "activation"

    def _name_computed(self, graph: fx.Graph) -> None:
        """Names a value by its first operand and operator, a number by its operation. Equal names get a number."""
        counts: Counter[tuple[int | None, str]] = Counter()
        for node in graph.nodes:
            kind, name = self.kinds[node]
            if kind not in ("computed", "pending", "reduced"):
                continue
            if not name:
                inputs = node.all_input_nodes
                is_number = node.target is ops.clip_factor or (node.target is ops.norm and len(inputs) > 1)
                operands = [] if is_number else map(self.name, inputs[:1])
                name = "_".join([*operands, operation_name(node.target)])
            counts[replica_of(node), name] += 1
            count = counts[replica_of(node), name]
            self.kinds[node] = (kind, name if count == 1 else f"{name}_{count}")

    def name(self, node: fx.Node) -> str:
        kind, name = self.kinds[node]
        return _WRITTEN.get(kind, "{}").format(name)

    def single_name(self, node: fx.Node) -> str:
        return of_all_replicas(self.name(node), replica_of(node))

    def factors(self, gradient: fx.Node) -> str:
        """Names of a gradient's factors, such as ``left, right``, and the number of microbatches if there are several."""
        form = FORMS.get(gradient.target)
        factors = [factor for factor in gradient.args if isinstance(factor, fx.Node)]
        if form is None:
            return ", ".join(map(self.single_name, factors))
        first, *others = form.parts(factors) or [()]
        named_kinds = ("argument", "variable")
        names = [
            self.single_name(factor) if self.kinds[factor][0] in named_kinds else role
            for factor, role in zip(first, form.factor_names, strict=False)
        ]
        return ", ".join(names) + (f" of {1 + len(others)} microbatches" if others else "")

    def typed(self, node: fx.Node) -> str:
        value = node.meta.get("val")
        if node.target in ops.FACTORED:  # its type is that of its slot, but only its factors exist
            return self.name(node)
        kind = type_of(value, self._num_shared(node))
        return self.name(node) + (f": {kind}" if kind else "")

    def _num_shared(self, node: fx.Node) -> int | None:
        by_messages = self._bucket_names.num_shared(node) if self._program.buckets else None
        if by_messages is not None:
            return by_messages
        origin = origin_of(node)
        launch = origin.args[0] if origin.target is ops.wait and origin.args else None
        is_share = awaited_elements(self._program, launch, 0) is not None
        if is_share and self._program.buckets[bucket_of(origin)].has_owner:
            return None  # the owner has all of it, and others nothing
        return launch.meta["val"].value.numel() if is_share else None  # type: ignore[union-attr]

    def listing(self, nodes: Iterable[fx.Node], *, typed: bool = False) -> str:
        """Lists values by name, but counts saved values and kinds of many. ``typed`` adds the types of losses."""
        groups: dict[str, list[str]] = {}
        for node in nodes:
            kind, name = self.kinds[node]
            groups.setdefault(kind, []).append(self.typed(node) if typed and kind == "loss" else name)
        parts: list[str] = []
        for kind, names in sorted(groups.items(), key=lambda group: _LISTING_ORDER.index(group[0])):
            listed = ", ".join(_WRITTEN.get(kind, "{}").format(name) for name in names)
            is_short = len(names) <= _LISTED and len(listed) <= _LISTED_WIDTH
            if kind not in _NEVER_LISTED and (is_short or kind in _ALWAYS_LISTED or len(names) == 1):
                parts.append(listed)
            else:
                singular, plural = _COUNTED.get(kind, (kind, f"{kind}s"))
                parts.append(f"{len(names)} {singular if len(names) == 1 else plural}")
        return ", ".join(parts)


def _is_call(node: Any) -> TypeGuard[fx.Node]:
    return isinstance(node, fx.Node) and is_region_call(node)


def _results(program: Program, graph: fx.Graph) -> Iterator[tuple[str, str, fx.Node]]:
    for node in calls_to(graph, ops.gather) if not program.trains else ():
        if node.kwargs["output"] == LOSS_OUTPUT:
            yield from (("loss", "loss", value) for value in node.all_input_nodes)
    arguments = {gradient_output(argument.name): argument.name for argument in program.arguments}
    for node in graph.nodes:
        if node.target is ops.gather and program.takes_tangents:
            name = arguments.get(str(node.kwargs["output"]), "")
            yield from (("gradient", name, value) for value in node.all_input_nodes)
        elif node.target is ops.pack:
            for slot, gradient in zip(packed_slots(program, node), node.all_input_nodes, strict=False):
                yield "gradient", slot.variable, origin_of(gradient)
        elif node.target is ops.write:
            for source in node.all_input_nodes:
                yield "write", str(node.kwargs["variable"]), source
    output: Any = graph.output_node().args[0]
    if not isinstance(output, dict):
        yield from _losses(program, output) if output is not None else ()
        return

    def as_nodes(value: Any) -> Sequence[fx.Node]:
        return [item for item in ([value] if isinstance(value, fx.Node) else value or ()) if item is not None]

    for key, kind in (("gradients", "gradient"), ("writes", "write")):
        for name, value in output.get(key, {}).items():
            yield from ((kind, name, node) for node in as_nodes(value))
    for node in as_nodes(output.get("losses", output.get("loss"))):
        yield from _losses(program, node)


def _losses(program: Program, loss: fx.Node) -> Iterator[tuple[str, str, fx.Node]]:
    sums = [loss]
    while program.microbatches and sums[-1].target is aten.add.Tensor and len(sums[-1].all_input_nodes) == 2:
        sums.append(sums[-1].all_input_nodes[0])
    for number, total in enumerate(reversed(sums), 1) if len(sums) > 1 else ():
        part: Any = total.args[1] if number > 1 else total
        if part.target is aten.mul.Tensor:
            yield "loss", f"weighted_loss_microbatch_{number}", part
            part = part.args[0]
        yield "loss", f"loss_microbatch_{number}", part
        yield "loss", f"loss_sum_microbatch_{number}", total
    yield "loss", "loss", loss
