"""Errors of failed steps, with device, operation and source line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import fx

from mirrorc.analysis.gradients.eager_gradients import taken_gradients
from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.errors import ExecutionError, MirrorcError, NonFiniteError
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Synchronization
from mirrorc.messages.problem import problem, with_line
from mirrorc.messages.source_lines import raising_line, source_line
from mirrorc.runtime.codegen.graph_function import failing_nodes
from mirrorc.runtime.communication import Aborted, StepStoppedError

_UNCHANGED = "No parameter was changed"
_JOINED = "thread.join() of the thread that makes calls, before close()"
_OF_OPTIMIZER = (
    "mend the optimizer's step(), which is called without a closure",
    "if it evaluates the model anew, as SAM does: two steps, see two-evaluations in docs/migrate/from-pytorch-loop.md",
)


def explain_failure(
    program: Program, failures: Mapping[int, BaseException], has_committed: bool, torn: str = ""
) -> MirrorcError:
    """The error to raise for a failed call.

    Args:
        failures: exceptions by replica; `Aborted` for a replica that another one's failure has stopped.
    """
    devices = program.devices
    replica, error = next(((r, e) for r, e in failures.items() if not isinstance(e, Aborted)), (-1, None))
    if error is None:
        return problem(
            StepStoppedError, "MC5003: the call was stopped by close() in another thread", fix=_JOINED, now=_UNCHANGED
        )
    nodes = list(failing_nodes(error.__traceback__))
    where = " > ".join(str(node.target) if node.op == "call_module" else _name(node) for node in nodes)
    line = next((text for node in reversed(nodes) if (text := source_line(node))), "")
    runs_plain = any(_runs_plain(program, node) for node in nodes)
    runs_optimizer = bool(nodes) and nodes[-1].target is ops.step_optimizer
    if not line and (runs_plain or runs_optimizer):
        line = raising_line(error)
    place = f"replica {replica} on {devices[replica]}{f' in {where}' if where else ''}"
    state = f"The update had begun. {_possible_damage(program, torn)}" if has_committed else _UNCHANGED
    explained: MirrorcError
    if isinstance(error, NonFiniteError):  # of all replicas
        explained = NonFiniteError(with_line(str(error), "now", state))
    elif isinstance(error, MirrorcError):
        text = with_line(str(error), "at", f"{place}{f', {line}' if line else ''}")
        explained = type(error)(with_line(text, "now", state))
    else:
        fix = _OF_OPTIMIZER if runs_optimizer else _advice([] if runs_plain else nodes, line)
        what = f"{place} raised {type(error).__name__}: {error}"
        explained = problem(ExecutionError, f"MC5001: {what}", "", fix, at=line, now=state)
    explained.__cause__ = error
    return explained


def _runs_plain(program: Program, node: fx.Node) -> bool:
    is_region = node.op == "call_module" and node.target in program.regions
    body = program.regions[str(node.target)].graph_module.graph if is_region else None
    return node.target in OPAQUE or (body is not None and bool(taken_gradients(body)))


def _advice(nodes: Sequence[fx.Node], line: str) -> tuple[str, ...]:
    if nodes and nodes[-1].target is ops.update:
        return ("print(optimizer.param_groups), which each step reads anew",)
    is_opaque = bool(nodes) and nodes[-1].op == "call_module"
    hint = ("compiler=mirrorc.Compiler(backend='eager'), which names the operator exactly",) if is_opaque else ()
    return (f"check the batch of this call{' and that line' if line else ''}", *hint)


def note_if_torn(error: BaseException, program: Program, has_committed: bool, torn: str = "") -> None:
    if has_committed:
        error.add_note(f"mirrorc's call was interrupted when the update had begun: {_possible_damage(program, torn)}")


def _possible_damage(program: Program, torn: str) -> str:
    if torn:
        return f"Parameters are between those before and those after this step: {torn}. Load a checkpoint of model and optimizer."
    if program.updates:
        return "Parameters and the optimizer's state may have been updated in part, so load a checkpoint."
    writes_buffers = any(v.synchronization is Synchronization.PER_REPLICA for v in program.variables.values())
    buffers = "buffers that forward writes may have been written in part"
    if not program.accumulates:
        changed = "parameter or gradient of yours" if program.leaves_gradients else "parameter"
        return (
            f"No {changed} was changed, but {buffers}." if writes_buffers else "It writes nothing: nothing was changed."
        )
    gradients = "the gradients that step.accumulate() has kept may be incomplete: drop them with step.zero_grad()"
    return f"No parameter was changed, but {gradients}{f'; {buffers}' if writes_buffers else ''}."


def _name(node: fx.Node) -> str:
    text = str(node.target)
    return text if text.startswith("aten.") else str(getattr(node.target, "__name__", text))
