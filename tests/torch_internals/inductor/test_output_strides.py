"""Outputs of compiled functions have the strides that backward was compiled for."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mirrorc.torch_internals.inductor.graph_compilation import in_strides


class Compiled(SimpleNamespace):
    def __call__(self, arguments: list[Any]) -> list[Any]:
        arguments.clear()
        return self.outputs


@pytest.mark.parametrize("strides", [(5, 1), (1, 4), (10, 3), (0, 2)])
def test_values_laid_out_otherwise_than_in_the_graph_are_copied(strides: tuple[int, int]) -> None:
    value = torch.arange(12.0).reshape(4, 3)
    value = value[:1].expand(4, 3) if strides[0] == 0 else value
    other = torch.ones(2)
    actual = [tuple(map(str, value.stride())) if strides[0] else ("3", "1"), ("1",), None]
    function = in_strides(Compiled(outputs=[value, other, 7], output_strides=actual), [strides, (1,), None])
    arguments: list[Any] = [other]
    copied, same, number = function(arguments)
    assert copied.stride() == strides and torch.equal(copied, value) and copied.data_ptr() != value.data_ptr()
    assert same is other and number == 7 and arguments == []


def test_a_function_with_the_strides_of_the_graph_is_left_as_it_is() -> None:
    compiled = Compiled(output_strides=[("3", "1"), None])
    assert in_strides(compiled, [(3, 1), None]) is compiled
