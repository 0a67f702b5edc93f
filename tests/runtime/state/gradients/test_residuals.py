"""What a worker has not sent of its gradients: laid out for programs, kept over steps that take place, dealt out to others."""

import math
import warnings
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, Weight, handmade

import mirrorc
from mirrorc import World
from mirrorc.calls.training_state import unsent_of_worker
from mirrorc.ir.program import Program
from mirrorc.options.table import grouped
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.runtime.state.gradients.residuals import UnsentGradients
from mirrorc.runtime.workers.buckets.payload import LargestElements, places_of_largest

ONES = torch.ones(300)


def program_of(*names: str, **options: Any) -> Program:
    captured = handmade(1, [Weight(name, (300,)) for name in names]).evolve(workers=World(2).worker(0))
    given = {**SMALL_BUCKETS, "compression": mirrorc.TopK(0.1), **options}
    return run_passes(captured, default_pipeline(over_workers=True, **given))


def step(unsent: UnsentGradients, program: Program, scale: float = 1.0, gradient: float = 1.0) -> None:
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


def test_a_step_that_has_failed_leaves_its_state_of_payloads_to_no_later_one() -> None:
    unsent, program = UnsentGradients(torch.device("cpu")), program_of("a")
    for value, takes_place in ((1.0, True), (torch.nan, False), (None, True)):
        step(unsent, program)
        _, new = unsent.states
        new.update({"a": torch.full((1,), value)} if value is not None else {})
        if takes_place:
            unsent.finish()
            unsent.finish()  # may be repeated
        assert unsent.state_values() == {"a": torch.ones(1)}
    other = program_of("a", "b")
    step(unsent, other)
    assert unsent.states[0] == {"a": torch.ones(1)}, "other buckets go on with it"


def test_what_is_forgotten_is_kept_no_more() -> None:
    unsent, program = UnsentGradients(torch.device("cpu")), program_of("a")
    step(unsent, program)
    unsent.finish()
    unsent.load(unsent.values(), {"a": torch.ones(3, 1)})
    unsent.forget()
    assert unsent.values() == {} and unsent.state_values() == {}
    unsent.fit(program)
    assert set(sums(unsent).values()) == {0.0}


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
        program_of("a", "b", buckets=math.inf),
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
        message.copy_(found.message)
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


def state_of(rank: int, num_workers: int, **unsent: Any) -> dict[str, Any]:
    return {"rank": rank, "num_workers": num_workers, "unsent": unsent, "state": {}}


@pytest.mark.parametrize("number", [1, 2, 3, 4])
def test_what_all_have_together_is_dealt_out(number: int) -> None:
    states = [state_of(rank, 3, a=ONES * (rank + 1)) for rank in (2, 0, 1)]
    found = [unsent_of_worker(states, rank, number, {"a": ONES})[0] for rank in range(number)]
    assert sum(own.get("a", ONES * 0) for own in found).tolist() == [6.0] * 300  # type: ignore[union-attr]
    if number == 3:
        assert [own["a"][0].item() for own in found] == [1.0, 2.0, 3.0]


@pytest.mark.parametrize(
    ("states", "why"),
    [
        (
            [{**state_of(0, 1), "state": {"b": ONES}}],
            "had a state of the payload of 'b', which does not fit\n  why:  it is no tensor for a parameter",
        ),
        (
            [state_of(0, 2)],
            "of the ranks 0 of runs with 2 workers, so some gradients would be lost or added twice\n"
            "  fix:  give a list with what step.state_dict",
        ),
        ([state_of(0, 2), state_of(0, 2)], "would be lost or added twice"),
        ([state_of(0, 2), state_of(1, 3)], "of runs with 2, 3 workers"),
        (
            [state_of(0, 1, b=ONES)],
            "of 'b', and its rest does not fit\n  why:  it is no tensor like this model's parameter (no such parameter)",
        ),
        (
            [state_of(0, 1, a=torch.ones(2))],
            "parameter ([300] of torch.float32)\n  fix:  give states of a run of this model",
        ),
    ],
)
def test_other_states_are_refused(states: Any, why: str) -> None:
    with pytest.raises(ValueError) as error:
        unsent_of_worker(states, 0, 1, {"a": ONES})
    assert why in str(error.value)


@pytest.mark.parametrize("compression", [None, mirrorc.TopK(0.5)])
def test_what_a_step_would_never_send_is_lost_with_a_warning(compression: mirrorc.TopK | None) -> None:
    model = torch.nn.Linear(5, 4)
    options: Mapping[str, Any] = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "backend": "eager"}
    loss_fn = torch.nn.CrossEntropyLoss()
    with mirrorc.compile(model, 1, loss_fn=loss_fn, **grouped({"compression": compression, **options})) as step:
        state = step.state_dict()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step.load_state_dict(state)
        own = {"rank": 1, "num_workers": 2, "unsent": {"weight": torch.ones(4, 5)}}
        with pytest.warns(UserWarning, match="gradients that 2 workers had not sent, .* they are lost"):
            step.load_state_dict([state, {**state, "worker": {**state["worker"], **own}}])
