"""What AOTAutograd makes of operators that are called for an effect, and what is left of it."""

import contextlib

import torch
from torch import nn
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._functorch import config
from traced_graphs import Small

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import export_joint_graph, trace_full_graph
from mirrorc.torch_internals.aot.export_cleanup import no_states_of_gpus


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


def test_no_tensor_is_made_in_the_block_and_those_of_others_are_made_behind_it() -> None:
    with no_states_of_gpus(), PhiloxStateTracker():
        assert PhiloxStateTracker.fwd_state.seed is None
    with PhiloxStateTracker():
        assert PhiloxStateTracker.fwd_state.seed.numel() == 0


def test_they_are_made_where_graphs_have_them() -> None:
    with config.patch(functionalize_rng_ops=True), no_states_of_gpus(), PhiloxStateTracker():
        assert PhiloxStateTracker.fwd_state.seed.numel() == 0


def test_an_export_and_the_end_of_its_contexts_make_none() -> None:
    leaves = (torch.ones(2, 3), torch.ones(1))
    with contextlib.ExitStack() as stack:
        internals.export_joint_graph(stack, internals.trace_full_graph(Small(), leaves), leaves, {})
        assert PhiloxStateTracker.fwd_state.seed is None
    assert PhiloxStateTracker.fwd_state.seed is None
