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


def load(step: mirrorc.Step, choices: Any) -> None:
    step.load_state_dict({**step.state_dict(), "choices": choices})


def choices_of(step: mirrorc.Step) -> Any:
    return step.state_dict()["choices"]


@pytest.mark.slow
def test_how_gradients_are_sent_is_as_it_was() -> None:
    with made() as first, made() as later:
        assert choices_of(first)["sent_as_factors"] is None
        measured = prepare(first)
        assert set(choices_of(first)["sent_as_factors"]) == {"0.weight", "2.weight"}
        load(later, json.loads(json.dumps(MIDDLE)))
        assert choices_of(later) == MIDDLE
        program = prepare(later)
        assert program.workers.sent_as_factors == ("2.weight",) != measured.workers.sent_as_factors
        assert "how workers send gradients (as in the state that was loaded;" in str(program)
        assert "0.weight whole" in str(program) and choices_of(later) == MIDDLE
        load(later, MIDDLE)  # as it is already
        with pytest.raises(
            mirrorc.ExecutionError, match=r"which has chosen another sent_as_factors\n  fix:  step\.load_state_dict"
        ):
            load(later, choices_of(first))


@pytest.mark.slow
def test_what_others_have_chosen_is_left_aside() -> None:
    with made() as step, made(exchange="dense") as dense:
        load(step, {**MIDDLE, "devices_per_worker": [1, 1, 1]})
        assert set(prepare(step).workers.sent_as_factors) == {"0.weight", "2.weight"}
        load(dense, MIDDLE)
        assert not prepare(dense).workers.sent_as_factors, "it is told how to send"


@pytest.mark.parametrize(
    ("choices", "error", "text"),
    [
        ([], ValueError, r"(?s)'choices' is not a dict of devices_per_worker and sent_as_factors.*it is \[\]"),
        ({**MIDDLE, "sent_as_factors": 3}, TypeError, "'sent_as_factors' is not a list of names"),
    ],
)
def test_what_is_no_choice_is_refused(choices: Any, error: type[Exception], text: str) -> None:
    with made() as step, pytest.raises(error, match=text):
        load(step, choices)
