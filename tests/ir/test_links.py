from collections.abc import Sequence

import pytest
import torch

from mirrorc.ir import ops
from mirrorc.ir.devices import Device, have_shared_memory, parse_devices
from mirrorc.ir.links import (
    Link,
    best_link,
    carrier_of,
    check_link,
    link_named,
    link_names,
    register_link,
    unregister_link,
    why_memory_is_not_shared,
)
from mirrorc.passes import LowerCollectives


def devices(*names: str) -> tuple[Device, ...]:
    return tuple(Device(name, torch.device(name.split("/")[0])) for name in names)


CPUS, GPUS, ONE_GPU = devices("cpu:0", "cpu:1"), devices("cuda:0", "cuda:1"), devices("cuda:0", "cuda:0/1")


def test_devices_know_their_memory() -> None:
    assert [have_shared_memory(which) for which in (CPUS, GPUS, ONE_GPU, CPUS[:1])] == [True, False, True, True]
    assert {device.memory for device in parse_devices(2)} == {"cpu"}
    assert [device.is_asynchronous for device in (*CPUS, *GPUS)] == [False, False, True, True]


@pytest.mark.parametrize(
    ("which", "name", "remark"),
    [
        (CPUS, "shared-memory", ""),
        (GPUS, "nccl", ""),
        (ONE_GPU, "copy", "link copy instead of nccl: some devices share one GPU"),
    ],
)
def test_the_best_link_and_why_it_is_no_faster_one(which: Sequence[Device], name: str, remark: str) -> None:
    assert best_link(which) == (name, remark)
    check_link(name, which)


def test_parameters_are_shared_where_a_link_reads_one_memory() -> None:
    assert why_memory_is_not_shared(CPUS) == ""
    assert why_memory_is_not_shared(GPUS) == "the devices do not share one memory"
    assert why_memory_is_not_shared(ONE_GPU).startswith("no link lets the devices read")


def test_what_a_link_does_not_carry_goes_over_the_one_it_names() -> None:
    assert [carrier_of("nccl", operation) for operation in (ops.all_reduce, ops.send)] == ["nccl", "copy"]
    register_link(Link("deaf", carries=(ops.send,)))
    try:
        with pytest.raises(ValueError, match="'deaf' does not carry all_reduce and names no link that does"):
            carrier_of("deaf", ops.all_reduce)
    finally:
        unregister_link("deaf")


def test_a_name_is_one_links() -> None:
    register_link(link_named("copy"))  # the same once more
    with pytest.raises(ValueError, match="there is a link 'copy' already"):
        register_link(Link("copy", preference=5))


def test_a_link_is_known_until_it_is_unregistered() -> None:
    known = link_names()
    register_link(Link("pigeon", preference=9))
    try:
        assert link_names() == (*known, "pigeon") and LowerCollectives(link="pigeon").link == "pigeon"
        assert best_link(CPUS) == ("pigeon", "")
    finally:
        unregister_link("pigeon")
    assert link_names() == known
    with pytest.raises(ValueError, match=f"link is 'pigeon': give one of {', '.join(known)}, or None for the best"):
        check_link("pigeon", CPUS)
