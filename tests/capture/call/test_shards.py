"""What a program is specialized on."""

import pytest
import torch

from mirrorc.capture.call.shards import shard_types

LAYOUTS = {
    "dense": torch.randn(4, 8),
    "transposed": torch.randn(4, 8).t(),
    "every-second-column": torch.randn(4, 8)[:, ::2],
    "transposed-part": torch.randn(4, 8)[:, :4].t(),
    "expanded": torch.randn(4, 1).expand(4, 5),
    "channels-last": torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
    "part-of-channels-last": torch.randn(2, 6, 4, 5).to(memory_format=torch.channels_last)[:, ::2],
}


@pytest.mark.parametrize("tensor", LAYOUTS.values(), ids=list(LAYOUTS))
def test_strides_are_those_on_the_device(tensor: torch.Tensor) -> None:
    """Regions compiled for other strides would refuse their arguments, or misread them."""
    elsewhere = torch.device("meta")
    moved = tensor.to(elsewhere)
    assert shard_types([tensor], elsewhere) == ((moved.shape, moved.stride(), moved.dtype),)
    assert shard_types([tensor], tensor.device) == ((tensor.shape, tensor.stride(), tensor.dtype),)
