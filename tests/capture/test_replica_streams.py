"""Each replica draws from its own stream, in whatever order blocks run."""

import torch

from mirrorc.capture.replica_streams import ReplicaStream

CPU = torch.device("cpu")


def test_streams_do_not_depend_on_one_another() -> None:
    def drawn(stream: ReplicaStream) -> float:
        with stream.drawn_from():
            return torch.rand(()).item()

    before = torch.get_rng_state()
    one, two = ReplicaStream(1, CPU), ReplicaStream(2, CPU)
    in_turn = [drawn(one), drawn(two), drawn(one), drawn(two)]
    one, two = ReplicaStream(1, CPU), ReplicaStream(2, CPU)
    apart = [drawn(one), drawn(one), drawn(two), drawn(two)]
    assert in_turn == [apart[0], apart[2], apart[1], apart[3]] and len(set(apart)) == 4
    assert torch.equal(torch.get_rng_state(), before)


def test_a_stream_tells_whether_it_was_drawn_from() -> None:
    one, two = ReplicaStream(1, CPU), ReplicaStream(1, CPU)
    with one.drawn_from():
        torch.zeros(3)
    assert not one.has_advanced(two)
    with one.drawn_from():
        torch.rand(3)
    assert one.has_advanced(two)
