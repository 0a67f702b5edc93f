"""Who imported a clipping function before is observed, too, and what the function does stays the same."""

import copy
import inspect
from collections.abc import Iterator, Sequence

import pytest
import torch
from torch.nn import utils

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.hooks import clip_grad_observer


@pytest.fixture
def told() -> Iterator[list[tuple[str, int]]]:
    calls: list[tuple[str, int]] = []
    before = list(clip_grad_observer._observer)

    def note(name: str, parameters: Sequence[torch.Tensor]) -> None:
        calls.append((name, len(parameters)))

    internals.observe_clipping(note)
    internals.observe_clipping(note)  # a second time changes nothing
    yield calls
    clip_grad_observer._observer[:] = before or [lambda *_: None]


def test_each_clipping_function_tells_of_its_calls(told: list[tuple[str, int]]) -> None:
    layer = torch.nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    arguments = {"clip_grads_with_norm_": (0.5, torch.ones(()))}
    for name in clip_grad_observer.CLIPPING:
        function = getattr(utils, name)
        told.clear()
        function(layer.parameters(), *arguments.get(name, (0.5,)))
        assert told[0] == (name, 2), f"torch writes {name} in another way than before"
        told.clear()
        function(layer.weight, *arguments.get(name, (0.5,)))
        assert told[0] == (name, 1)
        assert next(iter(inspect.signature(function).parameters)) == "parameters"


def test_a_compiled_function_may_clip(told: list[tuple[str, int]]) -> None:
    layer = torch.nn.Linear(3, 3)
    layer(torch.ones(1, 3)).sum().backward()
    twin = copy.deepcopy(layer)
    for own, parameter in zip(twin.parameters(), layer.parameters(), strict=True):
        own.grad = parameter.grad.clone()

    def clip() -> torch.Tensor:
        return utils.clip_grad_norm_(list(twin.parameters()), 0.5)

    norm = torch.compile(clip, backend="eager", fullgraph=True)()
    assert not told
    assert torch.equal(norm, utils.clip_grad_norm_(layer.parameters(), 0.5))
    for own, parameter in zip(twin.parameters(), layer.parameters(), strict=True):
        torch.testing.assert_close(own.grad, parameter.grad)
