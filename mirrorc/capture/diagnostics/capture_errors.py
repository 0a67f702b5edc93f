"""Errors, with remedies, for models that cannot be captured."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.capture.diagnostics.known_failures import INSTALLS_HOOKS, known_failure
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import message, problem, with_line
from mirrorc.messages.source_lines import last_users_line, line_of, module_of, source_line
from mirrorc.torch_internals import JointGraph, failing_node, traced_frames, user_frames

EVEN_BATCHES = "DataLoader(..., batch_size=64, drop_last=True), with a size that the number of devices divides"
TWO_EXAMPLES = (
    "DataLoader(..., drop_last=True)",
    "give each device two examples or more, in each part of a PerReplica, too",
)


class LoneExampleError(CaptureError):
    """Raised if a torch operator refuses a shard of one example, or returns nan, because it normalizes over examples."""


AS_PLAIN_PYTORCH = "compiler=mirrorc.Compiler(capture='autograd'), which runs it as plain PyTorch"


class UnreadableError(CaptureError):
    """Raised for Python code that only plain PyTorch can run, not a tracer. ``why`` is the reason, without a fix."""

    def __init__(self, refusal: str, why: str, at: str = "") -> None:
        super().__init__(with_line(refusal, "fix", AS_PLAIN_PYTORCH))
        self.why, self.at = why, at


class RaisedError(CaptureError):
    """Raised for an exception of the user's code: ``reason`` is its type and text, ``line`` the user's file and line."""

    reason = line = ""


class RaisedInTraceError(RaisedError, UnreadableError):
    """Raised for an exception while tracing. ``of_plain`` describes the exception of plain PyTorch at the same line."""

    of_plain: Callable[[str], CaptureError]


class StateError(UnreadableError):
    """Raised for Python state that forward reads and changes. Plain PyTorch can continue from this state."""


class NoGradientError(CaptureError):
    """Raised for the forward of a module whose outputs need no gradient."""


def refuse_complex(differentiable: Mapping[str, torch.Tensor], model_name: str) -> None:
    for name, value in differentiable.items():
        if value.is_complex():
            raise problem(
                CaptureError,
                f"MC2203: output {name!r} of {model_name} is complex, and gets no gradient",
                "a program of backward takes real gradients",
                "torch.view_as_real(output) at the end of forward",
            )


class HooksMissingError(CaptureError):
    """Raised if forward would install Hugging Face's hooks for hidden states, which cannot be traced."""


def explain(error: Exception, model_name: str, leaves: Sequence[torch.Tensor] = ()) -> CaptureError:
    at, subject = _place(error)
    text = str(error).lower()
    raised = _RAISED.search(str(error))
    if (known := known_failure(text, traced_frames(error))) is not None:
        return cannot_trace(
            model_name, known.reason, known.remedy, at, known.runs_as_pytorch, is_of_hooks=known is INSTALLS_HOOKS
        )
    reason = _reason(str(error)) or type(error).__name__
    if any(word in text for word in ("data-dependent", "data dependent", ".item()", "nonzero", "symint", "symbool")):
        fix = "torch.where(condition, a, b) in place of if, tensors in place of .item(), or decide before the call"
        return cannot_trace(model_name, reason, fix, at, True, code="MC2102")
    if raised is not None:
        return _raised_in_trace(model_name, raised[1], raised[3], at, subject, shapes_of(leaves))
    if "share storage" in text or "view input mutations" in text:
        fix = "value.clone() for one of the two, and write both"
        return cannot_trace(model_name, reason, fix, at)
    if "requires_grad_" in text:
        return cannot_trace(
            model_name, reason, "value.requires_grad_() in your loop, before the call, not in forward", at, True
        )
    return cannot_trace(model_name, reason, f"make {subject} traceable, or move it out of forward", at, True)


def cannot_trace(
    model_name: str,
    why: str,
    fix: str,
    at: str = "",
    runs_as_pytorch: bool = False,
    *,
    code: str = "MC2101",
    is_of_hooks: bool = False,
) -> CaptureError:
    refusal = message(f"{code}: cannot capture {model_name} as one graph", why, fix, at=at)
    if runs_as_pytorch:
        return UnreadableError(refusal, f"{f'{at}: ' if at else ''}{why}")
    return HooksMissingError(refusal) if is_of_hooks else CaptureError(refusal)


def shape_depends_on_values(model_name: str, at: str) -> CaptureError:
    why = "the shape of a tensor depends on values, and shapes of a graph are fixed"
    fix = "torch.where(mask, x, 0) in place of x[mask], or choose elements before the call"
    return cannot_trace(model_name, why, fix, at, runs_as_pytorch=True)


def shapes_of(leaves: Sequence[torch.Tensor]) -> str:
    return ", ".join(f"{str(leaf.dtype).removeprefix('torch.')}{list(leaf.shape)}" for leaf in leaves)


def _raised_in_trace(model_name: str, kind: str, text: str, at: str, subject: str, shapes: str) -> CaptureError:
    """Code may behave differently while it is traced, by ``torch.compiler.is_compiling()``."""
    reason = f"{kind}: {text}"
    error = raised_by_user(model_name, reason, at, subject, shapes)
    if not isinstance(error, RaisedError):
        return error
    refusal = message(
        f"MC2103: {model_name} or its loss raised {reason}",
        f"it was raised in a trace of one shard{f', {shapes}' if shapes else ''}",
        _fix_of_batch(subject),
        at=at,
    )
    in_trace = RaisedInTraceError(refusal, f"{f'{at}: ' if at else ''}it raises {reason} while it is traced")
    in_trace.line = error.line
    in_trace.of_plain = functools.partial(raised_by_user, model_name, at=at, subject=subject, shapes=shapes)
    return in_trace


def _fix_of_batch(subject: str) -> str:
    call = "loss_fn(model(...), target)" if subject == "the loss" else "model(...)"
    return f"try {call} on one shard, with the shapes, dtypes and values that {subject} takes"


def raised_by_user(
    model_name: str, reason: str, at: str = "", subject: str = "the model", shapes: str = "", fix: str = ""
) -> CaptureError:
    """The error for an exception that plain PyTorch raises, too."""
    if "more than 1 value per channel" in reason:
        return problem(
            LoneExampleError,
            f"MC2104: {model_name} normalizes over the examples of a shard, and this shard has a single one",
            f"torch refuses a single example on one device, too: {reason}",
            TWO_EXAMPLES,
            at=at,
        )
    error = problem(
        RaisedError,
        f"MC2103: {model_name} or its loss raised {reason}",
        f"plain PyTorch raises the same on one shard{f', {shapes}' if shapes else ''}",
        fix or _fix_of_batch(subject),
        at=at,
    )
    is_torchs = at.startswith(torch.__path__[0])
    error.reason, error.line = reason, "" if is_torchs else "".join(_LINE.findall(at)[:1])
    return error


_LINE = re.compile(r"[^/]*\.py:\d+")


def changed_before_backward(error: Exception, model_name: str, graph: fx.Graph | None = None) -> CaptureError | None:
    """The error for a tensor that backward needs and forward modifies in place; None for other errors.

    It names the line of the last in-place operator in ``graph``.
    """
    changed = _CHANGED.search(str(error))
    if changed is None:
        return None
    names = [(str(getattr(node.target, "__name__", node.target)), node) for node in graph.nodes] if graph else []
    lines = [source_line(node) for name, node in names if name in _CHANGING or name.strip("_") == name[:-1]]
    at = lines[-1] if lines else ""
    text = message(
        f"MC2103: {model_name} or its loss changes a tensor in place that backward needs as it was",
        f"torch's autograd says {changed[0]}",
        ("value = value + 1, in place of value.add_(1)", "change a copy, value.clone()"),
        at=at,
    )
    return (
        CaptureError(text) if graph is None else UnreadableError(text, f"{at}: torch's autograd says {changed[0]}", at)
    )


_CHANGING = frozenset({"setitem", "iadd", "isub", "imul", "itruediv", "ipow"})  # and all that end with _
_CHANGED = re.compile(r"\[[\w.]+ \[[\d, ]*\]\].* is at version \d+; expected version \d+")


def _place(error: Exception) -> tuple[str, str]:
    frames, traced = user_frames(error), traced_frames(error)
    recorded = "" if frames else last_users_line(str(error))  # after tracing, the message contains the line
    line = line_of(frames[-1]) if frames else recorded
    module, subject = _module(failing_node(error))
    if line:
        return f"{line}, in {module}" if subject == "this module" else line, "this line"
    if module or subject:
        return module, subject
    last = traced[-1] if traced and traced[-1].filename.startswith(torch.__path__[0]) else None
    return f"{last.filename}:{last.lineno} in {last.name}" if last is not None else "", "the model"


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
"""Matches exceptions of the user's code or torch, not limits of the tracer. Torch 2.11 prints tracer variables."""


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
    loss = _checked_loss(loss, model_name)
    if not loss.requires_grad:
        raise problem(
            CaptureError,
            f"MC2203: the loss of {model_name} does not depend on any trainable parameter",
            f"it is {loss.dtype}, without a gradient",
            "remove .detach(), .item(), torch.no_grad() or argmax between the parameters and the loss",
        )
    return loss


def check_evaluated_loss(loss: Any, model_name: str, *, is_from_loss_function: bool) -> None:
    checked = _checked_loss(loss, model_name)
    if checked.dim() and not is_from_loss_function:
        raise problem(
            CaptureError,
            f"MC2202: {model_name} returns one number of shape {list(checked.shape)}, a loss or the output for one example",
            "a step cannot tell which",
            (
                "return a loss as a scalar, as .mean() gives it, and an output in an object with loss=None",
                "mirrorc.compile(..., loss_fn=...)",
            ),
        )
    if not checked.is_floating_point():
        raise problem(
            CaptureError,
            f"MC2204: the loss of {model_name} is {checked.dtype}",
            "the loss of a batch is a mean over examples, which is no whole number",
            "loss.float()",
        )


def _checked_loss(loss: Any, model_name: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() == 0:
        raise problem(
            CaptureError,
            f"MC2201: {model_name} returns no loss, and there is no loss_fn",
            "without loss_fn a model must return its loss: a tensor, a tuple's first item, or '.loss' of a dict or an object",
            (
                "step(x, labels=y), for a model that computes its loss",
                "mirrorc.compile(..., loss_fn=...), a function loss_fn(output, target)",
            ),
        )
    if loss.numel() != 1:
        reduced = ("loss.mean()", "loss.sum(), and mirrorc.compile(..., loss_reduction='sum')")
        first = (
            "return loss, logits, if this is an output and the loss comes after it: the first item is the loss",
            "mirrorc.compile(lambda *batch: model(*batch)[1], modules=[model], ...), for a model that you leave as it is",
        )
        raise problem(
            CaptureError,
            f"MC2202: the loss of {model_name} is no scalar, it has shape {list(loss.shape)}",
            fix=(*first, *reduced) if loss.dim() > 1 else (*reduced, first[0]),
        )
    if loss.is_complex():
        raise problem(
            CaptureError,
            f"MC2204: the loss of {model_name} is a complex number",
            "PyTorch has no backward of it",
            ("loss.real", "loss.abs()"),
        )
    return loss


def written_parameter(model_name: str, name: str) -> CaptureError:
    return problem(
        CaptureError,
        f"MC2304: forward or loss of {model_name} writes the parameter {name!r} in place",
        "parameters change in the optimizer only",
        ("self.register_buffer(...), in place of the parameter", "write it in your loop, between calls"),
    )


def sparse_gradient(name: str, model_name: str, subject: str) -> str:
    return message(
        f"MC2501: the gradient of {name!r} in {model_name} is sparse",
        f"{subject} are dense",
        "nn.Embedding(..., sparse=False), or the same of F.embedding",
    )


def refuse_written_inputs(
    joint: JointGraph, leaf_names: Sequence[str], variable_names: Mapping[str, str], model_name: str
) -> None:
    if joint.written_inputs:
        kind, name = joint.written_inputs[0]
        if kind == "buffer":
            name = variable_names[name].rpartition(".")[2]
            raise problem(
                CaptureError,
                f"MC2304: forward of {model_name} writes a value that requires a gradient to the buffer {name!r}",
                "the buffer would keep the graph of this call, and backward of the next one would fail in plain PyTorch",
                (
                    f"write the detached value, self.{name}.copy_(value.detach())",
                    f"compute with a copy, {name} = self.{name}.clone()",
                ),
            )
        if kind == "parameter":
            raise written_parameter(model_name, variable_names[name])
        raise problem(
            CaptureError,
            f"MC2304: forward or loss of {model_name} writes its argument {leaf_names[int(name)]!r} in place",
            "shards are views of the batch",
            f"clone it first, {leaf_names[int(name)]} = {leaf_names[int(name)]}.clone()",
        )
