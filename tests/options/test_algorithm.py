"""What ``algorithm`` of `mirrorc.Communication` takes, and what cannot be combined with it."""

from typing import Any

import pytest
import torch
from line import Line
from planned_steps import step_of_world
from torch import nn

import mirrorc
from mirrorc.all_reduce_algorithms import ReduceToOne, Ring
from mirrorc.ir.links import Link, register_link, unregister_link
from mirrorc.options.communication import algorithm_of
from mirrorc.options.table import grouped


def compiled(devices: int = 2, **options: Any) -> mirrorc.Step:
    model = nn.Linear(2, 1)
    given = {"optimizer": torch.optim.SGD(model.parameters(), lr=0.1), "loss_fn": nn.MSELoss(), "backend": "eager"}
    if "world" in options:
        return step_of_world(model, **given, **options)
    return mirrorc.compile(model, devices, **grouped({**given, **options}))


def test_an_algorithm_is_given_by_name_with_options_or_as_it_is() -> None:
    assert algorithm_of("ring") == Ring()
    assert algorithm_of("reduce-to-one{device=1,order=(1,0),dtype=torch.float64}") == ReduceToOne(
        device=1, order=(1, 0), dtype=torch.float64
    )
    assert algorithm_of(Ring()) == Ring()
    assert algorithm_of("line:Line") == Line()


@pytest.mark.parametrize(
    ("options", "error", "said"),
    [
        (
            {"algorithm": "star"},
            ValueError,
            "algorithm is 'star', which is no algorithm\n  fix:  give one of 'native', 'reduce-to-one', ",
        ),
        (
            {"algorithm": "ring,tree"},
            ValueError,
            "algorithm is 'ring,tree', which is no algorithm\n  fix:  give one of ",
        ),
        ({"algorithm": "ring{},tree"}, ValueError, "which is not one algorithm\n  fix:  give one of"),
        ({"algorithm": "ring{device=1}"}, ValueError, "the pass 'ring' does not take these options"),
        (
            {"algorithm": "nccl"},
            ValueError,
            "'nccl', which is a link and not an algorithm\n  fix:  communication=mirrorc.Communication\\(link='nccl'",
        ),
        ({"algorithm": 3}, TypeError, "algorithm is 3, which is no algorithm\n  fix:  give one of 'native'"),
        (
            {"algorithm": "tree{device=2}"},
            ValueError,
            "algorithm='tree' cannot be used on cpu:0, cpu:1\n  why:  device is 2",
        ),
        ({"algorithm": ReduceToOne(order=1)}, ValueError, "order is 1: name each device from 0 to 1 once"),  # type: ignore[arg-type]
        ({"algorithm": ReduceToOne(order=("a", 0))}, ValueError, r"order is \('a', 0\): name each device"),  # type: ignore[arg-type]
        (
            {"algorithm": "ring", "passes": ()},
            ValueError,
            r"algorithm='ring' and passes= cannot be combined\n  why:  .*\n  fix:  put mirrorc.all_reduce_algorithms.Ring\(\)",
        ),
        ({"algorithm": "ring", "disable": ["ring"]}, ValueError, "needs the pass 'ring', which disable= switches off"),
        (
            {"algorithm": "ring", "exact_order": True},
            ValueError,
            "cannot be used with exact_order=True\n  why:  replicas' gradients are added up in another order\n  "
            "fix:  algorithm='reduce-to-one'",
        ),
        (
            {"algorithm": ReduceToOne(dtype=torch.float64), "exact_order": True},
            ValueError,
            "sums are rounded from another dtype",
        ),
        (
            {"algorithm": "tree", "placement": "central"},
            ValueError,
            "algorithm='tree' cannot be used with placement='central'\n  why:  with a placement, each gradient "
            "is reduced to the owner",
        ),
        (
            {"algorithm": "ring", "world": mirrorc.World(2)},
            ValueError,
            "algorithm='ring' cannot be used over several workers\n  why:  it sums among the devices of one process",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        compiled(**options)


def test_a_link_that_carries_no_sends_is_refused() -> None:
    register_link(Link("no-sends", carries=()))
    try:
        with pytest.raises(
            ValueError, match=r"MC1104: link 'no-sends' does not carry send.*\n  why:  algorithm='ring' needs sends"
        ):
            compiled(link="no-sends", algorithm="ring")
    finally:
        unregister_link("no-sends")


def test_auto_may_be_asked_for_over_workers() -> None:
    compiled(world=mirrorc.World(2), algorithm="auto").close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"placement": "least-loaded"}, "each sum goes to the device that owns its parameters, and to no other"),
        ({"exact_order": True}, "exact_order=True asks for the order of replicas"),
        ({"placement": "mirrored"}, "up to 64.0 KiB, few messages count more than few bytes"),
    ],
)
def test_auto_says_why_it_chooses(options: dict[str, Any], why: str) -> None:
    with compiled(devices=3, link="copy", algorithm="auto", **options) as step:
        assert why in str(step.prepare(torch.zeros(6, 2), target=torch.zeros(6, 1)))
