"""What workers agree about when they begin a call together."""

from dataclasses import replace

import pytest

from mirrorc.ir.program import Accumulation
from mirrorc.runtime.workers.protocol.header import BESIDES, TURN, Agreement, Header, agreement, kind_of

PLAIN = Header(5, 0, 0, 1, 2, 3, 4, num_examples=4, num_present=1, seed=9)
ADDS, ENDS = kind_of(Accumulation.ADDS), kind_of(Accumulation.ENDS)


def agreed(*said: Header) -> tuple[Agreement | None, str, int]:
    return agreement([Header.of(one.to_tensor()) for one in said])


@pytest.mark.parametrize(
    "other",
    [PLAIN, replace(PLAIN, kind=ADDS), replace(PLAIN, kind=ENDS, num_accumulated_calls=1), replace(PLAIN, is_fresh=1)],
)
def test_a_call_besides_training_is_made_by_all_or_refused(other: Header) -> None:
    besides = replace(PLAIN, kind=BESIDES, schedule=8)
    assert agreed(besides, other)[:2] == (None, "kind")
    assert agreed(other, besides)[:2] == (None, "kind")
    found, _, _ = agreed(besides, besides)
    assert found is not None and not found.is_other and not found.takes_over


def test_an_update_ends_an_accumulation_on_all_workers() -> None:
    found, _, _ = agreed(PLAIN, replace(PLAIN, kind=ENDS, num_accumulated_calls=2, num_accumulated=3))
    assert (
        found is not None and found.is_other and found.accumulation is Accumulation.ENDS and found.num_accumulated == 3
    )
    assert agreed(PLAIN, replace(PLAIN, kind=ADDS))[:2] == (None, "kind")


def test_steps_are_counted_as_the_first_worker_that_has_not_left_counts_them() -> None:
    """One of them may have failed where the others had begun."""
    found, _, _ = agreed(
        replace(PLAIN, num_steps=3, has_left=1), replace(PLAIN, num_steps=7), replace(PLAIN, num_steps=8)
    )
    assert found is not None and found.num_steps == 7


def test_who_has_left_follows_those_who_say_whose_turn_it_is() -> None:
    left, first, second = (Header(5, kind=TURN, **more) for more in ({"has_left": 1}, {"num_examples": 1}, {"turn": 1}))
    found, _, _ = agreed(left, second, second)
    assert found is not None and found.turn == 1 and not found.is_over and not found.takes_over and not found.is_other
    assert agreed(left, first, second) == (None, "turn", 2)
    assert agreed(left, PLAIN)[:2] == (None, "kind") == agreed(replace(PLAIN, has_left=1), first)[:2]
    over, _, _ = agreed(left, left)
    assert over is not None and over.is_over
