"""Processes that join as workers, for tests: each runs all cases one after the other, and tells what came of them."""

import atexit
import contextlib
import itertools
import json
import multiprocessing
import os
import pickle
import random
import signal
import socket
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from garbage import collect_seldom

ENVIRONMENT = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "TF_CONFIG")


def own_ports(worker: str) -> range:
    """The ports that a worker of pytest-xdist may take, by its name; eight and a run without workers have some of their own.

    All are below those that systems give to sockets that ask for any: from 16000 on in gVisor, from 32768 on in Linux.
    """
    share = (16_000 - 10_000) // 9
    begin = 10_000 + (0 if not worker else 1 + int(worker.removeprefix("gw")) % 8) * share
    return range(begin, begin + share)


_PORTS = own_ports(os.environ.get("PYTEST_XDIST_WORKER", ""))
_next_ports = itertools.count(random.SystemRandom().randrange(len(_PORTS)))  # two runs of the tests seldom meet


def free_port() -> int:
    """A port at which nothing listens, and which no connection is given until it is opened, however much later."""
    while True:
        port = _PORTS[next(_next_ports) % len(_PORTS)]
        with socket.socket() as listener, contextlib.suppress(OSError):
            listener.bind(("127.0.0.1", port))
            return port


def told(rank: int, num_workers: int, port: int) -> dict[str, str]:
    """The variables that torchrun sets."""
    size = str(num_workers)
    return {"RANK": str(rank), "WORLD_SIZE": size, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def workers(how: str, given: Any, size: int = 0, num_processes: int = 3) -> list[Any]:
    """A case of `outcomes`: each of as many workers as there are ``devices`` is given this; see `_run` for ``how``."""
    size, port = size or len(given["devices"]), free_port()
    own = [{"variables": told(rank, size, port), how: given} for rank in range(size)]
    return [*own, *[None] * (num_processes - size)]


class Outcome(dict[str, Any]):
    """What came of a case in a process; asked for what it has not, it tells the error that came instead."""

    def __missing__(self, key: str) -> Any:
        raise KeyError(f"{key}: {self['error']}" if "error" in self else key)


class Launcher:
    """A process that has imported torch and made a first trace, which take seconds, and forks the processes of all `outcomes`.

    It starts when it is first needed, and ends with the process that has started it.
    """

    def __init__(self) -> None:
        self._running: tuple[subprocess.Popen[bytes], Connection] | None = None
        atexit.register(self.close)

    def run(self, limit_seconds: float, **request: Any) -> int:
        """The exit code of what `_lead` does with the request; an error if it takes longer."""
        requests = self._started()
        leader = None
        try:
            requests.send(request)
            leader = _told(requests, limit_seconds)
            code = _told(requests, limit_seconds)
        except BaseException:
            _end(leader)
            self.close()  # it would tell of this request later
            raise
        _end(leader)
        return code

    def _started(self) -> Connection:
        if self._running is None:
            ours, theirs = multiprocessing.Pipe()
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._running = (
                subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[theirs.fileno()], start_new_session=True),
                ours,
            )
            theirs.close()
        return self._running[1]

    def close(self) -> None:
        """Ends it; nothing that it has forked runs any more."""
        if self._running is not None:
            process, requests = self._running
            self._running = None
            requests.close()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _told(requests: Connection, limit_seconds: float) -> int:
    """The next number that the launcher tells."""
    if not requests.poll(limit_seconds):
        raise TimeoutError(f"processes have not ended in {limit_seconds} s")
    return int(requests.recv())


def _end(leader: int | None) -> None:
    """Ends what is left of the processes of a request."""
    if leader is not None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(leader, signal.SIGKILL)


_LAUNCHER = Launcher()


def outcomes(
    folder: Path, cases: dict[str, list[dict[str, Any] | None]], limit_seconds: float = 100, num_ended: int = 0
) -> dict[str, Any]:
    """What came of each case in each process: the attributes of the cluster, what training gave, or the text of the error.

    Args:
        cases: by name; for each process how it joins, see `_run`, or None if it does not.
        num_ended: how many of the last processes end on the way, by a signal; of these comes nothing.
    """
    (folder / "cases.pickle").write_bytes(pickle.dumps(cases))
    num_processes = len(next(iter(cases.values())))
    environment = {name: value for name, value in os.environ.items() if name not in ENVIRONMENT}
    output = folder / "output.txt"
    try:
        code = _LAUNCHER.run(
            limit_seconds,
            folder=folder,
            num_processes=num_processes,
            num_ended=num_ended,
            environment=environment,
            output=output,
        )
    except TimeoutError as error:
        error.add_note(output.read_text() if output.exists() else "none has started")
        raise
    assert code == 0, output.read_text()
    texts = [(folder / f"outcome-{number}.json").read_text() for number in range(num_processes - num_ended)]
    each = [json.loads(text, object_hook=Outcome) for text in texts]
    return {name: [own[name] for own in each] for name in cases}


def outcome(folder: Path, processes: list[Any], num_ended: int = 0) -> list[Any]:
    """The same of a single case."""
    return outcomes(folder, {"": processes}, num_ended=num_ended)[""]  # type: ignore[no-any-return]


class LazyOutcomes(Mapping[str, Any]):
    """What came of each case in each process, as `outcomes` gives it: of the fast cases together, of the seldom ones, and of the
    others, when one of them is first asked for. `make test` looks at the fast ones, `make test-all` alone at the seldom ones."""

    def __init__(
        self,
        make_folder: Callable[[str], Path],
        cases: Mapping[str, list[dict[str, Any] | None]],
        fast: Collection[str],
        limit_seconds: float = 250,
        seldom: Collection[str] = (),
    ) -> None:
        self._make_folder, self._cases, self._limit_seconds = make_folder, cases, limit_seconds
        self._fast, self._seldom = fast, seldom
        self._found: dict[str, Any] = {}

    def __getitem__(self, name: str) -> Any:
        if name not in self._found:
            group = {other: given for other, given in self._cases.items() if self._group(other) == self._group(name)}
            self._found |= outcomes(self._make_folder("workers"), group, self._limit_seconds)
        return self._found[name]

    def _group(self, name: str) -> tuple[bool, bool]:
        return name in self._fast, name in self._seldom

    def __iter__(self) -> Iterator[str]:
        return iter(self._cases)

    def __len__(self) -> int:
        return len(self._cases)


def _meet(folder: Path, name: str, number: int, num_processes: int) -> None:
    """Returns when all processes have come as far."""
    (folder / f"{name}-{number}").touch()
    while not all((folder / f"{name}-{other}").exists() for other in range(num_processes)):
        time.sleep(0.01)


def _run(given: dict[str, Any], number: int) -> Any:
    """Joins as it is told: by ``variables``, or a ``group``'s port and size; with ``timeout`` and a faked ``torch``.

    With a key of ``ways``, the function does all that.
    """
    import joint_compilations
    import lost_buckets
    import sharded_habits
    import sharded_training
    import torch
    import two_steps
    import worker_gradients
    import worker_habits
    import worker_lists
    import worker_texts
    import worker_training

    import mirrorc

    ways: dict[str, Callable[[int, Any], Any]] = {
        "train": worker_training.train,
        "join": worker_training.train_until_all_have_left,
        "shard": sharded_training.train,
        "lose": lost_buckets.train_through_a_lost_bucket,
        "compiles": joint_compilations.compile_in_turn,
        "calls": worker_habits.call,
        "gradients": worker_gradients.train,
        "habits": sharded_habits.train,
        "two": two_steps.train_two,
        "texts": worker_texts.train,
        "lists": worker_lists.train,
    }
    for name in ENVIRONMENT:
        os.environ.pop(name, None)
    os.environ.update(given.get("variables", {}))
    real, torch.__version__ = torch.__version__, given.get("torch", torch.__version__)
    try:
        if "group" in given:
            address = f"tcp://127.0.0.1:{given['group']}"
            torch.distributed.init_process_group("gloo", init_method=address, rank=number, world_size=given["size"])
        began = time.monotonic()
        for how, function in ways.items():
            if how in given:
                return function(int(given["variables"]["RANK"]), given[how])
        cluster = mirrorc.cluster.join(timeout=given.get("timeout", 60.0))
        told = {
            "rank": cluster.rank,
            "num_workers": cluster.num_workers,
            "local_rank": cluster.local_rank,
            "is_chief": cluster.is_chief,
            "should_checkpoint": cluster.should_checkpoint,
            "ranks": [worker.rank for worker in cluster.workers],
            "is_same": mirrorc.cluster.join() is cluster,
        }
        if "group" in given:
            torch.distributed.barrier()
        return told
    except (mirrorc.CommunicationError, ValueError) as error:
        return {"error": f"{type(error).__name__}: {error}", "seconds": time.monotonic() - began}
    finally:
        torch.__version__ = real
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def _run_all(folder: Path, number: int, num_processes: int, num_ended: int) -> None:
    """What one of the processes does."""
    found = {}
    for name, given in pickle.loads((folder / "cases.pickle").read_bytes()).items():
        _meet(folder, name, number, num_processes)
        found[name] = _run(given[number], number) if given[number] is not None else None
    (folder / f"outcome-{number}.json").write_text(json.dumps(found))
    if not num_ended:
        _meet(folder, "end", number, num_processes)  # the store of a case lives in one of them


def _warm_up() -> None:
    """Makes what the first trace and the first passes of a process make for all later ones.

    Without gradients: autograd refuses to work in a process that was forked after it has.
    """
    from tiny_programs import captured_model, every_stage, handmade
    from torch import nn

    captured_model(nn.Linear(4, 3), evaluates=True)
    every_stage(handmade(2))


def _run_in_processes(folder: Path, num_processes: int, num_ended: int) -> int:
    """Forks the processes, which run all cases; the exit code is 0 if none has failed."""
    children = []
    for number in range(num_processes):
        child = os.fork()
        if child == 0:
            try:
                _run_all(folder, number, num_processes, num_ended)
            except BaseException:  # noqa: BLE001 - the output has it
                traceback.print_exc()
                os._exit(1)
            os._exit(0)
        children.append(child)
    awaited, running, has_failed = set(children[: num_processes - num_ended]), set(children), False
    while awaited & running and not has_failed:
        child, status = os.wait()
        running.discard(child)
        has_failed = child in awaited and os.waitstatus_to_exitcode(status) != 0  # the others would wait for it
    for child in running:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    return int(has_failed)


def _lead(
    requests: Connection, folder: Path, num_processes: int, num_ended: int, environment: dict[str, str], output: Path
) -> int:
    """Does what one request asks for, as the first process of a session of its own, with the environment of who asks."""
    os.setsid()
    with output.open("wb") as file:
        os.dup2(file.fileno(), sys.stdout.fileno())
        os.dup2(file.fileno(), sys.stderr.fileno())
    os.environ.clear()
    os.environ.update(environment)
    requests.send(os.getpid())
    requests.close()
    return _run_in_processes(folder, num_processes, num_ended)


def _main() -> None:
    """Forks a process for each request, so that what takes long, the import of torch and first traces, is done once."""
    import joint_compilations  # noqa: F401
    import lost_buckets  # noqa: F401
    import sharded_habits  # noqa: F401
    import sharded_training  # noqa: F401
    import two_steps  # noqa: F401
    import worker_habits  # noqa: F401
    import worker_training  # noqa: F401

    sys.path.append(str(Path(__file__).parents[2] / "examples"))
    requests = Connection(int(sys.argv[1]))
    _warm_up()
    collect_seldom()
    with contextlib.suppress(EOFError, OSError):  # who asks has ended
        while True:
            request = requests.recv()
            leader = os.fork()
            if leader == 0:
                code = 1
                try:
                    code = _lead(requests, **request)
                except BaseException:  # noqa: BLE001 - the output has it
                    traceback.print_exc()
                os._exit(code)
            requests.send(os.waitstatus_to_exitcode(os.waitpid(leader, 0)[1]))


if __name__ == "__main__":
    _main()
