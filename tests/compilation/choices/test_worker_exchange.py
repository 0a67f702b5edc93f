"""How workers send each gradient is chosen from figures that all of them have."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from planned_steps import step_of_world
from torch import nn

from mirrorc import World
from mirrorc.analysis.communication.worker_meetings import worker_schedule
from mirrorc.analysis.cost.link_speed import Candidate
from mirrorc.compilation.choices.exchange_decision import Figures, choose_sent_as_factors
from mirrorc.errors import CommunicationError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.ir.workers import Workers
from mirrorc.options.communication import Exchange

WIDE = Candidate("wide", num_bytes=2048 * 2048 * 4, row_bytes=2 * 2048 * 4, num_rows=64, work_per_row=2048 * 2048)
NARROW = replace(WIDE, variable="narrow", num_bytes=2048 * 4)
MACHINE = {"processor": "one"}


def figures(rows: int, **more: Any) -> Figures:
    return Figures({"wide": rows, "narrow": rows}, MACHINE, **more)


def names(*everyone: Figures, exchange: Exchange = "auto") -> tuple[str, ...]:
    return choose_sent_as_factors([WIDE, NARROW], everyone, Workers((1,) * len(everyone)), exchange)[0]


def test_fewer_bytes_are_sent() -> None:
    assert [one.num_bytes for one in WIDE.messages([64, 64], is_dealt=False)] == [2**24, 2**20]  # 16 MiB against 1 MiB
    assert names(figures(64), figures(64)) == ("wide",)
    assert names(figures(1024), figures(1)) == ()  # all are padded to the longest
    assert names(figures(64), figures(64), exchange="factors") == ("wide", "narrow")


def test_a_fast_link_sends_more_to_multiply_less() -> None:
    slow, fast = ({"seconds_per_byte": 8 / bits, "seconds_per_multiplication": 2e-11} for bits in (2e9, 4e11))
    assert names(figures(64, **slow), figures(64, **slow)) == ("wide",)
    assert names(figures(64, **fast), figures(64, **fast)) == ()
    assert names(figures(64, **fast), figures(64, **slow)) == ("wide",)  # the slowest link counts


def test_what_the_chief_has_loaded_counts() -> None:
    assert names(figures(64, loaded=["narrow"]), figures(64)) == ("narrow",)
    assert names(figures(64), figures(64, loaded=["narrow"])) == ("wide",)
    assert names(figures(64, loaded=[]), figures(64)) == ()
    assert names(figures(64, loaded=[]), figures(64), exchange="factors") == ("wide", "narrow")


def test_machines_that_differ_send_whole_gradients() -> None:
    other = replace(figures(64), machine={"processor": "another"})
    assert choose_sent_as_factors([WIDE], [figures(64), other], Workers((1, 1)), "auto") == (
        (),
        "workers send all gradients whole, none as factors: workers 0 and 1 differ in processor: one and another, and bits of a "
        "product may depend on it",
    )
    assert (
        "worker 0 has 1 device, worker 1 has 2"
        in choose_sent_as_factors([WIDE], [figures(64)] * 2, Workers((1, 2)), "auto")[1]
    )
    with pytest.raises(CommunicationError, match=r"(?s)workers 0 and 1 differ in processor.*No parameter was changed"):
        choose_sent_as_factors([WIDE], [figures(64), other], Workers((1, 1)), "factors")


def test_parts_of_a_gradient_are_sent_once_and_made_on_any_machine() -> None:
    assert [one.num_bytes for one in WIDE.messages([64, 64], is_dealt=True)] == [2**23, 2**20]
    two, other = Workers((1, 2), shards_optimizer=True), replace(figures(64), machine={"processor": "another"})
    assert choose_sent_as_factors([WIDE], [figures(64), other], two, "auto")[0] == ("wide",)
    rows = 640  # 10 MiB of factors, against 8 MiB of sums of parts, or 16 MiB of whole sums
    assert names(figures(rows), figures(rows)) == ("wide",)
    assert choose_sent_as_factors([WIDE], [figures(rows)] * 2, Workers((1, 1), shards_optimizer=True), "auto")[0] == ()


def test_a_worker_multiplies_for_its_part_alone() -> None:
    link = {
        "seconds_per_byte": 8 / 1.2e10,
        "seconds_per_multiplication": 2e-11,
    }  # 15 ms less to send, 38 ms more to multiply
    everyone = [figures(64, **link)] * 8
    assert names(*everyone) == ()
    assert choose_sent_as_factors([WIDE], everyone, Workers((1,) * 8, shards_optimizer=True), "auto")[0] == ("wide",)


def model() -> nn.Module:
    return nn.Sequential(nn.Embedding(4096, 64), nn.Flatten(), nn.Linear(128, 2048), nn.ReLU(), nn.Linear(2048, 4))


def prepared(devices: int = 1, rank: int = 0, num_examples: int = 8, **options: object) -> Program:
    torch.manual_seed(0)
    net = model()
    given = {"optimizer": torch.optim.SGD(net.parameters(), lr=0.1), "loss_fn": nn.CrossEntropyLoss(), **options}
    with step_of_world(net, world=World(2, devices), rank=rank, backend="eager", **given) as step:
        step.prepare(torch.randint(4096, (num_examples, 2)), target=torch.zeros(num_examples, dtype=torch.int64))
        assert step.memory().total > 0
        return step.program


@pytest.mark.slow
@pytest.mark.parametrize("devices", [1, 2])
def test_large_products_and_tables_get_buckets_of_their_own(devices: int) -> None:
    program = prepared(devices)
    sent = {slot.variable for bucket in program.buckets if bucket.is_sent_as_factors for slot in bucket.slots}
    assert sent == {"0.weight", "2.weight"} == set(program.workers.sent_as_factors)
    for module in program.device_graphs.values():
        assert len(list(calls_to(module.graph, ops.gather_factors))) == sum(
            b.is_sent_as_factors for b in program.buckets
        )
    told = str(program)
    assert "0.weight as factors (4.1 KiB against 1.0 MiB)" in told and "others whole" in told
    assert worker_schedule(program) == worker_schedule(prepared(devices, rank=1))


@pytest.mark.slow
def test_all_are_sent_as_asked() -> None:
    dense, factors = prepared(exchange="dense"), prepared(exchange="factors")
    assert not dense.workers.sent_as_factors and "how workers send" not in str(dense)
    assert factors.workers.sent_as_factors == ("4.weight", "2.weight", "0.weight")
    assert worker_schedule(dense) != worker_schedule(factors)


@pytest.mark.slow
def test_devices_that_read_no_others_memory_have_whole_sums_to_send() -> None:
    assert not prepared(2, link="copy").workers.sent_as_factors
    assert prepared(1, link="copy").workers.sent_as_factors == ("2.weight", "0.weight"), "a device alone has factors"
    with pytest.raises(
        ValueError,
        match=r"exchange='factors' cannot be used on cpu:0, cpu:1\n  why:  over link='copy', no device reads",
    ):
        prepared(2, link="copy", exchange="factors")


def test_factors_need_what_makes_them() -> None:
    with pytest.raises(
        ValueError, match=r"(?s)cannot be used with this pipeline.*the pass 'factor-gradients'.*exact_order=True"
    ):
        prepared(exchange="factors", exact_order=True)
    with pytest.raises(ValueError, match="exchange='factors' cannot be used over workers that have different numbers"):
        net = model()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        step_of_world(
            net, world=World(2, (1, 2)), optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), exchange="factors"
        )
