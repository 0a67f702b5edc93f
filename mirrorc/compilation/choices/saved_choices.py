"""The choices of a step in a checkpoint, with which a restart computes the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mirrorc.capture.call.dynamic_sizes import ChangingSizes
from mirrorc.compilation.choices.worker_exchange import ExchangeChoice
from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions

_FACTORS, _DEVICES, _SIZES = "sent_as_factors", "devices_per_worker", "sizes"


class SavedChoices:
    """Attributes: devices: the number of devices of each worker."""

    def __init__(self, exchange: ExchangeChoice, sizes: ChangingSizes, options: StepOptions) -> None:
        self._exchange, self._sizes = exchange, sizes
        self.devices = list(options.program_workers.devices_per_worker) or [len(options.devices)]

    def state_dict(self) -> dict[str, Any]:
        """Factors are None before a choice."""
        names = self._exchange.names
        factors = None if names is None else list(names)
        return {_DEVICES: self.devices, _FACTORS: factors, _SIZES: self._sizes.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads the `state_dict` of an earlier run; ignores that of other numbers of devices, which need their own measurement.

        Raises:
            TypeError, ValueError: it is not such a state.
            ExecutionError: this step has already made another choice.
        """
        names = _checked(state)
        if state[_DEVICES] != self.devices:
            return
        if names is not None and names != self._exchange.names:
            if not self._exchange.is_open:
                raise problem(
                    ExecutionError,
                    f"MC7003: step.load_state_dict() came when the step had chosen another {_FACTORS} already",
                    fix="load it before the first call",
                )
            self._exchange.load(names)
        self._sizes.load_state_dict(state[_SIZES])


def _checked(state: Mapping[str, Any]) -> tuple[str, ...] | None:
    if not isinstance(state, Mapping) or set(state) != {_DEVICES, _FACTORS, _SIZES}:
        keys = f"{_DEVICES}, {_FACTORS} and {_SIZES}"
        raise ValueError(f"MC7002: the choices of a step's state are a dict of {keys}, not {state!r:.80}")
    names, sizes = state[_FACTORS], state[_SIZES]
    if not isinstance(sizes, Mapping):
        raise TypeError(f"MC7002: {_SIZES} of a step's state are {sizes!r:.80}: they are a dict")
    if not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
        raise TypeError(f"MC7002: {_FACTORS} of a step's state is {names!r}: it is a list of names, or None")
    return None if names is None else tuple(names)
