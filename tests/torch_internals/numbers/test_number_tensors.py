"""Python numbers as inputs of a graph: dtypes and bits are those of PyTorch."""

import math
import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from selections import slow
from torch import nn

from mirrorc import torch_internals as internals

SOURCE = "L['self'].given['t']"
Body = Callable[[torch.Tensor, Any], torch.Tensor]

OPERATIONS: dict[str, Body] = {
    "x * t": operator.mul,
    "t * x": lambda x, t: t * x,
    "x + t": operator.add,
    "t - x": lambda x, t: t - x,
    "x / t": operator.truediv,
    "t / x": lambda x, t: t / x,
    "x ** t": operator.pow,
    "t ** x": lambda x, t: t**x,
    "x > t": operator.gt,
    "t >= x": lambda x, t: t >= x,
    "x == t": operator.eq,
    "where": lambda x, t: torch.where(x > 0, x, t),
    "where, the other way": lambda x, t: torch.where(x > 0, t, x),
    "where, two numbers": lambda x, t: torch.where(x > 0, t, 1.5),
    "where, by keyword": lambda x, t: torch.where(x > 0, x, other=t),
    "clamp": lambda x, t: x.clamp(min=t),
    "clamp on both sides": lambda x, t: x.clamp(t, 2.5),
    "clamp in place": lambda x, t: (x + 0).clamp_(-1, t),
    "mul in place": lambda x, t: (x + 0).mul_(t),
    "full": lambda x, t: torch.full((2,), t) + x.sum(),
    "full_like": torch.full_like,
    "tensor": lambda x, t: torch.tensor(t) * x,
    "fill": lambda x, t: torch.empty_like(x).fill_(t),
    "lerp": lambda x, t: torch.lerp(x, x + 1, t),
    "masked_fill": lambda x, t: x.masked_fill(x > 0, t),
    "masked_fill, by keyword": lambda x, t: x.masked_fill(x > 0, value=t),
    "rsub": torch.rsub,
    "a scalar": lambda x, t: x.sum() * t,
    "a mean": lambda x, t: (x * 1.0).mean() / t,
    "another dtype": lambda x, t: torch.tensor(t, dtype=torch.float64) * x,
    "floor division": operator.floordiv,
    "addcmul": lambda x, t: torch.addcmul(x, x, x, value=t),
    "an activation": torch.nn.functional.leaky_relu,
    "a list": lambda x, t: torch.tensor([t, 1.0]) * 2,
}
ONLY_NUMBERS = {"floor division", "addcmul", "an activation", "a list"}
DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.bool)
FAST_DTYPES = {torch.float32, torch.bfloat16, torch.int64}


class Given(nn.Module):
    def __init__(self, body: Body, t: float) -> None:
        super().__init__()
        self.body, self.given = body, {"t": t}

    def forward(self, *leaves: torch.Tensor) -> torch.Tensor:
        return self.body(leaves[0], self.given["t"])


def traced_with_input(module: nn.Module, *leaves: torch.Tensor) -> Any:
    return internals.trace_full_graph(module, leaves, None, [SOURCE])


def run(traced: Any, *leaves: torch.Tensor) -> torch.Tensor:
    """What a graph gives for the numbers that its guards have read last."""
    for index, number in enumerate(internals.guards_of(traced).numbers):
        setattr(
            traced,
            f"mirrorc_number_{index}",
            torch.tensor(number, dtype=torch.int64 if type(number) is int else torch.float64),
        )
    result: torch.Tensor = traced(*leaves)
    return result


@pytest.mark.slow
@pytest.mark.parametrize("name", OPERATIONS)
@pytest.mark.parametrize("dtypes", [FAST_DTYPES, *slow((set(DTYPES) - FAST_DTYPES,))], ids=["some", "others"])
def test_dtypes_and_bits_are_those_of_a_python_number(name: str, dtypes: set[torch.dtype]) -> None:
    if "**" in name and torch.__version__ < "2.12":
        pytest.skip("torch 2.11 asks for the value of an exponent: each value has a program of its own")
    body, num_inputs = OPERATIONS[name], 0
    for i, dtype in enumerate(DTYPES):
        if dtype not in dtypes:
            continue
        x = (torch.tensor([-1.3, 0.3, 2.2, 3.0]) if i % 2 == 0 else torch.tensor(2.2)).to(dtype)
        for values in ((0.7, 1.9), (3, 2)) if dtype in (torch.float32, torch.int64) else ((0.7, 1.9),):
            try:
                expected = body(x, values[1])
            except RuntimeError:
                continue  # PyTorch refuses these operands
            module = Given(body, values[0])
            try:
                traced = traced_with_input(module, x)
            except internals.NumbersGivenUp as error:
                assert error.names == {SOURCE}
                continue
            module.given["t"] = values[1]
            assert internals.guards_of(traced).hold()
            found = run(traced, x)
            torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)
            num_inputs += 1
    assert (num_inputs == 0) == (name in ONLY_NUMBERS)


@pytest.mark.parametrize(
    "body",
    [lambda x, t: x.double() * (t * 0.1 * 3.0), lambda x, t: torch.where(x[1] > t, x, -x)],
    ids=["the order of products", "a comparison with a scalar of 32 bits"],
)
def test_bits_are_right_where_torchs_own_pass_has_others(body: Body) -> None:
    module, x = Given(body, 0.7), torch.tensor([-1.3, 0.3, 2.2])
    traced = traced_with_input(module, x)
    for value in (0.7, 0.9, 0.3, 0.30000001192092896):
        module.given["t"] = value
        assert internals.guards_of(traced).hold()
        assert torch.equal(run(traced, x), body(x, value)), value


@pytest.mark.parametrize(
    "body",
    [
        lambda x, t: x[: int(t)],
        lambda x, t: x.view(t, -1),
        lambda x, t: x * torch.arange(t).sum(),
        lambda x, t: x * (t > 1),
        lambda x, t: torch.nn.functional.dropout(x, t / 10),
    ],
)
def test_where_only_a_number_can_stand_it_stays_one(body: Body) -> None:
    with pytest.raises(internals.NumbersGivenUp) as caught:
        traced_with_input(Given(body, 2), torch.ones(4))
    assert caught.value.names == {SOURCE} and caught.value.words == ["given['t']"]


def test_guards_ask_branches_on_the_very_numbers() -> None:
    module = Given(lambda x, t: x + 1 if t + 0.1 + 0.2 > 0.6 else x * t, 0.3)
    traced = traced_with_input(module, torch.ones(2))
    guards = internals.guards_of(traced)
    for value in (0.3, 0.29999999999999993, 0.2999999999999999, 0.1, 5.0, 0.30000000000000004):
        module.given["t"] = value
        assert guards.hold() == ((value + 0.1 + 0.2 > 0.6) == (0.3 + 0.1 + 0.2 > 0.6)), value
    for other in (1, True, math.nan, math.inf, 1e300, "0.3", None):
        module.given["t"] = other
        assert not guards.hold(), other


def test_numbers_are_told_in_the_users_words() -> None:
    module = Given(lambda x, t: x * (1 - t) ** 2 + t, 0.25)
    guards = internals.guards_of(traced_with_input(module, torch.ones(2)))
    assert guards.hold() and guards.numbers == (0.5625, 0.25)
    derived, read = guards.number_inputs()
    assert derived[:3] == ("from_given['t']", "(1 - given['t']) ** 2", float) and read.text == ""
    assert derived.expression == f"(1 - {SOURCE}) ** 2" and read.expression == SOURCE


def test_which_numbers_have_changed() -> None:
    module = Given(lambda x, t: x * t, 0.25)
    guards = internals.guards_of(internals.trace_full_graph(module, [torch.ones(2)]))
    assert guards.changed_numbers() == []
    module.given["t"] = 0.5
    assert guards.changed_numbers() == [SOURCE]
    module.given["t"] = math.nan
    assert guards.changed_numbers() == []
    assert internals.attribute_source(["model", "0"], "scale") == "L['self']._modules['model']._modules['0'].scale"
    assert internals.is_ordinary(1) and not internals.is_ordinary(True) and not internals.is_ordinary(2**60)


@pytest.mark.slow
def test_dynamo_is_as_before() -> None:
    from torch._dynamo.variables.builder import VariableBuilder
    from torch._dynamo.variables.tensor import SymNodeVariable

    before = VariableBuilder._wrap, SymNodeVariable.__init__, torch._sym_cos, hasattr(torch, "_sym_exp")
    traced_with_input(Given(lambda x, t: x * math.exp(t) * math.cos(t), 0.25), torch.ones(2))
    assert (VariableBuilder._wrap, SymNodeVariable.__init__, torch._sym_cos, hasattr(torch, "_sym_exp")) == before
