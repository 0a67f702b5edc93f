"""Rules on the packs in which buckets are communicated."""

from __future__ import annotations

from collections.abc import Iterator

from mirrorc.ir.buckets import are_cut
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rule import rule
from mirrorc.verifier.rules.programs import Violation


@rule(since=Stage.CAPTURED)
def packs_make_up_their_buckets(program: Program) -> Iterator[Violation]:
    """Every element of a bucket that is cut lies in exactly one pack, and no pack is empty. If any bucket is cut, packs number
    all that is communicated, from 0 on; a pack never mixes dtypes, as its bucket has one. What is sent as factors is not cut."""
    for bucket in program.buckets:
        place = 0
        for pack in bucket.packs:
            if pack.start != place or pack.stop <= pack.start:
                yield Violation(
                    f"pack {pack.number} of bucket {bucket.index} has the elements from {pack.start} to {pack.stop}, where the "
                    f"next pack begins at {place}"
                )
            place = pack.stop
        if bucket.packs and place != bucket.num_elements:
            yield Violation(f"the packs of bucket {bucket.index} end at {place}, it has {bucket.num_elements} elements")
        if bucket.is_cut and bucket.is_sent_as_factors:
            yield Violation(f"bucket {bucket.index} is sent as factors, but is cut into {len(bucket.packs)} packs")
    if are_cut(program.buckets):
        found = sorted(pack.number for bucket in program.buckets for pack in bucket.packs)
        if found != list(range(len(found))) or not all(bucket.packs for bucket in program.buckets):
            yield Violation(f"packs have the numbers {found}: they are to number the packs of all buckets, each once")
