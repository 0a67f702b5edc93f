"""Sizes as texts, and symbols that are made anew for them."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from mirrorc import torch_internals as internals
from mirrorc.torch_internals import SavedSizes, SizeSymbol, size_key, size_now

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
