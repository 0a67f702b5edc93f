"""The user's optimizers: their numbered groups, and the update rule of each parameter."""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Collection, Iterator, Mapping, Sequence
from numbers import Number
from operator import is_
from typing import Any

import numpy as np
import torch

from mirrorc.ir.variables import LEFT_TO_USER, UpdateRule, Variable
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import has_step_hooks, has_torchs_step
from mirrorc.user.optimizer_kinds import check_gradient_of, is_elementwise, is_fused, state_signature, writes_rows


class OptimizerGroups:
    """The user's optimizers, with all groups numbered together.

    The groups of the first optimizer come first. A group added later gets the next number: numbers do not change.
    """

    def __init__(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        self.optimizers = tuple(optimizers)
        self._numbered: list[tuple[int, int]] = []  # by number: the optimizer's index, and the group's index in it
        self._number_groups()

    def _number_groups(self) -> None:
        known = set(self._numbered)
        places = ((i, j) for i, optimizer in enumerate(self.optimizers) for j in range(len(optimizer.param_groups)))
        self._numbered += [place for place in places if place not in known]

    def __len__(self) -> int:
        if len(self._numbered) != sum(len(optimizer.param_groups) for optimizer in self.optimizers):
            self._number_groups()
        return len(self._numbered)

    def fused(self, device_type: str) -> tuple[int, ...]:
        """Groups whose float32 parameters are updated by torch's fused kernels on devices of this type."""
        held = [(number, *self[number]) for number in range(len(self))]
        return tuple(
            n
            for n, optimizer, i in held
            if is_fused(type(optimizer), optimizer.param_groups[i], torch.float32, device_type)
        )

    def numbers_as(self, other: OptimizerGroups) -> bool:
        are_same = len(self.optimizers) == len(other.optimizers) and all(map(is_, self.optimizers, other.optimizers))
        return are_same and len(self) == len(other) and self._numbered == other._numbered

    def parameters(self) -> set[int]:
        return {id(parameter) for group in self.hyperparameters for parameter in group["params"]}

    def __getitem__(self, number: int) -> tuple[torch.optim.Optimizer, int]:
        if not 0 <= number < len(self):
            raise IndexError(f"there is no group {number} among {len(self)}")
        which, index = self._numbered[number]
        return self.optimizers[which], index

    @property
    def hyperparameters(self) -> Iterator[dict[str, Any]]:
        return (group for optimizer in self.optimizers for group in optimizer.param_groups)

    def are_elementwise(self) -> tuple[bool, ...]:
        """For each optimizer, True if it may run on flat buckets.

        If one of several has hooks or a replaced step, none may, because such code may read all optimizers' parameters.
        """
        if len(self.optimizers) > 1 and any(has_step_hooks(o) or not has_torchs_step(o) for o in self.optimizers):
            return (False,) * len(self.optimizers)
        return tuple(is_elementwise(optimizer) for optimizer in self.optimizers)

    def write_rows(self) -> tuple[bool, ...]:
        """For each group, True if an update with a sparse gradient writes only the gradient's rows.

        If an optimizer has hooks or a replaced step, no group does, because such code may write all tables.
        """
        are_torchs = all(has_torchs_step(o) and not has_step_hooks(o) for o in self.optimizers)
        return tuple(are_torchs and writes_rows(*self[number]) for number in range(len(self)))

    def structure(self) -> tuple[Any, ...]:
        each = (tuple(tuple(id(p) for p in group["params"]) for group in o.param_groups) for o in self.optimizers)
        return (*each, self.are_elementwise())

    def check(self, parameters: Mapping[str, torch.nn.Parameter]) -> None:
        names = {id(parameter): name for name, parameter in parameters.items()}
        held_by: dict[int, int] = {}
        for which, optimizer in enumerate(self.optimizers):
            owner = "the optimizer" if len(self.optimizers) == 1 else f"optimizer[{which}]"
            for index, group in enumerate(optimizer.param_groups):
                for i, parameter in enumerate(group["params"]):
                    if id(parameter) not in names:
                        raise problem(
                            ValueError,
                            f"MC1213: {owner}'s parameter {i} of group {index}, {list(parameter.shape)}, is none of the model's",
                            fix=(
                                "make the optimizer over model.parameters() of the model that you compile, "
                                "after any .to() or deepcopy",
                                "parameters of a loss: give loss_fn= a module that has them as submodules",
                            ),
                        )
                    first = held_by.setdefault(id(parameter), which)
                    if first != which:
                        raise problem(
                            ValueError,
                            f"MC1214: parameter {names[id(parameter)]!r} is in optimizer[{first}] and in {owner}",
                            f"{type(self.optimizers[first]).__name__} and {type(optimizer).__name__} of one "
                            "step update different parameters",
                            f"give {names[id(parameter)]!r} to one of them alone",
                        )


def check_optimizers(option: Any, parameters: Mapping[str, torch.nn.Parameter]) -> OptimizerGroups:
    if option is None:
        return OptimizerGroups([])
    are_several = isinstance(option, list | tuple)
    if not are_several:
        _check_kind("optimizer", option)
    elif not option:
        raise problem(
            ValueError,
            f"MC1211: optimizer is an empty {type(option).__name__}",
            fix="optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3), or a list of several over different ones",
        )
    for i, optimizer in enumerate(option if are_several else ()):
        _check_kind(f"optimizer is a {type(option).__name__} whose item {i}", optimizer)
        first = next(j for j, other in enumerate(option) if other is optimizer)
        if first != i:
            raise problem(
                ValueError,
                f"MC1214: optimizer[{first}] and optimizer[{i}] are the same {type(optimizer).__name__}, which steps once",
                fix="optimizer=[first, second], each once",
            )
    groups = OptimizerGroups(option if are_several else [option])
    groups.check(parameters)
    return groups


def _check_kind(subject: str, optimizer: Any) -> None:
    if not isinstance(optimizer, torch.optim.Optimizer):
        several = ", or a list of several" if subject == "optimizer" else ""
        raise problem(
            TypeError,
            f"MC1211: {subject} is a {type(optimizer).__name__}",
            fix=f"optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3){several}",
        )
    if hasattr(optimizer, "consolidate_state_dict"):
        raise problem(
            ValueError,
            f"MC1202: {type(optimizer).__name__} deals parameters out to processes and exchanges them by itself",
            fix="give the optimizer that it wraps, over model.parameters(), and mirrorc.Memory(shard_optimizer=True)",
        )
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise problem(
            TypeError,
            f"MC1212: {type(optimizer).__name__} needs a closure that evaluates the model several times in a step",
            "a compiled step evaluates it once",
            (
                "optimizer.step(lambda: step.gradients(x, y)), and leave optimizer= out of mirrorc.compile",
                "use an optimizer whose step() works without a closure, such as AdamW",
            ),
        )


def update_rules(
    groups: OptimizerGroups,
    parameters: Mapping[str, torch.nn.Parameter],
    updated: Sequence[str],
    sparse: Collection[str] = (),
    *,
    may_be_unused: bool = False,
) -> dict[str, UpdateRule]:
    """The update rule of each parameter in ``updated``, by name.

    Args:
        may_be_unused: parameters may have no gradient in a step.
    """
    elementwise = dict(zip(map(id, groups.optimizers), groups.are_elementwise(), strict=True))
    number_of = {id(p): number for number in range(len(groups)) for p in _group(groups, number)["params"]}
    write_rows = groups.write_rows() if sparse else ()
    classes: dict[int, dict[Any, int]] = {}  # group -> state -> class, numbered within the group
    rules = {}
    for name in updated:
        parameter = parameters[name]
        number = number_of[id(parameter)]
        optimizer, index = groups[number]
        state_class, is_flat = 0, elementwise[id(optimizer)] and name not in sparse
        if name in sparse or isinstance(optimizer, torch.optim.SparseAdam):
            check_gradient_of(optimizer, index, name, parameter, is_sparse=name in sparse)
        if is_flat and not may_be_unused:
            known = classes.setdefault(number, {})
            state_class = known.setdefault(state_signature(optimizer.state.get(parameter, {})), len(known))
        rows = (name in sparse, name in sparse and write_rows[number])
        rules[name] = UpdateRule(_label(groups, number), number, state_class, is_flat, *rows, may_be_unused)
    return rules


def gradient_rule(*, is_sparse: bool, may_be_unused: bool) -> UpdateRule:
    """The rule of a gradient that is left to the user, whole or as rows."""
    return UpdateRule(LEFT_TO_USER, 0, elementwise=False, takes_rows=is_sparse, may_be_unused=may_be_unused)


def _group(groups: OptimizerGroups, number: int) -> dict[str, Any]:
    optimizer, index = groups[number]
    return optimizer.param_groups[index]


def _label(groups: OptimizerGroups, number: int) -> str:
    return f"{type(groups[number][0]).__name__} group {number}"


def hyperparameters_by_label(groups: OptimizerGroups) -> dict[str, str]:
    """Hyperparameters of each group as text: ``{"SGD group 0": "lr=0.1, momentum=0.9"}``.

    Tensors of several elements are printed by shape and checksum, other objects by class.
    """
    return {
        _label(groups, number): ", ".join(
            f"{key}={_text_of(value)}"
            for key, value in _group(groups, number).items()
            if key not in ("params", "param_names") and value is not None and value is not False
        )
        for number in range(len(groups))
    }


def _text_of(value: Any) -> str:
    """A text that is equal in every run, and differs for different numbers or tensors."""
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else _text_of_tensor(value)
    if type(value) in (tuple, list):
        inner = ", ".join(map(_text_of, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    if isinstance(value, np.generic):
        return repr(value.item())
    return repr(value) if isinstance(value, bool | int | float | str | Number) else type(value).__name__


def _text_of_tensor(value: torch.Tensor) -> str:
    text = f"a tensor {list(value.shape)}"
    if value.layout is not torch.strided or value.is_meta or not value.numel():
        return text
    values = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return f"{text} of {hashlib.sha256(values.numpy().tobytes()).hexdigest()[:8]}"


def check_capturable(groups: OptimizerGroups, variables: Mapping[str, Variable]) -> None:
    fixes = ("torch.optim.AdamW(..., fused=True), or Adam or SGD", "compiler=mirrorc.Compiler(cuda_graphs=False)")
    for name, variable in variables.items():
        rule = variable.update
        if rule is None:
            continue
        optimizer, index = groups[rule.group]
        name_of = type(optimizer).__name__
        if not rule.elementwise:
            raise problem(
                ValueError,
                f"MC1501: cuda_graphs=True cannot capture {name_of}, which runs by itself",
                "it is another class than torch's element-wise ones, or has hooks, or is capturable or differentiable",
                fixes,
            )
        group = optimizer.param_groups[index]
        if not is_fused(type(optimizer), group, variable.dtype, "cuda"):
            raise problem(
                ValueError,
                f"MC1501: cuda_graphs=True cannot capture the update of {name!r} ({variable.dtype}) by {name_of}",
                f"its group {rule.group} is not fused",
                fixes,
            )
        tensors = [key for key in optimizer.defaults if key != "lr" and _holds_tensor(group[key])]
        if tensors:
            raise problem(
                ValueError,
                f"MC1501: cuda_graphs=True cannot capture {name_of} with a tensor in {tensors[0]!r} of group {rule.group}",
                "it is read on the host in every step",
                (
                    f"optimizer.param_groups[{rule.group}][{tensors[0]!r}] = float(...)",
                    "compiler=mirrorc.Compiler(cuda_graphs=False)",
                ),
            )


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(part, torch.Tensor) for part in (value if isinstance(value, tuple | list) else (value,)))
