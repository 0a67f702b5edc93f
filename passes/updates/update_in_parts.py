"""Lets updates compute factored gradients in parts."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import dataclass, field
from typing import Any, ClassVar

from torch import fx

from mirrorc.analysis.gradients.factored_gradients import factor_values, left_to_shares
from mirrorc.analysis.gradients.tiled_updates import MOST_INNER, Size, elements_of_part, has_link, why_not_in_parts
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.wording import counted
from mirrorc.torch_internals import is_symbolic, size_now


@dataclass(frozen=True)
class UpdateInParts:
    """Lets updates compute their gradients from factors, one part at a time::

        wait_0 = wait(reduce_scatter_0, ...)        ->   wait_0 = wait(reduce_scatter_0, ...)
        update(wait_0, bucket=0, replica=0)              update(wait_0, part_elements=524288, bucket=0, replica=0)

    This saves three of nine passes over memory (product and AdamW), because all parts use one small buffer, which stays
    in cache.

    Needs: to run after lower-collectives and all passes that read sums.
    Guarantees: the same gradients, up to the order of additions in a product.

    Attributes:
        part_elements: the size of a part; 2 MiB of float32 were fastest on an AMD EPYC with 1 MiB of cache per core.
    """

    part_elements: int = 2**19
    name: str = field(default="update-in-parts", init=False)
    input_stage: Stage = field(default=Stage.UPDATED, init=False)
    output_stage: Stage = field(default=Stage.SCHEDULED, init=False)
    changes_bits: str = field(
        default="a product of some rows may be added up in another order than that of all rows", init=False
    )
    trains_only: ClassVar = True
    updates_only: ClassVar = True

    def __post_init__(self) -> None:
        if self.part_elements < 1:
            raise ValueError(f"MC1002: part_elements={self.part_elements} must be at least 1")

    def run(self, program: Program) -> Program:
        graph = copied(program.mirrored_graph)
        products = _products(program, graph)
        changed = set()
        for update in calls_to(graph, ops.update):
            sizes = products.get(bucket_of(update), ())
            is_worth_it = any(elements_of_part(*size, self.part_elements) for size in sizes)
            if is_worth_it and not why_not_in_parts(program, update):
                update.kwargs = {"part_elements": self.part_elements, **update.kwargs}
                changed.add(bucket_of(update))
        if not changed:
            return program.evolve(stage=Stage.SCHEDULED).with_remarks(
                "no share is made in parts: no update alone takes a large product that devices make from factors",
                is_kept=False,
            )
        return program.evolve(stage=Stage.SCHEDULED, graph=graph).with_remarks(
            f"the products of {counted(len(changed), 'bucket')} are made {self.part_elements} elements at a time, and each part "
            f"updates at once, where they add up {MOST_INNER} numbers or fewer for an element"
        )


def _fewest(size: Any) -> int:
    """A symbolic size is limited to `MOST_INNER`, because each step tests the size again."""
    return min(int(size_now(size)), MOST_INNER) if is_symbolic(size) else int(size)


def _products(program: Program, graph: fx.Graph) -> dict[int, list[Size]]:
    sizes: dict[int, list[Size]] = defaultdict(list)
    for bucket in program.buckets:
        for slot, sent in zip(bucket.slots, bucket.sent_factors, strict=bucket.is_sent_as_factors):
            if sent.operation == ops.product.__name__:
                sizes[bucket.index].append((slot.shape[0], slot.shape[1], 0))
    inner: Counter[str] = Counter()
    products: dict[str, tuple[int, fx.Node]] = {}
    for pack in filter(has_link, calls_to(graph, ops.pack)):
        for gradient in left_to_shares(pack):
            if gradient.target is ops.product and not program.buckets[bucket_of(pack)].is_sent_as_factors:
                variable = str(gradient.kwargs["variable"])
                inner[variable] += sum(_fewest(left.shape[1]) for left, _ in factor_values(gradient))
                products[variable] = bucket_of(pack), gradient
    for variable, (index, gradient) in products.items():
        num_rows, width = gradient.meta["val"].shape
        sizes[index].append((num_rows, width, inner[variable]))
    return sizes
