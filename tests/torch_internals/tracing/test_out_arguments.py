"""A function of torch that is called with ``out=`` gives that tensor."""

import torch
from torch import nn

from mirrorc import torch_internals as internals


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.zeros(2))

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        self.u = torch.mul(leaves[0], 3.0, out=self.u)
        return self.u.sum()


def test_what_is_given_for_a_result_is_the_result() -> None:
    module = Writes()
    with internals.returned_out_arguments():
        traced = internals.trace_full_graph(module, (torch.ones(2),))
    assert internals.python_effects_of(traced).writes == []
    assert traced(torch.ones(2)) == 6 and module.u.sum() == 6
    other = internals.trace_full_graph(Writes(), (torch.ones(2),))
    assert len(internals.python_effects_of(other).writes) == 1
