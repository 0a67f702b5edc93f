"""Compares the code of one device with torch.compile's: the processor time of a step, and of its generated kernels.

    python benchmarks/kernels.py [--workloads resnet-16 words-16k] [--steps 12] [--calls]

mirrorc trains each workload on one logical CPU, and torch.compile compiles the model with its loss; both with one thread and
fused AdamW, from the same weights, in turns in one process. Prints a Markdown table. Processor time depends less than time on
what else the machine does. The kernels' own time, as torch's profiler tells it, is that of the generated code without
the library calls in it, such as matrix products: what fusion and vectorization make better or worse. ``--calls`` lists the
calls that take the most time on each side.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS, Workload

import mirrorc

_GENERATED = "## Call CompiledFxGraph"  # how Inductor marks a call of its code
_PROFILED = 3  # steps


MODELS = [name for name in WORKLOADS if name != "tiny"]


def steps_of(workload: Workload) -> dict[str, Callable[[], object]]:
    """A step of each side, from equal weights on the same batch."""
    x, y = workload.make_batch(workload.per_replica)
    torch.manual_seed(0)
    model, same = workload.make_model(), workload.make_model()
    same.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3, fused=True) for one in (model, same)]
    step = mirrorc.compile(model, ["cpu:0"], optimizer=optimizers[0], loss_fn=workload.loss_fn)
    compiled = torch.compile(lambda x, y: workload.loss_fn(same(x), y))

    def theirs() -> None:
        compiled(x, y).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    return {"mirrorc": lambda: step(x, target=y), "torch.compile": theirs}


def profiled(step: Callable[[], object], num_calls: int) -> tuple[float, str]:
    """The seconds of a step's generated kernels, and a table of its most expensive calls."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(_PROFILED):
            step()
    averages = found.key_averages()
    kernels = sum(event.self_cpu_time_total for event in averages if event.key.startswith(_GENERATED))
    table = averages.table(sort_by="self_cpu_time_total", row_limit=num_calls, max_name_column_width=60)
    return kernels / _PROFILED / 1e6, table


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=MODELS, choices=MODELS)
    parser.add_argument("--steps", type=int, default=12, help="of each side")
    parser.add_argument("--calls", action="store_true", help="list the most expensive calls")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| workload | mirrorc, ms | torch.compile, ms | ratio | kernels alone: mirrorc, ms | torch.compile, ms |")
    print("|---|---|---|---|---|---|")
    for name in options.workloads:
        torch._dynamo.reset()
        steps = steps_of(WORKLOADS[name])
        seconds: dict[str, list[float]] = {side: [] for side in steps}
        for turn in range(options.steps + 3):
            for side, step in steps.items():
                begun = time.process_time()
                step()
                if turn >= 3:
                    seconds[side].append(time.process_time() - begun)
        own, other = (1e3 * statistics.median(times) for times in seconds.values())
        found = {side: profiled(step, 20) for side, step in steps.items()}
        kernels = " | ".join(f"{1e3 * seconds:.2f}" for seconds, _ in found.values())
        print(f"| {name} | {own:.1f} | {other:.1f} | {own / other:.3f} | {kernels} |", flush=True)
        for side, (_, table) in found.items() if options.calls else ():
            print(f"{side}:\n{table}", flush=True)


if __name__ == "__main__":
    main()
