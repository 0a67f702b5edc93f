"""What convolutions take within themselves, against torch's profiler."""

from collections.abc import Callable
from itertools import accumulate
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from mirrorc.analysis.memory.workspaces import workspace_bytes

aten = torch.ops.aten
needs_blocks = pytest.mark.skipif(
    not torch.backends.cpu.get_cpu_capability().startswith("AVX"), reason="what oneDNN copies is known for x86"
)


def peak_of(action: Callable[[], Any]) -> int:
    action()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        result = action()
    events = [e for e in profiled.profiler.kineto_results.events() if e.name() == "[memory]"]
    del result
    return max(accumulate(e.nbytes() for e in sorted(events, key=lambda event: event.start_ns())))


def num_bytes(result: Any) -> int:
    return sum(part.nbytes for part in (result if isinstance(result, tuple) else (result,)) if part is not None)


SHAPES = [(16, 32, 32, 16, 1), (8, 64, 32, 8, 1), (16, 3, 32, 16, 1), (16, 20, 36, 16, 1), (16, 32, 64, 16, 2)]


@needs_blocks
@pytest.mark.parametrize("shape", SHAPES)
def test_forward(shape: tuple[int, ...]) -> None:
    n, channels_in, channels, size, stride = shape
    x, weight = torch.randn(n, channels_in, size, size), torch.randn(channels, channels_in, 3, 3)
    args = (x, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1)
    made = aten.convolution.default(*args)
    told = workspace_bytes(aten.convolution.default, args, made) + num_bytes(made)
    assert told == pytest.approx(peak_of(lambda: aten.convolution.default(*args)), rel=0.05)


@needs_blocks
@pytest.mark.parametrize("needs_image", [True, False])
@pytest.mark.parametrize("shape", SHAPES)
def test_backward(shape: tuple[int, ...], needs_image: bool) -> None:
    n, channels_in, channels, size, stride = shape
    x, weight = torch.randn(n, channels_in, size, size), torch.randn(channels, channels_in, 3, 3)
    gradient = torch.randn(n, channels, size // stride, size // stride)
    mask = [needs_image, True, False]
    args = (gradient, x, weight, None, [stride] * 2, [1, 1], [1, 1], False, [0, 0], 1, mask)
    made = aten.convolution_backward.default(*args)
    told = workspace_bytes(aten.convolution_backward.default, args, made) + num_bytes(made)
    assert told == pytest.approx(peak_of(lambda: aten.convolution_backward.default(*args)), rel=0.1)


@pytest.mark.parametrize("change", [lambda t: t.double(), lambda t: t.contiguous(memory_format=torch.channels_last)])
def test_what_is_not_copied_takes_nothing(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x, weight = change(torch.randn(4, 32, 8, 8)), change(torch.randn(32, 32, 3, 3))
    args = (x, weight, None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1)
    assert workspace_bytes(aten.convolution.default, args, aten.convolution.default(*args)) == 0


def test_other_operators_are_not_known_to_take_any() -> None:
    x = torch.randn(4, 4)
    assert workspace_bytes(aten.mm.default, (x, x), x @ x) == 0
