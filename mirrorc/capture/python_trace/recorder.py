"""Records a run of forward, loss and backward, and refuses those that a step could not stand for."""

from __future__ import annotations

import contextlib
import logging
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from types import CodeType
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.errors import HooksMissingError, LoneExampleError, UnreadableError
from mirrorc.capture.eager.rng_streams import generator_states
from mirrorc.capture.eager.run_outputs import UnreadableOutputError
from mirrorc.capture.eager.shared_effects import SharedEffectError, refused_effects
from mirrorc.capture.model.hf_output_hooks import HOOKS_ARE_INSTALLED
from mirrorc.capture.model.transient_attributes import AssignedAttributeError, Attribute, ReadBeforeAssignedError
from mirrorc.capture.python_trace.bytecode_names import globals_of, names_of
from mirrorc.capture.python_trace.call_observer import ForeignCall, PythonCalls
from mirrorc.capture.python_trace.make_fx_trace import PythonTrace, record
from mirrorc.capture.python_trace.object_guards import PythonState
from mirrorc.capture.python_trace.reflective_objects import WatchedWhole
from mirrorc.capture.python_trace.trace_diff import GraphListing
from mirrorc.errors import CaptureError
from mirrorc.torch_internals import (
    RefusedRunError,
    SparseLookupError,
    is_data_dependent,
    is_users_file,
    make_what_torch_makes_once,
    quiet_fake_tensors,
)

_MOST_RUNS = 5  # until all code that runs is known
_WITHOUT_NAMES = frozenset(
    f"{dot}{name}"
    for dot in ("", ".")
    for name in (
        *("attrgetter", "methodcaller", "getattr_static", "getmembers"),
        *("__globals__", "f_globals", "f_locals", "cell_contents", "import_module", "currentframe"),
    )
)
_DATA = "it goes by values of data, which a trace has not"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Recorded:
    """A trace, and what was seen meanwhile.

    Attributes:
        trace: what Python did.
        state: watches what it may have read.
        listing: what the trace does, line by line.
        changed: the names of what it changes once, and what leads to the same graph then.
        told: what it has called that is heard, such as ``print``.
    """

    trace: PythonTrace
    state: PythonState
    listing: GraphListing
    changed: frozenset[str]
    told: tuple[ForeignCall, ...]


def recorded(
    call: TrainingCall,
    leaves: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    what: str,
    *,
    passing: Set[Attribute] = frozenset(),
    may_change: Set[str] = frozenset(),
) -> Recorded:
    """A trace of a call; what it changes in Python is put back.

    Python may change what leads the next trace to the same graph, and what that does not change again, as libraries note once in
    their configurations what they would find out anew.

    Args:
        call, leaves, decompositions: see `FrontEnd.trace`.
        what: the name of the model.
        passing: attributes that forward is known to assign before it reads them.
        may_change: the names of what an earlier trace has changed so.

    Raises:
        CaptureError: the model cannot be traced, or it has no loss.
    """
    for module in call.modules():
        if isinstance(module, nn.SyncBatchNorm) and (module.training or module.running_mean is None):
            raise refusal(what, "", "it has a SyncBatchNorm in train mode", "compile it with capture='dynamo'")
    with _explained(what):

        def run(state: PythonState, calls: PythonCalls | None = None) -> PythonTrace:
            return _watched(call, leaves, decompositions, state, what, passing, calls or PythonCalls())

        found, state, calls, whole = _observed(call, run)
        try:
            _refuse_foreign(calls, what)
            listing, changed = GraphListing.of(found.joint), frozenset(state.changed())
            new = sorted(changed - may_change)
            if new:
                later = PythonState(call, calls.codes, made_names=calls.made_names.found, whole=whole)
                try:
                    again = run(later)
                    lasts = later.changed() or listing.difference(GraphListing.of(again.joint))
                finally:
                    later.put_back()
                if lasts:
                    raise RefusedRunError(f"it changes {new[0]!r}, which steps would not do again")
        finally:
            state.put_back()
        _refuse_untold(call, calls, found.passing)
        reached = PythonState(call, calls.codes, calls.names, found.passing, whole=whole)
        if reached.unwatched:
            raise RefusedRunError(f"it reads {reached.unwatched[0]}, which cannot be watched")
        return Recorded(found, reached, listing, changed, tuple(calls.told))


def _observed(
    call: TrainingCall, run: Callable[[PythonState, PythonCalls], PythonTrace]
) -> tuple[PythonTrace, PythonState, PythonCalls, WatchedWhole]:
    """A trace whose code was all known before it ran, so that what it reads was watched from the beginning."""
    known: dict[CodeType, dict[str, Any]] = {}
    made: set[str] = set()
    whole = WatchedWhole()
    make_what_torch_makes_once()
    for _ in range(_MOST_RUNS):
        state, calls = PythonState(call, known, made_names=made, whole=whole), PythonCalls()
        try:
            found = run(state, calls)
        except BaseException:
            calls.made_names.undo()
            state.put_back()
            raise
        missing, read = state.missing(calls.codes), calls.whole.found()
        if not missing and made.issuperset(calls.made_names.found) and whole >= read:
            return found, state, calls, whole
        calls.made_names.undo()
        state.put_back()
        made |= calls.made_names.found
        whole |= read
        known.update({code: calls.codes[code] for code in missing})
    raise RefusedRunError("it runs other code in each call")


def _refuse_untold(call: TrainingCall, calls: PythonCalls, passing: Set[Attribute]) -> None:
    """Refuses code that reads attributes without naming them, where it does not tell of what, or reads what does not last."""
    if unnamed := sorted(calls.names & _WITHOUT_NAMES):
        by = unnamed[0].removeprefix(".")
        raise RefusedRunError(f"it reads attributes by {by!r}{_where_named(by, calls)}, which does not tell which")
    if calls.whole.untold is not None:
        words, code = calls.whole.untold
        raise RefusedRunError(f"it reads attributes by {words}{_where(code)}, which cannot be watched")
    modules, whole = list(call.modules()), calls.whole.found()
    for place, name in sorted(passing):
        if whole.has_module(type(modules[place])):
            raise RefusedRunError(
                f"it assigns the attribute {name!r} of a module, and reads all attributes of such modules"
            )


def _where_named(name: str, calls: PythonCalls) -> str:
    """The function that names something, for a message."""
    code = next((code for code in calls.codes if name in (*names_of(code), *globals_of(code))), None)
    return "" if code is None else _where(code)


def _where(code: CodeType) -> str:
    return f" in {code.co_qualname} ({code.co_filename}:{code.co_firstlineno})"


def _refuse_foreign(calls: PythonCalls, what: str) -> None:
    """Refuses calls of what may give something else in a later step."""
    for one in calls.foreign:
        raise refusal(
            what,
            f" at {one.filename}:{one.lineno}",
            f"it calls {one.name}, which may do something else in each call",
            "call it before the step, and pass what it gives as an argument",
        )


def _watched(
    call: TrainingCall,
    leaves: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    state: PythonState,
    what: str,
    passing: Set[Attribute],
    calls: PythonCalls,
) -> PythonTrace:
    """A trace that may change nothing that all replicas share, and draws no random number on the way."""
    devices = [torch.device("cpu")]
    generators = generator_states(devices)
    with refused_effects(call, what), quiet_fake_tensors(), _uncached_casts(), calls:
        found = record(call, leaves, decompositions, state, what, passing)
    if not all(map(torch.equal, generators, generator_states(devices))):
        raise RefusedRunError("it draws random numbers that are those of no replica")
    return found


@contextlib.contextmanager
def _uncached_casts() -> Iterator[None]:
    """A block in which autocast keeps no cast of a parameter, which would be one of a trace."""
    before = torch.is_autocast_cache_enabled()
    torch.set_autocast_cache_enabled(False)
    try:
        yield
    finally:
        torch.set_autocast_cache_enabled(before)


def refusal(what: str, where: str, reason: str, remedy: str) -> UnreadableError:
    """The error for a model that cannot be traced."""
    return UnreadableError(f"cannot trace {what}{where}: {reason}. Remedy: {remedy}.", f"{where}: {reason}")


@contextlib.contextmanager
def _explained(what: str) -> Iterator[None]:
    """A block in which what Python raises becomes a `CaptureError` that names the user's line."""
    try:
        yield
    except SharedEffectError as error:
        raise UnreadableError(str(error), f": {error}") from None
    except CaptureError:
        raise
    except Exception as error:
        logger.debug("tracing %s has failed", what, exc_info=error)
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
        last = frames[-1] if frames else None
        where = f' at {last.filename}:{last.lineno} in {last.name}: "{last.line}"' if last is not None else ""
        if "more than 1 value per channel" in str(error):
            raise LoneExampleError(
                f"cannot capture {what}{where}: {error}. Remedy: give the batch, and each part of a PerReplica, two examples or "
                "more"
            ) from None
        if isinstance(error, SparseLookupError):  # capture='autograd' takes none either
            raise CaptureError(
                f"cannot trace {what}{where}: {error}. Remedy: look it up without sparse=True, or with capture='dynamo'"
            ) from None
        missing = (
            isinstance(error, AssignedAttributeError | ReadBeforeAssignedError) and error.name == HOOKS_ARE_INSTALLED
        )
        told = refusal(what, where, *_reason_and_remedy(error))
        raise (HooksMissingError(str(told)) if missing else told) from None


def _reason_and_remedy(error: Exception) -> tuple[str, str]:
    """What an exception means for the user, and what he can do."""
    text = " ".join(str(error).split())
    if is_data_dependent(error):
        return f"{_DATA} ({text})", (
            "compute with tensors of fixed shape, such as torch.where, instead of Python numbers and branches, or decide before "
            "the step"
        )
    if isinstance(error, RefusedRunError):
        return text, "pass it as an argument, or keep it in a buffer of the model"
    if isinstance(error, UnreadableOutputError):
        return f"it {text}", "see there"
    if isinstance(error, AssignedAttributeError | ReadBeforeAssignedError):
        return f"it assigns an attribute of a module, {error.name!r}, that lasts", (
            "write buffers in place (self.x.copy_(value)), pass what changes as an argument, and use local variables for what "
            "need not last"
        )
    return f"{type(error).__name__}: {text}", "make it run on tensors without values, or move it out of forward"
