"""The operators of plain PyTorch tell the types of what they give without the call that they run."""

import gc

import pytest
import torch

from mirrorc.custom_ops.eager_calls import (
    RunInputs,
    register_call,
    run_evaluation,
    run_forward,
    sizes_of,
    take_gradient,
)
from mirrorc.torch_internals import FakeTensorMode


class Counts:
    def forward(self, inputs: RunInputs) -> list[torch.Tensor]:
        return [torch.ones(()), torch.tensor(0)]

    def backward(self, token: object, tangent: object) -> list[torch.Tensor]:
        return []


def test_types_follow_from_arguments() -> None:
    with FakeTensorMode():
        weight, total = torch.empty(3, 2).t(), torch.empty((), dtype=torch.int64)
        loss, token, written = run_forward(
            999, None, [], [weight], [torch.empty(4), total], torch.bfloat16, [1], [], []
        )
        results = ([torch.int64, torch.float16], sizes_of([(), (2, 3)]))
        count, logits = run_evaluation(999, None, [], [weight], [], None, [], *results)
        gradient = take_gradient(999, token, loss, weight, 0)
    assert (loss.shape, loss.dtype, token.dtype, written.dtype) == ((), torch.bfloat16, torch.int64, torch.int64)
    assert (count.shape, count.dtype, logits.shape, logits.dtype) == ((), torch.int64, (2, 3), torch.float16)
    assert gradient.shape == (2, 3) and gradient.stride() == weight.stride()


def test_a_call_is_known_as_long_as_it_is_held() -> None:
    call = Counts()
    number = register_call(call)
    other = Counts()
    assert register_call(other) != number
    assert run_forward(number, None, [], [torch.ones(1)], [], torch.float32, [], [], [])[0].item() == 1.0
    del call
    gc.collect()
    with pytest.raises(RuntimeError, match="its program was dropped"):
        run_forward(number, None, [], [torch.ones(1)], [], torch.float32, [], [], [])
