"""Lifetimes of a region's allocations, by a dry run of its code on fake tensors."""

from __future__ import annotations

import ast
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.memory.workspaces import workspace_bytes
from mirrorc.ir.program import Region
from mirrorc.printing.printed_values import type_of
from mirrorc.runtime.codegen.graph_function import GraphFunction, generate
from mirrorc.runtime.codegen.regions import RegionFunction, retarget
from mirrorc.runtime.devices.events import made_current
from mirrorc.torch_internals import inductor_wrapper, size_now, storage_key, watched_operators, with_sizes_now


@dataclass(frozen=True, eq=False)
class Block:
    """The memory of one value and of its views."""

    num_bytes: int
    name: str
    type: str


Held = int | Block
"""Memory in a region: the index of an argument, or an allocation."""


@dataclass(frozen=True)
class DryStep:
    """A statement of a region's code.

    Attributes:
        call: the function that the statement calls or prepares memory for.
        dropped: memory released after the statement; the caller may still hold an argument.
    """

    call: str
    node: fx.Node | None
    taken: tuple[Block, ...]
    dropped: tuple[Held, ...]
    workspace: int = 0


@dataclass(frozen=True)
class DryRun:
    """Memory use of a region.

    Attributes:
        remark: why the figures are estimates; empty if they are exact.
    """

    steps: tuple[DryStep, ...]
    results: tuple[Held | None, ...]
    remark: str = ""


def dry_run(region: Region, function: RegionFunction, device: torch.device) -> DryRun:
    """Runs a region's code on fake tensors. If Inductor's code fails on them, memory is counted without fusion."""
    module = retarget(region.graph_module, device)
    arguments = [_now(node.meta["val"]) for node in module.graph.find_nodes(op="placeholder")]
    eager: GraphFunction | None = getattr(function, "graph_function", None)
    if eager is not None:
        return _run_generated(eager, arguments)
    try:
        code, namespace = inductor_wrapper(function)
        with made_current(device):  # Inductor's code makes its GPU current, in the user's thread here
            return _run(ast.Module([code], []), {"self": None, **namespace}, arguments, lambda _: None)
    except Exception as error:  # noqa: BLE001 - Inductor's code may call functions that fail on fake tensors; a remark says so
        unfused = _run_generated(generate(region.name, module.graph, lambda node: node.target), arguments)
        reason = str(error).strip().split("\n")[0]
        remark = f"{region.name} is counted as if it were not fused, its compiled code could not be followed: {reason}"
        return DryRun(unfused.steps, unfused.results, remark)


def _now(value: Any) -> Any:
    return with_sizes_now(value) if isinstance(value, torch.Tensor) else size_now(value)


def _run_generated(function: GraphFunction, arguments: Sequence[Any]) -> DryRun:
    return _run(ast.parse(function.source), function.namespace, arguments, lambda line: function.nodes[line - 1])


def _run(
    module: ast.Module, namespace: dict[str, Any], arguments: Sequence[Any], node_of: Callable[[int], fx.Node | None]
) -> DryRun:
    (function,) = (statement for statement in module.body if isinstance(statement, ast.FunctionDef))
    mode = next((value.fake_mode for value in arguments if hasattr(value, "fake_mode")), None)
    assert mode is not None, "a region has an argument that is a tensor"
    follower = _Follower(namespace, arguments)
    with mode, torch.no_grad(), watched_operators(follower.note_operator):
        steps = [follower.step(statement, node_of) for statement in _flat(function.body[:-1])]
        last = function.body[-1]
        assert isinstance(last, ast.Return) and last.value is not None, "a region's code ends by returning its outputs"
        results = follower.results(last.value)
    return DryRun(tuple(_named_by_next_call(steps)), results)


def _flat(statements: Sequence[ast.stmt]) -> Iterator[ast.stmt]:
    """Flattens ``with`` statements, because a device guard has no effect on fake tensors."""
    for statement in statements:
        if isinstance(statement, ast.With):
            yield from _flat(statement.body)
        elif isinstance(statement, ast.Assign | ast.Delete | ast.Expr):
            yield statement
        else:
            raise ValueError(f"a statement of a kind that is not followed: {ast.unparse(statement)}")


_PREPARATIONS = ("empty_strided", "assert_", "reinterpret_tensor", "args.clear")


def _named_by_next_call(steps: Sequence[DryStep]) -> list[DryStep]:
    named: list[DryStep] = []
    following = "return"
    for step in reversed(steps):
        if step.call and not step.call.startswith(_PREPARATIONS):
            following = step.call
        if step.taken or step.dropped or step.workspace:
            named.append(replace(step, call=following))
    return named[::-1]


class _Follower:
    def __init__(self, namespace: dict[str, Any], arguments: Sequence[Any]) -> None:
        self._globals = namespace
        self._locals: dict[str, Any] = {"args": list(arguments)}
        self._held: dict[str, list[int]] = {}  # local name -> memory
        self._holders: Counter[int] = Counter()
        self._memory: dict[int, Held] = {}
        self._workspace = 0
        self._places: defaultdict[int, list[int]] = defaultdict(list)  # memory -> arguments, of which some may be views
        for place, value in enumerate(arguments):
            for tensor in _tensors(value):
                self._memory.setdefault(storage_key(tensor), place)
                self._places[storage_key(tensor)].append(place)

    def note_operator(self, operator: Any, args: tuple[Any, ...], result: Any) -> None:
        self._workspace = max(self._workspace, workspace_bytes(operator, args, result))

    def step(self, statement: ast.stmt, node_of: Callable[[int], fx.Node | None]) -> DryStep:
        self._workspace = 0
        exec(compile(ast.Module([statement], []), "<region>", "exec"), self._globals, self._locals)
        targets = getattr(statement, "targets", [])
        names = {part.id for target in targets for part in ast.walk(target) if isinstance(part, ast.Name)}
        node = node_of(statement.lineno)
        taken, dropped = [], []
        before = [key for name in names for key in self._held.pop(name, ())]
        for name in names:
            for tensor in _tensors(self._locals.get(name)):
                key = storage_key(tensor)
                if key not in self._memory:
                    size = tensor.untyped_storage().nbytes()
                    allocation = Block(size, node.name if node else name, type_of(tensor))
                    self._memory[key] = allocation
                    taken.append(allocation)
                self._holders[key] += 1
                self._held.setdefault(name, []).append(key)
        for key in before:
            self._holders[key] -= 1
            if not self._holders[key]:
                alike: list[Held] = [*self._places.get(key, ())]
                dropped += alike or [self._memory[key]]
                if not isinstance(self._memory[key], int):  # an argument stays known
                    del self._memory[key]
        call = node.name if node is not None else _called(statement)
        return DryStep(call, node, tuple(taken), tuple(dropped), self._workspace)

    def results(self, value: ast.expr) -> tuple[Held | None, ...]:
        outputs = eval(compile(ast.Expression(value), "<region>", "eval"), self._globals, self._locals)
        keys = [storage_key(output) if isinstance(output, torch.Tensor) else None for output in outputs]
        return tuple(self._memory[key] if key is not None else None for key in keys)


def _tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)


def _called(statement: ast.stmt) -> str:
    call = getattr(statement, "value", None)
    return ast.unparse(call.func) if isinstance(call, ast.Call) else ""
