"""Observed functions do the same as before, also for who imported a clipping function earlier."""

import copy
import inspect
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.nn import utils

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.hooks import gradient_observers


@pytest.fixture
def clipped() -> Iterator[list[tuple[str, int]]]:
    calls: list[tuple[str, int]] = []
    before = list(gradient_observers._of_clipping)

    def note(name: str, parameters: Sequence[torch.Tensor]) -> None:
        calls.append((name, len(parameters)))

    internals.observe_clipping(note)
    internals.observe_clipping(note)  # a second time changes nothing
    yield calls
    gradient_observers._of_clipping[:] = before or [lambda *_: None]


@pytest.fixture
def zeroed() -> Iterator[list[int]]:
    calls: list[int] = []
    before = list(gradient_observers._of_zero_grad)

    def note(parameters: Sequence[torch.Tensor]) -> None:
        calls.append(len(parameters))

    internals.observe_zero_grad(note)
    internals.observe_zero_grad(note)  # a second time changes nothing
    yield calls
    gradient_observers._of_zero_grad[:] = before


def test_each_clipping_function_tells_of_its_calls(clipped: list[tuple[str, int]]) -> None:
    layer = torch.nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    arguments = {"clip_grads_with_norm_": (0.5, torch.ones(()))}
    for name in gradient_observers.CLIPPING:
        function = getattr(utils, name)
        clipped.clear()
        function(layer.parameters(), *arguments.get(name, (0.5,)))
        assert clipped[0] == (name, 2), f"torch writes {name} in another way than before"
        clipped.clear()
        function(layer.weight, *arguments.get(name, (0.5,)))
        assert clipped[0] == (name, 1)
        assert next(iter(inspect.signature(function).parameters)) == "parameters"


def test_a_compiled_function_may_clip(clipped: list[tuple[str, int]]) -> None:
    layer = torch.nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    twin = copy.deepcopy(layer)
    for copied, parameter in zip(twin.parameters(), layer.parameters(), strict=True):
        copied.grad = parameter.grad.clone()

    def clip() -> torch.Tensor:
        return utils.clip_grad_norm_(list(twin.parameters()), 0.5)

    norm = torch.compile(clip, backend="eager", fullgraph=True)()
    assert not clipped
    assert torch.equal(norm, utils.clip_grad_norm_(layer.parameters(), 0.5))
    for copied, parameter in zip(twin.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(copied.grad, parameter.grad)


def test_optimizers_and_modules_tell_of_what_they_drop(zeroed: list[int]) -> None:
    net = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.Linear(3, 1))
    optimizer = torch.optim.SGD(net[0].parameters(), lr=0.1)
    net(torch.ones(1, 3)).sum().backward()
    optimizer.zero_grad(set_to_none=False)
    assert zeroed == [2] and not net[0].weight.grad.any() and net[1].weight.grad is not None
    net.zero_grad()
    assert zeroed == [2, 4] and all(parameter.grad is None for parameter in net.parameters())
