"""Traces with Dynamo, rewrites the graph of torch functions, then traces with torch's joint export."""

from __future__ import annotations

import functools
import itertools
import logging
import operator
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from types import TracebackType
from typing import Any

import torch
from torch import fx

from mirrorc.capture.call.containers import PaddedSequences, unflatten_container
from mirrorc.capture.call.traced_loss import BuffersAssigned, TracedEvaluation, TracedLoss
from mirrorc.capture.call.traced_outputs import (
    LeafKind,
    ShapeOfValuesError,
    TracedOutputs,
    memory_of_inputs,
    read_outputs,
    remove_marks,
    summed,
)
from mirrorc.capture.diagnostics.capture_errors import (
    NoGradientError,
    changed_before_backward,
    check_evaluated_loss,
    check_loss,
    explain,
    refuse_complex,
    shape_depends_on_values,
)
from mirrorc.capture.diagnostics.known_failures import DATA_DEPENDENT
from mirrorc.capture.diagnostics.loss_means import reductions_of, weighted_means_of
from mirrorc.capture.diagnostics.python_effects import Note, assigned_buffers, changed_arguments, dropped_effects
from mirrorc.capture.diagnostics.split_effects import leaves_with_time_first
from mirrorc.capture.diagnostics.untrained_tensors import untrained_tensors
from mirrorc.capture.dynamo.drawn_branches import DECIDING, DrawnScalar, DrawnScalarDecides
from mirrorc.capture.dynamo.traced_substitutes import (
    ASKED_OF_CLASSES,
    SYNCHRONIZED,
    TRACED_INSTEAD,
    VALIDATIONS,
    masking_functions,
)
from mirrorc.capture.front_ends.front_end import FrontEnd, Traced
from mirrorc.capture.model.model_state import take_outside_variables
from mirrorc.capture.model.refused_models import refuse_modules
from mirrorc.capture.rewrites.operator_effects import refuse_effects
from mirrorc.capture.rewrites.sparse_lookups import BAGS_AS_ROWS, leaves_with_offsets, take_sparse_lookups
from mirrorc.custom_ops.output_tangents import output_tangent
from mirrorc.ir.program import LOSS_OUTPUT
from mirrorc.torch_internals import (
    CHECKS_OF_TENSORS,
    Decompositions,
    NumbersGivenUp,
    SizesGivenUp,
    asked_for_class,
    called_while_traced,
    checked_autograd_functions,
    export_graph,
    give_values,
    guards_of,
    is_drawn,
    made_leaves,
    noted_calls,
    quiet_fake_tensors,
    returned_out_arguments,
    storage_key,
    trace_full_graph,
    traced_instead,
)

logger = logging.getLogger(__name__)


class DynamoFrontEnd(FrontEnd):
    """Traces a call without graph breaks."""

    name = "dynamo"

    def trace(
        self, stack: ExitStack, call: TracedLoss, leaves: Sequence[torch.Tensor], decompositions: Decompositions
    ) -> Traced:
        model_name = type(call.model).__name__
        refuse_modules(call, model_name)
        trace = functools.partial(_trace, call, leaves, unflatten_container, call.keeps_outputs)
        with _Explained(model_name, leaves):
            traced = trace()
        if assigned := assigned_buffers(traced, call, model_name):
            raise BuffersAssigned(assigned)
        text = str(traced.graph)
        outputs = _read_outputs(traced, call, leaves, model_name) if call.keeps_outputs else None
        _refuse_returned_numbers(traced, outputs)
        remove_marks(traced)
        notes = changed_arguments(traced, call, model_name)
        notes += dropped_effects(traced, text, model_name, trace)
        choose_where_masked(traced.graph)
        if isinstance(call, TracedEvaluation):
            assert outputs is not None, "an evaluation keeps its outputs"
            return self._forward(stack, traced, call, leaves, decompositions, outputs, notes)
        if call.takes_tangents and outputs is not None:
            weight_outputs(traced, [*outputs.types], model_name)
        check_loss(traced, model_name)
        untrained = untrained_tensors(traced, call, leaves, model_name)
        outside = take_outside_variables(traced, call, leaves)
        refuse_effects(traced.graph, model_name)
        reductions, with_time_first = reductions_of(traced), leaves_with_time_first(traced.graph)
        looked_up, with_offsets = take_sparse_lookups(traced, leaves, model_name), leaves_with_offsets(traced.graph)
        _copy_aliased_loss(traced.graph)
        with _Explained(model_name, leaves, traced.graph):
            names = tuple(outputs.types) if outputs is not None else ()
            joint = export_graph(stack, traced, leaves, {**decompositions, **BAGS_AS_ROWS}, names)
        joint.numbers = guards_of(traced).number_inputs()
        joint.outside, joint.looked_up = outside, looked_up
        return Traced(
            joint,
            guards_of(traced),
            (*notes, *untrained),
            outputs,
            weighted_means=weighted_means_of(traced),
            reductions=reductions,
            leaves_with_time_first=with_time_first,
            leaves_with_offsets=with_offsets,
        )

    def _forward(
        self,
        stack: ExitStack,
        traced: fx.GraphModule,
        call: TracedEvaluation,
        leaves: Sequence[torch.Tensor],
        decompositions: Decompositions,
        outputs: TracedOutputs,
        notes: tuple[Note, ...],
    ) -> Traced:
        model_name, names = type(call.model).__name__, [*outputs.types]
        values: Any = traced.graph.output_node().args[0]
        losses = values[: len(values) - len(names)]
        is_there = not losses or losses[0].meta["example_value"].shape != (0,)
        if is_there or call.needs_loss:
            loss = losses[0].meta["example_value"] if losses else None
            check_evaluated_loss(loss, model_name, is_from_loss_function=call.needs_loss)
            names.insert(0, LOSS_OUTPUT)
            _copy_aliased_loss(traced.graph)
        else:
            give_values(traced, values[1:])
        refuse_effects(traced.graph, model_name)
        with_time_first, outside = leaves_with_time_first(traced.graph), take_outside_variables(traced, call, leaves)
        with _Explained(model_name, leaves):
            graph = export_graph(stack, traced, leaves, decompositions, names, trains=False)
        graph.numbers = guards_of(traced).number_inputs()
        graph.outside = outside
        return Traced(
            graph,
            guards_of(traced),
            notes,
            outputs,
            weighted_means=weighted_means_of(traced),
            leaves_with_time_first=with_time_first,
            leaves_with_offsets=leaves_with_offsets(traced.graph),
        )

    def trace_outputs(self, call: TracedLoss, leaves: Sequence[torch.Tensor]) -> TracedOutputs | None:
        try:
            with quiet_fake_tensors():
                traced = _trace(call, leaves)
        except Exception as error:
            logger.debug("no trace for another number of examples", exc_info=error)
            return None
        return _read_outputs(traced, call, leaves, type(call.model).__name__)


def _trace(
    call: TracedLoss,
    leaves: Sequence[torch.Tensor],
    makes_arguments: Callable[..., Any] | None = None,
    guards_results: bool = False,
) -> fx.GraphModule:
    torch.compiler.allow_in_graph(summed)  # here, as this imports Dynamo
    can_draw = call.numbers.can_be_drawn
    instead = {**TRACED_INSTEAD, **SYNCHRONIZED, **CHECKS_OF_TENSORS, **VALIDATIONS, **masking_functions(call)}

    def traced(functions: Mapping[Callable[..., Any], Callable[..., Any]]) -> fx.GraphModule:
        with ExitStack() as stack:
            stack.enter_context(traced_instead(functions))
            stack.enter_context(called_while_traced(ASKED_OF_CLASSES))
            stack.enter_context(made_leaves())
            stack.enter_context(checked_autograd_functions())
            stack.enter_context(returned_out_arguments())
            for kind in (PaddedSequences, DrawnScalar, DrawnScalarDecides):
                stack.enter_context(asked_for_class(kind))
            graph = trace_full_graph(
                call,
                leaves,
                makes_arguments,
                call.numbers.inputs,
                constants=call.numbers.constants,
                guards_results=guards_results,
                takes_draws=call.numbers.can_be_drawn,
            )
            call.numbers.add(guards_of(graph).read_numbers)
            return graph

    try:
        with noted_calls(torch.rand) as draws:
            return traced(instead)
    except Exception as error:
        can_decide = can_draw and draws and torch.get_default_device().type == "cpu"
        if not can_decide or not any(word in str(error).lower() for word in DATA_DEPENDENT):
            raise
        try:
            return traced({**instead, **DECIDING})
        except Exception as other:
            is_given_up = isinstance(other, NumbersGivenUp) and all(map(is_drawn, other.names))
            if is_given_up or DrawnScalar.__name__ in str(other):  # the number is used like a tensor
                raise error from None
            raise


def _read_outputs(
    traced: fx.GraphModule, call: TracedLoss, leaves: Sequence[torch.Tensor], model_name: str
) -> TracedOutputs:
    try:
        return read_outputs(traced, call, leaves, model_name)
    except ShapeOfValuesError as error:
        raise shape_depends_on_values(model_name, str(error)) from None


def _refuse_returned_numbers(traced: fx.GraphModule, outputs: TracedOutputs | None) -> None:
    """Refuses an output equal to a number input. It may be the input, and would keep its value from the trace."""
    inputs = guards_of(traced).inputs
    if inputs is None or outputs is None:
        return
    returned = [leaf.value for leaf in outputs.leaves if leaf.kind is LeafKind.CONSTANT]
    numbers = [value for value in returned if type(value) in (int, float)]
    if any(type(value) is type(number) and value == number for value in numbers for number in inputs.values):
        raise NumbersGivenUp(inputs.sources, "forward seems to return it")


def _copy_aliased_loss(graph: fx.Graph) -> None:
    """The loss may alias a parameter, and the step updates parameters before it returns the loss."""
    output = graph.output_node()
    loss = output.args[0][0]  # type: ignore[index]
    assert isinstance(loss, fx.Node)
    if storage_key(loss.meta["example_value"]) in memory_of_inputs(graph):
        with graph.inserting_before(output):
            copy = graph.call_function(torch.clone, (loss,))
        copy.meta = dict(loss.meta)
        output.replace_input_with(loss, copy)
        graph.owning_module.recompile()  # type: ignore[union-attr]


class _Explained:
    """Shortens the tracer's errors. A generator would add frames to the user's traceback."""

    def __init__(self, model_name: str, leaves: Sequence[torch.Tensor], graph: fx.Graph | None = None) -> None:
        self._model_name, self._leaves, self._graph, self._quiet = model_name, leaves, graph, quiet_fake_tensors()

    def __enter__(self) -> None:
        self._quiet.__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._quiet.__exit__(kind, error, traceback)
        if isinstance(error, Exception) and not isinstance(error, NumbersGivenUp | SizesGivenUp):
            logger.debug("tracing %s has failed", self._model_name, exc_info=error)
            changed = changed_before_backward(error, self._model_name, self._graph)
            raise changed or explain(error, self._model_name, self._leaves) from None


def weight_outputs(traced: fx.GraphModule, names: Sequence[str], model_name: str) -> None:
    """The graph then returns a loss, the sum of its outputs times their tangents, and the outputs."""
    graph = traced.graph
    values = graph.output_node().args[0]
    assert isinstance(values, tuple | list)
    detached = [value for value in values[len(values) - len(names) :] if isinstance(value, fx.Node)]
    with graph.inserting_before(graph.output_node()):
        products = [
            _product(graph, source, name, model_name)
            for name, value in zip(names, detached, strict=True)
            if (source := _attached(value)).meta["example_value"].requires_grad
        ]
        if not products:
            raise NoGradientError(f"no output of {model_name} needs a gradient")
        dtype = functools.reduce(torch.promote_types, (value.meta["example_value"].dtype for value in products))
        alike = [_added(graph, torch.Tensor.to, value, dtype) for value in products]
        loss = functools.reduce(functools.partial(_added, graph, torch.add), alike)
    give_values(traced, [loss, *detached])


def _attached(detached: fx.Node) -> fx.Node:
    copied = detached.args[0] if detached.target is torch.clone else detached
    assert isinstance(copied, fx.Node) and isinstance(copied.args[0], fx.Node)
    return copied.args[0]


def _product(graph: fx.Graph, output: fx.Node, name: str, model_name: str) -> fx.Node:
    refuse_complex({name: output.meta["example_value"]}, model_name)
    own = _added(graph, torch.Tensor.detach, output)
    tangent = _added(graph, output_tangent, own, name)
    return _added(graph, torch.sum, _added(graph, torch.mul, output, tangent))


def _added(graph: fx.Graph, function: object, *operands: object) -> fx.Node:
    node = graph.call_function(function, operands)  # type: ignore[arg-type]
    values = [operand.meta["example_value"] if isinstance(operand, fx.Node) else operand for operand in operands]
    node.meta["example_value"] = function(*values)  # type: ignore[operator]
    return node


def choose_where_masked(graph: fx.Graph) -> None:
    """Rewrites ``x[mask] = value`` to ``x.copy_(torch.where(mask, value, x))`` if the value requires a gradient.

    Backward of the assignment would gather the gradient at the masked places, and their number depends on the mask.
    """
    for node in list(graph.find_nodes(op="call_function", target=operator.setitem)):
        place, mask, value = node.args
        if not _is_masked(place, mask, value):
            continue
        source, chosen = (arg.meta["example_value"] for arg in (place, mask))
        with graph.inserting_before(node):
            wide = graph.call_method("reshape", (mask, (*chosen.shape, *(1,) * (source.dim() - chosen.dim()))))
            new = graph.call_function(torch.where, (wide, value, place))
            copied = graph.call_method("copy_", (place, new))
        for made in (wide, new, copied):
            made.meta = {**node.meta, "example_value": source}
        wide.meta["example_value"] = chosen.reshape((*chosen.shape, *(1,) * (source.dim() - chosen.dim())))
        graph.erase_node(node)
    graph.owning_module.recompile()  # type: ignore[union-attr]


def _is_masked(place: Any, mask: Any, value: Any) -> bool:
    if not all(isinstance(arg, fx.Node) for arg in (place, mask, value)):
        return False
    values = [arg.meta.get("example_value") for arg in (place, mask, value)]
    if not all(isinstance(item, torch.Tensor) for item in values):
        return False
    source, chosen, assigned = values
    if not all(type(size) is int for item in values for size in item.shape):  # such as a size that depends on the mask
        return False
    is_mask = chosen.dtype == torch.bool and chosen.shape == source.shape[: chosen.dim()] and chosen.dim() > 0
    counted = len([*itertools.dropwhile(lambda size: size == 1, assigned.shape)])  # PyTorch leaves out leading ones
    fits = counted <= source.dim() - chosen.dim() and assigned.dim() <= source.dim()
    return is_mask and fits and assigned.dtype == source.dtype and assigned.requires_grad
