"""Types of values, and what type each operation gives: recomputed with fake tensors, without running anything."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from mirrorc.ir import ops
from mirrorc.ir.buckets import Bucket
from mirrorc.ir.nodes import bucket_of, is_compute, is_region_call, name_of, region_of, replica_of
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Placement
from mirrorc.torch_internals import quiet_fake_tensors

ValueType = Any
"""Hashable: ``("tensor", shape, strides, dtype, device)``, ``("pending", type)``, ``("tuple", types)`` or a constant."""


def value_type(value: Any) -> ValueType:
    """The type of a (fake) value."""
    if isinstance(value, torch.Tensor):
        return ("tensor", tuple(value.shape), value.stride(), value.dtype, value.device)
    if isinstance(value, ops.Pending):
        return ("pending", value_type(value.value))
    if isinstance(value, list | tuple):
        return ("tuple", tuple(value_type(item) for item in value))
    return value


def is_same_type(one: ValueType, other: ValueType) -> bool:
    """Whether two types are the same but for what means nothing: strides of dimensions of size 1, a device's number."""
    return bool(one == other) or bool(_canonical(one) == _canonical(other))


def _canonical(kind: ValueType) -> ValueType:
    if not isinstance(kind, tuple):
        return kind
    if kind[0] == "pending":
        return ("pending", _canonical(kind[1]))
    if kind[0] == "tuple":
        return ("tuple", tuple(_canonical(item) for item in kind[1]))
    _, shape, strides, dtype, device = kind
    return ("tensor", shape, tuple(0 if n == 1 else s for n, s in zip(shape, strides, strict=True)), dtype, device.type)


def say_type(kind: ValueType) -> str:
    """A type for a message: with strides where they are not those of a contiguous tensor."""
    if not isinstance(kind, tuple):
        return str(kind)
    if kind[0] == "pending":
        return f"pending {say_type(kind[1])}"
    if kind[0] == "tuple":
        return f"({', '.join(say_type(item) for item in kind[1])})"
    dense = value_type(torch.empty(kind[1], dtype=kind[3], device="meta"))
    text = f"{str(kind[3]).removeprefix('torch.')}{list(kind[1])}"
    text += "" if _canonical(kind)[2] == _canonical(dense)[2] else f" with strides {list(kind[2])}"
    return text + (f" on {kind[4].type}" if kind[4].type != "cpu" else "")


def set_type(program: Program, node: fx.Node) -> None:
    """Gives a new node the (fake) value that its operation has, from those of its arguments: for passes that insert nodes.

    Raises:
        TypeError: the operation cannot take these arguments.
    """
    if is_compute(node):
        node.meta["val"] = _run_fake(node)
    elif is_region_call(node):
        node.meta["val"] = tuple(result.meta["val"] for result in _region_results(program, node))
    elif node.target is operator.getitem:
        _part(program, node)
        source: Any = node.args[0]
        node.meta["val"] = source.meta["val"][node.args[1]]
    else:
        node.meta["val"] = _materialized(infer_type(program, node), _any_value(node.graph).fake_mode)


def _materialized(kind: ValueType, fake_mode: Any) -> Any:
    if kind is None:
        return None
    if kind[0] == "pending":
        return ops.Pending(_materialized(kind[1], fake_mode))
    with fake_mode:
        return torch.empty_strided(kind[1], kind[2], dtype=kind[3], device=kind[4])


def is_inferable(node: fx.Node) -> bool:
    """Whether a node's type follows from others: all but arguments and outputs."""
    return node.op not in ("placeholder", "output") and node.target is not ops.argument


def is_noted_rightly(program: Program, node: fx.Node) -> bool:
    """Whether a node's noted value has the type that `infer_type` finds.

    Raises:
        TypeError: the operation cannot take these arguments.
    """
    noted = node.meta.get("val")
    if node.target is operator.getitem:
        source, index = node.args
        values = source.meta.get("val") if isinstance(source, fx.Node) else None
        if isinstance(values, tuple) and isinstance(index, int) and 0 <= index < len(values) and values[index] is noted:
            return True
    elif is_region_call(node):
        results = _region_results(program, node)
        own = [result.meta.get("val") for result in results]
        if isinstance(noted, tuple) and len(noted) == len(own) and all(map(operator.is_, noted, own)):
            return True
    return is_same_type(value_type(noted), infer_type(program, node))


def infer_type(program: Program, node: fx.Node) -> ValueType:
    """The type that a node has, recomputed from its arguments' types and from the program's tables.

    Raises:
        TypeError: the operation cannot take these arguments; says why.
    """
    if is_compute(node):
        return _operator_type(node)
    if is_region_call(node):
        return ("tuple", tuple(_noted(result) for result in _region_results(program, node)))
    rule = _RULES.get(node.target) if node.op == "call_function" else None
    if rule is None:
        raise TypeError(f"{name_of(node)} is no operation of mirrorc, nor an operator of torch")
    return rule(program, node)


def _noted(node: Any) -> ValueType:
    return value_type(node.meta.get("val")) if isinstance(node, fx.Node) else node


_MOST_SEEN = 4096
_seen: dict[Any, ValueType] = {}
"""Operators with the types of their arguments, and the types they give: deep models repeat few of them many times."""


def _operator_type(node: fx.Node) -> ValueType:
    key = (node.target, _signature(node.args), _signature(node.kwargs))
    try:
        known = _seen.get(key, key)
    except TypeError:  # an argument cannot be hashed
        return value_type(_run_fake(node))
    if known is key:
        if len(_seen) >= _MOST_SEEN:
            _seen.clear()
        known = _seen[key] = value_type(_run_fake(node))
    return known


def _signature(argument: Any) -> Any:
    if isinstance(argument, fx.Node):
        return _noted(argument)
    if isinstance(argument, list | tuple):
        return tuple([_signature(item) for item in argument])
    if isinstance(argument, dict):
        return tuple([(key, _signature(item)) for key, item in argument.items()])
    return (type(argument), argument)  # 1, 1.0 and True are equal, and are not the same argument


def _run_fake(node: fx.Node) -> Any:
    args: Any = fx.node.map_arg(node.args, lambda n: n.meta["val"])
    kwargs: Any = fx.node.map_arg(node.kwargs, lambda n: n.meta["val"])
    try:
        with _any_value(node.graph).fake_mode, torch.no_grad(), quiet_fake_tensors():
            target: Any = node.target
            return target(*args, **kwargs)
    except Exception as error:  # whatever the operator's own check raises
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise TypeError(f"{node.target} cannot take these arguments: {reason}") from error


def _any_value(graph: fx.Graph) -> Any:
    """Some fake tensor of a graph: it knows the mode and the device of all."""
    for node in graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                return item
    raise TypeError("the graph has no fake tensor")


def _flat(node: fx.Node, num_elements: int, dtype: torch.dtype) -> ValueType:
    return ("tensor", (num_elements,), (1,), dtype, _any_value(node.graph).device)


def _region_results(program: Program, node: fx.Node) -> tuple[fx.Node, ...]:
    """The results of the region that a node calls, if it takes what it is given."""
    name = region_of(node)
    if name not in program.regions:
        raise TypeError(f"it calls {name}, which is no region of the program")
    body = program.regions[name].graph_module.graph
    placeholders = [n for n in body.nodes if n.op == "placeholder"]
    if len(placeholders) != len(node.args):
        raise TypeError(f"{name} takes {len(placeholders)} arguments, but is given {len(node.args)}")
    for placeholder, given in zip(placeholders, node.args, strict=True):
        if isinstance(given, fx.Node) and given.meta.get("val") is placeholder.meta.get("val"):
            continue  # the very same fake value
        wanted, found = _noted(placeholder), _noted(given)
        if not is_same_type(wanted, found):
            raise TypeError(
                f"argument {placeholder.name} of {name} is {say_type(wanted)}, but is given {say_type(found)}"
            )
    return body.output_node().args[0]  # type: ignore[return-value]


def _read(program: Program, node: fx.Node) -> ValueType:
    variable = program.variables.get(str(node.kwargs["variable"]))
    if variable is None:
        raise TypeError(f"{node.kwargs['variable']} is no variable of the program")
    return ("tensor", variable.shape, variable.strides, variable.dtype, _any_value(node.graph).device)


def _slot(program: Program, node: fx.Node) -> ValueType:
    bucket = _bucket(program, node)
    slot = bucket.slot_of.get(str(node.kwargs["variable"]))
    if slot is None:
        raise TypeError(f"bucket {bucket.index} has no slot for {node.kwargs['variable']}")
    return ("tensor", slot.shape, slot.strides, bucket.dtype, _any_value(node.graph).device)


def _product(program: Program, node: fx.Node) -> ValueType:
    factors = [_noted(factor) for factor in node.args]
    slot = _slot(program, node)
    shapes = [kind[1] for kind in factors if isinstance(kind, tuple) and kind[0] == "tensor" and kind[3] == slot[3]]
    if len(shapes) != 2 or [len(shape) for shape in shapes] != [2, 2] or shapes[0][1] != shapes[1][0]:
        given = " and ".join(say_type(kind) for kind in factors)
        raise TypeError(f"it multiplies {given}: it needs two matrices of {say_type(slot)} that fit each other")
    if (shapes[0][0], shapes[1][1]) != slot[1]:
        raise TypeError(f"its product is {[shapes[0][0], shapes[1][1]]}, but the slot is {say_type(slot)}")
    return slot


def _index_add(program: Program, node: fx.Node) -> ValueType:
    slot = _slot(program, node)
    rows, indices, *more = [_noted(factor) for factor in node.args]
    given = [kind for kind in (rows, indices) if isinstance(kind, tuple) and kind[0] == "tensor"]
    fits = len(given) == 2 and not more and given[1][3] in (torch.int32, torch.int64) and given[0][3] == slot[3]
    if not fits or given[0][1] != (*given[1][1], *slot[1][1:]) or len(slot[1]) != 2:
        said = " at ".join(say_type(kind) for kind in (rows, indices))
        raise TypeError(
            f"it adds {said}: it needs rows of {say_type(slot)}, and as many integers that name their places"
        )
    return slot


def _part(program: Program, node: fx.Node) -> ValueType:
    source, index = node.args
    values = source.meta.get("val") if isinstance(source, fx.Node) else None
    if not isinstance(values, list | tuple) or not isinstance(index, int) or not 0 <= index < len(values):
        raise TypeError(f"{source} has no part {index}")
    return value_type(values[index])


def _bucket(program: Program, node: fx.Node) -> Bucket:
    index = bucket_of(node)
    if not 0 <= index < len(program.buckets):
        raise TypeError(f"there is no bucket {index}")
    return program.buckets[index]


def _pack(program: Program, node: fx.Node) -> ValueType:
    bucket = _bucket(program, node)
    return _flat(node, bucket.num_elements, bucket.dtype)


def _reduction(program: Program, node: fx.Node) -> ValueType:
    given = [_noted(source) for source in node.all_input_nodes]
    if not given:
        raise TypeError("it is given no bucket")
    if not all(is_same_type(given[0], other) for other in given):
        raise TypeError(
            f"it joins {' and '.join(sorted({say_type(kind) for kind in given}))}, which are not of one type"
        )
    return ("pending", given[0])


def _parameters(program: Program, node: fx.Node) -> ValueType:
    return ("pending", _pack(program, node))


def _wait(program: Program, node: fx.Node) -> ValueType:
    launch = node.args[0] if node.args else None
    pending = _noted(launch)
    if not isinstance(launch, fx.Node) or not isinstance(pending, tuple) or pending[0] != "pending":
        raise TypeError("it waits for something that is not pending")
    if launch.target is not ops.reduce_scatter:
        return pending[1]
    start, stop = _bucket(program, node).share(_replica(program, node), program.num_replicas)
    return _flat(node, stop - start, pending[1][3])


def _update(program: Program, node: fx.Node) -> None:
    bucket = _bucket(program, node)
    found = _noted(node.args[0] if node.args else None)
    num_elements = bucket.num_elements
    if bucket.placement is Placement.SHARED:
        start, stop = bucket.share(_replica(program, node), program.num_replicas)
        num_elements = stop - start
    wanted = _flat(node, num_elements, bucket.dtype)
    if not is_same_type(found, wanted):
        raise TypeError(f"bucket {bucket.index} is updated from {say_type(found)}, but needs {say_type(wanted)}")


def _replica(program: Program, node: fx.Node) -> int:
    replica = replica_of(node)
    if replica is not None:
        return replica
    return next(i for i, module in enumerate(program.device_graphs.values()) if module.graph is node.graph)


def _nothing(program: Program, node: fx.Node) -> None:
    return None


_RULES: dict[Any, Callable[[Program, fx.Node], ValueType]] = {
    ops.read: _read,
    ops.slot: _slot,
    ops.product: _product,
    ops.index_add: _index_add,
    operator.getitem: _part,
    ops.pack: _pack,
    ops.all_reduce: _reduction,
    ops.reduce_scatter: _reduction,
    ops.broadcast: _parameters,
    ops.send: _nothing,
    ops.recv: _parameters,
    ops.wait: _wait,
    ops.update: _update,
    ops.step_optimizer: _nothing,
    ops.store: _nothing,
    ops.write: _nothing,
}
