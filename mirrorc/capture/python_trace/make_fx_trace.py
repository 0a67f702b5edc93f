"""Runs forward, loss and backward of a training call once in Python, and records the operators as a functional graph."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from mirrorc.capture.call.evaluation_call import EvaluationCall
from mirrorc.capture.call.traced_outputs import TracedOutputs, noted_marks
from mirrorc.capture.call.training_call import TrainingCall
from mirrorc.capture.diagnostics.errors import check_evaluated_loss, check_trained_loss
from mirrorc.capture.eager.module_copies import ModuleCopy
from mirrorc.capture.eager.reached_parameters import leaves_of_loss
from mirrorc.capture.eager.run_outputs import read_run
from mirrorc.capture.model.transient_attributes import AssignedAttributeError, Attribute
from mirrorc.capture.python_trace.object_guards import PythonState
from mirrorc.ir.program import LOSS_OUTPUT
from mirrorc.torch_internals import (
    JointGraph,
    KeptCaches,
    LeftTensors,
    RefusedRunError,
    export_run,
    is_traced_tensor,
    recorded_run,
    storage_key,
    take_constants,
)

_HELD = "held_"


@dataclass(frozen=True)
class PythonTrace:
    """What a run in Python gives.

    Attributes:
        joint: its operators, with the names that variables have in the call.
        outputs: what it returns beside the loss, if that is kept.
        passing: the attributes of modules that forward assigns before it reads them.
    """

    joint: JointGraph
    outputs: TracedOutputs | None
    passing: frozenset[Attribute]


class RecordedCall(nn.Module):
    """A training call that runs on copies of its modules, as a module for torch's joint export.

    Its own parameters and buffers, which the export replaces by tensors of its trace, are those of the call, each once, and the
    other tensors that Python may read; copies of the call's modules get them in the places of theirs.

    Args:
        call: model and loss.
        state: what Python may read besides.
        what: the name of the model.
        passing: the attributes that forward is known to assign before it reads them.

    Attributes:
        names: what its parameters and buffers are called in the call; those of other tensors are not among them.
        held: these other tensors, by the names that they have here.
        passing: the attributes that forward is known to assign before it reads them.
        outputs: what the last run has returned beside the loss.
    """

    def __init__(self, call: TrainingCall, state: PythonState, what: str, passing: Set[Attribute]) -> None:
        super().__init__()
        self.names: dict[str, str] = {}
        self.held: dict[str, torch.Tensor] = {}
        self.passing: set[Attribute] = set(passing)
        self.outputs: TracedOutputs | None = None
        self._call, self._what, self._copy, self._caches = [call], what, [ModuleCopy(call)], KeptCaches()
        self._state = state
        self._originals: dict[str, torch.Tensor] = {}
        for place, (name, parameter) in enumerate(call.named_parameters()):
            self.register_parameter(self._named(f"parameter_{place}", name, parameter), parameter)
        for place, (name, buffer) in enumerate(call.named_buffers()):
            self.register_buffer(self._named(f"buffer_{place}", name, buffer), buffer)
        for place, tensor in enumerate(state.tensors.values()):
            if not tensor.requires_grad:
                key = f"{_HELD}{place}"
                self.held[key] = self._originals[key] = tensor
                self.register_buffer(key, tensor)

    def _named(self, key: str, name: str, tensor: torch.Tensor) -> str:
        self.names[key], self._originals[key] = name, tensor
        return key

    def forward(self, *leaves: torch.Tensor) -> Any:
        """The loss, if there is one, and the tensors that are returned beside it."""
        (call,), (copy,) = self._call, self._copy
        self._state.put_back()  # the export runs forward several times
        own = {key: getattr(self, key) for key in self._originals}
        given = {id(original): own[key] for key, original in self._originals.items()}
        own_ids = {id(tensor) for tensor in own.values()}
        copy.load(given, frozenset(self.passing), plain=call.plain)
        modules = {id(module): name for name, module in copy.root.named_modules()}
        try:
            with (
                recorded_run(modules, given, lambda tensor: id(tensor) in own_ids or is_traced_tensor(tensor)),
                copy.alone(),
                noted_marks() as marked,
            ):
                found = copy.root(*leaves)
                results = self._results(found, leaves, given, marked)
            replaced, assigned = copy.replaced(), copy.assigned()
        finally:
            copy.unload()
            self._caches.empty()
        if replaced is not None or assigned:
            raise AssignedAttributeError.of(replaced or assigned[0][1], () if replaced is not None else assigned)
        return results

    def _results(
        self,
        found: Any,
        leaves: Sequence[torch.Tensor],
        given: Mapping[int, torch.Tensor],
        marked: Sequence[torch.Tensor],
    ) -> tuple[torch.Tensor, ...]:
        (call,) = self._call
        loss, outputs = found if call.keeps_outputs else (found, None)
        has_loss = self._check_loss(loss)
        tensors: Mapping[str, torch.Tensor] = {}
        if call.keeps_outputs:
            own = {id(given[id(original)]): original for original in self._originals.values()}
            run = read_run(outputs, loss, leaves, own, marked)
            self.outputs, tensors = run.told, run.tensors
        memory = {storage_key(tensor) for tensor in (*leaves, *given.values())}
        own_loss = loss.clone() if has_loss and storage_key(loss) in memory else loss
        return (*([own_loss] if has_loss else []), *tensors.values())

    def _check_loss(self, loss: Any) -> bool:
        """Whether there is a loss, which must be one."""
        (call,) = self._call
        if isinstance(call, EvaluationCall):
            if loss.shape == (0,) and not call.needs_loss:
                return False
            check_evaluated_loss(loss, self._what, is_from_loss_function=call.needs_loss)
            return True
        check_trained_loss(loss, self._what)
        if not all(map(is_traced_tensor, leaves_of_loss(loss))):
            raise RefusedRunError("its loss depends on a tensor with a gradient that neither model nor loss holds")
        return True


def record(
    call: TrainingCall,
    leaves: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
    state: PythonState,
    what: str,
    passing: Set[Attribute],
) -> PythonTrace:
    """Records a run on tensors without values; what forward assigns before it reads it is found by further runs.

    Raises:
        RefusedRunError: it does what a trace cannot record.
        Exception: whatever Python raises meanwhile.
    """
    recorded, left = RecordedCall(call, state, what, passing), LeftTensors()
    while True:
        try:
            with contextlib.ExitStack() as stack:
                joint, results = export_run(stack, recorded, leaves, decompositions, trains=call.trains)
            break
        except AssignedAttributeError as error:
            if not error.attributes or recorded.passing.issuperset(error.attributes):
                raise
            recorded.passing.update(error.attributes)
    joint.loss, joint.outputs = None, {}
    if call.trains:
        joint.loss, *results = results
    names = [*(recorded.outputs.types if recorded.outputs is not None else ())]
    if len(results) > len(names):  # that of an evaluation
        names.insert(0, LOSS_OUTPUT)
    joint.outputs = dict(zip(names, results, strict=True))
    _check_writes(joint, recorded.held)
    take_constants(joint, recorded.held)
    _rename(joint, recorded.names)
    _check_operators(joint)
    if left.are_there():
        raise RefusedRunError("it keeps a tensor that it has computed where later calls may find it")
    return PythonTrace(joint, recorded.outputs, frozenset(recorded.passing))


def _check_writes(joint: JointGraph, held: Mapping[str, torch.Tensor]) -> None:
    written = [name for name in joint.buffer_writes if name in held]
    if written:
        shape = list(held[written[0]].shape)
        raise RefusedRunError(f"it writes a tensor of shape {shape} that is no parameter or buffer of model and loss")


def _rename(joint: JointGraph, names: Mapping[str, str]) -> None:
    """Gives variables the names that they have in the call."""
    joint.variable_of = {node: names.get(name, name) for node, name in joint.variable_of.items()}
    joint.gradients = {names[name]: node for name, node in joint.gradients.items()}
    joint.buffer_writes = {names[name]: node for name, node in joint.buffer_writes.items()}
    joint.written_inputs = [(kind, names.get(name, name)) for kind, name in joint.written_inputs]


def _check_operators(joint: JointGraph) -> None:
    """Refuses what a step would not do again as plain PyTorch does it."""
    for node in joint.graph_module.graph.nodes:
        if node.op == "call_function" and node.kwargs.get("generator") is not None:
            raise RefusedRunError("it draws from a generator of its own")
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.layout is not torch.strided:
            raise RefusedRunError("it makes sparse tensors")
    for node in joint.graph_module.graph.find_nodes(op="get_attr"):
        if not isinstance(joint.constant(node), torch.Tensor) or is_traced_tensor(joint.constant(node)):
            raise RefusedRunError("it reads a tensor that an earlier run has computed")
