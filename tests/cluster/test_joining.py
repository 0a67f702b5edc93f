"""Joining, by three processes on this machine that run all cases one after the other."""

import json
import os
import socket
import subprocess
import sys
import threading
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from tiny_programs import sgd_step
from torch import distributed, nn
from worker_processes import ENVIRONMENT, free_port, outcomes, told

import mirrorc
from mirrorc.cluster import Place, find_place, join, joining


def tf_config(kind: str, index: int, cluster: dict[str, list[str]]) -> dict[str, str]:
    return {"TF_CONFIG": json.dumps({"cluster": cluster, "task": {"type": kind, "index": index}})}


def given(variables: dict[str, str], **more: Any) -> dict[str, Any]:
    return {"variables": variables, **more}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    ports = iter([free_port() for _ in range(8)])

    def each(ranks: tuple[int, ...] = (0, 1, 2), sizes: tuple[int, ...] = (3, 3, 3), **more: Any) -> list[Any]:
        port = next(ports)
        return [given(told(r, size, port), **more) for r, size in zip(ranks, sizes, strict=True)]

    addresses = {"chief": [f"127.0.0.1:{next(ports)}"], "worker": ["127.0.0.1:2", "127.0.0.1:3"]}
    tasks = [("worker", 1), ("chief", 0), ("worker", 0)]
    cases: dict[str, list[Any]] = {
        "torchrun": each(),
        "TF_CONFIG": [given(tf_config(kind, index, addresses)) for kind, index in tasks],
        "never comes": [*each(timeout=1.0)[:2], None],
        "no chief": [None, *each(timeout=1.0)[1:]],
        "other size": each(sizes=(3, 2, 3)),
        "same rank": each(ranks=(0, 1, 1)),
        "other version": each(),
        "group": [{"group": next(ports), "size": 3}] * 3,
    }
    cases["other version"][2]["torch"] = "1.0.0"
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        taken = int(listener.getsockname()[1])
        cases["port in use"] = [given(told(r, 3, taken), timeout=1.0) for r in range(3)]
        return outcomes(tmp_path_factory.mktemp("workers"), cases)


def errors(own: list[Any]) -> list[str]:
    return [each["error"] for each in own if each is not None]


@pytest.mark.slow
@pytest.mark.parametrize(("case", "ranks"), [("torchrun", [0, 1, 2]), ("TF_CONFIG", [2, 0, 1]), ("group", [0, 1, 2])])
def test_workers_join(found: dict[str, Any], case: str, ranks: list[int]) -> None:
    assert [own["rank"] for own in found[case]] == ranks == [own["local_rank"] for own in found[case]]
    assert [own["is_chief"] for own in found[case]] == [rank == 0 for rank in ranks]
    assert [own["should_checkpoint"] for own in found[case]] == [rank == 0 for rank in ranks]
    assert all(own["num_workers"] == 3 and own["ranks"] == [0, 1, 2] and own["is_same"] for own in found[case])


@pytest.mark.parametrize(
    ("case", "expected"),
    [
        ("never comes", "the workers cannot train together\n  why:  worker 2 of 3 did not come in time"),
        ("other size", "was told that there are 3, worker 1 ("),
        ("same rank", "have one rank\n  fix:  Give each its own RANK, and each job its own MASTER_PORT"),
        ("other version", " torch 1.0.0\n  fix:  Install the same version on all"),
    ],
)
def test_all_that_are_there_raise_the_same_error(found: dict[str, Any], case: str, expected: str) -> None:
    raised = errors(found[case])
    assert expected in raised[0] and raised[0].startswith("CommunicationError: ")
    assert set(raised) == {raised[0]} and len(raised) == (2 if case == "never comes" else 3)


def test_without_worker_0_the_others_name_the_address(found: dict[str, Any]) -> None:
    for rank, text in zip((1, 2), errors(found["no chief"]), strict=True):
        assert f"worker {rank} of 3 by torchrun's variables: nobody opened the workers' store at 127.0.0.1:" in text
        assert "Connection refused" in text


def test_port_in_use_is_said_by_all(found: dict[str, Any]) -> None:
    chief, *others = errors(found["port in use"])
    assert "worker 0 of 3 by torchrun's variables: it cannot open the workers' store at 127.0.0.1:" in chief
    assert "another MASTER_PORT" in chief
    assert all("does not answer as a store" in text and "another MASTER_PORT" in text for text in others)


def test_waits_are_bounded(found: dict[str, Any]) -> None:
    seconds = [own["seconds"] for case in found.values() for own in case if own is not None and "seconds" in own]
    assert len(seconds) == 16 and max(seconds) < 20


def test_process_without_description_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ENVIRONMENT:
        monkeypatch.delenv(name, raising=False)
    assert find_place() == Place() and str(find_place()) == "a process on its own"
    alone = join()
    assert (alone.rank, alone.num_workers, alone.local_rank, alone.is_chief) == (0, 1, 0, True)
    assert repr(alone) == "<Cluster: worker 0 of 1>"


def test_torchrun_comes_before_tf_config() -> None:
    variables = {**told(1, 2, 5), **tf_config("worker", 0, {"worker": ["a:1", "b:1", "c:1"]})}
    assert find_place(variables=variables).source == "torchrun's variables"
    del variables["RANK"], variables["WORLD_SIZE"]
    assert find_place(variables=variables).num_workers == 3


def test_wrong_group_and_wrong_time_are_refused() -> None:
    with pytest.raises(TypeError, match=r"process_group is 3\n  fix:  leave process_group= out"):
        join(3)
    with pytest.raises(ValueError, match="timeout is 0: give a positive number"):
        join(timeout=0)


def compiled(**options: Any) -> mirrorc.Step:
    model = nn.Linear(2, 1)
    return sgd_step(model, None, loss_fn=nn.functional.mse_loss, **options)


@pytest.mark.slow
def test_compile_trains_alone_only_where_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in told(1, 4, free_port()).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(mirrorc.CommunicationError, match=r"worker 1 of 4 by torchrun's variables.*nobody opened"):
        compiled(timeout=0.2)
    compiled(distributed=False).close()
    with pytest.raises(ValueError, match="process_group= and distributed=False cannot be combined"):
        compiled(distributed=False, process_group=3)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(ValueError, match=r"(?s)RANK is '4'.*or:   distributed=False"):
        compiled()
    compiled(distributed=False).close()
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    compiled().close()


@pytest.mark.slow
def test_compile_waits_for_the_workers_of_a_process_group() -> None:
    distributed.init_process_group("fake", rank=0, world_size=2, store=distributed.HashStore())
    try:
        with pytest.raises(mirrorc.CommunicationError, match="worker 1 of 2 did not come in time"):
            compiled(timeout=timedelta(seconds=0.2))
    finally:
        distributed.destroy_process_group()


@pytest.mark.slow
def test_a_store_that_stops_to_answer_is_not_waited_for_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class Stopped:
        def add(self, *_: Any) -> int:
            answers.wait(60)
            raise distributed.DistNetworkError("it goes on when nobody listens any more")

    monkeypatch.setattr(joining, "_LONGEST_VERDICT_SECONDS", 0.1)
    monkeypatch.setattr(joining, "open_store", lambda *_: distributed.HashStore())
    monkeypatch.setattr(distributed, "PrefixStore", lambda *_: Stopped())
    for name, value in told(1, 2, 5).items():
        monkeypatch.setenv(name, value)
    with pytest.raises(
        mirrorc.CommunicationError,
        match=r"worker 1 of 2.*store through which workers meet at 127\.0\.0\.1:5 has stopped",
    ):
        join(timeout=timedelta(seconds=0.1))
    answers.set()


TORCHRUN = """
import torch, mirrorc
cluster = mirrorc.cluster.join(timeout=60)
assert mirrorc.cluster.join() is cluster
torch.distributed.init_process_group("gloo")  # at the same address: they do not disturb each other
ranks = [None, None]
torch.distributed.all_gather_object(ranks, (cluster.rank, cluster.local_rank, cluster.num_workers))
assert ranks == [(0, 0, 2), (1, 1, 2)], ranks
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
options = dict(compiler=mirrorc.Compiler(backend="eager"), communication=mirrorc.Communication(timeout=60))
step = mirrorc.compile(model, 2, optimizer=optimizer, loss_fn=torch.nn.MSELoss(), **options)
losses = [None, None]
torch.distributed.all_gather_object(losses, float(step(torch.randn(4, 2), target=torch.randn(4, 1))))
assert losses[0] == losses[1] and step.num_replicas == 4, losses
weights = [None, None]
torch.distributed.all_gather_object(weights, model.weight.tolist())
assert weights[0] == weights[1], weights
step.close()
torch.distributed.destroy_process_group()
"""


@pytest.mark.slow
def test_workers_that_torchrun_starts_join(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TORCHRUN)
    options = ["--nproc-per-node=2", "--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "train.py"]
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
