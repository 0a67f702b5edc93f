"""Names the values of a captured graph after the user's modules."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.names import identifier
from mirrorc.ir.program import Argument, ArgumentKind, placeholders_of
from mirrorc.messages.source_lines import module_of
from mirrorc.torch_internals import bare_name, is_operator


def with_stable_names(graph: fx.Graph, arguments: Sequence[Argument]) -> fx.Graph:
    """Copies a graph, naming values after module and operator: ``encoder_fc1_addmm``, ``d_encoder_fc1_mm`` in backward.

    A value outside of modules is named after the last module among its sources. Names do not depend on other modules.
    """
    copy = fx.Graph()
    values: dict[fx.Node, fx.Node] = {}
    counts: Counter[str] = Counter()
    taken = {node.name for node in graph.nodes if node.op == "placeholder"}
    places = _Places(graph, arguments)
    for node in graph.nodes:
        if node.op == "output":
            continue
        place = places.of(node)
        name = node.name
        if node.op == "call_function":
            base = _base(node, place, places.is_backward(node))
            name = _numbered(base, counts)
            while name in taken:
                name = _numbered(base, counts)
        taken.add(name)
        args, kwargs = (fx.node.map_arg(part, values.__getitem__) for part in (node.args, node.kwargs))
        values[node] = copy.create_node(node.op, node.target, args, kwargs, name=name)
        values[node].meta = node.meta
    copy.output(fx.node.map_arg(graph.output_node().args[0], values.__getitem__))
    return copy


def _base(node: fx.Node, place: str, is_backward: bool) -> str:
    if is_operator(node.target):
        operation = bare_name(node.target)
    elif node.target is operator.getitem:
        operation = f"part{node.args[1]}"
    elif "variable" in node.kwargs:
        return identifier(str(node.kwargs["variable"]))
    else:
        operation = str(getattr(node.target, "__name__", node.target))
    return identifier(".".join([*(["d"] if is_backward else []), *([place] if place else []), operation]))


def _numbered(base: str, counts: Counter[str]) -> str:
    counts[base] += 1
    return base if counts[base] == 1 else f"{base}_{counts[base]}"


@dataclass(frozen=True)
class _Place:
    """The place of a value. ``since`` is the position of the first use, -1 for arguments."""

    name: str = ""
    since: int = -1
    is_owned: bool = False


class _Places:
    """Nodes must be passed in the order of the graph."""

    def __init__(self, graph: fx.Graph, arguments: Sequence[Argument]) -> None:
        self._tangents = placeholders_of(graph, arguments, ArgumentKind.LOSS_WEIGHT)
        self._of_the_batch = placeholders_of(graph, arguments, ArgumentKind.BATCH)
        self._known: dict[fx.Node, _Place] = {}
        self._backward: set[fx.Node] = set()
        self._last = _Place()  # the place of the latest operator
        self._position = {node: i for i, node in enumerate(graph.nodes)}
        modules = {module_of(node) for node in graph.nodes}
        self._containers = {name[:i] for name in modules for i, char in enumerate(name) if char == "."} | {""}

    def is_backward(self, node: fx.Node) -> bool:
        return node in self._backward

    def of(self, node: fx.Node) -> str:
        if node in self._tangents or any(source in self._backward for source in node.all_input_nodes):
            self._backward.add(node)
        place = self._known[node] = self._place(node)
        if node.op == "call_function" and node.target is not ops.read and place.since >= 0:
            self._last = place
        return place.name

    def _place(self, node: fx.Node) -> _Place:
        position = self._position[node]
        if node.op == "placeholder":
            return _Place(str(node.target) if node in self._of_the_batch else "")
        if node.target is ops.read:
            first_use = min((self._position[user] for user in node.users), default=position)
            return _Place(str(node.kwargs["variable"]), first_use, is_owned=True)
        module = module_of(node)
        saved = self._latest(module, (n for n in node.all_input_nodes if not self.is_backward(n)))
        if self.is_backward(node) and saved.since >= 0:
            return _Place(saved.name, position)  # the gradient of a saved value
        made_of = max(saved, self._latest(module, node.all_input_nodes), key=lambda place: place.since)
        if module:
            return made_of if made_of.since >= 0 else _Place(module, position)
        return made_of if made_of.name else self._last

    def _latest(self, module: str, operands: Iterable[fx.Node]) -> _Place:
        inside = [self._known[node] for node in operands if self._is_inside(self._known[node], module)]
        return max(inside, key=lambda place: place.since, default=_Place())

    def _is_inside(self, place: _Place, module: str) -> bool:
        if not module:
            return bool(place.name)
        is_part = place.name.startswith(f"{module}.")
        is_variable = place.is_owned and place.name.rpartition(".")[0] == module
        return is_part and not (is_variable and module not in self._containers)
