"""A module of `mirrorc.data_parallel` beside the plain model."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import mirrorc

TOLERANCE = 1e-12
EAGER = mirrorc.Compiler(backend="eager")
PLAIN = mirrorc.Compiler(backend="eager", capture="autograd")
QUIET = mirrorc.Debug(progress=False)


def net(*between: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), *between, nn.Tanh(), nn.Linear(8, 3)).double()


def batch(size: int, seed: int = 0, features: int = 6, classes: int = 3) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, features, generator=generator, dtype=torch.float64)
    return x, torch.randint(classes, (size,), generator=generator)


class Both:
    """A module on several devices, and its twin in plain PyTorch."""

    def __init__(self, model: nn.Module | None = None, devices: int = 2, compiler: mirrorc.Compiler = EAGER) -> None:
        model = net() if model is None else model
        self.plain = copy.deepcopy(model)
        self.parallel = mirrorc.data_parallel(model, devices, compiler=compiler, debug=QUIET)

    def __iter__(self) -> Iterator[nn.Module]:
        return iter((self.parallel, self.plain))

    def run(self, use: Callable[[nn.Module], Any]) -> tuple[Any, Any]:
        """What a function of the model returns for both, with one random stream."""
        torch.manual_seed(1)
        own = use(self.parallel)
        torch.manual_seed(1)
        return own, use(self.plain)

    def check(self, tolerance: float = TOLERANCE) -> None:
        for (name, own), other in zip(self.parallel.module.named_parameters(), self.plain.parameters(), strict=True):
            assert_close(own, other, tolerance, name)
            assert (own.grad is None) == (other.grad is None), name
            if own.grad is not None and other.grad is not None:
                assert_close(own.grad, other.grad, tolerance, f"gradient of {name}")
        for own, other in zip(self.parallel.buffers(), self.plain.buffers(), strict=True):
            assert_close(own, other, tolerance, "buffer")

    def close(self) -> None:
        self.parallel.close()


def assert_close(own: Any, other: Any, tolerance: float = TOLERANCE, what: str = "") -> None:
    assert own.shape == other.shape and own.dtype == other.dtype, what
    assert torch.allclose(own.double(), other.double(), rtol=tolerance, atol=tolerance), what
