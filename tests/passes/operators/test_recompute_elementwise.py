"""The pass recompute-elementwise, on the decomposed operators that Inductor gets, run eagerly."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_programs import captured_call
from torch import fx, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.ir.program import Program
from mirrorc.passes import OutlineRegions, PlanBuckets, RecomputeElementwise
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.torch_internals import inductor_decompositions
from mirrorc.verifier.verifier import Verify

pytestmark = pytest.mark.usefixtures("decomposed")


class Net(nn.Module):
    def __init__(self, function: Callable[[torch.Tensor], torch.Tensor], *, is_of_images: bool = False) -> None:
        super().__init__()
        self.function = function
        self.first: nn.Module = nn.Conv2d(1, 4, 1) if is_of_images else nn.Linear(6, 32)
        self.scale = nn.Parameter(torch.linspace(0.5, 2, 32))
        self.last: nn.Module = nn.Conv2d(4, 1, 1) if is_of_images else nn.LazyLinear(1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = self.function(self.first(x))
        return self.last(found * self.scale if found.shape[-1] == 32 else found).square().mean()


def normed(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def gated(x: torch.Tensor) -> torch.Tensor:
    gate, value = x.chunk(2, -1)
    return F.silu(gate) * value


def pooled(x: torch.Tensor) -> torch.Tensor:
    return F.max_pool2d(x, 3, 2, 1)


def long_chain(x: torch.Tensor) -> torch.Tensor:
    """More operators than are run again for one value."""
    y = x
    for _ in range(20):
        y = y + 1
    return y.square().sum(-1, keepdim=True)


def of_two(x: torch.Tensor) -> torch.Tensor:
    """Made of two values as large, which nothing else keeps."""
    return (x.sin() + x.cos()).square().sum(-1, keepdim=True)


def multiplied(x: torch.Tensor) -> torch.Tensor:
    """Forward has it in memory, for a product."""
    return x.sigmoid() @ x.new_ones(32, 3)


def net(function: Callable[[torch.Tensor], torch.Tensor]) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    is_of_images = function is pooled
    x = torch.randn(5, 1, 6, 6) if is_of_images else torch.randn(5, 6)
    model = Net(function, is_of_images=is_of_images)
    model(x)  # makes the lazy layer
    return model.double(), x.double()


def captured(function: Callable[[torch.Tensor], torch.Tensor]) -> Program:
    model, x = net(function)
    return captured_call(model, None, (x,), {}, decompositions=inductor_decompositions())


def kept_by_forward(program: Program, *passes: RecomputeElementwise) -> list[torch.Tensor]:
    after = run_passes(program, [*passes, PlanBuckets(), OutlineRegions()], [Verify()])
    results: Any = after.regions["fwd_0"].graph_module.graph.output_node().args[0]
    return [node.meta["val"] for node in results]


def again(program: Program) -> list[fx.Node]:
    return [node for node in program.shard_graphs[0].nodes if "_again" in node.name]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "is_left_out"),
    [
        (
            normed,
            lambda value: value.shape == (5, 32),
        ),  # the value, the product with the scale and what is multiplied by it
        (gated, lambda value: value.shape == (5, 16)),
        (pooled, lambda value: value.dtype is torch.int64),
    ],
    ids=["what a norm gives", "a gate", "places of maxima"],
)
def test_backward_computes_again_what_is_made_of_what_it_reads(
    function: Callable[[torch.Tensor], torch.Tensor], is_left_out: Callable[[torch.Tensor], bool]
) -> None:
    program = captured(function)
    before, after = kept_by_forward(program), kept_by_forward(program, RecomputeElementwise())
    assert sum(map(is_left_out, after)) == sum(map(is_left_out, before)) - 1


def test_of_a_pooling_the_places_in_windows_are_kept() -> None:
    kept = kept_by_forward(captured(pooled), RecomputeElementwise())
    assert [tuple(value.shape) for value in kept if value.dtype is torch.int8] == [(5, 4, 3, 3)]


@pytest.mark.parametrize("function", [long_chain, of_two, multiplied], ids=lambda function: str(function.__doc__))
def test_what_would_take_longer_is_kept(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    assert not again(RecomputeElementwise().run(captured(function)))


@pytest.mark.slow
@pytest.mark.parametrize("function", [normed, gated, pooled])
def test_training_is_that_of_one_device(function: Callable[[torch.Tensor], torch.Tensor]) -> None:
    model, x = net(function)
    ours, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.5)
    of_step = torch.optim.SGD(ours.parameters(), lr=0.5)
    with mirrorc.compile(ours, 2, optimizer=of_step, compiler=mirrorc.Compiler(backend="decomposed")) as step:
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(x)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(step(x), loss.detach(), rtol=1e-12, atol=1e-13)
        assert any("_again" in node.name for node in step.program.regions["bwd_0"].graph_module.graph.nodes)
    torch.testing.assert_close(list(ours.parameters()), list(model.parameters()), rtol=1e-11, atol=1e-12)
