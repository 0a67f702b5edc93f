"""Per-replica buffers in a checkpoint; the model's state_dict has only their aggregate."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch

from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.messages.wording import counted, numbered
from mirrorc.runtime.state.variables.step_variables import StepVariables

_MODEL, _REPLICAS = "model", "replicas"


class SavedBuffers:
    """Per-replica buffers of a checkpoint, until a training program allocates them.

    Replicas get the saved values only if the model's buffer equals the checkpoint's. Steps over one model share loaded
    buffers.
    """

    def __init__(self) -> None:
        self._unknown: dict[str, Mapping[str, Any]] = {}  # loaded for variables that the step's first call adds

    def state_dict(self, store: StepVariables) -> dict[str, dict[str, Any]]:
        """Copies of the buffers whose replicas differ from the model, by name."""
        saved: dict[str, dict[str, Any]] = {
            name: _copied(buffer) for name, buffer in (self._unknown | store.loaded_buffers).items()
        }
        for name, values in store.per_replica().items():
            shown = store.tensors[name].detach()
            if name not in saved and not all(have_equal_bits(value, shown) for value in values):
                saved[name] = {_MODEL: shown.clone(), _REPLICAS: [value.clone() for value in values]}
        return saved

    def load_state_dict(self, state: Mapping[str, Any], store: StepVariables) -> None:
        """Loads the result of `state_dict`.

        Raises:
            TypeError, ValueError: the state is malformed, or of another model or number of devices.
        """
        self.check(state, store)
        copies = {name: _copied(buffer) for name, buffer in state.items()}
        store.load_buffers({name: buffer for name, buffer in copies.items() if name in store.tensors})
        self._unknown = {name: buffer for name, buffer in copies.items() if name not in store.tensors}

    @staticmethod
    def check(state: Mapping[str, Any], store: StepVariables) -> None:
        if not isinstance(state, Mapping):
            raise problem(
                TypeError,
                f"MC7002: replica_buffers in the state of a step is a {type(state).__name__}, not a dict",
                fix="step.load_state_dict(state), with state = step.state_dict()",
            )
        for name, buffer in state.items():
            _check(name, buffer, store)

    def write(self, store: StepVariables) -> None:
        if not self._unknown and not store.loaded_buffers:
            return
        foreign: list[str] = []
        replicas = store.per_replica()
        loaded = store.take_loaded_buffers([name for name in store.loaded_buffers if name in replicas])
        loaded |= {name: self._unknown.pop(name) for name in list(self._unknown) if name in replicas}
        for name, buffer in loaded.items():
            if have_equal_bits(buffer[_MODEL], store.tensors[name].detach()):
                for value, saved in zip(replicas[name], buffer[_REPLICAS], strict=True):
                    value.copy_(saved)
            else:
                foreign.append(name)
        if foreign:
            warnings.warn(
                message(
                    f"MC7007: the model's {numbered('buffer', [repr(name) for name in foreign])} differ from "
                    "those of the loaded checkpoint",
                    "step.load_state_dict() was given another checkpoint than the model",
                    "load the model's state of the same checkpoint",
                    now="all replicas begin with the model's",
                ),
                stacklevel=users_stack_level(),
            )


def _copied(buffer: Mapping[str, Any]) -> dict[str, Any]:
    return {_MODEL: buffer[_MODEL].clone(), _REPLICAS: [value.clone() for value in buffer[_REPLICAS]]}


def _check(name: str, buffer: Any, store: StepVariables) -> None:
    is_buffer = isinstance(buffer, Mapping) and buffer.keys() == {_MODEL, _REPLICAS}
    if not is_buffer or not all(isinstance(value, torch.Tensor) for value in (buffer[_MODEL], *buffer[_REPLICAS])):
        raise problem(
            TypeError,
            f"MC7002: {name!r} in replica_buffers of a step's state is no such buffer",
            fix="step.load_state_dict(state), with state = step.state_dict()",
        )
    if len(buffer[_REPLICAS]) != len(store.devices):
        raise problem(
            ValueError,
            f"MC7001: {name!r} is saved for {counted(len(buffer[_REPLICAS]), 'replica')}, and this step has {len(store.devices)}",
            "a buffer that forward writes is saved once for each replica",
            f"mirrorc.compile(..., devices={len(buffer[_REPLICAS])}), as when it was saved",
        )
    tensor = store.tensors.get(name)
    if tensor is None and not name.startswith("outside."):  # which the first call finds
        raise problem(
            ValueError,
            f"MC7001: {name!r} in replica_buffers is no buffer of this model",
            fix="step.load_state_dict(state), with a state of a step over this model",
        )
    if tensor is not None and any(value.shape != tensor.shape for value in buffer[_REPLICAS]):
        raise problem(
            ValueError,
            f"MC7001: {name!r} in replica_buffers has another shape than the model's, {list(tensor.shape)}",
            fix="build the model as it was when the state was saved",
        )


def have_equal_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Compares bits, on any devices; NaN equals itself."""
    one, other = one.detach().cpu().contiguous(), other.detach().cpu().contiguous()
    if one.dtype != other.dtype or one.shape != other.shape:
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
