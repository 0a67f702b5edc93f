"""The state of a step in a checkpoint, with which a restart computes the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mirrorc.compilation.choices.worker_exchange import ExchangeChoice
from mirrorc.errors import ExecutionError
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.state.step_state import StepState

_FACTORS, _DEVICES, _BUFFERS = "sent_as_factors", "devices_per_worker", "replica_buffers"
_KEYS = (_DEVICES, _FACTORS)
_WITHDRAWN = ("bucket_cap_mb", "first_bucket_mb")  # sizes that earlier versions measured; None if they did not


class SavedState:
    def __init__(self, exchange: ExchangeChoice, state: StepState, options: StepOptions) -> None:
        self._exchange, self._state = exchange, state
        self._devices = list(options.program_workers.devices_per_worker) or [len(options.devices)]

    def state_dict(self) -> dict[str, Any]:
        """Factors are None before a choice. Buffers are left out where all replicas have the model's buffers."""
        names, buffers = self._exchange.names, self._state.saved_buffers.state_dict(self._state.store)
        choice = {_DEVICES: self._devices, _FACTORS: None if names is None else list(names)}
        return {**choice, _BUFFERS: buffers} if buffers else choice

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the `state_dict` of an earlier run; ignores that of a run with other numbers of devices or workers.

        Raises:
            TypeError, ValueError: it is not such a state, or has bucket sizes.
            ExecutionError: this step has already made another choice.
        """
        names = _checked(state)
        if state[_DEVICES] != self._devices:
            return  # other numbers need their own measurement
        is_same = names is None or names == self._exchange.names
        if not is_same and not self._exchange.is_open:
            raise ExecutionError(
                f"step.load_state_dict() came when the step had chosen another {_FACTORS} already: load it before the first call"
            )
        self._state.saved_buffers.load_state_dict(state.get(_BUFFERS, {}), self._state.store)
        if names is not None and not is_same:
            self._exchange.load(names)


def _checked(state: Mapping[str, Any]) -> tuple[str, ...] | None:
    if not isinstance(state, Mapping):
        raise TypeError(f"a step's state is a dict, as step.state_dict() gives it, not a {type(state).__name__}")
    sizes = {key: state[key] for key in _WITHDRAWN if state.get(key) is not None}
    if sizes:
        numbers = ", ".join(f"{key}={value!r}" for key, value in sizes.items())
        raise ValueError(
            f"this state of a step has {numbers}, which an earlier version measured, and that is "
            "withdrawn: give communication=mirrorc.Communication(buckets=mirrorc.packing.ByBytes(cap_mb, first_mb)) for the same "
            f"bits, and leave {', '.join(sizes)} out of the state"
        )
    if {key for key in state if key not in (*_WITHDRAWN, _BUFFERS)} != set(_KEYS):
        raise ValueError(
            f"a step's state has the keys {', '.join(_KEYS)}; this one has {', '.join(map(str, state)) or 'none'}: give what "
            "step.state_dict() gave (the model's and the optimizer's states are loaded by themselves)"
        )
    names = state[_FACTORS]
    if not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
        raise TypeError(f"{_FACTORS} of a step's state is {names!r}: it is a list of names, or None")
    return None if names is None else tuple(names)
