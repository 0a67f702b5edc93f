"""Steps of workers on two hosts, which are network namespaces of this machine."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hosts
import pytest
import worker_training

PORT = 29500  # in a host of our own nothing listens

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(hosts.why_not()), reason=f"no hosts: {hosts.why_not()}")]


def trained(gigabits: float, given: dict[str, Any]) -> list[Any]:
    """What training gave on each host."""
    with contextlib.ExitStack() as ending:
        try:
            commands = ending.enter_context(hosts.two_hosts(gigabits))
        except RuntimeError as error:  # even root may not make namespaces, as in some containers
            pytest.skip(str(error))
        workers = [_start(command, rank, given) for rank, command in enumerate(commands)]
        try:
            answers = [worker.communicate(timeout=200) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    for worker, (_, errors) in zip(workers, answers, strict=True):
        assert worker.returncode == 0, errors
    return [json.loads(answer.splitlines()[-1]) for answer, _ in answers]


def _start(command: Sequence[str], rank: int, given: dict[str, Any]) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts.ADDRESSES[0], "MASTER_PORT": str(PORT)}
    support = [str(Path(worker_training.__file__).parent), str(Path(hosts.__file__).parent)]
    script = (
        "import json, sys, worker_training;"
        "print(json.dumps(worker_training.train(int(sys.argv[1]), json.loads(sys.argv[2]))))"
    )
    return subprocess.Popen(
        [*command, sys.executable, "-c", script, str(rank), json.dumps(given)],
        env={
            **os.environ,
            **place,
            "GLOO_SOCKET_IFNAME": hosts.INTERFACE,
            "PYTHONPATH": os.pathsep.join([*support, os.environ.get("PYTHONPATH", "")]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_steps_over_two_hosts_are_those_of_one_process() -> None:
    given = {"model": "mlp", "devices": [1, 2], "sizes": [[4, 4], [5, 2]]}
    losses, values = worker_training.reference(given, range(4))
    for own in trained(1.0, given):
        assert own["losses"] == pytest.approx(losses, rel=1e-9)
        assert own["values"].keys() == values.keys()
        for name, expected in values.items():
            assert own["values"][name] == pytest.approx(expected, rel=1e-9, abs=1e-11)
