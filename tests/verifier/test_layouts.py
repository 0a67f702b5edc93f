"""What the dataflow rule says of programs that lay values out otherwise, or write an operator as others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from memory_order import first_in_memory
from tiny_programs import captured_model, targets
from torch import fx, nn

from mirrorc.analysis.graph.layouts import may_read_memory_in_order, reads_strides
from mirrorc.errors import VerifyError
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program
from mirrorc.passes import DecomposeGelu
from mirrorc.verifier.verifier import verify

aten = torch.ops.aten
LAST, CONTIGUOUS = torch.channels_last, torch.contiguous_format


class ReadsMemory(nn.Module):
    """An image that one operator takes by its indices, and others by where its elements lie; and a GELU by tanh."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.head = nn.Parameter(torch.ones(2, 3, 3)), nn.Linear(18, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        image = torch.exp(x).view(-1, 2, 3, 3)
        flat = (image * self.weight).reshape(-1, 18)
        hidden = nn.functional.gelu(self.head(flat), approximate="tanh")
        with torch.no_grad():
            noise = torch.as_strided(image, (x.size(0), 3), (18, 1)) + first_in_memory(image, 3)
        return hidden * noise


def program() -> Program:
    return captured_model(ReadsMemory(), 1, rows=2, columns=18)


def changed(before: Program, change: Callable[[fx.Graph], None]) -> Program:
    graph = copied(before.shard_graphs[0])
    change(graph)
    graph.lint()
    return before.evolve(shard_graphs=(graph,))


def put(user: fx.Node, *memory_formats: torch.memory_format, target: Any = aten.clone.default, **options: Any) -> None:
    given = user.args[0]
    assert isinstance(given, fx.Node)
    copy = given
    for memory_format in memory_formats:
        with user.graph.inserting_before(user):
            made = user.graph.call_function(target, (copy,), {"memory_format": memory_format, **options})
        with given.meta["val"].fake_mode:
            made.meta["val"] = target(copy.meta["val"], memory_format=memory_format, **options)
        copy = made
    user.args = (copy, *user.args[1:])


def assert_refused(before: Program, after: Program) -> None:
    with pytest.raises(VerifyError, match="the rule dataflow_is_preserved on passes"):
        verify(after, before=before)


@pytest.mark.slow
@pytest.mark.parametrize("target", [aten.as_strided.default, first_in_memory], ids=["strides", "memory"])
def test_what_reads_memory_needs_values_as_they_lay(target: Any) -> None:
    before = program()
    for formats in ((CONTIGUOUS,), (LAST, CONTIGUOUS)):
        verify(changed(before, lambda graph, formats=formats: put(targets(graph, target)[0], *formats)), before=before)  # type: ignore[misc]
    assert_refused(before, changed(before, lambda graph: put(targets(graph, target)[0], LAST)))


@pytest.mark.slow
@pytest.mark.parametrize("target", [aten.clone.default, aten.contiguous.default, aten._to_copy.default], ids=str)
def test_what_takes_elements_by_their_indices_may_have_them_in_any_format(target: Any) -> None:
    before = program()

    def image(graph: fx.Graph) -> fx.Node:
        return next(node for node in targets(graph, aten.mul.Tensor) if node.args[0].meta["val"].dim() == 4)

    def restored(graph: fx.Graph) -> None:
        put(image(graph), LAST, CONTIGUOUS, target=target)

    verify(changed(before, restored), before=before)


def test_a_copy_that_casts_is_not_looked_through() -> None:
    before = program()

    def cast(graph: fx.Graph) -> None:
        node = next(node for node in targets(graph, aten.mul.Tensor) if node.args[0].meta["val"].dim() == 4)
        put(node, CONTIGUOUS, target=aten._to_copy.default, dtype=torch.bfloat16)
        put(node, CONTIGUOUS, target=aten._to_copy.default, dtype=torch.float32)

    assert_refused(before, changed(before, cast))


def test_operators_that_depend_on_memory_are_known() -> None:
    for target in (aten.as_strided.default, aten._reshape_alias.default, aten.view.dtype):
        assert reads_strides(target), target
    for target in (aten.view.default, aten.reshape.default, aten.permute.default, aten.clone.default):
        assert not reads_strides(target) and not may_read_memory_in_order(target), target
    assert may_read_memory_in_order(first_in_memory)


@pytest.mark.slow
def test_gelu_without_tanh_is_accepted_and_any_other_product_refused() -> None:
    before = program()
    after = DecomposeGelu().run(before)
    assert targets(after.shard_graphs[0], aten.sigmoid.default)
    verify(after, before=before)
    verify(before, before=after)

    def another_constant(graph: fx.Graph) -> None:
        node = next(node for node in targets(graph, aten.mul.Tensor) if 0.044715 in node.args)
        node.args = (node.args[0], 0.05)

    def another_operand(graph: fx.Graph) -> None:
        sigmoid = targets(graph, aten.sigmoid.default)[0]
        next(iter(sigmoid.users)).args = (sigmoid, sigmoid)

    def without_the_sigmoid(graph: fx.Graph) -> None:
        sigmoid = targets(graph, aten.sigmoid.default)[0]
        sigmoid.target = aten.tanh.default

    for change in (another_constant, another_operand, without_the_sigmoid):
        assert_refused(before, changed(after, change))


@pytest.mark.slow
def test_gelu_by_the_error_function_is_not_the_one_by_tanh() -> None:
    before = program()

    def exact(graph: fx.Graph) -> None:
        for node in targets(graph, aten.gelu.default, aten.gelu_backward.default):
            node.kwargs = {"approximate": "none"}

    assert_refused(before, changed(before, exact))
