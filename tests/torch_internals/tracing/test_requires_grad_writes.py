"""Values that forward has computed may be said to require a gradient."""

import pytest
import torch
from torch import nn

from mirrorc import torch_internals as internals


class Says(nn.Module):
    def __init__(self, *, of_argument: bool) -> None:
        super().__init__()
        self.of_argument = of_argument

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        x = leaves[0] if self.of_argument else leaves[0] + 1
        x.requires_grad = True
        return x.sum() * (3 if x.requires_grad and (x * 2).requires_grad else 1)


def test_computed_values_become_leaves_and_arguments_do_not() -> None:
    with internals.made_leaves():
        traced = internals.trace_full_graph(Says(of_argument=False), (torch.ones(2),))
        with pytest.raises(Exception, match=r"(?i)requires_grad"):
            internals.trace_full_graph(Says(of_argument=True), (torch.ones(2),))
    assert traced(torch.ones(2)) == 12
    with pytest.raises(Exception, match=r"(?i)setattr\(\) on tensor\.requires_grad"):
        internals.trace_full_graph(Says(of_argument=False), (torch.ones(2),))
