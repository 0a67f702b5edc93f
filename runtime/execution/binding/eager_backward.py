"""Runs a replica's function while an eager backward produces its gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.gradients.eager_gradients import TakenGradients, places_of_arguments, taken_gradients
from mirrorc.custom_ops.eager_calls import backward_of
from mirrorc.ir import ops
from mirrorc.ir.nodes import region_calls, region_of
from mirrorc.ir.program import Program
from mirrorc.runtime.codegen.graph_function import WAITS, Asking, GraphFunction


class Asked:
    """A request for gradients of an eager backward. The region that reads them is called when they are there.

    Args:
        are_last: wait for the end of the backward, so that its exceptions are raised before the region's call.
        token, *tangents: the values of ``taken.sources``.
    """

    def __init__(self, taken: TakenGradients, are_last: bool, token: torch.Tensor, *tangents: torch.Tensor) -> None:
        of_loss, of_outputs = (tangents[0], tangents[1:]) if taken.tangent is not None else (None, tangents)
        self.backward = backward_of(taken.call, token, of_loss, of_outputs)
        self._are_last, self._missing = are_last, list(reversed(taken.places))

    def are_there(self) -> bool:
        backward = self.backward
        if backward.has_ended or self._are_last:
            return backward.has_ended
        while self._missing and backward.has(self._missing[-1]):
            self._missing.pop()
        return not self._missing


def asking(program: Program, node: fx.Node, call: Callable[..., Any]) -> Any:
    graph = program.regions[region_of(node)].graph_module.graph
    asks = []
    for taken in taken_gradients(graph):
        places = places_of_arguments(graph, taken.sources)
        token = node.args[places[0]]
        assert isinstance(token, fx.Node)
        are_last = not any(node < user for user in token.users)
        asks.append((functools.partial(Asked, taken, are_last), places))
    return Asking(call, asks) if asks else call


def waits_between(program: Program, graph: fx.Graph) -> set[fx.Node]:
    """The nodes that may wait for other replicas while an eager backward runs."""
    takes = [
        node for node in region_calls(graph) if taken_gradients(program.regions[region_of(node)].graph_module.graph)
    ]
    return {node for node in graph.nodes if node.target in ops.WAITING and node < takes[-1]} if takes else set()


def driven(function: GraphFunction) -> Callable[[list[Any]], Any]:
    """Runs a function that requests gradients, and the eager backwards that compute them.

    Each backward starts at its first request, in the same thread. When a request is met, the function resumes within
    the backward, until the next unmet request. While other replicas wait for a backward, the function does not wait for
    them.
    """
    call: Any = function.call
    if function.pauses:
        return functools.partial(_steps, call)  # passes on what else the function yields
    return functools.partial(_uninterrupted, call)


def _uninterrupted(call: Callable[[list[Any]], Generator[Any, None, Any]], values: list[Any]) -> Any:
    steps = _steps(call, values)
    try:
        next(steps)
    except StopIteration as end:
        return end.value
    raise AssertionError("a function that does not pause has paused")


def _steps(call: Callable[[list[Any]], Generator[Any, None, Any]], values: list[Any]) -> Generator[Any, None, Any]:
    driven = _Driven(call(values))
    try:
        driven.go_on()
        while not driven.has_ended:
            request = driven.request
            if isinstance(request, Asked) and not request.are_there():
                driven.run_backward(request)
            elif not isinstance(request, Asked) and request is not WAITS:
                yield request
                driven.go_on()
            else:
                driven.go_on()
        return driven.result
    finally:
        driven.function.close()


class _Driven:
    def __init__(self, function: Generator[Any, None, Any]) -> None:
        self.function = function
        self.request: Any = None
        self.result: Any = None
        self.has_ended = False
        self._failure: BaseException | None = None

    def go_on(self) -> None:
        self.request = None  # with the run of its backward
        try:
            self.request = next(self.function)
        except StopIteration as end:
            self.request, self.result, self.has_ended = None, end.value, True

    def run_backward(self, asked: Asked) -> None:
        """Resumes the function while the backward runs. The request raises the backward's exceptions."""
        try:
            asked.backward.run(functools.partial(self._go_on_within, asked))
        except BaseException as error:
            if self._failure is not None:
                raise self._failure from None
            self.function.throw(error)
            raise

    def _go_on_within(self, of: Asked) -> None:
        def may_go_on() -> bool:
            request = self.request
            return request.are_there() if isinstance(request, Asked) else request is WAITS and of.backward.may_wait

        while may_go_on():
            try:
                self.go_on()
            except BaseException as error:
                self._failure = error
                raise
