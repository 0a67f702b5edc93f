import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from mirrorc.runtime.codegen.regions import decompositions_for

aten = torch.ops.aten
TABLE = decompositions_for("inductor")
TOLERANCES = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.mark.parametrize("dtype", TOLERANCES, ids=str)
@pytest.mark.parametrize("approximate", ["none", "tanh"])
def test_gelu_is_torchs(dtype: torch.dtype, approximate: str) -> None:
    x = torch.cat([torch.linspace(-12, 12, 4001), torch.tensor([0.0, -0.0, 1e-20, -1e-20, 1e4, -1e4])]).to(dtype)
    gradient = torch.linspace(-2, 2, len(x)).to(dtype)
    tolerance = TOLERANCES[dtype]
    found = TABLE[aten.gelu.default](x, approximate=approximate)
    torch.testing.assert_close(found, aten.gelu(x, approximate=approximate), rtol=tolerance, atol=tolerance)
    found = TABLE[aten.gelu_backward.default](gradient, x, approximate=approximate)
    expected = aten.gelu_backward(gradient, x, approximate=approximate)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=2 * tolerance)


@given(st.floats(-7.5, 30, width=32))
def test_gelu_is_exact_where_it_is_small_too(value: float) -> None:
    """Where ``1 + tanh`` has cancelled, there is still a share left: relative to it, the argument's rounding is all the error."""
    twice = 2 * math.sqrt(2 / math.pi) * (value + 0.044715 * value**3)
    exact = value / (1 + math.exp(-twice))
    found = TABLE[aten.gelu.default](torch.tensor(value), approximate="tanh").item()
    assert abs(found - exact) <= 6e-7 * (1 + abs(twice)) * abs(exact) + 1e-37


def test_no_tanh_is_left() -> None:
    from torch.fx.experimental.proxy_tensor import make_fx

    def f(x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(x, approximate="tanh")

    traced = make_fx(f, TABLE)(torch.randn(3))
    targets = {node.target for node in traced.graph.nodes if node.op == "call_function"}
    assert aten.sigmoid.default in targets and aten.tanh.default not in targets
