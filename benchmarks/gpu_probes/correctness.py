"""Probes of what may go wrong between the host and a GPU that runs late: batches, streams, captures, collectives, failures."""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from gpu_probes.probe import Failed, Figures, Scene, add_probe, expect
from mirrorc.ir.devices import parse_devices
from mirrorc.options.table import grouped

_SECONDS = 90.0  # of one of these probes


def small_net(width: int = 32) -> nn.Module:
    """A net with BatchNorm; the same numbers each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 4))


def deep_net() -> nn.Module:
    """A net without batch statistics, in float64; the same numbers each time."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 4)).double()


def batches(count: int, num_examples: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Batches on the host; the same numbers each time."""
    generator = torch.Generator().manual_seed(1)
    return [
        (torch.randn(num_examples, 16, generator=generator), torch.randint(0, 4, (num_examples,), generator=generator))
        for _ in range(count)
    ]


def compiled(scene: Scene, model: nn.Module, num_devices: int = 1, **options: Any) -> mirrorc.Step:
    """A step of `small_net`; on a GPU, the model moves there."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = {"backend": "eager", "loss_fn": F.cross_entropy, **options}
    return mirrorc.compile(model, scene.logical(num_devices), optimizer=optimizer, **grouped(options))


def state_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of parameters and buffers on the host."""
    return {name: value.detach().cpu().clone() for name, value in model.state_dict().items()}


def expect_same_bits(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], what: str) -> None:
    """Raises `Failed` with the names of what differs."""
    other = [name for name in wanted if not torch.equal(found[name], wanted[name])]
    expect(not other, f"{what}: {', '.join(other)} differ, by up to {_distance(found, wanted):.3g}")


def _distance(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    return max(float((found[name].double() - wanted[name].double()).abs().max()) for name in wanted)


def _trained(
    scene: Scene, each: Callable[[mirrorc.Step, torch.Tensor, torch.Tensor], object], count: int
) -> dict[str, torch.Tensor]:
    model = small_net()
    with compiled(scene, model, 2, buckets=0.001) as step:
        for x, y in batches(count):
            each(step, x, y)
        wait_for(scene)
        return state_of(model)


def _plain(step: mirrorc.Step, x: torch.Tensor, y: torch.Tensor) -> None:
    step(x, target=y)


def pinned(scene: Scene) -> Figures:
    """A pinned batch that is filled anew right after each step trains as new batches do."""
    count = 5 if scene.is_rehearsal else 200
    (x0, y0), *_ = batches(1)
    x, y = torch.empty_like(x0), torch.empty_like(y0)
    if not scene.is_rehearsal:
        x, y = x.pin_memory(), y.pin_memory()

    def refilled(step: mirrorc.Step, new_x: torch.Tensor, new_y: torch.Tensor) -> None:
        x.copy_(new_x)
        y.copy_(new_y)
        step(x, target=y)

    expect_same_bits(_trained(scene, refilled, count), _trained(scene, _plain, count), "refilled batches")
    return {"steps": count}


def streams(scene: Scene) -> Figures:
    """A caller who changes streams, and has each wait for the other, trains as one with one stream."""
    scene.needs_gpu()
    both, count = [torch.cuda.Stream(), torch.cuda.Stream()], 500
    turn = 0

    def alternating(step: mirrorc.Step, x: torch.Tensor, y: torch.Tensor) -> None:
        nonlocal turn
        own, other = both[turn % 2], both[1 - turn % 2]
        turn += 1
        own.wait_stream(other)
        with torch.cuda.stream(own):
            on_gpu = x.cuda(non_blocking=True) * 1.0  # made on this stream
            step(on_gpu, target=y.cuda(non_blocking=True))

    expect_same_bits(_trained(scene, alternating, count), _trained(scene, _plain, count), "alternating streams")
    return {"steps": count}


def unsynchronised(scene: Scene) -> Figures:
    """Steps for which nobody waits train as steps after each of which the host waits for the GPU."""
    count = 5 if scene.is_rehearsal else 50

    def waiting(step: mirrorc.Step, x: torch.Tensor, y: torch.Tensor) -> None:
        step(x, target=y)
        wait_for(scene)

    expect_same_bits(_trained(scene, _plain, count), _trained(scene, waiting, count), "steps without waiting")
    return {"steps": count}


def wait_for(scene: Scene) -> None:
    """Waits until the GPU has done all."""
    if not scene.is_rehearsal:
        torch.cuda.synchronize()


def behind(scene: Scene) -> Figures:
    """Steps of other sizes in turn, queued behind long kernels, end where one CPU ends, in float64."""
    given = [batches(1, size)[0] for size in (24, 22, 23, 24, 20, 23) * (1 if scene.is_rehearsal else 5)]
    model, reference = deep_net(), deep_net()
    optimizer = torch.optim.AdamW(reference.parameters(), lr=1e-2)
    for x, y in given:
        optimizer.zero_grad()
        F.cross_entropy(reference(x.double()), y).backward()
        optimizer.step()
    busy = torch.eye(8 if scene.is_rehearsal else 4096, device=scene.device)
    with compiled(scene, model, 2) as step:
        for x, y in given:
            for _ in range(20):
                busy = busy @ busy  # what the caller's stream does next comes milliseconds later
            step(x.double(), target=y)
        found = state_of(model)
    distance = _distance(found, state_of(reference))
    expect(distance < 1e-9, f"parameters differ from one CPU's by {distance:.3g}")
    return {"steps": len(given), "distance": distance}


def shown_buffers(scene: Scene) -> Figures:
    """BatchNorm's buffers that the model shows after each step are the means of those of the replicas."""
    model, worst = small_net(256), 0.0
    with compiled(scene, model, 2) as step:
        for x, y in batches(4 if scene.is_rehearsal else 40, 64):
            step(x, target=y)
            shown = model[1].running_mean.clone()  # right behind the step, on the caller's stream
            values = [value.clone() for value in step.variables["1.running_mean"].values]
            wait_for(scene)
            worst = max(worst, float((shown - sum(values) / len(values)).abs().max()))
    expect(worst < 1e-6, f"what the model shows differs from the replicas' mean by {worst:.3g}")
    return {"distance": worst}


def recapture(scene: Scene) -> Figures:
    """A capture that fails says so and changes nothing, and the next step is captured."""
    scene.needs_gpu()
    model = small_net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    (x, y), *_ = batches(1)
    waits = mock.patch.object(
        sys.modules["torch.optim.sgd"], "sgd", lambda parameters, *_, **__: parameters[0].sum().item()
    )
    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "backend": "eager", "cuda_graphs": True}
    with mirrorc.compile(model, ["cuda:0"], optimizer=optimizer, **grouped(options)) as step:
        for _ in range(3):
            step(x, target=y)
        before, said = state_of(model), ""
        with waits:
            try:
                step(x, target=y)
            except mirrorc.ExecutionError as error:
                said = str(error)
        expect("cannot be captured" in said, f"a step that waits for the GPU said: {said or 'nothing'}")
        expect_same_bits(state_of(model), before, "after a capture that failed")
        for _ in range(5):
            step(x, target=y)
        after = state_of(model)
    expect(not torch.equal(after["0.weight"], before["0.weight"]), "later steps have changed nothing")
    expect(all(value.isfinite().all() for value in after.values()), "numbers are not finite")
    return {}


def nccl_alone(scene: Scene, dtype: torch.dtype) -> Figures:
    """NCCL's sum over one GPU is what it was given."""
    scene.needs_gpu()
    from mirrorc.runtime.communication.nccl import NcclCommunicator

    made = NcclCommunicator(parse_devices(["cuda:0"]), 60.0)
    made.prepare([("all_reduce", 0)])
    for size in (1, 1000, 2**22 + 1):
        value = torch.randn(size, device="cuda").to(dtype)
        wanted = value.clone()
        pending = made.launch_all_reduce(0, 0, value)
        found = made.wait_all_reduce(0, 0, pending)
        expect(torch.equal(found, wanted), f"{size} elements of {dtype} came back changed")
        made.release()
    return {}


def workers_nccl(scene: Scene) -> Figures:
    """A group of NCCL of our own adds up in the order of the stream, and ends when it is cut while a kernel runs."""
    scene.needs_gpu()
    from mirrorc.torch_internals import NcclGroup

    begun = time.perf_counter()
    group = NcclGroup(torch.distributed.HashStore(), 0, 1, torch.device("cuda", 0))
    opened = time.perf_counter() - begun
    value = torch.zeros(2**20, device="cuda")
    for i in range(50):
        value.fill_(i)
        work = group.all_reduce(value)
        work.wait()
        expect(value[-1].item() == i, f"sum {i} was told of before it was there")
    torch.cuda._sleep(2_000_000_000)  # about a second
    work = group.all_reduce(value)
    group.cut()
    try:
        work.wait()
    except RuntimeError:
        return {"open s": opened}
    raise Failed("a group that was cut has given a sum")


def device_assert(scene: Scene) -> Figures:
    """After an index out of range on the GPU, the next call raises, and close() returns."""
    scene.needs_gpu()
    model = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 4))
    step = compiled(scene, model, timeout=20.0)
    y = torch.zeros(6, dtype=torch.long)
    step(torch.arange(6), target=y)
    wait_for(scene)
    raised = ""
    for indices in (torch.full((6,), 1000), torch.arange(6)):
        try:
            step(indices, target=y)
            torch.cuda.synchronize()
        except Exception as error:  # noqa: BLE001 - whatever it is, it was told
            raised = raised or f"{type(error).__name__}: {str(error).splitlines()[0]}"
    expect(raised, "no call raised anything")
    begun = time.perf_counter()
    try:
        step.close()
    except mirrorc.ExecutionError as error:
        raised += f"; close: {str(error).splitlines()[0]}"
    seconds = time.perf_counter() - begun
    expect(seconds < 60.0, f"close() took {seconds:.0f} s")
    return {"raised": raised, "close s": seconds}


def add() -> None:
    """Adds these probes."""
    for run in (behind, shown_buffers, pinned, unsynchronised, streams, recapture, workers_nccl, device_assert):
        add_probe("correctness", run.__name__.replace("_", "-"), run, _SECONDS)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        name = str(dtype).removeprefix("torch.")
        add_probe("correctness", f"nccl-{name}", functools.partial(nccl_alone, dtype=dtype), _SECONDS)
