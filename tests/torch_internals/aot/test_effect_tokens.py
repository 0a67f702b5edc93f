"""What AOTAutograd makes of operators that are called for an effect, and what is left of it."""

from __future__ import annotations

import contextlib

import torch
from torch import nn

from mirrorc.torch_internals import export_joint_graph, trace_full_graph


class Inverts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 16)

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.layer(leaves[0]).view(-1, 4, 4)).sum()


def test_a_check_of_linear_algebra_becomes_an_assert_and_tokens_go() -> None:
    x = torch.randn(2, 4)
    with contextlib.ExitStack() as stack:
        joint = export_joint_graph(stack, trace_full_graph(Inverts(), (x,)), (x,), {})
    graph = joint.graph_module.graph
    assert "with_effects" not in str(graph)
    assert len(graph.find_nodes(op="placeholder")) == 4, "two parameters, the batch and the tangent"
    (check,) = graph.find_nodes(op="call_function", target=torch.ops.aten._assert_async.msg)
    assert "linalg.inv" in check.args[1]
    assert all("val" in node.meta for node in check.all_input_nodes)
    assert joint.gradients.keys() == {"layer.weight", "layer.bias"} and joint.loss.target is torch.ops.aten.sum.default
    graph.lint()
