"""Warns of modes of the caller's thread that devices' threads lack."""

from __future__ import annotations

import warnings

import torch

from mirrorc.messages.problem import message
from mirrorc.messages.source_lines import users_stack_level
from mirrorc.torch_internals import dispatch_modes, has_hooks_on_saved_tensors


class CallersModes:
    """Warns of modes of the caller's thread. ``captures``: the step runs a captured backward, not one of plain PyTorch."""

    def __init__(self, *, captures: bool) -> None:
        self._captures = captures
        self._warned: set[str] = set()

    def look(self, *, trains: bool) -> None:
        """``trains``: the step saves values for backward."""
        for kind in dispatch_modes():
            self._warn(
                kind,
                message(
                    f"MC3208: a compiled call was made within {kind}, a TorchDispatchMode, which does not see what devices run",
                    "a mode belongs to a thread, and each device has its own",
                    "use the mode around the plain model, on one device",
                ),
            )
        if trains and has_hooks_on_saved_tensors():
            self._warn(
                "hooks",
                message(
                    "MC3208: a compiled call was made within saved_tensors_hooks, or save_on_cpu, which get nothing of it",
                    "devices keep values for backward in threads of their own",
                    (
                        "enter them in forward, which then runs as plain PyTorch",
                        "memory=mirrorc.Memory(activations='50%') of mirrorc.compile, for a step that keeps less",
                    ),
                ),
            )

        if trains and self._captures and torch.is_anomaly_enabled():
            self._warn(
                "anomalies",
                message(
                    "MC3208: a compiled call was made within detect_anomaly, which sees nothing of its backward",
                    "devices run a program, not autograd's functions",
                    (
                        "mirrorc.compile(..., check_finite=True), which names the gradient that is not finite",
                        "compiler=mirrorc.Compiler(capture='autograd'), whose backward it sees",
                    ),
                ),
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=users_stack_level())
