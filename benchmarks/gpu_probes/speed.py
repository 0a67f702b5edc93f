"""Probes of speed and memory on one GPU, beside PyTorch without and with torch.compile."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from contenders import WithLoss, adamw
from workloads import GPT, WORKLOADS, GPTConfig, Workload, next_byte_loss

import mirrorc
from gpu_probes.probe import Figures, Scene, Skipped, add_probe
from gpu_probes.timing import first_step_seconds, timed
from mirrorc.options.table import grouped

_SECONDS = 150.0
HERE = Path(__file__).resolve().parent.parent
Step = Callable[[], Any]


def _tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 50257, (n, 1024)), torch.randint(0, 50257, (n, 1024))


GPT2 = GPTConfig(num_layers=12, num_heads=12, width=768, context=1024, vocabulary=50257)
MEASURED = {
    "gpt2-8": Workload("gpt2-8", lambda: GPT(GPT2), next_byte_loss, _tokens, 8),
    **{name: WORKLOADS[name] for name in ("mlp-8", "gpt-8", "resnet-16")},
}
"""GPT-2 small, 8 x 1024 tokens, and three of the workloads of `local.py`, each on one device."""


def scaled(scene: Scene, workload: Workload) -> Workload:
    """The workload; in a rehearsal, a tiny one in its place."""
    return WORKLOADS["tiny"] if scene.is_rehearsal else workload


def by_torch(workload: Workload, device: str, mode: str | None) -> Step:
    """PyTorch's own step; ``mode`` is torch.compile's, or "eager"."""
    module = WithLoss(workload).to(device)
    optimizer = adamw(module)
    forward: Any = module if mode == "eager" else torch.compile(module, mode=mode)
    x, y = (value.to(device) for value in workload.make_batch(workload.per_replica))

    def step() -> torch.Tensor:
        optimizer.zero_grad(set_to_none=True)
        loss = forward(x, y)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def by_mirrorc(
    workload: Workload, scene: Scene, made: list[mirrorc.Step], inputs: str = "on-gpu", **options: Any
) -> Step:
    """mirrorc's step, which is appended to ``made``, with its batch in pageable or pinned memory, or on the GPU."""
    model = workload.make_model()
    compiled = mirrorc.compile(
        model, scene.logical(1), optimizer=adamw(model), loss_fn=workload.loss_fn, **grouped(options)
    )
    made.append(compiled)
    x, y = workload.make_batch(workload.per_replica)
    if inputs == "on-gpu":
        x, y = x.to(scene.device), y.to(scene.device)
    elif inputs == "pinned":
        x, y = x.pin_memory(), y.pin_memory()
    return lambda: compiled(x, target=y)


CONTENDERS: dict[str, dict[str, Any]] = {
    "eager": {"mode": "eager"},
    "torch.compile": {"mode": None},
    "reduce-overhead": {"mode": "reduce-overhead"},
    "mirrorc": {},
    "mirrorc-graphs": {"cuda_graphs": True},
}
"""Who makes a step, and with which options."""


def contender(scene: Scene, workload: str, name: str, is_timed: bool = True) -> Figures:
    """One contender on one workload: times, the first step, and memory at its peak."""
    if name in ("mirrorc-graphs", "reduce-overhead"):
        scene.needs_gpu()
    torch.manual_seed(0)
    torch.set_float32_matmul_precision("high")  # TF32, for all alike
    own, made = scaled(scene, MEASURED[workload]), list[mirrorc.Step]()
    make = (
        functools.partial(by_torch, own, scene.device, **CONTENDERS[name])
        if "mode" in CONTENDERS[name]
        else functools.partial(by_mirrorc, own, scene, made, **CONTENDERS[name])
    )
    step, seconds = first_step_seconds(scene, make)
    if not is_timed:
        return {"first step s": seconds}
    times = timed(scene, step)
    figures: dict[str, float | str | None] = {"GPU ms": times.gpu, "host ms": times.host, "first step s": seconds}
    if not scene.is_rehearsal:
        torch.cuda.reset_peak_memory_stats()
        step()
        torch.cuda.synchronize()
        figures["peak MiB"] = torch.cuda.max_memory_allocated() / 2**20
    for compiled in made:
        figures["told MiB"] = compiled.memory().total / 2**20
        compiled.close()
    return figures


def options_of_mlp(scene: Scene, inputs: str = "on-gpu", **options: Any) -> Figures:
    """mlp-8 with batches from elsewhere, or with other options."""
    if inputs == "pinned":
        scene.needs_gpu()
    torch.set_float32_matmul_precision("high")
    made: list[mirrorc.Step] = []
    make = functools.partial(by_mirrorc, scaled(scene, MEASURED["mlp-8"]), scene, made, inputs, **options)
    step, seconds = first_step_seconds(scene, make)
    times = timed(scene, step)
    made[0].close()
    return {"GPU ms": times.gpu, "host ms": times.host, "first step s": seconds}


def no_synchronization(scene: Scene) -> Figures:
    """A steady step does nothing for which torch waits for the GPU."""
    scene.needs_gpu()
    made: list[mirrorc.Step] = []
    step = by_mirrorc(MEASURED["mlp-8"], scene, made)
    for _ in range(5):
        step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    made[0].close()
    return {}


def trace(scene: Scene) -> Figures:
    """One steady step of mlp-8 on two logical devices, as torch's profiler sees it, in a file."""
    from torch.profiler import ProfilerActivity, profile

    workload = scaled(scene, MEASURED["mlp-8"])
    model = workload.make_model()
    x, y = workload.make_batch(2 * workload.per_replica)
    path = scene.out / "steady_step.json"
    options: dict[str, Any] = {"optimizer": adamw(model), "loss_fn": workload.loss_fn}
    kinds = [ProfilerActivity.CPU] + ([] if scene.is_rehearsal else [ProfilerActivity.CUDA])
    with mirrorc.compile(model, scene.logical(2), **grouped(options)) as step:
        for _ in range(10):
            step(x, target=y)
        with profile(activities=kinds) as seen:
            float(step(x, target=y))
    seen.export_chrome_trace(str(path))
    if not path.exists():
        raise Skipped("torch's profiler wrote no trace")
    return {"says": str(path)}


def add() -> None:
    """Adds these probes; those for which time may run out come last."""
    add_probe("speed", "mlp-8 without synchronization", no_synchronization, _SECONDS)
    for workload in MEASURED:
        for name in CONTENDERS:
            probe = functools.partial(contender, workload=workload, name=name)
            add_probe("speed", f"{workload} {name}", probe, _SECONDS, leaves=f"{workload} {name}")
        for name in ("torch.compile", "mirrorc") if workload in ("gpt2-8", "mlp-8") else ():
            probe = functools.partial(contender, workload=workload, name=name, is_timed=False)
            add_probe("speed", f"{workload} {name} again", probe, _SECONDS, leaves=f"{workload} {name}")
    for inputs in ("pageable", "pinned"):
        probe = functools.partial(options_of_mlp, inputs=inputs)
        add_probe("speed", f"mlp-8 mirrorc, inputs {inputs}", probe, _SECONDS, leaves="mlp-8 mirrorc")
