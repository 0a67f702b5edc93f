"""`cut_at_outputs` gives programs that compute what autograd does, and keeps no more than backward needs."""

import copy
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from fuzzed_operators import drawn_graph
from module_programs import (
    Noisy,
    capture_module,
    captured_module,
    cut_module,
    lowered,
    passes_before_cut,
    passes_of,
    run_cut,
)
from selections import exhaustive, slow
from small_modules import Parts, module_of
from torch import fx, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirrorc
from mirrorc.analysis.communication.worker_meetings import worker_meetings
from mirrorc.compilation.forward_and_backward import ForwardAndBackward, cut_at_outputs
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, target_name
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.ir.workers import World
from mirrorc.packing import EqualPacks
from mirrorc.passes import ReserveMemory, ReuseArguments
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.torch_internals import inductor_decompositions
from mirrorc.verifier.verifier import verify

ROWS = 4


def rows(number: int = ROWS, columns: int = 4) -> torch.Tensor:
    return torch.randn(number, columns, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def kept(both: ForwardAndBackward) -> list[str]:
    """The operators, or the variables, that make what forward keeps."""
    nodes = calls_to(both.forward.shard_graphs[0], ops.keep)
    return [maker(node.all_input_nodes[0]) for node in nodes]


def maker(node: fx.Node) -> str:
    return target_name(node.target).removeprefix("aten.").partition(".")[0]


def operators(program: Program) -> list[str]:
    return [maker(node) for node in program.shard_graphs[0].nodes if node.op == "call_function"]


def arguments(program: Program, kind: ArgumentKind) -> list[str]:
    return [argument.name for argument in program.arguments if argument.kind is kind]


def as_tuple(outputs: Any) -> Sequence[torch.Tensor]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def check(model: nn.Module, x: torch.Tensor, *, argument: bool = True, **how: Any) -> ForwardAndBackward:
    """Cuts a module's program for one device, and compares what both programs compute with autograd."""
    model = model.double()
    plain = copy.deepcopy(model)
    captured = capture_module(model, x, 1, differentiated=[0] if argument else [], **how)
    both = cut_at_outputs(captured.program, 1, type(model).__name__)
    verify(both.forward)
    verify(both.backward)
    of_plain = x.clone().requires_grad_(argument)
    outputs = as_tuple(plain(of_plain))
    tangents = [torch.randn_like(output) for output in outputs]
    torch.autograd.backward(outputs, tangents)
    constants = {name: value.clone() for name, value in captured.constants.items()}
    variables = {**dict(model.named_parameters()), **dict(model.named_buffers()), **constants}
    with torch.no_grad():
        forward, backward = run_cut(both, variables, x, tangents)
    torch.testing.assert_close([*forward.outputs.values()], [*outputs])
    expected = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    torch.testing.assert_close(dict(backward.gradients), expected)
    torch.testing.assert_close(dict(model.named_buffers()), dict(plain.named_buffers()))
    if argument:
        torch.testing.assert_close(backward.outputs["gradient of x"], of_plain.grad)
    return both


class Drawn(Parts):
    """Random views, writes in place and indexing, of a value that a written buffer scales."""

    def __init__(self, seed: int) -> None:
        super().__init__(layer=nn.Linear(4, 5), operators=[operator for _, operator in drawn_graph(seed)])
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.layer(x) * self.scale
        self.scale = self.scale * 2
        value = hidden.clone()
        for operator in self.operators:
            value = operator(value, hidden)
        return value.sin(), hidden.exp()


@pytest.mark.parametrize(
    "seed", [3, *slow(*((seed,) for seed in range(4, 10))), *exhaustive(*((seed,) for seed in range(10, 90)))]
)
def test_random_graphs_compute_what_autograd_does(seed: int) -> None:
    both = check(Drawn(seed), rows())
    verify(lowered(both.forward))
    verify(lowered(both.backward))


def test_values_that_own_their_memory_are_saved_and_views_of_them_are_made_again() -> None:
    class Viewed(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = self.layer(x).sin().chunk(2, dim=1)
            return left.t() @ right

    both = check(nn.Sequential(Viewed(layer=nn.Linear(4, 6))), rows(), argument=False)
    assert kept(both) == ["addmm", "sin"]
    assert {"split", "t"} <= {*operators(both.backward)}


def test_parameters_the_batch_and_views_of_them_are_read_again() -> None:
    class Halves(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (up, down), (left, right) = self.weight.chunk(2), x.chunk(2, dim=1)
            return (x @ up.T).sin() + x @ down.T + (left * right).sum()

    both = check(Halves(weight=nn.Parameter(torch.randn(6, 4))), rows())
    assert kept(both) == ["mm"]
    assert both.read_variables == {"weight"} and both.read_leaves == {0}


def test_a_linear_model_keeps_nothing() -> None:
    both = check(nn.Linear(4, 3), rows())
    assert not kept(both) and not arguments(both.backward, ArgumentKind.SAVED)


def test_values_of_nothing_are_made_again() -> None:
    both = check(
        module_of(lambda self, x: x * torch.arange(4, dtype=x.dtype) + torch.ones(4, dtype=torch.float64).cumsum(0)),
        rows(),
    )
    assert "arange" in operators(both.backward) and "arange" not in kept(both)


def test_what_is_made_again_stands_where_it_is_used() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.ReLU(), nn.Linear(6, 3))
    backward = cut_module(model, rows().float()).backward
    graph = backward.shard_graphs[0]
    tangents = [*placeholders_of(graph, backward.arguments, ArgumentKind.TANGENT)]
    order = [node for node in graph.nodes if node.op == "call_function"]
    behind = set(tangents)
    for node in order:
        if not behind.isdisjoint(node.all_input_nodes):
            behind.add(node)
    again = [node for node in order if node not in behind]
    assert "detach" in map(maker, again), "the graph has what this test is about"
    for node in again:
        place = order.index(node)
        first_use = min(order.index(user) for user in node.users if user in order)
        assert behind.isdisjoint(order[place:first_use]), f"{node} stands before the bucket that needs it"


@pytest.mark.parametrize("is_viewed", [False, True])
def test_a_buffer_that_forward_writes_is_copied_for_backward(is_viewed: bool) -> None:
    class Written(Parts):
        def __init__(self) -> None:
            super().__init__(layer=nn.Linear(4, 4))
            self.scale: torch.Tensor
            self.register_buffer("scale", torch.full((2, 4), 2.0))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            first, second = self.scale.unbind() if is_viewed else (self.scale[0], 1.0)
            y = self.layer(x) * first * second
            self.scale = self.scale * 3
            return y

    both = check(Written(), rows())
    assert "clone" in kept(both) and "scale" not in both.read_variables
    assert both.forward.variables.keys() == {"layer.weight", "layer.bias", "scale"}


def test_what_may_share_memory_of_an_argument_is_made_again() -> None:
    """The operator does not declare what it shares."""

    class Split(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            left, right = torch.unsafe_split(x, 2, dim=1)
            return left * right.exp()

    both = check(Split(), rows())
    assert kept(both) == ["exp"] and "unsafe_split" in operators(both.backward)


def test_what_all_replicas_give_is_kept_once_it_is_there() -> None:
    both = cut_module(module_of(lambda self, x: x.exp() @ mirrorc.all_gather(x).T), rows(), 2, differentiated=[0])
    for program in (both.forward, both.backward):
        verify(lowered(program))
    assert "rows_of_replicas" in kept(both)


def test_a_graph_that_needs_other_values_for_another_size_is_refused() -> None:
    class Sized(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sin() if len(x) > 2 else (x.exp() * x.sin()).tanh()

    with pytest.raises(CaptureError, match="MC2504: backward of Sized needs other values of forward"):
        cut_module(Sized(), rows(5), 2, differentiated=[0])


def test_dropout_has_one_mask_in_both() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)).double()
    both = cut_module(model, rows(), 1, differentiated=[0])
    assert kept(both).count("mirrorc") == 1 and not arguments(both.backward, ArgumentKind.SEED)
    with torch.no_grad():
        variables, seed = dict(model.named_parameters()), torch.tensor(3)
        forward, backward = run_cut(both, variables, rows(), [torch.ones(ROWS, 3, dtype=torch.float64)], seed=seed)
        mask = next(value for value in forward.kept if value.dtype is torch.bool)
        expected = (torch.ones(ROWS, 3, dtype=torch.float64) @ model[2].weight * mask * 2) @ model[0].weight
    torch.testing.assert_close(backward.outputs["gradient of x"], expected)


def test_backward_that_draws_again_takes_the_seed() -> None:
    class Checkpointed(Parts):
        def __init__(self) -> None:
            super().__init__(block=nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 3)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(self.block, x, use_reentrant=False).sin()  # type: ignore[no-any-return]

    model = Checkpointed().double()
    joint = run_passes(captured_module(model, rows(), 1), passes_before_cut())
    both = cut_at_outputs(joint, 1, "Checkpointed")
    assert kept(both) == ["addmm"], "what is within the checkpoint is computed again"
    assert arguments(both.forward, ArgumentKind.SEED) == arguments(both.backward, ArgumentKind.SEED) != []
    assert "tanh" in operators(both.backward)


@pytest.mark.slow
def test_a_value_that_is_computed_again_is_not_kept() -> None:
    class Scaled(Parts):
        def __init__(self) -> None:
            super().__init__(layer=nn.Linear(4, 32), scale=nn.Parameter(torch.ones(32)), head=nn.Linear(32, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.layer(x)
            return self.head(hidden * torch.rsqrt(hidden.square().mean(-1, keepdim=True)) * self.scale)

    model = Scaled().double()
    plain = captured_module(model, rows(), 1, decompositions=inductor_decompositions())
    found = {}
    for recomputes in (False, True):
        both = cut_at_outputs(run_passes(plain, passes_before_cut(recomputes=recomputes)), 1, "Scaled")
        found[recomputes] = kept(both)
        with torch.no_grad():
            tangents = [torch.ones(ROWS, 3, dtype=torch.float64)]
            _, backward = run_cut(both, dict(model.named_parameters()), rows(), tangents)
        expected = torch.autograd.grad(model(rows()).sum(), [*model.parameters()])
        torch.testing.assert_close([backward.gradients[name] for name, _ in model.named_parameters()], [*expected])
    assert found[False] == ["addmm", "rsqrt", "mul", "mul"] and found[True] == ["addmm", "rsqrt", "mul"]


@pytest.mark.slow
def test_passes_on_operators_see_both_halves() -> None:
    class Convolved(Parts):
        def __init__(self) -> None:
            super().__init__(conv=nn.Conv2d(2, 4, 3), norm=nn.BatchNorm2d(4), head=nn.Linear(16, 3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(F.gelu(self.norm(self.conv(x)), approximate="tanh").flatten(1))

    options = {"gelu_by_sigmoid": True, "channels_last": True, "pads_products": True, "recomputes": True}
    joint = captured_module(Convolved(), torch.randn(4, 2, 4, 4), 2)
    both = cut_at_outputs(run_passes(joint, passes_before_cut(**options)), 1, "Convolved")
    for program in (both.forward, both.backward):
        verify(program)
        verify(lowered(program, **options))
    assert not {"tanh", "gelu"} & {*operators(both.forward), *operators(both.backward)}
    layouts = {
        value.is_contiguous(memory_format=torch.channels_last)
        for node in calls_to(both.forward.shard_graphs[0], ops.keep)
        if (value := node.all_input_nodes[0].meta["val"]).dim() == 4
    }
    assert layouts == {True}


def test_gradients_of_arguments_alone_need_no_weight_and_no_buckets() -> None:
    both = check(nn.Sequential(nn.Linear(4, 3), nn.Tanh()).requires_grad_(False), rows())
    assert both.gradients_of_leaves == {0: "gradient of x"}
    assert not arguments(both.backward, ArgumentKind.LOSS_WEIGHT)
    program = lowered(both.backward)
    verify(program)
    assert not program.buckets and {region.phase for region in program.regions.values()} == {"backward"}


def test_a_trainable_parameter_that_reaches_no_output_stays_out() -> None:
    both = check(module_of(lambda self, x: (x * self.layer(x).detach()).sin(), layer=nn.Linear(4, 4)), rows())
    verify(lowered(both.backward))


def test_several_outputs_have_a_tangent_each_unless_they_need_no_gradient() -> None:
    class Several(Parts):
        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            hidden = self.layer(x)
            return {"loud": hidden.exp(), "classes": hidden.argmax(1), "quiet": hidden.detach(), "mean": hidden.mean()}

    both = cut_module(Several(layer=nn.Linear(4, 4)), torch.randn(4, 4), 2)
    assert both.tangents == ("outputs.loud", "outputs.mean")
    tangents = [a for a in both.backward.arguments if a.kind is ArgumentKind.TANGENT]
    assert [(a.leaf, a.has_examples) for a in tangents] == [(1, True), (2, False)]
    assert [a.leaf for a in both.backward.arguments if a.kind is ArgumentKind.SAVED] == [3]


@pytest.mark.slow
def test_shards_of_two_sizes_share_arguments_of_backward() -> None:
    model = Noisy().double()
    both = cut_module(model, rows(5), 2)
    assert len(both.forward.shard_graphs) == 2
    for program in (both.forward, both.backward):
        names = [[str(node.target) for node in g.find_nodes(op="placeholder")] for g in program.shard_graphs]
        assert names[0] == names[1] == [argument.name for argument in program.arguments]
        verify(lowered(program))


@pytest.mark.slow
def test_sizes_that_are_symbols_are_arguments_of_both() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    both = cut_module(model, rows(6), 2, symbolic=(frozenset({0}),))
    sizes = [arguments(program, ArgumentKind.SIZE) for program in (both.forward, both.backward)]
    assert sizes[0] == sizes[1] != []
    for program in (both.forward, both.backward):
        verify(lowered(program))
    for number in (3, 7):
        x, tangent = rows(number), torch.ones(number, 3, dtype=torch.float64)
        with torch.no_grad():
            _, backward = run_cut(both, dict(model.named_parameters()), x, [tangent], **{sizes[0][0]: number})
        expected = torch.autograd.grad(model(x).sum(), [*model.parameters()])
        torch.testing.assert_close([backward.gradients[name] for name, _ in model.named_parameters()], [*expected])


@pytest.mark.slow
def test_memory_that_forward_keeps_is_never_reused() -> None:
    """Backward may run again, with ``retain_graph=True``."""
    both = cut_module(nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)), torch.randn(4, 4), 2)
    begin = {argument.name for argument in both.backward.arguments if argument.kind is ArgumentKind.SAVED}
    for program in (both.forward, both.backward):
        passes = [
            ReserveMemory(min_bytes=0) if one.name == "reserve-memory" else one
            for one in passes_of(program, reuses_arguments=True, reserves_memory=True)
        ]
        assert program is both.forward or any(isinstance(one, ReuseArguments) for one in passes)
        done = run_passes(program, passes)
        verify(done)
        for region in done.regions.values():
            written = {
                str(node.args[0].target)
                for node in region.graph_module.graph.nodes
                if node.op == "call_function" and "_into" in target_name(node.target)
            }
            assert written.isdisjoint(begin)


def test_the_weight_of_a_worker_is_in_gradients_of_parameters_alone() -> None:
    """An argument is of one worker, and so is its gradient: that of the worker's own loss."""

    model, x, tangents = (
        module_of(lambda self, x: self.layer(x.sum(1, keepdim=True)), layer=nn.Linear(1, 3)).double(),
        rows(),
        [torch.ones(ROWS, 3, dtype=torch.float64)],
    )
    both = cut_module(model, x, 1, differentiated=[0], workers=World(2).worker(1))
    for program in (both.forward, both.backward):
        verify(lowered(program, over_workers=True))
    variables, weight = dict(model.named_parameters()), torch.tensor(0.25, dtype=torch.float64)
    with torch.no_grad():
        _, backward = run_cut(both, variables, x, tangents, loss_weight=weight)
        torch.testing.assert_close(
            backward.outputs["gradient of x"], (tangents[0] @ model.layer.weight).expand(ROWS, 4)
        )
        torch.testing.assert_close(backward.gradients["layer.weight"], 0.25 * tangents[0].T @ x.sum(1, keepdim=True))


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"buckets": EqualPacks(3)}, {"compression": "bfloat16"}], ids=str)
def test_a_worker_has_both_programs(options: dict[str, Any]) -> None:
    both = cut_module(Noisy(), torch.randn(5, 4), 2, differentiated=[0], workers=World(2, 2).worker(1))
    for program in (both.forward, both.backward):
        done = lowered(program, over_workers=True, **options)
        verify(done)
        exchanges = [node for graph in done.graphs() for node in calls_to(graph, *ops.EXCHANGES)]
        assert bool(exchanges) is (program is both.backward)


@pytest.mark.slow
def test_over_workers_forward_and_backward_meet_other_replicas() -> None:
    both = cut_module(nn.SyncBatchNorm(4), torch.randn(4, 4), 2, differentiated=[0], workers=World(2, 2).worker(0))
    for program in (both.forward, both.backward):
        done = lowered(program, over_workers=True)
        verify(done)
        assert len(worker_meetings(done)) == 2 and str(mirrorc.parse(done.to_text(complete=True))) == str(done)
