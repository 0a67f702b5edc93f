"""Which sums and reads of rows can do with one element of each, however deep the graph that makes the rows."""

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from mirrorc.analysis.graph.one_hot_rows import ValueOp, element_of_row, sum_of_one_hot

aten = torch.ops.aten
SHAPE = (4, 5)


@dataclass(frozen=True, eq=False)
class Value:
    """A matrix, or a column of it, and how it is made; what is given is made by nothing."""

    target: Any = None
    args: tuple[Any, ...] = ()
    shape: tuple[int, ...] = SHAPE


class Values:
    def __init__(self) -> None:
        self.made_since: list[Value] = []

    def op_of(self, value: Any) -> ValueOp[Value] | None:
        if not isinstance(value, Value):
            return None
        return ValueOp(value.target, value.args, {}, value.shape, torch.float64)

    def apply(self, target: Any, args: tuple[Any, ...]) -> Value:
        self.made_since.append(Value(target, args, shape=(4, 1)))
        return self.made_since[-1]


def summed(rows: Value) -> ValueOp[Value]:
    return ValueOp(aten.sum.dim_IntList, (rows, [1], True), {}, (4, 1), torch.float64)


def one_hot() -> Value:
    zeros = Value(aten.full.default, (list(SHAPE), 0))
    return Value(aten.scatter.value, (zeros, 1, Value(shape=(4, 1)), -1.0))


def scaled(rows: Value, times: int) -> Value:
    for _ in range(times):
        rows = Value(aten.mul.Tensor, (Value(shape=(4, 1)), rows))
    return rows


@pytest.mark.parametrize("times", [0, 1, 5])
def test_a_row_with_one_element_need_not_be_summed(times: int) -> None:
    values = Values()
    found = sum_of_one_hot(values, summed(scaled(one_hot(), 1 + times)))
    assert found is not None and found.target is aten.add.Tensor
    assert [made.target for made in values.made_since] == [*[aten.mul.Tensor] * (1 + times), aten.add.Tensor]


@pytest.mark.parametrize("rows", [Value(), one_hot()], ids=["given", "one element"])
def test_the_rows_of_thousands_of_products_are_summed(rows: Value) -> None:
    values = Values()
    assert sum_of_one_hot(values, summed(scaled(rows, 5_000))) is None
    assert not values.made_since


@pytest.mark.timeout(30)
def test_rows_that_are_multiplied_by_themselves_are_looked_at_once() -> None:
    """Each of 200 products takes the one before twice, so that 2 to the power of 200 ways lead to the first."""
    rows = Value()
    for _ in range(200):
        rows = Value(aten.mul.Tensor, (rows, rows))
    assert sum_of_one_hot(Values(), summed(rows)) is None


@pytest.mark.parametrize(("times", "most"), [(1, 1), (3, 3), (5_000, 16)])
def test_elements_are_read_through_a_few_differences(times: int, most: int) -> None:
    values, rows = Values(), Value()
    for _ in range(times):
        rows = Value(aten.sub.Tensor, (rows, Value(shape=(4, 1))))
    found = element_of_row(
        values, ValueOp(aten.gather.default, (rows, 1, Value(shape=(4, 1))), {}, (4, 1), torch.float64)
    )
    assert found is values.made_since[-1]
    assert [made.target for made in values.made_since] == [aten.gather.default, *[aten.sub.Tensor] * most]
