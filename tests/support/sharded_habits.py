"""Workers to whom the optimizer is dealt out, with gradients that are clipped, scaled and checked; and the same in PyTorch."""

from collections.abc import Sequence
from typing import Any

import torch
import worker_training
from torch import nn

import mirrorc
from mirrorc.options.table import grouped


def made(given: dict[str, Any], seed: int) -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    """The model of a case, and its optimizers: one with as many ``groups`` as are said, or Adafactor, which does not work
    element by element, and AdamW."""
    model, optimizer = worker_training.made(given["model"], given.get("optimizer", "AdamW"), seed)
    parameters = list(model.parameters())
    if "groups" in given:
        own = [{"params": parameters[start:stop]} for start, stop in given["groups"]]
        return model, [torch.optim.AdamW(own, lr=0.05)]
    if given.get("is_mixed"):
        return model, [torch.optim.Adafactor(parameters[:1], lr=0.05), torch.optim.AdamW(parameters[1:], lr=0.05)]
    return model, [optimizer]


def scaler_of(given: dict[str, Any]) -> torch.amp.GradScaler | None:
    return torch.amp.GradScaler("cpu", **given["scaler"]) if "scaler" in given else None


def _bound(given: Any) -> Any:
    if isinstance(given, list):
        return [_bound(one) for one in given]
    return mirrorc.ClipGradNorm(given["max"], given["type"]) if given is not None else None


def train(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Makes calls as one of the workers.

    ``calls`` are as for `worker_habits.call`, with ``"nan"`` alone for a worker; ``bound`` has a norm's ``max`` and ``type``, or
    one or None for each group.
    """
    model, optimizers = made(given, seed=rank)
    scaler = scaler_of(given)
    options = {"shard_optimizer": True, "backend": "eager", "timeout": 100.0, **given.get("options", {})}
    if "bound" in given:
        options["clip_grad_norm"] = _bound(given["bound"])
    found: dict[str, Any] = {"losses": [], "norms": [], "skipped": [], "scales": []}
    with mirrorc.compile(
        model,
        given["devices"][rank],
        optimizer=optimizers,
        loss_fn=nn.CrossEntropyLoss(),
        scaler=scaler,
        **grouped(options),
    ) as step:
        for number, (what, sizes, *others) in enumerate(given["calls"]):
            x, y = worker_training.batch(number, rank, sizes[rank])
            if [rank, "nan"] in others:
                x[0, 0] = float("nan")
            try:
                found["losses"].append(float((step.accumulate if what == "accumulate" else step)(x, target=y)))
            except mirrorc.MirrorcError as error:
                found["losses"].append(f"{type(error).__name__}: {error}")
            if "bound" in given and what == "step" and isinstance(found["losses"][-1], float):
                norm: Any = step.grad_norm
                norms = norm if isinstance(norm, Sequence) else [norm]
                found["norms"].append([float(one) for one in norms if one is not None])
            found["skipped"].append(step.num_skipped)
            found["scales"].append(scaler.get_scale() if scaler is not None else 1.0)
        assert any(isinstance(loss, float) for loss in found["losses"]), found["losses"]
        found["program"] = str(step.program)
        step.gather_optimizer_state()
    return {**found, "state": state_of(optimizers), "values": worker_training.values_of(model)}


def state_of(optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, list[float]]:
    return {
        f"{place} {index} {key}": value.double().flatten().tolist()
        for place, optimizer in enumerate(optimizers)
        for index, own in optimizer.state_dict()["state"].items()
        for key, value in own.items()
    }


def reference(given: dict[str, Any]) -> dict[str, Any]:
    """What plain PyTorch gives in one process, on the batches of all workers; calls with nan are those that nobody makes, or
    that a scaler skips."""
    model, optimizers = made(given, seed=0)
    scaler = scaler_of(given)
    value, bound = given.get("options", {}).get("clip_grad_value"), given.get("bound")
    parameters, groups = list(model.parameters()), [g["params"] for o in optimizers for g in o.param_groups]
    sums, count = [torch.zeros_like(p) for p in parameters], 0
    found: dict[str, Any] = {"losses": [], "norms": [], "scales": []}
    for number, (what, sizes, *others) in enumerate(given["calls"]):
        batches = [worker_training.batch(number, rank, size) for rank, size in enumerate(sizes)]
        for rank, _ in others:
            batches[rank][0][0, 0] = float("nan")
        x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
        loss = nn.functional.cross_entropy(model(x), y, reduction="sum")
        found["losses"].append(loss.item() / len(x))
        if others and scaler is None:
            found["scales"].append(1.0)
            continue
        scale = scaler.get_scale() if scaler is not None else 1.0
        for own, gradient in zip(sums, torch.autograd.grad(scale * loss, parameters), strict=True):
            own += gradient
        count += len(x)
        if what == "step":
            for p, own in zip(parameters, sums, strict=True):
                p.grad = own / count
            for optimizer in optimizers if scaler is not None else ():
                scaler.scale(torch.zeros(()))
                scaler.unscale_(optimizer)
            if bound is not None:
                bounds = list(zip(groups, bound, strict=True)) if isinstance(bound, list) else [(parameters, bound)]
                norms = [
                    nn.utils.clip_grad_norm_(own, one["max"], one["type"]).item()
                    for own, one in bounds
                    if one is not None
                ]
                found["norms"].append(norms)
            if value is not None:
                nn.utils.clip_grad_value_(parameters, value)
            for optimizer in optimizers:
                optimizer.step() if scaler is None else scaler.step(optimizer)
            if scaler is not None:
                scaler.update()
            sums, count = [torch.zeros_like(p) for p in parameters], 0
        found["scales"].append(scaler.get_scale() if scaler is not None else 1.0)
    return {**found, "state": state_of(optimizers), "values": worker_training.values_of(model)}
