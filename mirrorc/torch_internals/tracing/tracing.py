"""Captures graphs with Dynamo and AOTAutograd, and locates failures in the user's code."""

from __future__ import annotations

import builtins
import contextlib
import functools
import importlib.util
import logging
import os
import re
import sysconfig
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch import fx, nn

from mirrorc.torch_internals.aot.joint_graph import (
    JointGraph,
    no_states_of_gpus,
    ordered_linalg_checks,
    remove_effect_tokens,
)
from mirrorc.torch_internals.fx.graphs import Decompositions, lazy_graph_modules
from mirrorc.torch_internals.numbers.drawn_numbers import observed_cached_draws, observed_draws, taken_draws
from mirrorc.torch_internals.numbers.number_tensors import BUFFER, take_numbers_as_tensors
from mirrorc.torch_internals.numbers.number_trace import NumbersGivenUp, traced_numbers
from mirrorc.torch_internals.symbols.symbolic_sizes import (
    SizesGivenUp,
    SizesOfArguments,
    is_marked,
    is_symbolic,
    symbols_by_number,
)
from mirrorc.torch_internals.tracing.dynamo_guards import (
    DynamoGuards,
    build_guards,
    captured_output,
    guarded_descriptors,
    guarded_results,
    metrics_if_heard,
    scope_of_guards,
    traced_globals,
)
from mirrorc.torch_internals.tracing.graph_interface import read_variables_from_module
from mirrorc.torch_internals.tracing.python_effects import PythonEffects, observed_effects, reported_functions
from mirrorc.torch_internals.tracing.source_names import source_words


@contextlib.contextmanager
def restored_tracing_state() -> Iterator[None]:
    """Restores torch's tracing state. Otherwise, later traces could fail after Ctrl-C in torch's own cleanup."""
    is_on, checks_nan = torch.is_anomaly_enabled(), torch.is_anomaly_check_nan_enabled()
    with torch._guards.tracing(None):
        try:
            yield
        finally:
            torch.set_anomaly_enabled(is_on, checks_nan)


def trace_full_graph(
    module: nn.Module,
    leaves: Sequence[torch.Tensor],
    makes_arguments: Callable[..., Any] | None = None,
    numbers: Collection[str] = (),
    *,
    constants: Collection[str] | None = None,
    guards_results: bool = False,
    takes_draws: bool = False,
) -> fx.GraphModule:
    """Traces ``module(*leaves)`` into one graph of torch functions; Dynamo's errors propagate.

    Args:
        leaves: the tensor arguments; dimensions marked by `mark_symbolic` get symbols.
        guards_results: guard Python values that forward only returns.
        takes_draws: Python's random draws become inputs, read from the module's list ``drawn``.

    Raises:
        GuardsChange: forward reads a value that changes with each read.
        NumbersGivenUp: some ``numbers`` cannot be inputs.
    """
    from torch._dynamo import config
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    names, drawn = traced_globals(module), None
    with _without_new_graphs(names):
        try:
            with (
                config.patch(_dynamos_options()),
                metrics_if_heard(),
                lazy_graph_modules(),
                warnings.catch_warnings(),
                captured_output() as outputs,
                guarded_descriptors(),
                guarded_results() if guards_results else contextlib.nullcontext(),
                observed_effects(module, names, makes_arguments) as effects,
                observed_draws() as draws,
                observed_cached_draws() as cached_draws,
                traced_numbers(numbers, constants) as trace,
                taken_draws(module, trace) if takes_draws else contextlib.nullcontext() as drawn,
                symbols_by_number() if any(map(is_marked, leaves)) else contextlib.nullcontext(),
            ):
                warnings.filterwarnings("ignore", "While compiling, we found certain side effects")  # in our own words
                warnings.filterwarnings("ignore", module=r"torch\._dynamo\.")  # and what cannot be traced
                traced = dynamo_graph_capture_for_export(module)(*leaves)
            inputs = take_numbers_as_tensors(traced, trace)
            _prepare_for_export(traced)
            traced.meta["mirrorc_guards"] = build_guards(outputs[-1], module, inputs, drawn)
            effects.draws, effects.cached_draws = draws, cached_draws
            traced.meta["mirrorc_effects"] = effects
            return traced
        except NumbersGivenUp as error:
            scope = scope_of_guards(module)
            error.words = sorted(source_words(name, scope).name for name in error.names)
            error.stack = drawn.stack_of(error.names) if drawn is not None else ()
            raise


@contextlib.contextmanager
def _without_new_graphs(names: dict[str, Any]) -> Iterator[None]:
    """Removes Dynamo's new graphs from a function's globals, which would keep the model alive."""
    before = set(names)
    try:
        yield
    finally:
        for name in set(names) - before:
            if name.startswith("__compiled_fn"):
                del names[name]


def _prepare_for_export(traced: fx.GraphModule) -> None:
    if torch.__version__ < "2.12":
        _add_builtins(traced)
    read_variables_from_module(traced)
    for node in traced.graph.find_nodes(op="call_function", target=torch._assert_async):
        if len(node.args) == 1:  # AOTAutograd drops an assert without a text
            node.args = (node.args[0], "assertion error")


def _add_builtins(traced: fx.GraphModule) -> None:
    """Adds builtins that torch 2.11 omits from the globals of Dynamo's code."""
    replays: tuple[Any, ...] = (traced._dynamo_bytecode_flatten, traced._dynamo_bytecode_unflatten)
    for replay in replays:
        replay.f_globals = {**vars(builtins), **replay.f_globals}


def _dynamos_options() -> dict[str, Any]:
    from torch._dynamo import config

    options = {
        "allow_rnn": True,
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "ignore_logging_functions": config.ignore_logging_functions | _logging_methods() | reported_functions(),
    }
    if hasattr(config, "computed_lazy_constant_max_nodes"):  # since 2.14
        options["computed_lazy_constant_max_nodes"] = 0  # a computation with a number counts as a read
    return options


def guards_of(traced: fx.GraphModule) -> DynamoGuards:
    guards: DynamoGuards = traced.meta["mirrorc_guards"]
    return guards


def python_effects_of(traced: fx.GraphModule) -> PythonEffects:
    effects: PythonEffects = traced.meta["mirrorc_effects"]
    return effects


def leaf_of_placeholder(node: fx.Node) -> int | None:
    match = re.fullmatch(r"L_leaves_(\d+)_", str(node.target))
    return int(match[1]) if match else None


def _logging_methods() -> set[Callable[..., Any]]:
    names = ("debug", "info", "warning", "warning_once", "error", "exception", "critical", "log", "isEnabledFor")
    return {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}


def export_graph(
    stack: ExitStack,
    traced: fx.GraphModule,
    leaves: Sequence[torch.Tensor],
    decompositions: Decompositions,
    outputs: Sequence[str] = (),
    *,
    trains: bool = True,
) -> JointGraph:
    """A graph of forward and backward, whose first result is the loss; of forward alone unless ``trains``."""
    with contextlib.nullcontext() if trains else torch.no_grad():
        joint, nodes = _exported(stack, traced, leaves, decompositions)
    if trains:
        joint.loss, *nodes = nodes
    joint.outputs = dict(zip(outputs, nodes, strict=True))
    return joint


def _exported(
    stack: ExitStack, traced: fx.GraphModule, leaves: Sequence[torch.Tensor], decompositions: Decompositions
) -> tuple[JointGraph, list[fx.Node]]:
    from torch._functorch._aot_autograd import descriptors as d
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    known = _with_symbols(traced) if any(map(is_marked, leaves)) else {}
    arguments = [known.get(leaf, tensor) for leaf, tensor in enumerate(leaves)]
    stack.enter_context(no_states_of_gpus())
    with ordered_linalg_checks(), lazy_graph_modules():
        table = dict(decompositions)
        exported = aot_export_joint_with_descriptors(stack, traced, tuple(arguments), decompositions=table)
    graph_module = exported.graph_module
    remove_effect_tokens(graph_module)
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    results = list(zip(output.args[0], output.meta["desc"], strict=True))
    by_index = {desc.idx: node for node, desc in results if isinstance(desc, d.PlainAOTOutput)}
    values: Iterator[Any] = (node.meta.get("val") for node in graph_module.graph.nodes)
    joint = JointGraph(graph_module, next(value.fake_mode for value in values if hasattr(value, "fake_mode")))
    if known:
        joint.sizes = SizesOfArguments(joint.fake_mode, [known.get(leaf) for leaf in range(len(leaves))])
    placeholders = {node.meta["desc"]: node for node in graph_module.graph.find_nodes(op="placeholder")}
    for desc, node in placeholders.items():
        if isinstance(desc, d.PlainAOTInput):
            joint.leaf_of[node] = desc.idx
        elif isinstance(desc, d.BufferAOTInput) and desc.target.startswith(BUFFER):
            joint.number_of[node] = int(desc.target.removeprefix(BUFFER))
        elif isinstance(desc, d.ParamAOTInput | d.BufferAOTInput):
            joint.variable_of[node] = desc.target
        elif desc == d.TangentAOTInput(d.PlainAOTOutput(0)):  # the loss's tangent
            joint.tangent = node
    for node in graph_module.graph.find_nodes(op="get_attr"):
        joint.variable_of[node] = str(node.target)
    for node, desc in results:
        if isinstance(desc, d.GradAOTOutput) and isinstance(desc.grad_of, d.ParamAOTInput):
            joint.gradients[desc.grad_of.target] = node
        elif isinstance(desc, d.GradAOTOutput) and isinstance(desc.grad_of, d.PlainAOTInput):
            joint.gradients_of_leaves[desc.grad_of.idx] = node
        elif isinstance(desc, d.InputMutationAOTOutput):
            _note_mutation(joint, node, desc.mutated_input, d.TangentAOTInput(desc) in placeholders, d)
    return joint, [by_index[index] for index in range(len(by_index))]


def _note_mutation(joint: JointGraph, node: fx.Node, mutated: Any, has_gradient: bool, d: Any) -> None:
    if isinstance(mutated, d.BufferAOTInput):
        joint.buffer_writes[mutated.target] = node
        if has_gradient:
            joint.written_inputs.append(("buffer", mutated.target))
    elif isinstance(mutated, d.ParamAOTInput):
        joint.written_inputs.append(("parameter", mutated.target))
    else:
        joint.written_inputs.append(("argument", str(mutated.idx)))


def _with_symbols(traced: fx.GraphModule) -> dict[int, torch.Tensor]:
    """The trace's fake tensors, by leaf. Joint export on real tensors would lose the symbols."""
    results: Any = traced.graph.output_node().args[0]
    if any(isinstance(node, fx.Node) and is_symbolic(node.meta.get("example_value")) for node in results):
        raise SizesGivenUp("forward returns a number that is computed of sizes")
    places = [(leaf_of_placeholder(node), node) for node in traced.graph.find_nodes(op="placeholder")]
    return {leaf: node.meta["example_value"] for leaf, node in places if leaf is not None}


def traced_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The traced code's frames at an error, outermost first; empty if the error came after tracing."""
    frames: Sequence[traceback.FrameSummary] = getattr(error, "real_stack", None) or []
    cause = error.__cause__ or error.__context__
    return list(frames) if frames or cause is None else traced_frames(cause)


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return [frame for frame in traced_frames(error) if is_users_file(frame.filename)]


def failing_node(error: BaseException) -> fx.Node | None:
    failing, traced = None, error.__traceback__
    while traced is not None:
        nodes = [value for value in traced.tb_frame.f_locals.values() if isinstance(value, fx.Node)]
        failing, traced = nodes[-1] if nodes else failing, traced.tb_next
    return failing


def is_users_file(path: str) -> bool:
    if path.startswith((torch.__path__[0], *_mirrorcs_folders(), "<")):
        return False
    return not path.startswith(_STANDARD_LIBRARY) or "site-packages" in path


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


@functools.cache
def _mirrorcs_folders() -> tuple[str, ...]:
    """In a checkout, passes and runtime lie beside mirrorc."""
    specs = (importlib.util.find_spec(name) for name in ("mirrorc", "mirrorc.passes", "mirrorc.runtime"))
    folders = (folder for spec in specs if spec is not None for folder in spec.submodule_search_locations or ())
    return tuple(f"{folder}{os.sep}" for folder in folders)
