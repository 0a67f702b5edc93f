"""A replica's function goes on while a backward of plain PyTorch runs, as far as its gradients are there."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from mirrorc.analysis.gradients.eager_gradients import TakenGradients
from mirrorc.custom_ops.eager_calls import register_call
from mirrorc.runtime.codegen.graph_function import WAITS, Asking, GraphFunction, failing_nodes, generate
from mirrorc.runtime.execution.binding.eager_backward import Asked, driven

aten = torch.ops.aten


class Backward:
    def __init__(self, order: list[int], events: list[str], may_wait: bool = True, fails_after: int = 100) -> None:
        self.order, self.events, self.may_wait, self.fails_after = order, events, may_wait, fails_after
        self.has_ended, self.there = False, set[int]()

    def has(self, place: int) -> bool:
        return self.has_ended or place in self.there

    def run(self, on_gradient: Callable[[], object] = lambda: None) -> None:
        self.events.append("begins")
        for number, place in enumerate(self.order):
            if number == self.fails_after:
                raise ValueError("no gradient of this")
            self.events.append(f"makes {place}")
            self.there.add(place)
            on_gradient()
        self.events.append("ends")
        self.has_ended = True


class Call:
    def __init__(self, backward: Backward) -> None:
        self._backward = backward

    def backward(self, token: object, tangent: object, tangents: object) -> Backward:
        return self._backward


def function_of(
    call: Call,
    events: list[str],
    takes: list[tuple[int, ...]],
    waits_behind: int = -1,
    raises_at: int = -1,
) -> GraphFunction:
    graph = fx.Graph()
    given = [graph.placeholder(name) for name in ("token", "tangent")]
    nodes: dict[fx.Node, tuple[int, ...]] = {}
    waiting = set()
    for number, places in enumerate(takes):
        nodes[graph.call_function(aten.add.Tensor, tuple(given))] = places
        if number == waits_behind:
            waiting.add(graph.call_function(aten.neg.default, (given[1],)))
    over = graph.call_function(aten.sin.default, (given[1],))
    graph.output(given[1])
    number = register_call(call)  # type: ignore[arg-type]

    def bind(node: fx.Node) -> Any:
        if node is over:
            return lambda _: events.append("goes on")
        if node not in nodes:
            return lambda _: events.append("waits")
        places = nodes[node]

        def take(token: object, tangent: object) -> None:
            events.append(f"takes {', '.join(map(str, places))}")
            if raises_at in places:
                raise RuntimeError("cannot launch")

        taken = TakenGradients(number, *given, (), places, ())
        is_last = node is list(nodes)[-1]
        return Asking(take, [(lambda token, tangent: Asked(taken, is_last, token, tangent), (0, 1))])

    return generate("cpu:0", graph, bind, waits=waiting.__contains__)


def arguments() -> list[Any]:
    return [torch.tensor(0), torch.tensor(1.0)]


def test_gradients_are_taken_in_the_order_of_the_program_while_backward_goes_on() -> None:
    events: list[str] = []
    call = Call(Backward([3, 1, 2, 0], events))
    function = function_of(call, events, [(1, 3), (2,), (0,)])
    assert function.asks and not function.pauses
    assert driven(function)(arguments()).item() == 1.0
    order = [
        "begins",
        "makes 3",
        "makes 1",
        "takes 1, 3",
        "makes 2",
        "takes 2",
        "makes 0",
        "ends",
        "takes 0",
        "goes on",
    ]
    assert events == order


def test_one_that_comes_late_holds_up_those_behind_it_and_no_other() -> None:
    events: list[str] = []
    call = Call(Backward([2, 1, 0], events))
    driven(function_of(call, events, [(1,), (2,), (0,)]))(arguments())
    assert events[:5] == ["begins", "makes 2", "makes 1", "takes 1", "takes 2"]


@pytest.mark.parametrize("may_wait", [True, False])
def test_the_function_waits_for_others_only_if_backward_holds_nothing(may_wait: bool) -> None:
    events: list[str] = []
    call = Call(Backward([2, 1, 0], events, may_wait=may_wait))
    driven(function_of(call, events, [(2,), (1,), (0,)], waits_behind=0))(arguments())
    assert events.index("takes 2") < events.index("makes 1")
    assert (events.index("waits") < events.index("ends")) is may_wait
    assert events.index("takes 1") > events.index("waits")


def test_what_backward_raises_is_raised_where_the_function_asks() -> None:
    events: list[str] = []
    call = Call(Backward([2, 1, 0], events, fails_after=1))
    function = function_of(call, events, [(2,), (1,), (0,)])
    with pytest.raises(ValueError, match="no gradient of this") as raised:
        driven(function)(arguments())
    assert events == ["begins", "makes 2", "takes 2"]
    (node,) = failing_nodes(raised.value.__traceback__)
    takes = dict.fromkeys(node for node in function.nodes if node is not None and node.target is aten.add.Tensor)
    assert node is list(takes)[1]


def test_what_the_function_raises_ends_backward() -> None:
    events: list[str] = []
    call = Call(Backward([2, 1, 0], events))
    function = function_of(call, events, [(2,), (1,), (0,)], raises_at=1)
    with pytest.raises(RuntimeError, match="cannot launch") as raised:
        driven(function)(arguments())
    assert events == ["begins", "makes 2", "takes 2", "makes 1", "takes 1"]
    assert len(list(failing_nodes(raised.value.__traceback__))) == 1


def test_waits_are_no_pauses() -> None:
    events: list[str] = []
    call = Call(Backward([0], events))
    function = function_of(call, events, [(0,)], waits_behind=0)
    found = next(function.call(arguments()))
    assert isinstance(found, Asked) and not found.are_there()
    found.backward.run()
    assert found.are_there()
    steps = function.call(arguments())
    assert isinstance(next(steps), Asked) and next(steps) is WAITS
