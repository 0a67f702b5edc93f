"""Which sizes become symbols, by the calls that have come before."""

import json
from typing import Any

import pytest
import torch

import mirrorc
from mirrorc.capture.call.call_arguments import flatten_call
from mirrorc.capture.call.changing_inputs import ChangingSizes, without_numbers_of_examples

NONE: list[set[int]] = []


def symbols_after(*shapes: tuple[int, ...], dynamic: bool | None = None) -> list[set[int]]:
    """The symbolic dimensions of x [examples, length] and y [examples], when the last of these calls comes."""
    sizes = ChangingSizes(dynamic=dynamic)
    return [symbols_of(sizes, torch.empty(shape), torch.empty(shape[0])) for shape in shapes][-1]


def symbols_of(sizes: ChangingSizes, *args: Any) -> list[set[int]]:
    call = flatten_call(["x", "y"], args, {})
    return [set(dims) for dims in sizes.symbolic_dims(call, "step")]


def test_the_first_sizes_are_numbers() -> None:
    assert symbols_after((8, 5)) == NONE


def test_a_second_length_is_a_symbol() -> None:
    assert symbols_after((8, 5), (8, 6)) == [{1}, set()]
    assert symbols_after((8, 6), (8, 5)) == [{1}, set()]


@pytest.mark.parametrize("pair", [((8, 5), (3, 5)), ((3, 5), (8, 5))])
def test_a_second_number_of_examples_is_a_symbol(pair: tuple[tuple[int, int], ...]) -> None:
    assert symbols_after(*pair) == [{0}, {0}]
    assert symbols_after(*pair, (8, 6)) == [{0, 1}, {0}]


def test_the_first_sizes_keep_their_program() -> None:
    sizes = ChangingSizes(dynamic=None)
    first, second = ([torch.empty(n, 5), torch.empty(n)] for n in (8, 3))
    for args, expected in ((first, NONE), (second, [{0}, {0}]), (first, NONE)):
        assert symbols_of(sizes, *args) == expected
        call = flatten_call(["x", "y"], args, {})
        if args is second:
            sizes.note_program(call, "step", expected, has_microbatches=False)
        assert sizes.compiled_dims(call, "step") == (() if args is first else expected)


def test_numbers_of_examples_of_an_evaluation_are_symbols_at_once() -> None:
    call = flatten_call(["x"], (torch.empty(8, 5),), {})
    for dynamic, expected in ((None, [{0}]), (False, NONE), (True, [{0, 1}])):
        sizes = ChangingSizes(dynamic=dynamic)
        assert [set(dims) for dims in sizes.symbolic_dims(call, "evaluation", is_evaluation=True)] == expected


def test_a_resumed_training_goes_on_with_its_sizes() -> None:
    earlier, later = ChangingSizes(dynamic=None), ChangingSizes(dynamic=None)
    full, last = ((torch.empty(n, 5), torch.empty(n)) for n in (8, 3))
    assert [symbols_of(earlier, *args) for args in (full, last)] == [NONE, [{0}, {0}]]
    later.load_state_dict(json.loads(json.dumps(earlier.state_dict())))
    assert symbols_of(later, *last) == [{0}, {0}]
    assert symbols_of(later, *full) == NONE
    third = ChangingSizes(dynamic=None)
    symbols_of(third, torch.empty(5, 5), torch.empty(5))
    later.load_state_dict(third.state_dict())  # what it has seen itself stays
    assert symbols_of(later, *full) == NONE and symbols_of(later, *last) == [{0}, {0}]


def test_sizes_of_zero_and_one_do_not_count() -> None:
    assert symbols_after((8, 5), (8, 1), (0, 5), (1, 5)) == NONE
    assert symbols_after((8, 1), (8, 5)) == NONE


def test_true_takes_all_and_false_takes_none() -> None:
    assert symbols_after((8, 5), dynamic=True) == [{0, 1}, {0}]
    assert symbols_after((8, 5), (9, 6), (10, 7), dynamic=False) == NONE


@pytest.mark.parametrize("split", [(4, 3), (3, 4)])
def test_shards_that_are_split_already_may_be_uneven(split: tuple[int, int]) -> None:
    sizes = ChangingSizes(dynamic=None)

    def shards(*rows: int) -> list[set[int]]:
        one = [mirrorc.PerReplica([torch.empty(n, *rest) for n in rows]) for rest in ((5,), ())]
        return symbols_of(sizes, *one)

    assert shards(*split) == NONE
    assert shards(4, 4) == NONE  # no new size
    assert shards(6, 6) == [{0}, {0}]
    assert shards(*reversed(split)) == [{0}, {0}], "only the shapes of the first call keep a program of their own"
    assert shards(*split) == NONE


def test_a_marked_size_is_a_symbol_and_the_other_ones_count_as_ever() -> None:
    sizes = ChangingSizes(dynamic=False)
    x = torch.empty(8, 5)
    torch._dynamo.mark_dynamic(x, 1)
    assert symbols_of(sizes, x, torch.empty(8)) == [{1}, set()]
    assert symbols_of(sizes, torch.empty(9, 6), torch.empty(9)) == [{1}, set()]
    assert symbols_of(sizes, torch.empty(8, 5), torch.empty(8)) == [{1}, set()]


def test_numbers_of_examples_are_taken_out_of_symbols() -> None:
    whole = mirrorc.replicated(torch.empty(8, 5))  # has no examples
    call = flatten_call(["x", "y", "z"], (torch.empty(8, 5), torch.empty(8), whole), {})
    both, first, none = frozenset({0, 1}), frozenset({0}), frozenset()
    assert without_numbers_of_examples(call, (both, first, both)) == (frozenset({1}), none, both)
    assert without_numbers_of_examples(call, (first, first, none)) == ()
    assert without_numbers_of_examples(call, ()) == ()
