"""Replaces Python numbers among the arguments of a graph's functions by tensors, with what PyTorch makes of a number.

A number does not take part in the promotion of dtypes as a tensor does: a float times a tensor of integers is of the default
dtype, a float times a 32-bit scalar has 32 bits. So the tensor of 64 bits that stands for a number is given as it is only where
that is the same to PyTorch, and is converted first where it is not. What is not listed here takes numbers alone.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx

from mirrorc.torch_internals.numbers.number_calls import WIDE, NumberCall, Unsupported, example_of, told

_OPERATORS = {name: name for name in ("add", "sub", "mul", "pow", "lt", "le", "gt", "ge", "eq", "ne")} | {
    "truediv": "div"
}
_AUGMENTED = {"iadd": "add", "isub": "sub", "imul": "mul", "itruediv": "div"}
_NAMES = ("add", "sub", "subtract", "mul", "multiply", "div", "divide", "true_divide", "pow", "rsub")
_COMPARISONS = ("lt", "le", "gt", "ge", "eq", "ne", "less", "less_equal", "greater", "greater_equal", "not_equal")
_WITH_ALPHA = ("add", "sub", "subtract")
_CLAMPS = {"clamp": ("min", "max"), "clip": ("min", "max"), "clamp_min": ("min",), "clamp_max": ("max",)}
_FULL = ("full", "full_like", "new_full", "tensor", "scalar_tensor", "as_tensor")


def give_tensor(node: fx.Node, tensor_of: Mapping[fx.Node, fx.Node], number_of: Mapping[fx.Node, int | float]) -> None:
    """Gives a call of a graph tensors in the places of numbers.

    Args:
        node: a call of a function or method of torch, some of whose arguments are numbers.
        tensor_of: gives for each number the scalar tensor that stands for it, of 64 bits.
        number_of: a value of each number.

    Raises:
        Unsupported: the function takes no tensor there.
    """
    if node.op == "call_method" and node.target == "__rpow__":
        node.op, node.target, node.args = "call_function", operator.pow, (node.args[1], node.args[0])
    name, is_in_place = _name_of(node)
    call = NumberCall(node, name, is_in_place, tensor_of, number_of)
    if any(
        isinstance(arg, list | tuple | dict | slice) and call.has_numbers(arg)
        for arg in (*node.args, *node.kwargs.values())
    ):
        raise Unsupported(told(node))
    for rewrite in (_binary, _alpha, _where, _clamp, _filled, _lerp, _masked):
        if rewrite(call):
            return
    raise Unsupported(told(node))


def _name_of(node: fx.Node) -> tuple[str, bool]:
    """The name of the function or method that a node calls, without the mark of writing in place; and whether it does that."""
    target: Any = node.target
    name = target if isinstance(target, str) else getattr(target, "__name__", "")
    module = getattr(target, "__module__", "")
    if module == "_operator":
        return {**_OPERATORS, **_AUGMENTED}.get(name, ""), name in _AUGMENTED
    if isinstance(target, str) and target.startswith("__"):  # torch 2.11 has such methods in the place of operators
        return _OPERATORS.get(target.strip("_"), ""), False
    is_known = isinstance(target, str) or getattr(torch, name, None) is target
    is_known = is_known or (name == "tensor" and module.startswith("torch."))  # Dynamo's own form of torch.tensor
    if not is_known or name.startswith("__"):
        return "", False
    return name.removesuffix("_"), name.endswith("_")


def _binary(call: NumberCall) -> bool:
    """An operation on two elements, such as ``x * t`` or ``x > t``."""
    node, name = call.node, call.name
    if (
        name not in (*_NAMES, *_COMPARISONS)
        or len(node.args) != 2
        or len(call.numbers()) != 1
        or call.numbers()[0] not in (0, 1)
    ):
        return False
    if call.has_numbers(node.kwargs) or (node.kwargs and set(node.kwargs) != {"alpha"}):
        return False
    place = call.numbers()[0]
    number: Any = node.args[place]
    other = call.values[1 - place]
    if not isinstance(other, torch.Tensor) or not _takes_numbers_as_tensors(name, other):
        return False
    if name == "div" and call.is_operator and place == 0:  # Python's 1 / x is x.reciprocal() * 1
        inverse = call.insert("reciprocal", (node.args[1],))
        call.replace(operator.mul, (inverse, call.operand(number, example_of(inverse))))
        return True
    if call.is_operator and place == 0 and name in ("add", "mul"):  # Python asks the tensor, whose number comes second
        call.replace(node.target, (node.args[1], call.operand(number, other)))
        return True
    node.update_arg(place, call.operand(number, other))
    return True


def _takes_numbers_as_tensors(name: str, other: torch.Tensor) -> bool:
    if name == "pow":  # integers have rules of their own for powers that are numbers
        return other.dtype in WIDE
    if name in _COMPARISONS:  # a number that the dtype cannot hold is an error
        return other.dtype in (*WIDE, torch.bfloat16, torch.int64)
    return other.dtype.is_floating_point or other.dtype in (torch.int64, torch.bool)


def _alpha(call: NumberCall) -> bool:
    """``torch.add(x, y, alpha=t)``."""
    node = call.node
    if call.name not in _WITH_ALPHA or call.numbers() != ["alpha"] or len(node.args) != 2:
        return False
    first, second = call.values
    both = [v.dtype for v in (first, second) if isinstance(v, torch.Tensor)]
    if not isinstance(second, torch.Tensor) or len(both) < 2 or both[0] != both[1] or both[0] not in WIDE:
        return False
    number: Any = node.kwargs["alpha"]
    scaled = call.insert(operator.mul, (node.args[1], call.operand(number, second)))
    call.replace(node.target, (node.args[0], scaled))
    return True


def _where(call: NumberCall) -> bool:
    """``torch.where(condition, x, t)``."""
    node = call.node
    if call.name != "where" or len(node.args) != 3 or node.kwargs or call.numbers() not in ([1], [2]):
        return False
    place = call.numbers()[0]
    other = call.values[3 - place]
    if not isinstance(other, torch.Tensor):
        return False
    number: Any = node.args[place]
    node.update_arg(place, call.converted(number, call.promoted(number, other)))
    return True


def _clamp(call: NumberCall) -> bool:
    """``x.clamp(min=t, max=1.0)``: one bound after the other."""
    node = call.node
    value = call.values[0] if call.values else None
    if (
        call.name not in _CLAMPS
        or not isinstance(value, torch.Tensor)
        or value.dtype not in (*WIDE, torch.bfloat16, torch.float16)
    ):
        return False
    bounds = dict(zip(_CLAMPS[call.name], node.args[1:], strict=False)) | dict(node.kwargs)
    bounds = {key: bound for key, bound in bounds.items() if bound is not None}
    if not set(bounds) <= {"min", "max"} or any(
        isinstance(b, fx.Node) and not call.is_number(b) for b in bounds.values()
    ):
        return False
    if any(isinstance(bound, int | float) and not _is_exact(bound, value.dtype) for bound in bounds.values()):
        return False
    given: Any = node.args[0]
    target = "clamp_" if call.is_in_place else "clamp"
    kept: list[dict[str, Any]] = []
    for key in ("min", "max"):
        if key in bounds:
            bound = bounds[key]
            kept.append({key: call.converted(bound, value.dtype) if isinstance(bound, fx.Node) else bound})
    for one in kept[:-1]:
        given = call.insert(target, (given,), one)
    call.replace(target, (given,), kept[-1])
    return True


def _is_exact(bound: float, dtype: torch.dtype) -> bool:
    """Whether a bound keeps the dtype of what is clamped; a number of floating point always does."""
    return dtype.is_floating_point or isinstance(bound, int)


def _filled(call: NumberCall) -> bool:
    """A new tensor of one number, such as ``torch.full(size, t)``; or ``x.fill_(t)``."""
    node, example = call.node, call.node.meta.get("example_value")
    if len(call.numbers()) != 1 or not isinstance(example, torch.Tensor):
        return False
    number: Any = node.args[call.numbers()[0]] if isinstance(call.numbers()[0], int) else node.kwargs[call.numbers()[0]]
    if call.name == "fill" and call.is_in_place:
        node.update_arg(1, call.converted(number, example.dtype))
        return True
    if (
        call.name not in _FULL
        or call.is_in_place
        or not set(node.kwargs) <= {"dtype", "device", "fill_value", "data", "layout"}
    ):
        return False
    if example.device.type != "cpu" or not example.is_contiguous() or example.requires_grad:
        return False
    whole = call.insert("expand", (call.converted(number, example.dtype), tuple(example.shape)))
    call.replace("clone", (whole,), {"memory_format": torch.contiguous_format})
    return True


def _lerp(call: NumberCall) -> bool:
    """``torch.lerp(x, y, t)``."""
    node = call.node
    if call.name != "lerp" or len(node.args) != 3 or node.kwargs or call.numbers() != [2]:
        return False
    value = call.values[0]
    if not isinstance(value, torch.Tensor) or value.dtype not in WIDE:
        return False
    number: Any = node.args[2]
    node.update_arg(2, call.converted(number, value.dtype))
    return True


def _masked(call: NumberCall) -> bool:
    """``x.masked_fill(mask, t)``."""
    node = call.node
    if call.name != "masked_fill" or len(node.args) != 3 or node.kwargs or call.numbers() != [2]:
        return False
    value = call.values[0]
    if not isinstance(value, torch.Tensor) or not value.dtype.is_floating_point:
        return False
    number: Any = node.args[2]
    node.update_arg(2, call.converted(number, value.dtype))
    return True
