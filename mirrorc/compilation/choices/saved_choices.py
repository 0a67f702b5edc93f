"""A step's choices in a checkpoint, with which a restart computes the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mirrorc.compilation.choices.worker_exchange import ExchangeChoice
from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions

_FACTORS, _DEVICES = "sent_as_factors", "devices_per_worker"


class SavedChoices:
    """A step's choices. ``devices`` is the number of devices of each worker."""

    def __init__(self, exchange: ExchangeChoice, options: StepOptions) -> None:
        self._exchange = exchange
        self.devices = list(options.program_workers.devices_per_worker) or [len(options.devices)]

    def state_dict(self) -> dict[str, Any]:
        """Factors are None before a choice."""
        names = self._exchange.names
        return {_DEVICES: self.devices, _FACTORS: None if names is None else list(names)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Loads a `state_dict`. If its run had other numbers of devices, it is ignored, because these need a new
        measurement.
        """
        names = _checked(state)
        if names is None or state[_DEVICES] != self.devices or names == self._exchange.names:
            return
        if not self._exchange.is_open:
            raise problem(
                ExecutionError,
                f"MC7003: step.load_state_dict() came after the first call, which has chosen another {_FACTORS}",
                fix="step.load_state_dict(state), before the first step(x, y)",
            )
        self._exchange.load(names)


def _checked(state: Mapping[str, Any]) -> tuple[str, ...] | None:
    if not isinstance(state, Mapping) or set(state) != {_DEVICES, _FACTORS}:
        raise problem(
            ValueError,
            f"MC7002: the state's entry 'choices' is not a dict of {_DEVICES} and {_FACTORS}",
            f"it is {state!r:.80}",
            "step.load_state_dict(state), with state = step.state_dict()",
        )
    names = state[_FACTORS]
    if not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
        raise problem(
            TypeError,
            f"MC7002: the state's entry {_FACTORS!r} is not a list of names, or None",
            f"it is {names!r:.80}",
            "step.load_state_dict(state), with state = step.state_dict()",
        )
    return None if names is None else tuple(names)
