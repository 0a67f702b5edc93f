"""Inspects the user's optimizer: whether it is element-wise, and by which rule it updates each parameter."""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from mirrorc.ir.variables import UpdateRule, Variable
from mirrorc.torch_internals import has_step_hooks, has_torchs_step

_REQUIRED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {  # entries of their state
    torch.optim.SGD: (),  # it makes its momentum when there is none
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.NAdam: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
}
ELEMENTWISE = tuple(_REQUIRED)
"""Optimizers that update each element independently of all others, so that they may run on whole buckets."""

_FUSED_ON_CPUS = (torch.float32, torch.float64)
_FUSED_ON_GPUS = (*_FUSED_ON_CPUS, torch.float16, torch.bfloat16)

SCALAR_STATE = ("step", "mu_product")
"""Entries of these optimizers' state that are a single number per parameter."""


_SWITCHES = (("amsgrad", "max_exp_avg_sq"), ("centered", "grad_avg"), ("momentum", "momentum_buffer"))
_KNOWN = {*(entry for entries in _REQUIRED.values() for entry in entries), *(entry for _, entry in _SWITCHES)}


def required_state(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> tuple[str, ...]:
    """The entries that an element-wise optimizer looks for in the state of a parameter, unless that state is empty."""
    switched = [entry for switch, entry in _SWITCHES if kind is not torch.optim.SGD and group.get(switch)]
    return (*_REQUIRED[kind], *switched)


def state_switches(optimizer: torch.optim.Optimizer) -> list[tuple[bool, bool, bool]]:
    """For each group, which of the hyperparameters are on that require more state."""
    groups = optimizer.param_groups
    return [(not g.get("amsgrad"), not g.get("centered"), not g.get("momentum")) for g in groups]


def check_state(optimizer: torch.optim.Optimizer, group: int, name: str, parameter: torch.Tensor) -> None:
    """Refuses state of an element-wise optimizer with which it could not update a parameter.

    Args:
        optimizer: the user's.
        group: index of the parameter's group.
        name: of the parameter, for the message.
        parameter: the parameter.

    Raises:
        ValueError: names the entry, and the remedy.
    """
    state, kind = optimizer.state.get(parameter), type(optimizer)
    if not state:
        return
    hyperparameters = optimizer.param_groups[group]
    for entry in required_state(kind, hyperparameters):
        if state.get(entry) is None:
            switches = [switch for switch, switched in _SWITCHES if switched == entry]
            because = "".join(f" with {switch}={hyperparameters[switch]!r}" for switch in switches)
            raise ValueError(
                f"the state of {kind.__name__} for {name!r} has no {entry!r}, which it needs{because} once there is state: put "
                "it there (such as torch.zeros_like(parameter)), or clear the state, optimizer.state[parameter].clear(), so "
                "that it is made anew in the next step"
            )
    for entry, value in flat_entries(state).items():
        if entry in SCALAR_STATE:
            continue
        what = f"the state {entry!r} of {kind.__name__} for {name!r}"
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape != list(parameter.shape):
            raise ValueError(
                f"{what} is {shape}, but the parameter is {list(parameter.shape)}: give it a tensor of the parameter's shape"
            )
        if value.dtype != parameter.dtype:
            raise ValueError(
                f"{what} is {value.dtype}, but the parameter is {parameter.dtype}: after a change of the model's dtype, call "
                "optimizer.load_state_dict(optimizer.state_dict()), which casts the state"
            )


def flat_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a parameter's state that an element-wise optimizer knows; others are the user's own and stay as they are."""
    return {key: value for key, value in state.items() if key in _KNOWN and value is not None}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the optimizer may run on whole buckets: a known class, not a subclass, whose step nobody hooked or replaced."""
    if type(optimizer) not in _REQUIRED or has_step_hooks(optimizer) or not has_torchs_step(optimizer):
        return False
    return not any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups)


def is_fused(group: Mapping[str, Any], dtype: torch.dtype, device_type: str) -> bool:
    """Whether torch's fused kernels update a group's parameters of a dtype on devices of a type.

    They do if the group asks for them. If the group leaves the choice open, they do for parameters that every fused kernel
    updates: on CPUs those of 32 and 64 bits (torch's fused SGD does not update 16-bit ones there, seen in 2.13), on GPUs
    16-bit ones, too.
    """
    fused = group.get("fused", False)
    if fused is None and not group.get("foreach"):
        return dtype in (_FUSED_ON_GPUS if device_type == "cuda" else _FUSED_ON_CPUS)
    return bool(fused)


def check_capturable(optimizer: torch.optim.Optimizer, variables: Mapping[str, Variable]) -> None:
    """Refuses an optimizer whose updates cannot be captured in a CUDA graph.

    Args:
        optimizer: the user's.
        variables: of the program that it updates, by name.

    Raises:
        ValueError: says which parameter's update, why, and the remedy.
    """
    name_of = type(optimizer).__name__
    remedy = "use Adam, AdamW, SGD or Adagrad with fused=True, or compile with cuda_graphs=False"
    for name, variable in variables.items():
        rule = variable.update
        if rule is None:
            continue
        if not rule.elementwise:
            raise ValueError(
                f"cuda_graphs=True cannot capture {name_of}, which runs by itself (another class than torch's element-wise "
                f"ones, or with hooks, capturable or differentiable): {remedy}"
            )
        group = optimizer.param_groups[rule.group]
        if not is_fused(group, variable.dtype, "cuda"):
            raise ValueError(
                f"cuda_graphs=True cannot capture the update of {name!r} ({variable.dtype}) by {name_of}, group {rule.group}, "
                f"which is not fused: {remedy}"
            )
        tensors = [key for key in optimizer.defaults if key != "lr" and _holds_tensor(group[key])]
        if tensors:
            raise ValueError(
                f"cuda_graphs=True cannot capture {name_of} with {tensors[0]!r} as a tensor in group {rule.group}, which is "
                f"read on the host in every step: give a number, or compile with cuda_graphs=False"
            )


def _holds_tensor(value: Any) -> bool:
    return any(isinstance(part, torch.Tensor) for part in (value if isinstance(value, tuple | list) else (value,)))


def check_optimizer(optimizer: Any, parameters: Mapping[str, torch.nn.Parameter]) -> torch.optim.Optimizer:
    """The optimizer, if it can train these parameters.

    Raises:
        TypeError: no optimizer, or one whose step needs a closure.
        ValueError: it is missing, or updates parameters that are not among these.
    """
    if optimizer is None:
        raise ValueError("optimizer is missing: give a torch.optim.Optimizer over model.parameters()")
    if not isinstance(optimizer, torch.optim.Optimizer):
        given = type(optimizer).__name__
        raise TypeError(f"optimizer is a {given}: give a torch.optim.Optimizer over model.parameters()")
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    if closure is not None and closure.default is inspect.Parameter.empty:
        raise TypeError(
            f"{type(optimizer).__name__} needs a closure that evaluates the model several times in a step; mirrorc's step "
            "evaluates it once: use an optimizer whose step() works without a closure, such as AdamW"
        )
    known = {id(parameter) for parameter in parameters.values()}
    for index, group in enumerate(optimizer.param_groups):
        for i, parameter in enumerate(group["params"]):
            if id(parameter) not in known:
                raise ValueError(
                    f"the optimizer's parameter {i} of group {index}, {list(parameter.shape)}, is none of the model's: make "
                    "the optimizer over model.parameters() of the model that you compile (after any .to() or deepcopy)"
                )
    return optimizer


def update_rules(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, torch.nn.Parameter], updated: Sequence[str]
) -> dict[str, UpdateRule]:
    """The rule of each parameter.

    Args:
        optimizer: the user's.
        parameters: the model's, by name.
        updated: names of those that get a gradient; others get no rule.
    """
    elementwise = is_elementwise(optimizer)
    group_of = {id(p): i for i, group in enumerate(optimizer.param_groups) for p in group["params"]}
    classes: dict[Any, int] = {}
    rules = {}
    for name in updated:
        parameter = parameters[name]
        group = group_of[id(parameter)]
        state_class = 0
        if elementwise:
            state_class = classes.setdefault(state_signature(optimizer.state.get(parameter, {})), len(classes))
        rules[name] = UpdateRule(_label(optimizer, group), group, state_class, elementwise)
    return rules


def _label(optimizer: torch.optim.Optimizer, group: int) -> str:
    return f"{type(optimizer).__name__} group {group}"


def hyperparameters_by_label(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """What each group of an optimizer holds now, for people: ``{"SGD group 0": "lr=0.1, momentum=0.9"}``.

    Entries that hold nothing (None) or are switched off (False) are left out; tensors of one element are told as numbers, and
    what is neither a number nor text by its class.
    """
    return {
        _label(optimizer, i): ", ".join(
            f"{key}={_text_of(value)}"
            for key, value in group.items()
            if key not in ("params", "param_names") and value is not None and value is not False
        )
        for i, group in enumerate(optimizer.param_groups)
    }


def _text_of(value: Any) -> str:
    """A hyperparameter as text that is the same in every run."""
    if isinstance(value, torch.Tensor):
        return repr(value.item()) if value.numel() == 1 else f"a tensor {list(value.shape)}"
    if type(value) in (tuple, list):
        inner = ", ".join(map(_text_of, value))
        return f"[{inner}]" if isinstance(value, list) else f"({inner}{',' if len(value) == 1 else ''})"
    return repr(value) if type(value) in (bool, int, float, str) else type(value).__name__


def state_signature(state: Mapping[str, Any]) -> tuple[tuple[str, float | torch.dtype | None], ...]:
    """A key that is equal for parameters whose states can be stored together, in one flat tensor per entry."""
    entries = flat_entries(state)
    kinds = {
        key: float(value) if key in SCALAR_STATE else getattr(value, "dtype", None) for key, value in entries.items()
    }
    return tuple(sorted(kinds.items()))
