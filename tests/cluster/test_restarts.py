"""Workers that are started again find one another in a store that the failed ones have used."""

import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from selections import slow
from torch import distributed
from worker_processes import ENVIRONMENT, free_port

from mirrorc.cluster import Place, joining
from mirrorc.errors import CommunicationError


def started(store: Any, ranks: list[int], seconds: float = 60.0, between: float = 0.0) -> list[Any]:
    found: list[Any] = [None] * len(ranks)

    def call(number: int) -> None:
        place = Place(ranks[number], 3, "torchrun's variables", "host-0", 29500, store_persists=True)
        try:
            _, workers = joining._roll_call(store, place, time.monotonic() + seconds, 1)
            found[number] = [worker.rank for worker in workers]
        except CommunicationError as error:
            found[number] = str(error)

    threads = [threading.Thread(target=call, args=(number,)) for number in range(len(ranks))]
    for thread in threads:
        thread.start()
        thread.join(between)
    for thread in threads:
        thread.join(60)
    return found


@pytest.mark.parametrize("ranks", [[2, 1, 0], *slow(([0, 1, 2],), ([1, 0, 2],))])
def test_workers_of_the_next_start_join_whoever_comes_first(ranks: list[int]) -> None:
    store = distributed.HashStore()
    for between in (0.0, 0.2):
        assert started(store, ranks, between=between) == [[0, 1, 2]] * 3
    failed = started(store, [0, 1], seconds=0.3)
    assert all("worker 2 of 3 did not come in time" in text for text in failed)
    assert started(store, ranks, between=0.1) == [[0, 1, 2]] * 3, (
        "what those have left that did not all come is not read"
    )


def test_a_chief_that_does_not_come_is_named() -> None:
    store = distributed.HashStore()
    assert started(store, [0, 1, 2]) == [[0, 1, 2]] * 3
    (text,) = started(store, [1], seconds=0.2)
    assert "worker 1 of 3 by torchrun's variables: worker 0 did not come in time" in text


KILLED_ONCE = """
import os, pathlib, signal, sys, torch, mirrorc
killed, done = pathlib.Path("killed"), pathlib.Path(f"done-{os.environ['RANK']}")
torch.manual_seed(0)
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = dict(compiler=mirrorc.Compiler(backend="eager"), communication=mirrorc.Communication(timeout=60))
with mirrorc.compile(model, 1, optimizer=optimizer, loss_fn=torch.nn.MSELoss(), **options) as step:
    for number in range(4):
        step(torch.randn(4, 2), target=torch.randn(4, 1))
        if number == 1 and sys.argv[1] == "second" and not killed.exists():
            killed.touch()
            os.kill(os.getpid(), signal.SIGKILL)
    done.write_text(os.environ["TORCHELASTIC_RESTART_COUNT"])
"""


@pytest.mark.slow
def test_workers_of_two_machines_go_on_when_one_was_killed(tmp_path: Path) -> None:
    """Two agents of torchrun stand for two machines. Only that of the killed worker counts a restart."""
    (tmp_path / "train.py").write_text(KILLED_ONCE)
    options = ["--nnodes=2", "--nproc-per-node=1", "--max-restarts=2", "--rdzv-backend=c10d", "--rdzv-id=killed"]
    options += [f"--rdzv-endpoint=127.0.0.1:{free_port()}", "--local-addr=127.0.0.1", "train.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    command = [sys.executable, "-m", "torch.distributed.run", *options]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    agents = [
        subprocess.Popen([*command, which], cwd=tmp_path, env=environment, **pipes) for which in ("first", "second")
    ]
    try:
        printed = [agent.communicate(timeout=200)[0] for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
            agent.wait()
    assert [agent.returncode for agent in agents] == [0, 0], "\n".join(printed)
    assert (tmp_path / "killed").exists()
    assert sorted((tmp_path / f"done-{rank}").read_text() for rank in range(2)) == ["0", "1"], (
        "else the test shows nothing"
    )
