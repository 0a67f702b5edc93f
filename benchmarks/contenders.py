"""What trains a workload: mirrorc and its peers, each in processes of its own that step when told to."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import multiprocessing, nn
from workloads import WORKLOADS, Workload

NUM_REPLICAS = 2
StepFunction = Callable[[], Any]


class _WithLoss(nn.Module):
    """Model and loss as one module, so that a compiler sees both."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model, self.loss_fn = workload.make_model(), workload.loss_fn

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.model(x), y)


def _adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def _mirrorc(workload: Workload, rank: int, *, backend: str) -> StepFunction:
    import mirrorc

    torch.set_num_threads(NUM_REPLICAS)
    model = workload.make_model()
    devices = [f"cpu:{i}" for i in range(NUM_REPLICAS)]
    step = mirrorc.compile(model, devices=devices, optimizer=_adamw(model), loss_fn=workload.loss_fn, backend=backend)
    x, y = workload.make_batch(workload.per_replica * NUM_REPLICAS)
    return lambda: step(x, target=y)


def _one_process(workload: Workload, rank: int, *, compiled: bool) -> StepFunction:
    torch.set_num_threads(NUM_REPLICAS)
    module = _WithLoss(workload)
    optimizer = _adamw(module)
    forward = torch.compile(module) if compiled else module
    x, y = workload.make_batch(workload.per_replica * NUM_REPLICAS)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _ddp(workload: Workload, rank: int, *, compiled: bool = False, sync: bool = True) -> StepFunction:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=NUM_REPLICAS)
    module = nn.parallel.DistributedDataParallel(_WithLoss(workload), gradient_as_bucket_view=True)
    optimizer = _adamw(module)
    forward = torch.compile(module) if compiled else module
    x, y = workload.make_batch(workload.per_replica)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        if sync:
            loss = forward(x, y)
            loss.backward()
        else:
            with module.no_sync():
                loss = forward(x, y)
                loss.backward()
        optimizer.step()
        return loss.detach()

    return step


CONTENDERS: dict[str, tuple[int, Callable[..., StepFunction], dict[str, Any]]] = {
    "mirrorc": (1, _mirrorc, {"backend": "inductor"}),
    "mirrorc, eager": (1, _mirrorc, {"backend": "eager"}),
    "DDP": (NUM_REPLICAS, _ddp, {}),
    "DDP + compile": (NUM_REPLICAS, _ddp, {"compiled": True}),
    "DDP no_sync": (NUM_REPLICAS, _ddp, {"sync": False}),
    "one process": (1, _one_process, {"compiled": False}),
    "one process + compile": (1, _one_process, {"compiled": True}),
}
"""Name to number of processes, function that makes a step, and its options."""


def _serve(name: str, workload: str, rank: int, port: int, connection: Any) -> None:
    """A contender's process: makes the step, then runs as many as it is told and answers with their seconds."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.manual_seed(rank)
    _, make, options = CONTENDERS[name]
    started = time.perf_counter()
    step = make(WORKLOADS[workload], rank, **options)
    step()
    connection.send(time.perf_counter() - started)
    while (count := connection.recv()) is not None:
        seconds = []
        for _ in range(count):
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        connection.send(seconds)


class Contender:
    """The processes of one contender on one workload; they sleep between runs."""

    def __init__(self, name: str, workload: str, port: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._connections, self._processes = [], []
        for rank in range(CONTENDERS[name][0]):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(name, workload, rank, port, theirs), daemon=True)
            process.start()
            theirs.close()
            self._connections.append(ours)
            self._processes.append(process)
        self.seconds_to_first_step = max(connection.recv() for connection in self._connections)

    def peak_memory(self, count: int) -> int:
        """The most bytes that the processes have together at any time in ``count`` steps.

        Proportional set size: what several processes map, such as torch's libraries, counts once.
        """
        for connection in self._connections:
            connection.send(count)
        processes, peak = [psutil.Process(process.pid) for process in self._processes], 0
        while not all(connection.poll() for connection in self._connections):
            peak = max(peak, sum(process.memory_full_info().pss for process in processes))
        for connection in self._connections:
            connection.recv()
        return peak

    def run(self, count: int) -> list[float]:
        """Seconds of each of ``count`` steps; of the slowest process, where there are several."""
        for connection in self._connections:
            connection.send(count)
        return [max(times) for times in zip(*(c.recv() for c in self._connections), strict=True)]

    def close(self) -> None:
        """Ends the processes."""
        for connection, process in zip(self._connections, self._processes, strict=True):
            connection.send(None)
            process.join(timeout=10)
            if process.is_alive():
                process.terminate()
