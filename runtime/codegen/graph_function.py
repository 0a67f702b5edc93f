"""Generates Python functions from FX graphs. They free values after the last use."""

from __future__ import annotations

import contextlib
import functools
import itertools
import operator
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import FrameType, TracebackType
from typing import Any

from torch import fx
from torch.profiler import record_function

from mirrorc.ir.nodes import is_compute, is_region_call, region_of
from mirrorc.runtime.profiling.recorder import Clock
from mirrorc.torch_internals import is_profiled


class Constant:
    """A node's value that is bound once, not computed in every step."""

    def __init__(self, value: Any) -> None:
        self.value = value


class TwoPartCall:
    """A call in two parts: ``arrive`` takes the arguments and never blocks; ``leave`` waits for other graphs' calls.

    A generated function with pauses yields between the parts.

    Args:
        may_end: return the function's output early if ``leave`` returns False.
    """

    def __init__(self, arrive: Callable[..., None], leave: Callable[[], Any], *, may_end: bool = False) -> None:
        self.arrive, self.leave, self.may_end = arrive, leave, may_end


class Asking:
    """A call with requests. The generated function first yields the requests; its caller resumes it once they are met.

    Args:
        asks: pairs of a function that makes a request, and the positions of its arguments among the call's.
    """

    def __init__(self, call: Callable[..., Any], asks: Sequence[tuple[Callable[..., Any], Sequence[int]]]) -> None:
        self.call, self.asks = call, asks


WAITS = object()
"""Yielded before a call that waits for other graphs' calls."""


_serial = itertools.count()
_programs: weakref.WeakValueDictionary[str, GraphFunction] = weakref.WeakValueDictionary()


class GraphFunction:
    """A graph as a callable. It takes a list of arguments and empties it.

    Attributes:
        nodes: the node of each source line, or None.
        namespace: the source's globals; may be rebound between calls.
        marked: nodes with a time mark after their call, in order, after the mark of the beginning.
        asks: it is a generator that yields requests, see `Asking`.
        pauses: it is a generator that yields at the ``pauses`` of `generate`.
    """

    asks = pauses = False

    def __init__(
        self,
        title: str,
        source: str,
        nodes: Sequence[fx.Node | None],
        namespace: dict[str, Any],
        marked: Sequence[fx.Node] = (),
        calls: Mapping[str, fx.Node] | None = None,
    ) -> None:
        self.title, self.calls = title, calls or {}
        self.source, self.nodes, self.namespace, self.marked = source, nodes, namespace, marked
        self.filename = f"<mirrorc {title} #{next(_serial)}>"
        exec(compile(source, self.filename, "exec"), namespace)  # the source was generated below from a graph
        self.call: Callable[[list[Any]], Any] = namespace["run"]
        namespace["run"].graph_function = self  # to find the failing node
        _programs[self.filename] = self


def failing_nodes(traceback: TracebackType | None) -> Iterator[fx.Node]:
    """Nodes that were running when an exception was raised, outermost first."""
    while traceback is not None:
        frame: FrameType = traceback.tb_frame
        program = _programs.get(frame.f_code.co_filename)
        if program is not None:
            node = program.nodes[traceback.tb_lineno - 1]
            if node is not None:
                yield node
        traceback = traceback.tb_next


def generate(
    title: str,
    graph: fx.Graph,
    bind: Callable[[fx.Node], Any],
    *,
    boxed: Callable[[fx.Node], bool] = lambda _: False,
    clock: Clock | None = None,
    pauses: Callable[[fx.Node], bool] = lambda _: False,
    waits: Callable[[fx.Node], bool] = lambda _: False,
) -> GraphFunction:
    """Generates the function of a graph.

    Args:
        bind: returns a call's function, or a `Constant`, a `TwoPartCall` or an `Asking`.
        boxed: True if a node's function takes a list of arguments, empties it, and returns a sequence.
        clock: marks the end of every call.
        pauses: True to yield before a node's call, or between the parts of a `TwoPartCall`.
        waits: True to yield `WAITS` before a node's call.
    """
    return _Generator(graph, bind, boxed, clock, pauses, waits).generate(title)


def last_uses(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For each node, its operands that no later node uses."""
    dying: dict[fx.Node, list[fx.Node]] = {}
    seen: set[fx.Node] = set()
    for node in reversed(list(graph.nodes)):
        dying[node] = [source for source in node.all_input_nodes if source not in seen]
        seen.update(dying[node])
    return dying


@dataclass
class _Generator:
    graph: fx.Graph
    bind: Callable[[fx.Node], Any]
    boxed: Callable[[fx.Node], bool]
    clock: Clock | None
    pauses: Callable[[fx.Node], bool]
    waits: Callable[[fx.Node], bool]
    asks: bool = False
    has_paused: bool = False
    marked: list[fx.Node] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    nodes: list[fx.Node | None] = field(default_factory=list)
    namespace: dict[str, Any] = field(default_factory=dict)
    calls: dict[str, fx.Node] = field(default_factory=dict)
    names: dict[fx.Node, str] = field(default_factory=dict)
    dying: dict[fx.Node, list[str]] = field(default_factory=dict)

    def generate(self, title: str) -> GraphFunction:
        if self.clock is None:
            self._emit("def run(args):", None)
        else:
            self.namespace |= {"begin": self.clock.begin, "mark": self.clock.mark, "note": self.clock.note}
            self._emit("def run(args, begin=begin, mark=mark, note=note):", None)  # locals are looked up faster
            self._emit("    t0 = begin()", None)
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        for node in self.graph.nodes:
            self.names[node] = f"v{len(self.names)}"
        self.dying = {node: [self.names[source] for source in last] for node, last in last_uses(self.graph).items()}
        if placeholders:
            self._emit(f"    {', '.join(self.names[n] for n in placeholders)}, = args; args.clear()", None)
        for node in self.graph.nodes:
            self._emit_node(node)
        made = GraphFunction(title, "\n".join(self.lines) + "\n", self.nodes, self.namespace, self.marked, self.calls)
        made.asks, made.pauses = self.asks, self.has_paused
        return made

    def _emit(self, line: str, node: fx.Node | None) -> None:
        self.lines.append(line)
        self.nodes.append(node)

    def _emit_node(self, node: fx.Node) -> None:
        if node.op == "output":
            if self.clock is not None:
                self._emit(f"    note(({' '.join(f't{i},' for i in range(len(self.marked) + 1))}))", None)
            self._emit(f"    return {self._show(node.args[0])}", node)
        elif node.op != "placeholder" and not self._is_unpacked(node):
            bound = self.bind(node)
            name = self.names[node]
            if isinstance(bound, Constant):
                self.namespace[name] = bound.value
                self.dying[node] = []
                return
            function = f"f_{name}"
            if self.waits(node):
                self.namespace["WAITS"] = WAITS
                self._emit("    yield WAITS", node)
            if isinstance(bound, Asking):
                bound = self._emit_asking(node, name, bound)
            if isinstance(bound, TwoPartCall):
                self._emit_two_part_call(node, name, bound)
                return
            self.namespace[function], self.calls[function] = bound, node
            if self.boxed(node):
                self._emit_boxed(node, function)
            else:
                self._pause(node)
                named = (f"{key}={self._show(value)}" for key, value in node.kwargs.items())
                arguments = [*map(self._show, node.args), *named]
                self._emit(f"    {name} = {function}({', '.join(arguments)})", node)
                self._mark(node)
                self._free(node, [] if node.users else [name])

    def _emit_boxed(self, node: fx.Node, function: str) -> None:
        self._emit(f"    box = [{', '.join(self._show(a) for a in node.args)}]", None)
        self._free(node)
        parts = sorted(node.users, key=lambda user: user.args[1])  # type: ignore[arg-type, return-value]
        assert [user.args[1] for user in parts] == list(range(len(parts))), "every output of a region has one getitem"
        results = "".join(f"{self.names[part]}, " for part in parts)
        self._emit(f"    {results + '= ' if parts else ''}{function}(box)", node)
        self._mark(node)

    def _emit_two_part_call(self, node: fx.Node, name: str, bound: TwoPartCall) -> None:
        self.namespace |= {f"arrive_{name}": bound.arrive, f"leave_{name}": bound.leave}
        self.calls |= {f"arrive_{name}": node, f"leave_{name}": node}
        self._emit(f"    arrive_{name}({', '.join(self._show(argument) for argument in node.args)})", node)
        self._pause(node)
        self._emit(f"    {name} = leave_{name}()", node)
        if bound.may_end:
            self._emit(f"    if {name} is False: return {self._show(self.graph.output_node().args[0])}", node)
        self._mark(node)
        self._free(node, [] if node.users else [name])

    def _emit_asking(self, node: fx.Node, name: str, bound: Asking) -> Callable[..., Any]:
        self.asks = True
        for number, (ask, places) in enumerate(bound.asks):
            self.namespace[f"ask{number}_{name}"] = ask
            arguments = ", ".join(self._show(node.args[place]) for place in places)
            self._emit(f"    yield ask{number}_{name}({arguments})", node)
        return bound.call

    def _pause(self, node: fx.Node) -> None:
        if self.pauses(node):
            self.has_paused = True
            self._emit("    yield", None)

    def _mark(self, node: fx.Node) -> None:
        if self.clock is not None:
            self.marked.append(node)
            self._emit(f"    t{len(self.marked)} = mark()", None)

    def _is_unpacked(self, node: fx.Node) -> bool:
        if node.target is not operator.getitem:
            return False
        source = node.args[0]
        return isinstance(source, fx.Node) and self.boxed(source)

    def _free(self, node: fx.Node, unused: Sequence[str] = ()) -> None:
        names = [*(name for name in self.dying[node] if name not in self.namespace), *unused]
        if names:
            self._emit(f"    {' = '.join(names)} = None", None)

    def _show(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            return self.names[value]
        if value is None or type(value) in (bool, int, str):
            return repr(value)
        if isinstance(value, list):
            return f"[{', '.join(self._show(item) for item in value)}]"
        if isinstance(value, tuple):
            return f"({''.join(self._show(item) + ', ' for item in value)})"
        name = f"c{len(self.namespace)}"
        self.namespace[name] = value
        return name


def with_profiler_ranges(function: GraphFunction) -> Callable[[list[Any]], Any]:
    """The call of a device's function, with a profiler range around each inner call if a profiler is active."""
    if not is_profiled():
        return function.call
    return functools.partial(_paused_in_ranges if function.pauses else _in_ranges, function)


def _in_ranges(function: GraphFunction, values: list[Any]) -> Any:
    with _ranges(function):
        return function.call(values)


def _paused_in_ranges(function: GraphFunction, values: list[Any]) -> Iterator[Any]:
    with _ranges(function):
        return (yield from function.call(values))


@contextlib.contextmanager
def _ranges(function: GraphFunction) -> Iterator[None]:
    plain = {name: function.namespace[name] for name, node in function.calls.items() if _is_named(node)}
    for name, bound in plain.items():
        function.namespace[name] = _ranged(range_name(function.calls[name], function.title), bound)
    try:
        yield
    finally:
        function.namespace.update(plain)


def _is_named(node: fx.Node) -> bool:
    return is_region_call(node) or not (is_compute(node) or node.target.__module__ == "_operator")


def range_name(node: fx.Node, device: str) -> str:
    if is_region_call(node):
        return f"mirrorc::{region_of(node)} {device}"
    bucket = f" b{node.kwargs['bucket']}" if isinstance(node.kwargs.get("bucket"), int) else ""
    bucket += f" pack {node.kwargs['pack']}" if node.kwargs.get("pack") is not None else ""
    return f"mirrorc::{getattr(node.target, '__name__', node.target)}{bucket} {device}"


def _ranged(name: str, bound: Callable[..., Any]) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with record_function(name):
            return bound(*args, **kwargs)

    return run
