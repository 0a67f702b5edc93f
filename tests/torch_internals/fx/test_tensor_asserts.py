import pytest
import torch

from mirrorc import torch_internals as internals


def test_a_false_tensor_raises_and_a_trace_keeps_the_assert() -> None:
    internals.assert_true(torch.tensor(True), "it is false")
    with pytest.raises(RuntimeError, match="it is false"):
        internals.assert_true(torch.tensor([False]), "it is false")

    def asserts(x: torch.Tensor) -> torch.Tensor:
        internals.assert_true(x > 0, "it is false")
        return x * 2

    traced = torch.compile(asserts, backend="eager", fullgraph=True)
    assert traced(torch.tensor(1.0)) == 2
    with pytest.raises(RuntimeError, match="it is false"):
        traced(torch.tensor(-1.0))


def test_checks_of_tensors_are_asserts_in_a_trace() -> None:
    def checks(x: torch.Tensor) -> torch.Tensor:
        torch._check_tensor_all(x > 0, lambda: "not positive")
        torch._check_tensor_all_with(ValueError, x < 9)
        return x * 2

    torch._dynamo.reset()
    with internals.traced_instead(internals.CHECKS_OF_TENSORS):
        traced = torch.compile(checks, backend="eager", fullgraph=True)
        assert traced(torch.ones(3)).tolist() == [2.0, 2.0, 2.0]
        for bad in (-1.0, 9.0):
            with pytest.raises(RuntimeError, match="not all elements are true"):
                traced(torch.tensor([1.0, bad, 1.0]))
