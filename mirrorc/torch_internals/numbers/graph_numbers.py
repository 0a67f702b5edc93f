"""Makes the Python numbers of a Dynamo graph tensors that it takes: buffers of its module, for the export of the joint graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.torch_internals.numbers.host_numbers import NumberInputs, NumbersGivenUp
from mirrorc.torch_internals.numbers.number_calls import Unsupported, run
from mirrorc.torch_internals.numbers.number_operators import give_tensor
from mirrorc.torch_internals.numbers.python_numbers import NumberTrace

BUFFER = "mirrorc_number_"
"""How the names of the buffers begin; the index among `NumberInputs.given` follows."""


def take_numbers_as_tensors(traced: fx.GraphModule, trace: NumberTrace) -> NumberInputs | None:
    """Replaces the numbers of a graph by tensors, and gives how they follow from what Python reads; None if it has none.

    Raises:
        NumbersGivenUp: some of them are used where only a number can stand.
    """
    if not trace.slot_of:
        return None
    graph = traced.graph
    placeholders = list(graph.find_nodes(op="placeholder"))
    own = {node for node in graph.nodes if node in trace.slot_of}
    inside = own | trace.flags
    users = [n for n in graph.nodes if n not in inside and not inside.isdisjoint(n.all_input_nodes)]
    used = list(dict.fromkeys(source for user in users for source in user.all_input_nodes if source in inside))
    for user in users:
        sources = [source for source in user.all_input_nodes if source in inside]
        if user.op == "output" or not trace.flags.isdisjoint(sources):
            what = "is returned by forward" if user.op == "output" else "is used as a truth value"
            raise NumbersGivenUp(trace.names_at(sources), f"what is computed of it {what}")
    inputs = trace.inputs(used)
    tensor_of = {node: _placeholder(traced, trace, i, inputs.kinds[inputs.given[i]]) for i, node in enumerate(used)}
    number_of = {node: trace.value_at(node) for node in used}
    for user in users:
        _give(user, tensor_of, number_of, trace)
    _drop(graph, inside)
    _read_numbers(traced, [place for place, node in enumerate(placeholders) if node not in own], len(used))
    traced.recompile()
    if any(
        isinstance(node.meta.get("example_value"), torch.SymInt | torch.SymFloat | torch.SymBool)
        for node in graph.nodes
    ):
        raise NumbersGivenUp(inputs.sources, "it goes where it cannot be followed")
    return inputs


def _give(user: fx.Node, tensor_of: dict[fx.Node, fx.Node], number_of: dict[fx.Node, Any], trace: NumberTrace) -> None:
    expected, sources = user.meta.get("example_value"), [n for n in user.all_input_nodes if n in tensor_of]
    try:
        give_tensor(user, tensor_of, number_of)
        writes = str(getattr(user.target, "__name__", user.target)).endswith("_") or _is_augmented(user.target)
        if not writes and not _is_alike(run(user), expected):
            raise Unsupported(f"{user.target} of another type")
    except Unsupported as error:
        raise NumbersGivenUp(trace.names_at(sources), f"{error} takes it as a number that does not change") from error


def _is_augmented(target: Any) -> bool:
    return getattr(target, "__module__", "") == "_operator" and target.__name__ in ("iadd", "isub", "imul", "itruediv")


def _is_alike(found: Any, expected: Any) -> bool:
    both = (found, expected)
    if not all(isinstance(one, torch.Tensor) for one in both):
        return False
    return len({(one.dtype, one.shape, one.stride(), one.device) for one in both}) == 1


def _placeholder(traced: fx.GraphModule, trace: NumberTrace, index: int, kind: type) -> fx.Node:
    """A placeholder behind the others, for a buffer that holds a scalar of 64 bits."""
    dtype = torch.float64 if kind is float else torch.int64
    name = f"{BUFFER}{index}"
    tensor = torch.ones((), dtype=dtype)
    traced.register_buffer(name, tensor, persistent=False)
    last = list(traced.graph.find_nodes(op="placeholder"))[-1]
    with traced.graph.inserting_after(last):
        node = traced.graph.placeholder(name)
    node.meta["example_value"] = trace.fake_mode.from_tensor(tensor)
    return node


def _drop(graph: fx.Graph, nodes: set[fx.Node]) -> None:
    for node in reversed(list(graph.nodes)):
        if node in nodes:
            graph.erase_node(node)


def _read_numbers(traced: fx.GraphModule, kept: Sequence[int], count: int) -> None:
    """Has a graph take its other inputs as before, and the buffers of numbers behind them."""
    codegen: Any = traced.graph._codegen
    read: Any = _WithNumbers(codegen.dynamo_bytecode_flatten, traced, kept, count)
    codegen.dynamo_bytecode_flatten = traced._dynamo_bytecode_flatten = read


class _WithNumbers:
    """Stands for Dynamo's function that gives a graph its inputs.

    Attributes:
        input_processor: of that function, which asks for it.
    """

    def __init__(self, read: Callable[..., Any], module: fx.GraphModule, kept: Sequence[int], count: int) -> None:
        self.input_processor = read.input_processor  # type: ignore[attr-defined]
        self._read, self._module, self._kept, self._count = read, module, kept, count

    def __call__(self, *inputs: object) -> tuple[Any, ...]:
        found = self._read(*inputs)
        numbers = (getattr(self._module, f"{BUFFER}{index}") for index in range(self._count))
        return (*(found[place] for place in self._kept), *numbers)
