"""How convolutions' tensors lie in memory."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

_CONVOLUTIONS = (torch.conv2d, torch.nn.functional.conv2d)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # oneDNN's


def lay_channels_last(traced: fx.GraphModule) -> None:
    """Gives convolutions their inputs and weights in channels-last format, in a graph of torch's functions.

    What they make has that format then, and so has, up to what changes the shape, all that is made of it, in forward and
    backward. Parameters stay as they are: a step copies the weights, which is little to copy, and their gradients.

    Source: torch's own compiler lays convolutions on CPUs in this way; here graphs are cut into regions, each compiled by
        itself, so that the format must be seen from the beginning.
    """
    laid: dict[fx.Node, fx.Node] = {}
    for node in [node for node in traced.graph.nodes if node.target in _CONVOLUTIONS]:
        given = [value for value in node.args[:2] if isinstance(value, fx.Node)]
        if len(given) == 2 and all(_is_laid_out(value) for value in given):
            node.args = (*(_channels_last(node, value, laid) for value in given), *node.args[2:])
    traced.recompile()


def _is_laid_out(value: fx.Node) -> bool:
    example: Any = value.meta.get("example_value")
    return isinstance(example, torch.Tensor) and example.dim() == 4 and example.dtype in _DTYPES


def _channels_last(convolution: fx.Node, value: fx.Node, laid: dict[fx.Node, fx.Node]) -> fx.Node:
    if value not in laid:
        with convolution.graph.inserting_before(convolution):
            laid[value] = convolution.graph.call_method("contiguous", (value,), {"memory_format": torch.channels_last})
        laid[value].meta.update(convolution.meta)
    return laid[value]
