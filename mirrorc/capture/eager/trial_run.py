"""Runs a training call once as plain PyTorch, and records facts that must hold for all later runs."""

from __future__ import annotations

import contextlib
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from mirrorc.capture.call.traced_loss import TracedEvaluation, TracedLoss
from mirrorc.capture.call.traced_outputs import TracedOutputs, UnreadableOutputError
from mirrorc.capture.diagnostics.capture_errors import (
    HooksMissingError,
    NoGradientError,
    changed_before_backward,
    check_evaluated_loss,
    check_trained_loss,
    raised_by_user,
    shapes_of,
    sparse_gradient,
)
from mirrorc.capture.diagnostics.loss_means import WeightedMean, weighted_mean_of_operator
from mirrorc.capture.diagnostics.python_effects import Note, assigned_attribute, unkept_attributes
from mirrorc.capture.diagnostics.split_effects import is_undefined
from mirrorc.capture.diagnostics.untrained_tensors import untrained_text
from mirrorc.capture.diagnostics.written_buffers import are_alike, vectors_of_spectral_norms, writes_rows
from mirrorc.capture.dynamo.traced_substitutes import buffers_of_synchronized_norms
from mirrorc.capture.eager.eager_call import OpaqueCall
from mirrorc.capture.eager.eager_run import Recorded, Run, advances_state
from mirrorc.capture.eager.python_state import Changes
from mirrorc.capture.eager.rng_streams import ReplicaStream
from mirrorc.capture.eager.run_outputs import difference
from mirrorc.capture.eager.shared_sources import refused_draws
from mirrorc.capture.model.hf_output_hooks import HOOKS_ARE_INSTALLED
from mirrorc.capture.model.transient_attributes import (
    CARRIED,
    AssignedAttributeError,
    Attribute,
    ReadBeforeAssignedError,
)
from mirrorc.errors import CaptureError
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import line_of
from mirrorc.messages.wording import counted
from mirrorc.torch_internals import is_users_file, replaced_operators, schema_of, storage_key, writes_argument
from mirrorc.user.restore import have_same_bits

_OF_REENTRANT = (
    "give torch.utils.checkpoint use_reentrant=False, which computes the same; a Hugging Face model takes "
    "gradient_checkpointing_enable(gradient_checkpointing_kwargs={'use_reentrant': False})"
)


@dataclass(frozen=True)
class FirstRuns:
    recorded: Recorded
    written_inputs: list[tuple[str, str]]
    notes: tuple[Note, ...]
    undefined: str = ""
    rows: tuple[str, ...] = ()
    means: Sequence[Sequence[WeightedMean]] = ()
    buffers: Sequence[torch.Tensor] = ()
    vectors: Mapping[int, torch.Tensor] = field(default_factory=dict)


def first_runs(
    opaque: OpaqueCall, parts: Sequence[Sequence[torch.Tensor]], leaves: Sequence[torch.Tensor]
) -> FirstRuns:
    """Runs a training call on copies of all tensors, once for each part of the batch.

    A write or random draw in one run counts for all. Any trainable parameter may get a gradient in a later run.
    """
    call, model_name, transient = opaque.call, opaque.model_name, set[Attribute]()
    with _explained(model_name, leaves), refused_draws(model_name), opaque.state.first_runs(call) as changes:
        known: object = None
        while known != (now := (set(transient), CARRIED.num)):
            known, changes[:] = now, ()
            each = [_first_run(opaque, leaves, transient, seed, changes) for seed, leaves in enumerate(parts)]
    recorded = [run.recorded for run in each]
    dtypes = {record.loss_dtype for record in recorded}
    if len(dtypes) > 1:
        kinds = ", ".join(sorted(map(str, dtypes)))
        raise problem(
            CaptureError,
            f"MC2204: {model_name} gives losses of several dtypes ({kinds}) for the shards of one batch",
            fix="return loss.float(), or one dtype of your own, each time",
        )
    written = sorted({place for record in recorded for place in record.written})
    outputs = _common_outputs(recorded, parts, leaves, model_name) if call.keeps_outputs else None
    common = Recorded(
        recorded[0].loss_dtype,
        _order(opaque, recorded),
        tuple(written),
        any(record.draws for record in recorded),
        outputs,
        late=frozenset().union(*(record.late for record in recorded)),
        transient=frozenset(transient),
        exchanges=any(record.exchanges for record in recorded),
        alike=_alike(opaque, each) & frozenset(written),
        differentiable=_differentiable(outputs, model_name) if outputs is not None and call.takes_tangents else (),
    )
    if common.exchanges and opaque.state.is_advanced:
        raise problem(CaptureError, *advances_state(model_name))
    unkept = [*dict.fromkeys(name for _, name in sorted(transient))]
    on_transient = [Note(unkept_attributes(model_name, unkept))] if unkept else []
    notes = tuple(dict.fromkeys([*(note for run in each for note in run.notes), *on_transient]))
    buffers = [(i, name, buffer) for i, (name, buffer) in enumerate(opaque.buffers.items()) if i in written]
    sizes = [{len(leaf) for leaf in part if leaf.dim()} for part in parts]
    rows = tuple(name for i, name, old in buffers if writes_rows(old, [run.buffers[i] for run in each], sizes))
    means = [mean for run in each for mean in run.means]
    undefined = next((run.undefined for run in each if run.undefined), "")
    return FirstRuns(common, [written for run in each for written in run.written_inputs], notes, undefined, rows, means)


def _alike(opaque: OpaqueCall, each: Sequence[FirstRuns]) -> frozenset[int]:
    """First runs lack values of other replicas, so their statistics of synchronized norms differ."""
    first, *others = (run.vectors for run in each)
    alike = {i for i in first if all(are_alike(first[i], vectors[i]) for vectors in others)}
    ids = buffers_of_synchronized_norms([opaque.call])
    return frozenset(alike | {i for i, buffer in enumerate(opaque.buffers.values()) if id(buffer) in ids})


def _differentiable(outputs: TracedOutputs, model_name: str) -> tuple[str, ...]:
    """All outputs other than integers. Which outputs need a gradient may depend on the data."""
    names = tuple(name for name, (_, dtype) in outputs.types.items() if dtype.is_floating_point or dtype.is_complex)
    if not names:
        raise NoGradientError(f"no output of {model_name} can have a gradient")
    return names


def _order(opaque: OpaqueCall, recorded: Sequence[Recorded]) -> tuple[int, ...]:
    # Each worker compiles a module by itself, so the order must not depend on its data.
    arrived = [place for run in recorded for place in run.gradients] if not opaque.call.takes_tangents else []
    trained = [place for place, parameter in enumerate(opaque.parameters.values()) if parameter.requires_grad]
    arguments = [len(opaque.parameters) + leaf for leaf in sorted(opaque.call.differentiated)]
    return tuple(dict.fromkeys([*arrived, *reversed(trained), *arguments]))


def _type_of(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.dtype


def _common_outputs(
    recorded: Sequence[Recorded],
    parts: Sequence[Sequence[torch.Tensor]],
    leaves: Sequence[torch.Tensor],
    model_name: str,
) -> TracedOutputs:
    types = list(map(_type_of, leaves))
    first, *others = (
        record.outputs
        for part, record in zip(parts, recorded, strict=True)
        if record.outputs is not None and list(map(_type_of, part)) == types
    )
    for other in others:
        name = difference(other, first)
        if name:
            raise problem(
                CaptureError,
                f"MC2401: {name!r}, which {model_name} or its loss returns, differs between two shards of equal shape",
                "its structure, its shape, or a Python number in it depends on the data",
                (
                    "return tensors, not .item() of them, and shapes that depend on the inputs' shapes alone",
                    "leave return_outputs= out",
                ),
            )
    return first


def _first_run(
    opaque: OpaqueCall, leaves: Sequence[torch.Tensor], transient: set[Attribute], seed: int, changes: list[Changes]
) -> FirstRuns:
    """Repeats the run without the attributes that it assigns, to detect reads before the assignment."""
    call, parameters = opaque.call, [parameter.detach().clone() for parameter in opaque.parameters.values()]
    buffers = [buffer.detach() for buffer in opaque.buffers.values()]
    untouched = ReplicaStream(seed, parameters[0].device)
    while True:
        stream = ReplicaStream(seed, parameters[0].device)
        copies = [leaf.detach().clone() for leaf in leaves]
        opaque.state.restart()
        try:
            observed = _ObservedOperators()
            with replaced_operators(observed.note):
                run = opaque.run_forward(stream, copies, parameters, buffers, frozenset(transient), is_first=True)
            break
        except AssignedAttributeError as error:
            if not error.attributes:
                raise
            transient.update(error.attributes)
        except ReadBeforeAssignedError as error:
            if error.attribute not in transient or error.module is None or error.name == HOOKS_ARE_INSTALLED:
                raise
            transient.remove(error.attribute)
            CARRIED.add(error.module, error.name)
    changes.append(opaque.state.changes())
    loss = _checked_loss(run.loss, call, opaque.model_name)
    ids = vectors_of_spectral_norms([call])
    vectors = {i: run.buffers[i].detach() for i, buffer in enumerate(opaque.buffers.values()) if id(buffer) in ids}
    notes = _untrained(run, opaque) if call.trains else ()
    _refuse_grown(run, opaque)
    written_inputs, written = _written(run, opaque, (leaves, buffers), observed)
    arrived: list[int] = []
    if call.trains:
        gradients = opaque.gradients_of(run, None)
        gradients.run()
        arrived = gradients.arrived
        _refuse_changes_of_backward(changes[-1], opaque.state.changes(), opaque.model_name)
    else:
        opaque.release(run)
    for name, parameter in zip(opaque.parameters, run.parameters, strict=True):
        if parameter.grad is not None and parameter.grad.layout is not torch.strided:
            raise CaptureError(
                sparse_gradient(name.removeprefix("model."), opaque.model_name, "gradients that run as plain PyTorch")
            )
    late = frozenset(place for place in arrived if place in run.unreached or arrived.count(place) > 1)
    outputs = run.outputs.record if run.outputs is not None else None
    exchanges = run.exchange.number > 0
    draws = stream.has_advanced(untouched)
    recorded = Recorded(loss, tuple(arrived), tuple(written), draws, outputs, late, exchanges=exchanges)
    return FirstRuns(recorded, written_inputs, notes, observed.undefined, (), [observed.means], run.buffers, vectors)


def _refuse_changes_of_backward(before: Changes, after: Changes, model_name: str) -> None:
    name = after.differing(before)
    if name is not None:
        raise problem(
            CaptureError,
            f"MC2301: backward of {model_name} changes {name}",
            "replicas run backward at the same time, and share it",
            ("change it in forward, or in your loop, between calls", "write a buffer, self.x.copy_(value)"),
        )


def _checked_loss(loss: torch.Tensor, call: TracedLoss, model_name: str) -> torch.dtype | None:
    if call.takes_tangents:
        return torch.float64  # for weights of workers
    if not isinstance(call, TracedEvaluation):
        return check_trained_loss(loss, model_name).dtype
    if loss.shape != (0,) or call.needs_loss:
        check_evaluated_loss(loss, model_name, is_from_loss_function=call.needs_loss)
        return loss.dtype
    return None


def _refuse_grown(run: Run, opaque: OpaqueCall) -> None:
    for (name, buffer), value in zip(opaque.buffers.items(), run.buffers, strict=True):
        if value.shape != buffer.shape:
            raise problem(
                CaptureError,
                f"MC2304: forward of {opaque.model_name} changes the size of the buffer {name.removeprefix('model.')!r}",
                f"each buffer keeps its memory, here of {list(buffer.shape)}, not {list(value.shape)}",
                (
                    "model(x) on a batch, once before mirrorc.compile()",
                    f"self.register_buffer(..., torch.zeros({list(value.shape)})) in __init__",
                ),
            )


def _written(
    run: Run,
    opaque: OpaqueCall,
    before: tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]],
    observed: _ObservedOperators,
) -> tuple[list[tuple[str, str]], list[int]]:
    """Finds written tensors, also if written through ``.data`` or numpy, or with equal values."""
    leaves, buffers = before
    parameters = [value.detach() for value in opaque.parameters.values()]

    def places(tensors: Sequence[torch.Tensor], were: Sequence[torch.Tensor]) -> list[int]:
        changed = [i for i, (new, old) in enumerate(zip(tensors, were, strict=True)) if not have_same_bits(new, old)]
        counted = [i for i, tensor in enumerate(tensors) if observed.has_written(tensor)]
        return sorted({*run.written(tensors), *run.replaced(tensors), *counted, *changed})

    names, written = [*opaque.buffers], places(run.buffers, buffers)
    inputs = [("parameter", [*opaque.parameters][place]) for place in places(run.parameters, parameters)]
    inputs += [("argument", str(place)) for place in places(run.leaves, leaves)]
    inputs += [("buffer", names[place]) for place in written if run.buffers[place].requires_grad]
    return inputs, written


@contextlib.contextmanager
def _explained(model_name: str, leaves: Sequence[torch.Tensor]) -> Iterator[None]:
    try:
        yield
    except CaptureError:
        raise
    except UnreadableOutputError as error:
        raise CaptureError(str(error)) from None
    except (AssignedAttributeError, ReadBeforeAssignedError) as error:
        kind = HooksMissingError if error.name == HOOKS_ARE_INSTALLED else CaptureError
        why = "in a step each replica has modules of its own, and what forward leaves there does not last"
        if isinstance(error, ReadBeforeAssignedError):
            why = f"it reads what an earlier call has left there; {why}"
        raise kind(assigned_attribute(model_name, f"the attribute {error.name!r} of a module", why)) from None
    except Exception as error:
        if (changed := changed_before_backward(error, model_name)) is not None:
            raise changed from error
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_users_file(frame.filename)]
        fix = _OF_REENTRANT if "use_reentrant=True" in str(error) else ""
        at = line_of(frames[-1]) if frames else ""
        reason, subject = f"{type(error).__name__}: {error}", "this line" if at else "loss or model"
        raise raised_by_user(model_name, reason, at, subject, shapes_of(leaves), fix) from error


def _untrained(run: Run, opaque: OpaqueCall) -> tuple[Note, ...]:
    besides, elsewhere = opaque.check_reach(run, CaptureError), opaque.call.trained_elsewhere
    unknown = [p for p in besides if isinstance(p, torch.nn.Parameter) and id(p) not in elsewhere]
    if not unknown:
        return ()
    shapes = ", ".join(str(list(parameter.shape)) for parameter in unknown[:3])
    reached = f"{counted(len(unknown), 'parameter')} of modules that neither holds, {shapes}"
    return (Note(untrained_text(opaque.model_name, reached)),)


class _ObservedOperators:
    def __init__(self) -> None:
        self.undefined = ""
        self.means: list[WeightedMean] = []
        self._written: set[int] = set()  # keys of memory

    def has_written(self, tensor: torch.Tensor) -> bool:
        return storage_key(tensor) in self._written

    def note(self, operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if not self.undefined and is_undefined(operator, args, kwargs):
            self.undefined = _running_line() or str(operator)
        if (mean := weighted_mean_of_operator(operator, args, _running_line)) is not None:
            self.means.append(mean)
        if writes_argument(operator):
            values = {**dict(zip((a.name for a in schema_of(operator).arguments), args, strict=False)), **kwargs}
            for argument in schema_of(operator).arguments:
                if argument.is_write:
                    self._note_write(values.get(argument.name))
        return NotImplemented

    def _note_write(self, written: Any) -> None:
        for tensor in written if isinstance(written, list | tuple) else [written]:
            if isinstance(tensor, torch.Tensor) and tensor.layout is torch.strided:
                self._written.add(storage_key(tensor))


def _running_line() -> str:
    frames = [frame for frame in traceback.extract_stack() if is_users_file(frame.filename)]
    return line_of(frames[-1]) if frames else ""
