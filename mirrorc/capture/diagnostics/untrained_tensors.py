"""Finds tensors outside of a step's modules that plain PyTorch would train, but the step does not."""

from __future__ import annotations

import operator
import traceback
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.capture.call.traced_loss import TracedLoss
from mirrorc.capture.diagnostics.python_effects import Note
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import last_users_frame, line_of
from mirrorc.messages.wording import counted, listed
from mirrorc.torch_internals import guards_of, outside_tensors, reading_names, storage_key

_IN_PLACE = {operator.setitem, *(getattr(operator, f"i{name}") for name in ("add", "sub", "mul", "truediv", "pow"))}


def untrained_tensors(
    traced: fx.GraphModule, module: TracedLoss, leaves: Sequence[torch.Tensor], model_name: str
) -> tuple[Note, ...]:
    """A warning about tensors that require a gradient but are not trained. Raises `CaptureError` if one has a grad_fn."""
    untrained = [(n, t) for n, t in outside_tensors(traced, leaves) if t.requires_grad and _leads_to_output(n)]
    untrained = [pair for pair in untrained if id(pair[1]) not in module.trained_elsewhere]
    if not untrained:
        return ()
    words = reading_names(module, guards_of(traced).names, [tensor for _, tensor in untrained])
    names = [word or "a tensor" for word in words]
    for name, (node, tensor) in zip(names, untrained, strict=True):
        if tensor.grad_fn is not None:
            frame = _users_frame(node)
            raise problem(
                CaptureError,
                f"MC2305: forward or loss of {model_name} reads {name}, computed before the call, with a gradient",
                f"no backward runs of what was computed outside of forward and loss ({tensor.grad_fn.name()})",
                ("compute it in forward or in the loss", "value.detach(), if nothing before it is trained"),
                at=line_of(frame) if frame is not None else "",
            )
    if module.takes_tangents:
        raise CaptureError(outside_of_module(model_name, listed(names)))
    frame = _users_frame(untrained[0][0])
    many = f" and {counted(len(names) - 3, 'other')}" if len(names) > 3 else ""
    return (Note.at(frame, untrained_text(model_name, f"{', '.join(names[:3])}{many}")),)


def outside_of_module(model_name: str, what: str) -> str:
    return message(
        f"MC3305: outputs of {model_name} depend on {what}, which would get no gradient",
        "it is no parameter of the module",
        (
            "self.x = nn.Parameter(value) in the module, or an argument of forward",
            "value.detach(), if nothing is to train it",
        ),
    )


def untrained_text(model_name: str, what: str) -> str:
    return message(
        f"MC3305: the loss of {model_name} depends on {what}, to which this step gives no gradient",
        "it is no parameter of the model, nor of a loss that is a module, and no optimizer trains it here",
        (
            "make it a parameter of the model, or of a loss that is a module",
            "if another step trains it, as that of a critic, make that step before this one is first called",
            "requires_grad_(False) on it, if nothing is to train it",
        ),
    )


def _users_frame(node: fx.Node) -> traceback.FrameSummary | None:
    frames = (last_users_frame(user.meta.get("stack_trace") or "") for user in node.users)
    return next((frame for frame in frames if frame is not None), None)


def _leads_to_output(node: fx.Node) -> bool:
    order = {node: place for place, node in enumerate(node.graph.nodes)}
    since, waiting = {node: -1}, [node]  # the position from which on a value depends on the node
    while waiting:
        source = waiting.pop()
        for user in source.users:
            place = order[user]
            if user.op == "output":
                return True
            for reached in [user, *_written_by(user)] if place > since[source] else ():
                if _requires_gradient(reached.meta.get("example_value")) and place < since.get(reached, len(order)):
                    since[reached] = place
                    waiting.append(reached)
    return False


def _written_by(node: fx.Node) -> list[fx.Node]:
    name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", "")
    is_in_place = node.target in _IN_PLACE or (name.endswith("_") and not name.endswith("__"))
    memory = _memory(node.args[0]) if (is_in_place or node.kwargs.get("inplace")) and node.args else None
    return [other for other in node.graph.nodes if _memory(other) == memory] if memory is not None else []


def _memory(node: Any) -> int | None:
    value = node.meta.get("example_value") if isinstance(node, fx.Node) else None
    return storage_key(value) if isinstance(value, torch.Tensor) and value.layout is torch.strided else None


def _requires_gradient(value: Any) -> bool:
    if isinstance(value, tuple | list):
        return any(_requires_gradient(item) for item in value)
    return isinstance(value, torch.Tensor) and value.requires_grad
