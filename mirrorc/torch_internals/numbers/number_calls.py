"""A call of a graph that takes Python numbers, and the tensors that stand for them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

WIDE = (torch.float32, torch.float64)
"""The dtypes in which PyTorch computes with no more bits than they have."""


class Unsupported(Exception):
    """A function takes a number in a place where no tensor can stand; the text names the function."""


def told(node: fx.Node) -> str:
    """What a call is named in messages, such as ``clamp()``."""
    return f"{getattr(node.target, '__name__', node.target)}()"


class NumberCall:
    """A call that takes numbers."""

    def __init__(
        self,
        node: fx.Node,
        name: str,
        is_in_place: bool,
        tensor_of: Mapping[fx.Node, fx.Node],
        number_of: Mapping[fx.Node, int | float],
    ) -> None:
        self.node, self.name, self.is_in_place = node, name, is_in_place
        self._tensor_of, self._number_of = tensor_of, number_of
        self.values = [example_of(arg) if isinstance(arg, fx.Node) else arg for arg in node.args]
        self.is_operator = getattr(node.target, "__module__", "") == "_operator"

    def is_number(self, arg: Any) -> bool:
        return isinstance(arg, fx.Node) and arg in self._number_of

    def has_numbers(self, arg: Any) -> bool:
        found: list[bool] = []
        fx.node.map_arg(arg, lambda node: found.append(node in self._number_of))
        return any(found)

    def numbers(self) -> list[Any]:
        """Where the numbers are: places of arguments, and keywords."""
        places: list[Any] = [i for i, arg in enumerate(self.node.args) if self.is_number(arg)]
        return places + [key for key, arg in self.node.kwargs.items() if self.is_number(arg)]

    def promoted(self, number: fx.Node, other: torch.Tensor) -> torch.dtype:
        """The dtype in which PyTorch computes with a number and a tensor."""
        return torch.result_type(other, self._number_of[number])

    def operand(self, number: fx.Node, other: torch.Tensor) -> fx.Node:
        """The tensor for a number that is computed with another tensor."""
        wanted, given = self.promoted(number, other), example_of(self._tensor_of[number])
        if torch.result_type(other, given) == wanted:
            return self._tensor_of[number]
        if wanted not in (*WIDE, torch.int64):  # PyTorch computes with more bits than the dtype has
            raise Unsupported(f"{told(self.node)} with a scalar of {wanted}")
        return self.converted(number, wanted)

    def converted(self, number: fx.Node, dtype: torch.dtype) -> fx.Node:
        """The tensor for a number, in a dtype."""
        tensor = self._tensor_of[number]
        if example_of(tensor).dtype == dtype:
            return tensor
        return self.insert("to", (tensor, dtype))

    def insert(
        self, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> fx.Node:
        """Inserts a call before this one."""
        graph, named = self.node.graph, dict(kwargs or {})
        with graph.inserting_before(self.node):
            new = graph.create_node("call_method" if isinstance(target, str) else "call_function", target, args, named)
        new.meta = {key: value for key, value in self.node.meta.items() if key != "example_value"}
        new.meta["example_value"] = run(new)
        return new

    def replace(
        self, target: Callable[..., Any] | str, args: tuple[Any, ...], kwargs: Mapping[str, Any] | None = None
    ) -> None:
        """Calls another function here, with the same result."""
        self.node.op = "call_method" if isinstance(target, str) else "call_function"
        self.node.target, self.node.args, self.node.kwargs = target, args, dict(kwargs or {})


def run(node: fx.Node) -> Any:
    """What a call gives on the fake tensors that its arguments are."""
    filled: Any = fx.node.map_arg((node.args, node.kwargs), example_of)
    args, kwargs = filled
    target: Any = node.target
    mode = next(arg.fake_mode for arg in (*args, *kwargs.values()) if hasattr(arg, "fake_mode"))
    with torch.no_grad(), mode:
        return getattr(args[0], target)(*args[1:], **kwargs) if node.op == "call_method" else target(*args, **kwargs)


def example_of(node: fx.Node) -> Any:
    """The fake value that Dynamo has noted on a node."""
    return node.meta["example_value"]
