"""Remarks on facts of the model's code that a program does not show."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn

from mirrorc.capture.model.model_state import ModelState
from mirrorc.ir.program import Program
from mirrorc.ir.variables import Aggregation, Role, Synchronization
from mirrorc.messages.wording import counted, listed, numbered
from mirrorc.passes import AllReduceAlgorithm, WorkerCompression
from mirrorc.pipeline.protocol import Pass

_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
_SHOWN = {Aggregation.MEAN: "the model shows their mean", Aggregation.FIRST: "the model shows that of replica 0"}


def remarks_on_facts(program: Program, model: ModelState, microbatches: int) -> list[str]:
    remarks = [*_tied(program, model), *_fewer_parts(program, microbatches)]
    if program.num_replicas > 1 or program.workers.are_several:
        remarks += _written_buffers(program)
    if program.num_replicas > 1 or program.workers.are_several or program.microbatches:
        remarks += _norms(model, "a microbatch's" if program.microbatches else "a replica's")
    return remarks


def remarks_on_whole_sums(pipeline: Sequence[Pass]) -> list[str]:
    """Remarks on a program that leaves gradients to the user, without passes for updates."""
    kinds = (AllReduceAlgorithm, WorkerCompression)
    names = [entry.name for entry in pipeline if isinstance(entry, kinds) and entry.name not in ("native", "auto")]
    return [f"{listed(names)}: left out here, where sums are whole, and made by the link itself"] if names else []


def _tied(program: Program, model: ModelState) -> Iterator[str]:
    names: dict[str, list[str]] = {}
    for path, name in model.names.items():
        names.setdefault(name, []).append(path.removeprefix("model."))
    tied = {
        name: [other for other in paths if other != name]
        for name, paths in names.items()
        if len(paths) > 1 and name in program.variables and program.variables[name].role is Role.PARAMETER
    }
    shown = [f"{name} (also {listed(others)})" for name, others in tied.items()]
    if shown:
        verb = "is a tied parameter" if len(shown) == 1 else "are tied parameters"
        yield f"{listed(shown)} {verb}: the gradients of all uses are added up before the reduction"


def _fewer_parts(program: Program, microbatches: int) -> Iterator[str]:
    if microbatches > 1 and program.trains and not program.microbatches:
        sizes = listed(dict.fromkeys(program.num_examples))
        yield (
            f"microbatches={microbatches} is left out: shards have size {sizes}, and a part has at least one example, or two "
            "where the model needs two, as BatchNorm does"
        )
    few = [
        f"{device.name} runs {counted(len(sizes), 'part')}"
        for device, sizes in zip(program.devices, program.microbatches, strict=False)
        if 0 < len(sizes) < microbatches
    ]
    if few:
        yield f"microbatches={microbatches}, but a part has at least one example: {listed(few)}"


def _written_buffers(program: Program) -> Iterator[str]:
    for aggregation, shown in _SHOWN.items():
        names = [
            variable.name
            for variable in program.variables.values()
            if variable.synchronization is Synchronization.PER_REPLICA
            and variable.aggregation is aggregation
            and not variable.name.endswith("num_batches_tracked")
        ]
        if names:
            yield f"{numbered('buffer', names)}: each replica reads and writes its own; after a step {shown}"


def _norms(model: ModelState, whose: str) -> Iterator[str]:
    names = [
        path or type(module).__name__
        for path, module in model.named_modules
        if isinstance(module, _NORMS) and module.training
    ]
    if names:
        verb = "normalizes" if len(names) == 1 else "normalize"
        yield f"{listed(names)} {verb} over {whose} examples, as under DDP, and not over the batch as one device does"
