import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.utils import _pytree as pytree

from mirrorc.analysis.graph.aliases import origins, shared_by, viewed
from mirrorc.ir.rearrangements import REARRANGEMENTS, SAME_MEMORY

aten, prims = torch.ops.aten, torch.ops.prims
MATRIX = torch.arange(16.0).view(4, 4)
CPU = torch.device("cpu")

VIEWS: tuple[tuple[Any, ...], ...] = (
    (aten.alias.default, MATRIX),
    (aten.as_strided.default, MATRIX, [2, 2], [4, 1]),
    (aten.detach.default, MATRIX),
    (aten.diagonal.default, MATRIX),
    (aten.expand.default, MATRIX, [2, 4, 4]),
    (aten.permute.default, MATRIX, [1, 0]),
    (aten.select.int, MATRIX, 0, 1),
    (aten.slice.Tensor, MATRIX, 0, 1, 3),
    (aten.split.Tensor, MATRIX, 2),
    (aten.split_with_sizes.default, MATRIX, [1, 3]),
    (aten.squeeze.default, MATRIX),
    (aten.t.default, MATRIX),
    (aten.transpose.int, MATRIX, 0, 1),
    (aten.unbind.int, MATRIX),
    (aten.unfold.default, MATRIX, 0, 2, 1),
    (aten.unsqueeze.default, MATRIX, 0),
    (aten.view.default, MATRIX, [16]),
    (aten.view.dtype, MATRIX, torch.int32),
    (aten._unsafe_view.default, MATRIX, [16]),
    (aten._reshape_alias.default, MATRIX, [16], [1]),
    (prims.view_of.default, MATRIX),
)
"""Operators that always give the memory of their first argument."""

MAY_GIVE_BACK: tuple[tuple[Any, ...], ...] = (
    (aten.atleast_1d.default, MATRIX),
    (aten.broadcast_tensors.default, [MATRIX, MATRIX.clone()]),
    (aten.chunk.default, MATRIX, 2),
    (aten.conj_physical.default, MATRIX),
    (aten.contiguous.default, MATRIX),
    (aten.dropout.default, MATRIX, 0.5, False),
    (aten.einsum.default, "ij->ji", [MATRIX]),
    (aten.expand_as.default, MATRIX, MATRIX.clone()),
    (aten.feature_dropout.default, MATRIX, 0.5, False),
    (aten.flatten.using_ints, MATRIX),
    (aten.lift.default, MATRIX),
    (aten.meshgrid.default, [MATRIX[0], MATRIX[1].clone()]),
    (aten.real.default, MATRIX),
    (aten.reshape.default, MATRIX, [16]),
    (aten.set.source_Tensor, torch.zeros(3), MATRIX),
    (aten.sum_to_size.default, MATRIX, [4, 4]),
    (aten.tensor_split.sections, MATRIX, 2),
    (aten.to.dtype, MATRIX, torch.float32),
    (aten.type_as.default, MATRIX, MATRIX.clone()),
    (aten.unsafe_chunk.default, MATRIX, 2),
    (aten.unsafe_split.Tensor, MATRIX, 2),
    (aten.unsafe_split_with_sizes.default, MATRIX, [1, 3]),
    (prims.device_put.default, MATRIX, CPU),
)
"""Operators that gave the memory of an argument here, whether they declare it or not, and might copy it elsewhere."""

NEW: tuple[tuple[Any, ...], ...] = (
    (aten._to_copy.default, MATRIX),
    (aten.add.Tensor, MATRIX, 0),
    (aten.addmm.default, MATRIX[0], MATRIX, MATRIX),
    (aten.cat.default, [MATRIX]),
    (aten.clone.default, MATRIX),
    (aten.constant_pad_nd.default, MATRIX, [0, 0]),
    (aten.copy.default, MATRIX, MATRIX.clone()),
    (aten.index.Tensor, MATRIX, [torch.arange(4)]),
    (aten.max.dim, MATRIX, 0),
    (aten.mm.default, MATRIX, MATRIX),
    (aten.mul.Tensor, MATRIX, 1),
    (aten.native_dropout.default, MATRIX, 0.5, False),
    (aten.relu.default, MATRIX),
    (aten.repeat.default, MATRIX, [1, 1]),
    (aten.slice_scatter.default, MATRIX, MATRIX.clone()),
    (aten.where.self, MATRIX > 3, MATRIX, MATRIX),
)
"""Operators that give memory of their own, even where nothing is to do."""


def called(target: Any, *args: Any) -> tuple[list[fx.Node], dict[int, fx.Node], Iterator[tuple[fx.Node, torch.Tensor]]]:
    graph, given = fx.Graph(), {}

    def argument(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return given.setdefault(memory(value), graph.placeholder("x"))
        return value

    result = target(*args)
    node = graph.call_function(target, pytree.tree_map(argument, args))
    parts = (
        [graph.call_function(operator.getitem, (node, i)) for i in range(len(result))]
        if isinstance(result, list | tuple)
        else [node]
    )
    results = result if isinstance(result, list | tuple) else [result]
    return [node, *parts], given, zip(parts, results, strict=True)


def memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def test_what_shares_the_memory_of_an_argument_is_said_to() -> None:
    for target, *args in (*VIEWS, *MAY_GIVE_BACK):
        values, given, parts = called(target, *args)
        shared = {value: given[memory(tensor)] for value, tensor in parts if memory(tensor) in given}
        assert shared, f"{target} gives memory of its own here: it belongs into another list"
        assert all(source in shared_by(value) for value, source in shared.items()), target
        assert all(origins(value) <= set(given.values()) for value in values), target


def test_what_has_memory_of_its_own_is_not_said_to_share_any() -> None:
    for target, *args in NEW:
        values, given, parts = called(target, *args)
        assert not any(memory(tensor) in given for _, tensor in parts), target
        assert [shared_by(value) for value in values] == [[]] * len(values), target
        assert [origins(value) for value in values] == [{value} for value in values], target


def test_what_is_a_view_in_any_case_is_one_of_a_known_value() -> None:
    for operators, is_one in ((VIEWS, True), (MAY_GIVE_BACK, False), (NEW, False)):
        for target, *args in operators:
            values, given, _ = called(target, *args)
            source = next(iter(given.values())) if is_one else None
            assert {viewed(value) for value in values} == {source}, target


def test_what_rearranges_elements_may_share_memory() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    for target in REARRANGEMENTS:
        node = graph.call_function(target, (x, [16]))
        assert shared_by(node) == [x] and (viewed(node) is x) is (target in SAME_MEMORY), target


def test_chains_of_views_are_followed_to_all_their_origins() -> None:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    split = graph.call_function(aten.split.Tensor, (x, 2))
    part = graph.call_function(operator.getitem, (split, 1))
    view = graph.call_function(aten._unsafe_view.default, (part, [8]))
    by_name = graph.call_function(aten.slice.Tensor, (), {"self": view, "end": 4})
    assert origins(by_name) == origins(split) == {x}
    assert origins(graph.call_function(aten.broadcast_tensors.default, ([view, y],))) == {x, y}
    assert origins(graph.call_function(aten.neg.default, (view,))).isdisjoint({x, y})
