"""What `mirrorc.plan` takes: batches of all forms, and workers that are not there."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import mirrorc
from mirrorc import World

X, Y = torch.zeros(8, 4), torch.zeros(8, dtype=torch.int64)


def planned(batch: Any = (X, Y), *devices: Any, **options: Any) -> mirrorc.Program:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    given = {
        "optimizer": optimizer,
        "loss_fn": F.cross_entropy,
        "compiler": mirrorc.Compiler(backend="eager"),
        **options,
    }
    try:
        return mirrorc.plan(model, batch, *devices, **given)
    finally:
        assert all(map(torch.equal, before, model.parameters())) and not optimizer.state


@pytest.mark.slow
def test_a_batch_is_a_tuple_a_dict_or_a_pair_of_both() -> None:
    pair, of_names = ((X,), {"target": Y}), {"input": X, "target": Y}
    expected = planned(pair, 2)
    assert expected.stage.name == "LOWERED" and len(expected.devices) == 2
    assert str(planned(of_names, ["cpu:0", "cpu:1"])) == str(expected)
    assert str(planned((X, Y), devices=2)) == str(planned(pair, devices=2)) == str(expected)
    assert str(planned(of_names)) != str(expected)


@pytest.mark.slow
def test_a_tuple_is_of_positional_arguments() -> None:
    class Loss(nn.Linear):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(super().forward(x), y)

    model = Loss(4, 3)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "compiler": mirrorc.Compiler(backend="eager")}
    assert str(mirrorc.plan(model, (X, Y), 2, **given)) == str(mirrorc.plan(model, {"x": X, "y": Y}, 2, **given))


@pytest.mark.slow
def test_it_is_the_program_that_a_step_compiles() -> None:
    model = nn.Linear(4, 3)
    optimizer, eager = torch.optim.SGD(model.parameters(), lr=0.1), mirrorc.Compiler(backend="eager")
    given = {"optimizer": optimizer, "loss_fn": F.cross_entropy, "compiler": eager}
    with mirrorc.compile(model, 2, **given) as step:
        prepared = str(step.prepare(X, target=Y))
    assert str(mirrorc.plan(model, ((X,), {"target": Y}), 2, **given)) == prepared


@pytest.mark.slow
def test_each_worker_of_a_world_has_its_program() -> None:
    for rank, told in enumerate(
        ("1 device · 1 bucket · worker 0 of 2, replica 0", "2 devices · 1 bucket · worker 1 of 2")
    ):
        program = planned({"input": X, "target": Y}, world=World(2, (1, 2)), rank=rank)
        assert told in str(program).splitlines()[0]
        assert len(program.devices) == rank + 1


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        ({"batch": X}, TypeError, r"batch is a Tensor: give a tuple, \(x, y\), or a dict of keyword arguments"),
        ({"batch": [X, Y]}, TypeError, r"batch is a list: give a tuple"),
        ({"world": 3}, TypeError, r"world is 3: give mirrorc\.World\(num_workers=2\), or None"),
        ({"rank": 1}, ValueError, r"rank=1 needs world=\n  fix:  mirrorc\.plan"),
        (
            {"world": World(3), "rank": 3},
            ValueError,
            "rank is 3, but the world has 3 workers\n  fix:  give a number from 0 to 2",
        ),
        ({"world": World(3), "rank": -1}, ValueError, "rank is -1, but the world has 3 workers"),
        ({"world": World(3), "rank": "1"}, TypeError, "rank is '1', but the world has 3 workers"),
        ({"world": World(3), "rank": 1.5}, TypeError, "rank is 1.5, but the world has 3 workers"),
        ({"world": World(2, 2), "devices": 1}, ValueError, "devices= lists 1 device, but worker 0 of the World has 2"),
        ({"exchange": "factors"}, TypeError, "'exchange' is a field of a group\n  fix:  communication="),
        ({"microbatch": 2}, TypeError, "unexpected keyword argument 'microbatch'"),
    ],
)
def test_what_it_cannot_take_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        planned(**options)
