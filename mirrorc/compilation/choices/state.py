"""What a step has chosen by measurement, as state that is kept with a checkpoint: a restart then has the same bits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from mirrorc.compilation.choices.measured_bucket_sizes import MeasuredSizes
from mirrorc.compilation.choices.predicted_bucket_sizes import PlannedSizes
from mirrorc.compilation.choices.worker_exchange import ExchangeChoice
from mirrorc.errors import ExecutionError
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.tuning.bucket_sizes import BucketSizes

_FACTORS, _DEVICES, _CAP, _FIRST = "sent_as_factors", "devices_per_worker", "bucket_cap_mb", "first_bucket_mb"
_KEYS = (_DEVICES, _FACTORS, _CAP, _FIRST)


class MeasuredChoices:
    """The choices of one step: how its workers send gradients, and the sizes of buckets with ``bucket_cap_mb="auto"``.

    Args:
        exchange, sizes: what chooses.
        options: of the step.
    """

    def __init__(self, exchange: ExchangeChoice, sizes: MeasuredSizes | PlannedSizes, options: StepOptions) -> None:
        self._exchange, self._sizes = exchange, sizes
        self._devices = list(options.program_workers.devices_per_worker) or [len(options.devices)]

    def state_dict(self) -> dict[str, Any]:
        """Plain values, under the same keys whatever was chosen; None where nothing was measured."""
        names, sizes = self._exchange.kept, self._sizes.kept
        return {
            _DEVICES: self._devices,
            _FACTORS: None if names is None else list(names),
            _CAP: None if sizes is None else sizes.bucket_cap_mb,
            _FIRST: None if sizes is None else sizes.first_bucket_mb,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Takes over what `state_dict` gave in an earlier run, as far as it is of as many workers and devices.

        Raises:
            TypeError, ValueError: it is no such state.
            ExecutionError: something else is chosen already.
        """
        names, sizes = _checked(state)
        if state[_DEVICES] != self._devices:
            return  # what is best for these is measured
        news: list[tuple[str, Any, Any]] = [
            (_FACTORS, self._exchange, None if names is None else tuple(names)),
            (_CAP, self._sizes, sizes),
        ]
        changes = [(key, chooser, value) for key, chooser, value in news if value not in (None, chooser.kept)]
        for key, chooser, _ in changes:
            if not chooser.is_open:
                raise ExecutionError(
                    f"step.load_state_dict() came when the step had chosen another {key} already: load it before the first call"
                )
        for _, chooser, value in changes:
            chooser.load(value)


def _checked(state: Mapping[str, Any]) -> tuple[list[str] | None, BucketSizes | None]:
    if not isinstance(state, Mapping):
        raise TypeError(f"a step's state is a dict, as step.state_dict() gives it, not a {type(state).__name__}")
    if sorted(state) != sorted(_KEYS):
        raise ValueError(
            f"a step's state has the keys {', '.join(_KEYS)}; this one has {', '.join(map(str, state)) or 'none'}: give what "
            "step.state_dict() gave (the model's and the optimizer's states are loaded by themselves)"
        )
    names, cap, first = state[_FACTORS], state[_CAP], state[_FIRST]
    if not (names is None or (isinstance(names, list) and all(isinstance(name, str) for name in names))):
        raise TypeError(f"{_FACTORS} of a step's state is {names!r}: it is a list of names, or None")
    return names, None if cap is None or first is None else BucketSizes(cap, first)
