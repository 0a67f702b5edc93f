"""The options that say how gradients are grouped."""

import pytest
import torch
from torch import nn

import mirrorc


@pytest.mark.parametrize("besides", [{}, {"packing": 2}, {"world": mirrorc.World(2)}, {"passes": []}], ids=str)
def test_measured_bucket_sizes_are_refused_with_the_default(besides: dict[str, object]) -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        ValueError, match=r"bucket_cap_mb='auto' is withdrawn, .* default of 25 MiB .*give a number of MiB"
    ):
        mirrorc.compile(model, optimizer=optimizer, loss_fn=nn.MSELoss(), bucket_cap_mb="auto", **besides)  # type: ignore[call-overload]
