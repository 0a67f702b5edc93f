"""The cache of parametrized weights is seen while it is in use, and is another one afterwards."""

from torch import nn
from torch.nn.utils import parametrize

from mirrorc.torch_internals import caches_parametrizations, parametrization_cache


class Doubled(nn.Module):
    def forward(self, weight: nn.Parameter) -> nn.Parameter:
        return weight * 2


def test_a_cache_is_seen_and_replaced() -> None:
    layer = parametrize.register_parametrization(nn.Linear(2, 2), "weight", Doubled())
    before = parametrization_cache()
    assert not caches_parametrizations()
    with parametrize.cached():
        assert caches_parametrizations() and layer.weight is layer.weight
        assert parametrization_cache() is before and len(before) == 1
    assert not caches_parametrizations() and parametrization_cache() is not before
