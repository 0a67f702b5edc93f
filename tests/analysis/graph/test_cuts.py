"""What is made before a cut so that a large value need not pass it."""

from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from mirrorc.analysis.graph.cuts import moved_before_cuts

X, W, LATER = torch.zeros(16, 64), torch.zeros(64, 2), torch.zeros(16, 2)


def product(x: torch.Tensor, w: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    return x.neg() @ w


def through_views(x: torch.Tensor, w: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    return w.t() @ x.neg().view(16, 8, 8).view(16, 64).t()


def read_twice(x: torch.Tensor, w: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    value = x.neg()
    return (value @ w).sum() + value.exp().sum()


def needs_what_comes_later(x: torch.Tensor, w: torch.Tensor, later: torch.Tensor) -> torch.Tensor:
    return torch.addmm(later.exp(), x.neg(), w)


def leaves(x: torch.Tensor, w: torch.Tensor, later: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    value = x.neg()
    return value @ w, value


@pytest.mark.parametrize(
    ("function", "expected"),
    [
        (product, ["mm"]),
        (through_views, ["t", "view", "view_1", "t_1", "mm"]),
        (read_twice, []),
        (needs_what_comes_later, []),
        (leaves, []),
    ],
)
@pytest.mark.parametrize("piece", [0, 1])
def test_products_are_moved_with_what_they_need_or_not_at_all(
    function: Callable[..., object], expected: list[str], piece: int
) -> None:
    """The first operator ends a piece and all others are behind the cut; the forward, piece 0, keeps its end."""
    graph = make_fx(function)(X, W, LATER).graph
    (first,) = graph.find_nodes(op="call_function", target=torch.ops.aten.neg.default)
    operators = [node for node in graph.nodes if node.op == "call_function"]
    piece_of = {node: piece if node is first else piece + 1 for node in operators}
    assert not moved_before_cuts(piece_of, min_bytes=16 * 64 * 4 + 1)
    moved = moved_before_cuts(piece_of, min_bytes=16 * 64 * 4)
    assert sorted(node.name for node in moved) == sorted(expected if piece else [])
    assert set(moved.values()) <= {piece}
