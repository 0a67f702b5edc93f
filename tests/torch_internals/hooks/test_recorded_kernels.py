"""Autograd records what a kernel computes, where the dispatcher has turned it off."""

import torch

from mirrorc.torch_internals import recorded_by_autograd


def test_a_kernel_is_recorded_only_within_the_block() -> None:
    leaf = torch.ones(3, requires_grad=True)
    with torch._C._AutoDispatchBelowAutograd():  # as in a kernel
        assert not (leaf * 2).requires_grad
        with recorded_by_autograd():
            doubled = leaf * 2
        assert not (leaf * 2).requires_grad
    (gradient,) = torch.autograd.grad(doubled.sum(), leaf)
    assert gradient.tolist() == [2.0, 2.0, 2.0]
