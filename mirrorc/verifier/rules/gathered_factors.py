"""Rules on factors that the devices of one worker gather, and on rows of tables that optimizers take."""

from __future__ import annotations

from collections.abc import Iterator

from torch import fx

from mirrorc.analysis.factored_gradients import stays_factored
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to, replica_of
from mirrorc.ir.program import Program, Stage
from mirrorc.verifier.rule import rule
from mirrorc.verifier.rules.programs import Violation, say, scopes

_TAKE_ROWS = (
    *(ops.all_gather, ops.gather_factors, ops.step_optimizer),
    *(ops.scale, ops.clip_value, ops.norm, ops.is_finite),  # where one device has all rows
)
_ADDS_WHOLE = (ops.all_reduce, ops.reduce_scatter, *ops.EXCHANGES_OF_SUMS, ops.scatter_sums, ops.add_accumulated)


@rule(since=Stage.CAPTURED)
def rows_have_a_bucket_of_their_own(program: Program) -> Iterator[Violation]:
    """The bucket of a table whose optimizer takes rows has no other gradient, and is not updated element by element: its sum has
    the rows alone that were looked up."""
    for bucket in program.buckets:
        if bucket.rule.takes_rows and (
            len(bucket.slots) != 1 or len(bucket.slots[0].shape) != 2 or bucket.slots[0].offset
        ):
            names = ", ".join(slot.variable for slot in bucket.slots)
            yield Violation(f"bucket {bucket.index} has {names}, but its optimizer takes rows, of one table")
        if bucket.rule.takes_rows and bucket.rule.elementwise:
            yield Violation(f"bucket {bucket.index} is updated element by element, but its optimizer takes rows")


@rule(since=Stage.PACKED)
def rows_stay_rows(program: Program) -> Iterator[Violation]:
    """Of a table whose optimizer takes rows, replicas pack rows and indices. These are gathered, and never added up whole: a row
    whose gradients cancel each other, or that is zero, is updated, too."""
    for where, graph, _ in scopes(program):
        for node in calls_to(graph, ops.pack, *_ADDS_WHOLE):
            if not program.buckets[bucket_of(node)].rule.takes_rows:
                continue
            if node.target is not ops.pack:
                yield Violation(f"{say(node)} adds up a whole gradient, of which the optimizer takes rows", node)
            for user in node.users if node.target is ops.pack else ():
                if user.op != "output" and user.target not in _TAKE_ROWS:
                    yield Violation(f"{user.name} takes {node.name} whole, of which the optimizer takes rows", user)
            for gradient in node.all_input_nodes if node.target is ops.pack else ():
                if gradient.target is not ops.index_add or not stays_factored(gradient):
                    place = where(replica_of(node))
                    yield Violation(
                        f"{node.name} on {place} packs {gradient.name}, which are no rows and indices, of which the optimizer "
                        "takes rows",
                        node,
                    )


@rule(since=Stage.REDUCED)
def devices_gather_their_own_factors(program: Program) -> Iterator[Violation]:
    """A bucket is gathered as the plan says. An all_gather takes each replica's own packed bucket, all of whose gradients are
    left as factors; a replica without examples packs none."""
    for where, graph, _ in scopes(program):
        for node in calls_to(graph, *ops.REDUCTIONS):
            if (node.target is ops.all_gather) != program.buckets[bucket_of(node)].is_gathered:
                said = "added up whole" if node.target is ops.all_gather else "gathered as factors"
                yield Violation(f"{say(node)} is of a bucket that is planned to be {said}", node)
        for node in calls_to(graph, ops.all_gather):
            for source in node.all_input_nodes:
                given = f"{say(node)} is given {source.name} on {where(replica_of(source))}"
                if source.target is not ops.pack or bucket_of(source) != bucket_of(node):
                    yield Violation(f"{given}, which is not that bucket as it was packed", node)
                elif whole := [gradient for gradient in source.all_input_nodes if not _is_left(gradient)]:
                    yield Violation(f"{given}, in which {whole[0].name} is not left as factors", node)


def _is_left(gradient: fx.Node) -> bool:
    return gradient.target in ops.FACTORED and stays_factored(gradient)
