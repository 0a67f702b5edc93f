"""Facts about optimizer classes: element-wise updates, required state, kernels."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from mirrorc.messages.problem import problem
from mirrorc.torch_internals import adagrad_is_fused_on_gpus, bare_step, has_step_hooks, has_torchs_step

_REQUIRED: dict[type[torch.optim.Optimizer], tuple[str, ...]] = {  # class -> required entries of a parameter's state
    torch.optim.SGD: (),  # creates its momentum if it is missing
    torch.optim.Adam: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.AdamW: ("step", "exp_avg", "exp_avg_sq"),
    torch.optim.RMSprop: ("step", "square_avg"),
    torch.optim.Adagrad: ("step", "sum"),
    torch.optim.Adamax: ("step", "exp_avg", "exp_inf"),
    torch.optim.NAdam: ("step", "mu_product", "exp_avg", "exp_avg_sq"),
    torch.optim.RAdam: ("step", "exp_avg", "exp_avg_sq"),
}
ELEMENTWISE = tuple(_REQUIRED)
"""Optimizers that update each element independently, and so may run on flat buckets."""

_WRITE_ROWS = (torch.optim.SparseAdam, torch.optim.Adagrad, torch.optim.SGD)
_FUSED_ON_CPUS = (torch.float32, torch.float64)
_FUSED_ON_GPUS = (*_FUSED_ON_CPUS, torch.float16, torch.bfloat16)

SCALAR_STATE = ("step", "mu_product")
"""State entries with one number per parameter."""


_SWITCHES = (("amsgrad", "max_exp_avg_sq"), ("centered", "grad_avg"), ("momentum", "momentum_buffer"))
_KNOWN = {*(entry for entries in _REQUIRED.values() for entry in entries), *(entry for _, entry in _SWITCHES)}


def required_state(kind: type[torch.optim.Optimizer], group: Mapping[str, Any]) -> tuple[str, ...]:
    switched = [entry for switch, entry in _SWITCHES if kind is not torch.optim.SGD and group.get(switch)]
    return (*_REQUIRED[kind], *switched)


def state_switches(groups: Iterable[Mapping[str, Any]]) -> list[tuple[bool, bool, bool]]:
    """For each group, True for amsgrad, centered and momentum that are off. Each of these requires more state."""
    return [(not g.get("amsgrad"), not g.get("centered"), not g.get("momentum")) for g in groups]


def check_hyperparameters(optimizer: torch.optim.Optimizer) -> None:
    """Raises TypeError for a text instead of a number, such as a learning rate from a configuration file."""
    for index, group in enumerate(optimizer.param_groups):
        for name, value in group.items():
            if isinstance(value, str) and type(optimizer.defaults.get(name)) in (int, float):
                raise problem(
                    TypeError,
                    f"MC1215: {name} of {type(optimizer).__name__} group {index} is the text {value!r}, not a number",
                    fix=f"optimizer.param_groups[{index}][{name!r}] = float(...), before the step",
                )


def check_state(optimizer: torch.optim.Optimizer, group: int, name: str, parameter: torch.Tensor) -> None:
    """Refuses state that an element-wise optimizer could not use."""
    state, kind = optimizer.state.get(parameter), type(optimizer)
    if not state:
        return
    hyperparameters = optimizer.param_groups[group]
    for entry in required_state(kind, hyperparameters):
        if state.get(entry) is None:
            switches = [switch for switch, switched in _SWITCHES if switched == entry]
            because = "".join(f" with {switch}={hyperparameters[switch]!r}" for switch in switches)
            raise problem(
                ValueError,
                f"MC1215: the state of {kind.__name__} for {name!r} has no {entry!r}",
                f"state that is there must be complete{because}",
                (
                    f"optimizer.state[parameter][{entry!r}] = torch.zeros_like(parameter)",
                    "optimizer.state[parameter].clear(): the next step makes it anew",
                ),
            )
    for entry, value in flat_entries(state).items():
        if entry in SCALAR_STATE:
            continue
        subject = f"the state {entry!r} of {kind.__name__} for {name!r}"
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        if shape != list(parameter.shape):
            raise problem(
                ValueError,
                f"MC1215: {subject} is {shape}, but the parameter is {list(parameter.shape)}",
                "the state was made or loaded for a parameter of another shape",
                (
                    "make a new optimizer over model.parameters()",
                    "optimizer.load_state_dict(state), with a state of this model",
                ),
            )
        if value.dtype != parameter.dtype:
            raise problem(
                ValueError,
                f"MC1215: {subject} is {value.dtype}, but the parameter is {parameter.dtype}",
                "the model's dtype was changed",
                "optimizer.load_state_dict(optimizer.state_dict()), which casts the state",
            )


def flat_entries(state: Mapping[str, Any]) -> dict[str, Any]:
    """The entries that element-wise optimizers use; other entries are the user's."""
    return {key: value for key, value in state.items() if key in _KNOWN and value is not None}


def is_elementwise(optimizer: torch.optim.Optimizer) -> bool:
    """True if an optimizer may run on flat buckets."""
    if type(optimizer) not in _REQUIRED or has_step_hooks(optimizer) or not has_torchs_step(optimizer):
        return False
    return not any(group.get("differentiable") or group.get("capturable") for group in optimizer.param_groups)


def writes_rows(optimizer: torch.optim.Optimizer, index: int) -> bool:
    """True if a step with a sparse gradient writes only the gradient's rows of a table.

    SGD with momentum writes more rows; a hook or a replaced step may write anything.
    """
    kind, momentum = type(optimizer), optimizer.param_groups[index].get("momentum", 0)
    if kind not in _WRITE_ROWS or not isinstance(momentum, int | float) or momentum != 0:
        return False
    return has_torchs_step(optimizer) and not has_step_hooks(optimizer)


def check_gradient_of(
    optimizer: torch.optim.Optimizer, index: int, name: str, parameter: torch.Tensor, *, is_sparse: bool
) -> None:
    """Refuses a sparse or dense gradient that an optimizer of torch cannot use.

    This depends on hyperparameters, so a copy of the optimizer tries a step on a tiny parameter.
    """
    kind: Any = type(optimizer)
    if not kind.__module__.startswith("torch.optim.") or not has_torchs_step(optimizer):
        return
    group = {key: value for key, value in optimizer.param_groups[index].items() if key not in ("params", "param_names")}
    trial = torch.nn.Parameter(torch.zeros(2, 2, dtype=parameter.dtype))
    trial.grad = sparse_gradient(torch.zeros(1, dtype=torch.int64), torch.zeros(2, dtype=parameter.dtype), trial.shape)
    if not is_sparse:
        trial.grad = trial.grad.to_dense()
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            bare_step(kind)(kind([{**group, "params": [trial]}]))
    except RuntimeError as error:
        message = (str(error).strip() or type(error).__name__).splitlines()[0]
        fixes = (
            (
                "nn.Embedding(..., sparse=False)",
                "torch.optim.SparseAdam, or SGD or Adagrad without weight_decay and fused",
            )
            if is_sparse
            else (
                "nn.Embedding(..., sparse=True), which nothing else reads",
                "torch.optim.AdamW, or another for dense gradients",
            )
        )
        raise problem(
            ValueError,
            f"MC1216: {kind.__name__} cannot update {name!r}, whose gradient is {'sparse' if is_sparse else 'dense'}",
            message.rstrip("."),
            fixes,
        ) from None


def sparse_gradient(indices: torch.Tensor, rows: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """A table's gradient as a coalesced sparse tensor, from ``indices`` [k] and the values of these rows, flat or not."""
    values = rows.view(len(indices), *shape[1:])
    return torch.sparse_coo_tensor(indices[None], values, tuple(shape), is_coalesced=True, check_invariants=False)


def is_fused(kind: type[torch.optim.Optimizer], group: Mapping[str, Any], dtype: torch.dtype, device_type: str) -> bool:
    """True if torch's fused kernels update a group's parameters of this dtype on such devices.

    With ``fused=None`` and without ``foreach``, they run for dtypes that all kernels support: 32 and 64 bits on CPUs,
    also 16 on GPUs. Some versions of torch lack Adagrad's kernel on GPUs.
    """
    fused = group.get("fused", False)
    if fused is None and not group.get("foreach"):
        if device_type == "cuda" and issubclass(kind, torch.optim.Adagrad) and not adagrad_is_fused_on_gpus():
            return False
        return dtype in (_FUSED_ON_GPUS if device_type == "cuda" else _FUSED_ON_CPUS)
    return bool(fused)


def state_signature(state: Mapping[str, Any]) -> tuple[tuple[str, float | torch.dtype | None], ...]:
    """Equal for states that can share one flat tensor per entry."""
    entries = flat_entries(state)
    kinds = {key: float(v) if key in SCALAR_STATE else getattr(v, "dtype", None) for key, v in entries.items()}
    return tuple(sorted(kinds.items()))
