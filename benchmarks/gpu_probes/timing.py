"""Times steps as a GPU and the host see them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch

from gpu_probes.probe import Scene

NUM_STEPS = 50


@dataclass(frozen=True)
class Times:
    """Medians in milliseconds.

    Attributes:
        gpu: of a step among others, none of which the host waits for; in a rehearsal the host's.
        host: until a call returns that finds the GPU idle.
    """

    gpu: float
    host: float


def timed(scene: Scene, step: Callable[[], Any]) -> Times:
    """Times a step that has run before."""
    if scene.is_rehearsal:
        host = statistics.median(host_ms(step, lambda: None) for _ in range(5))
        return Times(host, host)
    for _ in range(5):
        step()
    torch.cuda.synchronize()
    marks = [torch.cuda.Event(enable_timing=True) for _ in range(NUM_STEPS + 1)]
    marks[0].record()
    for mark in marks[1:]:
        step()
        mark.record()
    torch.cuda.synchronize()
    gpu = statistics.median(one.elapsed_time(other) for one, other in pairwise(marks))
    host = statistics.median(host_ms(step, torch.cuda.synchronize) for _ in range(NUM_STEPS))
    return Times(gpu, host)


def host_ms(step: Callable[[], Any], wait: Callable[[], object]) -> float:
    """The milliseconds of one call, before which the GPU is waited for."""
    wait()
    begun = time.perf_counter()
    step()
    return (time.perf_counter() - begun) * 1e3


def first_step_seconds(scene: Scene, make_step: Callable[[], Callable[[], Any]]) -> tuple[Callable[[], Any], float]:
    """Makes a step and runs it once; gives the step, and the seconds of both together."""
    if not scene.is_rehearsal:
        torch.cuda.init()
    begun = time.perf_counter()
    step = make_step()
    step()
    if not scene.is_rehearsal:
        torch.cuda.synchronize()
    return step, time.perf_counter() - begun
