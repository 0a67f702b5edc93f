"""Steps of workers on two hosts, which are network namespaces of this machine."""

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


SCRIPT = """
import json, subprocess, sys, hosts, worker_training
worker_training.STRIKES["cut"] = lambda: subprocess.run(["ip", "link", "set", hosts.INTERFACE, "down"], check=True)
print(json.dumps(worker_training.train(int(sys.argv[1]), json.loads(sys.argv[2]))))
"""


def trained(gigabits: float, given: dict[str, Any], interface: str = "") -> list[Any]:
    """What training gave on each host; workers speak over an interface that is named, or find it."""
    with contextlib.ExitStack() as ending:
        try:
            commands = ending.enter_context(hosts.two_hosts(gigabits))
        except RuntimeError as error:  # even root may not make namespaces, as in some containers
            pytest.skip(str(error))
        workers = [_start(command, rank, given, interface) for rank, command in enumerate(commands)]
        try:
            answers = [worker.communicate(timeout=200) for worker in workers]
        finally:
            for worker in workers:
                worker.kill()
                worker.wait()
    for worker, (_, errors) in zip(workers, answers, strict=True):
        assert worker.returncode == 0, errors
    return [json.loads(answer.splitlines()[-1]) for answer, _ in answers]


def _start(command: Sequence[str], rank: int, given: dict[str, Any], interface: str) -> subprocess.Popen[str]:
    place = {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": hosts.ADDRESSES[0], "MASTER_PORT": str(PORT)}
    support = [str(Path(worker_training.__file__).parent), str(Path(hosts.__file__).parent)]
    return subprocess.Popen(
        [*command, sys.executable, "-c", SCRIPT, str(rank), json.dumps(given)],
        env={
            **os.environ,
            **place,
            "GLOO_SOCKET_IFNAME": interface,
            "PATH": hosts.search_path(),
            "PYTHONPATH": os.pathsep.join([*support, os.environ.get("PYTHONPATH", "")]),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.parametrize("interface", ["", hosts.INTERFACE])
def test_steps_over_two_hosts_are_those_of_one_process(interface: str) -> None:
    given = worker_training.training([1, 2], [[4, 4], [5, 2]])
    losses, values = worker_training.reference(given, range(4))
    for own in trained(1.0, given, interface):
        worker_training.assert_training(own, losses, values)


def test_a_cut_link_ends_both_workers() -> None:
    given = worker_training.training(
        [1, 1], [[4, 4]], steps=100_000, faults=[[2, 1, "after 0 cut"]], ends=True, options={"timeout": 6.0}
    )
    chief, other = trained(1.0, given)
    errors = [own["losses"][-1] for own in (chief, other)]
    assert (
        "CommunicationError: MC6201: training call" in errors[0]
        and "worker 1 (" in errors[0]
        and "no sign of life" in errors[0]
    )
    assert "the workers' store, which worker 0 or torchrun's agent has opened, does not answer any more" in errors[1]
    values = {}
    for own in (chief, other):
        assert len(own["losses"]) > 2 and own["losses"][-1].count("No parameter was changed") <= 1
        assert own["seconds"] < 30  # a busy machine takes longer than the bound and 5 s
        made = len(own["losses"]) - 1 + ("The update was made here" in own["losses"][-1])
        assert values.setdefault(made, own["values"]) == own["values"]
