"""A model with asserts: pytest rewrites those of test files, and PyTorch could not trace them."""

import torch
from torch import nn

TEXT = 'not "finite"\n  it\'s {bad} \\n // */ %s'


class Asserting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm, self.two = nn.Linear(4, 300), nn.BatchNorm1d(300), nn.Linear(300, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert torch.isfinite(x).all(), 'not "finite"\n  it\'s {bad} \\n // */ %s'
        assert x.dim() == 2, "a batch of vectors"
        hidden = self.norm(self.one(x))
        torch._assert_async((hidden < 1e6).all())
        assert (hidden > -1e6).all()
        return self.two(hidden)
