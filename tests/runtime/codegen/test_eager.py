"""Regions run operator by operator, whatever the layouts of their arguments are."""

import itertools
from typing import Any

import pytest
import torch
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from memory_order import first_in_memory
from saved_programs import SMALL_MODELS, stages_of
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc.custom_ops.out_products import mm_into
from mirrorc.ir.program import Region
from mirrorc.runtime.codegen.regions import backend_named

aten = torch.ops.aten


def values_for(region: Region, generator: torch.Generator) -> list[torch.Tensor]:
    """Arguments of a region: numbers around zero, in double precision, as sums of random numbers may nearly cancel; integers are
    zeros and ones, of which classes, words and counts are made.
    """
    made = []
    for node in region.graph_module.graph.nodes:
        if node.op == "placeholder":
            value = node.meta["val"]
            if value.dtype.is_floating_point:
                made.append(torch.randn(value.shape, generator=generator, dtype=torch.float64))
            else:
                made.append(torch.randint(2, value.shape, generator=generator).to(value.dtype))
            made[-1] = torch.empty_strided(value.shape, value.stride(), dtype=made[-1].dtype).copy_(made[-1])
    return made


def laid(value: torch.Tensor, order: list[int]) -> torch.Tensor:
    order = [dim for dim in order if dim < value.dim()]
    return value.permute(order).contiguous().permute([order.index(dim) for dim in range(value.dim())])


REGIONS = [
    (name, title)
    for name in SMALL_MODELS
    for title in ("fwd_0", "bwd_0")
]  # fmt: skip


@pytest.mark.slow
@fuzzed(10)
@given(st.sampled_from(REGIONS), st.lists(st.permutations(range(4)), min_size=60, max_size=60), st.integers(0, 2**32))
def test_regions_give_the_same_values_under_any_strides_of_their_arguments(
    which: tuple[str, str], orders: list[list[int]], seed: int
) -> None:
    name, title = which
    region = stages_of(name)["outline-regions"].regions[title]
    values = values_for(region, torch.Generator().manual_seed(seed))
    run = backend_named("eager").compile(region.graph_module, title, 1)
    expected = run([value.clone(memory_format=torch.preserve_format) for value in values])
    strided = [laid(value, order) for value, order in zip(values, itertools.cycle(orders), strict=False)]
    found = run(strided)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9, equal_nan=True)


def one_operator(target: Any, *args: Any, shape: tuple[int, ...] = (3, 4), **kwargs: Any) -> fx.GraphModule:
    graph, fake_mode = fx.Graph(), FakeTensorMode()
    x = graph.placeholder("x")
    with fake_mode:
        x.meta["val"] = torch.empty(shape)
        node = graph.call_function(target, (x, *args), kwargs)
        node.meta["val"] = target(x.meta["val"], *args, **kwargs)
    graph.output((node,))
    return fx.GraphModule({}, graph)


def test_operators_of_others_get_their_arguments_as_they_lay_while_tracing() -> None:
    run = backend_named("eager").compile(one_operator(first_in_memory, 12), "fwd_0", 1)
    x = torch.arange(12.0).view(3, 4)
    for given_x in (x, laid(x, [1, 0])):
        assert torch.equal(run([given_x])[0], x.flatten())


def test_what_an_operator_writes_to_is_never_a_copy() -> None:
    graph, fake_mode = fx.Graph(), FakeTensorMode()
    nodes = [graph.placeholder(name) for name in ("out", "left", "right")]
    with fake_mode:
        for node in nodes:
            node.meta["val"] = torch.empty(3, 3)
    graph.call_function(mm_into, tuple(nodes)).meta["val"] = None
    graph.output((nodes[0],))
    run = backend_named("eager").compile(fx.GraphModule({}, graph), "bwd_0", 1)
    out, left, right = laid(torch.zeros(3, 3), [1, 0]), torch.randn(3, 3), torch.randn(3, 3)
    (result,) = run([out, left, right])
    assert result is out
    torch.testing.assert_close(out, left @ right)
