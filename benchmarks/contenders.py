"""What trains a workload: mirrorc and its peers on torch.

python benchmarks/contenders.py DDP gpt-8 --rank 0 --port 29500     # serves steps, see serving.py
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
from serving import StepFunction, serve
from torch import nn
from workloads import WORKLOADS, Workload

NUM_REPLICAS = 2


class WithLoss(nn.Module):
    """Model and loss as one module, so that a compiler sees both."""

    def __init__(self, workload: Workload) -> None:
        super().__init__()
        self.model, self.loss_fn = workload.make_model(), workload.loss_fn

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss_fn(self.model(x), y)


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    """The optimizer of all contenders."""
    return torch.optim.AdamW(module.parameters(), lr=1e-3, fused=True)


def _mirrorc(workload: Workload, rank: int, backend: str) -> StepFunction:
    import mirrorc

    torch.set_num_threads(NUM_REPLICAS)
    model = workload.make_model()
    devices = [f"cpu:{i}" for i in range(NUM_REPLICAS)]
    # "mirrorc before" may have no groups of options
    options: Any = (
        {"compiler": mirrorc.Compiler(backend=backend)} if hasattr(mirrorc, "Compiler") else {"backend": backend}
    )
    step = mirrorc.compile(model, devices=devices, optimizer=adamw(model), loss_fn=workload.loss_fn, **options)
    x, y = workload.make_batch(workload.per_replica * NUM_REPLICAS)
    return lambda: step(x, target=y)


def _mirrorc_module(workload: Workload, rank: int, backend: str) -> StepFunction:
    torch.set_num_threads(NUM_REPLICAS)
    return module_step(workload, [f"cpu:{i}" for i in range(NUM_REPLICAS)], backend)


def module_step(workload: Workload, devices: Sequence[str], backend: str) -> StepFunction:
    """A loop of the user's own around `mirrorc.data_parallel`."""
    import mirrorc

    model = workload.make_model()
    module = mirrorc.data_parallel(model, devices, compiler=mirrorc.Compiler(backend=backend))
    optimizer = adamw(model)
    x, y = workload.make_batch(workload.per_replica * len(devices))

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = workload.loss_fn(module(x), y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def _one_process(workload: Workload, rank: int, *, compiled: bool) -> StepFunction:
    torch.set_num_threads(NUM_REPLICAS)
    module = WithLoss(workload)
    optimizer = adamw(module)
    forward = torch.compile(module) if compiled else module
    x, y = workload.make_batch(workload.per_replica * NUM_REPLICAS)

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def ddp_step(
    module: nn.parallel.DistributedDataParallel, workload: Workload, *, is_compiled: bool, sync: bool
) -> StepFunction:
    """The step of a model with its loss, on one worker's examples; without ``sync`` workers never communicate."""
    optimizer = adamw(module)
    forward = torch.compile(module) if is_compiled else module
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


def _ddp(workload: Workload, rank: int, *, compiled: bool = False, sync: bool = True) -> StepFunction:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", rank=rank, world_size=NUM_REPLICAS)
    module = nn.parallel.DistributedDataParallel(WithLoss(workload), gradient_as_bucket_view=True)
    return ddp_step(module, workload, is_compiled=compiled, sync=sync)


CONTENDERS: dict[str, tuple[int, Callable[..., StepFunction], dict[str, Any]]] = {
    "mirrorc": (1, _mirrorc, {"backend": "inductor"}),
    "mirrorc, eager": (1, _mirrorc, {"backend": "eager"}),
    "mirrorc module": (1, _mirrorc_module, {"backend": "inductor"}),
    "mirrorc, autograd": (1, _mirrorc, {"backend": "eager", "capture": "autograd"}),
    "DDP": (NUM_REPLICAS, _ddp, {}),
    "DDP + compile": (NUM_REPLICAS, _ddp, {"compiled": True}),
    "DDP no_sync": (NUM_REPLICAS, _ddp, {"sync": False}),
    "one process": (1, _one_process, {"compiled": False}),
    "one process + compile": (1, _one_process, {"compiled": True}),
}
"""Name to number of processes, function that makes a step, and its options."""


def main() -> None:
    """A contender's process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=list(CONTENDERS))
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--port", type=int, default=29500, help="where the processes of a contender rendezvous")
    options = parser.parse_args()
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(options.port))
    torch.manual_seed(options.rank)
    _, make, settings = CONTENDERS[options.contender]
    serve(functools.partial(make, WORKLOADS[options.workload], options.rank, **settings))


if __name__ == "__main__":
    main()
