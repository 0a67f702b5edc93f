"""Compiles one graph with Inductor, in which operators of mirrorc are called directly."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.torch_internals.fx.graphs import traced_on_fake_tensors
from mirrorc.torch_internals.hooks.settings import is_dense
from mirrorc.torch_internals.symbols.symbolic_sizes import assume_num_elements, has_symbols, num_elements_now, sizes_key


def inductor_decompositions() -> dict[Any, Callable[..., Any]]:
    """Decompositions that Inductor expects in a graph.

    Dropout is left out, because it gets its own random stream; `_EXPANDED_LATE`, because passes look for these
    operators. Values with gaps or overlaps are copied where Inductor would write to them or change their layout.
    """
    from torch._inductor import lowering  # noqa: F401 - some decompositions look into it
    from torch._inductor.decomposition import select_decomp_table

    table = dict(select_decomp_table())
    for packet in (torch.ops.aten.native_dropout, *(operator.overloadpacket for operator in _EXPANDED_LATE)):
        for overload in packet.overloads():
            table.pop(getattr(packet, overload), None)
    for operator in _SCATTERS:
        table[operator] = functools.partial(_scatter_into_dense, operator, table.get(operator))
    table[torch.ops.aten.unfold.default] = _copy_overlapping_windows
    table[torch.ops.aten._efficientzerotensor.default] = torch.zeros  # of torch.func.jvp; Inductor cannot save them
    return table


_aten = torch.ops.aten
_SCATTERS = (
    *(_aten.index_put.default, _aten.scatter.src, _aten.scatter.value, _aten.scatter_add.default),
    *(_aten.scatter_reduce.two, _aten.masked_scatter.default, _aten.select_scatter.default),
    *(_aten.slice_scatter.default, _aten.diagonal_scatter.default),
)
"""Operators that write to a copy of their first argument. Inductor's copy of an expanded tensor is itself expanded."""


def _scatter_into_dense(
    operator: Any, decomposition: Callable[..., Any] | None, value: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    if not is_dense(value):
        return operator(value.clone(memory_format=torch.contiguous_format), *args, **kwargs)
    return decomposition(value, *args, **kwargs) if decomposition is not None else NotImplemented


def _copy_overlapping_windows(value: torch.Tensor, dim: int, size: int, step: int) -> Any:
    """Inductor returns windows without their overlaps, but backward expects them."""
    if step >= size:
        return NotImplemented
    dim = dim % value.dim()
    firsts = torch.arange(0, value.shape[dim] - size + 1, step, device=value.device)
    places = firsts[:, None] + torch.arange(size, device=value.device)
    return value.index_select(dim, places.flatten()).unflatten(dim, places.shape).movedim(dim + 1, -1)


_EXPANDED_LATE = (
    torch.ops.aten.embedding_dense_backward.default,
    torch.ops.aten.gelu.default,
    torch.ops.aten.gelu_backward.default,
)
"""Operators that `compile_with_inductor` decomposes."""


def pools_maxima(target: Any) -> bool:
    """Inductor's operator that returns the maxima of windows and their positions in windows."""
    return str(target._schema.name) == "prims::_low_memory_max_pool_with_offsets"


def tells_places_of_maxima(target: Any) -> bool:
    """Inductor's operator that maps 8-bit positions in windows to 64-bit positions in the input."""
    return str(target._schema.name) == "prims::_low_memory_max_pool_offsets_to_indices"


def _expand(graph: fx.Graph) -> None:
    from torch._inductor.decomposition import select_decomp_table

    table = select_decomp_table()
    for node in [node for node in graph.nodes if node.target in _EXPANDED_LATE]:
        tensors = node.all_input_nodes
        decomposition = functools.partial(_apply, table[node.target], node.args[len(tensors) :], node.kwargs)
        body = traced_on_fake_tensors(decomposition, [tensor.meta["val"] for tensor in tensors], table)
        placeholders = [inside for inside in body.nodes if inside.op == "placeholder"]
        with graph.inserting_before(node):
            made = graph.graph_copy(body, dict(zip(placeholders, tensors, strict=True)))
        node.replace_all_uses_with(made)
        graph.erase_node(node)


def _apply(decomposition: Callable[..., Any], constants: Any, keywords: Mapping[str, Any], *tensors: Any) -> Any:
    return decomposition(*tensors, *constants, **keywords)


class _IndexPuts:
    """Keeps Inductor from in-place `index_put`, because it overlooks that new rows may be views of old ones.

    Torch's table is global: it is restored when no thread compiles.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._num_inside = 0
        self._taken: dict[Any, Any] = {}

    @contextlib.contextmanager
    def never_in_place(self) -> Iterator[None]:
        from torch._inductor.fx_passes.reinplace import inplaceable_ops

        with self._lock:
            self._num_inside += 1
            for operator in (torch.ops.aten.index_put.default, torch.ops.aten._unsafe_index_put.default):
                if operator in inplaceable_ops:
                    self._taken[operator] = inplaceable_ops.pop(operator)
        try:
            yield
        finally:
            with self._lock:
                self._num_inside -= 1
                if not self._num_inside:
                    inplaceable_ops.update(self._taken)
                    self._taken.clear()


_INDEX_PUTS = _IndexPuts()


def compile_with_inductor(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], num_threads: int
) -> Callable[[list[Any]], Sequence[Any]]:
    """Compiles a functional ATen graph, and modifies it. Outputs have the strides of the graph.

    The compiled function empties its list of inputs.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.fx_passes.joint_graph import joint_graph_passes
    from torch._inductor.virtualized import V

    _correct_scatter_indices()
    _keep_mutation_order()
    fake_mode = next((value.fake_mode for value in example_inputs if hasattr(value, "fake_mode")), None)
    tracing = torch._guards.tracing(torch._guards.TracingContext(fake_mode))
    with torch.no_grad(), config.patch({"cpp.threads": num_threads}), tracing, _room_for_symbols(fake_mode):
        _expand(graph_module.graph)
        products, wanted = _products(graph_module.graph), _strides_of_outputs(graph_module.graph)
        with V.set_fake_mode(fake_mode):  # torch 2.11 needs it for the traces of replacements
            joint_graph_passes(graph_module)
        if _products(graph_module.graph) != products:
            _keep_strides(graph_module, example_inputs, wanted)
        output = graph_module.graph.output_node()
        output.meta["user_visible_output_idxs"] = list(range(len(output.args[0])))  # type: ignore[arg-type]
        # part of the cache key, unlike the settings around it and the calls of `call_directly`
        graph_module.meta["mirrorc"] = (
            "all outputs keep their strides, some operators are called directly, index_put never in place,"
            " scatters at their indices, kernels in the order of writes"
        )
        with _INDEX_PUTS.never_in_place():
            return in_strides(compile_fx_inner(graph_module, list(example_inputs)), wanted)


def _products(graph: fx.Graph) -> list[fx.Node]:
    aten = torch.ops.aten
    return [node for node in graph.nodes if node.target in (aten.mm.default, aten.addmm.default, aten.bmm.default)]


def _strides_of_outputs(graph: fx.Graph) -> list[Any]:
    outputs: Any = graph.output_node().args[0]
    values = [node.meta.get("val") if isinstance(node, fx.Node) else None for node in outputs]
    return [value.stride() if isinstance(value, torch.Tensor) else None for value in values]


def _keep_strides(graph_module: fx.GraphModule, example_inputs: Sequence[Any], wanted: Sequence[Any]) -> None:
    """Restores strides of outputs. On GPUs, torch changes them by padding operands of products."""
    from torch._inductor.compile_fx import fake_tensor_prop
    from torch._inductor.fx_passes.post_grad import view_to_reshape

    graph = graph_module.graph
    view_to_reshape(graph_module)  # a view may be impossible on the padded product
    graph_module.recompile()
    fake_tensor_prop(graph_module, list(example_inputs))
    output = graph.output_node()
    outputs = []
    for node, strides, current in zip(output.args[0], wanted, _strides_of_outputs(graph), strict=True):  # type: ignore[arg-type]
        if strides != current:
            value = node.meta["val"]
            with graph.inserting_before(output):
                memory = graph.call_function(torch.ops.aten.new_empty_strided.default, (node, value.shape, strides))
                node = graph.call_function(torch.ops.aten.copy.default, (memory, node))
        outputs.append(node)
    output.args = (tuple(outputs),)
    graph_module.recompile()


_LARGER = 16


def keep_small_loops_small(graph: fx.Graph, num_threads: int) -> None:
    """Adds guards on the lengths of CPU loops that are too short for several threads at compilation.

    Inductor chooses parallel loops at compilation. The guards allow 16 times the shortest parallel loop.
    """
    from torch._inductor import config

    if num_threads < 2:
        return
    fewest, seen = config.cpp.min_chunk_size * num_threads, set()
    for node in graph.nodes:
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.device.type == "cpu" and has_symbols(value):
            key = sizes_key(value.shape)
            if key not in seen and num_elements_now(value) < fewest:
                assume_num_elements([value], most=fewest * _LARGER)
            seen.add(key)


@contextlib.contextmanager
def _room_for_symbols(fake_mode: Any) -> Iterator[None]:
    """Gives a fake mode a shape environment, because Inductor does not use its cache without one."""
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    if fake_mode is None or fake_mode.shape_env is not None:
        yield
        return
    fake_mode.shape_env = ShapeEnv()
    try:
        yield
    finally:
        fake_mode.shape_env = None


def cpp_compiler() -> str | None:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        return get_cpp_compiler()
    except (InvalidCxxCompiler, OSError, RuntimeError):
        return None


def has_cpp_compiler() -> bool:
    return cpp_compiler() is not None


@functools.cache
def _keep_mutation_order() -> None:
    """Corrects Inductor's order of kernels, in the whole process.

    A kernel that reads a buffer after an in-place write depends on that write, through a renamed buffer or an extra
    dependency. When Inductor recomputes loops to fuse kernels, it loses both, so the kernel may run before the write
    (pytorch#185509, pytorch#177631).
    """
    from torch._inductor.dependencies import StarDep, WeakDep
    from torch._inductor.scheduler import SchedulerNode

    original = SchedulerNode.recompute_size_and_body

    def recompute_size_and_body(self: Any, *args: Any, **kwargs: Any) -> None:
        added = [dependency for dependency in self.read_writes.reads if isinstance(dependency, StarDep | WeakDep)]
        original(self, *args, **kwargs)
        for dependency in added:
            self.add_fake_dep(dependency)
        self.set_read_writes(self.read_writes.rename(self.mutation_renames))

    SchedulerNode.recompute_size_and_body = recompute_size_and_body  # type: ignore[method-assign]


@functools.cache
def _correct_scatter_indices() -> None:
    """Corrects Inductor's multi-threaded kernels that add to elements, in the whole process.

    Adding a vector to a single element fails an assertion (pytorch#160391). In tiled loops, which transpose, Inductor
    counts the position within a tile twice, and writes to wrong elements or past the end (pytorch#191837).
    """
    from torch._inductor.codegen.cpp import CppTile2DKernel, CppVecKernel
    from torch._inductor.ops_handler import WrapperHandler
    from torch._inductor.virtualized import V

    class VectorIndices(WrapperHandler):
        def index_expr(self, expression: Any, dtype: Any) -> Any:
            index = self._inner.index_expr(expression, dtype)
            return index if index.is_vec else V.kernel.broadcast(index)

    original_store, original_index = CppVecKernel.store, CppTile2DKernel.transform_indexing

    def store(self: Any, name: str, index: Any, value: Any, mode: Any = None) -> Any:
        with (
            V.set_ops_handler(VectorIndices(V.get_ops_handler())) if mode == "atomic_add" else contextlib.nullcontext()
        ):
            return original_store(self, name, index, value, mode)

    def transform_indexing(self: Any, index: Any) -> Any:
        return index if index.has(self.inner_itervar()) else original_index(self, index)

    CppVecKernel.store = store  # type: ignore[method-assign]
    CppTile2DKernel.transform_indexing = transform_indexing  # type: ignore[method-assign]


Compiled = Callable[[list[Any]], Sequence[Any]]


def in_strides(function: Any, wanted: Sequence[tuple[Any, ...] | None]) -> Compiled:
    """Copies outputs that do not have the wanted strides.

    Inductor chooses the layout of values with gaps or expanded dims, but backward takes the strides of the graph.
    """
    actual = function.output_strides or [None] * len(wanted)
    others = {
        place: strides
        for place, (strides, texts) in enumerate(zip(wanted, actual, strict=True))
        if strides is not None and texts is not None and _are_numbers(strides) and texts != tuple(map(str, strides))
    }
    if not others:
        return function

    def laid_out(arguments: list[Any]) -> Sequence[Any]:
        outputs = list(function(arguments))
        for place, strides in others.items():
            outputs[place] = _copied(outputs[place], strides)
        return outputs

    return laid_out


def _are_numbers(strides: Sequence[Any]) -> bool:
    return all(isinstance(stride, int) for stride in strides)


def _copied(value: torch.Tensor, strides: Sequence[int]) -> torch.Tensor:
    shape = value.shape
    for dim, stride in enumerate(strides):
        if stride == 0 and shape[dim]:
            value = value.narrow(dim, 0, 1)
    memory = torch.empty_strided(value.shape, strides, dtype=value.dtype, device=value.device)
    return memory.copy_(value).expand(shape)


@functools.cache
def call_directly(operator: Any, call: str) -> None:
    """Makes Inductor call an operator's Python function directly, without the dispatcher.

    Args:
        operator: takes only tensors, writes the first, and returns nothing.
        call: code of the call, with ``{0}`` for the first argument. It can use names such as ``extern_kernels``.
    """
    from torch._inductor import ir, lowering
    from torch._inductor.virtualized import V

    class DirectCall(ir.ExternKernel):
        def __init__(self, arguments: list[Any]) -> None:
            inputs = self.unwrap_storage([self.realize_input(argument) for argument in arguments])
            super().__init__(None, ir.NoneLayout(device=arguments[0].get_device()), inputs, op_overload=operator)
            V.graph.mark_buffer_mutated(self.input_name(0))
            self.name = V.graph.register_buffer(self)
            V.graph.register_operation(self)

        def codegen(self, wrapper: Any) -> None:
            inputs: Any = self.inputs
            wrapper.writeline(call.format(*(argument.codegen_reference() for argument in inputs)))

        def should_allocate(self) -> bool:
            return False

        def has_side_effects(self) -> bool:
            return True

        def get_mutation_names(self) -> list[str]:
            return [self.input_name(0)]

    plain = lowering.fallback_handler(operator, add_to_fallback_set=False)

    def lowered(*arguments: Any) -> Any:
        if V.graph.cpp_wrapper:
            return plain(*arguments)
        DirectCall(list(arguments))
        return None

    lowering.register_lowering(operator, type_promotion_kind=None)(lowered)
