"""Workers take gradients in the chief's order, told at the first training call."""

import json
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_programs import SMALL_BUCKETS, captured_model, every_stage, outputs
from torch import nn

from mirrorc.capture.eager.autograd_front_end import AutogradFrontEnd
from mirrorc.capture.front_ends.front_end import front_end_named
from mirrorc.compilation.choices.gradient_order import ChiefGradientOrder
from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.ir.workers import World
from mirrorc.passes import PlanBuckets
from mirrorc.verifier.verifier import verify

READY = ("2.bias", "2.weight", "0.bias", "0.weight")
OTHER = ("0.weight", "2.weight", "2.bias", "0.bias")


class Control:
    def __init__(self, chief: Sequence[str]) -> None:
        self.chief, self.told = chief, list[str]()

    def first_texts(self, about: str, text: str) -> list[str]:
        assert about == "the order of gradients"
        self.told.append(text)
        return [json.dumps(self.chief), text]

    def raising_alike(self) -> AbstractContextManager[None]:
        return nullcontext()


def plain(*, evaluates: bool = False, front_end: Any = None) -> Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    front_end = AutogradFrontEnd() if front_end is None else front_end
    return captured_model(model, 1, front_end=front_end, evaluates=evaluates, workers=World(2).worker(1))


class Attention(nn.Module):
    """Attends over an example's numbers, which gives a graph for one example that is another one than for several."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.attention, self.head = (
            nn.Linear(1, 4),
            nn.MultiheadAttention(4, 2, batch_first=True),
            nn.Linear(4, 3),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words(x.unsqueeze(2))
        return self.head(self.attention(words, words, words, need_weights=False)[0].mean(1))


def attending(rows: int) -> Program:
    torch.manual_seed(0)
    return captured_model(Attention(), 1, rows, front_end=front_end_named("dynamo"), workers=World(2).worker(1))


def order_with(chief: Sequence[str] | None) -> tuple[ChiefGradientOrder, Control]:
    control = Control(chief or ())
    team: Any = SimpleNamespace(control=control) if chief is not None else None
    options: Any = SimpleNamespace(program_workers=World(2).worker(1))
    return ChiefGradientOrder(options, team), control


def put_into(order: ChiefGradientOrder, program: Program, *, in_call: bool = True) -> Program:
    order.consider(program, in_call=in_call)
    return order.noted_in(program)


def taken(program: Program) -> tuple[str, ...]:
    (graph,) = program.shard_graphs
    names = {node: name for name, node in graph.output_node().args[0]["gradients"].items()}  # type: ignore[union-attr, index, call-overload]
    assert list(names) == [node for node in graph.nodes if node in names], "the output lists them in program order"
    return tuple(names[node] for node in calls_to(graph, take_gradient))


def listed(program: Program) -> tuple[str, ...]:
    return tuple(outputs(program.shard_graphs[0])["gradients"])


def test_gradients_are_in_the_order_in_which_backward_makes_them() -> None:
    assert [name.removeprefix("model.") for name in taken(plain())] == list(READY)


def test_all_go_by_the_chief() -> None:
    order, words = order_with(OTHER)
    program = put_into(order, plain())
    assert put_into(order, plain()).workers.gradient_order == OTHER
    assert taken(program) == program.workers.gradient_order == OTHER
    assert words.told == [json.dumps(READY)], "each tells its own order once"
    verify(program)
    slots = [slot.variable for bucket in PlanBuckets().run(program).buckets for slot in bucket.slots]
    assert slots == list(OTHER)


@pytest.mark.slow
def test_what_was_compiled_before_workers_could_be_asked_is_kept_if_it_is_in_order() -> None:
    for chief in (OTHER, READY):
        order, words = order_with(chief)
        early = put_into(order, plain(), in_call=False)
        assert (taken(early), words.told) == (READY, [])
        assert order.applies_to(early)
        assert words.told == [], "it is asked, and tells nothing"
        order.settle()
        assert order.applies_to(early) is (chief == READY)
        assert order.applies_to(put_into(order, plain()))
        assert len(words.told) == 1


def test_what_the_chief_does_not_name_comes_behind_in_an_order_that_all_have() -> None:
    """As parameters that were frozen when it told, whatever the order of this worker's run."""
    others, _ = order_with(OTHER)
    order, _ = order_with(["2.bias"])
    program = put_into(others, plain())
    assert taken(program) == OTHER
    assert taken(put_into(order, program)) == ("2.bias", "2.weight", "0.weight", "0.bias")


@pytest.mark.slow
def test_what_the_chief_does_not_name_comes_by_the_numbers_of_layers() -> None:
    """Layer 10 before layer 9, as in backward; by names alone, which all workers have, and not as variables are read."""
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(12)))
    program = captured_model(model, 1, front_end=front_end_named("dynamo"), workers=World(2).worker(1))
    turned = program.evolve(variables=dict(reversed(program.variables.items())))
    for own in (program, turned):
        order, _ = order_with(["3.weight"])
        others = [f"{layer}.weight" for layer in reversed(range(12)) if layer != 3]
        assert listed(put_into(order, own)) == ("3.weight", *others)


@pytest.mark.slow
def test_gradients_of_compiled_graphs_are_in_the_order_of_the_chief_too() -> None:
    order, words = order_with(OTHER)
    program = plain(front_end=front_end_named("dynamo"))
    assert listed(program) != OTHER
    early = put_into(order_with(None)[0], program)
    ordered = put_into(order, program)
    assert order.applies_to(ordered) and not order.applies_to(early)
    assert listed(ordered) == ordered.workers.gradient_order == OTHER
    assert words.told == [json.dumps(listed(program))]
    before, after = ([node.name for node in own.shard_graphs[0].nodes] for own in (program, ordered))
    assert before == after, "no operator is moved"


@pytest.mark.slow
def test_evaluations_stay_as_they_are_and_tell_nothing() -> None:
    order, words = order_with(OTHER)
    program = plain(evaluates=True, front_end=front_end_named("dynamo"))
    assert put_into(order, program) is program and order.applies_to(program)
    assert not words.told


@pytest.mark.slow
@pytest.mark.parametrize(("chief", "own"), [(1, 4), (4, 1)])
def test_attention_over_one_example_has_the_buckets_of_several(chief: int, own: int) -> None:
    """Each gradient has a bucket, and those whose places differ are launched in one order."""
    theirs, program = attending(chief), attending(own)
    assert sorted(listed(theirs)) == sorted(listed(program)) and listed(theirs) != listed(program)
    order, _ = order_with(listed(theirs))
    ordered = put_into(order, program)
    *_, expected = every_stage(theirs, over_workers=True, **SMALL_BUCKETS).values()
    *_, found = every_stage(ordered, over_workers=True, **SMALL_BUCKETS).values()
    assert found.buckets == expected.buckets and len(found.buckets) == len(listed(program))
    verify(found)


@pytest.mark.slow
def test_a_world_that_is_not_there_has_the_order_of_its_own_run() -> None:
    order, _ = order_with(None)
    assert taken(put_into(order, plain())) == READY
