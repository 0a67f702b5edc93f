"""What memory tensors have, what operators run, and what Inductor's code allocates."""

import ast

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from mirrorc import torch_internals as internals

aten = torch.ops.aten


def test_tensors_that_share_memory_have_one_storage_key() -> None:
    with FakeTensorMode():
        fake = torch.empty(4, 3)
        assert internals.storage_key(fake) == internals.storage_key(fake.t()) != internals.storage_key(fake.clone())
    real = torch.empty(4, 3)
    assert internals.storage_key(real) == internals.storage_key(real[1:]) != internals.storage_key(torch.empty(4, 3))


def test_watched_operators_are_told_with_arguments_and_results() -> None:
    seen = []
    x = torch.ones(3)
    with internals.watched_operators(lambda operator, args, result: seen.append((operator, args, result))):
        y = x + 1
        torch.mul(y, 2, out=x)
    assert [operator for operator, _, _ in seen] == [aten.add.Tensor, aten.mul.out]
    assert seen[0][1] == (x, 1) and seen[0][2] is y and seen[1][2] is x
    x + 1
    assert len(seen) == 2


def test_peak_allocation_counts_what_lives_at_once_and_is_not_given() -> None:
    given = torch.ones(1000)

    def action() -> None:
        first = given + 1
        view = first.view(10, 100)
        del first
        second = view * 2  # two at once: the view holds the first
        del view, second
        given.add_(given.exp())

    assert internals.peak_allocation(action, [given]) == 2 * 4000
    assert internals.peak_allocation(lambda: given.add_(1), [given]) == 0


@pytest.mark.slow
def test_inductors_wrapper_can_be_run_on_fake_tensors() -> None:
    def region(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (torch.mm(x.exp().sin(), y),)

    graph_module = make_fx(region, tracing_mode="fake")(torch.empty(4, 8), torch.empty(8, 5))
    mode = next(iter(graph_module.graph.nodes)).meta["val"].fake_mode
    args = [node.meta["val"] for node in graph_module.graph.nodes if node.op == "placeholder"]
    compiled = internals.compile_with_inductor(graph_module, args, 1)
    code, namespace = internals.inductor_wrapper(compiled)
    assert code.name == "call"
    exec(compile(ast.Module([code], []), "<wrapper>", "exec"), namespace)
    given = list(args)
    with mode:
        (result,) = namespace["call"](None, given)
    assert result.shape == (4, 5) and result.fake_mode is mode and not given


@pytest.mark.parametrize("source", [None, "", "x = 1"])
def test_code_without_a_wrapper_in_python_is_refused(source: str | None) -> None:
    class Compiled:
        source_code = source

    with pytest.raises(ValueError, match="0 functions of the name 'call'"):
        internals.inductor_wrapper(Compiled())


def test_the_users_of_memory_are_counted() -> None:
    tensor = torch.zeros(3)
    assert internals.num_users(tensor.untyped_storage()) == 1
    view = tensor[1:]
    held = [tensor.detach(), tensor.numpy()]
    assert internals.num_users(tensor.untyped_storage()) == 4
    del view, held
    storage = tensor.untyped_storage()
    assert internals.num_users(storage) == 1
    del tensor
    assert internals.num_users(storage) == 0
