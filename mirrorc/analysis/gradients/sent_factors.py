"""Factors that workers send."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from mirrorc.analysis.gradients.factored_gradients import factor_values, left_to_shares
from mirrorc.analysis.gradients.whole_gradients import why_whole, why_whole_in_microbatches
from mirrorc.analysis.graph.aliases import ViewedVariables
from mirrorc.ir import ops
from mirrorc.ir.buckets import Detail, RowType, SentFactors
from mirrorc.ir.gradient_forms import FactoredGradient, GradientForm, details_of, form_of, recognize
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program
from mirrorc.torch_internals import num_bytes_now, sizes_key

Counts = tuple[int, ...]
"""Numbers of rows of sent factors: for each bucket, gradient and replica, the number of parts, then the rows of each.
"""
CountsOfReplicas = tuple[tuple[int, int | torch.SymInt], ...]
"""`Counts`, each with its replica; symbolic in a program with symbolic sizes."""


# In a captured program, before it is outlined


@dataclass(frozen=True)
class Sendable:
    """A captured program's gradient, and the factors of each shard. ``value`` is a fake tensor."""

    variable: str
    value: torch.Tensor
    of_shards: tuple[FactoredGradient, ...]

    @property
    def form(self) -> GradientForm:
        return self.of_shards[0].form


def sendable(program: Program, least_elements: int) -> Iterator[Sendable]:
    """Gradients of a CAPTURED step that can be sent as factors, in output order."""
    variables = ViewedVariables(program)
    recognized = [_recognized(graph, variables) for graph in program.shard_graphs]
    has_parts = any(len(program.graphs_run_by(replica)) > 1 for replica in program.present)
    for name, (node, gradient) in recognized[0].items():
        variable, value = program.variables[name], node.meta["val"]
        is_flat = variable.update is not None and variable.update.is_flat
        of_shards = tuple(shard[name][1] for shard in recognized if name in shard)
        whole = why_whole(value, variable.strides if is_flat else None, least_elements)
        if has_parts:
            whole = whole or why_whole_in_microbatches(gradient.form)
        if not whole and len(of_shards) == len(recognized):
            yield Sendable(name, value, of_shards)


def _recognized(graph: fx.Graph, variables: ViewedVariables) -> dict[str, tuple[fx.Node, FactoredGradient]]:
    gradients, sendable_gradients = _gradients(graph), {}
    nodes = list(gradients.values())
    for name, node in gradients.items():
        gradient = recognize(node) if nodes.count(node) == 1 else None
        if gradient is None or any(variables.of(factor) for factor in gradient.factors):
            continue
        if _described(gradient.form, fake_rows(gradient), gradient.details) is not None:
            sendable_gradients[name] = node, gradient
    return sendable_gradients


def sent_factors(program: Program, variable: str) -> SentFactors:
    gradient = recognize(_gradients(program.shard_graphs[0])[variable])
    assert gradient is not None, "the gradient can be sent as factors"
    factors = _described(gradient.form, fake_rows(gradient), gradient.details)
    assert factors is not None, "the gradient can be sent as factors"
    return factors


def fake_rows(gradient: FactoredGradient) -> list[torch.Tensor] | None:
    """The rows of a gradient as fake tensors; None if its form is not sent as factors."""
    return gradient.form.to_rows([factor.meta["val"] for factor in gradient.factors])


def _gradients(graph: fx.Graph) -> dict[str, fx.Node]:
    output: Any = graph.output_node().args[0]
    return output["gradients"]


def _described(
    form: GradientForm, rows: Sequence[torch.Tensor] | None, details: Mapping[str, Any]
) -> SentFactors | None:
    if rows is None or not all(type(value) is int for value in details.values()):
        return None
    kinds = tuple(RowType(sizes_key(factor.shape[1:]), factor.dtype) for factor in rows)
    if not all(type(size) is int for kind in kinds for size in kind.shape):
        return None
    sorted_details = tuple(Detail(name, value) for name, value in sorted(details.items()))
    return SentFactors(form.operation.__name__, kinds, sorted_details)


# In a program with packed buckets


def gradients_of(pack: fx.Node) -> list[fx.Node]:
    return list(pack.args)  # type: ignore[arg-type]


def packed_factors(gradient: fx.Node) -> SentFactors | None:
    rows = rows_of(gradient)
    return _described(form_of(gradient), rows[0], details_of(gradient)) if rows is not None else None


def rows_of(gradient: fx.Node) -> list[list[torch.Tensor]] | None:
    """Fake tensors with the rows of each microbatch's gradient."""
    form = form_of(gradient)
    parts = [form.to_rows(factors) for factors in factor_values(gradient)]
    return None if None in parts else parts  # type: ignore[return-value]


def factor_bytes(pack: fx.Node) -> int:
    rows_of_gradients = [rows_of(gradient) or [] for gradient in gradients_of(pack)]
    return sum(num_bytes_now(rows) for parts in rows_of_gradients for part in parts for rows in part)


def packs_of(program: Program, bucket: int) -> list[fx.Node]:
    graphs = (module.graph for module in program.device_graphs.values())
    return [next(node for node in calls_to(graph, ops.pack) if bucket_of(node) == bucket) for graph in graphs]


def factors_of_shares(program: Program, bucket: int) -> list[list[list[tuple[torch.Tensor, ...]]]]:
    """Fake factors of a bucket, by replica with examples, gradient and microbatch.

    Other workers are assumed to have as many factors.
    """
    packs = [pack for pack in packs_of(program, bucket) if pack.args]
    factors = [[factor_values(gradient) for gradient in left_to_shares(pack)] for pack in packs]
    is_gathered = any(user.target is ops.gather_factors for pack in packs for user in pack.users)
    return factors * program.workers.num_workers if is_gathered else factors


def row_counts(program: Program) -> CountsOfReplicas:
    counts: list[tuple[int, int | torch.SymInt]] = []
    for bucket in program.buckets:
        if not bucket.is_sent_as_factors:
            continue
        packs = packs_of(program, bucket.index)
        for place in range(len(bucket.slots)):
            for replica, pack in enumerate(packs):
                parts = (rows_of(gradients_of(pack)[place]) or []) if pack.args else []
                counts += [(replica, len(parts)), *((replica, part[0].shape[0]) for part in parts)]
    return tuple(counts)


def no_rows(program: Program) -> Counts:
    return (0,) * sum(program.num_replicas * len(bucket.sent_factors) for bucket in program.buckets)


def split_counts(counts: Counts, num_gradients: Sequence[int], num_replicas: int) -> list[list[list[Counts]]]:
    remaining = iter(counts)
    split = [
        [[tuple(next(remaining) for _ in range(next(remaining))) for _ in range(num_replicas)] for _ in range(number)]
        for number in num_gradients
    ]
    assert next(remaining, None) is None, "all workers have one plan"
    return split
