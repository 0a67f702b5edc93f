"""A function of ours is traced where the traced code calls a function of torch."""

import pytest
import torch
from torch import nn

from mirrorc import torch_internals as internals


class Calls(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.GRU(2, 3)

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return self.net(leaves[0])[0].sum()


def cube(inputs: torch.Tensor, state: torch.Tensor, *others: object) -> tuple[torch.Tensor, torch.Tensor]:
    return inputs**3, state


def double(x: torch.Tensor) -> torch.Tensor:
    return x + x


called: list[type] = []


def chosen(kind: type) -> object:
    called.append(kind)  # which a trace of it would not do
    return double if kind is torch.Tensor else 2.0


class Chooses(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return chosen(torch.Tensor)(x) * chosen(int)  # type: ignore[operator]


def test_called_while_traced_gives_constants_and_functions_to_enter() -> None:
    x = torch.ones(2)
    with internals.called_while_traced([chosen]):
        traced = internals.trace_full_graph(Chooses(), [x])
    assert torch.equal(traced(x), 4 * x)
    assert called == [torch.Tensor, int]


def test_a_method_of_torch_is_traced_instead_with_its_object() -> None:
    class Scaled(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.extra_repr() * x  # type: ignore[operator]

    with internals.traced_instead({nn.Module.extra_repr: lambda self: 3 if isinstance(self, Scaled) else 4}):
        traced = internals.trace_full_graph(Scaled(), [torch.ones(2)])
    assert "3 * " in traced.code


@pytest.mark.slow
def test_traced_instead_traces_another_function() -> None:
    module, x = Calls(), torch.ones(4, 2, 2)
    with internals.traced_instead({torch.gru: cube}):
        inside = internals.trace_full_graph(module, (x,))
    after = internals.trace_full_graph(module, (x,))
    targets = [{node.target for node in traced.graph.nodes} for traced in (inside, after)]
    assert [torch.gru in found for found in targets] == [False, True]
    assert torch.equal(inside(x), (x**3).sum())


@pytest.mark.slow
def test_calls_of_a_function_are_noted() -> None:
    with internals.noted_calls(torch.gru) as found:
        internals.trace_full_graph(Calls(), (torch.ones(4, 2, 2),))
    with internals.noted_calls(torch.lstm) as others:
        internals.trace_full_graph(Calls(), (torch.ones(4, 2, 2),))
    assert len(found) == 1 and not others


class Disguised:
    """Is taken for a list by ``isinstance``, in this file alone."""

    @property
    def __class__(self) -> type:  # type: ignore[override]
        return list if internals.traced_file() == __file__ else Disguised

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value

    @property
    def sum(self) -> torch.Tensor:
        return self.value.sum()


class Asks(nn.Module):
    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        made = Disguised(leaves[0])
        is_list = isinstance(made, list) and isinstance(made, (list, int))
        return made.sum * (3 if is_list else 1)


def test_traces_ask_an_object_for_its_class_and_have_attributes_of_its_own() -> None:
    with internals.asked_for_class(Disguised):
        inside = internals.trace_full_graph(Asks(), (torch.ones(2),))
    assert inside(torch.ones(2)) == 6
    assert internals.traced_file() == ""
