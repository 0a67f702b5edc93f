import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from mirrorc.ir.devices import parse_devices
from mirrorc.ir.links import Link, register_link, unregister_link
from mirrorc.runtime.communication import CopyCommunicator, register_communicator, unregister_communicator
from mirrorc.runtime.tuning import microbenchmark
from mirrorc.runtime.tuning.microbenchmark import Configuration, Layout, measured_seconds
from mirrorc.user.optimizer_kinds import ELEMENTWISE

LAYOUTS: Sequence[Layout] = [(4096,), (1024,) * 4, (64, 1984, 1984)]


def configuration(num_devices: int = 2, link: str = "shared-memory", **changes: Any) -> Configuration:
    optimizer = changes.pop("optimizer", None) or torch.optim.AdamW([nn.Parameter(torch.ones(3))])
    options: dict[str, Any] = {
        "devices": parse_devices([f"cpu:{i}" for i in range(num_devices)]),
        "num_threads": 1,
        "link": link,
        "shares_parameters": link == "shared-memory",
        "dtype": torch.float32,
        "optimizer": optimizer,
        "group": 0,
        "timeout_seconds": 60.0,
    }
    return Configuration(**{**options, **changes})


@pytest.fixture(autouse=True)
def few_rounds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(microbenchmark, "_MOST_ROUNDS", 3)


class _MovingCommunicator(CopyCommunicator):
    link = "moving"


@pytest.fixture
def moving() -> Iterator[str]:
    """A link that moves by itself, as far as a microbenchmark can tell."""
    register_link(Link("moving", moves_by_itself=True))
    register_communicator(_MovingCommunicator)
    yield "moving"
    unregister_communicator(_MovingCommunicator)
    unregister_link("moving")


@pytest.mark.parametrize("num_devices", [2, 3])
@pytest.mark.parametrize("shares", [True, False])
@pytest.mark.parametrize("link", ["shared-memory", "copy"])
def test_every_layout_gets_a_time(link: str, shares: bool, num_devices: int) -> None:
    found = measured_seconds(configuration(num_devices, link, shares_parameters=shares), LAYOUTS, 1.0)
    assert len(found) == len(LAYOUTS) and all(seconds > 0 for seconds in found)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_every_optimizer_that_runs_on_buckets_can_be_measured(
    kind: type[torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    optimizer = kind([nn.Parameter(torch.ones(3))], lr=0.1)  # type: ignore[call-arg]
    found = measured_seconds(configuration(optimizer=optimizer, dtype=dtype), LAYOUTS, 1.0)
    assert all(seconds > 0 for seconds in found)


def test_an_optimizer_by_itself_never_steps() -> None:
    class Own(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            raise AssertionError("it was run")

    optimizer = Own([nn.Parameter(torch.ones(3))], lr=0.1)
    found = measured_seconds(configuration(optimizer=optimizer, group=None, shares_parameters=False), LAYOUTS, 1.0)
    assert all(seconds > 0 for seconds in found)


class Clock:
    """Time that passes only where it is told to, for each thread by itself; the main thread sees what has passed for most."""

    def __init__(self) -> None:
        self.seconds: Counter[str] = Counter()

    def perf_counter(self) -> float:
        thread = threading.current_thread()
        return (
            max(self.seconds.values(), default=0.0) if thread is threading.main_thread() else self.seconds[thread.name]
        )

    def spend(self, seconds: float) -> None:
        self.seconds[threading.current_thread().name] += seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(microbenchmark, "time", made)
    return made


def costly(monkeypatch: pytest.MonkeyPatch, clock: Clock, *, wait: float, update: float) -> None:
    """Lets a wait take so many seconds for an element, and an update so many."""
    sum_of, update_of = CopyCommunicator._sum, microbenchmark._update

    def slow_sum(self: Any, kind: str, bucket: int, replica: int, part: slice) -> torch.Tensor:
        total = sum_of(self, kind, bucket, replica, part)
        clock.spend(wait * total.numel())
        return total

    def slow_update(bucket: Any, gradient: torch.Tensor) -> None:
        update_of(bucket, gradient)
        clock.spend(update)

    monkeypatch.setattr(CopyCommunicator, "_sum", slow_sum)
    monkeypatch.setattr(microbenchmark, "_update", slow_update)


def test_where_sums_are_made_in_the_wait_all_of_them_count(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    costly(monkeypatch, clock, wait=1.0, update=100.0)
    found = measured_seconds(configuration(link="copy"), LAYOUTS, 2.0)
    assert found == pytest.approx([2 * (sum(layout) + 100.0 * len(layout)) for layout in LAYOUTS])


def test_on_a_link_that_moves_by_itself_the_last_moves_alone_and_only_updates_are_scaled(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, moving: str
) -> None:
    costly(monkeypatch, clock, wait=1.0, update=100.0)
    found = measured_seconds(configuration(link=moving), LAYOUTS, 2.0)
    assert found == pytest.approx([layout[-1] + 2 * 100.0 * len(layout) for layout in LAYOUTS])


def test_rounds_end_in_time(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    monkeypatch.setattr(microbenchmark, "_MOST_ROUNDS", 1000)
    monkeypatch.setattr(microbenchmark, "_SECONDS", 100.0)
    costly(monkeypatch, clock, wait=0.0, update=1.0)
    measured_seconds(configuration(link="copy"), LAYOUTS, 1.0)
    a_round = sum(map(len, LAYOUTS))
    assert 100.0 < clock.perf_counter() <= 100.0 + a_round


def test_a_link_that_is_slow_to_begin_is_measured_no_less(
    monkeypatch: pytest.MonkeyPatch, clock: Clock, moving: str
) -> None:
    """NCCL takes seconds before its first transfer."""
    launches: list[int] = []
    launch = CopyCommunicator.launch_all_reduce

    def slow_at_first(self: Any, bucket: int, replica: int, tensor: torch.Tensor) -> Any:
        clock.spend(0.0 if launches else 100.0)
        launches.append(bucket)
        return launch(self, bucket, replica, tensor)

    monkeypatch.setattr(CopyCommunicator, "launch_all_reduce", slow_at_first)
    measured_seconds(configuration(link=moving), LAYOUTS, 1.0)
    num_devices, rounds = 2, 3  # the most that this test allows
    assert len(launches) == num_devices * (len(LAYOUTS[0]) + rounds * sum(map(len, LAYOUTS)))


def test_a_slow_machine_measures_twice_all_the_same(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> None:
    costly(monkeypatch, clock, wait=0.0, update=50.0)
    found = measured_seconds(configuration(link="copy"), LAYOUTS, 1.0)
    assert found == pytest.approx([50.0 * len(layout) for layout in LAYOUTS])
    assert clock.perf_counter() == pytest.approx(found[0] + 2 * sum(found))  # the first makes the optimizers' state


def test_nothing_of_the_users_changes_and_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[Any] = []
    filled = microbenchmark._filled

    def noted(*arguments: Any) -> torch.Tensor:
        tensor = filled(*arguments)
        made.append(weakref.ref(tensor))
        return tensor

    monkeypatch.setattr(microbenchmark, "_filled", noted)
    parameter = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.AdamW([parameter])
    before = (torch.get_rng_state(), torch.get_num_threads(), threading.active_count())
    groups = [dict(group) for group in optimizer.param_groups]
    measured_seconds(configuration(optimizer=optimizer), LAYOUTS, 1.0)
    gc.collect()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert (torch.get_num_threads(), threading.active_count()) == before[1:]
    assert [dict(group) for group in optimizer.param_groups] == groups and not optimizer.state
    assert torch.equal(parameter, torch.ones(3)) and parameter.grad is None
    assert len(made) == 5 and not any(reference() is not None for reference in made)


def test_layouts_use_one_memory_for_state_and_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[int, set[int]] = {}
    update = microbenchmark._update

    def noted(bucket: Any, gradient: torch.Tensor) -> None:
        update(bucket, gradient)
        own = bucket.optimizer
        for tensor in (gradient, own.parameter, own.state["exp_avg"], own.state["exp_avg_sq"]) if own else ():
            seen.setdefault(id(bucket), set()).add(tensor.untyped_storage().data_ptr())

    monkeypatch.setattr(microbenchmark, "_update", noted)
    pool = microbenchmark.DevicePool(configuration().devices, 1, 60.0)
    try:
        made = microbenchmark._Microbenchmark(configuration(), LAYOUTS, pool)
        seen.clear()  # what the first steps made is there no more
        for layout in range(len(LAYOUTS)):
            made.run(layout, 1.0)
    finally:
        pool.close()
    assert len(seen) > len(LAYOUTS)
    assert len(set().union(*seen.values())) == 1 + 1 + 2  # the sums, the parameters, two entries of state, all shared


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("link", ["shared-memory", "copy", "moving"])
def test_a_device_that_fails_stops_the_others_at_once(
    monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, link: str, failing: int
) -> None:
    def fail(bucket: Any, gradient: torch.Tensor) -> None:
        if threading.current_thread().name.endswith(f"cpu:{failing}"):
            raise MemoryError("no room")

    link = request.getfixturevalue("moving") if link == "moving" else link
    monkeypatch.setattr(microbenchmark, "_update", fail)
    num_threads, begun = threading.active_count(), time.monotonic()
    with pytest.raises(MemoryError, match="no room"):
        measured_seconds(configuration(link=link, timeout_seconds=600.0), LAYOUTS, 1.0)
    assert threading.active_count() == num_threads
    assert time.monotonic() - begun < 300.0  # nobody waited until time was up
