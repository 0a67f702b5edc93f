"""Each replica draws from its own stream, in whatever order blocks run."""

import subprocess
import sys

import pytest
import torch

from mirrorc.capture.eager.rng_streams import ReplicaStream

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


_READS_IN_THREADS = """
import gc, threading, time, torch
from mirrorc.capture.eager.rng_streams import generator_states

def give_way(phase, info):
    if threading.current_thread() is not threading.main_thread():
        time.sleep(0.001)  # within the allocation of what is read

def read():
    kept = []
    barrier.wait()
    while time.monotonic() < end:
        kept.append(generator_states([cpu]))

cpu, barrier, end = torch.device("cpu"), threading.Barrier(3), time.monotonic() + 1
gc.callbacks.append(give_way)
threads = [threading.Thread(target=read) for _ in range(3)]
[thread.start() for thread in threads]
gc.set_threshold(1)  # while they read
[thread.join() for thread in threads]
print("all have read")
"""


@pytest.mark.slow
def test_threads_read_the_generators_whatever_python_does_meanwhile() -> None:
    """In a process of its own: where threads wait for each other with Python's lock held, nothing in it can end it."""
    command = [sys.executable, "-c", _READS_IN_THREADS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    assert "all have read" in done.stdout
