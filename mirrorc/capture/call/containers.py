"""Flattens containers, packed sequences among them, and rebuilds them without running their constructors."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, NoReturn

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.modules import rnn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from mirrorc.custom_ops.recurrent import checked_lengths
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import traced_file
from mirrorc.user.restore import slots_of


class PaddedSequences:
    """A padded tensor in place of a PackedSequence, for traces. Recurrent modules use it like a tensor.

    Args:
        values: [batch, time, ...], zeros after the end of each sequence. The time may exceed the longest length.
        lengths: [batch], int64.
        is_sorted: the lengths are in descending order.
    """

    def __init__(self, values: torch.Tensor, lengths: torch.Tensor, is_sorted: bool) -> None:
        self.values, self.lengths, self.is_sorted = values, lengths, is_sorted

    @property  # type: ignore[misc]  # it cannot be written
    def __class__(self) -> type:
        """PackedSequence where user code is traced; PaddedSequences in torch's own recurrent modules."""
        return PaddedSequences if traced_file() in ("", rnn.__file__) else PackedSequence

    @property
    def dtype(self) -> torch.dtype:
        return self.values.dtype

    @property
    def device(self) -> torch.device:
        return self.values.device

    def dim(self) -> int:
        return self.values.dim()

    def size(self, dim: int) -> int:
        return self.values.size(0) if dim in (0, 1) else self.values.size(dim)

    def to(self, *args: Any, **kwargs: Any) -> PaddedSequences:
        return self.of(self.values.to(*args, **kwargs))

    def of(self, values: torch.Tensor) -> PaddedSequences:
        return PaddedSequences(values, self.lengths, self.is_sorted)

    @property
    def data(self) -> torch.Tensor:
        _refuse_parts()

    batch_sizes = sorted_indices = unsorted_indices = data

    def __iter__(self) -> NoReturn:
        _refuse_parts()


def _refuse_parts() -> NoReturn:
    raise RuntimeError("a part of a packed sequence is read")  # see mirrorc.capture.diagnostics.known_failures


def padded_parts(sequences: PackedSequence | PaddedSequences) -> tuple[torch.Tensor, torch.Tensor, bool]:
    """Returns values [batch, time, ...], lengths [batch], and True if the lengths are in descending order.

    The time is rounded up by at most a quarter, so that batches share shapes.
    """
    if isinstance(sequences, PaddedSequences):
        return sequences.values, sequences.lengths, sequences.is_sorted
    step = 1 << max(0, len(sequences.batch_sizes).bit_length() - 3)
    time = -(-len(sequences.batch_sizes) // step) * step
    values, lengths = pad_packed_sequence(sequences, batch_first=True, total_length=time)
    return values, lengths, sequences.sorted_indices is None


def packed_or_padded(values: torch.Tensor, lengths: torch.Tensor, is_sorted: bool) -> PackedSequence | PaddedSequences:
    if torch.compiler.is_dynamo_compiling():
        return PaddedSequences(values, lengths, is_sorted)
    return pack_padded_sequence(values, lengths.cpu(), batch_first=True, enforce_sorted=is_sorted)


def _pack(input: torch.Tensor, lengths: Any, batch_first: bool = False, enforce_sorted: bool = True) -> PaddedSequences:
    if not isinstance(lengths, torch.Tensor):
        lengths = torch.as_tensor(lengths, dtype=torch.int64)
    values = input if batch_first else input.transpose(0, 1)
    if lengths.dim() != 1 or lengths.size(0) != values.size(0):
        raise RuntimeError("pack_padded_sequence is given lengths of another batch")
    known = checked_lengths(lengths, values.size(1), enforce_sorted)
    return PaddedSequences(_filled(values, known, 0.0), known, enforce_sorted)


def _pad(
    sequence: PaddedSequences, batch_first: bool = False, padding_value: float = 0.0, total_length: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values, lengths = sequence.values, sequence.lengths
    if total_length is None:
        raise RuntimeError("pad_packed_sequence is given no total_length")
    if total_length < values.size(1):
        lengths = checked_lengths(lengths, total_length, False)
        values = _filled(values[:, :total_length], lengths, padding_value)
    else:
        values = F.pad(values, [0, 0] * (values.dim() - 2) + [0, total_length - values.size(1)])
        if padding_value != 0.0:
            values = _filled(values, lengths, padding_value)
    return values if batch_first else values.transpose(0, 1), lengths


def _filled(values: torch.Tensor, lengths: torch.Tensor, value: float) -> torch.Tensor:
    time = torch.arange(values.size(1), device=values.device)
    beyond = time >= lengths.to(values.device).unsqueeze(1)
    return values.masked_fill(beyond.reshape(beyond.shape + (1,) * (values.dim() - 2)), value)


PACKING: Mapping[Callable[..., Any], Callable[..., Any]] = {pack_padded_sequence: _pack, pad_packed_sequence: _pad}
"""Substitutes in a trace for torch's functions that pack sequences."""


class Parts(NamedTuple):
    """A flattened container. ``detail`` is hashable; ``children`` are pairs of path and value, attributes last."""

    kind: str
    detail: tuple[Any, ...]
    children: list[tuple[str, Any]]
    num_attributes: int = 0


def flatten_container(value: Any, path: str) -> Parts | None:
    """The parts of a container; None for other values."""
    if isinstance(value, PackedSequence | PaddedSequences):
        values, lengths, is_sorted = padded_parts(value)
        return Parts("packed sequence", (is_sorted, ()), [(f"{path}.data", values), (f"{path}.lengths", lengths)])
    kind = _kind_of(type(value))  # type: ignore[arg-type]
    if kind == "":
        return None
    if kind == "refused":
        raise problem(
            TypeError,
            f"MC1309: argument {path!r} is a {type(value).__qualname__}, which cannot be made anew for each replica",
            "its class is based on one written in C, or is a kind of OrderedDict with a __new__ of its own",
            (f"dict({path}), list({path}) or tuple({path})", "pass its parts as arguments of their own"),
        )
    attributes = _attributes_of(value) if kind in _WITH_ATTRIBUTES else {}
    entries, detail = _entries_of(kind, value, path)
    members = [(f"{path}.{name}", child) for name, child in attributes.items()]
    return Parts(kind, (*detail, tuple(attributes)), entries + members, len(members))


def flatten_object(value: Any, path: str) -> Parts:
    cls = type(value)
    if _if_made(object, cls) != "object":
        raise TypeError(f"{path!r} is a {cls.__qualname__}, whose class is based on one written in C")
    attributes = _attributes_of(value)
    members = [(f"{path}.{name}", child) for name, child in attributes.items()]
    return Parts("object", (cls, tuple(attributes)), members, len(members))


def paths_of_children(kind: str, detail: tuple[Any, ...], num_children: int, path: str) -> list[str]:
    attributes = [f"{path}.{name}" for name in detail[-1]]
    named = getattr(detail[0], "_fields", ())
    num_entries = num_children - len(attributes)
    if kind in ("dict", "mappingproxy", "defaultdict", "kind of dict", "kind of OrderedDict"):
        entries = [f"{path}.{key}" for key in detail[0]]
    else:
        entries = [f"{path}.{named[i]}" if i < len(named) else f"{path}[{i}]" for i in range(num_entries)]
    return entries + attributes


def unflatten_container(kind: str, detail: tuple[Any, ...], children: list[Any]) -> Any:
    """Runs under the tracer."""
    names = detail[-1]
    entries = children[: len(children) - len(names)]
    if kind == "list":
        return entries
    if kind == "tuple":
        return tuple(entries)
    if kind == "dict":
        return dict(zip(detail[0], entries, strict=True))
    if kind == "mappingproxy":
        return types.MappingProxyType(dict(zip(detail[0], entries, strict=True)))
    if kind == "defaultdict":
        return defaultdict(detail[1][0], dict(zip(detail[0], entries, strict=True)))
    if kind == "deque":
        return deque(entries, detail[0])
    if kind == "result of torch":
        return detail[0](tuple(entries))
    if kind == "packed sequence":
        values, lengths = entries
        return packed_or_padded(values, lengths, detail[0])
    made = _of_class(kind, detail, entries)
    for name, value in zip(names, children[len(entries) :], strict=True):
        object.__setattr__(made, name, value)
    return made


def _of_class(kind: str, detail: tuple[Any, ...], entries: list[Any]) -> Any:
    if kind == "kind of tuple":
        return tuple.__new__(detail[0], entries)
    if kind == "kind of list":
        made: Any = list.__new__(detail[0])
        super(detail[1], made).extend(entries)  # of `list` itself, as the class may override it
    elif kind == "kind of dict":
        made = dict.__new__(detail[1])
        dict.update(made, dict(zip(detail[0], entries, strict=True)))
    elif kind == "kind of OrderedDict":
        made = detail[1].__new__(detail[1])  # `OrderedDict`'s: since 2.14, Dynamo forgets the class if that is called
        for key, entry in zip(detail[0], entries, strict=True):
            OrderedDict.__setitem__(made, key, entry)
    else:
        made = object.__new__(detail[0])
    return made


_WITH_ATTRIBUTES = ("kind of tuple", "kind of list", "kind of dict", "kind of OrderedDict", "object")


@functools.lru_cache(maxsize=256)
def _kind_of(cls: type) -> str:
    plain = {dict: "dict", list: "list", tuple: "tuple", types.MappingProxyType: "mappingproxy", deque: "deque"}
    if cls in plain or cls is defaultdict:
        return plain.get(cls, "defaultdict")
    if issubclass(cls, torch.Size | torch.Tensor | nn.Module):
        return ""
    if issubclass(cls, tuple):
        return "result of torch" if hasattr(cls, "n_sequence_fields") else _if_made(tuple, cls)
    if issubclass(cls, dict | list):
        return _if_made(next(base for base in (OrderedDict, dict, list) if issubclass(cls, base)), cls)
    if issubclass(cls, Mapping) or dataclasses.is_dataclass(cls):
        return _if_made(object, cls)
    return ""


def _if_made(base: Any, cls: type) -> str:
    try:
        base.__new__(cls)
    except TypeError:
        return "refused"
    if issubclass(cls, defaultdict):  # its default_factory is neither an item nor an attribute
        return "refused"
    if base is OrderedDict and cls.__new__ is not OrderedDict.__new__:
        return "refused"
    return "object" if base is object else f"kind of {base.__name__}"


def _entries_of(kind: str, value: Any, path: str) -> tuple[list[tuple[str, Any]], tuple[Any, ...]]:
    cls = type(value)
    if kind == "object":
        return [], (cls,)
    if kind in ("list", "tuple", "deque", "result of torch") or kind in ("kind of list", "kind of tuple"):
        base = next(base for base in (list, tuple, deque) if isinstance(value, base))
        named = getattr(cls, "_fields", ())
        items = list(base.__iter__(value))
        paths = [f"{path}.{named[i]}" if i < len(named) else f"{path}[{i}]" for i in range(len(items))]
        before = (cls.__mro__[cls.__mro__.index(list) - 1],) if kind == "kind of list" else ()
        detail = {"list": (), "tuple": (), "deque": (getattr(value, "maxlen", None),)}.get(kind, (cls, *before))
        return list(zip(paths, items, strict=True)), detail
    if kind == "mappingproxy":
        entries = list(value.items())
    else:
        entries = list(OrderedDict.items(value) if isinstance(value, OrderedDict) else dict.items(value))
    keys = tuple(key for key, _ in entries)
    factory = ((value.default_factory,),) if kind == "defaultdict" else ()
    if not has_hash(factory):
        raise problem(
            TypeError,
            f"MC1309: argument {path!r} is a defaultdict whose default_factory has no hash",
            fix=f"dict({path})",
        )
    classes = (cls,) if kind.startswith("kind of") else ()
    kinds = tuple(map(type, keys))  # 1, 1.0 and True are equal
    return [(f"{path}.{key}", entry) for key, entry in entries], (keys, *factory, *classes, kinds)


def has_hash(value: Any) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _attributes_of(value: Any) -> dict[str, Any]:
    names = [slot.__name__ for slot in slots_of(type(value))]
    return {**{name: getattr(value, name) for name in names if hasattr(value, name)}, **getattr(value, "__dict__", {})}
