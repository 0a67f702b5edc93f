"""Warns of modes of the caller's thread that the devices' threads do not have."""

from __future__ import annotations

import warnings

from mirrorc.messages.source_lines import users_stack_level
from mirrorc.torch_internals import dispatch_modes, has_hooks_on_saved_tensors


class CallersModes:
    def __init__(self) -> None:
        self._warned: set[str] = set()

    def look(self, *, trains: bool) -> None:
        """``trains`` says whether the step saves values for backward."""
        for kind in dispatch_modes():
            self._warn(
                kind,
                f"the step was called within {kind}, a TorchDispatchMode, which sees nothing of what devices run: what it "
                "counts, notes or changes leaves the step out. Use it on the plain model, model(x), between steps",
            )
        if trains and has_hooks_on_saved_tensors():
            self._warn(
                "hooks",
                "the step was called within torch.autograd.graph.saved_tensors_hooks (which save_on_cpu is, too): they get "
                "nothing of what the step keeps for backward. Enter them in forward, which then runs as plain PyTorch; or have "
                "the step keep less, with memory=mirrorc.Memory(activations=...)",
            )

    def _warn(self, kind: str, message: str) -> None:
        if kind not in self._warned:
            self._warned.add(kind)
            warnings.warn(message, stacklevel=users_stack_level())
