from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.ir.gradient_forms import matrix_product

aten = torch.ops.aten


def product_and(*views: tuple[Any, ...]) -> tuple[fx.Node, fx.Node]:
    graph, mode = fx.Graph(), FakeTensorMode()
    with mode:
        factors = [torch.empty(3, 2), torch.empty(2, 3)]
    nodes = [graph.placeholder(name) for name in ("left", "right")]
    for node, value in zip(nodes, factors, strict=True):
        node.meta["val"] = value
    value = product = graph.call_function(aten.mm.default, tuple(nodes))
    product.meta["val"] = factors[0] @ factors[1]
    for target, *args in views:
        value, source = graph.call_function(target, (value, *args)), value
        value.meta["val"] = target(source.meta["val"], *args)
    graph.output(value)
    return product, value


def test_a_gradient_is_the_product_whose_memory_it_shows_in_the_same_order() -> None:
    for views in (
        [],
        [(aten.t.default,), (aten.t.default,)],
        [(aten.view.default, [9]), (aten.view.default, [3, 3])],
        [(aten.view.default, [9, 1]), (aten._unsafe_view.default, [3, 3])],
        [(aten.transpose.int, 0, 1), (aten.permute.default, [1, 0])],
    ):
        product, gradient = product_and(*views)
        assert matrix_product(gradient) is product, views


def test_what_has_the_elements_in_another_order_is_no_product() -> None:
    for views in (
        [(aten.t.default,)],
        [(aten.t.default,), (aten.reshape.default, [9]), (aten.view.default, [3, 3])],  # which copies, transposed
        [(aten.neg.default,)],
    ):
        assert matrix_product(product_and(*views)[1]) is None, views
