"""The option of a step that runs shards in microbatches, and its checks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def checked_microbatches(microbatches: int, passes: Any, disabled: Sequence[str]) -> int:
    """In how many parts a shard is run.

    Args:
        microbatches, passes, disabled: the options of `mirrorc.compile`.

    Raises:
        ValueError: it is not positive, or contradicts other options; names the remedy.
    """
    if microbatches < 1:
        raise ValueError(f"microbatches is {microbatches}: give a number of parts, 1 to run each shard at once")
    if microbatches > 1 and "accumulate-microbatches" in disabled:
        raise ValueError(
            f"microbatches={microbatches} asks for the pass 'accumulate-microbatches', which disable_passes leaves out: leave "
            "out one"
        )
    if microbatches > 1 and passes is not None and all(one.name != "accumulate-microbatches" for one in passes):
        raise ValueError(
            f"microbatches={microbatches} has no part in a pipeline given with passes=: put "
            "mirrorc.passes.AccumulateMicrobatches() there, before Replicate, or use add_passes and disable_passes in place of "
            "passes"
        )
    return microbatches
