"""Every private API of torch that mirrorc uses, each behind a name of ours; a test calls each and fails when one moves."""

from __future__ import annotations

import ast
import contextlib
import logging
import os
import re
import sysconfig
import traceback
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx, nn


@dataclass
class JointGraph:
    """Forward and backward as AOTAutograd gives them, its descriptors turned into plain names.

    Attributes:
        graph_module: the functional graph.
        leaf_of: placeholder to index of the tensor argument.
        variable_of: placeholder (or get_attr node) to name of the parameter, buffer or constant.
        tangent: the placeholder for the gradient of the loss.
        loss: the node of the loss.
        gradients: parameter name to the node of its gradient, None if it has none.
        buffer_writes: buffer name to the node of its new value.
        written_inputs: other inputs that the forward writes, as ("parameter", name) or ("argument", index).
        fake_mode: the mode of the graph's fake tensors.
    """

    graph_module: fx.GraphModule
    fake_mode: Any
    tangent: fx.Node
    loss: fx.Node
    leaf_of: dict[fx.Node, int] = field(default_factory=dict)
    variable_of: dict[fx.Node, str] = field(default_factory=dict)
    gradients: dict[str, fx.Node | None] = field(default_factory=dict)
    buffer_writes: dict[str, fx.Node] = field(default_factory=dict)
    written_inputs: list[tuple[str, str]] = field(default_factory=list)

    def fake_seed(self) -> torch.Tensor:
        """A fake tensor like a replica's seed."""
        with self.fake_mode:
            return torch.empty((), dtype=torch.int64)

    def constant(self, node: fx.Node) -> torch.Tensor:
        """The tensor that a get_attr node names."""
        return _attribute(self.graph_module, str(node.target))


def trace_full_graph(module: nn.Module, leaves: Sequence[torch.Tensor]) -> fx.GraphModule:
    """Traces ``module(*leaves)`` into one graph of torch functions with Dynamo; raises what Dynamo raises."""
    from torch._dynamo import config
    from torch._dynamo.functional_export import dynamo_graph_capture_for_export

    options = {
        "assume_static_by_default": True,
        "automatic_dynamic_shapes": False,
        "ignore_logging_functions": config.ignore_logging_functions | _logging_methods(),
    }
    names = type(module).forward.__globals__
    before = set(names)
    try:
        with config.patch(options), warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            traced = dynamo_graph_capture_for_export(module)(*leaves)
        traced.meta["mirrorc_written_modules"] = _written_modules(caught)
        return traced
    finally:
        for name in set(names) - before:  # Dynamo installs its graph there, and with it the model, for ever
            if name.startswith("__compiled_fn"):
                del names[name]


_MODULE_SOURCE = r"""L\['self'\]((?:\._modules\['[^']+'\])+)(?:\._buffers|\._parameters)?["',\]]"""


def _written_modules(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """The modules whose attributes the traced forward assigns, as Dynamo reports them; other warnings are passed on.

    What forward writes to other objects (a configuration, a module of Python) is reported by a warning of torch.
    """
    written: list[str] = []
    for warning in caught:
        if "side effects" in str(warning.message):
            for source in re.findall(
                r"L\['self'\]((?:\._modules\['[^']+'\])+)(?:\._buffers|\._parameters)?[\"',\]]", str(warning.message)
            ):
                written.append(".".join(re.findall(r"'([^']+)'", source)))
        if not written:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    return written


def written_modules(traced: fx.GraphModule) -> list[str]:
    """The modules whose attributes the forward of `trace_full_graph`'s result assigns."""
    return list(traced.meta["mirrorc_written_modules"])


def _logging_methods() -> set[Callable[..., Any]]:
    names = ("debug", "info", "warning", "warning_once", "error", "exception", "critical", "log", "isEnabledFor")
    methods = {getattr(logging.Logger, name) for name in names if hasattr(logging.Logger, name)}
    return methods


def export_joint_graph(
    stack: contextlib.ExitStack,
    traced: fx.GraphModule,
    leaves: Sequence[torch.Tensor],
    decompositions: Mapping[Any, Callable[..., Any]],
) -> JointGraph:
    """The functional forward-and-backward graph of what `trace_full_graph` gave."""
    from torch._functorch._aot_autograd import descriptors as d
    from torch._functorch.aot_autograd import aot_export_joint_with_descriptors

    exported = aot_export_joint_with_descriptors(stack, traced, tuple(leaves), decompositions=dict(decompositions))
    graph_module = exported.graph_module
    output = next(node for node in graph_module.graph.nodes if node.op == "output")
    placeholders = [node for node in graph_module.graph.nodes if node.op == "placeholder"]
    tangent = next(node for node in placeholders if isinstance(node.meta["desc"], d.TangentAOTInput))
    results = list(zip(output.args[0], output.meta["desc"], strict=True))
    loss = next(node for node, desc in results if isinstance(desc, d.PlainAOTOutput))
    joint = JointGraph(graph_module, tangent.meta["val"].fake_mode, tangent, loss)
    for node in placeholders:
        desc = node.meta["desc"]
        if isinstance(desc, d.PlainAOTInput):
            joint.leaf_of[node] = desc.idx
        elif isinstance(desc, d.ParamAOTInput | d.BufferAOTInput):
            joint.variable_of[node] = desc.target
    for node in graph_module.graph.nodes:
        if node.op == "get_attr":
            joint.variable_of[node] = str(node.target)
    for node, desc in results:
        if isinstance(desc, d.GradAOTOutput) and isinstance(desc.grad_of, d.ParamAOTInput):
            joint.gradients[desc.grad_of.target] = node
        elif isinstance(desc, d.InputMutationAOTOutput):
            _note_mutation(joint, node, desc.mutated_input, d)
    return joint


def _note_mutation(joint: JointGraph, node: fx.Node, mutated: Any, d: Any) -> None:
    if isinstance(mutated, d.BufferAOTInput):
        joint.buffer_writes[mutated.target] = node
    elif isinstance(mutated, d.ParamAOTInput):
        joint.written_inputs.append(("parameter", mutated.target))
    else:
        joint.written_inputs.append(("argument", str(mutated.idx)))


def _attribute(module: nn.Module, path: str) -> torch.Tensor:
    value: Any = module
    for name in path.split("."):
        value = getattr(value, name)
    return value


def user_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """The user's frames that the tracer was in when it failed, outermost first; not those of torch, Python or mirrorc."""
    frames: Sequence[traceback.FrameSummary] = getattr(error, "real_stack", None) or []
    cause = error.__cause__ or error.__context__
    if not frames and cause is not None:
        return user_frames(cause)
    return [frame for frame in frames if is_users_file(frame.filename)]


def is_users_file(path: str) -> bool:
    """Whether a source file is neither torch's nor Python's nor mirrorc's."""
    if path.startswith((torch.__path__[0], os.path.dirname(__file__), "<")):
        return False
    return not path.startswith(_STANDARD_LIBRARY) or "site-packages" in path


_STANDARD_LIBRARY = sysconfig.get_path("stdlib")


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """The decompositions that Inductor wants to see applied.

    Dropout is kept, as it gets a random stream of its own, and what `compile_with_inductor` decomposes itself.
    """
    from torch._inductor import lowering  # noqa: F401 - some decompositions look into it
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for packet in (torch.ops.aten.native_dropout, *(kept.overloadpacket for kept in _EXPANDED_LATE)):
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    return table


_EXPANDED_LATE = (torch.ops.aten.embedding_dense_backward.default,)
"""What a pass wants to see whole, though Inductor has it decomposed."""


def _expand(graph: fx.Graph) -> None:
    """Decomposes what was kept whole, as Inductor wants it."""
    from torch._inductor.decomposition import select_decomp_table
    from torch.fx.experimental.proxy_tensor import make_fx

    table = select_decomp_table()
    for node in [node for node in graph.nodes if node.target in _EXPANDED_LATE]:
        tensors = node.all_input_nodes
        constants = node.args[len(tensors) :]
        values = [tensor.meta["val"] for tensor in tensors]
        with values[0].fake_mode:
            traced = make_fx(lambda *given: table[node.target](*given, *constants), table)(*values)  # noqa: B023
        placeholders = [inside for inside in traced.graph.nodes if inside.op == "placeholder"]
        with graph.inserting_before(node):
            made = graph.graph_copy(traced.graph, dict(zip(placeholders, tensors, strict=True)))
        node.replace_all_uses_with(made)  # type: ignore[arg-type]
        graph.erase_node(node)


def compile_with_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], num_threads: int
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles a functional ATen graph; outputs keep the strides of the graph's values.

    The result takes a list, which it empties, and gives a sequence of outputs.

    Args:
        graph_module: the graph; it is changed.
        example_inputs: fake tensors with the shapes and strides of the arguments.
        num_threads: threads that a compiled loop may use on the CPU.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes

    fake_mode = next((value.fake_mode for value in example_inputs if hasattr(value, "fake_mode")), None)
    tracing = torch._guards.tracing(torch._guards.TracingContext(fake_mode))
    with torch.no_grad(), config.patch({"cpp.threads": num_threads}), tracing:
        _expand(graph_module.graph)
        joint_graph_passes(graph_module)
        output = graph_module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        return compile_fx_inner(graph_module, list(example_inputs))


class _NoKernel:
    """Stands for a compiled kernel and computes nothing."""

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """On CPUs."""

    run = __call__  # on GPUs


def inductor_wrapper(compiled: Any) -> tuple[ast.FunctionDef, dict[str, Any]]:
    """The Python function ``call(self, args)`` that allocates memory around the kernels of `compile_with_inductor`'s result.

    Its namespace is for running it on fake tensors: kernels compute nothing, and what allocates or views memory is torch's
    own function of that name. Nothing is compiled.

    Raises:
        ValueError: there is no such function, as with Inductor's C++ wrapper.
    """
    module = ast.parse(getattr(compiled, "source_code", None) or "")
    functions = [node for node in ast.walk(module) if isinstance(node, ast.FunctionDef) and node.name == "call"]
    if len(functions) != 1:
        raise ValueError(
            f"Inductor's code has {len(functions)} functions of the name 'call', not one: it was not understood"
        )
    namespace: dict[str, Any] = {}
    prelude: list[ast.stmt] = []
    for statement in module.body:
        names = {node.id for node in ast.walk(statement) if isinstance(node, ast.Name)}
        if "async_compile" not in names:
            prelude.append(statement)
        elif isinstance(statement, ast.Assign):  # name = async_compile.cpp_pybinding(...)
            namespace.update({node.id: _NoKernel() for node in statement.targets if isinstance(node, ast.Name)})
    exec(compile(ast.Module(prelude, type_ignores=[]), "<Inductor's wrapper>", "exec"), namespace)
    for name in list(namespace):
        if name.startswith("empty_strided_"):
            namespace[name] = _empty_strided_on(name.removeprefix("empty_strided_").removesuffix("_pinned"))
    for name in ("assert_size_stride", "assert_alignment", "run_intermediate_hooks"):
        namespace[name] = _NoKernel()
    namespace["reinterpret_tensor"] = _reinterpret
    return functions[0], namespace


def _empty_strided_on(device: str) -> Callable[..., torch.Tensor]:
    return lambda size, stride, dtype: torch.empty_strided(size, stride, dtype=dtype, device=device)


def _reinterpret(tensor: torch.Tensor, size: Sequence[int], stride: Sequence[int], offset: int) -> torch.Tensor:
    return torch.as_strided(tensor, size, stride, tensor.storage_offset() + offset)


def storage_key(tensor: torch.Tensor) -> int:
    """A number for a tensor's memory, also a fake one's: tensors that share memory have the same, as long as one is alive."""
    return int(tensor.untyped_storage()._cdata)


def peak_allocation(action: Callable[[], object], given: Sequence[torch.Tensor]) -> int:
    """Bytes of the tensors that operators of torch make in an action, at the moment when most are alive.

    What operators allocate and free within themselves is not seen.

    Args:
        action: what is watched; called once.
        given: the tensors that were there before.
    """
    known = {storage_key(tensor) for tensor in given}
    holders: dict[int, int] = {}
    sizes: dict[int, int] = {}
    peak = 0

    def drop(key: int) -> None:
        holders[key] -= 1
        if not holders[key]:
            del holders[key], sizes[key]

    def note(operator: Any, args: Any, result: Any) -> None:
        nonlocal peak
        for tensor in result if isinstance(result, list | tuple) else [result]:
            if isinstance(tensor, torch.Tensor) and storage_key(tensor) not in known:
                key = storage_key(tensor)
                holders[key], sizes[key] = holders.get(key, 0) + 1, tensor.untyped_storage().nbytes()
                weakref.finalize(tensor, drop, key)
        peak = max(peak, sum(sizes.values()))

    with watched_operators(note):
        action()
    return peak


@contextlib.contextmanager
def watched_operators(note: Callable[[Any, tuple[Any, ...], Any], None]) -> Iterator[None]:
    """Calls ``note(operator, args, result)`` after every operator of torch that this thread runs, on fake tensors too."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            note(func, args, result)
            return result

    with Watch():
        yield


def lazy_graph_module(root: nn.Module | dict[str, Any], graph: fx.Graph, class_name: str) -> fx.GraphModule:
    """A graph module that writes its Python code when somebody asks for it or calls it: mirrorc seldom does."""
    from torch.fx._lazy_graph_module import _LazyGraphModule

    return _LazyGraphModule(root, graph, class_name=class_name)


def add_node(
    graph: fx.Graph,
    op: str,
    target: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    name: str,
    type_expr: Any = None,
) -> fx.Node:
    """`Graph.create_node`, in a third of the time: without its walk through all arguments, in search of symbolic sizes.

    For passes that copy graphs of many nodes, in which sizes are numbers.
    """
    name = graph._graph_namespace.create_name(name, None)
    node = fx.Node(graph, name, op, target, args, kwargs, type_expr)
    graph._graph_namespace.associate_name_with_obj(name, node)
    graph._insert(node)
    graph._find_nodes_lookup_table.insert(node)
    graph._len += 1
    return node


@contextlib.contextmanager
def quiet_fake_tensors() -> Iterator[None]:
    """Keeps torch from logging a traceback of what an operator raises on fake tensors, for who says it anyway."""
    from torch._subclasses.fake_tensor import log

    was, log.disabled = log.disabled, True
    try:
        yield
    finally:
        log.disabled = was


def is_structured_trace_on() -> bool:
    """Whether torch writes a structured trace (the environment variable TORCH_TRACE, or a handler of one's own)."""
    from torch._logging._internal import LazyTraceHandler, trace_log

    # one that waits for a folder which nobody named takes itself away when it is first written to
    return any(not isinstance(h, LazyTraceHandler) or h.root_dir is not None for h in trace_log.handlers)


def trace_artifact(name: str, text: str) -> None:
    """Adds a text to torch's structured trace, where tlparse shows it as a file."""
    from torch._logging._internal import trace_structured

    metadata = {"name": name, "encoding": "string"}
    trace_structured("artifact", metadata_fn=lambda: metadata, payload_fn=lambda: text, expect_trace_id=False)


def has_cpp_compiler() -> bool:
    """Whether Inductor finds a C++ compiler."""
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        get_cpp_compiler()
    except (InvalidCxxCompiler, OSError, RuntimeError):
        return False
    return True


def mark_optimizer_stepped(optimizer: torch.optim.Optimizer) -> None:
    """Tells LR schedulers that the optimizer has stepped, though its own ``step`` was not called."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


def has_step_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Whether the user hooked into ``optimizer.step``."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


def hook_tables(module: nn.Module) -> list[Mapping[Any, Any]]:
    """The tables that a module's forward and backward hooks are in, live."""
    names = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return [getattr(module, name) for name in names]


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Whether the user hooked into a tensor's gradient."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def torch_modes() -> tuple[Any, ...]:
    """Settings of torch that shape a captured graph or its compiled code."""
    autocast = tuple(
        (kind, torch.get_autocast_dtype(kind)) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind)
    )
    return (
        autocast,
        torch.get_default_dtype(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_float32_matmul_precision(),
    )


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill its memory without gaps and overlaps, in whatever order."""
    return bool(torch.ops.aten.is_non_overlapping_and_dense.default(tensor))
