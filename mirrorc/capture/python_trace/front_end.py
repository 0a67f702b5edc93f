"""The front end that runs forward, loss and backward once in Python, and records their operators with make_fx."""

from __future__ import annotations

import contextlib
import linecache
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from mirrorc.capture.call.traced_outputs import TracedOutputs
from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.side_effects import Note
from mirrorc.capture.eager.trial_run import notes_on_passing
from mirrorc.capture.front_ends.front_end import FrontEnd, Traced
from mirrorc.capture.model.refused_modules import refuse_scripts
from mirrorc.capture.python_trace.call_observer import ForeignCall
from mirrorc.capture.python_trace.recorder import recorded, refusal
from mirrorc.capture.python_trace.retrace_guards import TraceGuards, types_of
from mirrorc.errors import CaptureError

_REMARK = (
    "forward and loss ran in Python when they were traced (capture='trace'), and do not run in steps. What their code can reach "
    "is watched, and what cannot be watched is refused; the calls 2, 3, 12, 48, ... of a kind are traced again and compared. Not "
    "seen is what functions of torch and numpy read besides their arguments"
)
_SAME = "have forward and loss do the same in each call, and pass what changes as an argument"

logger = logging.getLogger(__name__)


class TraceFrontEnd(FrontEnd):
    """Captures the operators of one run in Python on tensors without values, for code that Dynamo cannot read.

    Control flow that depends on data is refused, and so is what Python would leave behind, and what it reads that nothing can
    watch.
    """

    name = "trace"
    guards_plain_values = True
    traces_evaluations = True
    words = "as graphs of what Python did when it was traced"

    def trace(
        self,
        stack: contextlib.ExitStack,
        call: TrainingCall,
        leaves: Sequence[torch.Tensor],
        decompositions: Mapping[Any, Callable[..., Any]],
    ) -> Traced:
        what = type(call.model).__name__
        refuse_scripts(call, what)
        kind = type(call), types_of(leaves)
        why_not = call.history.why_not(kind)
        if why_not:
            raise refusal(what, "", why_not, _SAME)
        found = recorded(call, leaves, decompositions, what)
        guards = TraceGuards(found, call, leaves, decompositions)
        call.history.note(kind, guards)
        notes = (*notes_on_passing(set(found.trace.passing), what), *_notes_on_told(found.told, what))
        return Traced(found.trace.joint, guards, notes, found.trace.outputs, (_REMARK,))

    def trace_outputs(self, call: TrainingCall, leaves: Sequence[torch.Tensor]) -> TracedOutputs | None:
        """Traces a call once more."""
        try:
            return recorded(call, leaves, {}, type(call.model).__name__).trace.outputs
        except CaptureError as error:
            logger.debug("no trace for another number of examples", exc_info=error)
            return None


def _notes_on_told(told: Sequence[ForeignCall], what: str) -> list[Note]:
    """Notes on what is printed, once for each line of the user's; libraries say such things once, if at all."""
    return [
        Note(
            f"{call.name} in {what} ran while the step was traced: a captured step does not call it "
            f"({linecache.getline(call.filename, call.lineno).strip()}). Call it between steps",
            call.filename,
            call.lineno,
        )
        for call in told
        if "site-packages" not in call.filename
    ]
