"""A model of blocks with dropout and BatchNorm around which values go; the first blocks may be in checkpoints of its own."""

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint


class Deep(nn.Module):
    """The same numbers with checkpoints and without."""

    def __init__(self, width: int = 6, num_blocks: int = 3, num_own: int = 0, *, is_plain: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.num_own = num_own
        dropout, norm = ([], []) if is_plain else ([nn.Dropout(0.4)], [nn.BatchNorm1d(width)])
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), *dropout, nn.Linear(4 * width, width), *norm)
            for _ in range(num_blocks)
        )
        self.head = nn.Linear(width, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            x = x + (checkpoint(block, x, use_reentrant=False) if i < self.num_own else block(x))
        return self.head(x)
