import pytest
import torch
from tiny_programs import MUON, SMALL_BUCKETS, Weight, handmade, run_up_to

from mirrorc.ir.devices import Device
from mirrorc.ir.program import Program
from mirrorc.passes import LowerCollectives

MIXED = [Weight("a", rule=MUON), Weight("b")]


def on_devices(*names: str, link: str | None = None) -> Program:
    program = run_up_to("schedule-overlap", handmade(len(names), MIXED), **SMALL_BUCKETS)
    devices = tuple(Device(name, torch.device(name.split("/")[0])) for name in names)
    return LowerCollectives(link=link).run(program.evolve(devices=devices))


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
    said = f"MC1104: link='{link}' cannot join {', '.join(names)}\n  why:  {why}\n  fix:  link={others}, or None for the best"
    with pytest.raises(ValueError, match=f"^{said}$"):
        on_devices(*names, link=link)
