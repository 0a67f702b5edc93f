import dataclasses
import json
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from mirrorc.errors import ExecutionError
from mirrorc.ir.devices import parse_devices
from mirrorc.runtime.tuning import bucket_sizes
from mirrorc.runtime.tuning.bucket_sizes import BucketSizes, Setting, choose_bucket_sizes, measure_ladder
from mirrorc.runtime.tuning.microbenchmark import Configuration, Layout
from mirrorc.user.optimizer_kinds import ELEMENTWISE

MIB = 2**20
DEFAULT = BucketSizes(25.0, 1.0)
LINKS = ("shared-memory", "copy", "nccl")  # the last moves by itself; no test here makes its communicator


def setting(
    num_bytes: int = 64 * MIB,
    num_devices: int = 2,
    link: str = "shared-memory",
    optimizer: torch.optim.Optimizer | None = None,
    **changes: Any,
) -> Setting:
    devices = parse_devices([f"cpu:{i}" for i in range(num_devices)])
    optimizer = optimizer or torch.optim.AdamW([nn.Parameter(torch.ones(1))])
    configuration = Configuration(devices, 1, link, link == "shared-memory", torch.float32, optimizer, 0, 60.0)
    return Setting(dataclasses.replace(configuration, **changes), num_bytes)


class Measured:
    """In place of measurements: the seconds of a layout, by its number of buckets."""

    def __init__(self, seconds: Callable[[int], float]) -> None:
        self.seconds, self.calls = seconds, []

    def __call__(self, configuration: Configuration, layouts: Sequence[Layout], scale: float) -> list[float]:
        self.calls.append((list(layouts), scale))
        return [self.seconds(len(layout)) for layout in layouts]


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[int], float]], Measured]:
    def install(seconds: Callable[[int], float]) -> Measured:
        made = Measured(seconds)
        monkeypatch.setattr(bucket_sizes, "measured_seconds", made)
        return made

    return install


Install = Callable[[Callable[[int], float]], Measured]


@pytest.mark.parametrize(
    ("seconds", "cap"),
    [
        (lambda n: 1.0 + n, 64.0),  # fewer is better
        (lambda n: 1.0 / n, 1.0),  # more is better
        (lambda n: abs(n - 16), 4.0),
        (lambda n: 1.0, 25.0),
        (lambda n: 1.0 if n != 3 else 1.02, 25.0),  # within noise, the default
        (lambda n: 1.0 if n != 3 else 1.04, 16.0),  # else the one nearest to it
        (lambda n: {64: 1.0, 1: 1.01}.get(n, 2.0), 64.0),
    ],
)
def test_the_cheapest_is_chosen_and_among_equals_the_one_nearest_to_the_default(
    measured: Install, seconds: Callable[[int], float], cap: float
) -> None:
    measured(lambda n: 1e-3 * (1e-3 + seconds(n)))
    assert choose_bucket_sizes(setting(), DEFAULT).sizes.bucket_cap_mb == cap


@pytest.mark.parametrize(
    ("link", "num_buckets", "sizes"),
    [("shared-memory", 4, (16.0, 16.0)), ("copy", 4, (16.0, 16.0)), ("nccl", 5, (16.0, 1.0))],
)
def test_a_small_first_bucket_is_for_links_that_move_by_themselves(
    measured: Install, link: str, num_buckets: int, sizes: tuple[float, float]
) -> None:
    measured(lambda n: 1.0 if n == num_buckets else 2.0)
    chosen = choose_bucket_sizes(setting(link=link), DEFAULT)
    assert dataclasses.astuple(chosen.sizes) == sizes


@pytest.mark.parametrize("num_bytes", [4 * MIB, 9 * MIB, 31 * MIB, 64 * MIB, 2000 * MIB])
@pytest.mark.parametrize("link", LINKS)
def test_layouts_hold_what_is_measured_and_no_two_are_the_same(measured: Install, link: str, num_bytes: int) -> None:
    record = measured(lambda n: 1.0)
    case = setting(num_bytes, link=link)
    choose_bucket_sizes(case, DEFAULT)
    [(layouts, scale)] = record.calls
    assert len(layouts) > 1 and len(set(layouts)) == len(layouts)
    assert case.measured_bytes <= num_bytes < 2 * case.class_bytes and case.measured_bytes <= 64 * MIB
    assert case.measured_bytes * scale == case.class_bytes
    for layout in layouts:
        assert 0 <= case.measured_bytes // 4 - sum(layout) < 64 * len(layout)
        assert max(layout[1:] or [0]) == min(layout[1:] or [0])
        first = min(MIB // 4, case.measured_bytes // 4) if link == "nccl" and layout[0] != layout[-1] else layout[-1]
        assert layout[0] == first


def test_the_ladder_of_a_large_model() -> None:
    candidates = bucket_sizes._candidates(setting(100 * MIB), DEFAULT)
    assert {cap: len(layout) for cap, layout in candidates.items()} == {1.0: 64, 4.0: 16, 16.0: 4, 25.0: 3, 64.0: 1}


def test_caps_that_give_the_same_buckets_are_one_the_nearest_to_the_default() -> None:
    candidates = bucket_sizes._candidates(setting(8 * MIB), DEFAULT)
    assert {cap: len(layout) for cap, layout in candidates.items()} == {1.0: 8, 4.0: 2, 25.0: 1}


def test_one_device_measures_nothing(measured: Install) -> None:
    record = measured(lambda n: 1.0)
    chosen = choose_bucket_sizes(setting(num_devices=1), DEFAULT)
    assert chosen.sizes == DEFAULT and record.calls == []
    assert chosen.remark == (
        "bucket sizes not measured, as one device has nobody to communicate with: bucket_cap_mb=25, first_bucket_mb=1"
    )


@pytest.mark.parametrize("num_bytes", [1, 100, MIB, 2 * MIB - 1])
def test_a_small_model_measures_nothing_and_gets_one_bucket(measured: Install, num_bytes: int) -> None:
    record = measured(lambda n: 1.0)
    chosen = choose_bucket_sizes(setting(num_bytes), DEFAULT)
    assert chosen.sizes == BucketSizes(25.0, 25.0) and record.calls == []
    assert chosen.remark.startswith("bucket sizes not measured, as all caps give the same buckets: bucket_cap_mb=25")


def test_on_a_link_that_moves_by_itself_a_small_first_bucket_may_leave_nothing_to_choose(measured: Install) -> None:
    record = measured(lambda n: 1.0)
    chosen = choose_bucket_sizes(setting(2 * MIB, link="nccl"), DEFAULT)
    assert chosen.sizes == DEFAULT and record.calls == []


def test_what_was_measured_is_looked_up_from_then_on(measured: Install) -> None:
    record = measured(lambda n: 1.0 + n)
    first = choose_bucket_sizes(setting(), DEFAULT)
    measured(lambda n: 1.0 / n)  # would choose otherwise
    assert choose_bucket_sizes(setting(), DEFAULT) == first and len(record.calls) == 1
    assert "bucket_cap_mb=64, first_bucket_mb=64 (give these to pin them)" in first.remark
    assert first.remark.endswith("by cap: 1 MiB 65000, 4 MiB 17000, 16 MiB 5000, 25 MiB 4000, 64 MiB 2000")


@pytest.mark.parametrize("result", [{}, {"milliseconds": {"1": 1.0}}, {"milliseconds": [1, 2]}])
def test_a_result_that_lacks_something_is_measured_anew(measured: Install, result: Any) -> None:
    measured(lambda n: 1.0 + n)
    first = choose_bucket_sizes(setting(), DEFAULT)
    (file,) = Path(os.environ["MIRRORC_CACHE_DIR"]).iterdir()
    file.write_text(json.dumps({**json.loads(file.read_text()), "result": result}))
    record = measured(lambda n: 1.0 + n)
    with pytest.warns(UserWarning, match="is damaged, so it is measured again"):
        assert choose_bucket_sizes(setting(), DEFAULT) == first
    assert len(record.calls) == 1


def test_another_process_that_was_faster_decides(measured: Install) -> None:
    def seconds_of_the_slower(n: int) -> float:
        if not theirs:
            theirs.append(None)
            measured(lambda n: 1.0 + n)
            theirs[0] = choose_bucket_sizes(setting(), DEFAULT)
        return 1.0 / n

    theirs: list[Any] = []
    measured(seconds_of_the_slower)
    assert choose_bucket_sizes(setting(), DEFAULT) == theirs[0]
    assert theirs[0].sizes.bucket_cap_mb == 64.0


def weight() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(1))]


OTHERS = {
    "size": lambda: setting(32 * MIB),
    "more devices": lambda: setting(num_devices=3),
    "link": lambda: setting(link="copy"),
    "own copies": lambda: setting(shares_parameters=False),
    "threads": lambda: setting(num_threads=2),
    "dtype": lambda: setting(dtype=torch.float64),
    "optimizer": lambda: setting(optimizer=torch.optim.Adam(weight())),
    "flag": lambda: setting(optimizer=torch.optim.AdamW(weight(), amsgrad=True)),
    "implementation": lambda: setting(optimizer=torch.optim.AdamW(weight(), foreach=True)),
    "a number that is zero": lambda: setting(optimizer=torch.optim.AdamW(weight(), weight_decay=0.0)),
    "an optimizer by itself": lambda: setting(group=None),
}


@pytest.mark.parametrize("other", OTHERS)
def test_keys_differ_with_what_matters(other: str) -> None:
    assert OTHERS[other]().key() != setting().key()


def test_keys_differ_from_machine_to_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = [setting().key()]
    monkeypatch.setattr(bucket_sizes, "device_model", lambda device: "another")
    keys.append(setting().key())
    monkeypatch.setattr(bucket_sizes, "num_cores", lambda: 12345)
    keys.append(setting().key())
    monkeypatch.setattr(torch, "__version__", "99.0")
    keys.append(setting().key())
    assert all(one != other for i, one in enumerate(keys) for other in keys[:i])


@pytest.mark.parametrize("kind", ELEMENTWISE, ids=lambda kind: kind.__name__)
def test_keys_stay_the_same_with_what_does_not_matter(kind: type[torch.optim.Optimizer]) -> None:
    one, other = kind(weight(), lr=0.1), kind(weight(), lr=0.0)  # type: ignore[call-arg]
    torch.optim.lr_scheduler.LambdaLR(other, lambda _: 0.5)  # which notes an initial_lr
    other.param_groups[0]["my own"] = 3
    assert setting(optimizer=one).key() == setting(65 * MIB, optimizer=other, timeout_seconds=1.0).key()


def test_keys_are_of_jsons_types() -> None:
    key = setting().key()
    assert json.loads(json.dumps(key)) == key


def test_a_measurement_that_fails_names_devices_and_remedy(measured: Install) -> None:
    def fail(n: int) -> float:
        raise MemoryError("no room")

    measured(fail)
    with pytest.raises(
        ExecutionError, match=r"bucket_cap_mb='auto' could not measure bucket sizes on cpu:0, cpu:1: "
    ) as e:
        choose_bucket_sizes(setting(), DEFAULT)
    assert "MemoryError: no room" in str(e.value)
    assert str(e.value).endswith("give numbers instead, such as bucket_cap_mb=25, first_bucket_mb=1")
    assert not Path(os.environ["MIRRORC_CACHE_DIR"]).exists()


def test_a_real_ladder() -> None:
    ladder = measure_ladder(setting(4 * MIB, num_devices=3), DEFAULT)
    assert list(ladder) == [1.0, 25.0] and all(ms > 0 for ms in ladder.values())
