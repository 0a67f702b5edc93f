"""Workers that compile several steps, one after the other, of which some fail on one worker; for processes of `outcomes`."""

import os
import signal
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes, Gradient
from mirrorc.passes import default_pipeline


class Layer(nn.Linear):
    """Cannot be captured as one graph by Dynamo if it breaks."""

    breaks = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.breaks:
            torch._dynamo.graph_break()
        return super().forward(x)


@dataclass(frozen=True)
class TurnPlan:
    """Numbers the buckets from the last one on; its text does not tell whether it does so."""

    is_asked: bool = field(repr=False)
    name: str = field(default="turn-plan", init=False)
    input_stage: Stage = field(default=Stage.CAPTURED, init=False)
    output_stage: Stage = field(default=Stage.CAPTURED, init=False)

    def run(self, program: Program) -> Program:
        turned = [replace(bucket, index=number) for number, bucket in enumerate(reversed(program.buckets))]
        return program.evolve(buckets=tuple(turned)) if self.is_asked else program


@dataclass(frozen=True)
class MoveFirstLaunch:
    """Moves the first exchange with other workers behind the last one, against the plan."""

    is_asked: bool = field(repr=False)
    name: str = field(default="move-first-launch", init=False)
    input_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)

    def run(self, program: Program) -> Program:
        program = program.evolve(graph=copied(program.mirrored_graph))
        first, *others = calls_to(program.mirrored_graph, *ops.BETWEEN_WORKERS)
        if self.is_asked:
            others[-1].append(first)
        return program


def _order_by_function(is_reversed: bool) -> Callable[[Gradient], int]:
    def key(gradient: Gradient) -> int:
        return -gradient.ready if is_reversed else gradient.ready

    return key


def _in_order(how: str) -> dict[str, Any]:
    """The arguments by which a worker fills its buckets, or launches them, as backward makes gradients, or the other way round.

    Buckets are launched as they become complete, so that an order of gradients alone shows in what lies in them.
    """
    way, _, backwards = how.removeprefix("by ").partition(", ")
    if way == "option":
        return {"order": "reversed" if backwards else "ready"}
    if way == "function":
        return {"order": _order_by_function(bool(backwards))}
    after, one = {
        "plan": ("plan-buckets", TurnPlan(bool(backwards))),
        "pass": ("reduce-over-workers", MoveFirstLaunch(bool(backwards))),
    }[way]
    passes = default_pipeline(over_workers=True, early_update=False, buckets=ByBytes(1e-6, 1e-6))
    place = [each.name for each in passes].index(after) + 1
    return {"passes": [*passes[:place], one, *passes[place:]], "scaler": None}


def _arguments(how: str) -> tuple[nn.Module, dict[str, Any]]:
    torch.manual_seed(0)
    model = Layer(3, 2)
    model.breaks = how == "capture"
    if how == "model":
        model.requires_grad_(False)  # nothing to train
    trained = nn.Linear(3, 2) if how == "optimizer" else model
    given: dict[str, Any] = {
        "devices": 2 if how == "devices" else 1,
        "optimizer": torch.optim.SGD(trained.parameters(), lr=0.1),
        "loss_fn": functional.mse_loss,
        "backend": "eager",
        "capture": "dynamo",
        "exchange": "dense",  # "auto" measures, and so may have other bits in the next attempt
        "timeout": 600.0,  # longer than the test waits
    }
    if how.startswith("by "):
        given |= _in_order(how)
    elif how == "differs":
        given["loss_reduction"] = "sum"
    elif how in ("in parts", "in shards"):
        given |= {"microbatches": 2} if how == "in parts" else {"shard_optimizer": True}
    elif how == "value":
        given["microbatches"] = -1
    elif how == "kind":
        given["microbatches"] = "two"
    elif how == "name":
        given["timeout_seconds"] = 3.0
    elif how == "communication":
        given = {name: value for name, value in given.items() if name not in ("exchange", "timeout")}
        given["communication"] = 3.0
    elif how == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif how == "distributed":
        given["distributed"] = "yes"
    elif how == "mode":
        given["mode"] = "quick"
    elif how == "devices":
        given["placement"] = "mirrored"
    elif how == "unsendable":
        given["optimizer"].param_groups[0]["schedule"] = lambda step: 0.1 / step
    elif how == "interrupt":
        given["dump"] = Interrupting()
    return model, given


class Interrupting:
    def __fspath__(self) -> str:
        raise KeyboardInterrupt("from the keyboard")


def compile_in_turn(rank: int, attempts: list[list[str]]) -> dict[str, Any]:
    """The weights after a step, or the text of the error, of each attempt, which fails on each worker in the way that is said for
    its rank."""
    found: list[Any] = []
    kept: list[BaseException] = []  # as a debugger keeps them, with all that their frames hold
    scaler = torch.amp.GradScaler("cpu")
    for ways in attempts:
        model, given = _arguments(ways[rank])
        try:
            with mirrorc.compile(model, **grouped({"scaler": scaler, **given})) as step:
                if ways[rank] == "capture":
                    step.prepare(torch.zeros(4, 3), target=torch.zeros(4, 2))
                step(torch.full((2, 3), rank + 1.0), target=torch.ones(2, 2))
            found.append(model.weight.tolist())
        except (mirrorc.MirrorcError, ValueError, TypeError, KeyboardInterrupt) as error:
            found.append(f"{type(error).__name__}: {error}")
            kept.append(error)
    return {"attempts": found}
