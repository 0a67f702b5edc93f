"""Type rules of operations: a value's type, from the operation's arguments and the program's tables."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from mirrorc.ir.buckets import Bucket, Pack
from mirrorc.ir.nodes import bucket_of, pack_of, region_of
from mirrorc.ir.operation import Effect, operation_of
from mirrorc.ir.program import Program
from mirrorc.ir.routes import replica_at, route_of, send_to
from mirrorc.ir.value_types import ValueType, contiguous_strides, is_same_type, say_type, value_type

OTHERWISE = ("raise", "skip")
"""See `mirrorc.ir.ops.commit`."""

WAYS_TO_GATHER = ("concatenated", "averaged", "summed", "apart")
"""See `mirrorc.ir.ops.gather`."""


def noted_type(node: Any) -> ValueType:
    return value_type(node.meta.get("val")) if isinstance(node, fx.Node) else node


def _first_operand(node: fx.Node) -> ValueType:
    return noted_type(node.args[0]) if node.args else None


def _is_tensor(kind: ValueType, rank: int | None = None) -> bool:
    return isinstance(kind, tuple) and kind[0] == "tensor" and rank in (None, len(kind[1]))


def _is_inexact(dtype: torch.dtype) -> bool:
    return dtype.is_floating_point or dtype.is_complex


def any_value(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        value = node.meta.get("val")
        for item in value if isinstance(value, list | tuple) else (value,):
            if isinstance(item, torch.Tensor):
                return item
    raise TypeError("the graph has no fake tensor")


def _flat(node: fx.Node, num_elements: int, dtype: torch.dtype) -> ValueType:
    return ("tensor", (num_elements,), (1,), dtype, any_value(node.graph).device)


def region_results(program: Program, node: fx.Node) -> tuple[fx.Node, ...]:
    """The results of a called region. Also checks the call's arguments."""
    name = region_of(node)
    if name not in program.regions:
        raise TypeError(f"it calls {name}, which is no region of the program")
    body = program.regions[name].graph_module.graph
    placeholders = [n for n in body.nodes if n.op == "placeholder"]
    if len(placeholders) != len(node.args):
        raise TypeError(f"{name} takes {len(placeholders)} arguments, but is given {len(node.args)}")
    for placeholder, argument in zip(placeholders, node.args, strict=True):
        if isinstance(argument, fx.Node) and argument.meta.get("val") is placeholder.meta.get("val"):
            continue  # the very same fake value
        wanted, kind = noted_type(placeholder), noted_type(argument)
        if not is_same_type(wanted, kind):
            raise TypeError(
                f"argument {placeholder.name} of {name} is {say_type(wanted)}, but is given {say_type(kind)}"
            )
    return body.output_node().args[0]  # type: ignore[return-value]


def of_variable(program: Program, node: fx.Node) -> ValueType:
    """The type of the variable."""
    variable = program.variables.get(str(node.kwargs["variable"]))
    if variable is None:
        raise TypeError(f"{node.kwargs['variable']} is no variable of the program")
    device = torch.device("cpu") if variable.is_on_host else any_value(node.graph).device
    return ("tensor", variable.shape, variable.strides, variable.dtype, device)


def of_slot(program: Program, node: fx.Node) -> ValueType:
    """The type of the slot."""
    bucket = _bucket(program, node)
    slot = bucket.slot_of.get(str(node.kwargs["variable"]))
    if slot is None:
        raise TypeError(f"bucket {bucket.index} has no slot for {node.kwargs['variable']}")
    return ("tensor", slot.shape, slot.strides, bucket.dtype, any_value(node.graph).device)


def of_reserved(program: Program, node: fx.Node) -> ValueType:
    """A contiguous tensor with its keywords' shape and dtype."""
    shape: Any = node.kwargs["shape"]
    dtype = node.kwargs["dtype"]
    if not isinstance(shape, list | tuple) or not all(isinstance(size, int) and size > 0 for size in shape):
        raise TypeError(f"it has the shape {shape}")
    if not isinstance(dtype, torch.dtype):
        raise TypeError(f"it has the dtype {dtype}")
    return _contiguous(tuple(shape), dtype, any_value(node.graph).device)


def of_region(program: Program, node: fx.Node) -> ValueType:
    """A tuple of the types of the region's results."""
    return ("tuple", tuple(noted_type(result) for result in region_results(program, node)))


def of_operand(program: Program, node: fx.Node) -> ValueType:
    """The type of its first operand."""
    return noted_type(node.args[0])


def of_sum_over_replicas(program: Program, node: fx.Node) -> ValueType:
    """A contiguous tensor of its operand's shape. The operand must not be boolean."""
    shape, dtype, device = _met_with(node)
    if dtype == torch.bool:
        raise TypeError("it is given truth values, and adds up numbers")
    return _contiguous(shape, dtype, device)


def of_rows_of_replicas(program: Program, node: fx.Node) -> ValueType:
    """A contiguous tensor like its operand, with ``rows`` as dim 0."""
    (shape, dtype, device), rows = _met_with(node), node.kwargs["rows"]
    if not shape:
        raise TypeError("it is given a scalar, which has no rows")
    if not isinstance(rows, int) or rows < 0:
        raise TypeError(f"its keyword rows is {rows!r}, and no number of rows")
    return _contiguous((rows, *shape[1:]), dtype, device)


def _met_with(node: fx.Node) -> tuple[tuple[int, ...], Any, Any]:
    kind, number = noted_type(node.args[0]), node.kwargs["number"]
    if not isinstance(number, int) or number < 0:
        raise TypeError(f"its keyword number is {number!r}, which is none")
    if not _is_tensor(kind):
        raise TypeError(f"it is given {say_type(kind)}, and takes tensors")
    return tuple(kind[1]), kind[3], kind[4]


def _contiguous(shape: tuple[int, ...], dtype: Any, device: Any) -> ValueType:
    return ("tensor", shape, contiguous_strides(shape), dtype, device)


def of_microbatch(program: Program, node: fx.Node) -> ValueType:
    """Its operand's type, with the microbatch's examples. ``sizes`` must add up to the operand's dim 0."""
    kind, sizes, index = noted_type(node.args[0]), node.kwargs["sizes"], node.kwargs["index"]
    is_list = isinstance(sizes, list | tuple) and all(isinstance(size, int) and size > 0 for size in sizes)
    if not is_list or not isinstance(index, int) or not 0 <= index < len(sizes):  # type: ignore[arg-type]
        raise TypeError(f"it takes microbatch {index} of {sizes}, which there is not")
    shape = kind[1] if _is_tensor(kind) else ()
    if not shape or shape[0] != sum(sizes):  # type: ignore[arg-type]
        raise TypeError(f"it splits {say_type(kind)} into {sizes}, which are not its examples")
    return ("tensor", (sizes[index], *shape[1:]), *kind[2:])  # type: ignore[index]


def of_part(program: Program, node: fx.Node) -> ValueType:
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


def _pack(program: Program, node: fx.Node) -> tuple[Bucket, Pack]:
    bucket, number = _bucket(program, node), pack_of(node)
    pack = next((pack for pack in bucket.launch_units if pack.number == number), None)
    if pack is None or bool(bucket.packs) != (node.kwargs.get("pack") is not None):
        raise TypeError(f"it is about pack {node.kwargs.get('pack')} of bucket {bucket.index}, which there is not")
    return bucket, pack


def of_bucket(program: Program, node: fx.Node) -> ValueType:
    """A flat tensor of the bucket's length."""
    bucket = _bucket(program, node)
    return _flat(node, bucket.num_elements, bucket.dtype)


def of_pack(program: Program, node: fx.Node) -> ValueType:
    """A flat tensor of the pack's length."""
    bucket, pack = _pack(program, node)
    return _flat(node, pack.num_elements, bucket.dtype)


def of_unpacked(program: Program, node: fx.Node) -> ValueType:
    """A flat tensor of the bucket's length. The operands must be its packs, of one dtype."""
    bucket, operands = _bucket(program, node), [noted_type(source) for source in node.args]
    tensors = [kind for kind in operands if _is_tensor(kind)]
    lengths, dtypes = [kind[1] for kind in tensors], {kind[3] for kind in tensors}
    if lengths != [(pack.num_elements,) for pack in bucket.launch_units] or len(dtypes) != 1 or tensors != operands:
        texts = ", ".join(map(say_type, operands)) or "nothing"
        raise TypeError(f"it is given {texts}, which are not the packs of bucket {bucket.index}")
    return _flat(node, bucket.num_elements, dtypes.pop())


def pending_operand(program: Program, node: fx.Node) -> ValueType:
    """The common type of its operands, pending."""
    kinds = [noted_type(source) for source in node.all_input_nodes]
    if not kinds:
        raise TypeError("it is given no bucket")
    if not all(is_same_type(kinds[0], other) for other in kinds):
        texts = " and ".join(sorted(set(map(say_type, kinds))))
        raise TypeError(f"it joins {texts}, which are not of one type")
    return ("pending", kinds[0])


def pending_sent(program: Program, node: fx.Node) -> ValueType:
    """The type of the sent value, pending."""
    sent = send_to(program, node)
    if sent is None or not sent.args:
        raise TypeError(f"nothing is sent to it: it needs a send of {route_of(program, node)} to receive")
    return ("pending", noted_type(sent.args[0]))


def of_buckets(program: Program, node: fx.Node) -> ValueType:
    """A tuple of flat tensors, as long as the operation's buckets."""
    buckets: Any = node.kwargs["buckets"]
    return ("tuple", tuple(_flat(node, program.buckets[i].num_elements, program.buckets[i].dtype) for i in buckets))


def awaited(program: Program, node: fx.Node) -> ValueType:
    """The type of the pending value; of this replica's share if the launch scatters."""
    launch = node.args[0] if node.args else None
    pending = noted_type(launch)
    if not isinstance(launch, fx.Node) or not isinstance(pending, tuple) or pending[0] != "pending":
        raise TypeError("it waits for something that is not pending")
    elements = awaited_elements(program, launch, replica_at(program, node))
    return pending[1] if elements is None else _flat(node, elements[1] - elements[0], pending[1][3])


def awaited_elements(program: Program, launch: Any, replica: int) -> tuple[int, int] | None:
    """The elements that a wait returns; None for the whole bucket."""
    launched = operation_of(launch.target) if isinstance(launch, fx.Node) else None
    if launched is not None and Effect.EXCHANGES in launched.effects:
        bucket = _bucket(program, launch)
        makes_part = bucket.is_sent_as_factors and bucket.part is not None
        if makes_part or Effect.SCATTERS in launched.effects:
            return bucket.updated(replica, program.num_replicas)
    return _bucket(program, launch).share(replica, program.num_replicas) if gives_shares(program, launch) else None


def gives_shares(program: Program, launch: Any) -> bool:
    launched = operation_of(launch.target) if isinstance(launch, fx.Node) else None
    if launched is None or Effect.EXCHANGES not in launched.effects:
        return launched is not None and Effect.SCATTERS in launched.effects
    return program.num_replicas > 1 and _bucket(program, launch).reduces_by_shares


def of_exchange(program: Program, node: fx.Node) -> ValueType:
    """The bucket or pack, pending. Each operand must be its replica's share, or the whole sum on a worker's only
    device.
    """
    (bucket, pack), sources = _pack(program, node), node.all_input_nodes
    if not sources:
        raise TypeError("it is given no sum")
    whole = (pack.start, pack.stop)
    dtypes = set()
    are_shares = gives_shares(program, node)
    for source in sources:
        kind = noted_type(source)
        start, stop = bucket.share(replica_at(program, source), program.num_replicas) if are_shares else whole
        if not _is_tensor(kind) or kind[1] != (stop - start,):
            raise TypeError(
                f"it is given {say_type(kind)}, which is not what {source.name} is to hold of bucket {bucket.index}"
            )
        dtypes.add(kind[3])
    if len(dtypes) > 1:
        raise TypeError(f"it adds up {' and '.join(sorted(map(str, dtypes)))}")
    return ("pending", _flat(node, pack.num_elements, dtypes.pop()))


def of_largest(program: Program, node: fx.Node) -> ValueType:
    """As of `exchange`. ``count`` must not exceed the elements of the bucket or pack."""
    (bucket, pack), count, gives = _pack(program, node), node.kwargs.get("count"), of_exchange(program, node)
    if not isinstance(count, int) or not 0 < count <= pack.num_elements:
        raise TypeError(f"its keyword count is {count!r}, but it sends 1 to {pack.num_elements} elements")
    if not bucket.dtype.is_floating_point:
        raise TypeError(f"it sends the largest elements of {bucket.dtype}, which are no real numbers")
    return gives


def of_payload(program: Program, node: fx.Node) -> ValueType:
    """As of `exchange`. ``num_bytes`` must be less than the size of the bucket or pack."""
    (bucket, pack), gives = _pack(program, node), of_exchange(program, node)
    text, num_bytes = node.kwargs.get("payload"), node.kwargs.get("num_bytes")
    if not isinstance(text, str) or not text:
        raise TypeError(f"its keyword payload is {text!r}, no text of a payload")
    whole = pack.num_elements * bucket.dtype.itemsize
    if not isinstance(num_bytes, int) or not 0 < num_bytes < whole:
        raise TypeError(f"its keyword num_bytes is {num_bytes!r}, but it sends fewer than {whole} bytes")
    return gives


def of_compressed(program: Program, node: fx.Node) -> ValueType:
    """Like its operand, in ``dtype``: a narrower floating-point dtype."""
    kind, dtype = _first_operand(node), node.kwargs.get("dtype")
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise TypeError(f"its keyword dtype is {dtype!r}, no dtype of real numbers")
    if not _is_tensor(kind, 1) or not kind[3].is_floating_point:
        raise TypeError(f"it is given {say_type(kind)}, but compresses a flat tensor of real numbers")
    if kind[3].itemsize <= dtype.itemsize:
        raise TypeError(f"it is given {say_type(kind)}, which {dtype} does not make smaller")
    return _flat(node, kind[1][0], dtype)


def of_decompressed(program: Program, node: fx.Node) -> ValueType:
    """Like its operand, in the bucket's dtype, which must be wider."""
    (bucket, _), kind = _pack(program, node), _first_operand(node)
    if not _is_tensor(kind, 1):
        raise TypeError(f"it is given {say_type(kind)}, but takes a flat tensor")
    if kind[3].itemsize >= bucket.dtype.itemsize:
        raise TypeError(
            f"it is given {say_type(kind)}, which is not narrower than bucket {bucket.index}, {bucket.dtype}"
        )
    return _flat(node, kind[1][0], bucket.dtype)


def of_gathered(program: Program, node: fx.Node) -> ValueType:
    """The whole bucket, pending. Each operand must have the bucket's type."""
    pending, wanted = pending_operand(program, node), of_bucket(program, node)
    if not is_same_type(pending, ("pending", wanted)):
        raise TypeError(f"it is given {say_type(pending[1])}, but gathers the factors of {say_type(wanted)}")
    return ("pending", wanted)


def of_spread(program: Program, node: fx.Node) -> ValueType:
    """The whole bucket, pending."""
    return ("pending", of_bucket(program, node))


def of_update(program: Program, node: fx.Node) -> None:
    """No value. The first operand must be as long as the updated part of the bucket; the second must be a number."""
    factors = [noted_type(source) for source in node.args[1:]]
    if len(factors) > 1 or not all(_is_number(kind) for kind in factors):
        raise TypeError(
            f"it is given {', '.join(map(say_type, factors))} after the gradient, but takes one number at most"
        )
    bucket = _bucket(program, node)
    gradient = _first_operand(node)
    num_elements = bucket.num_elements
    if bucket.placement.value.updates_by_shares or bucket.part is not None:
        start, stop = bucket.updated(replica_at(program, node), program.num_replicas)
        num_elements = stop - start
    wanted = _flat(node, num_elements, bucket.dtype)
    if not is_same_type(gradient, wanted):
        raise TypeError(f"bucket {bucket.index} is updated from {say_type(gradient)}, but needs {say_type(wanted)}")


def of_rows(program: Program, node: fx.Node) -> ValueType:
    """The type of the bucket, although the value has only rows of it. Both operands must have this type."""
    wanted = of_bucket(program, node)
    for source in node.args:
        if not is_same_type(noted_type(source), wanted):
            raise TypeError(f"it is given {say_type(noted_type(source))}, but takes {say_type(wanted)}")
    return wanted


def of_stored_rows(program: Program, node: fx.Node) -> None:
    """No value. Both operands must have the bucket's type."""
    of_rows(program, node)


def of_packed(program: Program, node: fx.Node) -> ValueType:
    """The type of its operand, which must be the type of the bucket or pack."""
    kind, wanted = _first_operand(node), of_pack(program, node)
    if not is_same_type(kind, wanted):
        raise TypeError(f"it is given {say_type(kind)}, but takes the whole bucket, {say_type(wanted)}")
    return wanted


def of_finiteness(program: Program, node: fx.Node) -> ValueType:
    """One boolean. The operand must be floating-point or complex."""
    (kind,) = (noted_type(source) for source in node.args)
    if not _is_tensor(kind) or not _is_inexact(kind[3]):
        raise TypeError(f"it is given {say_type(kind)}, which is always finite or no tensor")
    return ("tensor", (), (), torch.bool, kind[4])


def of_commit(program: Program, node: fx.Node) -> ValueType:
    """A row for each numeric operand, with the values of all replicas. Boolean operands come first."""
    kinds = [noted_type(source) for source in node.args]
    truths = [kind for kind in kinds if _is_tensor(kind, 0) and kind[3] == torch.bool]
    numbers = kinds[len(truths) :]
    wrong = [kind for kind in numbers if not _is_number(kind)]
    if wrong:
        raise TypeError(
            f"it is given {say_type(wrong[0])}, but decides by truth values, and exchanges numbers after them"
        )
    otherwise = node.kwargs.get("otherwise")
    if otherwise not in (OTHERWISE if truths else (None, *OTHERWISE)):
        raise TypeError(f"its keyword otherwise is {otherwise!r}, with {len(truths)} truth values")
    early = node.kwargs.get("early", False)
    if not isinstance(early, bool):
        raise TypeError(f"its keyword early is {early!r}, neither True nor False")
    if not numbers:
        return None
    dtype = functools.reduce(torch.promote_types, [kind[3] for kind in numbers])
    num_columns = program.workers.num_all_replicas if program.has_sharded_optimizer else program.num_replicas
    return ("tensor", (len(numbers), num_columns), (num_columns, 1), dtype, numbers[0][4])


def _is_number(kind: ValueType) -> bool:
    return _is_tensor(kind, 0) and kind[3].is_floating_point


def of_norm(program: Program, node: fx.Node) -> ValueType:
    """A float32 number; float64 if an operand is float64 or complex128."""
    kinds = [noted_type(source) for source in node.args]
    wrong = [kind for kind in kinds if not _is_tensor(kind) or not _is_inexact(kind[3])]
    if wrong or not kinds:
        raise TypeError(f"it is given {say_type(wrong[0]) if wrong else 'nothing'}, which has no norm")
    if not node.kwargs["norm_type"] > 0:  # type: ignore[operator]
        raise TypeError(f"its keyword norm_type is {node.kwargs['norm_type']!r}, but needs to be positive")
    dtype = torch.float64 if any(kind[3] in (torch.float64, torch.complex128) for kind in kinds) else torch.float32
    return ("tensor", (), (), dtype, kinds[0][4])


def of_loss_scale(program: Program, node: fx.Node) -> ValueType:
    """A float32 number."""
    return ("tensor", (), (), torch.float32, any_value(node.graph).device)


def number(program: Program, node: fx.Node) -> ValueType:
    """The type of its operand, which must be a number."""
    (kind,) = (noted_type(source) for source in node.args)
    if not _is_number(kind):
        raise TypeError(f"it is given {say_type(kind)}, but takes a number")
    return kind


def of_report(program: Program, node: fx.Node) -> None:
    """No value. The operand must be a number."""
    number(program, node)


def of_gather(program: Program, node: fx.Node) -> None:
    """No value. The operand's type must allow ``how``."""
    kind, how = noted_type(node.args[0]), node.kwargs["how"]
    if not _is_tensor(kind):
        raise TypeError(f"it is given {say_type(kind)}, but hands over tensors")
    _, shape, _, dtype, *_ = kind
    if how not in WAYS_TO_GATHER:
        raise TypeError(f"its keyword how is {how!r}, not one of {', '.join(WAYS_TO_GATHER)}")
    if how == "concatenated" and not shape:
        raise TypeError("it is given a scalar, which cannot be concatenated along dim 0")
    if how == "averaged" and (shape or not _is_inexact(dtype)):
        raise TypeError(f"it is given {say_type(kind)}, of which there is no mean over examples")


def nothing(program: Program, node: fx.Node) -> None:
    """No value."""


def of_product(program: Program, node: fx.Node) -> ValueType:
    """The type of the slot. Each pair's product must have this type."""
    slot = of_slot(program, node)
    for factors in _pairs(node, "multiplies", slot):
        shapes = [kind[1] for kind in factors if _is_tensor(kind) and kind[3] == slot[3]]
        if len(shapes) != 2 or [len(shape) for shape in shapes] != [2, 2] or shapes[0][1] != shapes[1][0]:
            texts = " and ".join(say_type(kind) for kind in factors)
            raise TypeError(f"it multiplies {texts}: it needs two matrices of {say_type(slot)} that fit each other")
        if (shapes[0][0], shapes[1][1]) != slot[1]:
            raise TypeError(f"its product is {[shapes[0][0], shapes[1][1]]}, but the slot is {say_type(slot)}")
    return slot


def of_index_add(program: Program, node: fx.Node) -> ValueType:
    """The type of the slot. Each pair must have rows of its width, and an index for each row."""
    slot = of_slot(program, node)
    for factors in _pairs(node, "adds", slot):
        tensors = [kind for kind in factors if _is_tensor(kind)]
        fits = len(tensors) == 2 and tensors[1][3] in (torch.int32, torch.int64) and tensors[0][3] == slot[3]
        if not fits or tensors[0][1] != (*tensors[1][1], *slot[1][1:]) or len(slot[1]) != 2:
            texts = " at ".join(say_type(kind) for kind in factors)
            raise TypeError(
                f"it adds {texts}: it needs rows of {say_type(slot)}, and as many integers that name their places"
            )
    return slot


def _pairs(node: fx.Node, verb: str, slot: ValueType) -> Iterator[tuple[ValueType, ValueType]]:
    kinds = [noted_type(factor) for factor in node.args]
    if not kinds or len(kinds) % 2:
        texts = ", ".join(say_type(kind) for kind in kinds) or "nothing"
        raise TypeError(f"it {verb} {texts}: it needs a pair of factors of {say_type(slot)} for each microbatch")
    return zip(kinds[::2], kinds[1::2], strict=True)
