"""What workers train in tests: models, batches, and what goes wrong on one of them; and the same in one process, to compare."""

import contextlib
import copy
import functools
import itertools
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import payloads
import pytest
import torch
from stand_in_nccl import nccl_over_gloo
from torch import nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

import mirrorc
from mirrorc.options.table import grouped

_is_full = False  # the disk, for `writes`
_ends_there = False  # whether the process ends in `writes`


@torch.library.custom_op("mirrorc_tests::writes", mutates_args=())
def writes(x: torch.Tensor) -> torch.Tensor:
    if _is_full:
        raise OSError("the disk is full")
    if _ends_there:
        os.kill(os.getpid(), signal.SIGKILL)
    return x.clone()


writes.register_fake(torch.empty_like)
writes.register_autograd(lambda _, gradient: gradient)


class Table(nn.Module):
    """A table of which each batch reads a few rows, and a scale that forward reads from outside of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6)
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(x[:, :2].abs().mul(13).long() % 40).sum(1))


class Rows(Table):
    """Its gradients are sparse tensors in torch, and row 0 is never trained."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(40, 6, padding_idx=0, sparse=True)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.other = nn.Embedding(30, 6), nn.Embedding(20, 6)
        self.head = nn.Linear(6, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = x[:, :2].abs().mul(13).long()
        return self.head(torch.tanh(self.table(places % 30).sum(1) + self.other(places % 20).sum(1)))


class Mlp(nn.Sequential):
    """Two layers; 13 and 9 units, so that shares and bounds of buckets are odd."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 13), nn.Tanh(), nn.Linear(13, 9), nn.Tanh(), nn.Linear(9, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(writes(x))


class Branching(Mlp):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([row if row.sum().item() > 0 else -2 * row for row in x]))


class Mixture(nn.Module):
    """Sends each example to one of five experts, by its values; few batches have examples for all."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(5, 4) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.experts[int(row[0].abs().item() * 7) % 5](row) for row in x])


class Random(nn.Sequential):
    """Dropout, and a normalization whose statistics every replica has of its own."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Dropout(0.5), nn.Linear(12, 4))


class Checkpointed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(5, 12), nn.Linear(12, 4)
        self.block = nn.Sequential(nn.Linear(12, 40), nn.Tanh(), nn.Linear(40, 12))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(checkpoint(self.block, self.stem(x), use_reentrant=False))


class Wide(nn.Sequential):
    """Two layers of 0.7 MiB, so that plans of buckets differ."""

    def __init__(self) -> None:
        super().__init__(
            nn.Linear(5, 300),
            nn.Tanh(),
            nn.Linear(300, 300),
            nn.Tanh(),
            nn.Linear(300, 300),
            nn.Tanh(),
            nn.Linear(300, 4),
        )


class Twins(nn.Sequential):
    """Two layers of one shape, which each worker has in groups of another order."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 5), nn.Linear(5, 5))


class Layers(nn.Module):
    """Two layers, of which each worker's forward calls those that it is told, in that order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.called = nn.Linear(5, 5), nn.Linear(5, 5), ["one", "two"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for name in self.called:
            x = torch.tanh(self.get_submodule(name)(x))
        return x


class Coupled(nn.Module):
    """Normalizes over the whole batch, compares each example with all of them, and counts those of the replicas before."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 6), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(writes(x))
        count = mirrorc.all_reduce(h.new_full((), float(len(h))))
        mean = mirrorc.all_reduce(h.sum(0)) / count
        h = (h - mean) / (mirrorc.all_reduce(((h - mean) ** 2).sum(0)) / count + 1e-3).sqrt()
        sizes = mirrorc.all_gather(torch.full((1,), len(h)))
        places = torch.arange(len(h)) + torch.where(torch.arange(len(sizes)) < mirrorc.replica_id(), sizes, 0).sum()
        every = mirrorc.all_gather(h)
        near = torch.softmax(h @ every.T, 1) @ every * (len(sizes) == mirrorc.num_replicas())
        return self.last(near + h * torch.cos(places.double())[:, None])


class Statistics(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.Tanh(), nn.Linear(12, 4))


def _synchronized() -> nn.Module:
    """The same by those of the batch of all workers."""
    return nn.SyncBatchNorm.convert_sync_batchnorm(Statistics())


def _fill() -> None:
    global _is_full
    _is_full = True


STRIKES: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "raise": _fill,
}


class Words(nn.Sequential):
    """Small layers below a large one, of whose outputs the first few are used."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 400, bias=False))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "mlp": Mlp,
    "coupled": Coupled,
    "statistics": Statistics,
    "synchronized": _synchronized,
    "table": Table,
    "rows": Rows,
    "tied": Tied,
    "random": Random,
    "checkpointed": Checkpointed,
    "branching": Branching,
    "mixture": Mixture,
    "twins": Twins,
    "layers": Layers,
    "wide": Wide,
    "words": Words,
}
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "AdamW": lambda parameters: torch.optim.AdamW(parameters, lr=0.05),
    "SGD": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "Adafactor": lambda parameters: torch.optim.Adafactor(parameters, lr=0.05),
}


def training(devices: list[int], sizes: Any = None, model: str = "mlp", **more: Any) -> dict[str, Any]:
    """What `train`, `train_until_all_have_left` and others are given; ``sizes`` are those of the workers' batches, by turns."""
    return {"model": model, "devices": devices, **({} if sizes is None else {"sizes": sizes}), **more}


def batch(step: int, worker: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1000 * step + worker)
    x = torch.randn(size, 5, dtype=torch.float64, generator=generator)
    return x, torch.randint(4, (size,), generator=generator)


def whole(step: int, sizes: Sequence[int]) -> tuple[torch.Tensor, torch.Tensor]:
    parts = [batch(step, worker, size) for worker, size in enumerate(sizes)]
    return torch.cat([x for x, _ in parts]), torch.cat([y for _, y in parts])


def made(model: str, optimizer: str, seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    built = MODELS[model]().double()
    own = OPTIMIZERS[optimizer](built.parameters())
    return built, own


def values_of(model: nn.Module) -> dict[str, list[float]]:
    own = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
    return {name: value.detach().double().flatten().tolist() for name, value in own}


def assert_values(
    values: Mapping[str, Sequence[float]], expected: Mapping[str, Any], rel: float = 1e-9, abs: float = 1e-11
) -> None:
    assert values.keys() == expected.keys()
    for name, numbers in expected.items():
        wanted = torch.as_tensor(numbers, dtype=torch.float64).flatten()
        error = (torch.tensor(values[name], dtype=torch.float64) - wanted).abs()
        assert (error <= torch.clamp(rel * wanted.abs(), min=abs)).all(), f"{name} differs by {error.max()}"


def assert_training(
    worker: Mapping[str, Any], losses: Sequence[float], values: Mapping[str, Any], rel: float = 1e-9, abs: float = 1e-11
) -> None:
    assert worker["losses"] == pytest.approx(losses, rel=rel)
    assert_values(worker["values"], values, rel, abs)


def asked(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of `mirrorc.compile` that a case asks for.

    ``top_k`` is the part of gradients that is sent, ``power_sgd`` has the arguments of the example's `PowerSGD`, ``payload`` is
    the name of one of `payloads`, ``scaler`` has the arguments of a GradScaler, and ``autocast`` is the name of a dtype.
    """
    part: dict[str, Any] = {"compression": mirrorc.TopK(given["top_k"])} if "top_k" in given else {}
    if "power_sgd" in given:
        from power_sgd import PowerSGD  # which imports scikit-learn, for few cases

        part = {"compression": PowerSGD(**given["power_sgd"])}
    if "payload" in given:
        part = {"compression": getattr(payloads, given["payload"])()}
    if "scaler" in given:
        part["scaler"] = torch.amp.GradScaler("cpu", **given["scaler"])
    if "autocast" in given:
        part["autocast"] = getattr(torch, given["autocast"])
    return {"backend": "eager", "timeout": 100.0, **given.get("options", {}), **part}


def shaped(model: nn.Module, values: Mapping[str, list[float]]) -> dict[str, torch.Tensor]:
    own = dict(model.named_parameters())
    return {name: torch.tensor(value, dtype=own[name].dtype).view_as(own[name]) for name, value in values.items()}


def _unsent(step: mirrorc.Step) -> dict[str, list[float]]:
    return {name: value.flatten().tolist() for name, value in step._state.unsent.values().items()}


def save(step: mirrorc.Step, given: Mapping[str, Any]) -> None:
    torch.save(step.state_dict(), f"{given['saves']}/{step.rank}.pt")


def load(step: mirrorc.Step, model: nn.Module, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> None:
    """Reads what all have saved in an earlier case, which has ended when all have joined for this one. ``loads_unsent`` has the
    ranks that load all of it, if others load model and optimizer alone."""
    states = [torch.load(f"{given['loads']}/{rank}.pt") for rank in range(step.num_workers)]
    if step.rank in given.get("loads_unsent", range(step.num_workers)):
        step.load_state_dict(states)
    else:
        model.load_state_dict(states[step.rank]["model"])
        optimizer.load_state_dict(states[step.rank]["optimizers"][0])


def _over_what_is_asked(train: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    """Adds ``over_nccl`` to what is given: then workers train over the link between GPUs, for which gloo works."""

    @functools.wraps(train)
    def trained(rank: int, given: dict[str, Any]) -> dict[str, Any]:
        with nccl_over_gloo() if given.get("over_nccl") else contextlib.nullcontext():
            return train(rank, given)

    return trained


@_over_what_is_asked
def train(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Trains as one of the workers.

    ``faults`` are lists of a step, a rank and what goes wrong there. ``is_whole``: each has the batches of all, and takes its
    part. It ``saves`` its state into a folder, or ``loads`` that of all, to go on with the step ``first``. The calls that
    ``accumulates`` numbers keep gradients for the next step. ``called``: of its `Layers`, by rank.
    """
    global _is_full, _ends_there
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=rank)
    if rank == given.get("stepped"):  # its state is another one than the chief's
        model(torch.randn(3, 5, dtype=torch.float64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    if given["model"] == "twins":
        groups = [{"params": list(layer.parameters())} for layer in model]
        optimizer = torch.optim.SGD(groups[::-1] if rank else groups, lr=0.1)
    if "called" in given:
        model.called = given["called"][rank]
    num_threads = torch.get_num_threads()
    if "threads" in given:
        torch.set_num_threads(given["threads"][rank])
    options = asked(given)
    losses: list[Any] = []
    outputs: list[list[int]] = []
    began = time.monotonic()
    with mirrorc.compile(
        model, given["devices"][rank], optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), **grouped(options)
    ) as step:
        if "unsent" in given and step.rank in given.get(
            "loads_unsent", range(step.num_workers)
        ):  # of an earlier run's workers
            state, number_before = step.state_dict(), len(given["unsent"])
            step.load_state_dict(
                [
                    {
                        **state,
                        "worker": {
                            **state["worker"],
                            "rank": other,
                            "num_workers": number_before,
                            "unsent": shaped(model, own),
                        },
                    }
                    for other, own in enumerate(given["unsent"])
                ]
            )
        if "loads" in given:
            load(step, model, optimizer, given)
        described = [step.rank, step.num_workers, step.num_replicas, step.is_chief]
        torch.manual_seed(5 if rank == 0 else 6)  # the chief's stream is that of all
        for number in range(given.get("first", 0), given.get("steps", 4)):
            sizes = given["sizes"][number % len(given["sizes"])]
            x, y = batch(number % given.get("batches", number + 1), rank, sizes[rank])
            if given.get("is_whole"):
                x, y = step.shard_batch(whole(number, sizes))
            faults = [fault for at, who, fault in given.get("faults", ()) if (at, who) == (number, rank)]
            if "kill" in faults:
                os.kill(os.getpid(), signal.SIGKILL)
            _ends_there = "kill in forward" in faults
            if "stop" in faults:
                os.kill(os.getpid(), signal.SIGSTOP)
            if "end" in faults:
                break
            if "leave" in faults:
                raise ValueError("the data is gone")
            if "pause" in faults:
                time.sleep(given["pause"])
            if "evaluates" in faults:  # in training mode, which writes statistics
                step.evaluate(x, target=y)
            if "loads" in faults:
                model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
            for fault in faults:
                if fault.startswith("after "):  # as in "after 0.2 kill": at some moment of a later call
                    _, seconds, what = fault.split()
                    threading.Timer(float(seconds), STRIKES[what]).start()
            if "wrong batch" in faults:
                y = y[:-1]
            _is_full = _is_full or "operator" in faults
            payloads.fails = "payload" in faults
            if "not finite" in faults:
                x[0, 0] = torch.inf
            if "rate" in faults:
                optimizer.param_groups[0]["lr"] *= 2
            model.train("mode" not in faults)
            began = time.monotonic()
            try:
                given_back = (step.accumulate if number in given.get("accumulates", ()) else step)(x, target=y)
                loss, *more = given_back if isinstance(given_back, tuple) else (given_back,)
                losses.append(float(loss))
                outputs += [list(one.shape) for one in more]
            except (mirrorc.MirrorcError, ValueError) as error:
                losses.append(f"{type(error).__name__}: {error}")
            finally:
                _is_full = _is_full and "operator" not in faults
                if "rate" in faults:
                    optimizer.param_groups[0]["lr"] /= 2
            if isinstance(losses[-1], str) and given.get("ends", False):
                break
        if "saves" in given:
            save(step, given)
        is_trained = any(isinstance(loss, float) for loss in losses)
        told = {
            "losses": losses,
            "outputs": outputs,
            "seconds": time.monotonic() - began,
            "described": described,
            "schedule": step.schedule_hash if is_trained else "",
            "step": repr(step),
            "gathered": str(step.program).count("= gather_factors(") if is_trained else 0,
            "explained": str(step.explain()) if is_trained else "",
            "program": str(step.program) if is_trained else "",
            "buckets": len(step.program.buckets) if is_trained else 0,
            "remarks": [str(remark) for remark in step.program.remarks] if is_trained else [],
            "unsent": _unsent(step),
        }
        if given.get("evaluates"):
            told["evaluated"] = float(step.evaluate(*batch(99, rank, 3)[:1], target=batch(99, rank, 3)[1]))
    torch.set_num_threads(num_threads)
    counts = [state.get("step") for state in optimizer.state.values()]
    return {**told, "values": values_of(model), "updates": [float(count) for count in counts if count is not None]}


def train_until_all_have_left(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Trains as one of the workers in ``step.join()``, with batches until one has no examples, and a scheduler of its own.

    ``fault`` is a rank and a step before which its loop raises, or the process ends by ``kill``; ``more`` the sizes of a batch
    after the block; ``pause`` the seconds that worker 0 takes before its last batch.
    """
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=rank)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, given["decay"])
    options = asked(given)
    losses: list[float] = []
    own = [sizes[rank] for sizes in given["sizes"]]
    with mirrorc.compile(
        model, given["devices"][rank], optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), **grouped(options)
    ) as step:
        torch.manual_seed(5 if rank == 0 else 6)
        if "prepares" in given:
            step.prepare(batch(0, rank, 2)[0], target=batch(0, rank, 2)[1])
        try:
            with step.join():
                for number in range(own.index(0) if 0 in own else len(own)):
                    if given.get("fault") == [rank, number, "raise"]:
                        raise OSError("the data is gone")
                    if given.get("fault") == [rank, number, "kill"]:
                        os.kill(os.getpid(), signal.SIGKILL)
                    if rank == 0 and number == len(own) - 1:
                        time.sleep(given.get("pause", 0.0))
                    x, y = batch(number, rank, own[number])
                    losses.append(float(step(x, target=y)))
                    scheduler.step()
        except (mirrorc.MirrorcError, OSError) as error:
            return {"error": f"{type(error).__name__}: {error}", "losses": losses}
        rate = optimizer.param_groups[0]["lr"]
        told = {"losses": losses, "rate": rate, "values": values_of(model)}
        told["unsent"] = _unsent(step)
        optimizer.param_groups[0]["lr"] = 0.01
        for sizes in given.get("more", ()):
            x, y = batch(len(own), rank, sizes[rank])
            told["later"] = float(step(x, target=y))
    return {**told, "last": values_of(model)}


def evaluation(given: dict[str, Any], values: dict[str, list[float]], rank: int) -> float:
    """The loss of one worker's last batch, with given values."""
    model, _ = made(given["model"], "SGD", seed=0)
    state = {name: torch.tensor(values[name], dtype=torch.float64) for name in model.state_dict()}
    model.load_state_dict({name: state[name].view_as(value) for name, value in model.state_dict().items()})
    x, y = batch(99, rank, 3)
    return float(nn.functional.cross_entropy(model(x), y).detach())


def _called(model: nn.Module, x: torch.Tensor, sizes: Sequence[int], given: Mapping[str, Any]) -> torch.Tensor:
    """The results of a model for the examples of all workers."""
    if "called" not in given:
        return model(x)
    found = []
    for part, model.called in zip(x.split(list(sizes)), given["called"], strict=True):
        found.append(model(part))
    return torch.cat(found)


def reference(given: dict[str, Any], steps: Sequence[int]) -> tuple[list[float], dict[str, list[float]]]:
    """The losses and values of plain PyTorch, in one process, on the batches of all workers."""
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=0)
    bound = given.get("options", {}).get("clip_grad_norm")
    losses = []
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, given.get("decay", 1.0))
    for number in steps:
        sizes = given["sizes"][number % len(given["sizes"])]
        x, y = whole(number % given.get("batches", number + 1), sizes)
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(_called(model, x, sizes, given), y)
        loss.backward()
        if bound is not None:
            nn.utils.clip_grad_norm_(model.parameters(), bound)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    return losses, values_of(model)


def reference_by_shard(given: dict[str, Any]) -> tuple[list[float], dict[str, list[float]]]:
    """The same, where each replica's shard is run by itself, and writes buffers of its own; values are means of these."""
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=0)
    replicas = [copy.deepcopy(dict(model.named_buffers())) for _ in range(sum(given["devices"]))]
    losses = []
    for number in range(given["steps"]):
        sizes = given["sizes"][number % len(given["sizes"])]
        parts = [batch(number, worker, size) for worker, size in enumerate(sizes)]
        shards = [
            shard
            for part, n in zip(parts, given["devices"], strict=True)
            for shard in zip(*(one.tensor_split(n) for one in part), strict=True)
        ]
        optimizer.zero_grad()
        loss = torch.zeros((), dtype=torch.float64)
        for buffers, (x, y) in zip(replicas, shards, strict=True):
            loss = loss + nn.functional.cross_entropy(functional_call(model, buffers, (x,)), y, reduction="sum") / sum(
                sizes
            )
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    means = {name: torch.stack([own[name].double() for own in replicas]).mean(0) for name in replicas[0]}
    return losses, {**values_of(model), **{name: value.flatten().tolist() for name, value in means.items()}}


def in_one_process(given: dict[str, Any]) -> tuple[list[float], dict[str, list[float]]]:
    """The losses and values of a step on as many devices as all workers have, in one process; each has what it has there."""
    model, optimizer = made(given["model"], given.get("optimizer", "AdamW"), seed=0)
    losses = []
    number_of_devices = sum(given["devices"])
    with mirrorc.compile(
        model,
        number_of_devices,
        optimizer=optimizer,
        loss_fn=nn.CrossEntropyLoss(),
        compiler=mirrorc.Compiler(backend="eager"),
    ) as step:
        torch.manual_seed(5)
        for number in range(given.get("steps", 4)):
            sizes = given["sizes"][number % len(given["sizes"])]
            if given.get("is_whole"):
                x, y = whole(number, sizes)
            else:
                parts = [batch(number, worker, size) for worker, size in enumerate(sizes)]
                own = [
                    zip(*(one.tensor_split(n) for one in part), strict=True)
                    for part, n in zip(parts, given["devices"], strict=True)
                ]
                x, y = map(mirrorc.PerReplica, zip(*itertools.chain(*own), strict=True))
            losses.append(float(step(x, target=y)))
    return losses, values_of(model)
