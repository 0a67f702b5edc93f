"""What workers tell each other before they commit: messages that are added up, and what comes of the sum."""

import pytest
import torch

from mirrorc.errors import CommunicationError
from mirrorc.runtime.workers.protocol.vote import Columns, Outcome, Vote, outcome


def test_numbers_of_the_chief_reach_all_as_they_are() -> None:
    numbers = torch.tensor([[1.5, 2.5], [3.0, float("inf")]], dtype=torch.float64)
    columns = [Columns(2, 0), Columns(2, None)]
    votes = [Vote(True, numbers=numbers), Vote(True, numbers=torch.full((2, 1), 7.0))]
    message = sum(vote.to_message(own) for vote, own in zip(votes, columns, strict=True))
    assert isinstance(message, torch.Tensor)
    found = outcome(message, columns[1], 2)
    assert found.takes_place and found.numbers is not None and torch.equal(found.numbers, numbers)
    assert found.used is None


def test_numbers_of_all_replicas_stand_side_by_side() -> None:
    columns = [Columns(3, 0), Columns(3, 2)]
    votes = [Vote(True, numbers=torch.tensor([[1.0, 2.0]])), Vote(False, numbers=torch.tensor([[3.0]]))]
    message = sum(vote.to_message(own) for vote, own in zip(votes, columns, strict=True))
    assert isinstance(message, torch.Tensor)
    found = outcome(message, columns[0], 2)
    assert not found.takes_place and found.numbers is not None and found.numbers.tolist() == [[1.0, 2.0, 3.0]]


def test_a_vote_without_numbers_has_none() -> None:
    message = Vote(True).to_message(Columns(1, 0)) + Vote(True).to_message(Columns(1, None))
    assert outcome(message, Columns(1, 0), 2) == Outcome(True)


@pytest.mark.parametrize("numbers", [None, torch.tensor([[4.0]])])
def test_workers_tell_which_parameters_they_have_used(numbers: torch.Tensor | None) -> None:
    columns = [Columns(1, 0), Columns(1, None)]
    used = [torch.tensor(own, dtype=torch.float64) for own in ([1, 0, 0], [1, 1, 0])]
    votes = [Vote(True, numbers=numbers, used=own) for own in used]
    message = sum(vote.to_message(own) for vote, own in zip(votes, columns, strict=True))
    assert isinstance(message, torch.Tensor)
    found = outcome(message, columns[0], 2, 3)
    assert found.used is not None and found.used.tolist() == [2, 1, 0]
    assert (found.numbers is None) == (numbers is None)


def test_workers_that_found_something_else_in_the_same_sums_go_no_further() -> None:
    columns = Columns(1, 0)
    message = Vote(True).to_message(columns) + Vote(True, has_sound_sums=False).to_message(columns)
    with pytest.raises(CommunicationError, match="some workers skip the step, and others make it"):
        outcome(message, columns, 2)
