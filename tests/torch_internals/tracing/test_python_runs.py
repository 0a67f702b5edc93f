"""What surrounds a forward that runs in Python while it is traced: each private part of torch that this stands on is there."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import FakeTensorMode, KeptCaches, LeftTensors, RefusedRunError, export_run


def _may_be_read(tensor: torch.Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or internals.is_traced_tensor(tensor)


class Run(nn.Module):
    """A layer, and a function of it and what the layer gives, in a recorded run."""

    def __init__(self, deed: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        with torch.random.fork_rng():
            self.layer, self.deed = nn.Linear(3, 4), deed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modules = {id(module): name for name, module in self.named_modules()}
        with internals.recorded_run(
            modules, {}, lambda tensor: isinstance(tensor, nn.Parameter) or internals.is_traced_tensor(tensor)
        ):
            return self.deed(self, self.layer(x)).sum()


def graph_of(deed: Callable[[Any, torch.Tensor], torch.Tensor]) -> fx.Graph:
    with contextlib.ExitStack() as stack:
        return export_run(stack, Run(deed), [torch.ones(2, 3)], {}, trains=True)[0].graph_module.graph


def nodes_of(graph: fx.Graph, word: str) -> list[fx.Node]:
    return [node for node in graph.nodes if node.op == "call_function" and word in str(node.target)]


def test_operators_know_their_lines_and_modules() -> None:
    graph = graph_of(lambda run, h: h.tanh())
    (tanh,), (product, *_) = nodes_of(graph, "aten.tanh.default"), nodes_of(graph, "mm")
    assert __file__ in tanh.meta["stack_trace"] and "lambda run, h: h.tanh()" in tanh.meta["stack_trace"]
    assert list(product.meta["nn_module_stack"]) == ["L['self']", "L['self'].layer"]


@pytest.mark.parametrize("reenters", [False, True])
def test_checkpoints_mark_their_operators_and_run_once(reenters: bool) -> None:
    seen = []

    def part(h: torch.Tensor) -> torch.Tensor:
        seen.append(h)
        return h.sin()

    graph = graph_of(lambda run, h: checkpoint(part, h, use_reentrant=reenters).cos())
    (sine,), others = nodes_of(graph, "aten.sin.default")[:1], nodes_of(graph, "aten.cos.default")
    assert sine.meta["recompute"] is torch.utils.checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
    assert sine.meta["ac_graph_id"] is not None and "recompute" not in others[-1].meta
    runs = len(seen)
    graph_of(lambda run, h: part(h).cos())
    assert len(seen) == 2 * runs, "as often as a part that is in no checkpoint"


def test_a_checkpoint_with_a_policy_is_refused() -> None:
    context = functools.partial(
        torch.utils.checkpoint.create_selective_checkpoint_contexts, [torch.ops.aten.sin.default]
    )
    with pytest.raises(RefusedRunError, match="a checkpoint with a policy"):
        graph_of(lambda run, h: checkpoint(torch.sin, h, use_reentrant=False, context_fn=context))


def test_checks_of_distributions_are_asserts() -> None:
    graph = graph_of(lambda run, h: torch.distributions.Normal(h, h.exp(), validate_args=True).log_prob(h))
    assert nodes_of(graph, "assert") != []


@pytest.mark.parametrize(
    "seeds", [lambda: torch.manual_seed(0), torch.seed, torch.initial_seed, lambda: torch.set_rng_state(torch.ones(1))]
)
def test_the_seed_of_the_process_is_neither_set_nor_read(seeds: Callable[[], Any]) -> None:
    before = torch.random.default_generator, torch.get_rng_state()
    with pytest.raises(RefusedRunError, match="seeds torch's generator"):
        graph_of(lambda run, h: (seeds(), h)[1])
    assert torch.random.default_generator is before[0] and torch.equal(torch.get_rng_state(), before[1])


def test_models_are_told_that_they_are_compiled() -> None:
    graph = graph_of(lambda run, h: h.sin() if torch.compiler.is_compiling() else h.cos())
    assert nodes_of(graph, "aten.sin.default") and not torch.compiler.is_compiling()


def test_a_tensor_may_be_asked_for_its_layout() -> None:
    assert nodes_of(graph_of(lambda run, h: h.sin() if h.layout is torch.strided else h), "aten.sin.default")


def test_gradients_that_tensors_keep_are_not_read() -> None:
    with pytest.raises(RefusedRunError, match="reads the gradient of a tensor"):
        graph_of(lambda run, h: h if run.layer.weight.grad is None else 2 * h)


def test_other_tensors_are_refused() -> None:
    other = torch.ones(4)
    with pytest.raises(RefusedRunError, match=r"reads a tensor of shape \[4\]"):
        graph_of(lambda run, h: h * other)


@pytest.mark.parametrize(
    "asks", [torch.Tensor.item, torch.Tensor.nonzero, bool, float, lambda tensor: tensor[tensor > 0]]
)
def test_questions_for_values_are_known(asks: Callable[[torch.Tensor], Any]) -> None:
    with FakeTensorMode() as mode, pytest.raises(Exception) as caught:
        asks(mode.from_tensor(torch.ones(())) if asks is not torch.Tensor.nonzero else mode.from_tensor(torch.ones(2)))
    assert internals.is_data_dependent(caught.value) and not internals.is_data_dependent(ValueError("other"))


def test_tensors_that_are_kept_are_seen() -> None:
    kept: list[torch.Tensor] = []
    left = LeftTensors()
    graph_of(lambda run, h: h.tanh())
    assert not left.are_there()
    graph_of(lambda run, h: (kept.append(h), h)[1])
    assert (
        left.are_there()
        and all(map(internals.is_traced_tensor, kept))
        and not internals.is_traced_tensor(torch.ones(1))
    )


def test_a_tensor_that_is_kept_is_seen_where_others_have_gone_meanwhile() -> None:
    kept: list[torch.Tensor] = []
    others: list[torch.Tensor] = []
    graph_of(lambda run, h: (others.append(h), others.append(h.sin()), h)[2])
    left = LeftTensors()
    others.clear()
    graph_of(lambda run, h: (kept.append(h), h)[1])
    assert left.are_there()


def test_caches_that_have_grown_are_emptied() -> None:
    @functools.cache
    def cached(number: int) -> int:
        return number

    @functools.cache
    def other(number: int) -> int:
        return number

    cached(1), other(1)
    kept = KeptCaches()
    cached(2), other(1)
    kept.empty()
    assert cached.cache_info().currsize == 0 and other.cache_info().currsize == 1


def test_what_a_trace_has_met_becomes_a_constant_of_its_graph() -> None:
    with contextlib.ExitStack() as stack:
        joint = export_run(stack, Run(lambda run, h: h.sin()), [torch.ones(2, 3)], {}, trains=True)[0]
    (weight,) = [node for node, name in joint.variable_of.items() if name == "layer.weight"]
    held, num_users = torch.ones(4, 3), len(weight.users)
    joint.variable_of[weight] = "met"
    internals.take_constants(joint, {"met": held})
    (constant,) = [node for node in joint.graph_module.graph.nodes if node.op == "get_attr"]
    assert joint.constant(constant) is held and len(constant.users) == num_users > 0
    assert weight not in joint.variable_of and "met" not in joint.variable_of.values()


def test_what_torch_makes_once_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor", None)
    internals.make_what_torch_makes_once()
    made = tqdm.monitor
    assert made is not None
    internals.make_what_torch_makes_once()
    assert tqdm.monitor is made
