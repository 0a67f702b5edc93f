"""Describes how the arguments of calls differ."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrorc.capture.call.call_arguments import Call, Constant, Structure
from mirrorc.capture.call.shards import ShardTypes
from mirrorc.printing.printed_values import dtype_name

FIRST_CALL = "the first call"
"""The reason to compile if no program is cached."""

_MOST_SHOWN = 3  # values of one argument
_MOST_CHARACTERS = 40  # of one value


TensorKind = tuple[torch.Size, tuple[int, ...], torch.dtype]


@dataclass(frozen=True)
class CallKind:
    """The values that a program is specialized on, by argument name."""

    tensors: dict[str, TensorKind]
    constants: dict[str, str]
    plain: dict[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, call: Call, types: ShardTypes) -> CallKind:
        constants = {constant.path: _shown(constant.value) for constant in _constants_of(call.structure)}
        plain = {name: _shown(value) for name, value in call.plain.items()}
        return cls(dict(zip((leaf.path for leaf in call.leaves), types, strict=True)), constants, plain)

    @classmethod
    def of_batch(cls, call: Call) -> CallKind:
        """The kind of a call before its split. A `PerReplica` is represented by its first tensor."""
        tensors = [leaf.per_replica[0] if leaf.tensor is None else leaf.tensor for leaf in call.leaves]
        return cls.of(call, tuple((tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors))

    @property
    def shapes(self) -> tuple[torch.Size, ...]:
        return tuple(shape for shape, _, _ in self.tensors.values())

    def without(self, unread: Set[str]) -> CallKind:
        plain = {name: text for name, text in self.plain.items() if name not in unread}
        return CallKind(self.tensors, {**self.constants, **plain})

    def __str__(self) -> str:
        tensors = [f"{name} {_dtype(dtype)}{list(shape)}" for name, (shape, _, dtype) in self.tensors.items()]
        constants = {**self.constants, **self.plain}
        return ", ".join([*tensors, *(f"{name}={value}" for name, value in constants.items())])


def _constants_of(structure: Structure) -> Iterator[Constant]:
    positional, keyword = structure
    for child in (*positional, *(child for _, child in keyword)):
        yield from _constants_in(child)


def _constants_in(structure: Structure) -> Iterator[Constant]:
    if structure[0] == "constant":
        yield structure[1]
    elif structure[0] not in ("leaf", "plain"):
        for child in structure[2]:
            yield from _constants_in(child)


def changing_arguments(kinds: Sequence[CallKind]) -> list[str]:
    """Texts such as ``the shape of 'x' ([4, 7], [4, 9])``, with a few of the values."""
    names = dict.fromkeys(name for kind in kinds for name in (*kind.tensors, *kind.constants))
    changes = [text for name in names if (text := _change_of(name, kinds))]
    more = [f"{len(changes) - _MOST_SHOWN} more arguments"] if len(changes) > _MOST_SHOWN else []
    return [*changes[:_MOST_SHOWN], *more]


def changes_since(old: CallKind, new: CallKind, read: Collection[str] = ()) -> list[str]:
    """Texts such as ``target i64[56], was i64[64]``. Plain values that the program has not ``read`` are left out."""
    texts = [
        f"{name} {now}, was {before}"
        for name in dict.fromkeys((*new.tensors, *old.tensors))
        for before, now in _unequal_types(old.tensors.get(name), new.tensors.get(name))
    ]
    before, now = (
        {**kind.constants, **{name: text for name, text in kind.plain.items() if name in read}} for kind in (old, new)
    )
    texts += [
        f"{name}={now.get(name, 'nothing')}, was {before.get(name, 'nothing')}"
        for name in dict.fromkeys((*now, *before))
        if now.get(name) != before.get(name)
    ]
    more = [f"{len(texts) - _MOST_SHOWN} more changes"] if len(texts) > _MOST_SHOWN else []
    return [*texts[:_MOST_SHOWN], *more]


def _unequal_types(old: TensorKind | None, new: TensorKind | None) -> Iterator[tuple[str, str]]:
    if old == new:
        return
    texts = [f"{dtype_name(kind[2])}{list(kind[0])}" if kind is not None else "no tensor" for kind in (old, new)]
    if texts[0] == texts[1] and old is not None and new is not None:
        texts = [f"{text} of strides {list(kind[1])}" for text, kind in zip(texts, (old, new), strict=True)]
    yield texts[0], texts[1]


def _change_of(name: str, kinds: Sequence[CallKind]) -> str:
    types = [kind.tensors[name] for kind in kinds if name in kind.tensors]
    values = [kind.constants[name] for kind in kinds if name in kind.constants]
    if len(types) + len(values) < len(kinds):
        return f"whether there is {name!r}"
    if types and values:
        return f"whether {name!r} is a tensor"
    parts = {
        "the shape of ": [str(list(shape)) for shape, _, _ in types],
        "the dtype of ": [_dtype(dtype) for _, _, dtype in types],
        "the strides of ": [str(list(strides)) for _, strides, _ in types],
        "": values,
    }
    for prefix, texts in parts.items():
        distinct = list(dict.fromkeys(texts))
        if len(distinct) > 1:
            shown = ", ".join([*distinct[:_MOST_SHOWN], *(["..."] if len(distinct) > _MOST_SHOWN else [])])
            return f"{prefix}{name!r} ({shown})"
    return ""


def _shown(value: Any) -> str:
    try:
        text = repr(value)
    except Exception as error:  # noqa: BLE001 - of the user's class, which a step can do without
        return f"<{type(value).__name__}, whose repr raises {type(error).__name__}>"
    return text if len(text) <= _MOST_CHARACTERS else f"{text[: _MOST_CHARACTERS - 3]}..."


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
