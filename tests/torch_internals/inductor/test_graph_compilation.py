"""Compiling a graph with Inductor, and looking for the compiler that it needs."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from traced_graphs import sine_of

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.inductor.graph_compilation import _INDEX_PUTS, in_strides

aten = torch.ops.aten


def test_inductor_decompositions_keep_dropout() -> None:
    table = internals.inductor_decompositions()
    assert aten.native_dropout.default not in table
    assert aten.native_layer_norm_backward.default in table or aten.addcmul.default in table
    from torch._inductor.decomposition import select_decomp_table

    assert aten.native_dropout.default in select_decomp_table(), "the table that mirrorc copies was changed"


def test_a_pooling_is_decomposed_into_two_operators() -> None:
    """What follows from the result of one, in its windows, are the places that the other tells."""
    with FakeTensorMode():
        x = torch.empty(2, 3, 8, 8)
    table = internals.inductor_decompositions()
    pooled = internals.traced_on_fake_tensors(lambda x: aten.max_pool2d_with_indices(x, [2, 2])[1], [x], table)
    operators = [node for node in pooled.nodes if node.op == "call_function" and internals.is_operator(node.target)]
    assert [internals.pools_maxima(node.target) for node in operators] == [True, False]
    assert [internals.tells_places_of_maxima(node.target) for node in operators] == [False, True]
    (window,) = operators[1].all_input_nodes
    assert (window.meta["val"].dtype, operators[1].meta["val"].dtype) == (torch.int8, torch.int64)


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("padding_idx", [-1, 2])
def test_gradients_of_tables_are_kept_for_passes_and_decomposed_for_inductor(padding_idx: int) -> None:
    target = aten.embedding_dense_backward.default
    assert target not in internals.inductor_decompositions()
    graph = fx.Graph()
    rows, indices = graph.placeholder("rows"), graph.placeholder("indices")
    gradient = graph.call_function(target, (rows, indices, 9, padding_idx, False))
    graph.output((gradient,))
    with FakeTensorMode():
        rows.meta["val"], indices.meta["val"] = torch.empty(5, 2, 4), torch.empty(5, 2, dtype=torch.int64)
        gradient.meta["val"] = torch.empty(9, 4)
    examples = [rows.meta["val"], indices.meta["val"]]
    function = internals.compile_with_inductor(fx.GraphModule({}, graph), examples, num_threads=1)
    given = [torch.randn(5, 2, 4), torch.randint(9, (5, 2))]
    (found,) = function(list(given))
    torch.testing.assert_close(found, target(*given, 9, padding_idx, False))


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_compile_with_inductor_computes_and_keeps_strides() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(aten.sin.default, (graph.call_function(aten.permute.default, (x, [1, 0])),))
    graph.output((y, graph.call_function(aten.sum.default, (y,))))
    with FakeTensorMode():
        x.meta["val"] = torch.empty(4, 6)
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda n: n.meta["val"]))
    stride = y.meta["val"].stride()
    function = internals.compile_with_inductor(fx.GraphModule({}, graph), [x.meta["val"]], num_threads=1)
    given = torch.randn(4, 6)
    box = [given]
    found, total = function(box)
    assert box == [] and found.stride() == stride
    torch.testing.assert_close(found, given.t().sin())
    torch.testing.assert_close(total, given.sin().sum())


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_outputs_of_products_that_torch_pads_keep_their_strides(monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs torch makes products of odd sizes as parts of larger ones, whose rows are longer."""
    from torch._inductor.fx_passes import pad_mm

    monkeypatch.setattr(pad_mm, "should_pad", lambda *_, **__: True)

    def body(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, ...]:
        product, shifted = aten.mm(x, weight), aten.addmm(bias, x, weight)
        return product, aten.view(product, [3, 2, 7]), product.sin(), shifted, aten.permute(shifted, [1, 0]), x.sum()

    with FakeTensorMode():
        examples = [torch.empty(6, 5), torch.empty(5, 7), torch.empty(7)]
    graph = internals.traced_on_fake_tensors(body, examples, {})
    strides = [node.meta["val"].stride() for node in graph.output_node().args[0]]
    function = internals.compile_with_inductor(fx.GraphModule({}, graph), examples, num_threads=1)
    given = [torch.randn(6, 5), torch.randn(5, 7), torch.randn(7)]
    found = function(list(given))
    assert "8" in function.source_code and [value.stride() for value in found] == strides
    for one, other in zip(found, body(*given), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_compile_with_inductor_finds_what_it_compiled_in_the_cache_and_not_what_others_did() -> None:
    from torch._dynamo.utils import counters
    from torch._inductor.compile_fx import compile_fx_inner
    from torch._inductor.utils import fresh_cache
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    def lookups() -> tuple[int, int]:
        return counters["inductor"]["fxgraph_cache_miss"], counters["inductor"]["fxgraph_cache_hit"]

    with fresh_cache():
        misses, hits = lookups()
        for _ in range(2):
            graph_module, examples = sine_of(5)
            function = internals.compile_with_inductor(graph_module, examples, num_threads=1)
            assert examples[0].fake_mode.shape_env is None  # type: ignore[attr-defined]
        assert lookups() == (misses + 1, hits + 1)
        given = torch.randn(5, 3)
        torch.testing.assert_close(function([given])[0], given.sin())
        graph_module, examples = sine_of(5)
        mode = examples[0].fake_mode  # type: ignore[attr-defined]
        mode.shape_env = ShapeEnv()
        tracing = torch._guards.tracing(torch._guards.TracingContext(mode))
        with torch.no_grad(), torch._inductor.config.patch({"cpp.threads": 1}), tracing:
            compile_fx_inner(graph_module, examples)
        assert lookups() == (misses + 2, hits + 1)


def test_has_cpp_compiler_sees_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder, exc

    def none() -> str:
        raise exc.InvalidCxxCompiler

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", none)
    assert internals.has_cpp_compiler() is False and internals.cpp_compiler() is None


def test_has_cpp_compiler_sees_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import cpp_builder

    monkeypatch.setattr(cpp_builder, "get_cpp_compiler", lambda: "g++")
    assert internals.has_cpp_compiler() is True and internals.cpp_compiler() == "g++"


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_an_operator_of_ours_becomes_a_call_of_torchs_function() -> None:
    def negate_into(out: torch.Tensor, x: torch.Tensor) -> None:
        torch.neg(x, out=out)

    with torch.library._scoped_library("mirrorc_direct_calls", "DEF") as library:
        library.define("neg_into(Tensor(a!) out, Tensor x) -> ()")
        library.impl("neg_into", negate_into, "CompositeExplicitAutograd")
        torch.library.register_fake("mirrorc_direct_calls::neg_into", lambda out, x: None, lib=library)
        operator = torch.ops.mirrorc_direct_calls.neg_into.default
        internals.call_directly(operator, "torch.neg({1}, out={0})")
        graph = fx.Graph()
        out, x = graph.placeholder("out"), graph.placeholder("x")
        doubled = graph.call_function(aten.add.Tensor, (x, x))
        graph.call_function(operator, (out, doubled)).meta["val"] = None
        graph.output((graph.call_function(aten.mul.Tensor, (x, 3.0)),))
        with FakeTensorMode():
            for node in graph.nodes:
                node.meta["val"] = torch.empty(4, 6) if node.target is not operator else None
        examples = [out.meta["val"], x.meta["val"]]
        function = internals.compile_with_inductor(fx.GraphModule({}, graph), examples, num_threads=1)
        assert "torch.neg(" in function.source_code and "torch.ops.mirrorc" not in function.source_code
        into, given = torch.empty(4, 6), torch.randn(4, 6)
        (found,) = function([into, given])
    assert torch.equal(into, -2 * given) and torch.equal(found, 3 * given)


def _added_to_expanded(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    return x.new_zeros(1, 4).expand(3, 4).index_add(0, index, x * 2).sin()


def _overwritten_by_own_views(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    y = x * 2
    return y.index_copy(1, index, y.flatten()[:9].reshape(3, 3)).sin()


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("function", [_added_to_expanded, _overwritten_by_own_views], ids=lambda f: f.__name__)
def test_what_torch_compiles_wrongly_is_right_here(function: Any) -> None:
    given = [torch.randn(3, 4, generator=torch.Generator().manual_seed(0)), torch.tensor([0, 2, 1])]
    expected = function(*given)
    torch.testing.assert_close(_compiled(function, given, num_threads=1), expected)
    of_torch = torch.compile(function)(*given)
    assert not torch.allclose(of_torch, expected), "torch has mended it: graph_compilation.py need not work around it"


def _compiled(function: Any, values: list[torch.Tensor], num_threads: int) -> torch.Tensor:
    with FakeTensorMode() as mode:
        examples = [mode.from_tensor(value) for value in values]
    graph = internals.traced_on_fake_tensors(
        lambda *values: (function(*values),), examples, internals.inductor_decompositions()
    )
    compiled = internals.compile_with_inductor(fx.GraphModule({}, graph), examples, num_threads)
    return compiled(list(values))[0]  # type: ignore[no-any-return]


def _added_to_an_element(x: torch.Tensor) -> torch.Tensor:
    return x.flatten()[:1].index_put((torch.zeros(36, dtype=torch.long),), x.flatten(), accumulate=True)


def _added_to_an_element_each(x: torch.Tensor) -> torch.Tensor:
    return x[0].index_put((torch.arange(6)[:, None].expand(6, 6),), x, accumulate=True)


def _added_in_tiles(x: torch.Tensor) -> torch.Tensor:
    rows = torch.arange(6)
    return torch.zeros(6, 6).index_put((rows[:, None], rows), x.t() * x.sin(), accumulate=True)


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("function", [_added_to_an_element, _added_to_an_element_each, _added_in_tiles])
def test_kernels_of_several_threads_add_at_the_indices(function: Any) -> None:
    x = torch.randn(6, 6, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_compiled(function, [x], num_threads=2), function(x))


def _added_before_it_is_read(
    x: torch.Tensor, y: torch.Tensor, index: torch.Tensor, out: torch.Tensor, other: torch.Tensor
) -> torch.Tensor:
    """Least memory is used if the sums of ``y`` come first, and the values to add as late as possible."""
    early, late = y.cumsum(0), x.cumsum(0)
    added = x.new_zeros(20).index_put((index,), x.repeat(2, 1).cumsum(0).flatten(), accumulate=True).view(4, 5)
    value = (late + added).exp()
    out.copy_(value.slice_scatter(value[:3].sin(), 0, 0, 3))
    other.copy_(early.cumsum(0))
    return out


@pytest.mark.slow
@pytest.mark.skipif(not internals.has_cpp_compiler(), reason="no C++ compiler")
def test_what_is_added_to_is_read_afterwards_though_another_order_takes_less_memory() -> None:
    generator = torch.Generator().manual_seed(0)
    values = list(torch.randn(4, 4, 5, dtype=torch.float64, generator=generator).unbind())
    values.insert(2, torch.arange(40) % 20)
    expected = _added_before_it_is_read(*[value.clone() for value in values])
    torch.testing.assert_close(_compiled(_added_before_it_is_read, values, num_threads=1), expected)


def test_compilations_that_overlap_keep_index_put_out_of_place_until_the_last_ends() -> None:
    from torch._inductor.fx_passes.reinplace import inplaceable_ops

    operator = torch.ops.aten.index_put.default
    first, second = _INDEX_PUTS.never_in_place(), _INDEX_PUTS.never_in_place()
    assert operator in inplaceable_ops
    for context in (first, second):
        context.__enter__()
    first.__exit__(None, None, None)
    assert operator not in inplaceable_ops, "the second still compiles"
    second.__exit__(None, None, None)
    assert operator in inplaceable_ops


class Compiled(SimpleNamespace):
    def __call__(self, arguments: list[Any]) -> list[Any]:
        arguments.clear()
        return self.outputs


@pytest.mark.parametrize("strides", [(5, 1), (1, 4), (10, 3), (0, 2)])
def test_values_laid_out_otherwise_than_in_the_graph_are_copied(strides: tuple[int, int]) -> None:
    value = torch.arange(12.0).reshape(4, 3)
    value = value[:1].expand(4, 3) if strides[0] == 0 else value
    other = torch.ones(2)
    actual = [tuple(map(str, value.stride())) if strides[0] else ("3", "1"), ("1",), None]
    function = in_strides(Compiled(outputs=[value, other, 7], output_strides=actual), [strides, (1,), None])
    arguments: list[Any] = [other]
    copied, same, number = function(arguments)
    assert copied.stride() == strides and torch.equal(copied, value) and copied.data_ptr() != value.data_ptr()
    assert same is other and number == 7 and arguments == []


def test_a_function_with_the_strides_of_the_graph_is_left_as_it_is() -> None:
    compiled = Compiled(output_strides=[("3", "1"), None])
    assert in_strides(compiled, [(3, 1), None]) is compiled
