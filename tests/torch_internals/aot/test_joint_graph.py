"""The graph of forward and backward that torch exports."""

import contextlib
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch._decomp.decompositions_for_rng import PhiloxStateTracker
from torch._functorch import config
from torch.utils.checkpoint import CheckpointPolicy
from traced_graphs import Small

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import checkpoint_tag, export_graph, trace_full_graph
from mirrorc.torch_internals.aot.joint_graph import no_states_of_gpus


def joint_of(module: nn.Module, *leaves: torch.Tensor) -> internals.JointGraph:
    with contextlib.ExitStack() as stack:
        return internals.export_graph(stack, internals.trace_full_graph(module, leaves), leaves, {})


def test_export_joint_graph_says_what_every_input_and_output_is() -> None:
    joint = joint_of(Small(), torch.ones(2, 3), torch.ones(1))
    assert sorted(joint.leaf_of.values()) == [0, 1]
    assert sorted(joint.variable_of.values()) == ["count", "frozen", "weight"]
    assert joint.tangent.op == "placeholder" and joint.tangent.meta["val"].shape == ()
    assert joint.loss.meta["val"].shape == ()
    trained = {name: node for name, node in joint.gradients.items() if node is not None}
    assert list(trained) == ["weight"] and trained["weight"].meta["val"].shape == (3,)
    assert list(joint.buffer_writes) == ["count"] and joint.written_inputs == []


def test_export_joint_graph_computes_loss_and_gradient() -> None:
    module, x = Small(), torch.randn(2, 3)
    joint = joint_of(module, x, torch.ones(1))
    values = {"weight": module.weight, "frozen": module.frozen, "count": module.count}
    inputs = []
    for node in joint.graph_module.graph.nodes:
        if node.op == "placeholder":
            if node in joint.leaf_of:
                inputs.append((x, torch.ones(1))[joint.leaf_of[node]])
            else:
                inputs.append(torch.tensor(2.0) if node is joint.tangent else values[joint.variable_of[node]].detach())
    results = fx.Interpreter(joint.graph_module).run(*inputs, enable_io_processing=False)
    of = dict(zip(joint.graph_module.graph.output_node().args[0], results, strict=True))
    torch.testing.assert_close(of[joint.loss], (x * module.weight + module.frozen).sum().detach())
    torch.testing.assert_close(of[joint.gradients["weight"]], 2.0 * x.sum(0))
    torch.testing.assert_close(of[joint.buffer_writes["count"]], torch.tensor(1.0))


@pytest.mark.slow
def test_a_graph_reads_variables_from_its_module_and_says_what_else_it_reads() -> None:
    class Call(Small):
        def __init__(self, *others: torch.Tensor) -> None:
            super().__init__()
            self.held, self.read = [self.weight, self.count], lambda: others[0]

        def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
            self.held[1].add_(1.0)
            return (leaves[0] * self.held[0] * self.read()).sum()

    other, leaves = torch.ones(3), (torch.ones(2, 3), torch.ones(1))
    module = Call(other)
    joint = joint_of(module, *leaves)
    assert joint.gradients["weight"] is not None and list(joint.buffer_writes) == ["count"]
    traced = internals.trace_full_graph(module, leaves)
    ((node, tensor),) = internals.outside_tensors(traced, leaves)
    assert tensor is other and node.op == "placeholder"
    own = internals.module_variables(traced, leaves)
    assert node not in own and sorted(own.values()) == ["count", "weight"]
    assert internals.reading_names(module, internals.guards_of(traced).names, [other, torch.ones(1)]) == [
        "others[0]",
        "",
    ]


@pytest.mark.slow
def test_a_graph_reads_variables_of_other_modules_from_its_own_and_writes_them_there() -> None:
    class Call(Small):
        def __init__(self, other: nn.Module, weight: nn.Parameter, constant: torch.Tensor) -> None:
            super().__init__()
            self.read = lambda x: other(x) * weight * constant

        def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
            return (self.read(leaves[0]) * self.weight).sum()

    other, weight = nn.Sequential(nn.BatchNorm1d(3)), nn.Parameter(torch.ones(3))
    module, leaves = Call(other, weight, torch.ones(3)), (torch.ones(2, 3), torch.ones(1))
    traced = internals.trace_full_graph(module, leaves)
    found = internals.outside_variables(traced, module, leaves, internals.guards_of(traced).names)
    assert {one.words: one.tensor for one in found} == {
        **{f"other.{name}": tensor for name, tensor in other.state_dict(keep_vars=True).items()},
        "weight": weight,
    }
    assert {one.root for one in found} == {other, None}
    paths = internals.read_from_module(traced, "elsewhere", [one.tensor for one in found])
    with contextlib.ExitStack() as stack:
        joint = internals.export_graph(stack, traced, leaves, {})
    assert set(paths) <= set(joint.variable_of.values()) and not set(paths) & set(joint.gradients)
    written = {one.words for path, one in zip(paths, found, strict=True) if path in joint.buffer_writes}
    assert written == {f"other.0.{name}" for name in ("running_mean", "running_var", "num_batches_tracked")}
    assert other[0].num_batches_tracked == 0


@pytest.mark.parametrize(
    ("writes", "found"), [("parameter", [("parameter", "weight")]), ("argument", [("argument", "0")])]
)
def test_export_joint_graph_notes_inputs_that_are_written(writes: str, found: list[tuple[str, str]]) -> None:
    class Writes(Small):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                (self.weight if writes == "parameter" else x).mul_(0.5)
            return (x * self.weight).sum()

    assert joint_of(Writes(), torch.ones(3), torch.ones(1)).written_inputs == found


def test_constants_of_a_joint_graph() -> None:
    class Holds(Small):
        def forward(self, x: torch.Tensor, unused: torch.Tensor) -> torch.Tensor:
            return (x * self.weight * torch.tensor([1.0, 2.0, 3.0])).sum()

    joint = joint_of(Holds(), torch.ones(3), torch.ones(1))
    constants = [n for n in joint.graph_module.graph.nodes if n.op == "get_attr"]
    assert [joint.constant(n).tolist() for n in constants] == [[1.0, 2.0, 3.0]]
    assert joint.variable_of[constants[0]] == str(constants[0].target)


def test_a_fake_seed_belongs_to_the_graphs_mode() -> None:
    joint = joint_of(Small(), torch.ones(2, 3), torch.ones(1))
    seed = joint.fake_seed()
    assert seed.fake_mode is joint.fake_mode and (seed.dtype, seed.shape) == (torch.int64, ())  # type: ignore[attr-defined]


@pytest.mark.slow
def test_export_forward_graph_has_no_backward() -> None:
    """Buffers that forward writes and outputs are told apart, as in a joint graph."""

    class Normalized(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            normalized = self.norm(leaves[0])
            return normalized.sum(), normalized

    x = torch.randn(4, 3)
    with contextlib.ExitStack() as stack, torch.no_grad():
        traced = internals.trace_full_graph(Normalized(), (x,))
        graph = internals.export_graph(stack, traced, (x,), {}, ("loss", "outputs"), trains=False)
    assert graph.tangent is None and graph.loss is None and not graph.gradients
    assert list(graph.outputs) == ["loss", "outputs"]
    assert set(graph.buffer_writes) == {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert set(graph.leaf_of.values()) == {0} and graph.fake_mode is not None


def test_export_leaves_the_users_modules_alone() -> None:
    """Another thread may run them meanwhile."""
    seen: list[type] = []

    class Sums(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.layer(x).sum()

    def observed(*args: Any) -> Any:
        seen.extend(type(parameter) for parameter in module.layer._parameters.values())
        return NotImplemented

    module, leaves = Sums(), (torch.ones(2, 3),)
    traced = internals.trace_full_graph(module, leaves)
    with contextlib.ExitStack() as stack:
        internals.export_graph(stack, traced, leaves, {torch.ops.aten.sum.default: observed})
    assert seen and set(seen) == {nn.Parameter}


def tagged(**meta: object) -> fx.Node:
    node = fx.Graph().call_function(torch.sin, ())
    node.meta.update(meta)
    return node


def test_a_tag_has_the_number_of_its_checkpoint_and_what_the_policy_says() -> None:
    assert checkpoint_tag(tagged()) is None
    assert checkpoint_tag(tagged(recompute=CheckpointPolicy.PREFER_RECOMPUTE, ac_graph_id=3)) == (3, False)
    assert checkpoint_tag(tagged(recompute=CheckpointPolicy.MUST_RECOMPUTE, ac_graph_id=3)) == (3, False)
    assert checkpoint_tag(tagged(recompute=CheckpointPolicy.MUST_SAVE, ac_graph_id=4)) == (4, True)
    assert checkpoint_tag(tagged(recompute=CheckpointPolicy.PREFER_SAVE, ac_graph_id=4)) == (4, True)


@pytest.mark.skipif(not hasattr(CheckpointPolicy, "MUST_CPU_OFFLOAD"), reason="this torch has no such policy")
def test_a_policy_that_moves_values_is_told() -> None:
    with pytest.raises(ValueError, match="MUST_CPU_OFFLOAD"):
        checkpoint_tag(tagged(recompute=CheckpointPolicy.MUST_CPU_OFFLOAD, ac_graph_id=4))


class Inverts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 16)

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return torch.linalg.inv(self.layer(leaves[0]).view(-1, 4, 4)).sum()


def test_a_check_of_linear_algebra_becomes_an_assert_and_tokens_go() -> None:
    x = torch.randn(2, 4)
    with contextlib.ExitStack() as stack:
        joint = export_graph(stack, trace_full_graph(Inverts(), (x,)), (x,), {})
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
        internals.export_graph(stack, internals.trace_full_graph(Small(), leaves), leaves, {})
        assert PhiloxStateTracker.fwd_state.seed is None
    assert PhiloxStateTracker.fwd_state.seed is None
