"""Chooses how devices without shared memory exchange gradients."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from mirrorc.analysis.cost.link_speed import bytes_of_sum_received
from mirrorc.analysis.gradients.sent_factors import fake_rows, sendable
from mirrorc.compilation.choices.exchange_decision import exchange_remark
from mirrorc.ir import ops
from mirrorc.ir.links import best_link, carrier_of, link_named, why_memory_is_not_shared
from mirrorc.ir.program import Accumulation, Program
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import FactorGradients, ShareParameters, UpdateAtOwner


@dataclass(frozen=True)
class Gatherable:
    """A gradient that devices may gather as factors. Bytes are the maximum that a device receives."""

    variable: str
    whole_bytes: float
    factor_bytes: int


def with_gathered(program: Program, options: StepOptions) -> Program:
    """Chooses the gradients that devices gather as factors, with a remark on the bytes of both forms.

    If parameters have owners, all gradients stay whole. ``exchange="auto"`` takes the form with fewer bytes, but keeps
    gradients whole if the user names an all-reduce algorithm.
    """
    factoring = next((entry for entry in options.pipeline if isinstance(entry, FactorGradients)), None)
    if program.workers.are_several or not program.trains or program.accumulation is not Accumulation.NONE:
        return program
    if why := _why_nothing_is_sent(program, options, factoring):
        is_asked = options.exchange != "auto"
        return program.with_remarks(_no_effect(options, why)) if is_asked else program
    why = _why_all_is_whole(program, options, factoring)
    if why or factoring is None or options.exchange == "dense":
        return _all_whole(program, options, why)
    is_asked = options.exchange == "factors"
    if not is_asked and factoring.all_reduce is not None:
        return program
    link = factoring.link or best_link(program.devices)[0]
    gradients = list(_gatherable(program, link, 1 if is_asked else factoring.min_elements))
    if not gradients:
        return _all_whole(program, options, "no gradient is a product, or rows of a table, that they could gather")
    gathered = tuple(g.variable for g in gradients if is_asked or g.factor_bytes < g.whole_bytes)
    bytes_of = {g.variable: (g.factor_bytes, g.whole_bytes) for g in gradients}
    why = "asked for" if is_asked else "chosen by bytes alone"
    remark = exchange_remark("devices", why, "to each device", bytes_of, gathered)
    return program.evolve(gathered=gathered).with_remarks(remark)


def _why_nothing_is_sent(program: Program, options: StepOptions, factoring: FactorGradients | None) -> str:
    if program.num_replicas == 1:
        return "one device sends no gradient"
    is_shared = any(isinstance(entry, ShareParameters) for entry in options.pipeline)
    if factoring is not None and factoring.parameters_are_shared is not None:
        is_shared = factoring.parameters_are_shared
    if is_shared and not why_memory_is_not_shared(program.devices):
        return "devices share their parameters, and read gradients in the memory that they share, so nothing is sent"
    return ""


def _why_all_is_whole(program: Program, options: StepOptions, factoring: FactorGradients | None) -> str:
    if any(isinstance(entry, UpdateAtOwner) for entry in options.pipeline):
        return "each gradient is added up whole, by the device that owns its variable"
    if factoring is None:
        return "the pass 'factor-gradients' is not in the pipeline"
    link = factoring.link or best_link(program.devices)[0]
    if not _is_carried(link):
        return f"the link {link} gathers no factors"
    return "a CUDA graph sends whole gradients" if options.cuda_graphs else ""


def _all_whole(program: Program, options: StepOptions, why: str) -> Program:
    rows = [name for name, variable in program.variables.items() if variable.update and variable.update.takes_rows]
    if options.exchange == "factors" and not rows:
        return program.with_remarks(_no_effect(options, why))
    if options.exchange == "dense" and rows:
        return program.with_remarks(_no_effect(options, f"devices gather rows of {', '.join(rows)} for the optimizer"))
    return program


def _no_effect(options: StepOptions, why: str) -> str:
    return f"exchange={options.exchange!r} has no effect: {why}"


def _is_carried(link: str) -> bool:
    try:
        return bool(carrier_of(link, ops.all_gather))
    except ValueError:
        return False


def _gatherable(program: Program, link: str, least_elements: int) -> Iterator[Gatherable]:
    number = program.num_replicas
    for gradient in sendable(program, least_elements):
        update = program.variables[gradient.variable].update
        if update is None or update.leaves_whole_gradient:
            continue  # of all devices, only replica 0 needs it
        sizes = [sum(rows.numel() * rows.itemsize for rows in fake_rows(part) or ()) for part in gradient.of_shards]
        of_replicas = [sum(sizes[shard] for shard in program.graphs_run_by(r)) for r in range(number)]
        whole = gradient.value.numel() * gradient.value.itemsize
        received = bytes_of_sum_received(link_named(carrier_of(link, ops.all_reduce)), whole, number)
        yield Gatherable(gradient.variable, received, sum(of_replicas) - min(of_replicas))
