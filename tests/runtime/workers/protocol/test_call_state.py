"""How far workers are, and who is behind."""

import pytest

from mirrorc.runtime.workers.protocol.call_state import Progress, least_far

CALL = Progress().begun(3)


def test_each_stage_is_further_than_the_one_before_and_is_told_in_words() -> None:
    stages = [Progress(), CALL, CALL.met(), CALL.met().sent(), CALL.met().sent().sent()]
    stages += [stages[-1].ready(), stages[-1].ended(), CALL.begun(4)]
    assert stages == sorted(stages) and len(set(stages)) == len(stages)
    assert [str(stage) for stage in stages] == [
        "before its first training call",
        "at the beginning of training call 3",
        "in training call 3, with 0 buckets sent",
        "in training call 3, with 1 bucket sent",
        "in training call 3, with 2 buckets sent",
        "in training call 3, with 2 buckets sent, ready to commit",
        "between training calls 3 and 4",
        "at the beginning of training call 4",
    ]
    assert [Progress.from_text(stage.to_text()) for stage in stages] == stages


@pytest.mark.parametrize(("calls", "behind"), [([3, 2, 3], 1), ([2, 2, 3], None), ([3, 3, 3], None), ([1], 0)])
def test_who_is_behind_all_others(calls: list[int], behind: int | None) -> None:
    assert least_far({rank: Progress().begun(call) for rank, call in enumerate(calls)}) == behind
