"""The estimated work of operators: products by their multiplications, others by their bytes, views for nothing."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.analysis.cost.work import Machine, seconds_of_graph, seconds_of_operator
from mirrorc.custom_ops import out_products

aten = torch.ops.aten
PRODUCTS, BYTES = Machine(1.0, 0.0), Machine(0.0, 1.0)


def called(target: Callable[..., Any], *args: Any) -> fx.Node:
    graph, mode = fx.Graph(), FakeTensorMode()
    given: list[Any] = []
    with mode:
        for arg in args:
            if isinstance(arg, list) and arg:
                node = graph.placeholder(f"x{len(given)}")
                node.meta["val"] = torch.empty(arg)
                arg = node
            given.append(arg)
        node = graph.call_function(target, tuple(given))
        node.meta["val"] = target(*fx.node.map_arg(given, lambda own: own.meta["val"]))
    return node


ATTENTION = aten._scaled_dot_product_flash_attention_for_cpu.default


@pytest.mark.parametrize(
    ("target", "args", "multiplications"),
    [
        (aten.mm.default, ([2, 3], [3, 4]), 24),
        (aten.addmm.default, ([4], [2, 3], [3, 4]), 24),
        (aten.bmm.default, ([5, 2, 3], [5, 3, 4]), 120),
        (out_products.mm_into, ([2, 4], [2, 3], [3, 4]), 24),
        (out_products.linear_into, ([2, 4], [4], [2, 3], [3, 4]), 24),
        (
            aten.convolution.default,
            ([1, 2, 5, 5], [3, 2, 3, 3], None, (1, 1), (0, 0), (1, 1), False, (0, 0), 1),
            3 * 9 * 18,
        ),
        (ATTENTION, ([2, 3, 7, 4], [2, 3, 5, 4], [2, 3, 5, 4]), 2 * 2 * 3 * 7 * 5 * 4),
        (aten.relu.default, ([2, 3],), 0),
    ],
)
def test_multiplications_are_counted(target: Any, args: tuple[Any, ...], multiplications: int) -> None:
    assert seconds_of_operator(called(target, *args), PRODUCTS) == multiplications


def test_bytes_are_read_and_written() -> None:
    assert seconds_of_operator(called(aten.add.Tensor, [2, 3], [3]), BYTES) == 4 * (6 + 3 + 6)
    assert seconds_of_operator(called(aten.t.default, [2, 3]), BYTES) == 0


def test_the_longer_of_both_counts() -> None:
    node = called(aten.mm.default, [2, 3], [3, 4])
    assert seconds_of_operator(node, Machine(1.0, 1.0)) == 4 * (6 + 12 + 8)
    assert seconds_of_graph(node.graph, Machine(10.0, 1.0)) == 240
