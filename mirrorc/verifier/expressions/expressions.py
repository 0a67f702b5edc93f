"""Value numbering: values computed in the same way have equal numbers."""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.graph.decompositions import DECOMPOSITIONS, decomposition_of, tensors_of
from mirrorc.analysis.graph.layouts import LAYOUT_ONLY, is_layout_only, may_read_memory_in_order, reads_strides
from mirrorc.analysis.graph.one_hot_rows import ROW_MAKERS, ROW_READERS, ValueOp, by_elements
from mirrorc.analysis.graph.padded_products import FACTORS, columns_before_padding, first_columns, places_of_columns
from mirrorc.custom_ops import out_products
from mirrorc.ir import ops
from mirrorc.ir.gradient_forms import details_of, form_of
from mirrorc.ir.nodes import is_compute, is_region_call, region_of
from mirrorc.ir.program import Program, Region
from mirrorc.ir.rearrangements import REARRANGEMENTS, RESHAPES, SAME_MEMORY
from mirrorc.ir.value_types import value_type
from mirrorc.torch_internals import sizes_key, writes_argument


class Expressions:
    """Value numbers of a program. Programs that share ``numbers`` and ``roots`` give equal expressions equal numbers.

    Args:
        numbers: operation and numbers of its arguments -> number of its result.
        roots: number and layout of a view -> number and layout of its base; number of a reshaped value -> number and
            shape of its base.
        makers: filled with the first node of each number.
    """

    def __init__(
        self,
        program: Program,
        numbers: dict[Any, int],
        roots: dict[Any, Any],
        inlined: bool,
        makers: dict[int, fx.Node] | None = None,
    ) -> None:
        self.program, self.numbers, self.roots, self.inlined, self.makers = program, numbers, roots, inlined, makers
        self.rows = NumberedRows(lambda target, args: self._number_application(target, args, {}, {}))
        self.columns = NumberedColumns(lambda target, args: self._number_application(target, args, {}, {}))

    def number(self, *key: Any) -> int:
        try:
            return self.numbers.setdefault(key, len(self.numbers))
        except TypeError:  # a part of the key cannot be hashed
            return self.numbers.setdefault(repr(key), len(self.numbers))

    def argument(self, name: str, kind: Any) -> int:
        return self.number("argument", name, kind)

    def microbatch(self, argument: int, index: Any, sizes: Any) -> int:
        return self.number("microbatch", ("value", argument), index, tuple(sizes))

    def seed_of_microbatch(self, seed: int, index: Any) -> int:
        return self.number("microbatch_seed", ("value", seed), index)

    def applied(self, target: Any, *args: Any) -> int:
        """Arguments are value numbers (`int`), lists of them, or floats."""
        wrapped = [Number(a) if type(a) is int else [Number(i) for i in a] if isinstance(a, list) else a for a in args]
        return self._number_application(target, tuple(wrapped), {}, {})

    def number_graph(self, graph: fx.Graph, arguments: Mapping[fx.Node, Any] | None = None) -> dict[fx.Node, Any]:
        """The number of each node's value; for an inlined region call, a tuple of numbers."""
        numbered: dict[fx.Node, Any] = dict(arguments or {})
        for node in graph.nodes:
            if node in numbered or node.op == "output":
                continue
            if node.target is operator.getitem:
                source, index = numbered[node.args[0]], node.args[1]
                numbered[node] = (
                    source[index] if isinstance(source, tuple) else self.number("part", ("value", source), index)
                )
            elif is_compute(node):
                self._number_compute(node, numbered)
            else:
                numbered[node] = self._number_other(node, numbered)
            self.rows.note(node, numbered)
            self.columns.note(node, numbered)
            if self.makers is not None and isinstance(numbered.get(node), int):
                self.makers.setdefault(numbered[node], node)
        return numbered

    def _number_compute(self, node: fx.Node, numbered: dict[fx.Node, Any]) -> None:
        if _is_plain(node.target):
            columns = self.columns.first_columns(node, numbered)
            numbered[node] = self._number_operator(node, numbered) if columns is None else columns
        elif is_layout_only(node):
            numbered[node] = numbered[node.args[0]]  # type: ignore[index]
        elif (body := decomposition_of(node)) is not None:
            numbered[node] = self._decomposed(node, body, numbered)
        elif node.target in ROW_READERS:
            number = self.rows.by_elements(node, numbered)
            numbered[node] = self._number_operator(node, numbered) if number is None else number
        elif node.target in REARRANGEMENTS:
            numbered[node] = self._view(node, numbered)
        elif writes_argument(node.target):
            self._write(node, numbered)
        else:
            numbered[node] = self._number_operator(node, numbered)

    def _number_other(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> Any:
        if node.target is ops.read:
            return self.number("read", node.kwargs["variable"])
        if node.op == "placeholder" or node.target is ops.argument:
            return self.argument(str(node.kwargs.get("name", node.target)), value_type(node.meta.get("val")))
        if node.target is ops.microbatch:
            return self.microbatch(numbered[node.args[0]], node.kwargs["index"], node.kwargs["sizes"])  # type: ignore[index]
        if node.target is ops.microbatch_seed:
            return self.seed_of_microbatch(numbered[node.args[0]], node.kwargs["index"])  # type: ignore[index]
        if is_region_call(node):
            return self._call(node, numbered)
        if node.target in ops.FACTORED:
            return self._whole(node, numbered)
        if node.target in ops.MEETINGS:  # equal on all replicas
            kwargs = {key: value for key, value in node.kwargs.items() if key != "replica"}
            return self._number_application(node.target, node.args, kwargs, numbered)
        return self._number_operator(node, numbered)

    def _decomposed(self, node: fx.Node, body: fx.Graph, numbered: Mapping[fx.Node, Any]) -> Any:
        arguments = dict(zip(body.find_nodes(op="placeholder"), (numbered[n] for n in tensors_of(node)), strict=True))
        makers, self.makers = self.makers, None  # operators of a decomposition are not nodes of the program
        inside = self.number_graph(body, arguments)
        self.makers = makers
        return inside[body.output_node().args[0]]  # type: ignore[index]

    def _view(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int:
        """The base's number if a chain of views restores its shape and strides; else another number."""
        source = node.args[0]
        assert isinstance(source, fx.Node)
        viewed = (numbered[source], _layout(source))
        root, lies = self.roots.get(viewed, viewed)
        is_view = node.target in SAME_MEMORY
        if _layout(node) == lies and is_view:
            return int(root)
        is_in_order = node.target in RESHAPES
        number = self._reshaped(node, viewed[0]) if is_in_order else self._number_operator(node, numbered)
        if is_view:
            self.roots[number, _layout(node)] = (root, lies)
        return number

    def _reshaped(self, node: fx.Node, source: int) -> int:
        first, shape = self.roots.get(source, (source, _shape(node.args[0])))
        if _shape(node) == shape:
            return int(first)
        number = self.number(torch.ops.aten.reshape.default, ("value", first), _shape(node))
        self.roots[number] = (first, shape)
        return number

    def _number_operator(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int:
        return self._number_application(node.target, node.args, node.kwargs, numbered)

    def _number_application(self, target: Any, args: Any, kwargs: Any, numbered: Mapping[fx.Node, Any]) -> int:
        key: list[Any] = [target, _hashable(args, numbered), _hashable(kwargs, numbered) if kwargs else ()]
        if _depends_on_layout(target):
            fx.node.map_arg((args, kwargs), lambda source: key.append(_layout(source)))
        return self.number(*key)

    def _whole(self, gradient: fx.Node, numbered: Mapping[fx.Node, Any]) -> int:
        def apply(target: Any, *args: Any, **kwargs: Any) -> Number:
            if target not in RESHAPES:
                return Number(self._number_application(target, args, kwargs, numbered))
            source = args[0].number if isinstance(args[0], Number) else numbered[args[0]]
            first, _ = self.roots.get(source, (source, None))
            return Number(self.number(torch.ops.aten.reshape.default, ("value", first), tuple(args[1])))

        whole = form_of(gradient).make_sum(apply, gradient.args, gradient.meta["val"].shape, **details_of(gradient))
        assert isinstance(whole, Number), "a form of gradient makes it by operators"
        return whole.number

    def _write(self, node: fx.Node, numbered: dict[fx.Node, Any]) -> None:
        target, *sources = node.args
        written = numbered[sources[0]] if node.target is torch.ops.aten.copy_.default else None  # type: ignore[index]
        if node.target is out_products.mm_into:
            factors = tuple(("value", numbered[source]) for source in sources)  # type: ignore[index]
            written = self.number(torch.ops.aten.mm.default, factors, ())
        elif node.target is out_products.linear_into:
            operands = tuple(("value", numbered[source]) for source in sources)  # type: ignore[index]
            written = self.number(torch.ops.aten.addmm.default, operands, ())
        elif node.target is out_products.addmm_into:
            product = self.applied(torch.ops.aten.mm.default, *(numbered[source] for source in sources))  # type: ignore[index]
            written = self.applied(torch.ops.aten.add.Tensor, numbered[target], product)  # type: ignore[index]
        elif node.target is out_products.add_rows_into:
            rows, indices, padding_idx = sources
            whole = (rows, indices, _shape(target)[0], padding_idx, False)
            table = self._number_application(torch.ops.aten.embedding_dense_backward.default, whole, {}, numbered)
            written = self.applied(torch.ops.aten.add.Tensor, numbered[target], table)  # type: ignore[index]
        elif written is None:
            written = self.number(node.target, *(("value", numbered.get(n)) for n in node.all_input_nodes))
        numbered[node] = numbered[target] = written  # type: ignore[index]

    def _call(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> Any:
        nodes = [n for n in node.args if isinstance(n, fx.Node)]
        arguments = [self.number("slot") if n.target in ops.OUTPUT_MEMORY else numbered[n] for n in nodes]
        if self.inlined:
            return self._inline(self.program.regions[region_of(node)], arguments)
        read = [("value", a) for a, n in zip(arguments, nodes, strict=True) if n.target not in ops.OUTPUT_MEMORY]
        return self.number("region", region_of(node), *read)

    def _inline(self, region: Region, arguments: list[Any]) -> tuple[Any, ...]:
        body = region.graph_module.graph
        placeholders = [n for n in body.nodes if n.op == "placeholder"]
        numbered = self.number_graph(body, dict(zip(placeholders, arguments, strict=False)))
        results: Any = body.output_node().args[0]
        return tuple(numbered[result] for result in results)


@functools.cache
def _is_plain(target: Any) -> bool:
    may_be_other = any(target in some for some in (LAYOUT_ONLY, DECOMPOSITIONS, REARRANGEMENTS, ROW_READERS))
    return not may_be_other and not writes_argument(target)


@functools.cache
def _depends_on_layout(target: Any) -> bool:
    return reads_strides(target) or may_read_memory_in_order(target)


def _shape(value: Any) -> Any:
    return sizes_key(value.meta["val"].shape)


def _layout(node: fx.Node) -> Any:
    """None for values other than tensors. Strides without effect (of dimensions of size 0 or 1) are zero."""
    value = node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return None
    sizes, strides = sizes_key(value.shape), sizes_key(value.stride())
    return tuple((size, 0 if size in (0, 1) else stride) for size, stride in zip(sizes, strides, strict=True))


def _hashable(value: Any, numbered: Mapping[fx.Node, Any] | None = None) -> Any:
    if isinstance(value, fx.Node) and numbered is not None:
        return ("value", numbered[value])
    if isinstance(value, Number):
        return ("value", value.number)
    if isinstance(value, list | tuple):
        return tuple([_hashable(item, numbered) for item in value])
    if isinstance(value, dict):
        return tuple([(key, _hashable(item, numbered)) for key, item in value.items()])
    return (type(value), value) if isinstance(value, bool | int | float) else value


@dataclass(frozen=True)
class Number:
    """Wraps an expression's number, to distinguish it from a numeric argument."""

    number: int


class NumberedRows:
    """Notes each expression's shape and dtype, and the operators that make rows."""

    def __init__(self, number_application: Callable[[Any, tuple[Any, ...]], int]) -> None:
        self._number_application = number_application
        self._op_of: dict[int, ValueOp[Number] | fx.Node] = {}

    def note(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        number = numbered[node]
        if isinstance(number, int) and number not in self._op_of:
            is_of_rows = node.target in ROW_MAKERS
            self._op_of[number] = _op_of(node, numbered) if is_of_rows else node

    def by_elements(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
        """The row element's number; None if the value depends on more than one element of a row."""
        element = by_elements(self, _op_of(node, numbered))
        return element.number if element is not None else None

    def op_of(self, value: Any) -> ValueOp[Number] | None:
        maker = self._op_of.get(value.number) if isinstance(value, Number) else None
        if not isinstance(maker, fx.Node):
            return maker
        tensor = maker.meta.get("val")
        if not isinstance(tensor, torch.Tensor):
            return None
        return ValueOp(None, (), {}, sizes_key(tensor.shape), tensor.dtype)

    def apply(self, target: Any, args: tuple[Any, ...]) -> Number:
        return Number(self._number_application(target, args))


def _op_of(node: fx.Node, numbered: Mapping[fx.Node, Any]) -> ValueOp[Number]:
    def number(source: fx.Node) -> Any:
        return Number(numbered[source])

    args: Any = fx.node.map_arg(node.args, number)
    kwargs: Any = fx.node.map_arg(node.kwargs, number)
    value = node.meta["val"]
    return ValueOp(node.target, args, kwargs, sizes_key(value.shape), value.dtype)


class NumberedColumns:
    """The value numbers of padded values before padding, and their numbers of columns."""

    def __init__(self, number: Callable[[Any, tuple[Any, ...]], int]) -> None:
        self._number = number
        self._first: dict[Any, tuple[Any, Any]] = {}  # by number of the padded value

    def note(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        if node.target in FACTORS:
            self._note_product(node, numbered)
        elif (columns := columns_before_padding(node)) is not None:
            self._first[numbered[node]] = (columns, numbered[node.args[0]])  # type: ignore[index]

    def first_columns(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> int | None:
        """The unpadded value's number, if the node slices off exactly the padding; else None."""
        wanted = first_columns(node)
        if wanted is None:
            return None
        columns, number = self._of(node.args[0], numbered)
        return number if columns is not None and columns == wanted else None

    def _of(self, value: Any, numbered: Mapping[fx.Node, Any]) -> tuple[Any, Any]:
        return self._first.get(numbered[value], (None, None)) if isinstance(value, fx.Node) else (None, None)

    def _note_product(self, node: fx.Node, numbered: Mapping[fx.Node, Any]) -> None:
        places = places_of_columns(node)
        known_columns = {place: self._of(node.args[place], numbered) for place in places}
        columns = known_columns[places[-1]][0]
        if columns is None or node.kwargs or any(known != columns for known, _ in known_columns.values()):
            return  # not padded
        operands = [known_columns[i][1] if i in known_columns else numbered[a] for i, a in enumerate(node.args)]  # type: ignore[index]
        self._first[numbered[node]] = (columns, self._number(node.target, tuple(map(Number, operands))))
