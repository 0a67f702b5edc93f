import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.custom_ops import out_products
from mirrorc.ir.program import Region
from mirrorc.runtime.codegen import inductor
from mirrorc.runtime.codegen.regions import Backend, RegionCompiler, RegionFunction, backend_named, retarget
from mirrorc.torch_internals import has_cpp_compiler

aten = torch.ops.aten
CPU, META = torch.device("cpu"), torch.device("meta")


def small_region() -> Region:
    graph, fake_mode = fx.Graph(), FakeTensorMode()
    x, w = graph.placeholder("x"), graph.placeholder("w")
    product = graph.call_function(aten.mm.default, (x, w))
    activated = graph.call_function(aten.log1p.default, (graph.call_function(aten.exp.default, (product,)),))
    filled = graph.call_function(aten.full.default, ([8, 4], 2.0), {"dtype": torch.float32, "device": CPU})
    total = graph.call_function(aten.add.Tensor, (activated, filled))
    mean = graph.call_function(aten.sum.default, (total,))
    graph.output((total, mean))
    with fake_mode:
        x.meta["val"], w.meta["val"] = torch.empty(8, 3), torch.empty(3, 4)
        for node in graph.nodes:
            if node.op == "call_function":
                node.meta["val"] = node.target(*fx.node.map_arg(node.args, lambda n: n.meta["val"]), **node.kwargs)
    return Region("fwd_0", "forward", fx.GraphModule({}, graph, class_name="fwd_0"))


def arguments() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(8, 3), torch.randn(3, 4)]


def expected() -> tuple[torch.Tensor, torch.Tensor]:
    x, w = arguments()
    total = torch.log1p(torch.exp(x @ w)) + 2.0
    return total, total.sum()


def test_a_region_for_another_device_has_that_device_in_arguments_and_values() -> None:
    """As from cuda:0 to cuda:1; here from the CPU to another CPU, which takes no GPU."""
    region = small_region()
    other = torch.device("cpu", 0)
    moved = retarget(region.graph_module, other)
    full = next(n for n in moved.graph.nodes if n.target is aten.full.default)
    assert full.kwargs["device"] == other
    original = next(n for n in region.graph_module.graph.nodes if n.target is aten.full.default)
    assert original.kwargs["device"] == CPU


def test_a_region_for_a_device_of_another_kind_keeps_its_devices() -> None:
    """Values that a graph keeps on the CPU, such as seeds, stay there on a GPU."""
    moved = retarget(small_region().graph_module, META)
    assert {n.meta["val"].device for n in moved.graph.nodes if "val" in n.meta} == {CPU}


def test_fake_values_move_with_their_shapes_and_strides() -> None:
    region = small_region()
    for node in region.graph_module.graph.nodes:
        if "val" in node.meta:
            with node.meta["val"].fake_mode:
                node.meta["val"] = torch.empty_strided(
                    node.meta["val"].shape, node.meta["val"].stride(), device=torch.device("meta", 0)
                )
    moved = retarget(region.graph_module, META)
    for before, after in zip(region.graph_module.graph.nodes, moved.graph.nodes, strict=True):
        if "val" in before.meta:
            old, new = before.meta["val"], after.meta["val"]
            assert new.device == META
            assert (new.shape, new.stride(), new.dtype) == (old.shape, old.stride(), old.dtype)


def test_a_copy_for_a_device_leaves_the_region_alone() -> None:
    region = small_region()
    before = str(region.graph_module.graph)
    moved = retarget(region.graph_module, CPU)
    assert moved.graph is not region.graph_module.graph and str(moved.graph) == before
    moved.graph.erase_node(next(n for n in moved.graph.nodes if n.op == "output"))
    assert str(region.graph_module.graph) == before


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inductor", "eager"])
def test_a_compiled_region_computes_what_the_region_says(name: str) -> None:
    if name == "inductor" and not has_cpp_compiler():
        pytest.skip("no C++ compiler")
    function = RegionCompiler(backend_named(name), num_threads=1).compile(small_region(), CPU)
    box = arguments()
    found = tuple(function(box))
    assert box == []
    for value, reference in zip(found, expected(), strict=True):
        torch.testing.assert_close(value, reference)
    if name == "eager":
        assert all(map(torch.equal, found, expected()))


def test_a_region_is_compiled_once_for_two_logical_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def record(graph_module: fx.GraphModule, examples: object, num_threads: int) -> object:
        compiled.append((graph_module, num_threads))
        return lambda box: box

    monkeypatch.setattr(inductor, "compile_with_inductor", record)
    compiler, region, twin = RegionCompiler(backend_named("inductor"), num_threads=3), small_region(), small_region()
    assert compiler.compile(region, CPU) is compiler.compile(region, CPU)
    assert len(compiled) == 1 and compiled[0][1] == 3
    assert compiler.compile(twin, CPU) is not compiler.compile(region, CPU)
    assert len(compiled) == 2


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inductor", "eager"])
def test_regions_compiled_together_compute_what_they_say(name: str) -> None:
    if name == "inductor" and not has_cpp_compiler():
        pytest.skip("no C++ compiler")
    compiler = RegionCompiler(backend_named(name), num_threads=1)
    compiler.prepare(CPU)
    with compiler.together():
        functions = [compiler.compile(small_region(), CPU) for _ in range(2)]
    for function in functions:
        for value, reference in zip(function(arguments()), expected(), strict=True):
            torch.testing.assert_close(value, reference)


def test_what_was_compiled_together_with_a_failure_is_compiled_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def record(graph_module: fx.GraphModule, examples: object, num_threads: int) -> object:
        compiled.append(graph_module)
        return lambda box: box

    monkeypatch.setattr(inductor, "compile_with_inductor", record)
    compiler, kept, lost = RegionCompiler(backend_named("inductor"), num_threads=1), small_region(), small_region()
    with compiler.together():
        compiler.compile(kept, CPU)
    with pytest.raises(KeyError), compiler.together():
        compiler.compile(lost, CPU)
        raise KeyError
    compiler.compile(kept, CPU)
    assert len(compiled) == 2
    compiler.compile(lost, CPU)
    assert len(compiled) == 3


def test_inductor_does_not_change_the_region(monkeypatch: pytest.MonkeyPatch) -> None:
    def wreck(graph_module: fx.GraphModule, examples: object, num_threads: int) -> object:
        graph_module.graph.erase_node(graph_module.graph.output_node())
        return list

    monkeypatch.setattr(inductor, "compile_with_inductor", wreck)
    region = small_region()
    RegionCompiler(backend_named("inductor"), 1).compile(region, CPU)
    region.graph_module.graph.lint()
    assert region.graph_module.graph.output_node() is not None


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize("operator", [out_products.mm_into, out_products.linear_into, out_products.addmm_into], ids=str)
def test_products_into_given_memory_take_no_operator_of_ours(operator: Any) -> None:
    """Each weight's gradient is one, and torch's dispatcher needs some microseconds of Python for an operator of ours."""
    shapes = {"out": (5, 4), "bias": (4,), "left": (8, 5), "right": (8, 4)}
    if operator is not out_products.linear_into:
        del shapes["bias"]
    graph = fx.Graph()
    placeholders = {name: graph.placeholder(name) for name in shapes}
    transposed = graph.call_function(aten.permute.default, (placeholders["left"], [1, 0]))
    others = [placeholders[name] for name in shapes if name in ("out", "bias")]
    graph.call_function(operator, (*others, transposed, placeholders["right"])).meta["val"] = None
    graph.output((graph.call_function(aten.sin.default, (placeholders["right"],)),))
    with FakeTensorMode():
        for name, node in placeholders.items():
            node.meta["val"] = torch.empty(shapes[name])
        transposed.meta["val"] = placeholders["left"].meta["val"].t()
        graph.output_node().args[0][0].meta["val"] = torch.empty(shapes["right"])  # type: ignore[index, union-attr]
    region = Region("bwd_0", "backward", fx.GraphModule({}, graph, class_name="bwd_0"))
    compiled = RegionCompiler(backend_named("inductor"), num_threads=1).compile(region, CPU)
    assert "extern_kernels." in compiled.source_code and "torch.ops.mirrorc" not in compiled.source_code  # type: ignore[attr-defined]
    torch.manual_seed(0)
    given = {name: torch.randn(shape) for name, shape in shapes.items()}
    into, expected_into = given["out"].clone(), given["out"].clone()
    rest = [given["bias"]] if "bias" in given else []
    operator(expected_into, *rest, given["left"].t(), given["right"])
    compiled([into, *rest, given["left"], given["right"]])
    assert torch.equal(into, expected_into)


def test_eager_needs_no_decompositions() -> None:
    assert backend_named("eager").decompositions() == {}
    assert aten.native_dropout.default not in backend_named("inductor").decompositions()
    assert len(backend_named("inductor").decompositions()) > 100


class FailsAtFirst(Backend):
    name = "fails at first"

    def __init__(self, error: Exception) -> None:
        self.error, self.is_second = error, False

    def compile(self, graph_module: fx.GraphModule, name: str, num_threads: int) -> RegionFunction:
        if not self.is_second:
            raise self.error
        return backend_named("eager").compile(graph_module, name, num_threads)

    def second_try(self, error: Exception) -> contextlib.AbstractContextManager[None] | None:
        @contextlib.contextmanager
        def otherwise() -> Iterator[None]:
            self.is_second = True
            yield

        return None if isinstance(error, MemoryError) else otherwise()


def test_regions_that_cannot_be_compiled_are_compiled_in_the_backends_other_way(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (function,) = RegionCompiler(FailsAtFirst(OSError("cut off")), 1).compile_all([(small_region(), CPU)])
    torch.testing.assert_close(function(arguments()), expected())
    assert "could not be compiled (cut off); trying without the files of earlier compilations" in caplog.text
    with pytest.raises(MemoryError):
        RegionCompiler(FailsAtFirst(MemoryError()), 1).compile_all([(small_region(), CPU)])
    failing = FailsAtFirst(OSError("cut off"))
    failing.second_try = lambda error: contextlib.nullcontext()  # type: ignore[method-assign]
    with pytest.raises(OSError, match="cut off"):
        RegionCompiler(failing, 1).compile_all([(small_region(), CPU)])


def test_inductor_is_tried_again_without_its_files_but_not_where_memory_is_short() -> None:
    backend = inductor.InductorBackend()
    assert backend.second_try(MemoryError()) is None
    assert backend.second_try(SyntaxError("this is (no kernel")) is not None
