"""Dynamo's symbols for sizes: how they are named, marked, compared without guards, bound and guarded."""

import contextlib
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import (
    JointGraph,
    SavedSizes,
    SizesGivenUp,
    SizesOfArguments,
    SizeSymbol,
    size_key,
    size_now,
)


class Traced(nn.Module):
    """Folds two dimensions into one; refuses more than 100 rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        (x,) = leaves
        if x.size(0) > 100:
            raise ValueError("too many")
        return self.layer(x.reshape(-1, 3)).sum()


@pytest.fixture
def joint() -> Iterator[JointGraph]:
    leaf = torch.zeros(4, 5, 3)
    internals.mark_symbolic(leaf, [0, 1])
    module = Traced()
    with contextlib.ExitStack() as stack:
        yield internals.export_graph(stack, internals.trace_full_graph(module, [leaf]), [leaf], {})


def values_of(joint: JointGraph) -> list[torch.Tensor]:
    found = (node.meta.get("val") for node in joint.graph_module.graph.nodes)
    return [value for value in found if isinstance(value, torch.Tensor)]


def test_symbols_are_named_by_number_and_kept_by_the_joint_graph(joint: JointGraph) -> None:
    (x,) = [value for value in values_of(joint) if value.dim() == 3 and value.dtype == torch.float32][:1]
    assert [internals.text_of_size(size) for size in x.shape] == ["s0", "s1", "3"]
    assert internals.has_symbols(x)
    assert internals.is_symbolic(x.shape[0])
    assert not internals.is_symbolic(3)
    assert [str(key) for key in internals.sizes_key(x.shape)] == ["s0", "s1", "3"]
    assert internals.symbols_in([x, 3]) == {internals.size_key(x.shape[0]), internals.size_key(x.shape[1])}
    assert internals.raw_symbols([3, {"size": (x.shape[0], 2.5)}]) == [x.shape[0]]
    assert internals.environment_of(x) == internals.environment_of(x.shape[0])


def test_nodes_with_sizes_as_they_are_may_be_made_without_a_warning(joint: JointGraph) -> None:
    x = next(value for value in values_of(joint) if value.dim() == 3)
    graph = fx.Graph()
    given = graph.placeholder("given")
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # whatever torch may call it
        with internals.raw_sizes_allowed():
            graph.call_function(torch.ops.aten.view.default, (given, [x.shape[0], -1]))


def test_sizes_are_known_as_they_were_without_a_guard(joint: JointGraph) -> None:
    assert joint.sizes is not None
    x = next(value for value in values_of(joint) if value.dim() == 3)
    before = len(joint.fake_mode.shape_env.guards)
    assert internals.sizes_now(x) == torch.Size([4, 5, 3])
    assert internals.size_now(x.shape[1]) == 5
    assert internals.num_elements_now(x) == 60
    assert internals.num_bytes_now(x) == internals.storage_bytes_now(x) == 240
    assert internals.num_bytes_now(7) == 0
    assert internals.with_sizes_now(x).shape == (4, 5, 3)
    product = internals.size_key(x.shape[0]) * 2
    assert internals.text_of_size(internals.size_of_key(product, joint.fake_mode)) == "2*s0"
    assert len(joint.fake_mode.shape_env.guards) == before


def test_numbers_follow_from_arguments_that_the_guards_hold_for(joint: JointGraph) -> None:
    sizes = joint.sizes
    assert isinstance(sizes, SizesOfArguments)
    first, second = sizes.symbols
    keys = [first, first * second, None]
    assert sizes.numbers_for([torch.zeros(7, 6, 3)], keys) == (7, 42, 0)
    assert sizes.numbers_for([torch.zeros(7, 6, 4)], keys) is None
    assert sizes.numbers_for([torch.zeros(7, 6, 3, dtype=torch.float64)], keys) is None
    assert sizes.numbers_for([torch.zeros(7, 3, 6).transpose(1, 2)], keys) is None
    assert sizes.numbers_for([torch.zeros(101, 6, 3)], keys) is None
    assert sizes.numbers_for([torch.zeros(1, 6, 3)], keys) is None
    assert sizes.numbers_for([torch.zeros(6, 3)], keys) is None


def test_the_users_marks_are_found() -> None:
    x = torch.zeros(4, 5)
    assert internals.dims_marked_by_user(x) == frozenset()
    torch._dynamo.mark_dynamic(x, 1)
    assert internals.dims_marked_by_user(x) == {1}


def test_numbers_that_follow_from_values_are_given_up(joint: JointGraph) -> None:
    environment = joint.fake_mode.shape_env
    unknown = environment.create_unbacked_symint()
    assert joint.sizes is not None
    with pytest.raises(SizesGivenUp, match="follows from the values of tensors"):
        joint.sizes.add(unknown)


def test_a_graph_may_be_right_for_so_many_elements_alone(joint: JointGraph) -> None:
    assert joint.sizes is not None
    x = next(value for value in values_of(joint) if value.dim() == 3)
    before = len(joint.fake_mode.shape_env.guards)
    internals.assume_num_elements([torch.zeros(5)], most=3)  # what has no symbols is as it is
    assert len(joint.fake_mode.shape_env.guards) == before
    environment, known = internals.knowledge_of(x)
    assert environment is joint.fake_mode.shape_env
    internals.assume_num_elements([x, torch.zeros(5)], least=20, most=95)
    assert internals.knowledge_of(x)[1] != known
    keys = joint.sizes.symbols
    assert joint.sizes.numbers_for([torch.zeros(5, 6, 3)], keys) == (5, 6)
    assert joint.sizes.numbers_for([torch.zeros(6, 6, 3)], keys) is None
    assert joint.sizes.numbers_for([torch.zeros(2, 2, 3)], keys) is None


def test_loops_that_are_short_for_several_threads_stay_so(joint: JointGraph) -> None:
    """60 numbers are for one thread; 16 times as many as four threads want, 512 each, are 32,768."""
    assert joint.sizes is not None
    graph = joint.graph_module.graph
    before = len(joint.fake_mode.shape_env.guards)
    internals.keep_small_loops_small(graph, 1)
    assert len(joint.fake_mode.shape_env.guards) == before
    internals.keep_small_loops_small(graph, 4)
    keys = joint.sizes.symbols
    assert joint.sizes.numbers_for([torch.zeros(90, 100, 3)], keys) == (90, 100)
    assert joint.sizes.numbers_for([torch.zeros(90, 122, 3)], keys) is None


def test_a_size_that_divides_by_zero_is_that_of_no_graph(joint: JointGraph) -> None:
    assert joint.sizes is not None
    x = next(value for value in values_of(joint) if value.dim() == 3)
    key = internals.size_key(x.shape[0] // (x.shape[1] - 4))
    assert joint.sizes.numbers_for([torch.zeros(6, 6, 3)], [key]) == (3,)
    assert joint.sizes.numbers_for([torch.zeros(6, 4, 3)], [key]) is None


SYMBOLS = (SizeSymbol("s0", 6, 2), SizeSymbol("s3", 9, 5))


def test_symbols_have_the_names_values_and_bounds_that_were_given() -> None:
    environment: Any = SavedSizes(SYMBOLS).fake_mode.shape_env
    assert internals.symbols_of_environment(environment) == SYMBOLS
    assert internals.symbols_of_environment(None) == internals.symbols_of_environment(ShapeEnv()) == ()


COMPUTED: dict[str, Callable[[Any, Any], Any]] = {
    "symbol": lambda a, b: b,
    "sum": lambda a, b: 2 * a + b - 3,
    "folded": lambda a, b: 4 * a * (b - 1),
    "halved": lambda a, b: (a - 1) // 2 + 1,
    "rest": lambda a, b: b + -b % 4,
    "larger": lambda a, b: torch.sym_max(a, b // 3),
    "quotient": lambda a, b: a / b,
    "root": lambda a, b: torch._sym_sqrt(b),
    "scaled": lambda a, b: int(b * 1.5),
}


@pytest.mark.parametrize("name", COMPUTED)
def test_what_is_computed_of_sizes_is_read_again(name: str) -> None:
    first, second = SavedSizes(SYMBOLS), SavedSizes(SYMBOLS)
    size = COMPUTED[name](first.size("s0"), first.size("s3"))
    again = second.size(first.text(size))
    assert str(size_key(again)) == str(size_key(size))
    assert type(again) is type(size)
    assert size_now(again) == size_now(size)


@pytest.mark.parametrize(
    "text", ["s1", "s0 +", "__import__('os')", "s0.real", "Add(s0, open)", "[s0]", "Add('x', 1)", ""]
)
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no size"):
        SavedSizes(SYMBOLS).size(text)


@pytest.mark.parametrize("symbol", [SizeSymbol("x", 6, 2), SizeSymbol("s0", 1, 0), SizeSymbol("s0", 3, 5)])
def test_other_symbols_are_refused(symbol: SizeSymbol) -> None:
    with pytest.raises(ValueError, match="is no symbol for a size"):
        SavedSizes((symbol,))


def test_operators_take_symbols_that_only_their_python_kernels_take() -> None:
    saved = SavedSizes(SYMBOLS)
    with saved.fake_mode, internals.symbols_dispatched(saved.size("s0")):
        padded = torch.ops.aten.constant_pad_nd.default(torch.empty(3), [0, saved.size("s0")], 0.0)
    assert str(size_key(padded.shape[0])) == "s0 + 3"
    with internals.symbols_dispatched(3, fx.Graph(), torch.zeros(3)):
        assert torch.ops.aten.constant_pad_nd.default(torch.zeros(3), [0, 2], 0.0).shape == (5,)
