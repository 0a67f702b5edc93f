"""What is said of the buckets that a step has updated when a connection was lost."""

import pytest
from tiny_programs import SMALL_BUCKETS, Weight, every_stage, handmade, targets

from mirrorc import World
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of
from mirrorc.runtime.execution.commit.update_progress import UpdateProgress, progress_of


def program(**options: bool):  # type: ignore[no-untyped-def]
    captured = handmade(2, [Weight("a", (300,)), Weight("b", (300,)), Weight("c", (2,))])
    captured = captured.evolve(workers=World(2, 2).worker(0))
    return every_stage(captured, over_workers=True, **SMALL_BUCKETS, **options)["lower-devices"]  # type: ignore[arg-type]


def fail() -> None:
    raise RuntimeError("no memory")


@pytest.mark.parametrize(
    ("done", "failing", "said"),
    [
        ([(0, 1)], None, "bucket 0 of 3 was updated"),
        ([(0, 1), (1, 0)], None, "bucket 0 of 3 was updated, bucket 1 in part"),
        ([(0, 1), (1, 0), (1, 1), (2, 0), (2, 1)], None, "buckets 0 … 2 of 3 were updated"),
        ([(1, 1)], (0, 1), "buckets 0 and 1 of 3 were updated in part"),
    ],
)
def test_which_buckets_were_updated(done: list[tuple[int, int]], failing: tuple[int, int] | None, said: str) -> None:
    """The first bucket has two elements, of which the first device has none."""
    lowered = program()
    progress = progress_of(lowered)
    assert progress is not None and not progress.has_begun
    updates = {
        (bucket_of(node), replica): node
        for replica, graph in enumerate(lowered.graphs())
        for node in targets(graph, ops.update)
    }
    for place in done:
        progress.noting(updates[place], lambda: None)()
    if failing is not None:
        with pytest.raises(RuntimeError, match="no memory"):
            progress.noting(updates[failing], fail)()
    assert progress.has_begun and progress.clause() == said
    progress.begin()
    assert not progress.has_begun


def test_a_program_that_commits_after_all_sums_has_none() -> None:
    assert progress_of(program(early_update=False)) is None
    assert isinstance(progress_of(program()), UpdateProgress)
