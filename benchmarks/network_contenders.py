"""What trains a workload over several hosts, a worker with one thread on each: mirrorc and DistributedDataParallel.

`network.py` starts it on every host: python benchmarks/network_contenders.py "DDP 25 MB" gpt-8 --rank 0 --address 10.77.0.1
"""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Callable
from typing import Any

import torch
from contenders import WithLoss, adamw, ddp_step, module_step
from serving import StepFunction, serve
from torch import nn
from workloads import WORKLOADS, Workload

NUM_WORKERS = 2
_NUM_THREADS = 1


def _mirrorc(
    workload: Workload,
    is_compiled: bool,
    *,
    ratio: float | None = None,
    **options: Any,
) -> StepFunction:
    import mirrorc
    from mirrorc.options.table import grouped

    model = workload.make_model()
    if ratio is not None:
        options["compression"] = mirrorc.TopK(ratio)
    step = mirrorc.compile(
        model,
        devices=["cpu"],
        optimizer=adamw(model),
        loss_fn=workload.loss_fn,
        **grouped({"backend": "inductor" if is_compiled else "eager", **options}),
    )
    x, y = workload.make_batch(workload.per_replica)
    return lambda: step(x, target=y)


def _mirrorc_module(workload: Workload, is_compiled: bool) -> StepFunction:
    return module_step(workload, ["cpu"], "inductor" if is_compiled else "eager")


def _ddp(
    workload: Workload,
    is_compiled: bool,
    *,
    cap_mb: float,
    half: bool = False,
    rank: int | None = None,
    sync: bool = True,
) -> StepFunction:
    torch.distributed.init_process_group("gloo")
    module = nn.parallel.DistributedDataParallel(WithLoss(workload), gradient_as_bucket_view=True, bucket_cap_mb=cap_mb)
    if half:
        from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook

        # by another name, as DDP refuses this one where there is no NCCL
        module.register_comm_hook(None, lambda group, bucket: bf16_compress_hook(group, bucket))
    if rank is not None:
        from torch.distributed.algorithms.ddp_comm_hooks import powerSGD_hook

        state = powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=rank, start_powerSGD_iter=2)
        module.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return ddp_step(module, workload, is_compiled=is_compiled, sync=sync)


def _wire(workload: Workload, is_compiled: bool) -> StepFunction:
    """All gradients added up, and nothing else."""
    torch.distributed.init_process_group("gloo")
    gradients = torch.zeros(sum(p.numel() for p in workload.make_model().parameters()))
    return lambda: torch.distributed.all_reduce(gradients)


NETWORK_CONTENDERS: dict[str, tuple[Callable[..., StepFunction], dict[str, Any]]] = {
    "mirrorc": (_mirrorc, {}),
    "mirrorc module": (_mirrorc_module, {}),
    "mirrorc, autograd": (_mirrorc, {"capture": "autograd"}),
    "mirrorc 25 MB": (_mirrorc, {"buckets": 25.0}),
    "mirrorc bfloat16": (_mirrorc, {"compression": "bfloat16"}),
    "mirrorc, TopK": (_mirrorc, {"ratio": 0.01}),
    "mirrorc alone": (_mirrorc, {"distributed": False}),
    "DDP 1 MB": (_ddp, {"cap_mb": 1}),
    "DDP 5 MB": (_ddp, {"cap_mb": 5}),
    "DDP 25 MB": (_ddp, {"cap_mb": 25}),
    "DDP 25 MB, bf16": (_ddp, {"cap_mb": 25, "half": True}),
    # From its third step on; all in one bucket: with several, in buckets of 25 MB, the one run that was tried ended with a
    # connection reset over gloo.
    "DDP one bucket, PowerSGD": (_ddp, {"cap_mb": 4096, "rank": 4}),
    "DDP no_sync": (_ddp, {"cap_mb": 25, "sync": False}),
    "all-reduce alone": (_wire, {}),
}
"""Name to the function that makes a step, and its options."""


def main() -> None:
    """A worker of a contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("contender", choices=list(NETWORK_CONTENDERS))
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True, help="of the host of worker 0")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--interface", required=True, help="over which workers speak")
    parser.add_argument("--eager", action="store_true", help="neither mirrorc nor DDP compiles")
    options = parser.parse_args()
    place = {"RANK": options.rank, "WORLD_SIZE": NUM_WORKERS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR=options.address, MASTER_PORT=str(options.port), GLOO_SOCKET_IFNAME=options.interface)
    torch.set_num_threads(_NUM_THREADS)
    torch.manual_seed(options.rank)
    make, settings = NETWORK_CONTENDERS[options.contender]
    serve(functools.partial(make, WORKLOADS[options.workload], not options.eager, **settings))


if __name__ == "__main__":
    main()
