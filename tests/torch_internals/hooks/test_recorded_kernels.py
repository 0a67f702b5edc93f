"""Autograd records what a kernel computes, where the dispatcher has turned it off."""

import torch

from mirrorc.torch_internals import recorded_by_autograd


def test_a_kernel_is_recorded_only_within_the_block() -> None:
    recorded: list[bool] = []

    def kernel(x: torch.Tensor) -> torch.Tensor:
        leaf = x.detach().requires_grad_()
        recorded.append((leaf * 2).requires_grad)
        with recorded_by_autograd():
            doubled = leaf * 2
        (gradient,) = torch.autograd.grad(doubled.sum(), leaf)
        recorded.append(doubled.requires_grad)
        return gradient

    library = torch.library.Library("mirrorc_tests_recorded", "FRAGMENT")
    library.define("gradient_of_double(Tensor x) -> Tensor")
    library.impl("gradient_of_double", kernel, "CompositeExplicitAutograd")
    result = torch.ops.mirrorc_tests_recorded.gradient_of_double(torch.ones(3, requires_grad=True))
    assert recorded == [False, True] and result.tolist() == [2.0, 2.0, 2.0]
