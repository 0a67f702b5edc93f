"""What torch traces of a module, and what it says where it cannot."""

import json
import logging
import random
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import fx, nn
from traced_graphs import Small

from mirrorc import passes, runtime
from mirrorc import torch_internals as internals
from mirrorc.torch_internals.tracing import tracing

CHATTY = logging.getLogger("chatty")
NAMES = {"of": "first"}


def test_trace_full_graph_gives_one_graph_with_the_results_example() -> None:
    traced = internals.trace_full_graph(Small(), (torch.ones(2, 3), torch.ones(1)))
    assert isinstance(traced, fx.GraphModule)
    (loss,) = next(n for n in traced.graph.nodes if n.op == "output").all_input_nodes
    assert loss.meta["example_value"].shape == ()


def test_leaf_of_placeholder_tells_arguments_from_variables() -> None:
    class Call(Small):
        def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
            return super().forward(*leaves) * leaves[1]

    traced = internals.trace_full_graph(Call(), (torch.ones(2, 3), torch.ones(1)))
    placeholders = [node for node in traced.graph.nodes if node.op == "placeholder"]
    leaves = {internals.leaf_of_placeholder(node): node.meta["example_value"].shape for node in placeholders}
    assert leaves.pop(0) == (2, 3) and leaves.pop(1) == (1,) and set(leaves) == {None}


def test_trace_full_graph_fixes_shapes() -> None:
    module = Small()
    for rows in (2, 5):
        traced = internals.trace_full_graph(module, (torch.ones(rows, 3), torch.ones(1)))
        assert not any(isinstance(n.meta.get("example_value"), torch.SymInt) for n in traced.graph.nodes)


def test_trace_full_graph_leaves_logging_out() -> None:
    class Chatty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            CHATTY.warning("once %s", "more")
            return (x * self.weight).sum()

    assert internals.trace_full_graph(Chatty(), (torch.ones(3),)) is not None


def test_logging_methods_are_those_of_a_logger() -> None:
    assert {logging.Logger.info, logging.Logger.warning, logging.Logger.isEnabledFor} <= tracing._logging_methods()


class Branches(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.sum() > 0:
            return x.sum()
        return x.mean()


def test_user_frames_name_the_line_that_cannot_be_traced() -> None:
    with pytest.raises(Exception) as caught:
        internals.trace_full_graph(Branches(), (torch.ones(3),))
    frame = internals.user_frames(caught.value)[-1]
    assert Path(frame.filename) == Path(__file__) and frame.line == "if x.sum() > 0:"


def test_the_failing_node_is_that_of_the_module_which_cannot_take_what_it_is_given() -> None:
    with pytest.raises(Exception) as caught:
        internals.trace_full_graph(nn.Sequential(nn.Linear(2, 3), nn.Linear(2, 3)), [torch.ones(1, 2)])
    node = internals.failing_node(caught.value)
    assert node is not None and [kind for _, kind in node.meta["nn_module_stack"].values()] == [nn.Linear]
    assert internals.failing_node(ValueError("alone")) is None


def test_user_frames_looks_behind_a_wrapped_error() -> None:
    inner = RuntimeError("inner")
    inner.real_stack = [traceback.FrameSummary("/home/me/net.py", 3, "forward", line="y")]  # type: ignore[attr-defined]
    outer = ValueError("outer")
    outer.__cause__ = inner
    inner.real_stack.append(traceback.FrameSummary(nn.__file__, 4, "inside"))  # type: ignore[attr-defined]
    assert [frame.lineno for frame in internals.user_frames(outer)] == [3]
    assert [frame.lineno for frame in internals.traced_frames(outer)] == [3, 4]
    assert internals.user_frames(ValueError("alone")) == []


def test_users_files_are_those_of_nobody_else() -> None:
    assert internals.is_users_file(__file__) and internals.is_users_file("/home/me/net.py")
    assert internals.is_users_file(pytest.__file__)  # an installed package is a user's, too
    assert not any(map(internals.is_users_file, (nn.__file__, json.__file__, internals.__file__, "<eval>")))
    assert not any(map(internals.is_users_file, (passes.__file__, runtime.__file__)))


def test_draws_from_pythons_random_are_observed_and_taken_back() -> None:
    class Draws(Small):
        def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
            return super().forward(*leaves) * random.uniform(0.0, 1.0)

    for kind, drawn in ((Draws, 1), (Small, 0)):
        state = random.getstate()
        traced = internals.trace_full_graph(kind(), (torch.ones(2, 3), torch.ones(1)))
        draws = internals.python_effects_of(traced).draws
        assert len(draws) == drawn and all("random.uniform" in (stack[-1].line or "") for stack in draws)
        assert random.getstate() == state


def test_draws_are_inputs_that_are_drawn_again() -> None:
    class Draws(Small):
        def __init__(self) -> None:
            super().__init__()
            self.drawn: list[float] = []

        def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
            scale = np.random.rand() if random.random() < 0.5 and internals.torch_random() < 2 else random.randint(1, 3)
            return super().forward(*leaves) * scale

    module = Draws()
    random.seed(1)  # draws 0.13
    np.random.seed(1)
    state = random.getstate()
    guards = internals.guards_of(
        internals.trace_full_graph(module, (torch.ones(2, 3), torch.ones(1)), takes_draws=True)
    )
    assert random.getstate() == state and guards.hold() and random.getstate() == state
    assert guards.numbers == (np.random.RandomState(1).rand(),)
    put_back = guards.begin_step()
    assert random.getstate() != state
    assert not guards.hold(), "the next number is 0.85, which leads another way"
    put_back()
    assert random.getstate() == state
    assert [name for name in ("L['self'].drawn[0]", "L['self'].plain[0]") if internals.is_drawn(name)] == [
        "L['self'].drawn[0]"
    ]


def test_an_interrupted_trace_leaves_no_state_of_torch_behind() -> None:
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        with pytest.raises(KeyboardInterrupt), internals.restored_tracing_state():
            for manager in (torch._guards.tracing(torch._guards.TracingContext(None)), torch.autograd.detect_anomaly()):
                manager.__enter__()  # and Ctrl-C ends its exit
            raise KeyboardInterrupt
        assert torch.is_anomaly_enabled() and not torch.is_anomaly_check_nan_enabled()
    assert torch._guards.TracingContext.try_get() is None
    internals.trace_full_graph(Small(), (torch.ones(2, 3), torch.ones(1)))


def test_values_that_are_only_returned_are_guarded_on_request(monkeypatch: pytest.MonkeyPatch) -> None:
    class Named(nn.Module):
        def forward(self, *leaves: torch.Tensor) -> tuple[torch.Tensor, str]:
            return leaves[0].sum(), NAMES["of"]

    for guards_results in (False, True):
        monkeypatch.setitem(NAMES, "of", "first")
        traced = internals.trace_full_graph(Named(), (torch.ones(2),), guards_results=guards_results)
        guards = internals.guards_of(traced)
        assert guards.hold()
        NAMES["of"] = "second"
        assert guards.hold() is not guards_results
