"""Errors, with remedies, for models that cannot be captured."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.capture.diagnostics.known_failures import INSTALLS_HOOKS, known_failure
from mirrorc.errors import CaptureError
from mirrorc.messages.source_lines import last_users_line, module_of
from mirrorc.torch_internals import JointGraph, failing_node, traced_frames, user_frames


class LoneExampleError(CaptureError):
    """Raised if a torch operator refuses a shard of one example because it normalizes over the examples."""


class UnreadableError(CaptureError):
    """Raised for Python that a tracer cannot follow. In messages, "cannot capture" and the model's name precede ``why``."""

    def __init__(self, refusal: str, why: str) -> None:
        super().__init__(f"{refusal} Or leave forward and backward to plain PyTorch, with capture='autograd'.")
        self.refusal, self.why = refusal, why


class HooksMissingError(CaptureError):
    """Raised if forward would install Hugging Face's hooks for hidden states, which cannot be traced."""


def explain(error: Exception, model_name: str, leaves: Sequence[torch.Tensor] = ()) -> CaptureError:
    where, subject = _place(error)
    text = str(error).lower()
    raised = _RAISED.search(str(error))
    reason = f"{raised[1]}: {raised[3]}" if raised else _reason(str(error)) or type(error).__name__
    known = known_failure(text, traced_frames(error))
    runs_as_pytorch = False
    if known is not None:
        reason, remedy, runs_as_pytorch = known.reason, known.remedy, known.runs_as_pytorch
    elif any(word in text for word in ("data-dependent", "data dependent", ".item()", "nonzero", "symint", "symbool")):
        runs_as_pytorch = True
        remedy = (
            "the captured graph cannot branch on tensor values: use torch.where, compute with tensors "
            "instead of Python numbers, or decide before the step"
        )
    elif raised is not None:
        shapes = ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in leaves)
        where += f" with the tensors of one shard ({shapes})" if shapes else ""
        call = "loss_fn(model(...), target)" if subject == "the loss" else "model(...)"
        remedy = f"give the batch the shapes and dtypes that {subject} takes: {call} fails on one shard, too"
        if "observed exception" in text:
            remedy = f"mend the batch or {subject}: {call} should raise this on one shard, too"
        if "more than 1 value per channel" in text:
            return LoneExampleError(
                f"cannot capture {model_name}{where}: {reason}. Remedy: give the batch, and each part of a PerReplica, two "
                "examples or more: torch refuses one on one device, too."
            )
    elif "share storage" in text or "view input mutations" in text:
        remedy = "give one of the two memory of its own, with .clone(), and write it where it should follow"
    elif "requires_grad_" in text:
        remedy, runs_as_pytorch = "set requires_grad before the step, not inside forward", True
    else:
        remedy, runs_as_pytorch = f"make {subject} traceable, or move it out of forward", True
    refusal = f"cannot capture {model_name}{where}: {reason}. Remedy: {remedy}."
    if runs_as_pytorch:
        return UnreadableError(refusal, f"{where}: {reason}")
    return HooksMissingError(refusal) if known is INSTALLS_HOOKS else CaptureError(refusal)


def _place(error: Exception) -> tuple[str, str]:
    frames, traced = user_frames(error), traced_frames(error)
    recorded = "" if frames else last_users_line(str(error))  # after tracing, the message contains the line
    line = f" at {recorded}" if recorded else ""
    if frames:
        line = f' at {frames[-1].filename}:{frames[-1].lineno} in {frames[-1].name}: "{frames[-1].line}"'
    module, subject = _module(failing_node(error))
    if line:
        return f"{line}, in {module}" if subject == "this module" else line, "this line"
    if module:
        return f" in {module}", subject
    if subject:
        return "", subject
    last = traced[-1] if traced and traced[-1].filename.startswith(torch.__path__[0]) else None
    return f" at {last.filename}:{last.lineno} in {last.name}" if last is not None else "", "the model"


def _module(node: fx.Node | None) -> tuple[str, str]:
    if node is None:
        return "", ""
    modules = node.meta.get("nn_module_stack")
    if not modules:
        return "the loss", "the loss"
    path, kind = list(modules.values())[-1]
    if path.startswith("L['self'].loss_fn"):
        return f"the loss ({kind.__name__})", "the loss"
    name = module_of(node)
    return (f"{name!r} ({kind.__name__})", "this module") if name else ("", "the model")


_RAISED = re.compile(
    r"(?:fake tensor call.*: got|raised exception) (\w+)\((?:\[ConstantVariable\(str: )?(['\"])(.*?)\.?\2\)", re.DOTALL
)
"""An exception of the user's code or torch's, as opposed to a limit of the tracer; torch 2.11 prints its own variables."""


_ADVICE = re.compile(r"Consider annotating your code using torch\._check\*\(\)\.\s*|\s*\(Size-like symbols: none\)")
"""torch's advice about numbers read from tensors, which does not apply to a step."""


def _reason(text: str) -> str:
    text = _ADVICE.sub("", text)
    lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    parts = dict.fromkeys(("Explanation:", "Developer debug context:"), "")
    for line in lines:
        for key in parts:
            if line.startswith(key):
                parts[key] = line.removeprefix(key).strip()
    texts = [lines[0] if lines else "", parts["Explanation:"]]
    if "exception" in texts[0].lower():  # the user's own exception: its text is in the context
        texts.append(parts["Developer debug context:"])
    return ": ".join(dict.fromkeys(part.rstrip(". ") for part in texts if part))


def check_loss(traced: fx.GraphModule, model_name: str) -> None:
    values = traced.graph.output_node().args[0]
    first = values[0] if isinstance(values, tuple | list) and values else None
    check_trained_loss(first.meta.get("example_value") if isinstance(first, fx.Node) else None, model_name)


def check_trained_loss(loss: Any, model_name: str) -> torch.Tensor:
    """Refuses a loss that is not a real scalar tensor with a gradient."""
    loss = _checked_loss(loss, model_name)
    if not loss.requires_grad:
        raise CaptureError(
            f"the loss of {model_name} does not depend on any trainable parameter (its dtype is {loss.dtype}): look for "
            ".detach(), .item(), torch.no_grad() or argmax on the way from the parameters to the loss"
        )
    return loss


def check_evaluated_loss(loss: Any, model_name: str, *, is_from_loss_function: bool) -> None:
    checked = _checked_loss(loss, model_name)
    if checked.dim() and not is_from_loss_function:
        raise CaptureError(
            f"{model_name} returns one number of shape {list(checked.shape)} for a shard, which is its loss, or the output for "
            "a single example: a step cannot tell. Remedy: return a loss as a scalar, as .mean() gives it, and an output in an "
            "object with loss=None; or give compile() a loss_fn"
        )
    if not checked.is_floating_point():
        raise CaptureError(
            f"the loss of {model_name} is {checked.dtype}: that of a batch is a mean over examples, and no whole number. "
            "Remedy: make it one of floating point, with .float()"
        )


def _checked_loss(loss: Any, model_name: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() == 0:
        raise CaptureError(
            f"{model_name} gives no loss: without loss_fn the model must return the loss as a tensor, as the first item of a "
            "tuple, or in a dict or an object with '.loss' (have you passed the labels?); else give compile() a "
            "loss_fn(output, target) that returns it likewise"
        )
    if loss.numel() != 1:
        raise CaptureError(
            f"the loss of {model_name} is no scalar, it has shape {list(loss.shape)}: reduce it, with .mean() or .sum(), and "
            "tell compile() which by loss_reduction"
        )
    if loss.is_complex():
        raise CaptureError(
            f"the loss of {model_name} is a complex number, of which PyTorch has no backward: return its real part, loss.real, "
            "or its size, loss.abs()"
        )
    return loss


def refuse_written_inputs(
    joint: JointGraph, leaf_names: Sequence[str], variable_names: Mapping[str, str], model_name: str
) -> None:
    """Refuses writes to parameters or arguments, and writes to a buffer of a value that requires a gradient."""
    if joint.written_inputs:
        kind, name = joint.written_inputs[0]
        if kind == "buffer":
            raise CaptureError(
                f"forward of {model_name} writes a value that requires a gradient to the buffer {variable_names[name]!r}, "
                "which would keep the graph of this step: in plain PyTorch, backward of the next step that reads it would go "
                "through this one's, and fail. Remedy: write the detached value, or compute with a copy, as in "
                f"{name.rpartition('.')[2]} = self.{name.rpartition('.')[2]}.clone()"
            )
        if kind == "parameter":
            raise CaptureError(
                f"forward of {model_name} writes the parameter {variable_names[name]!r} in place: parameters change in "
                "the optimizer only; make it a buffer, or write it between steps"
            )
        raise CaptureError(
            f"forward of {model_name} writes its argument {leaf_names[int(name)]!r} in place: shards are views of the batch; "
            "clone it first, as in x = x.clone()"
        )
