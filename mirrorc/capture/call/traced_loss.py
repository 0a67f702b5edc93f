"""A model, alone or with its loss, as one module for the tracer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Set
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.call_arguments import Structure, paths_of_containers, rebuilding
from mirrorc.capture.call.changing_inputs import ChangingNumbers
from mirrorc.torch_internals import forward_signature

BufferPath = tuple[tuple[str, ...], str]


class BuffersAssigned(Exception):
    """Raised if a trace assigns buffers: a `TracedLoss` must know them before the trace."""

    def __init__(self, paths: Sequence[BufferPath]) -> None:
        super().__init__()
        self.paths = paths


class TracedLoss(nn.Module):
    """A module whose forward computes the loss from a flat list of tensors.

    If ``keeps_outputs``, forward also returns the outputs of the model, and those beside the loss of ``loss_fn``.

    Attributes:
        plain: `Call.plain` of the current call; set before guards are checked.
        trained_elsewhere: ids of the parameters that other open steps train.
        data: the tensors of each shard or microbatch; None if the front end needs no data.
        takes_tangents: backward begins with the caller's gradients of outputs.
    """

    trains = True
    takes_tangents = False
    differentiated: frozenset[int] = frozenset()

    def __init__(
        self,
        model: nn.Module,
        loss_fn: Callable[..., Any] | None,
        structure: Structure,
        plain: Mapping[str, Any] | None = None,
        *,
        keeps_outputs: bool = False,
    ) -> None:
        super().__init__()
        self.numbers = ChangingNumbers(can_be_inputs=False)
        self.trained_elsewhere: Set[int] = frozenset()
        self.drawn: list[int | float] = []
        self.assigned: tuple[BufferPath, ...] = ()
        self.carried: Any = None
        self.data: Sequence[Sequence[torch.Tensor]] | None = None
        self.model = model
        self.loss_fn = loss_fn
        self.structure, self.rebuilt = structure, rebuilding(structure)
        self.plain = plain or {}
        self.keeps_outputs = keeps_outputs
        self.training = model.training  # modes of the model's own modules stay as the user set them

    def forward(self, *leaves: torch.Tensor) -> Any:
        if not self.assigned:
            return self.results(leaves)
        places = _places_of(self, self.assigned)  # `self` stays a plain local: Dynamo's sources read it
        former = [buffers[name] for buffers, name in places]
        for (buffers, name), buffer in zip(places, former, strict=True):
            buffers[name] = buffer.clone()  # backward may need the former value
        results = self.results(leaves)
        for (buffers, name), buffer in zip(places, former, strict=True):
            buffers[name] = buffer.copy_(buffers[name])
        return results

    def results(self, leaves: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self.rebuilt(self.structure, leaves, self.plain)
        if self.loss_fn is not None:
            target = kwargs.pop("target")
            outputs = self.model(*args, **kwargs)
            result = self.loss_fn(outputs, target)
            if not isinstance(result, torch.Tensor):
                outputs = (outputs, beside_loss(result))
        else:
            result = outputs = self.model(*args, **kwargs)
        loss = loss_in(result)
        loss = loss if isinstance(loss, torch.Tensor) else torch.empty(0)  # empty: there is no loss, see `check_loss`
        return (loss, outputs) if self.keeps_outputs else loss

    def containers(self) -> list[str]:
        parameters = forward_signature(self.model).parameters.values()
        names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
        return paths_of_containers(self.structure, names)


def _places_of(root: nn.Module, paths: Sequence[BufferPath]) -> list[tuple[dict[str, Any], str]]:
    return [(_buffers_of(root, modules), name) for modules, name in paths]


def _buffers_of(module: nn.Module, path: Sequence[str]) -> dict[str, Any]:
    for name in path:
        module = module._modules[name]  # type: ignore[assignment]
    return module._buffers


def loss_in(result: Any) -> Any:
    """The loss in a result: a tensor itself, an item or attribute ``loss``, or the first of several items; else None."""
    if isinstance(result, torch.Tensor):
        return result
    if isinstance(result, dict):
        return result.get("loss")
    if hasattr(result, "loss"):
        return result.loss
    return result[0] if isinstance(result, tuple | list) and len(result) > 0 else None


def beside_loss(result: Any) -> Any:
    """The outputs in a loss function's result: the item or items after the loss, or the whole object."""
    if type(result) is not tuple and type(result) is not list:
        return result
    return result[1] if len(result) == 2 else tuple(result[1:])


class TracedEvaluation(TracedLoss):
    """A forward that returns loss and outputs, traced without gradients.

    A missing loss is an empty tensor. Without a loss, outputs are returned; else only if requested.
    """

    trains = False

    def __init__(
        self, model: nn.Module, loss_fn: Any, structure: Structure, *plain: Any, keeps_outputs: bool = False
    ) -> None:
        super().__init__(model, loss_fn, structure, *plain, keeps_outputs=True)  # forward returns a pair in any case
        self._wants_outputs = keeps_outputs
        self.needs_loss = loss_fn is not None and any(name == "target" for name, _ in structure[1])

    def results(self, leaves: Sequence[torch.Tensor]) -> Any:
        args, kwargs = self.rebuilt(self.structure, leaves, self.plain)
        target = kwargs.pop("target") if self.needs_loss else None
        outputs = self.model(*args, **kwargs)
        loss = None
        if self.needs_loss:
            result = self.loss_fn(outputs, target)  # type: ignore[misc]
            if not isinstance(result, torch.Tensor):
                outputs = (outputs, beside_loss(result))
            loss = loss_in(result)
        elif self.loss_fn is None:
            loss = loss_in(outputs)
            if isinstance(loss, torch.Tensor) and loss.dim() > 0 and loss.numel() != 1:
                loss = None
        if not isinstance(loss, torch.Tensor):
            return torch.empty(0), outputs
        return loss, outputs if self._wants_outputs else None


class TracedForward(TracedLoss):
    """A forward that returns outputs. Backward begins with their gradients: its loss is outputs times these."""

    takes_tangents = True

    def results(self, leaves: Sequence[torch.Tensor]) -> Any:
        return _outputs_alone(self, leaves)


class TracedForwardAlone(TracedEvaluation):
    """A forward that returns outputs, traced without gradients."""

    def results(self, leaves: Sequence[torch.Tensor]) -> Any:
        return _outputs_alone(self, leaves)


def _outputs_alone(call: TracedLoss, leaves: Sequence[torch.Tensor]) -> tuple[torch.Tensor, Any]:
    args, kwargs = call.rebuilt(call.structure, leaves, call.plain)
    model: nn.Module = call.model
    return torch.empty(0), model(*args, **kwargs)
