"""A model's variables by name, also those of modules outside of model and loss, and the Python state behind its graph."""

from __future__ import annotations

import itertools
import re
import weakref
from collections.abc import Callable, Container, Iterator, Mapping, Sequence, Set
from typing import Any

import numpy as np
import torch
from torch import fx, nn

from mirrorc.capture.diagnostics.capture_errors import written_parameter
from mirrorc.capture.model.transient_attributes import CARRIED
from mirrorc.errors import CaptureError
from mirrorc.ir.variables import OUTSIDE
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import (
    JointGraph,
    ReadVariable,
    global_hook_tables,
    guards_of,
    has_gradient_hooks,
    hook_tables,
    outside_variables,
    read_from_module,
)
from mirrorc.user.aliased_tensors import refuse_shared_memory

_ABSENT = object()
_TORCHS_OWN = frozenset(vars(nn.Module())) - {"training"}
_SCALARS = (bool, int, float, str, type(None))


class ModelState:
    """The variables of a model and its loss, and a fingerprint of the Python state behind their graph.

    Attributes:
        tensors: parameters and buffers by their first name in the model; ``loss_fn.`` precedes names in a loss module.
        names: the key in ``tensors`` for each name in `TracedLoss`; tied weights have several names.
    """

    def __init__(
        self, model: nn.Module, loss_fn: Callable[..., Any] | None, *, has_autograds_gradients: bool = False
    ) -> None:
        self.tensors: dict[str, torch.Tensor] = {}
        self.names: dict[str, str] = {}
        self.outside = OutsideNames()
        self._has_autograds_gradients = has_autograds_gradients  # with these, hooks of parameters are called
        self._roots = roots = {"model": model} | ({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})
        first: dict[int, str] = {}
        for path, tensor in _named_tensors(roots):
            if id(tensor) not in first:
                variable = first[id(tensor)] = free_name(path.removeprefix("model."), self.tensors)
                self.tensors[variable] = tensor
            self.names[path] = first[id(tensor)]
        self._scan_modules()
        self._members = [
            (f"{kind} {'.'.join(filter(None, (path, key)))!r}", members, key, member)
            for path, module in self.named_modules
            for kind, members in _members_of(module)
            for key, member in members.items()
        ]
        self._first_members = {(id(members), key) for _, members, key, _ in self._members}
        # numbers left to the guards: the id of the attribute dict, and the key
        self._freed: set[tuple[int, str]] = set()
        self._last_numbers: dict[tuple[int, str], int | float] = {}
        self._added: list[tuple[dict[str, Any], str]] = []
        self._added_now: tuple[_Same, ...] = ()

    def _scan_modules(self) -> None:
        self.named_modules = [named for root in self._roots.values() for named in root.named_modules()]
        self._modules = [module for _, module in self.named_modules]
        self._refuse_hidden()
        self._dicts = [vars(module) for module in self._modules]
        self._dicts += [members for module in self._modules for _, members in _members_of(module)]
        self._sizes = list(map(len, self._dicts))
        self._plain = [place for module in self._modules for place in _plain_attributes(module)]
        self._hooks = [hooks for module in self._modules for hooks in hook_tables(module)] + global_hook_tables()
        self._num_carried = CARRIED.num

    def _refuse_hidden(self) -> None:
        for path, module in self.named_modules:
            for kind, members in _members_of(module):
                for key in vars(module).keys() & members.keys():
                    if members[key] is not None and vars(module)[key] is not members[key]:
                        raise problem(
                            ValueError,
                            f"MC1206: an attribute hides the model's {kind} {'.'.join(filter(None, (path, key)))!r}",
                            f"forward reads the attribute, and training changes the {kind}",
                            (f"del vars(module)[{key!r}]", f"module.{key} = value, before it is compiled"),
                        )

    def _rescan_modules(self) -> None:
        self._scan_modules()
        tables = [members for module in self._modules for _, members in _members_of(module)]
        members_now = [(members, key) for members in tables for key in members]
        self._added = [(members, key) for members, key in members_now if (id(members), key) not in self._first_members]
        self._added_now = self._find_added()

    def names_now(self) -> tuple[dict[str, str], dict[str, str]]:
        """The current `names`, and descriptions of tensors added since compilation, by name."""
        names, first = dict(self.names), {id(tensor): name for name, tensor in self.tensors.items()}
        added: dict[str, str] = {}
        for path, tensor in _named_tensors(self._roots):
            if id(tensor) not in first:
                variable = first[id(tensor)] = free_name(path.removeprefix("model."), {*self.tensors, *added})
                kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
                added[variable] = f"{kind} {path.removeprefix('model.')!r}"
            names[path] = first[id(tensor)]
        return names, added

    @property
    def parameters(self) -> Mapping[str, nn.Parameter]:
        return {name: tensor for name, tensor in self.tensors.items() if isinstance(tensor, nn.Parameter)}

    def modes(self) -> str:
        """For each module, "t" in train mode, "e" in eval mode."""
        return "".join("t" if module.training else "e" for module in self._modules)

    def check_memory(self) -> None:
        refuse_shared_memory(self.tensors, {name for name, p in self.parameters.items() if p.requires_grad})

    def attribute_of(self, tensor: torch.Tensor, otherwise: str) -> str:
        paths = (f"{path}.{key}" for path, m in self.named_modules for key, value in vars(m).items() if value is tensor)
        return next(paths, otherwise).removeprefix(".")

    def plain_attributes(self) -> dict[str, tuple[type, Any]]:
        return {
            f"{path}.{key}".removeprefix("."): (type(value), _comparable(value))
            for path, module in self.named_modules
            for attributes, key in _plain_attributes(module)
            if key not in _TORCHS_OWN and (value := attributes.get(key, _ABSENT)) is not _ABSENT
        }

    def note_numbers(self) -> None:
        self._last_numbers = {
            place: attributes[key]
            for _, _, attributes, key in self._users_attributes()
            if type(attributes.get(key)) in (int, float) and (place := (id(attributes), key)) not in self._freed
        }

    def free_changed_numbers(self) -> list[tuple[tuple[str, ...], str]]:
        """Moves numbers that changed since `note_numbers` from the fingerprint to the guards.

        Returns:
            For each number, its module's path from the root, and the attribute's name.
        """
        places = []
        for root, path, attributes, key in self._users_attributes():
            place, value = (id(attributes), key), attributes.get(key)
            before = self._last_numbers.get(place)
            is_number = type(value) in (int, float)  # guards watch nan and infinity as constants
            if before is None or not is_number or (type(value) is type(before) and repr(value) == repr(before)):
                continue
            self._freed.add(place)
            places.append(((root, *(path.split(".") if path else ())), key))
        return places

    def _users_attributes(self) -> Iterator[tuple[str, str, dict[str, Any], str]]:
        for root, module in self._roots.items():
            for path, submodule in module.named_modules():
                if _is_users_alone(type(submodule)):
                    for attributes, key in _plain_attributes(submodule):
                        if key not in _TORCHS_OWN:
                            yield root, path, attributes, key

    def fingerprint(self) -> tuple[Any, ...]:
        """A value that changes if the captured graph may have become invalid.

        Raises:
            ValueError: a parameter, buffer or submodule was replaced, or a parameter has a hook.
        """
        for description, members, key, member in self._members:
            if _member(members, key) is not member:
                raise problem(
                    ValueError,
                    f"MC1206: the model's {description} was replaced since it was compiled",
                    "the compiled program reads what was there before",
                    (
                        "model.load_state_dict(state) without assign=True, or tensor.copy_(value), which write into it",
                        "make a new optimizer over model.parameters(), and compile the model anew",
                    ),
                )
        for name, tensor in self.tensors.items():
            if has_gradient_hooks(tensor) and not self._has_autograds_gradients:
                raise problem(
                    ValueError,
                    f"MC1207: parameter {name!r} has a hook on its gradient, which a captured step does not call",
                    fix=(
                        "optimizer.register_step_pre_hook(hook), in place of parameter.register_hook(hook)",
                        "change the gradient in the loss or in forward",
                    ),
                )
        is_stale = self.lacks_carried() or list(map(len, self._dicts)) != self._sizes
        if is_stale or (self._added and self._find_added() != self._added_now):
            self._rescan_modules()
        plain = tuple(
            (type(value), _comparable(value) if (id(attributes), key) not in self._freed else _oddity(value))
            for attributes, key in self._plain
            if (value := attributes.get(key, _ABSENT)) is not _ABSENT
        )
        tensors = tuple((tensor.requires_grad, tensor.dtype) for tensor in self.tensors.values())
        classes = tuple(map(type, self._modules))  # module.__class__ may be assigned
        return plain, classes, tensors, tuple(tuple(hooks) for hooks in self._hooks if hooks), self._added_now

    def lacks_carried(self) -> bool:
        """True if carried attributes were found since the last fingerprint, which leaves them out."""
        return self._num_carried != CARRIED.num

    def _find_added(self) -> tuple[_Same, ...]:
        return tuple(_Same(_member(members, key)) for members, key in self._added)


class _Same:
    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self._value is other._value

    def __hash__(self) -> int:
        return id(self._value)


def _named_tensors(roots: Mapping[str, nn.Module]) -> Iterator[tuple[str, torch.Tensor]]:
    for prefix, root in roots.items():
        for tensors in (root.named_parameters(remove_duplicate=False), root.named_buffers(remove_duplicate=False)):
            for name, tensor in tensors:
                yield f"{prefix}.{name}", tensor


def free_name(name: str, taken: Container[str]) -> str:
    while name in taken:
        name += "_"
    return name


def _comparable(value: Any) -> Any:
    """A key, equal for equal plain values. None for other values, which guards watch."""
    if not _is_plain(value):
        return None
    is_odd = type(value) is float and (not value or value != value)  # -0.0 == 0.0, and nan differs from itself
    return repr(value) if is_odd else value


def _oddity(value: Any) -> str | None:
    """The text of a negative zero, because guards ignore its sign."""
    return repr(value) if type(value) is float and value == 0.0 and repr(value)[0] == "-" else None


def _is_users_alone(kind: type) -> bool:
    torchs = [base for base in kind.__mro__ if issubclass(base, nn.Module) and base.__module__.startswith("torch.")]
    return kind not in torchs and set(torchs) <= {nn.Module, nn.Sequential, nn.ModuleList, nn.ModuleDict}


def _is_plain(value: Any) -> bool:
    return isinstance(value, _SCALARS) and not isinstance(value, np.generic)  # np.float64 is a float


def _plain_attributes(module: nn.Module) -> list[tuple[dict[str, Any], str]]:
    carried = CARRIED.of(module)
    return [(vars(module), key) for key, value in vars(module).items() if _is_plain(value) and key not in carried]


def _member(members: Mapping[str, Any], key: str) -> Any:
    """TorchScript keeps members in objects without ``get``."""
    if key not in members:
        return None
    return members[key]


def _members_of(module: nn.Module) -> list[tuple[str, dict[str, Any]]]:
    return [("parameter", module._parameters), ("buffer", module._buffers), ("submodule", module._modules)]


_PLACE = "mirrorc_outside"  # the attribute of a traced module that holds outside tensors


def take_outside_variables(
    traced: fx.GraphModule, module: nn.Module, leaves: Sequence[torch.Tensor]
) -> dict[str, ReadVariable]:
    """Turns tensors of outside modules into buffers of a traced graph. Returns the variables by buffer name."""
    home = leaves[0].device if leaves else None
    variables = [
        variable
        for variable in outside_variables(traced, module, leaves, guards_of(traced).names)
        if _is_plain_tensor(variable.tensor) and home in (None, variable.tensor.device)
    ]
    paths = read_from_module(traced, _PLACE, [variable.tensor for variable in variables])
    return dict(zip(paths, variables, strict=True))


def _is_plain_tensor(tensor: torch.Tensor) -> bool:
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
