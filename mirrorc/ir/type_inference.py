"""Infers the types of nodes, with fake tensors."""

from __future__ import annotations

import operator
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import fx

from mirrorc.ir.nodes import is_compute, is_region_call, name_of
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Program
from mirrorc.ir.rearrangements import VIEWS_IN_ORDER
from mirrorc.ir.type_rules import any_value, noted_type, of_part, of_region, region_results
from mirrorc.ir.value_types import Pending, ValueType, has_symbols_in, is_same_type, value_type
from mirrorc.torch_internals import knowledge_of, quiet_fake_tensors, size_of_key, symbols_dispatched


def set_type(program: Program, node: fx.Node) -> None:
    if is_compute(node):
        node.meta["val"] = _run_fake(node)
    elif is_region_call(node):
        node.meta["val"] = tuple(result.meta["val"] for result in region_results(program, node))
    elif node.target is operator.getitem:
        of_part(program, node)
        source: Any = node.args[0]
        node.meta["val"] = source.meta["val"][node.args[1]]
    else:
        node.meta["val"] = _materialized(infer_type(program, node), any_value(node.graph).fake_mode)


def reinfer_type(node: fx.Node) -> None:
    """Infers a type again after a change of layout. A view that the new layout does not permit becomes a reshape."""
    try:
        node.meta["val"] = _run_fake(node)
    except TypeError:
        if node.target not in VIEWS_IN_ORDER:
            raise
        node.target = torch.ops.aten.reshape.default
        node.meta["val"] = _run_fake(node)


def _materialized(kind: ValueType, fake_mode: Any) -> Any:
    if kind is None:
        return None
    if kind[0] == "pending":
        return Pending(_materialized(kind[1], fake_mode))
    if kind[0] == "tuple":
        return tuple(_materialized(item, fake_mode) for item in kind[1])
    shape, strides = ([size_of_key(size, fake_mode) for size in sizes] for sizes in kind[1:3])
    with fake_mode:
        return torch.empty_strided(shape, strides, dtype=kind[3], device=kind[4])


def is_inferable(node: fx.Node) -> bool:
    if node.op in ("placeholder", "output"):
        return False
    record = operation_of(node.target)
    return record is None or record.gives is not None


def has_inferred_type(program: Program, node: fx.Node) -> bool:
    noted = node.meta.get("val")
    record = operation_of(node.target)
    if record is not None and record.gives is not None and record.kind is not Kind.REGION:
        return is_same_type(value_type(noted), record.gives(program, node))
    if node.target is operator.getitem:
        source, index = node.args
        values = source.meta.get("val") if isinstance(source, fx.Node) else None
        if isinstance(values, tuple) and isinstance(index, int) and 0 <= index < len(values) and values[index] is noted:
            return True
    elif is_region_call(node):
        results = region_results(program, node)
        inferred = [result.meta.get("val") for result in results]
        if isinstance(noted, tuple) and len(noted) == len(inferred) and all(map(operator.is_, noted, inferred)):
            return True
    return is_same_type(value_type(noted), infer_type(program, node))


def infer_type(program: Program, node: fx.Node) -> ValueType:
    """Raises TypeError with the reason."""
    record = operation_of(node.target)
    if record is not None and record.gives is not None and record.kind is not Kind.REGION:
        return record.gives(program, node)
    if is_compute(node):
        return _operator_type(node)
    if is_region_call(node):
        return of_region(program, node)
    if node.target is operator.getitem:
        return of_part(program, node)
    raise TypeError(f"{name_of(node)} is no operation of mirrorc, nor an operator of torch")


_MOST_SEEN = 4096
_seen: dict[Any, ValueType] = {}
"""Deep models repeat a few types of arguments many times."""


_seen_of_symbols: WeakKeyDictionary[Any, dict[Any, ValueType]] = WeakKeyDictionary()
"""By shape environment, because facts about symbols differ between graphs."""


def _operator_type(node: fx.Node) -> ValueType:
    key: Any = (node.target, _signature(node.args), _signature(node.kwargs), torch.get_default_dtype())
    seen = _seen
    if has_symbols_in(key[1:]):
        environment, known_by_now = knowledge_of(any_value(node.graph))
        seen, key = _seen_of_symbols.setdefault(environment, {}), (known_by_now, key)
    try:
        known = seen.get(key, key)
    except TypeError:  # an argument cannot be hashed
        return value_type(_run_fake(node))
    if known is key:
        if len(seen) >= _MOST_SEEN:
            seen.clear()
        known = seen[key] = value_type(_run_fake(node))
    return known


def _signature(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return noted_type(argument)
    if isinstance(argument, list | tuple):
        return tuple([_signature(item) for item in argument])
    if isinstance(argument, dict):
        return tuple([(key, _signature(item)) for key, item in argument.items()])
    return (type(argument), argument)  # 1, 1.0 and True are equal, and are not the same argument


def _run_fake(node: fx.Node) -> Any:
    mode = any_value(node.graph).fake_mode
    args: Any = fx.node.map_arg(node.args, lambda n: _in_mode(n.meta["val"], mode))
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: _in_mode(n.meta["val"], mode))
    try:
        dispatched = symbols_dispatched(*(source.meta["val"] for source in node.all_input_nodes))
        with mode, torch.no_grad(), quiet_fake_tensors(), dispatched:
            target: Any = node.target
            return target(*args, **kwargs)
    except Exception as error:  # whatever the operator's own check raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TypeError(f"{node.target} cannot take these arguments: {reason}") from error


def _in_mode(value: Any, mode: Any) -> Any:
    if getattr(value, "fake_mode", mode) is mode or has_symbols_in((tuple(value.shape),)):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)
