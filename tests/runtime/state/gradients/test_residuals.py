"""What a worker has not sent of its gradients: laid out for programs, kept over steps that take place, dealt out to others."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, Weight, handmade

import mirrorc
from mirrorc import World
from mirrorc.coordination.residual_checkpoint import dealt_out
from mirrorc.ir.program import Program
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.state.gradients.low_rank_products import subtract_product, write_elements, write_product
from mirrorc.runtime.state.gradients.orthonormalize import orthonormal_columns
from mirrorc.runtime.state.gradients.powersgd_factors import KeptFactors
from mirrorc.runtime.state.gradients.residuals import UnsentGradients
from mirrorc.runtime.workers.buckets.power_sgd import WholeSum
from mirrorc.runtime.workers.buckets.top_k import LargestElements, places_of_largest

ONES = torch.ones(300)


def program_of(*names: str, **options: Any) -> Program:
    captured = handmade(1, [Weight(name, (300,)) for name in names]).evolve(workers=World(2).worker(0))
    given = {**SMALL_BUCKETS, "compression": mirrorc.TopK(0.1), **options}
    return run_passes(captured, default_pipeline(over_workers=True, **given))


def step(unsent: UnsentGradients, program: Program, scale: float = 1.0, gradient: float = 1.0) -> None:
    """A step up to its end, that sends nothing of a gradient of equal elements."""
    unsent.fit(program)
    unsent.begin(program, scale)
    for bucket in program.buckets:
        unsent.add(bucket.index, slice(0, bucket.num_elements), torch.full((bucket.num_elements,), gradient))


def sums(unsent: UnsentGradients) -> dict[str, float]:
    return {name: own.mean().item() for name, own in unsent.values().items()}


def test_a_program_that_gets_other_remarks_goes_on() -> None:
    unsent, program = UnsentGradients(torch.device("cpu")), program_of("a")
    step(unsent, program)
    unsent.finish()
    unsent.fit(program.with_remarks("bucket sizes as they were chosen"))
    unsent.begin(program, 1.0)
    assert unsent.add(0, slice(0, 1), torch.ones(1)).item() == 2.0


def test_a_step_that_takes_place_keeps_what_it_has_not_sent() -> None:
    unsent, program = UnsentGradients(torch.device("cpu")), program_of("a", "b")
    for number in range(1, 4):
        step(unsent, program)
        unsent.finish()
        unsent.finish()  # may be repeated
        assert set(sums(unsent).values()) == {number}


def test_a_step_that_fails_changes_nothing() -> None:
    unsent, program = UnsentGradients(torch.device("cpu")), program_of("a", "b")
    step(unsent, program)
    unsent.finish()
    step(unsent, program, gradient=torch.nan)
    assert set(sums(unsent).values()) == {1.0}
    step(unsent, program)
    unsent.finish()
    assert set(sums(unsent).values()) == {2.0}


def test_a_step_that_has_failed_leaves_no_factors_to_a_later_one_that_makes_none() -> None:
    factors = KeptFactors()
    factors.begin(are_made=True)
    factors.new["a"] = torch.full((3, 1), torch.nan)
    factors.begin(are_made=False)
    factors.finish()
    assert factors.values() == {} and factors.num_steps == 0


def test_what_is_forgotten_is_kept_no_more_and_steps_are_counted_anew() -> None:
    unsent, program = UnsentGradients(torch.device("cpu")), program_of("a")
    step(unsent, program)
    unsent.finish()
    unsent.factors = KeptFactors({"a": torch.ones(3, 1)}, 4)
    unsent.forget()
    assert unsent.values() == {} and unsent.factors.values() == {} and unsent.factors.num_steps == 0
    unsent.fit(program)
    assert set(sums(unsent).values()) == {0.0}


@pytest.mark.parametrize("num_devices", [1, 2])
def test_a_pack_that_is_sent_whole_gives_every_device_all_of_its_sum(num_devices: int) -> None:
    """Whichever comes first: one of them makes the pack zero."""
    whole = torch.arange(6.0)

    class Group:
        def all_reduce(self, sent: torch.Tensor) -> None:
            sent.mul_(2)

    part = WholeSum(whole)
    part.launch(Group())  # type: ignore[arg-type]
    for device in range(num_devices):
        into = torch.full((6,), -1.0)
        part.take(0, 6, into, keeps_rest=device == 0)
        assert into.tolist() == [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    assert not whole.any()


def test_what_is_kept_follows_the_scale_of_the_loss() -> None:
    unsent, program = UnsentGradients(torch.device("cpu")), program_of("a")
    for scale in (8.0, 2.0, 4.0):
        step(unsent, program, scale, gradient=scale)
        unsent.finish()
    assert sums(unsent) == {"a": 3.0}


def test_programs_of_other_buckets_go_on_with_it() -> None:
    unsent = UnsentGradients(torch.device("cpu"))
    for program in (
        program_of("a", "b"),
        program_of("a", "b", bucket_cap_mb=0.0),
        program_of("a"),
        program_of("a", "b"),
    ):
        step(unsent, program)
        unsent.finish()
    assert sums(unsent)["a"] == 4.0
    assert sums(unsent).keys() == {"a", "b"}


def test_a_program_that_sends_whole_sums_leaves_it_alone() -> None:
    unsent, program, whole = UnsentGradients(torch.device("cpu")), program_of("a"), program_of("a", compression=None)
    step(unsent, program)
    unsent.finish()
    unsent.fit(whole)
    unsent.begin(whole, 1.0)
    unsent.finish()
    assert sums(unsent) == {"a": 1.0}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_the_largest_elements_are_sent_and_zero_in_the_rest(dtype: torch.dtype) -> None:
    whole = torch.tensor([0.5, -4.0, 3.0, torch.nan, -torch.inf, 1.0], dtype=dtype)
    found = LargestElements(whole, 3, 2)
    assert whole.tolist() == [0.5, 0.0, 3.0, 0.0, 0.0, 1.0]
    for message in found.gathered:
        message.copy_(found.own)
    for elements, places in found.of_workers():
        sent = dict(zip(places.tolist(), elements.tolist(), strict=True))
        assert math.isnan(sent.pop(3)) and sent == {1: -4.0, 4: -torch.inf}


@pytest.mark.parametrize(
    "kind", ["drawn", "equal", "large where a sample looks", "small where a sample looks", "no numbers"]
)
@pytest.mark.parametrize("count", [1, 40, 4_000, 20_000, 40_000])
def test_a_bound_from_a_sample_leaves_out_none_of_the_largest(kind: str, count: int) -> None:
    magnitudes = torch.rand(40_000, generator=torch.Generator().manual_seed(count))
    if kind == "equal":
        magnitudes.fill_(0.25)
    elif kind == "large where a sample looks":
        magnitudes[::61] += 1
    elif kind == "small where a sample looks":
        magnitudes[::61] = 0
    elif kind == "no numbers":
        magnitudes[::7] = torch.nan
    places = places_of_largest(magnitudes, count)
    assert places.unique().numel() == count
    found, expected = magnitudes[places].sort().values, magnitudes.topk(count).values.sort().values
    assert torch.equal(found.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def test_factors_of_a_step_that_takes_place_begin_the_next_one() -> None:
    factors, given = KeptFactors(), ("a", 30, 2, 0, torch.float64)
    first = factors.begin_with(*given)
    assert torch.equal(first, KeptFactors().begin_with(*given)), "they follow from the seed and the name"
    assert not torch.equal(first, factors.begin_with("a", 30, 2, 1, torch.float64))
    assert not torch.equal(first, factors.begin_with("b", 30, 2, 0, torch.float64))
    drawn = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    factors.begin(are_made=True)
    factors.new["a"] = drawn
    assert torch.equal(first, factors.begin_with(*given)) and factors.num_steps == 0, "it has not taken place"
    factors.begin(are_made=True)
    factors.new["a"] = drawn
    factors.finish()
    factors.finish()  # may be repeated
    kept = factors.begin_with(*given)
    assert factors.num_steps == 1 and torch.allclose(kept.T @ kept, torch.eye(2, dtype=torch.float64))
    assert torch.allclose(kept @ (kept.T @ drawn), drawn)


def test_columns_that_are_missing_are_those_of_the_first_step() -> None:
    drawn = torch.randn(30, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    first = KeptFactors().begin_with("a", 30, 3, 0, torch.float64)
    for kept, number in ((drawn, 2), (torch.cat([drawn, drawn[:, :1] * 0], 1), 2), (torch.zeros(30, 3), 0)):
        found = KeptFactors({"a": kept}, 1).begin_with("a", 30, 3, 0, torch.float64)
        assert torch.allclose(found.T @ found, torch.eye(3, dtype=torch.float64)), "no column is lost"
        spanned = drawn if number else first
        assert torch.allclose(found @ (found.T @ spanned), spanned)
    assert KeptFactors({"a": drawn}, 1).begin_with("a", 30, 1, 0, torch.float64).shape == (30, 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_columns_are_orthonormal_and_those_that_others_span_are_zero(dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    matrices = [torch.randn(37, 3, dtype=dtype, generator=generator) * size for size in (1.0, 1e-30, 1e30)]
    for matrix, found in zip(matrices, orthonormal_columns(matrices), strict=True):
        assert torch.allclose(found.T @ found, torch.eye(3, dtype=dtype), atol=1e-6)
        assert torch.allclose(found @ (found.T @ matrix), matrix, rtol=1e-4)
    one = matrices[0][:, :1].double()
    (found,) = orthonormal_columns([torch.cat([one, -2 * one, one * 0], 1)])
    assert (found != 0).any(0).tolist() == [True, False, False]
    (found,) = orthonormal_columns([torch.tensor([[1.0, torch.inf], [2.0, 1.0]])])
    assert found.isnan().any(0).tolist() == [False, True]


def test_columns_are_made_of_sums_from_the_first_element_to_the_last() -> None:
    """Which are the same on all processors: the library has no other order of cumulative sums."""
    matrix = torch.rand(1003, 1, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    matrix /= matrix.max()
    total = 0.0
    for value in matrix[:, 0].tolist():
        total += value * value
    (found,) = orthonormal_columns([matrix])
    assert found[:, 0].tolist() == [value / math.sqrt(total) for value in matrix[:, 0].tolist()]


def test_each_element_of_a_product_is_made_alike_wherever_it_is_cut() -> None:
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(number, 3, generator=generator) for number in (700, 130))
    whole = torch.full((91_000,), torch.nan)
    write_elements(whole, left, right, 0)
    for start, stop in itertools.pairwise([0, 1, 129, 131, 135, 45_003, 91_000]):
        own = torch.full((stop - start,), torch.nan)
        write_elements(own, left, right, start)
        assert torch.equal(whole[start:stop], own)
    expected = sum(left[:, k : k + 1] * right[:, k] for k in range(3))  # product by product, and sum by sum
    assert torch.equal(whole.view(700, 130), expected)  # type: ignore[arg-type]


@pytest.mark.parametrize("cuts", [[], [5], [1, 12, 13], [26, 39], [3, 4, 38, 40, 64]])
def test_a_product_is_written_wherever_it_is_cut(cuts: list[int]) -> None:
    left, right = (torch.rand(*size, dtype=torch.float64) for size in ((5, 2), (13, 2)))
    found = torch.full((65,), torch.nan, dtype=torch.float64)
    for start, stop in itertools.pairwise([0, *cuts, 65]):
        write_product(found[start:stop], left, right, start)
        assert found[stop:].isnan().all()
    torch.testing.assert_close(found.view(5, 13), left @ right.T, rtol=0, atol=1e-12)


@pytest.mark.parametrize("cuts", [[], [5], [1, 12, 13], [26, 39], [3, 4, 38, 40, 64]])
def test_a_product_is_subtracted_wherever_it_is_cut(cuts: list[int]) -> None:
    matrix, left, right = (torch.rand(*size, dtype=torch.float64) for size in ((5, 13), (5, 2), (13, 2)))
    expected = matrix - left @ right.T
    for start, stop in itertools.pairwise([0, *cuts, 65]):
        before = matrix.flatten()
        subtract_product(matrix, left, right, start, stop)
        assert matrix.flatten()[:start].equal(before[:start]) and matrix.flatten()[stop:].equal(before[stop:])
    torch.testing.assert_close(matrix, expected, rtol=0, atol=1e-12)


def state_of(rank: int, num_workers: int, **unsent: Any) -> dict[str, Any]:
    return {"rank": rank, "num_workers": num_workers, "unsent": unsent}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_what_all_have_together_is_dealt_out(number: int) -> None:
    states = [state_of(rank, 3, a=ONES * (rank + 1)) for rank in (2, 0, 1)]
    found = [dealt_out(states, rank, number, {"a": ONES})[0] for rank in range(number)]
    assert sum(own.get("a", ONES * 0) for own in found).tolist() == [6.0] * 300  # type: ignore[union-attr]
    if number == 3:
        assert [own["a"][0].item() for own in found] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("states", "why"),
    [
        (state_of(0, 1), "states is a dict: give a list of what step.unsent_state"),
        ([{"unsent": {}}], "each of the states is a dict with num_workers, rank, unsent"),
        ([], "of the ranks of nobody"),
        (
            [{**state_of(0, 1), "factors": {"b": ONES[:, None]}, "num_steps": 1}],
            "had factors of 'b', which are none of a par",
        ),
        ([{**state_of(0, 2), "num_steps": 1}, state_of(1, 2)], "those of different steps, as their num_steps say"),
        ([state_of(0, 2)], "those of the ranks 0 of runs with 2 workers: give what step.unsent_state"),
        ([state_of(0, 2), state_of(0, 2)], "would be lost or added twice"),
        ([state_of(0, 2), state_of(1, 3)], "of runs with 2, 3 workers"),
        ([state_of(0, 1, b=ONES)], "of 'b', which is no tensor like this model's parameter (no such parameter)"),
        ([state_of(0, 1, a=torch.ones(2))], "parameter ([300] of torch.float32): give states of a run of this model"),
    ],
)
def test_other_states_are_refused(states: Any, why: str) -> None:
    with pytest.raises((TypeError, ValueError)) as error:
        dealt_out(states, 0, 1, {"a": ONES})
    assert why in str(error.value)


def test_a_step_that_sends_all_takes_no_such_state() -> None:
    model = torch.nn.Linear(5, 4)
    options: Mapping[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "backend": "eager"}
    with (
        mirrorc.compile(model, 1, loss_fn=torch.nn.CrossEntropyLoss(), **options) as step,
        pytest.raises(ValueError, match=r"this step sends all of its gradients, and would never add what it is given"),
    ):
        step.load_unsent_states([step.unsent_state()])


def test_one_worker_takes_what_is_nothing_and_refuses_what_it_would_never_add() -> None:
    model = torch.nn.Linear(5, 4)
    options: Mapping[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "backend": "eager"}
    loss_fn = torch.nn.CrossEntropyLoss()
    with mirrorc.compile(model, 1, loss_fn=loss_fn, compression=mirrorc.TopK(0.5), **options) as step:
        step.load_unsent_states([step.unsent_state()])
        states = [{"rank": rank, "num_workers": 2, "unsent": {"weight": torch.ones(4, 5)}} for rank in range(2)]
        with pytest.raises(ValueError, match="one worker alone sends nothing, and would never add it"):
            step.load_unsent_states(states)
