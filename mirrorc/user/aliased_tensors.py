"""Refuses aliased tensors, or warns of them, because a step moves variables to its own memory."""

from __future__ import annotations

import gc
import warnings
from collections import Counter
from collections.abc import Collection, Mapping

import torch

from mirrorc.ir.variables import OUTSIDE
from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.messages.wording import counted
from mirrorc.torch_internals import is_dense, num_users


def refuse_shared_memory(tensors: Mapping[str, torch.Tensor], moving: Collection[str]) -> None:
    """Refuses two tensors with common elements if a step moves one of them, or copies one for each replica."""
    spans = sorted((*_span(tensor), name) for name, tensor in tensors.items() if _has_memory(tensor))
    reaching: list[tuple[str, int, int, str]] = []
    for span in spans:
        device, start, _, name = span
        reaching = [other for other in reaching if other[0] == device and other[2] > start]
        for *_, other in reaching:
            if (name in moving or other in moving) and _have_common_elements(tensors[name], tensors[other]):
                raise ValueError(_objection(tensors, *sorted((other, name), key=list(tensors).index)))
        reaching.append(span)


def refuse_memory_of_processes(tensors: Mapping[str, torch.Tensor], moving: Collection[str]) -> None:
    shared = [name for name in moving if tensors[name].device.type == "cpu" and tensors[name].is_shared()]
    if shared:
        raise problem(
            ValueError,
            f"MC1208: parameter {shared[0]!r} lies in memory that processes share, share_memory()",
            "a step moves parameters into buckets of its own, and other processes would keep their old values",
            "share a copy, shared = copy.deepcopy(model).share_memory(), and update it by shared.load_state_dict(...)",
        )


def warn_of_holders(moving: Mapping[str, torch.Tensor], tensors: Collection[torch.Tensor]) -> None:
    """Warns if anything other than ``tensors`` refers to the memory of ``moving`` tensors."""
    memory = {name: tensor.untyped_storage() for name, tensor in moving.items()}
    bases = (tensor if tensor._base is None else tensor._base for tensor in tensors)
    known = {id(tensor): tensor for tensor in (*tensors, *bases) if _has_memory(tensor)}  # a view refers to its base
    expected = Counter(tensor.untyped_storage().data_ptr() for tensor in known.values())

    def held_by_others() -> list[str]:
        return [
            name
            for name, storage in memory.items()
            if storage.nbytes() and num_users(storage) > expected[storage.data_ptr()]
        ]

    if held_by_others():
        gc.collect()  # unreachable objects do not count, such as a cycle around a saved state_dict
    if held := held_by_others():
        warnings.warn(
            message(
                f"MC3207: a state_dict() or view taken before the first step does not follow training "
                f"({counted(len(held), 'parameter')}, {'such as ' if len(held) > 1 else ''}{held[0]!r})",
                "the first step moves parameters into buckets; an earlier p.data or output keeps the old memory, too",
                (
                    "model.state_dict(), after the first step",
                    "copy it, copy.deepcopy(model.state_dict()), to keep the initial values",
                ),
            ),
            stacklevel=users_stack_level(),
        )


def _has_memory(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.numel() > 0 and not tensor.is_meta


def _span(tensor: torch.Tensor) -> tuple[str, int, int]:
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    start = tensor.data_ptr()
    return str(tensor.device), start, start + (last + 1) * tensor.element_size()


def _have_common_elements(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Overlapping spans are not enough: columns of one matrix have no common elements."""
    if (is_dense(a) and is_dense(b)) or a.element_size() != b.element_size():
        return True
    return bool(torch.isin(_addresses(a), _addresses(b)).any())


def _addresses(tensor: torch.Tensor) -> torch.Tensor:
    addresses = torch.tensor(tensor.data_ptr())
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        addresses = addresses.unsqueeze(-1) + torch.arange(size) * (stride * tensor.element_size())
    return addresses.flatten()


def _objection(tensors: Mapping[str, torch.Tensor], first: str, second: str) -> str:
    both = f"{_kind(tensors[first])} {first!r} and {_kind(tensors[second])} {second!r}"
    if all(isinstance(tensors[name], torch.nn.Parameter) and not name.startswith(OUTSIDE) for name in (first, second)):
        fix = (
            f"tie them: model.{second} = model.{first}, before the optimizer is made",
            f"give one memory of its own: model.{second}.data = model.{second}.detach().clone()",
        )
    else:
        fix = (
            f"use {first!r} in the place of {second!r}",
            f"{second.rpartition('.')[2]}.clone() for {second!r}, and write both",
        )
    why = "writing one changes the other, and a step gives each memory of its own"
    return message(f"MC1208: {both} share memory", why, fix)


def _kind(tensor: torch.Tensor) -> str:
    return "parameter" if isinstance(tensor, torch.nn.Parameter) else "tensor"
