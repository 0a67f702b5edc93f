"""The plans themselves: their arguments, and what is refused of a plan of the user's own."""

import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import numpy
import pytest
import torch
import torch.nn.functional as F
from fuzzing import fuzzed
from hypothesis import given
from hypothesis import strategies as st
from planned_steps import step_of_world
from tiny_models import make_mlp, mlp_batch
from torch import nn

import mirrorc
from mirrorc.capture.model.model_state import ModelState
from mirrorc.coordination.fingerprint import facts_of_options
from mirrorc.errors import PassError
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes, EqualPacks, EqualSplits, Gradient, equal_ranges, groups_of, in_order
from mirrorc.passes import PlanBuckets, default_pipeline

GRADIENTS = [
    Gradient("a", 4, torch.float32, 0),
    Gradient("b", 0, torch.float32, 1),
    Gradient("c", 9, torch.float64, 2),
]


def test_workers_tell_plans_and_orders_of_ones_own_by_their_names() -> None:
    """Each worker has a function of its own, elsewhere in memory."""

    def told(body: str) -> dict[str, str]:
        names: dict[str, Any] = {}
        exec(f"def plan(gradients): return {body}\nclass Order:\n    def __call__(self, gradient): return 0", names)
        model = nn.Linear(2, 2)
        with mirrorc.compile(
            model,
            1,
            optimizer=torch.optim.SGD(model.parameters()),
            loss_fn=F.mse_loss,
            communication=mirrorc.Communication(order=names["Order"](), buckets=names["plan"]),
        ) as step:
            return facts_of_options(step._options, ModelState(model, F.mse_loss))

    kept = told("[]"), told("[]")
    assert kept[0] == kept[1]
    assert any("function plan" in text for text in kept[0].values())
    assert any("Order object" in text for text in kept[0].values())


@pytest.mark.slow
@fuzzed(100)
@given(num_elements=st.integers(1, 5000), number=st.integers(1, 40))
def test_ranges_are_equal_but_for_the_last(num_elements: int, number: int) -> None:
    ranges = equal_ranges(num_elements, number)
    assert len(ranges) == min(number, num_elements)
    assert [start for start, _ in ranges] == [0, *(stop for _, stop in ranges[:-1])]
    assert ranges[-1][1] == num_elements
    sizes = {stop - start for start, stop in ranges[:-1]}
    assert len(sizes) <= 1 and all(size <= ranges[-1][1] - ranges[-1][0] for size in sizes)


@pytest.mark.parametrize(
    ("given_groups", "error", "text"),
    [
        ([["a", "b"]], ValueError, "puts 'c' into no group"),
        ([["a"], ["b", "a"], ["c"]], ValueError, "has 'a' in two places"),
        (
            [["a"], ["b"], ["c", "d"]],
            ValueError,
            "names 'd', which has no gradient\n  fix:  use names of gradients: a, b, c",
        ),
        ([["a", "c"], ["b"]], ValueError, "puts 'a' (torch.float32) and 'c' (torch.float64) in one group"),
        ([["a"], [], ["b"], ["c"]], ValueError, "gives an empty group"),
        ("abc", TypeError, "give a list of lists of names"),
        (["a", "b", "c"], TypeError, "give a list of lists of names"),
        (None, TypeError, "give a list of lists of names"),
        ([[0], ["b"], ["c"]], ValueError, "names 0, which has no gradient"),
    ],
)
def test_groups_that_do_not_fit_are_refused(given_groups: Any, error: type[Exception], text: str) -> None:
    def mine(gradients: Sequence[Gradient]) -> Any:
        return given_groups

    with pytest.raises(error, match=re.escape(text)) as e:
        groups_of(mine, GRADIENTS)
    assert str(e.value).startswith("MC1506: buckets=mine ")


def test_a_plan_of_ones_own_is_told_of_every_gradient() -> None:
    def mine(gradients: Sequence[Gradient]) -> list[list[str]]:
        return [[name] for name, elements, dtype, ready in gradients if (elements, dtype, ready) is not None]

    assert groups_of(mine, GRADIENTS) == [[one] for one in GRADIENTS]


def test_gradients_are_put_in_the_order_that_is_asked_for() -> None:
    registered = ["b", "c", "a", "frozen"]
    assert in_order(GRADIENTS, "ready", registered) == GRADIENTS
    assert [one.name for one in in_order(GRADIENTS, "reversed", registered)] == ["a", "c", "b"]
    assert [one.name for one in in_order(GRADIENTS, lambda one: one.elements, registered)] == ["b", "a", "c"]
    with pytest.raises(ValueError, match="order gives keys that cannot be compared"):
        in_order(GRADIENTS, lambda one: one.name if one.elements else 1, registered)
    for key, said in (
        (torch.ones(2), r"a tensor \(\[2\], torch.float32\)"),
        (torch.tensor(1.0), r"a tensor \(\[\]"),
        (math.nan, "nan"),
        ((1, math.nan), "nan"),
    ):
        with pytest.raises(ValueError, match=f"order gives {said}.* for 'a': give numbers, texts or tuples"):
            in_order(GRADIENTS, lambda one, key=key: key, registered)  # type: ignore[misc]
    with pytest.raises(ValueError, match="order gives keys that cannot be compared"):
        in_order(GRADIENTS, lambda one: numpy.ones(2), registered)


@pytest.mark.parametrize(
    ("make", "error", "text"),
    [
        (lambda: ByBytes(-1), ValueError, "cap_mb is -1: give a positive number of MiB, or math.inf for one bucket"),
        (lambda: ByBytes(1, 0), ValueError, "first_mb is 0: give a positive number"),
        (lambda: ByBytes(math.nan), ValueError, "cap_mb is nan"),
        (lambda: ByBytes(True), ValueError, "cap_mb is True"),
        (lambda: EqualPacks(-1), ValueError, "num_packs is -1: give 0 or more"),
        (lambda: EqualPacks(2.0), TypeError, "num_packs is 2.0: give a whole number"),  # type: ignore[arg-type]
        (lambda: EqualSplits(0), ValueError, "num_splits is 0: give 1 or more"),
        (lambda: PlanBuckets(buckets=-3), ValueError, "buckets is -3: give a positive number of MiB"),
        (lambda: PlanBuckets(buckets=EqualPacks), TypeError, "buckets=<class"),
        (
            lambda: PlanBuckets(buckets="all"),
            TypeError,
            "buckets='all' is neither a size nor a way to pack\n  fix:  buckets=25, in MiB",
        ),  # type: ignore[arg-type]
        (lambda: PlanBuckets(order="last"), ValueError, "order is 'last': say 'ready'"),  # type: ignore[arg-type]
        (lambda: PlanBuckets(order=3), TypeError, "order is 3: say 'ready'"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_plan_is_refused(make: Callable[[], object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=re.escape(text)):
        make()


@pytest.mark.parametrize(
    ("options", "error", "text"),
    [
        (
            {"passes": default_pipeline(), "buckets": EqualPacks(2)},
            ValueError,
            "buckets=EqualPacks(num_packs=2) and passes= cannot be combined",
        ),
        (
            {"order": "reversed", "passes": []},
            ValueError,
            "order='reversed' and passes= cannot be combined",
        ),
        ({"disable": ["plan-buckets"], "buckets": EqualPacks(2)}, ValueError, "which disable= switches off"),
        ({"buckets": "all"}, TypeError, "buckets='all' is neither"),
        ({"order": "last"}, ValueError, "order is 'last'"),
        (
            {"shard_optimizer": True, "buckets": EqualPacks(2)},
            ValueError,
            "shard_optimizer=True cannot be used with buckets=EqualPacks(num_packs=2)\n  why:  packs end within gradients",
        ),
    ],
)
def test_options_that_contradict_each_other_are_refused(
    options: dict[str, Any], error: type[Exception], text: str
) -> None:
    model = make_mlp(torch.float32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(error, match=re.escape(text)):
        step_of_world(model, ["cpu:0"], world=mirrorc.World(2), optimizer=optimizer, loss_fn=F.mse_loss, **options)


@pytest.mark.slow
def test_a_wrong_plan_is_refused_when_it_is_asked_and_nothing_has_changed() -> None:
    model = make_mlp(torch.float64)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def mine(gradients: Sequence[Gradient]) -> list[list[str]]:
        return [[gradients[0].name]]

    options: dict[str, Any] = {"optimizer": optimizer, "loss_fn": F.cross_entropy, "backend": "eager", "buckets": mine}
    refused = pytest.raises(PassError, match=r"^MC1506: .*buckets=mine puts 'last.bias' into no group")
    with mirrorc.compile(model, 2, **grouped(options)) as step, refused:
        step(**mlp_batch(4, torch.float64, 0))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
