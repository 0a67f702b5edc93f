"""A function of ours is traced where the traced code calls a function of torch."""

from __future__ import annotations

from typing import Any

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


class Writes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("u", torch.zeros(2))

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        self.u = torch.mul(leaves[0], 3.0, out=self.u)
        return self.u.sum()


def test_what_is_given_for_a_result_is_the_result() -> None:
    module = Writes()
    with internals.returned_out_arguments():
        traced = internals.trace_full_graph(module, (torch.ones(2),))
    assert internals.python_effects_of(traced).writes == []
    assert traced(torch.ones(2)) == 6 and module.u.sum() == 6
    other = internals.trace_full_graph(Writes(), (torch.ones(2),))
    assert len(internals.python_effects_of(other).writes) == 1


class Says(nn.Module):
    def __init__(self, *, of_argument: bool) -> None:
        super().__init__()
        self.of_argument = of_argument

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        x = leaves[0] if self.of_argument else leaves[0] + 1
        x.requires_grad = True
        return x.sum() * (3 if x.requires_grad and (x * 2).requires_grad else 1)


def test_computed_values_become_leaves_and_arguments_do_not() -> None:
    with internals.made_leaves():
        traced = internals.trace_full_graph(Says(of_argument=False), (torch.ones(2),))
        with pytest.raises(Exception, match=r"(?i)requires_grad"):
            internals.trace_full_graph(Says(of_argument=True), (torch.ones(2),))
    assert traced(torch.ones(2)) == 12
    with pytest.raises(Exception, match=r"(?i)setattr\(\) on tensor\.requires_grad"):
        internals.trace_full_graph(Says(of_argument=False), (torch.ones(2),))


class Doubling(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class DoublingAlone(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.set_materialize_grads(False)
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        return gradients[0] * 2


class Doubled(nn.Module):
    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return Doubling.apply(leaves[0])[0].sum()


class DoubledAlone(nn.Module):
    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return DoublingAlone.apply(leaves[0]).sum()


def test_functions_that_take_gradients_as_they_are() -> None:
    x = torch.ones(2, requires_grad=True)
    with internals.checked_autograd_functions(), pytest.raises(Exception, match=r"ctx\.set_materialize_grads\(\)"):
        internals.trace_full_graph(Doubled(), (x,))
    with internals.checked_autograd_functions():
        with torch.no_grad():
            assert internals.trace_full_graph(Doubled(), (x,))(x) == 4
        assert internals.trace_full_graph(DoubledAlone(), (x,))(x) == 4  # a gradient that is there
    assert internals.trace_full_graph(Doubled(), (x,))(x) == 4  # if this fails, torch refuses them by itself
