"""What trains a workload over two hosts with one plan of buckets, a worker with one thread on each; `plans.py` starts it.

    python benchmarks/plan_contenders.py 25/1 gpt-8 --rank 0 --address 10.77.0.1

Besides the seconds of its steps, it answers with those that the step itself has recorded, and with what it says of its buckets.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from typing import Any

import torch
from contenders import adamw
from workloads import WORKLOADS

import mirrorc

NUM_WORKERS = 2
AUTO = "auto"


def sizes_of(plan: str) -> dict[str, Any]:
    """The options of a plan: ``auto``, or both sizes as in ``25/1``."""
    if plan == AUTO:
        return {"bucket_cap_mb": AUTO}
    cap, first = map(float, plan.split("/"))
    return {"bucket_cap_mb": cap, "first_bucket_mb": first}


def main() -> None:
    """A worker of a plan."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan")
    parser.add_argument("workload", choices=list(WORKLOADS))
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--address", required=True, help="of the host of worker 0")
    parser.add_argument("--port", type=int, default=29500)
    parser.add_argument("--interface", required=True, help="over which workers speak")
    parser.add_argument("--exchange", default="auto", choices=["auto", "dense", "factors"])
    parser.add_argument("--eager", action="store_true")
    options = parser.parse_args()
    place = {"RANK": options.rank, "WORLD_SIZE": NUM_WORKERS, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in place.items()})
    os.environ.update(MASTER_ADDR=options.address, MASTER_PORT=str(options.port), GLOO_SOCKET_IFNAME=options.interface)
    torch.set_num_threads(1)
    torch.manual_seed(options.rank)
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    workload = WORKLOADS[options.workload]
    model = workload.make_model()
    with mirrorc.compile(
        model,
        devices=["cpu"],
        optimizer=adamw(model),
        loss_fn=workload.loss_fn,
        backend="eager" if options.eager else "inductor",
        exchange=options.exchange,
        **sizes_of(options.plan),
    ) as step:
        x, y = workload.make_batch(workload.per_replica)
        step(x, target=y)
        print(json.dumps(0.0), file=answers, flush=True)
        for line in sys.stdin:
            for _ in range(int(line)):
                step(x, target=y)
            found = step.explain()
            remark = next((str(one) for one in step.program.remarks if str(one).startswith("bucket sizes")), "")
            predicted = found.prediction.step_ms if found.prediction is not None else None
            told = {
                "step_ms": found.step_ms,
                "predicted_ms": predicted,
                "remark": remark,
                "explained": str(found),
                "num_buckets": len(step.program.buckets),
            }
            print(json.dumps(told), file=answers, flush=True)


if __name__ == "__main__":
    main()
