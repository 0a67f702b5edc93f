"""Facts that must be equal on all workers of a step, and their digests."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from mirrorc.analysis.communication.worker_meetings import gathered_rows, worker_meetings, worker_schedule
from mirrorc.analysis.gradients.sent_factors import Counts
from mirrorc.capture.model.model_state import ModelState
from mirrorc.cluster.consistency import digest
from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Synchronization, Variable
from mirrorc.options.step_options import StepOptions
from mirrorc.user.optimizer_groups import hyperparameters_by_label

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]+")  # differs between workers, so functions are compared by name only


class Facts:
    def __init__(self, texts: Mapping[str, str], gathered_rows: Counts = (), *, meets: bool = False) -> None:
        self.texts, self.digest = texts, digest(repr(texts))
        self.gathered_rows = gathered_rows
        self.meets = meets  # the model exchanges values with other workers


def facts_of_program(program: Program, *, needs_seed: bool) -> Facts:
    lines = {f"line {number}": line for number, line in enumerate(worker_schedule(program))}
    written = ", ".join(variable.name for variable in written_buffers(program))
    graphs = [region.graph_module.graph for region in program.regions.values()]
    runs_plain = any(next(calls_to(graph, *OPAQUE), None) is not None for graph in graphs)
    first = {"forward and backward": "plain PyTorch, as capture='autograd'" if runs_plain else "compiled graphs"}
    more = {"buffers that forward writes": written, "random numbers": str(needs_seed)}
    return Facts({**first, **lines, **more}, gathered_rows(program), meets=bool(worker_meetings(program)))


def hyperparameters_of(options: StepOptions) -> dict[str, str]:
    hyperparameters = hyperparameters_by_label(options.optimizers)
    scaler = options.scaler
    return hyperparameters if scaler is None else {**hyperparameters, "the scaler": str(scaler.state_dict())}


def written_buffers(program: Program) -> list[Variable]:
    written = [v for v in program.variables.values() if v.synchronization is Synchronization.PER_REPLICA]
    return sorted(written, key=lambda variable: variable.name)


def facts_of_options(options: StepOptions, model: ModelState) -> dict[str, str]:
    """Facts about model and options. Tensors may differ, because the chief's are broadcast."""
    frozen = {name for name, parameter in model.parameters.items() if not parameter.requires_grad}
    variables = {name: text + ", frozen" * (name in frozen) for name, text in shapes(model.tensors).items()}
    names = {id(parameter): name for name, parameter in model.parameters.items()}
    groups = [
        (type(optimizer).__qualname__, [names.get(id(parameter), "another parameter") for parameter in group["params"]])
        for optimizer in options.optimizers.optimizers
        for group in optimizer.param_groups
    ]
    return {
        "model": type(options.model).__qualname__,
        "loss_fn": _text_of_loss(options.loss_fn),
        "loss_reduction": options.loss_reduction,
        **{f"variable {name}": text for name, text in variables.items()},
        **{f"group {number}": f"{kind} of {', '.join(members)}" for number, (kind, members) in enumerate(groups)},
        "backend": options.backend.name,
        "microbatches": str(options.microbatches),
        "check_replicas_every": str(options.check_replicas_every),
        "exchange": options.exchange,
        "dynamic": str(options.dynamic),
        "autocast": str(options.autocast),
        "scaler": "none" if options.scaler is None else "one",
        "shard_optimizer": str(options.program_workers.shards_optimizer),
        "devices": " ".join(map(str, options.program_workers.devices_per_worker)),
        # last, so that an option that differs is reported under its own name
        **{f"pass {number}": _ADDRESS.sub("", repr(stage)) for number, stage in enumerate(options.pipeline)},
    }


def _text_of_loss(loss: Any) -> str:
    settings: Mapping[str, Any] = {}
    if isinstance(loss, functools.partial):
        loss, settings = loss.func, loss.keywords
    elif isinstance(loss, nn.Module):
        settings = vars(loss)
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    plain = [f"{key}={value!r}" for key, value in settings.items() if type(value) in (bool, int, float, str)]
    return f"{name}({', '.join(plain)})" if plain else name


def shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()}
