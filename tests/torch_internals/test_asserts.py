import pytest
import torch

from mirrorc.torch_internals import assert_true


def test_a_false_tensor_raises_and_a_trace_keeps_the_assert() -> None:
    assert_true(torch.tensor(True), "it is false")
    with pytest.raises(RuntimeError, match="it is false"):
        assert_true(torch.tensor([False]), "it is false")

    def asserts(x: torch.Tensor) -> torch.Tensor:
        assert_true(x > 0, "it is false")
        return x * 2

    traced = torch.compile(asserts, backend="eager", fullgraph=True)
    assert traced(torch.tensor(1.0)) == 2
    with pytest.raises(RuntimeError, match="it is false"):
        traced(torch.tensor(-1.0))
