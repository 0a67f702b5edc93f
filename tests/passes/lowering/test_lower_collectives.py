import operator

import pytest
import torch
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, run_up_to, targets

from mirrorc.ir import ops
from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.passes import LowerCollectives

MIXED = [Weight("a", rule=MUON), Weight("b")]


def on_devices(*names: str, link: str | None = None) -> Program:
    program = run_up_to("schedule-overlap", handmade(len(names), MIXED), **SMALL_BUCKETS)
    devices = tuple(Device(name, torch.device(name.split("/")[0])) for name in names)
    return LowerCollectives(link=link).run(program.evolve(devices=devices))


def links(program: Program) -> set[tuple[str, object]]:
    nodes = targets(program.mirrored_graph, *ops.COLLECTIVES, ops.send, ops.recv)
    return {(n.target.__name__, n.kwargs["link"]) for n in nodes}


def all_links(reduction: str, parameters: str) -> set[tuple[str, object]]:
    return {("all_reduce", reduction), ("send", parameters), ("recv", parameters)}


def said(program: Program) -> str:
    return program.remarks[-1].text


def test_logical_cpus_share_memory() -> None:
    program = run_up_to("lower-collectives", handmade(2, MIXED), **SMALL_BUCKETS)
    assert links(program) == all_links("shared-memory", "shared-memory")
    assert said(program) == (
        "link shared-memory: the best for these devices; nothing moves before the wait, which does all the work"
    )


def test_distinct_gpus_reduce_by_nccl() -> None:
    program = on_devices("cuda:0", "cuda:1")
    assert links(program) == all_links("nccl", "copy")
    assert said(program) == "link nccl: the best for these devices"


def test_logical_devices_on_one_gpu_copy_and_say_why() -> None:
    program = on_devices("cuda:0", "cuda:0/1")
    assert links(program) == all_links("copy", "copy")
    assert said(program).startswith("link copy instead of nccl: some devices share one GPU; nothing moves")


def test_a_link_that_was_asked_for_is_used_and_said() -> None:
    program = on_devices("cpu:0", "cpu:1", link="copy")
    assert links(program) == all_links("copy", "copy")
    assert said(program).startswith("link copy: asked for; nothing moves")


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_broadcast_becomes_a_send_and_a_receipt_for_each_other_replica(num_devices: int) -> None:
    graph = run_up_to("lower-collectives", handmade(num_devices, MIXED), **SMALL_BUCKETS).mirrored_graph
    (step,) = targets(graph, ops.step_optimizer)
    (bucket,) = step.kwargs["buckets"]
    others = range(1, num_devices)
    link = {"link": "shared-memory"}
    sends, receipts = targets(graph, ops.send), targets(graph, ops.recv)
    (parameters,) = step.users
    assert parameters.target is operator.getitem and parameters.args == (step, 0)
    assert [n.args for n in sends] == [(parameters,)] * len(others)
    assert [n.kwargs for n in sends] == [{"bucket": bucket, "destination": r, "replica": 0, **link} for r in others]
    assert [n.kwargs for n in receipts] == [{"bucket": bucket, "source": 0, "replica": r, **link} for r in others]
    for replica, receipt in zip(others, receipts, strict=True):
        (wait,) = receipt.users
        (store,) = wait.users
        assert wait.target is ops.wait and wait.kwargs == {"bucket": bucket, "replica": replica}
        assert store.target is ops.store and store.kwargs == {"bucket": bucket, "replica": replica}
        assert isinstance(receipt.meta["val"], ops.Pending)
        assert receipt.meta["val"].value.shape == wait.meta["val"].shape
    waits = [n.kwargs["replica"] for n in targets(graph, ops.wait) if n.kwargs["bucket"] == bucket]
    assert sorted(waits) == sorted([*range(num_devices), *others])  # for the sum, and for the parameters


def test_nothing_but_the_link_changes() -> None:
    before = run_up_to("schedule-overlap", handmade(2), **SMALL_BUCKETS)
    after = LowerCollectives().run(before)
    assert str(after.mirrored_graph).replace(", link: shared-memory", "") == str(before.mirrored_graph)


def test_an_unknown_link_is_refused() -> None:
    with pytest.raises(ValueError, match=r"link is 'smoke-signals': give one of shared-memory, nccl, copy"):
        LowerCollectives(link="smoke-signals")


@pytest.mark.parametrize(
    ("names", "link", "why", "others"),
    [
        (("cpu:0", "cpu:1"), "nccl", "it joins GPUs", "'shared-memory' or 'copy'"),
        (("cuda:0", "cuda:1"), "shared-memory", "it joins logical CPUs", "'nccl' or 'copy'"),
        (("cuda:0", "cuda:0/1"), "nccl", "some devices share one GPU", "'copy'"),
    ],
)
def test_a_link_that_cannot_join_the_devices_is_refused(
    names: tuple[str, ...], link: str, why: str, others: str
) -> None:
    said = f"MC1104: link='{link}' cannot join {', '.join(names)}\n  why:  {why}\n  fix:  use {others}, or None for the best"
    with pytest.raises(ValueError, match=f"^{said}$"):
        on_devices(*names, link=link)


def test_what_one_device_sends_of_parameters_is_said() -> None:
    program = run_up_to("lower-collectives", handmade(3, [Weight("a", rule=MUON), Weight("b")]), **SMALL_BUCKETS)
    (said,) = [remark.text for remark in program.remarks if "sends all new parameters" in remark.text]
    (bucket,) = [bucket for bucket in program.buckets if not bucket.rule.elementwise]
    assert said == (
        f"bucket {bucket.index}: {bucket.rule.label} runs on one device, which sends all new parameters, "
        f"{bucket.num_bytes / 1024:.1f} KiB, to each of 2 other devices in a step"
    )
