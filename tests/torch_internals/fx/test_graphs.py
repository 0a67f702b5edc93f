"""Making graphs, their modules and fake tensors."""

import functools

import pytest
import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mirrorc import torch_internals as internals
from mirrorc.torch_internals.fx import graphs

aten = torch.ops.aten


def test_a_lazy_graph_module_is_a_graph_module_that_runs() -> None:
    graph = fx.Graph()
    graph.output(graph.call_function(torch.neg, (graph.placeholder("x"),)))
    module = internals.lazy_graph_module({}, graph, "Negative")
    assert isinstance(module, fx.GraphModule)
    assert torch.equal(module(torch.ones(2)), -torch.ones(2)) and "neg" in module.code


def test_graph_modules_of_torchs_tracers_write_their_code_when_it_is_read() -> None:
    def negative(x: torch.Tensor) -> torch.Tensor:
        return -x

    with graphs.lazy_graph_modules():
        module = fx.symbolic_trace(negative)
    assert "_lazy_forward" in type(module).forward.__name__
    assert torch.equal(module(torch.ones(2)), -torch.ones(2)) and "_lazy_forward" not in type(module).forward.__name__
    assert "_lazy_forward" not in type(fx.symbolic_trace(negative)).forward.__name__


def test_a_function_is_traced_on_fake_tensors_with_decompositions() -> None:
    aten = torch.ops.aten
    with FakeTensorMode():
        values = [torch.empty(2, 3), torch.empty(3)]
    graph = internals.traced_on_fake_tensors(lambda x, y: torch.nn.functional.silu(x + y), values)
    assert [node.op for node in graph.nodes][:2] == ["placeholder", "placeholder"]
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [aten.add.Tensor, aten.silu.default]
    assert all(node.meta["val"].fake_mode is values[0].fake_mode for node in graph.nodes if node.op == "call_function")
    table = {aten.silu.default: lambda x: x * torch.sigmoid(x)}
    graph = internals.traced_on_fake_tensors(lambda x: torch.nn.functional.silu(x), values[:1], table)
    assert [node.target for node in graph.nodes if node.op == "call_function"] == [
        aten.sigmoid.default,
        aten.mul.Tensor,
    ]


def test_quiet_fake_tensors_log_nothing(caplog: pytest.LogCaptureFixture) -> None:
    def multiply() -> None:
        with FakeTensorMode(), pytest.raises(RuntimeError):
            torch.mm(torch.empty(2, 3), torch.empty(4, 5))

    def errors() -> list[str]:
        return [record.name for record in caplog.records if record.levelname == "ERROR"]

    with internals.quiet_fake_tensors():
        multiply()
    assert errors() == []
    multiply()
    assert errors() != []


def test_add_node_does_what_create_node_does() -> None:
    slow, fast = fx.Graph(), fx.Graph()
    slow_x, fast_x = slow.placeholder("x"), fast.placeholder("x")
    given = {"alpha": 2}
    made = slow.create_node("call_function", torch.add, (slow_x, slow_x), given, name="x")
    added = internals.add_node(fast, "call_function", torch.add, (fast_x, fast_x), given, "x")
    for graph, node in ((slow, made), (fast, added)):
        with graph.inserting_before(node):
            first = graph.create_node if graph is slow else functools.partial(internals.add_node, graph)
            source = next(iter(graph.nodes))
            first("call_function", torch.neg, (source,), {}, "y")
        graph.output(node)
        graph.lint()
    assert [str(n.format_node()) for n in fast.nodes] == [str(n.format_node()) for n in slow.nodes]
    assert len(fast.nodes) == len(slow.nodes) == 4
    assert set(fast_x.users) == set(list(fast.nodes)[1:3])
    assert fast.find_nodes(op="call_function", target=torch.add) == [added]
    assert fast.create_node("placeholder", "x").name == slow.create_node("placeholder", "x").name
