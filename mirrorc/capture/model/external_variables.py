"""Makes variables of the parameters and buffers of modules that forward or the loss reach, and that neither model nor loss holds.

A discriminator in the closure of a generator's loss is one, a teacher in a global, a module in a plain list of the model.
"""

from __future__ import annotations

import re
import weakref
from collections.abc import Mapping, Sequence, Set

import torch
from torch import fx, nn

from mirrorc.errors import CaptureError
from mirrorc.ir.variables import OUTSIDE
from mirrorc.torch_internals import JointGraph, ReadVariable, guards_of, outside_variables, read_from_module

_PLACE = "mirrorc_outside"  # where a traced module has them


def take_outside_variables(
    traced: fx.GraphModule, module: nn.Module, leaves: Sequence[torch.Tensor]
) -> dict[str, ReadVariable]:
    """Has a traced graph take what it reads of such modules from itself, as it takes its own buffers.

    Nothing in it gets a gradient, as no parameter does that the optimizer does not hold.

    Args:
        traced: what the tracer gave.
        module: what was traced: model and loss.
        leaves: the example arguments.

    Returns:
        What it takes, by the names of the buffers.
    """
    home = leaves[0].device if leaves else None
    found = [
        one
        for one in outside_variables(traced, module, leaves, guards_of(traced).names)
        if _is_plain(one.tensor) and home in (None, one.tensor.device)
    ]
    paths = read_from_module(traced, _PLACE, [one.tensor for one in found])
    return dict(zip(paths, found, strict=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is one of numbers in memory, and no result."""
    is_ordinary = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    return (
        is_ordinary and tensor.grad_fn is None and not (tensor.is_meta or tensor.is_quantized or tensor.is_inference())
    )


def check_outside_writes(joint: JointGraph, names: Mapping[str, str], what: str) -> None:
    """Refuses writes that a step cannot make.

    Args:
        joint: the graph.
        names: the variables of what it takes from outside, by the names of the buffers.
        what: the name of the model.

    Raises:
        CaptureError: forward writes a parameter, or a buffer that does not lie in order.
    """
    for path in joint.buffer_writes:
        one = joint.outside.get(path)
        if one is None:
            continue
        if isinstance(one.tensor, nn.Parameter):
            raise CaptureError(
                f"forward or loss of {what} writes the parameter {names[path]!r} in place: parameters change in the optimizer "
                "only; make it a buffer, or write it between steps"
            )
        if not one.tensor.is_contiguous():
            raise CaptureError(
                f"forward or loss of {what} writes the buffer {names[path]!r}, which is not contiguous: "
                "register its copy in order, with register_buffer(name, value.contiguous())"
            )


class OutsideNames:
    """Names what a step reads of modules outside of its model: in the user's words, and the same in all its programs."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # by the id of the tensor
        self._counters: dict[int, weakref.ref[torch.Tensor]] = {}  # by the id of the statistic, which has a name

    def names_of(self, outside: Mapping[str, ReadVariable], taken: Set[str]) -> dict[str, str]:
        """The names of the variables that a graph takes, by the names of the buffers.

        Args:
            outside: what it takes, see `take_outside_variables`.
            taken: the names of the model's variables.
        """
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
        self._counters = {key: counter for key, counter in self._counters.items() if key in self._known}
        names = {path: self._name_of(one.tensor, one.words, taken) for path, one in outside.items()}
        for one in outside.values():
            self._counters.pop(id(one.tensor), None)
            if one.counter is not None:
                self._name_of(one.counter, one.counter_words, taken)
                self._counters[id(one.tensor)] = weakref.ref(one.counter)
        return names

    def counters_of(self, outside: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
        """The buffers that count the forwards which write statistics, by the names of these: each with its name.

        Args:
            outside: variables that have names, by name.
        """
        counters = {name: self._counters.get(id(tensor), lambda: None)() for name, tensor in outside.items()}
        return {name: (self._known[id(own)][1], own) for name, own in counters.items() if own is not None}

    def _name_of(self, tensor: torch.Tensor, called: str, taken: Set[str]) -> str:
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            used = {name for _, name in self._known.values()} | taken
            words = re.sub(r"\W*\W", ".", called).strip(".") or "variable"
            name, number = f"{OUTSIDE}{words}", 1
            while name in used:
                number += 1
                name = f"{OUTSIDE}{words}_{number}"
            known = self._known[id(tensor)] = weakref.ref(tensor), name
        return known[1]
