"""Replaces a graph's numbers by buffers of its module, with PyTorch's type promotion of numbers.

Buffers are 64-bit scalars, converted where they would change a result's dtype. torch's own pass
(`torch.fx.passes._tensorify_python_scalars`) supports only floats in ``+ - * /`` and comparisons, and computes ``t *
0.1 * 3.0`` in another order.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from torch import fx

from mirrorc.torch_internals.numbers.number_trace import (
    HostNumbers,
    Number,
    NumbersGivenUp,
    NumberTrace,
    is_float,
    plain_number,
)
from mirrorc.torch_internals.symbols.symbolic_sizes import has_symbols, sizes_key

BUFFER = "mirrorc_number_"
"""The prefix of buffer names; the index in `HostNumbers.taken` follows."""

_WIDE = (torch.float32, torch.float64)
"""Operators on these dtypes use no higher precision internally."""
_AUGMENTED = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}
_COMPARISONS = frozenset(
    ["lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal", "not_equal"]
)
_WITH_ALPHA = frozenset(("add", "sub", "subtract"))
_BINARY = (
    _COMPARISONS
    | _WITH_ALPHA
    | frozenset(["mul", "multiply", "div", "divide", "true_divide", "truediv", "pow", "rsub"])
)
_AS_RESULT = frozenset(("where", "fill", "lerp", "masked_fill"))  # take a tensor of the result's dtype
_CLAMPS = {"clamp": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}
_MADE = frozenset(["tensor", "as_tensor"])
_FULL = _MADE | frozenset(["full", "full_like", "new_full", "scalar_tensor"])


def take_numbers_as_tensors(traced: fx.GraphModule, trace: NumberTrace) -> HostNumbers | None:
    """Replaces a graph's numbers by buffers.

    Raises:
        NumbersGivenUp: a tensor cannot replace a number.
    """
    if not trace.index_of:
        return None
    graph, numbers = traced.graph, trace.index_of.keys() | trace.flags
    users = [node for node in graph.nodes if node not in numbers and not numbers.isdisjoint(node.all_input_nodes)]
    used = list(dict.fromkeys(source for user in users for source in user.all_input_nodes if source in numbers))
    for user in users:
        sources = [source for source in user.all_input_nodes if source in numbers]
        if user.op == "output" or not trace.flags.isdisjoint(sources):
            use = "is returned by forward" if user.op == "output" else "is used as a truth value"
            raise NumbersGivenUp(trace.names_at(sources), f"what is computed of it {use}")
    inputs = trace.inputs_at(used)
    operands = {node: (_buffer(traced, trace, i, node), inputs.values[inputs.taken[i]]) for i, node in enumerate(used)}
    for user in users:
        sources = [source for source in user.all_input_nodes if source in numbers]
        try:
            _Call(user, operands).give_tensors()
        except _Unsupported as error:
            why = f"{error} takes it as a number that does not change"
            raise NumbersGivenUp(trace.names_at(sources), why) from error
    for node in reversed(list(graph.nodes)):
        if node in numbers and node.op != "placeholder":
            graph.erase_node(node)
    traced.recompile()
    symbols = torch.SymInt | torch.SymFloat | torch.SymBool
    values = [node.meta.get("example_value") for node in graph.nodes if node.op != "placeholder"]
    if any(isinstance(value, symbols) and inputs.has_symbol_of(value.node.expr) for value in values):
        raise NumbersGivenUp(inputs.sources, "it goes where it cannot be followed")
    return inputs


def _buffer(traced: fx.GraphModule, trace: NumberTrace, index: int, number: fx.Node) -> fx.Node:
    kind = trace.inputs.numbers[trace.index_of[number]].kind
    tensor = torch.ones((), dtype=torch.float64 if is_float(kind) else torch.int64)
    traced.register_buffer(f"{BUFFER}{index}", tensor, persistent=False)
    with traced.graph.inserting_after(traced.graph.find_nodes(op="placeholder")[-1]):
        node = traced.graph.get_attr(f"{BUFFER}{index}")
    node.meta["example_value"] = trace.fake_mode.from_tensor(tensor)
    return node


class _Unsupported(Exception):
    """Raised if a call does not accept a tensor in place of a number. The message begins with the function called."""


class _Call:
    """A call with numbers among its arguments. ``operands`` maps a number's node to its 64-bit scalar and its value."""

    def __init__(self, node: fx.Node, operands: Mapping[fx.Node, tuple[fx.Node, Number]]) -> None:
        if node.op == "call_method" and node.target == "__rpow__":
            node.op, node.target, node.args = "call_function", operator.pow, (node.args[1], node.args[0])
        self.node, self._operands, self.result = node, operands, node.meta.get("example_value")
        target: Any = node.target
        name = target if isinstance(target, str) else getattr(target, "__name__", "")
        module = getattr(target, "__module__", "")
        self.is_operator = module == "_operator"
        is_known = isinstance(target, str) or self.is_operator or getattr(torch, name, None) is target
        is_known = is_known or (name == "tensor" and module.startswith("torch."))  # Dynamo's form of torch.tensor
        self.writes = name in _AUGMENTED or (name.endswith("_") and not name.startswith("__"))
        # torch 2.11 has methods such as __mul__ in place of operators
        self.name = _AUGMENTED.get(name, name.strip("_")) if is_known else ""

    def give_tensors(self) -> None:
        node = self.node
        args, in_containers = (*node.args, *node.kwargs.values()), list[fx.Node]()
        fx.node.map_arg([arg for arg in args if not isinstance(arg, fx.Node)], in_containers.append)
        direct: list[Any] = [arg for arg in args if self._is_number(arg)]
        if any(map(self._is_number, in_containers)):
            raise self._unsupported()
        if self.name in _BINARY and len(node.args) == 2 and len(direct) == 1 and node.kwargs.keys() <= {"alpha"}:
            self._give_operand()
        elif isinstance(self.result, torch.Tensor) and self.name in _AS_RESULT:
            self._give_as_result(self.result.dtype)
        elif isinstance(self.result, torch.Tensor) and self.name in _CLAMPS:
            self._give_bounds(self.result.dtype)
        elif isinstance(self.result, torch.Tensor) and self.name in _FULL and len(direct) == 1:
            self._give_value(direct[0], self.result)
        else:
            raise self._unsupported()
        if not self.writes and not _is_alike(_run(node), self.result):
            raise _Unsupported(f"{node.target} of another type")

    def _give_operand(self) -> None:
        """Rewrites calls such as ``x * t``, ``x > t``, ``torch.add(x, y, alpha=t)``."""
        first, second = self.node.args
        place = 0 if self._is_number(first) else 1 if self._is_number(second) else None
        other: Any = second if place == 0 else first
        example = _example(other) if isinstance(other, fx.Node) else None
        if not isinstance(example, torch.Tensor) or not self._takes(example.dtype):
            raise self._unsupported()
        if place is None:
            factor, is_known = self.node.kwargs["alpha"], self.name in _WITH_ALPHA and example.dtype in _WIDE
            if not is_known or getattr(_example(second), "dtype", None) != example.dtype:
                raise self._unsupported()
            scaled = self._insert(operator.mul, (second, self._operand(factor, _example(second))))
            self.node.args, self.node.kwargs = (first, scaled), {}
        elif self.is_operator and place == 0 and self.name == "truediv":  # Python's 1 / x is x.reciprocal() * 1
            inverse = self._insert("reciprocal", (second,))
            self.node.target, self.node.args = operator.mul, (inverse, self._operand(first, _example(inverse)))
        elif self.is_operator and place == 0 and self.name in ("add", "mul"):  # Python calls the tensor's method
            self.node.args = (second, self._operand(first, example))
        else:
            self.node.update_arg(place, self._operand(self.node.args[place], example))

    def _takes(self, dtype: torch.dtype) -> bool:
        if self.name == "pow":  # integers have special rules for number exponents
            return dtype in _WIDE
        if self.name in _COMPARISONS:  # a number beyond the dtype's range is an error
            return dtype in (*_WIDE, torch.bfloat16, torch.int64)
        return dtype.is_floating_point or dtype in (torch.int64, torch.bool)

    def _give_as_result(self, dtype: torch.dtype) -> None:
        """Rewrites ``torch.where(c, x, t)``, ``x.fill_(t)`` or ``torch.lerp(x, y, t)``, with a tensor of ``dtype``."""
        is_exact = dtype in _WIDE or (self.name == "masked_fill" and dtype.is_floating_point)
        if not is_exact and self.name not in ("where", "fill"):
            raise self._unsupported()
        self.node.args = tuple(self._converted(arg, dtype) for arg in self.node.args)
        self.node.kwargs = {key: self._converted(arg, dtype) for key, arg in self.node.kwargs.items()}

    def _give_bounds(self, dtype: torch.dtype) -> None:
        """Rewrites ``x.clamp(min=t, max=1.0)`` to one operation for each bound."""
        value, *places = self.node.args
        bounds = {**dict(zip(_CLAMPS[self.name], places, strict=False)), **self.node.kwargs}
        bounds = {key: bound for key in ("min", "max") if (bound := bounds.get(key)) is not None}
        is_tensor = any(isinstance(bound, fx.Node) and not self._is_number(bound) for bound in bounds.values())
        if is_tensor or not dtype.is_floating_point or "out" in self.node.kwargs:
            raise self._unsupported()
        target = "clamp_" if self.writes else "clamp"
        *calls, last = [{key: self._converted(bound, dtype)} for key, bound in bounds.items()]
        for bound in calls:
            value = self._insert(target, (value,), bound)
        self._replace(target, (value,), last)

    def _give_value(self, number: fx.Node, result: torch.Tensor) -> None:
        """Rewrites ``torch.full(size, t)``."""
        is_plain = result.device.type == "cpu" and result.is_contiguous() and not result.requires_grad
        if not is_plain or "out" in self.node.kwargs or has_symbols(result) or not self._is_of_dtype(number):
            raise self._unsupported()
        whole = self._insert("expand", (self._converted(number, result.dtype), tuple(result.shape)))
        self._replace("clone", (whole,), {"memory_format": torch.contiguous_format})

    def _is_of_dtype(self, number: fx.Node) -> bool:
        """False for a tensor made of a numpy number: Dynamo gives it the dtype of a Python number."""
        value = self._operands[number][1]
        if not isinstance(value, np.generic) or self.name not in _MADE or self.node.kwargs.get("dtype") is not None:
            return True
        return torch.tensor(value).dtype == torch.tensor(plain_number(value)).dtype

    def _is_number(self, arg: Any) -> bool:
        return isinstance(arg, fx.Node) and arg in self._operands

    def _operand(self, number: Any, other: torch.Tensor) -> fx.Node:
        tensor, value = self._operands[number]
        wanted = torch.result_type(other, plain_number(value))
        if torch.result_type(other, _example(tensor)) == wanted:
            return tensor
        if wanted not in (*_WIDE, torch.int64):  # PyTorch computes with more bits than the dtype
            raise _Unsupported(f"{self} with a scalar of {wanted}")
        return self._converted(number, wanted)

    def _converted(self, arg: Any, dtype: torch.dtype) -> Any:
        if not self._is_number(arg):
            return arg
        tensor = self._operands[arg][0]
        return tensor if _example(tensor).dtype == dtype else self._insert("to", (tensor, dtype))

    def _insert(self, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        op = "call_method" if isinstance(target, str) else "call_function"
        with self.node.graph.inserting_before(self.node):
            new = self.node.graph.create_node(op, target, args, kwargs or {})
        new.meta = {**self.node.meta, "example_value": _run(new)}
        return new

    def _replace(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.node.op, self.node.target, self.node.args, self.node.kwargs = "call_method", method, args, kwargs

    def _unsupported(self) -> _Unsupported:
        return _Unsupported(str(self))

    def __str__(self) -> str:
        return f"{getattr(self.node.target, '__name__', self.node.target)}()"


def _run(node: fx.Node) -> Any:
    arguments: Any = fx.node.map_arg((node.args, node.kwargs), _example)
    args, kwargs = arguments
    target: Any = node.target
    mode = next(arg.fake_mode for arg in (*args, *kwargs.values()) if hasattr(arg, "fake_mode"))
    with torch.no_grad(), mode:
        return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def _example(node: Any) -> Any:
    return node.meta["example_value"] if isinstance(node, fx.Node) else node


def _is_alike(result: Any, expected: Any) -> bool:
    both = (result, expected)
    if not all(isinstance(value, torch.Tensor) for value in both):
        return False
    types = [(value.dtype, value.device, sizes_key((*value.shape, *value.stride()))) for value in both]
    return types[0] == types[1]
