"""Variables of modules outside of model and loss, such as a teacher in a global variable."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Container, Mapping, Sequence, Set

import torch
from torch import fx, nn

from mirrorc.capture.diagnostics.capture_errors import written_parameter
from mirrorc.errors import CaptureError
from mirrorc.ir.variables import OUTSIDE
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import JointGraph, ReadVariable, guards_of, outside_variables, read_from_module

_PLACE = "mirrorc_outside"  # the attribute of a traced module that holds outside tensors


def take_outside_variables(
    traced: fx.GraphModule, module: nn.Module, leaves: Sequence[torch.Tensor]
) -> dict[str, ReadVariable]:
    """Turns tensors of outside modules into buffers of a traced graph. Returns the variables by buffer name."""
    home = leaves[0].device if leaves else None
    variables = [
        variable
        for variable in outside_variables(traced, module, leaves, guards_of(traced).names)
        if _is_plain(variable.tensor) and home in (None, variable.tensor.device)
    ]
    paths = read_from_module(traced, _PLACE, [variable.tensor for variable in variables])
    return dict(zip(paths, variables, strict=True))


def _is_plain(tensor: torch.Tensor) -> bool:
    is_ordinary = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout is torch.strided
    is_odd = tensor.is_meta or tensor.is_quantized or tensor.is_inference()
    return is_ordinary and tensor.grad_fn is None and not is_odd


def check_outside_writes(joint: JointGraph, names: Mapping[str, str], model_name: str) -> None:
    for path in joint.buffer_writes:
        variable = joint.outside.get(path)
        if variable is None:
            continue
        if isinstance(variable.tensor, nn.Parameter):
            raise written_parameter(model_name, names[path])
        if not variable.tensor.is_contiguous():
            raise problem(
                CaptureError,
                f"MC2304: forward or loss of {model_name} writes the buffer {names[path]!r}, which is not contiguous",
                fix="self.register_buffer(name, value.contiguous()), in place of it",
            )


def numbered(name: str, taken: Container[str]) -> str:
    names = (name if number == 1 else f"{name}_{number}" for number in itertools.count(1))
    return next(name for name in names if name not in taken)


class OutsideNames:
    """Names variables of outside modules in the user's words. A variable has one name in all programs of a step."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[torch.Tensor], str]] = {}  # by the id of the tensor
        self._counters: dict[int, weakref.ref[torch.Tensor]] = {}  # by the id of the statistic, which has a name

    def names_of(self, outside: Mapping[str, ReadVariable], taken: Set[str]) -> dict[str, str]:
        self._known = {key: known for key, known in self._known.items() if known[0]() is not None}
        self._counters = {key: counter for key, counter in self._counters.items() if key in self._known}
        names = {path: self._name_of(variable.tensor, variable.words, taken) for path, variable in outside.items()}
        for variable in outside.values():
            self._counters.pop(id(variable.tensor), None)
            if variable.counter is not None:
                self._name_of(variable.counter, variable.counter_words, taken)
                self._counters[id(variable.tensor)] = weakref.ref(variable.counter)
        return names

    def counters_of(self, outside: Mapping[str, torch.Tensor]) -> dict[str, tuple[str, torch.Tensor]]:
        """For each running statistic in ``outside``, the name and tensor of its layer's counter of forwards."""
        counters = {name: self._counters.get(id(tensor), lambda: None)() for name, tensor in outside.items()}
        return {name: (self._known[id(each)][1], each) for name, each in counters.items() if each is not None}

    def _name_of(self, tensor: torch.Tensor, called: str, taken: Set[str]) -> str:
        known = self._known.get(id(tensor))
        if known is None or known[0]() is not tensor:
            used = {name for _, name in self._known.values()} | taken
            words = re.sub(r"\W*\W", ".", called).strip(".") or "variable"
            known = self._known[id(tensor)] = weakref.ref(tensor), numbered(f"{OUTSIDE}{words}", used)
        return known[1]
