import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tiny_programs import captured_model, targets
from torch import nn

import mirrorc
from mirrorc.analysis.graph.decompositions import gelu, gelu_backward
from mirrorc.ir.program import Program
from mirrorc.passes import DecomposeGelu
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.codegen.regions import backend_named
from mirrorc.torch_internals import has_cpp_compiler
from mirrorc.verifier.verifier import Verify

aten = torch.ops.aten
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
def test_gelu_is_torchs(dtype: torch.dtype) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 1e4, -1e4])]).to(dtype)
    gradient = torch.linspace(-2, 2, len(x)).to(dtype)
    tolerance = TOLERANCES[dtype]
    found = gelu(x)
    torch.testing.assert_close(found, aten.gelu(x, approximate="tanh"), rtol=tolerance, atol=tolerance)
    found = gelu_backward(gradient, x)
    expected = aten.gelu_backward(gradient, x, approximate="tanh")
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=2 * tolerance)


@given(st.floats(-7.5, 30, width=32))
def test_gelu_is_exact_where_it_is_small_too(value: float) -> None:
    """Where ``1 + tanh`` has canceled, there is still a share left: relative to it, the argument's rounding is all the error."""
    twice = 2 * math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
    exact = value / (1 + math.exp(-twice))
    found = gelu(torch.tensor(value)).item()
    assert abs(found - exact) <= 6e-7 * (1 + abs(twice)) * abs(exact) + 1e-37


class TwoGelus(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(3, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = nn.functional.gelu(self.one(x), approximate="tanh")
        return nn.functional.gelu(self.other(hidden))


def decomposed(**options: bool) -> Program:
    program = captured_model(TwoGelus(), 2, 5, columns=3)
    return run_passes(program, [DecomposeGelu(**options)], [Verify()])


@pytest.mark.slow
def test_the_tanh_of_forward_and_backward_becomes_a_sigmoid_and_the_other_gelu_stays() -> None:
    program = decomposed()
    for graph in program.shard_graphs:
        assert len(targets(graph, aten.sigmoid.default)) == 2 and not targets(graph, aten.tanh.default)
        left = targets(graph, aten.gelu.default, aten.gelu_backward.default)
        assert [node.kwargs.get("approximate", "none") for node in left] == ["none", "none"]
        names = [node.name for node in targets(graph, aten.sigmoid.default)]
        assert names == ["one_gelu_sigmoid", "d_one_gelu_backward_sigmoid"]
    assert any("in 2 GELU operators" in remark.text for remark in program.remarks)


def test_one_value_may_be_both_arguments() -> None:
    program = captured_model(TwoGelus(), 2, 4, columns=3)
    for graph in program.shard_graphs:
        node = targets(graph, aten.gelu_backward.default)[-1]
        assert node.kwargs["approximate"] == "tanh"
        node.args = (node.args[1], node.args[1])
        graph.eliminate_dead_code()
    after = run_passes(program, [DecomposeGelu()], [Verify()])
    assert all(len(targets(graph, aten.sigmoid.default)) == 2 for graph in after.shard_graphs)


def test_only_compiled_code_gets_it() -> None:
    cpu = torch.device("cpu")
    assert backend_named("inductor").preferences(cpu)["gelu_by_sigmoid"]
    assert "gelu_by_sigmoid" not in backend_named("eager").preferences(cpu)


@pytest.mark.slow
@pytest.mark.skipif(not has_cpp_compiler(), reason="no C++ compiler")
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_compiled_gelus_are_the_same_numbers_with_the_pass_and_without(dtype: torch.dtype, tolerance: float) -> None:
    trained = []
    for without in ((), ("decompose-gelu",)):
        torch.manual_seed(0)
        model = TwoGelus().to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with mirrorc.compile(
            model, 2, optimizer=optimizer, loss_fn=nn.functional.mse_loss, compiler=mirrorc.Compiler(disable=without)
        ) as step:
            losses = [step(torch.randn(4, 3, dtype=dtype), target=torch.randn(4, 2, dtype=dtype)) for _ in range(2)]
        trained.append([*losses, *(parameter.detach() for parameter in model.parameters())])
    for one, other in zip(*trained, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance / 100)
