"""Who drops gradients is seen, and does what it did before."""

from collections.abc import Iterator, Sequence

import pytest
import torch

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.hooks import zero_grad_observer


@pytest.fixture
def told() -> Iterator[list[int]]:
    calls: list[int] = []
    before = list(zero_grad_observer._observer)

    def note(parameters: Sequence[torch.Tensor]) -> None:
        calls.append(len(parameters))

    internals.observe_zero_grad(note)
    internals.observe_zero_grad(note)  # a second time changes nothing
    yield calls
    zero_grad_observer._observer[:] = before


def test_optimizers_and_modules_tell_of_what_they_drop(told: list[int]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert told == [2] and not net[0].weight.grad.any() and net[1].weight.grad is not None
    net.zero_grad()
    assert told == [2, 4] and all(parameter.grad is None for parameter in net.parameters())
