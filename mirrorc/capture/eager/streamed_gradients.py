"""Returns each gradient of a run as soon as backward has computed it."""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Set

import torch

from mirrorc.capture.eager.carried_state import CarriedState
from mirrorc.capture.eager.eager_run import Run
from mirrorc.capture.eager.run_exchange import RunExchange
from mirrorc.custom_ops.eager_calls import UsedParameters
from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem


class RunGradients:
    """Runs one backward, and returns each gradient when it is complete.

    A gradient is complete when torch calls its parameter's post-accumulate hook. The gradient of a ``late`` parameter
    is complete at the end of backward, because it may come in parts or from a nested backward.

    Attributes:
        arrived: indices of parameters and arguments in the order of their gradients; repeated for each addition to a
            gradient.
    """

    def __init__(
        self,
        run: Run,
        backward: Callable[[], None],
        late: Set[int],
        model_name: str,
        carried: CarriedState,
        used: UsedParameters,
    ) -> None:
        self.of, self._backward, self._late, self._model_name = run, backward, late, model_name
        self._carried, self.used = carried, used
        self.arrived: list[int] = []
        self.has_ended = False
        self._there, self._taken, self._has_begun = set(run.unreached) - late, set[int](), False
        self._on_gradient: Callable[[], object] = lambda: None
        self._thread = 0

    @property
    def may_wait(self) -> bool:
        """False if other replicas wait for this backward: it draws random numbers, exchanges values, or runs alone
        because of its state.
        """
        others_wait = self.of.stream is not None or isinstance(self.of.exchange, RunExchange)
        return not (others_wait or self._carried.is_advanced)

    def has(self, place: int) -> bool:
        """True if backward has begun and the gradient is final, or will not come."""
        return self.has_ended or (self._has_begun and place in self._there)

    def run(self, on_gradient: Callable[[], object] = lambda: None) -> None:
        assert not self._has_begun, "a run has one backward"
        self._has_begun, self._on_gradient, self._thread = True, on_gradient, threading.get_ident()
        hooks = [
            tensor.register_post_accumulate_grad_hook(functools.partial(self._note, place))
            for place, tensor in enumerate(self.of.inputs)
            if tensor.requires_grad
        ]
        try:
            self._backward()
        finally:
            self._on_gradient = lambda: None
            for hook in hooks:  # the hooks refer to this object
                hook.remove()
        self.has_ended = True

    def _note(self, place: int, _: torch.Tensor) -> None:
        """A post-accumulate hook. It calls on_gradient only on a CPU: for a GPU, torch runs hooks in another thread."""
        if place in self._taken:
            raise problem(
                ExecutionError,
                f"MC2602: a gradient of shape {list(self.input_at(place).shape)} changed after it had been sent",
                f"something in the backward of {self._model_name} calls backward() itself, and did not in the first call",
                "return the gradients from your autograd.Function instead of calling .backward() in it",
            )
        self.arrived.append(place)
        if place not in self._late:
            self._there.add(place)
        if threading.get_ident() == self._thread:
            self._on_gradient()

    def input_at(self, place: int) -> torch.Tensor:
        return self.of.inputs[place]

    def take(self, place: int) -> torch.Tensor | None:
        """Removes a gradient; None if the parameter or argument is unused. Runs backward if it has not begun."""
        if not self._has_begun:
            self.run()
        assert self.has(place), "a gradient is taken when it is there"
        tensor = self.input_at(place)
        gradient, tensor.grad = tensor.grad, None
        self._taken.add(place)
        return gradient
