from typing import Any

import pytest

from mirrorc import World
from mirrorc.ir.workers import Workers


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ((0,), ValueError, "num_workers is 0: give a positive whole number"),
        (("3",), TypeError, "num_workers is '3'"),
        ((True,), TypeError, "num_workers is True"),
        ((2.0,), TypeError, "num_workers is 2.0"),
        ((2, 0), ValueError, "devices_per_worker is 0"),
        ((2, None), TypeError, "devices_per_worker is None"),
        ((2, "12"), TypeError, "devices_per_worker is '12'"),
        ((2, (1, -1)), ValueError, r"devices_per_worker\[1\] is -1"),
        (
            (3, (1, 2)),
            ValueError,
            "devices_per_worker has 2 numbers, but num_workers is 3\n  fix:  give one for each worker",
        ),
        ((3, ()), ValueError, "devices_per_worker has 0 numbers"),
    ],
)
def test_a_world_that_cannot_be_is_refused_by_name(given: tuple[Any, ...], error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        World(*given)


@pytest.mark.parametrize("rank", [-1, 3])
def test_a_worker_that_is_not_there_is_refused(rank: int) -> None:
    with pytest.raises(
        ValueError, match=f"rank is {rank}, but the world has 3 workers\n  fix:  give a number from 0 to 2"
    ):
        World(3).worker(rank)


def test_replicas_are_numbered_in_the_order_of_ranks() -> None:
    world = World(3, [1, 2, 1])
    found = [world.worker(rank) for rank in range(3)]
    assert [workers.first_replica for workers in found] == [0, 1, 3]
    assert {(w.num_workers, w.num_all_replicas, w.are_several, w.are_alike) for w in found} == {(3, 4, True, False)}
    assert world == World(3, (1, 2, 1)) and hash(world) == hash(World(3, (1, 2, 1)))


def test_workers_may_be_many_and_alike() -> None:
    workers = World(num_workers=64, devices_per_worker=8).worker(3)
    assert (workers.first_replica, workers.num_all_replicas, workers.are_alike) == (24, 512, True)


def test_a_process_on_its_own_has_no_workers() -> None:
    alone = Workers()
    assert (alone.num_workers, alone.first_replica, alone.num_all_replicas, alone.are_several) == (1, 0, 0, False)
    assert not World(1, 4).worker(0).are_several
