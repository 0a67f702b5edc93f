"""What ``all_reduce=`` and ``communication_options=`` of `mirrorc.compile` take, and what cannot be combined with them."""

import re
from typing import Any

import pytest
import torch
from line import Line
from torch import nn

import mirrorc
from mirrorc.all_reduce_algorithms import ReduceToOne, Ring
from mirrorc.ir.links import Link, register_link, unregister_link
from mirrorc.options.all_reduce import algorithm_of
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes


def compiled(devices: int = 2, **options: Any) -> mirrorc.Step:
    model = nn.Linear(2, 1)
    placed = {} if "world" in options else {"devices": devices}
    return mirrorc.compile(
        model,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=nn.MSELoss(),
        **grouped({"backend": "eager", **placed, **options}),
    )


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
        ({"all_reduce": "star"}, ValueError, "all_reduce is 'star': give one of 'native', 'reduce-to-one', "),
        ({"all_reduce": "ring,tree"}, ValueError, "all_reduce is 'ring,tree': give one of "),
        ({"all_reduce": "ring{},tree"}, ValueError, "which is not one algorithm: give one of"),
        ({"all_reduce": "ring{device=1}"}, ValueError, "the pass 'ring' does not take these options"),
        ({"all_reduce": 3}, TypeError, "all_reduce is 3: give one of 'native'"),
        ({"all_reduce": "tree{device=2}"}, ValueError, "all_reduce='tree' cannot be used on cpu:0, cpu:1: device is 2"),
        ({"all_reduce": ReduceToOne(order=1)}, ValueError, "order is 1: name each device from 0 to 1 once"),  # type: ignore[arg-type]
        ({"all_reduce": ReduceToOne(order=("a", 0))}, ValueError, r"order is \('a', 0\): name each device"),  # type: ignore[arg-type]
        (
            {"all_reduce": "ring", "passes": ()},
            ValueError,
            r"all_reduce='ring' has no part in a pipeline given with passes=: put mirrorc.all_reduce_algorithms.Ring\(\)",
        ),
        (
            {"all_reduce": "ring", "disable": ["ring"]},
            ValueError,
            "asks for the pass 'ring', which disable_passes leaves out",
        ),
        (
            {"all_reduce": "ring", "exact_order": True},
            ValueError,
            "cannot be used with exact_order=True: replicas' gradients are added up in another order; leave out one",
        ),
        (
            {"all_reduce": ReduceToOne(dtype=torch.float64), "exact_order": True},
            ValueError,
            "sums are rounded from another dtype",
        ),
        (
            {"all_reduce": "tree", "placement": "central"},
            ValueError,
            "all_reduce='tree' cannot be used with placement='central': gradients are reduced to the device that owns",
        ),
        (
            {"all_reduce": "ring", "world": mirrorc.World(2)},
            ValueError,
            "all_reduce='ring' cannot be used over several workers: it makes sums of messages between the devices of one process",
        ),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        compiled(**options)


def test_a_link_that_carries_no_sends_is_refused() -> None:
    register_link(Link("no-sends", carries=()))
    try:
        with pytest.raises(ValueError, match="all_reduce='ring' needs sends: link 'no-sends' does not carry send"):
            compiled(link="no-sends", all_reduce="ring")
    finally:
        unregister_link("no-sends")


def test_auto_may_be_asked_for_over_workers() -> None:
    compiled(world=mirrorc.World(2), all_reduce="auto").close()


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"placement": "least-loaded"}, "each sum goes to the device that owns its parameters, and to no other"),
        ({"exact_order": True}, "exact_order=True asks for the order of replicas"),
        ({"placement": "mirrored"}, "up to 64.0 KiB, few messages count more than few bytes"),
    ],
)
def test_auto_says_why_it_chooses(options: dict[str, Any], why: str) -> None:
    with compiled(devices=3, link="copy", all_reduce="auto", **options) as step:
        assert why in str(step.prepare(torch.zeros(6, 2), target=torch.zeros(6, 1)))


def test_communication_options_stand_for_other_options() -> None:
    given = mirrorc.CommunicationOptions(bytes_per_pack=2**20, timeout_seconds=7.0, implementation="RING")
    assert given.options() == {"timeout_seconds": 7.0, "all_reduce": "ring", "buckets": ByBytes(1.0, 1.0)}  # fmt: skip
    assert mirrorc.CommunicationOptions(implementation="nccl").options() == {"link": "nccl"}
    assert mirrorc.CommunicationOptions().options() == {}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bytes_per_pack": -1}, "bytes_per_pack is -1: give a number of bytes"),
        ({"bytes_per_pack": 1.5}, "bytes_per_pack is 1.5"),
        ({"timeout_seconds": 0}, "timeout_seconds is 0: give a positive number"),
        ({"implementation": "mpi"}, "implementation is 'mpi': give one of 'auto', 'nccl', 'native'"),
    ],
)
def test_communication_options_refuse_what_they_do_not_know(given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=re.escape(said)):
        mirrorc.CommunicationOptions(**given)
    with pytest.raises(TypeError, match="implementation is 3: give a name"):
        mirrorc.CommunicationOptions(implementation=3)  # type: ignore[arg-type]


def test_communication_options_and_what_they_stand_for_are_not_both_given() -> None:
    given = mirrorc.CommunicationOptions(bytes_per_pack=4)
    said = r"bucket_cap_mb=1.0 and CommunicationOptions\(bytes_per_pack=4, .* say different things of bucket_cap_mb"
    with pytest.raises(ValueError, match=said):
        compiled(communication_options=given, buckets=1.0)
    with pytest.raises(TypeError, match=r"communication_options is 4: give mirrorc\.CommunicationOptions"):
        compiled(communication_options=4)
