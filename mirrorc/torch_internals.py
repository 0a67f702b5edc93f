"""Every private API of torch that mirrorc uses, each behind a name of ours; a test calls each and fails when one moves."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import logging
import os
import re
import sysconfig
import threading
import traceback
import warnings
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
    """The decompositions that Inductor wants to see applied; dropout is kept, it gets a random stream of its own."""
    from torch._inductor import lowering  # noqa: F401 - some decompositions look into it
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for overload in ("default", "out"):
        table.pop(getattr(torch.ops.aten.native_dropout, overload), None)
    return table


def compile_with_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], num_threads: int
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles a functional ATen graph, or finds it in Inductor's cache; outputs keep the strides of the graph's values.

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
    with torch.no_grad(), config.patch({"cpp.threads": num_threads}), tracing, _room_for_symbols(fake_mode):
        joint_graph_passes(graph_module)
        output = graph_module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        graph_module.meta["mirrorc"] = (
            "all outputs keep their strides"  # a part of the cache's key, as the line above is not
        )
        return compile_fx_inner(graph_module, list(example_inputs))


@contextlib.contextmanager
def _room_for_symbols(fake_mode: Any) -> Iterator[None]:
    """Lends a mode of fake tensors an environment of symbolic sizes: Inductor's cache is used with one only.

    It stays empty: whether sizes become symbols was decided when the mode was made.
    """
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if fake_mode is None or fake_mode.shape_env is not None:
        yield
        return
    fake_mode.shape_env = ShapeEnv()
    try:
        yield
    finally:
        fake_mode.shape_env = None


_unfinished: contextvars.ContextVar[list[Callable[[], None]] | None] = contextvars.ContextVar(
    "unfinished", default=None
)


@contextlib.contextmanager
def kernels_compiled_together() -> Iterator[None]:
    """Within, `compile_with_inductor` does not wait for the C++ compiler, which works while more is lowered; its end does.

    What `compile_with_inductor` gives must not be called before the end.

    Raises:
        Exception: at the end, what Inductor raises if a kernel cannot be compiled.
    """
    _let_waits_be_put_off()
    waits: list[Callable[[], None]] = []
    token = _unfinished.set(waits)
    try:
        yield
    finally:
        _unfinished.reset(token)
    for wait in waits:
        wait()


@functools.cache
def _let_waits_be_put_off() -> None:
    """Inductor's modules end with a wait for their kernels, which takes the place of each among their globals."""
    from torch._inductor.async_compile import AsyncCompile

    wait_now = AsyncCompile.wait

    def wait(self: AsyncCompile, scope: dict[str, Any]) -> None:
        waits = _unfinished.get()
        if waits is None:
            wait_now(self, scope)
        else:
            waits.append(functools.partial(wait_now, self, scope))

    AsyncCompile.wait = wait  # type: ignore[method-assign]


def prepare_cpp_compiler() -> None:
    """Begins, in threads, what Inductor would do before its first kernel of a process, so that capturing goes on meanwhile.

    Inductor tries the processor's vector instructions one after the other, each with a file or more that it compiles (once for
    a cache) and loads in a process of its own. Who asks Inductor for its instructions waits until all are tried. What fails
    here fails again, and is said, when a kernel is compiled.
    """
    _let_instructions_be_tried_together()
    _instructions_tried(os.getpid())


@functools.cache
def _let_instructions_be_tried_together() -> None:
    """A trial changes its instructions' flags for a while, so that no other thread may try them at the same time."""
    from torch._inductor import cpu_vec_isa

    try_one_by_one = cpu_vec_isa.valid_vec_isa_list

    def valid_vec_isa_list() -> list[Any]:
        _instructions_tried(os.getpid()).wait()
        return try_one_by_one()

    cpu_vec_isa.valid_vec_isa_list = valid_vec_isa_list  # type: ignore[assignment]


def _instructions_tried(process: int) -> threading.Event:
    """Set when a process has tried them, which begins with the first call: threads do not live on in what is forked."""
    with _preparing:
        if process not in _prepared:
            _prepared.clear()
            _prepared[process] = _try_instructions()
        return _prepared[process]


_preparing, _prepared = threading.Lock(), dict[int, threading.Event]()


def _try_instructions() -> threading.Event:
    from torch._inductor import codecache, cpp_builder  # noqa: F401 - here, as several threads will ask for them
    from torch._inductor.cpu_vec_isa import supported_vec_isa_list, x86_isa_checker

    known = set(x86_isa_checker())
    trials = [
        _started(functools.partial(bool, instructions))
        for instructions in supported_vec_isa_list
        if known.issuperset(str(instructions).split())
    ]
    is_tried = threading.Event()

    def tell() -> None:
        for trial in trials:
            trial.join()
        is_tried.set()

    _started(tell)
    return is_tried


def _started(job: Callable[[], Any]) -> threading.Thread:
    """A thread that does a job with the settings of its maker, and ends with the process."""
    context = contextvars.copy_context()  # Inductor's settings are context variables

    def run() -> None:
        with contextlib.suppress(Exception):
            context.run(job)

    thread = threading.Thread(target=run, name="mirrorc C++ compiler", daemon=True)
    thread.start()
    return thread


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
