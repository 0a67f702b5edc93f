"""Workers exchange proposals in a training call alone, once, and in one order."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from planned_steps import step_of_world
from tiny_programs import captured_model
from torch import nn

from mirrorc.capture.front_ends.front_end import front_end_named
from mirrorc.compilation.choices.worker_choices import WorkerChoices
from mirrorc.ir.program import Program
from mirrorc.ir.workers import World

WORKER = World(2).worker(1)


class Control:
    """All workers propose the same, but for the number of rows of factors that the chief has."""

    def __init__(self, rows_of_chief: int) -> None:
        self.rows_of_chief, self.subjects = rows_of_chief, list[str]()

    def first_texts(self, subject: str, text: str) -> list[str]:
        self.subjects.append(subject)
        proposal = json.loads(text)
        if subject == "factors":
            proposal["rows"] = dict.fromkeys(proposal["rows"], self.rows_of_chief)
        return [json.dumps(proposal), text]

    def raising_alike(self) -> AbstractContextManager[None]:
        return nullcontext()


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 3))


def captured() -> Program:
    return captured_model(model(), 1, rows=4, columns=512, front_end=front_end_named("dynamo"), workers=WORKER)


def choices_with(control: Control) -> WorkerChoices:
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with step_of_world(net, world=World(2), optimizer=optimizer, loss_fn=nn.MSELoss()) as step:
        options = replace(step._options, program_workers=WORKER)
    team: Any = SimpleNamespace(control=control, link=None)
    return WorkerChoices(options, 1, team)


def test_nothing_is_sent_outside_of_a_call() -> None:
    control = Control(4)
    choices = choices_with(control)
    program = choices.put_into(captured())
    choices.settle(program)
    assert choices.apply_to(program) and not control.subjects
    assert program.workers.sent_as_factors == ("0.weight",)
    assert any("as if all workers had as many examples" in one.text for one in program.remarks)


@pytest.mark.slow
def test_proposals_are_sent_once_in_one_order() -> None:
    control = Control(4)
    choices = choices_with(control)
    early = choices.put_into(captured())
    with choices.in_call():
        for _ in range(2):
            choices.settle(early)
            choices.put_into(captured())
    assert control.subjects == ["the order of gradients", "factors"]
    assert choices.apply_to(early), "the workers have decided as this one would alone"


def test_what_was_compiled_by_another_decision_does_not_stay() -> None:
    control = Control(rows_of_chief=10**6)
    choices = choices_with(control)
    early = choices.put_into(captured())
    with choices.in_call():
        assert choices.apply_to(early) and not control.subjects, "a question sends nothing"
        choices.settle(early)
        assert not choices.apply_to(early)
        program = choices.put_into(captured())
    assert program.workers.sent_as_factors == () and choices.apply_to(program)
