"""Probes of what drives several devices: threads of one process, or a process for each; here on one GPU."""

from __future__ import annotations

import functools
import statistics
import subprocess
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from gpu_probes import speed
from gpu_probes.probe import Figures, Scene, Skipped, add_probe, expect
from gpu_probes.timing import NUM_STEPS, host_ms, timed
from mirrorc.options.table import grouped

_SECONDS = 90.0
_COUNTS = (1, 2, 4, 8)


def many_kernels(scene: Scene) -> nn.Module:
    """A net of some hundred small kernels, whose launches take longer than they run."""
    depth, width = (2, 8) if scene.is_rehearsal else (40, 64)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.LayerNorm(width), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(width, 4))


def at_most_two_in_a_rehearsal(scene: Scene, count: int) -> None:
    """Raises `Skipped` for more devices in a rehearsal."""
    if scene.is_rehearsal and count > 2:
        raise Skipped("a rehearsal has at most two devices")


def in_threads(scene: Scene, count: int) -> Figures:
    """One process with a thread for each logical device, eight examples on each, one bucket."""
    at_most_two_in_a_rehearsal(scene, count)
    model = many_kernels(scene)
    width = model[0].in_features
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8 * count, width, device=scene.device)
    y = torch.zeros(8 * count, dtype=torch.long, device=scene.device)
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "buckets": 1000.0}
    with mirrorc.compile(model, scene.logical(count), optimizer=optimizer, **grouped(options)) as step:
        step(x, target=y)
        expect(len(step.program.buckets) == 1, f"there are {len(step.program.buckets)} buckets")
        times = timed(scene, lambda: step(x, target=y))
    return {"devices": count, "host ms": times.host, "host ms per device": times.host / count, "GPU ms": times.gpu}


def serve(scene: Scene) -> None:
    """One of several processes: a device of its own; says so when it is warm, waits for a line, and prints its host's times."""
    model = many_kernels(scene)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    x = torch.randn(8, model[0].in_features, device=scene.device)
    y = torch.zeros(8, dtype=torch.long, device=scene.device)
    with mirrorc.compile(model, scene.logical(1), optimizer=optimizer, loss_fn=F.cross_entropy) as step:
        for _ in range(5):
            step(x, target=y)
        print("warm", flush=True)
        sys.stdin.readline()
        wait = (lambda: None) if scene.is_rehearsal else torch.cuda.synchronize
        print(statistics.median(host_ms(lambda: step(x, target=y), wait) for _ in range(NUM_STEPS)), flush=True)


def in_processes(scene: Scene, count: int) -> Figures:
    """A process for each, which step at the same time and exchange nothing."""
    at_most_two_in_a_rehearsal(scene, count)
    program = (
        "import sys; sys.path.insert(0, sys.argv[1]); from pathlib import Path; from gpu_probes.probe import Scene; "
    )
    program += "from gpu_probes.processes import serve; serve(Scene(sys.argv[2], Path(sys.argv[3])))"
    command = [sys.executable, "-P", "-c", program, str(speed.HERE), scene.device, str(scene.out)]
    pipes: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    started = [subprocess.Popen(command, **pipes) for _ in range(count)]
    try:
        for one in started:
            expect(one.stdout.readline().strip() == "warm", "a process ended before it was warm")  # type: ignore[union-attr]
        for one in started:
            one.stdin.write("go\n")  # type: ignore[union-attr]
            one.stdin.flush()  # type: ignore[union-attr]
        times = [float(one.stdout.readline()) for one in started]  # type: ignore[union-attr]
    finally:
        for one in started:
            one.kill()
            one.communicate()
    return {"devices": count, "host ms": max(times), "host ms per device": max(times) / count}


def add() -> None:
    """Adds these probes."""
    for count in _COUNTS:
        add_probe(
            "processes", f"{count} in threads", functools.partial(in_threads, count=count), _SECONDS, leaves="threads"
        )
    for count in _COUNTS[1:]:
        probe = functools.partial(in_processes, count=count)
        add_probe("processes", f"{count} in processes", probe, _SECONDS, leaves="threads")
    for count in _COUNTS:
        probe, wrapped = functools.partial(in_threads, count=count), {"TORCHINDUCTOR_CPP_WRAPPER": "1"}
        add_probe("processes", f"{count} in threads, C++", probe, _SECONDS, environment=wrapped, leaves="wrapped")
    add_probe("processes", "trace", speed.trace, _SECONDS, leaves="threads")
