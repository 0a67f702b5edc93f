"""What a step has chosen by measurement is kept with a checkpoint, and taken over by a later start."""

import json
from typing import Any

import pytest
import torch
from planned_steps import step_of_world
from torch import nn

import mirrorc
from mirrorc import World

MIDDLE = {"devices_per_worker": [1, 1], "sent_as_factors": ["2.weight"]}


def made(**options: Any) -> mirrorc.Step:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(4096, 64), nn.Flatten(), nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 4))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    given = {"loss_fn": nn.CrossEntropyLoss(), "backend": "eager", **options}
    return step_of_world(net, world=World(2), optimizer=optimizer, **given)


def prepare(step: mirrorc.Step) -> mirrorc.ir.program.Program:
    return step.prepare(torch.randint(4096, (8, 2)), target=torch.zeros(8, dtype=torch.int64))


@pytest.mark.slow
def test_how_gradients_are_sent_is_as_it_was() -> None:
    with made() as first, made() as later:
        assert first.state_dict()["sent_as_factors"] is None
        measured = prepare(first)
        assert set(first.state_dict()["sent_as_factors"]) == {"0.weight", "2.weight"}
        later.load_state_dict(json.loads(json.dumps(MIDDLE)))
        assert later.state_dict() == MIDDLE
        program = prepare(later)
        assert program.workers.sent_as_factors == ("2.weight",) != measured.workers.sent_as_factors
        assert "how workers send gradients (as in the state that was loaded;" in str(program)
        assert "0.weight whole" in str(program) and later.state_dict() == MIDDLE
        later.load_state_dict(MIDDLE)  # as it is already
        with pytest.raises(
            mirrorc.ExecutionError, match="the step had chosen another sent_as_factors already: load it be"
        ):
            later.load_state_dict(first.state_dict())


@pytest.mark.slow
def test_what_others_have_chosen_is_left_aside() -> None:
    with made() as step, made(exchange="dense") as dense:
        step.load_state_dict({**MIDDLE, "devices_per_worker": [1, 1, 1]})
        assert set(prepare(step).workers.sent_as_factors) == {"0.weight", "2.weight"}
        dense.load_state_dict(MIDDLE)
        assert not prepare(dense).workers.sent_as_factors, "it is told how to send"


def test_measured_sizes_of_an_earlier_version_are_refused_by_name() -> None:
    sizes = {"bucket_cap_mb": 4.0, "first_bucket_mb": 1.0}
    with made() as step:
        with pytest.raises(
            ValueError, match=r"has bucket_cap_mb=4.0, first_bucket_mb=1.0, .* give communication=mirrorc.Comm"
        ):
            step.load_state_dict({**MIDDLE, **sizes})
        step.load_state_dict({**MIDDLE, **dict.fromkeys(sizes)})  # that version had measured none
        assert step.state_dict() == MIDDLE


@pytest.mark.parametrize(
    ("state", "error", "text"),
    [
        ([], TypeError, r"a step's state is a dict, as step\.state_dict\(\) gives it, not a list"),
        ({"0.weight": 1}, ValueError, "a step's state has the keys .*; this one has 0.weight: give what step"),
        (
            {**MIDDLE, "sent_as_factors": 3},
            TypeError,
            "sent_as_factors of a step's state is 3: it is a list of names, or None",
        ),
    ],
)
def test_what_is_no_state_of_a_step_is_refused(state: Any, error: type[Exception], text: str) -> None:
    with made() as step, pytest.raises(error, match=text):
        step.load_state_dict(state)
