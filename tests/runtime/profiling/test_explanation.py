"""Handmade records: what each figure is, exactly."""

import random
import re
from decimal import Decimal

import pytest
from fuzzing import fuzzed
from handmade_steps import DONE, EVEN, MS, SIZED, explained, figures, program_of, recorded
from hypothesis import example, given
from hypothesis import strategies as st
from tiny_programs import MUON, Weight

from mirrorc.all_reduce_algorithms import Ring
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.runtime.profiling.accounting import apportioned
from mirrorc.runtime.profiling.explain_steps import explain_steps
from mirrorc.runtime.profiling.explanation import Explanation
from mirrorc.runtime.profiling.recorder import Call, RecordedStep


def test_every_figure_of_even_devices() -> None:
    """Each runs start 1, fwd_0 5, bwd_0 7, pack 7.5, bwd_1 10.5, launch 10.75, wait b1 11.75, 13.75, wait b0 14.25, 15.25."""
    found = explained(program_of(), EVEN | DONE, EVEN | DONE)
    first, second = found.buckets
    assert (first.index, first.num_bytes, first.kind, first.link) == (0, 4096, "reduce_scatter", "shared-memory")
    assert figures(first) == (7.0, 7.5, 13.75, 14.25, 0.0, 0.5, 0.0, 0.5)
    assert figures(second) == (10.5, 10.75, 10.75, 11.75, 0.0, 1.0, 0.0, 1.0)
    assert (first.behind, second.behind) == ("wait b1", "")
    assert (found.num_steps, found.step_ms, found.compute_ms, found.update_ms) == (1, 15.25, 9.0, 3.0)
    assert (found.exposed_ms, found.hidden_ms, found.other_ms) == (1.5, 0.0, 1.75)
    for device, own in zip(found.devices, first.devices, strict=True):
        assert own.device == device.device and figures(own) == figures(first)  # type: ignore[arg-type]
        assert (device.started_ms, device.compute_ms, device.exposed_ms) == (1.0, 9.0, 1.5)
        assert (device.update_ms, device.finished_ms) == (3.0, 15.25)
        assert device.region_ms == {"fwd_0": 4.0, "bwd_0": 2.0, "bwd_1": 3.0}
        assert device.parts_ms == found.parts_ms == {
            "start": 1.0, "forward": 4.0, "backward": 5.0, "pack": 0.5, "launch": 0.25, "commit": 0.0, "skew": 0.0,
            "transfer": 1.5, "update": 3.0, "write": 0.0, "other": 0.0, "end": 0.0,
        }  # fmt: skip


def test_waiting_at_the_commit_is_a_part_of_its_own_and_counts_in_the_advice() -> None:
    found = explained(program_of(), EVEN | DONE | {"commit": 6.0}, EVEN | DONE | {"bwd_1": 9.0})
    assert [(device.parts_ms["commit"], device.parts_ms["skew"]) for device in found.devices] == [
        (6.0, 0.0),
        (0.0, 0.0),
    ]
    assert found.other_ms == 4.75 and found.exposed_ms == 1.5
    assert found.advice.startswith("even out the devices: cpu:1 computes for 15.000 ms, cpu:0 for 9.000 ms")
    assert found.advice.endswith("Estimated gain: 3.000 ms a step.")


def test_only_a_link_that_moves_by_itself_hides_anything() -> None:
    found = explained(program_of(2, link="nccl"), EVEN | DONE, EVEN | DONE)
    assert figures(found.buckets[0]) == (7.0, 7.5, 13.75, 14.25, 6.25, 0.5, 0.0, 0.5) and found.hidden_ms == 6.25
    assert "  hidden behind other work: 6.25 ms, summed over buckets\n" in str(found)


def test_a_late_device_is_named_and_costs_the_others_skew() -> None:
    late = EVEN | {"bwd_1": 9.0}
    found = explained(program_of(), EVEN | DONE, late | DONE)
    first, second = found.buckets
    assert second.behind == "cpu:1's bwd_1" and first.behind == "wait b1"
    assert (second.ready_ms, second.launched_ms, second.waited_ms, second.finished_ms) == (13.5, 13.75, 13.75, 17.75)
    assert (second.skew_ms, second.transfer_ms, second.exposed_ms) == (3.0, 1.0, 4.0)
    assert [own.skew_ms for own in second.devices] == [6.0, 0.0]
    assert (first.skew_ms, first.transfer_ms) == (0.0, 0.5)
    assert found.advice == (
        "even out the devices: cpu:1 computes for 15.000 ms, cpu:0 for 9.000 ms, 6.000 ms more in bwd_1: see what else runs "
        "on the cores of cpu:1. Estimated gain: 3.000 ms a step."
    )


def test_a_device_that_has_not_started_yet_is_late_by_its_start() -> None:
    found = explained(program_of(), EVEN | DONE, EVEN | DONE | {"start": 40.0})
    assert found.buckets[1].behind == "cpu:1's start"
    assert found.devices[1].started_ms == 40.0


def test_devices_that_are_late_by_turns() -> None:
    """The mean is taken of figures that are made for each step, not of the times that they are made from: those would hide it."""
    program = program_of()
    slow, quick = SIZED | {"bwd_1": 9.0}, SIZED
    steps = [recorded(program, *((slow, quick) if i % 2 else (quick, slow))) for i in range(6)]
    found = explain_steps(program, steps)
    second = found.buckets[1]
    assert (second.skew_ms, second.transfer_ms, second.launched_ms) == (3.0, 1.0, 13.0)
    assert [device.compute_ms for device in found.devices] == [12.0, 12.0]
    assert found.advice.startswith(
        "nothing to change: of 4.000 ms in waits and the commit, 3.000 ms are waiting for the last device, 1.000"
    )


def test_figures_are_means_over_the_middle_third_of_steps_and_the_first_step_is_left_out() -> None:
    program = program_of()

    def step(number: int, bwd_ms: float) -> RecordedStep:
        own = EVEN | DONE | {"bwd_0": bwd_ms}
        return recorded(program, own, own, warms_up=number == 0, begun_ms=100.0 * number)

    assert explain_steps(program, [step(0, 2.0)]).num_steps == 1
    found = explain_steps(program, [step(0, 500.0), step(1, 2.0), step(2, 90.0), step(3, 3.0)])
    assert (found.num_steps, found.compute_ms, found.step_ms, found.buckets[0].ready_ms) == (3, 10.0, 16.25, 8.0)


def test_a_wait_that_ends_before_the_launch_it_needs_has_returned() -> None:
    """The last device is heard of in the midst of its launch: no more is skew than was waited."""
    program = program_of()
    step = recorded(program, EVEN, EVEN | {"bwd_1": 9.0})
    first, last = step.calls
    wait = next(i for i, call in enumerate(first) if call.node.target is ops.wait)
    begin = first[wait].start_ns
    cut = [Call(call.node, min(call.start_ns, begin + MS), min(call.end_ns, begin + MS)) for call in first[wait:]]
    found = explain_steps(program, [RecordedStep(False, 0, step.started_ns, ((*first[:wait], *cut), last))])
    own = found.buckets[1].devices[0]
    assert (own.skew_ms, own.transfer_ms, own.exposed_ms) == (1.0, 0.0, 1.0)


def test_one_device() -> None:
    own = {"start": 1.0, "fwd_0": 4.0, "bwd_0": 2.0, "bwd_1": 3.0, "update b0": 1.0}
    found = explained(program_of(1), own)
    assert [(bucket.index, bucket.kind, bucket.link, bucket.devices) for bucket in found.buckets] == [
        (0, "none", "", ()),
        (1, "none", "", ()),
    ]
    assert figures(found.buckets[0]) == (7.0, 7.0, 7.0, 7.0, 0.0, 0.0, 0.0, 0.0)
    assert (found.exposed_ms, found.hidden_ms, found.step_ms, found.compute_ms) == (0.0, 0.0, 11.0, 9.0)
    assert found.advice == "nothing to do: one device has nobody to communicate with."
    assert "not communicated" in str(found)


def test_who_is_sent_to_waits_for_the_sender_alone() -> None:
    """An optimizer that runs by itself, on replica 0, whose parameters the others are sent."""
    program = program_of(3, [Weight("fc1", (4,), rule=MUON)], without=["share-parameters"])
    own = {"fwd_0": 1.0, "bwd_0": 1.0, "wait b0": 0.0}
    found = explained(program, own | {"step_optimizer": 6.0}, own | {"store b0": 0.5}, own | {"bwd_0": 2.0})
    reduced, *sent = found.buckets
    assert (reduced.kind, reduced.index, reduced.behind) == ("all_reduce", 0, "cpu:2's bwd_0")
    assert [(one.kind, one.label, one.behind) for one in sent] == [
        ("send", "b0 0→1", "cpu:0's step_optimizer"),
        ("send", "b0 0→2", "cpu:0's step_optimizer"),
    ]
    assert {own.device: own.skew_ms for own in reduced.devices} == {"cpu:0": 1.0, "cpu:1": 1.0, "cpu:2": 0.0}
    for one in sent:
        assert figures(one) == (9.0, 9.0, 3.0, 9.0, 0.0, 2.0, 2.0, 0.0), (
            "launched by the sender, waited for by the receiver"
        )
    assert figures(found.totals[1]) == (9.0, 9.0, 3.0, 9.0, 0.0, 4.0, 4.0, 0.0)
    assert found.update_ms == pytest.approx((6.0 + 0.5) / 3)
    assert "  cpu:0's step_optimizer\n" in str(found), "names are not cut"


def test_messages_have_the_receivers_times_and_are_sorted_below_the_sum_of_their_bucket() -> None:
    program = program_of(3, without=["share-parameters"], algorithm=Ring())
    durations = [{**EVEN, "wait b0": 0.5, "wait b1": 0.25, "start": 1.0 + 2 * replica} for replica in range(3)]
    found = explained(program, *durations)
    places = [(one.index, one.round, one.chunk, one.source) for one in found.buckets]
    assert places == sorted(places) and len(places) == 2 * 4 * 3  # type: ignore[type-var]
    for message in found.buckets:
        by_device = {own.device: own for own in message.devices}
        sender, receiver = by_device[f"cpu:{message.source}"], by_device[f"cpu:{message.destination}"]
        assert (message.ready_ms, message.launched_ms) == (sender.ready_ms, sender.launched_ms)
        assert (message.waited_ms, message.finished_ms) == (receiver.waited_ms, receiver.finished_ms)
        assert message.skew_ms == pytest.approx(receiver.skew_ms / 3) and sender.exposed_ms == 0.0
        assert (
            message.label
            == f"b{message.index} r{message.round} c{message.chunk} {message.source}→{message.destination}"
        )
    assert [total.label for total in found.totals] == ["b0", "b1"]
    for part in ("skew", "transfer"):
        waits = sum(device.parts_ms[part] for device in found.devices) / 3
        assert sum(getattr(total, f"{part}_ms") for total in found.totals) == pytest.approx(waits)
    rows = [line.split("  ")[0] or line.split("  ")[1] for line in str(found).split("\n\n")[1].split("\n")[2:]]
    expected = [label for total in found.totals for label in (total.label, *_labels_of(found, total.index))]
    assert rows == [*expected, "all"]
    check_printed_figures(found)


def _labels_of(found: Explanation, bucket: int) -> list[str]:
    return [one.label for one in found.buckets if one.index == bucket]


@pytest.mark.parametrize("num_steps", [1, 4])
def test_the_fastest_and_the_slowest_step_stand_beside_the_mean(num_steps: int) -> None:
    program = program_of()
    own = [EVEN | DONE | {"bwd_0": 2.0 + 3 * number} for number in range(num_steps)]
    steps = [recorded(program, durations, durations, begun_ms=100.0 * i) for i, durations in enumerate(own)]
    found = explain_steps(program, steps)
    assert (found.fastest_ms["backward"], found.slowest_ms["backward"]) == (5.0, 5.0 + 3 * (num_steps - 1))
    assert ("A step takes 19.75 ms (15.25 … 24.25); the mean of" in str(found)) == (num_steps > 1)
    assert ("\nslowest " in str(found)) == ("\nfastest " in str(found)) == (num_steps > 1)
    check_printed_figures(found)


def test_a_start_that_takes_long_is_explained_and_names_the_last_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mirrorc.runtime.profiling.explain_steps._num_cores", lambda: 2)
    assert explained(program_of(), EVEN | DONE, EVEN | DONE).start == ""
    found = explained(program_of(3), EVEN | DONE, EVEN | DONE, EVEN | DONE | {"start": 9.0})
    assert found.start.endswith("cpu:2 is the last, at 9.000 ms: 3 devices share 2 cores")
    assert "\n  start: the caller wakes" in str(found)
    assert "share" not in explained(program_of(), EVEN | DONE, EVEN | DONE | {"start": 9.0}).start
    interleaved = explain_steps(
        program_of(), [recorded(program_of(), EVEN, EVEN | {"start": 9.0})], is_interleaved=True
    )
    assert "take turns" in interleaved.start


def test_many_devices_are_named_as_a_range() -> None:
    assert "1 step on cpu:0 … cpu:4\n" in str(explained(program_of(5), *[EVEN | DONE] * 5))


CALLS = (
    "start",
    "fwd_0",
    "bwd_0",
    "bwd_1",
    "pack b0",
    "reduce_scatter b1",
    "wait b0",
    "wait b1",
    "update b0",
    "update b1",
)


def check_printed_figures(found: Explanation) -> None:
    """What is printed adds up as it is printed: the parts of the step, each device's row, each bucket's exposed time."""
    summary, buckets, devices, *_ = str(found).split("\n\n")
    step = Decimal(re.match(r"A step takes ([\d.]+) ms", summary)[1])  # type: ignore[index]
    parts = re.findall(r"\w+ ([\d.]+) \(([\d.]+)%\)", summary)
    if found.step_ms > 0.0:
        assert sum(Decimal(share) for _, share in parts) == 100 and sum(Decimal(ms) for ms, _ in parts) == step
    for name, *row in map(str.split, devices.split("\n")[1:]):
        single = {"fastest": found.fastest_ms, "slowest": found.slowest_ms}.get(name)
        assert sum(map(Decimal, row)) == (printed(found, sum(single.values())) if single else step)
    sums = {name: Decimal(ms) for name, ms in re.findall(r"(skew|transfer) ([\d.]+) \(", summary)}
    wholes: list[tuple[Decimal, ...]] = []
    for line in buckets.split("\n")[1:]:
        if re.match(r" *b\d", line):
            cells = line[len(buckets.split("size")[0]) + 4 :].split()
            ready, launched, waited, finished, hidden, exposed, skew, transfer, *_ = cells
            assert Decimal(skew) + Decimal(transfer) == Decimal(exposed) and hidden != "0"
            assert Decimal(ready) <= Decimal(launched) <= Decimal(finished) <= step and Decimal(waited) <= Decimal(
                finished
            )
            if line.startswith("b"):
                wholes.append((Decimal(skew), Decimal(transfer)))
    if found.exposed_ms and found.meetings_ms == 0.0:
        assert [*map(sum, zip(*wholes, strict=True))] == [sums.get("skew", 0), sums.get("transfer", 0)]


def printed(found: Explanation, ms: float) -> Decimal:
    return Decimal(f"{ms:.{3 if found.step_ms < 10 else 2 if found.step_ms < 1000 else 1}f}")


@fuzzed(60)
@given(st.lists(st.floats(-1.0, 1e6), min_size=1, max_size=12), st.integers(0, 10**5))
def test_what_is_apportioned_adds_up(values: list[float], num_units: int) -> None:
    found = apportioned(values, num_units)
    positive = [max(0.0, value) for value in values]
    assert sum(found) == (num_units if sum(positive) else 0) and min(found) >= 0
    for value, units in zip(positive, found, strict=True):
        assert not sum(positive) or abs(units - value / sum(positive) * num_units) <= 1.0 + 1e-6


@pytest.mark.slow
@fuzzed(60)
@given(st.integers(1, 3), st.integers(0, 2**32), st.sampled_from(["shared-memory", "nccl"]), st.integers(1, 3))
@example(1, 2676624, "shared-memory", 1)  # 9.1645 ms, which is printed as 9.165
def test_figures_always_add_up(num_devices: int, seed: int, link: str, num_steps: int) -> None:
    draw = random.Random(seed)
    program = _lowered(num_devices, link)
    steps = [
        recorded(
            program,
            *({name: draw.choice([0.0, draw.random() * 5]) for name in CALLS} for _ in range(num_devices)),
            warms_up=number == 0,
            begun_ms=100.0 * number,
        )
        for number in range(num_steps)
    ]
    found = explain_steps(program, steps)
    assert {bucket.index for bucket in found.buckets} == {0, 1}
    for times in (*found.buckets, *(own for bucket in found.buckets for own in bucket.devices)):
        assert times.exposed_ms == times.skew_ms + times.transfer_ms
        assert min(times.hidden_ms, times.skew_ms, times.transfer_ms) >= 0.0
        moments = (times.ready_ms, times.launched_ms, times.waited_ms, times.finished_ms)
        assert moments[0] >= 0.0 and list(moments) == sorted(moments) and moments[-1] <= found.step_ms + 1e-6
        assert times.exposed_ms == pytest.approx(times.finished_ms - times.waited_ms, abs=1e-6)
        assert link == "nccl" or times.hidden_ms == 0.0
    total = found.compute_ms + found.exposed_ms + found.update_ms + found.other_ms
    assert total == pytest.approx(found.step_ms) and min(found.parts_ms.values()) >= 0.0
    assert found.exposed_ms == pytest.approx(sum(bucket.exposed_ms for bucket in found.buckets))
    for device in found.devices:
        assert sum(device.parts_ms.values()) == pytest.approx(found.step_ms) and min(device.parts_ms.values()) >= 0.0
        waited_ms = sum(own.exposed_ms for b in found.buckets for own in b.devices if own.device == device.device)
        assert device.parts_ms["skew"] + device.parts_ms["transfer"] == pytest.approx(waited_ms)
    check_printed_figures(found)
    lines = str(found).split("\n")
    behind = tuple(bucket.behind for bucket in found.buckets if bucket.behind)
    assert max(len(line) for line in lines if not (behind and line.endswith(behind))) <= 110 and found.advice
    assert all(any(line.endswith(f"  {name}") for line in lines) for name in behind), "names are not cut"


_made: dict[tuple[int, str], Program] = {}


def _lowered(num_devices: int, link: str) -> Program:
    if (num_devices, link) not in _made:
        _made[num_devices, link] = program_of(num_devices, link=link)
    return _made[num_devices, link]


def test_the_text() -> None:
    late = EVEN | {"bwd_1": 9.0}
    text = str(explained(program_of(), EVEN | DONE, late | DONE))
    assert text == TEXT


TEXT = """\
A step takes 21.25 ms; 1 step on cpu:0, cpu:1
  start 1.00 (4.7%), forward 4.00 (18.8%), backward 8.00 (37.6%), pack 0.50 (2.4%), launch 0.25 (1.2%),
  skew 3.00 (14.1%), transfer 1.50 (7.1%), update 3.00 (14.1%)
  shared-memory moves nothing before the wait

bucket      size    ready launched   waited finished   hidden  exposed     skew transfer  behind
reduce_scatter over shared-memory, ms
b0       4.0 KiB     7.00     7.50    19.75    20.25        -     0.50     0.00     0.50  wait b1
b1     256.0 KiB    13.50    13.75    13.75    17.75        -     4.00     3.00     1.00  cpu:1's bwd_1
all                                                         -     4.50     3.00     1.50

device        start  forward backward     pack   launch     skew transfer   update
cpu:0          1.00     4.00     5.00     0.50     0.25     6.00     1.50     3.00
cpu:1          1.00     4.00    11.00     0.50     0.25     0.00     1.50     3.00

bucket: ready (its last gradient is made), launched, waited (its wait begins) and finished (its wait ends) are
  moments from the step's beginning, as means over the devices that take part; means over all devices (0 for
  one that does not wait) are hidden (in flight while the device does something else; - where nothing moves
  before the wait) and exposed (in the wait) = skew + transfer; behind is what it waited for longest: a call
  of a device that launched late, or an earlier wait
device: each row adds up to the step; parts that are 0 are left out. start: until the device's function
  begins; forward: in regions of forward; backward: in regions of backward; pack: filling buckets; launch:
  launching collectives; commit: in the commit, until the last device has come to it; skew: in waits, until
  the last device that is needed has launched; transfer: the rest of the waits: moving, adding up and
  multiplying factors; update: in the optimizer; write: writing buffers; other: in other calls; end: done,
  while another device is not

advice: even out the devices: cpu:1 computes for 15.000 ms, cpu:0 for 9.000 ms, 6.000 ms more in bwd_1: see
  what else runs on the cores of cpu:1. Estimated gain: 3.000 ms a step."""


@pytest.mark.slow
def test_text_of_many_devices_keeps_its_width() -> None:
    program = program_of(24)
    text = str(explained(program, *([EVEN | DONE] * 24)))
    assert max(len(line) for line in text.split("\n")) <= 110
