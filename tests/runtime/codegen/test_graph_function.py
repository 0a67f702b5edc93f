import gc
import operator
import weakref
from typing import Any

import pytest
import torch
from torch import fx

from mirrorc.runtime.codegen.graph_function import Constant, TwoPartCall, failing_nodes, generate
from mirrorc.runtime.profiling.recorder import Clock


class Value:
    def __init__(self, label: str) -> None:
        self.label = label


def call_all(node: fx.Node) -> Any:
    return node.target


def test_values_are_freed_at_their_last_use() -> None:
    watched: dict[str, weakref.ref[Value]] = {}
    alive: list[set[str]] = []

    def make(label: str, *_: object) -> Value:
        alive.append({name for name, ref in watched.items() if ref() is not None})
        value = Value(label)
        watched[label] = weakref.ref(value)
        return value

    graph = fx.Graph()
    x = graph.placeholder("x")
    a = graph.call_function(make, ("a", x))
    b = graph.call_function(make, ("b", a))
    c = graph.call_function(make, ("c", b))
    graph.call_function(make, ("unused",))
    d = graph.call_function(make, ("d", c, b))
    graph.output(d)
    given = Value("x")
    watched["x"] = weakref.ref(given)
    arguments: list[Any] = [given]
    del given
    gc.disable()
    try:
        result = generate("test", graph, call_all).call(arguments)
    finally:
        gc.enable()
    assert result.label == "d" and arguments == []
    assert alive == [{"x"}, {"a"}, {"b"}, {"b", "c"}, {"b", "c"}]


def test_results_are_shown_in_every_kind_of_container() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(operator.add, (x, 1.5))
    pair = graph.call_function(torch.cat, ([y, x],), {"dim": 0})
    graph.output((y, [x, None], pair))
    one = torch.ones(2)
    y_found, rest, pair_found = generate("test", graph, call_all).call([one])
    assert torch.equal(y_found, one + 1.5) and rest[0] is one and rest[1] is None
    assert torch.equal(pair_found, torch.tensor([2.5, 2.5, 1.0, 1.0]))


def test_constants_are_bound_once_and_never_freed() -> None:
    def read() -> None:
        raise AssertionError("a constant is not called")

    graph, value = fx.Graph(), torch.ones(2)
    constant = graph.call_function(read)
    doubled = graph.call_function(torch.add, (constant, constant))
    graph.output(doubled)
    function = generate("test", graph, lambda node: Constant(value) if node.target is read else node.target)
    for _ in range(2):
        assert torch.equal(function.call([]), value * 2)


def boxed_graph(body: Any) -> fx.Graph:
    graph = fx.Graph()
    x, y = graph.placeholder("x"), graph.placeholder("y")
    call = graph.create_node("call_function", body, (x, y), {})
    first, second = (graph.call_function(operator.getitem, (call, i)) for i in range(2))
    graph.output(graph.call_function(operator.sub, (second, first)))
    return graph


def test_boxed_calls_own_their_arguments() -> None:
    """The caller keeps no reference, so that a region can free an argument in its midst."""
    found: list[bool] = []

    def body(box: list[Any]) -> list[torch.Tensor]:
        x, y = box
        box.clear()
        reference = weakref.ref(x)
        total = x + y
        del x
        found.append(reference() is None)
        return [total, total * 3]

    function = generate("test", boxed_graph(body), call_all, boxed=lambda node: node.target is body)
    result = function.call([torch.ones(2), torch.ones(2)])
    assert torch.equal(result, torch.full((2,), 4.0)) and found == [True]


def test_a_boxed_call_whose_result_nobody_uses() -> None:
    boxes: list[list[Any]] = []
    graph = fx.Graph()
    x = graph.placeholder("x")
    graph.call_function(boxes.append, (x,))
    graph.output(())
    assert generate("test", graph, call_all, boxed=lambda node: node.op == "call_function").call([5]) == ()
    assert boxes == [[5]]


def fail(*_: object) -> None:
    raise ArithmeticError("no")


def failing_graph() -> tuple[fx.Graph, fx.Node]:
    graph = fx.Graph()
    x = graph.placeholder("x")
    y = graph.call_function(operator.neg, (x,))
    bad = graph.call_function(fail, (y,))
    graph.output(graph.call_function(operator.neg, (bad,)))
    return graph, bad


def test_the_failing_node_is_found() -> None:
    graph, bad = failing_graph()
    function = generate("test", graph, call_all)
    with pytest.raises(ArithmeticError) as caught:
        function.call([1])
    assert list(failing_nodes(caught.value.__traceback__)) == [bad]


def test_failing_nodes_are_found_through_nested_functions_outermost_first() -> None:
    inner_graph, bad = failing_graph()
    inner = generate("inner", inner_graph, call_all)
    graph = fx.Graph()
    x = graph.placeholder("x")
    call = graph.call_function(fail, (x,))
    part = graph.call_function(operator.getitem, (call, 0))
    graph.output(part)
    outer = generate("outer", graph, lambda node: inner.call, boxed=lambda node: node is call)
    with pytest.raises(ArithmeticError) as caught:
        outer.call([1])
    assert list(failing_nodes(caught.value.__traceback__)) == [call, bad]


def test_an_exception_from_elsewhere_has_no_failing_node() -> None:
    with pytest.raises(ZeroDivisionError) as caught:
        operator.truediv(1, 0)
    assert list(failing_nodes(caught.value.__traceback__)) == []
    assert list(failing_nodes(None)) == []


def test_a_meeting_that_gives_nothing_is_timed() -> None:
    graph = fx.Graph()
    x = graph.placeholder("x")
    met = graph.call_function(print, (x,))
    y = graph.call_function(operator.neg, (x,))
    graph.output(y)

    def bind(node: fx.Node) -> Any:
        return TwoPartCall(lambda _: None, lambda: None) if node is met else node.target

    function = generate("test", graph, bind, clock=Clock())
    assert function.call([2]) == -2
    assert function.marked == [met, y]


def test_functions_do_not_outlive_their_users() -> None:
    function = generate("test", failing_graph()[0], call_all)
    reference = weakref.ref(function)
    del function
    gc.collect()
    assert reference() is None


def test_two_functions_of_one_title_are_told_apart() -> None:
    one, other = (generate("same", failing_graph()[0], call_all) for _ in range(2))
    assert one.filename != other.filename and "same" in one.filename
