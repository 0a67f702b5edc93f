"""Copies and views that fold dimensions of symbolic sizes, and what is made of them."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from mirrorc.runtime.codegen import inductor
from mirrorc.runtime.codegen.unfolded_dims import unfold_dims
from mirrorc.torch_internals import size_key, sizes_key

aten = torch.ops.aten
CONTIGUOUS = {"memory_format": torch.contiguous_format}
SIZES = (5, 4, 7, 6)


class Builder:
    """A graph of x: f32[s0, 4, s1, 6] and the sizes s0, s1, s0*s1 and 4*s0, whose nodes have types."""

    def __init__(self, is_symbolic: bool = True) -> None:
        self.graph, self.mode = fx.Graph(), FakeTensorMode(shape_env=ShapeEnv())
        kinds = [DimDynamic.DYNAMIC if is_symbolic and dim in (0, 2) else DimDynamic.STATIC for dim in range(4)]
        value = self.mode.from_tensor(
            torch.empty(SIZES), symbolic_context=StatelessSymbolicContext(dynamic_sizes=kinds)
        )
        self.x = self.placeholder("x", value)
        s0, _, s1, _ = value.shape
        sizes = {"s0": s0, "s1": s1, "both": s0 * s1, "heads": 4 * s0}
        self.s0, self.s1, self.both, self.heads = (self.placeholder(name, size) for name, size in sizes.items())

    def placeholder(self, name: str, value: Any) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = value
        return node

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        node = self.graph.call_function(target, args, kwargs)
        given = fx.node.map_arg(args, lambda one: one.meta["val"])
        with self.mode:
            node.meta["val"] = target(*given, **kwargs)
        return node

    def results(self) -> tuple[torch.Tensor, ...]:
        x = torch.arange(5 * 4 * 7 * 6, dtype=torch.float32).view(SIZES)
        found: tuple[torch.Tensor, ...] = fx.GraphModule({}, copy.deepcopy(self.graph))(x, 5, 7, 35, 20)
        return found

    def targets(self) -> list[Any]:
        return [node.target for node in self.graph.nodes if node.op == "call_function"]


def attention(b: Builder) -> list[fx.Node]:
    folded = b.call(aten.view.default, b.x, [b.heads, b.s1, 6])
    copied = b.call(aten.clone.default, b.call(aten.transpose.int, folded, 0, 1), **CONTIGUOUS)
    return [b.call(aten.view.default, copied, [b.s1, b.s0, 24])]


def unfolded_views(b: Builder) -> list[fx.Node]:
    folded = b.call(aten.view.default, b.x, [b.heads, b.s1, 6])
    turned = b.call(aten.transpose.int, folded, 1, 2)
    return [b.call(aten.view.default, turned, [b.s0, 4, 6, b.s1])]


def unsqueezed(b: Builder) -> list[fx.Node]:
    folded = b.call(aten.view.default, b.x, [b.heads, b.s1, 6])
    turned = b.call(aten.transpose.int, b.call(aten.unsqueeze.default, folded, 0), 0, -2)
    squeezed = b.call(aten.squeeze.dim, turned, -2)
    copied = b.call(aten.clone.default, squeezed, **CONTIGUOUS)
    return [b.call(aten.view.default, copied, [b.s1, b.s0, 24])]


@pytest.mark.parametrize("make", [attention, unfolded_views, unsqueezed], ids=lambda make: make.__name__)
def test_dims_that_are_folded_and_taken_apart_are_permuted(make: Callable[[Builder], list[fx.Node]]) -> None:
    builder = Builder()
    builder.graph.output(tuple(make(builder)))
    before = builder.results()
    assert unfold_dims(builder.graph) == 1
    builder.graph.lint()
    for old, new in zip(before, builder.results(), strict=True):
        assert torch.equal(old, new)
        assert old.stride() == new.stride()
    assert not any(node.target is aten.transpose.int for node in builder.graph.nodes)
    values = [node.meta["val"] for node in builder.graph.nodes if node.op == "call_function"]
    assert size_key(builder.heads.meta["val"]) not in [size for value in values for size in sizes_key(value.shape)]


def copy_that_is_read_twice(b: Builder) -> list[fx.Node]:
    folded = b.call(aten.view.default, b.x, [b.heads, b.s1, 6])
    copied = b.call(aten.clone.default, b.call(aten.transpose.int, folded, 0, 1), **CONTIGUOUS)
    return [b.call(aten.view.default, copied, [b.s1, b.s0, 24]), b.call(aten.mul.Tensor, copied, 2.0)]


def written(b: Builder) -> list[fx.Node]:
    folded = b.call(aten.view.default, b.x, [b.heads, b.s1, 6])
    copied = b.call(aten.clone.default, b.call(aten.transpose.int, folded, 0, 1), **CONTIGUOUS)
    b.call(aten.mul_.Tensor, copied, 2.0)
    return [b.call(aten.view.default, copied, [b.s1, b.s0, 24])]


def never_taken_apart(b: Builder) -> list[fx.Node]:
    folded = b.call(aten.view.default, b.x, [b.heads, b.s1, 6])
    return [b.call(aten.clone.default, b.call(aten.transpose.int, folded, 0, 1), **CONTIGUOUS)]


def cut_elsewhere(b: Builder) -> list[fx.Node]:
    """20 = 4 * 5 is cut as 5 * 4, which is no permutation: s0 and 4 are not known to divide one another."""
    turned = b.call(aten.clone.default, b.call(aten.transpose.int, b.x, 0, 1), **CONTIGUOUS)
    folded = b.call(aten.view.default, turned, [b.heads, b.s1, 6])
    return [b.call(aten.view.default, folded, [b.s0, 4, b.s1, 6])]


@pytest.mark.parametrize(
    "make", [copy_that_is_read_twice, written, never_taken_apart, cut_elsewhere], ids=lambda make: make.__name__
)
def test_what_is_no_permutation_stays(make: Callable[[Builder], list[fx.Node]]) -> None:
    builder = Builder()
    builder.graph.output(tuple(make(builder)))
    targets, before = builder.targets(), builder.results()
    assert unfold_dims(builder.graph) == 0
    assert builder.targets() == targets
    assert all(map(torch.equal, before, builder.results()))


def test_sizes_that_are_numbers_are_left_to_inductor() -> None:
    builder = Builder(is_symbolic=False)
    builder.graph.output(tuple(attention(builder)))
    targets = builder.targets()
    assert unfold_dims(builder.graph) == 0
    assert builder.targets() == targets


@pytest.mark.slow
def test_inductor_compiles_what_is_unfolded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inductor, "compile_with_inductor", lambda graph_module, examples, num_threads: graph_module)
    builder = Builder()
    builder.graph.output(tuple(attention(builder)))
    before = builder.results()
    compiled: Any = inductor.InductorBackend().compile(fx.GraphModule({}, builder.graph), "fwd_0", 1)
    assert aten.transpose.int not in [node.target for node in compiled.graph.nodes]
    x = torch.arange(5 * 4 * 7 * 6, dtype=torch.float32).view(SIZES)
    assert all(map(torch.equal, before, compiled(x, 5, 7, 35, 20)))
