"""Updates that compute factored gradients in parts."""

from __future__ import annotations

from typing import Any

from torch import fx

from mirrorc.analysis.gradients.factored_gradients import left_to_shares
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program

Size = tuple[int, int, int]
"""Rows and columns of a sum of products, and the number of addends per element."""

MOST_INNER = 64
"""For products with more addends per element, computing parts costs more than it gains."""
_SMALLEST_PART = 8


def part_elements_of(wait: fx.Node) -> int | None:
    """The number of elements per part of the update. None if the wait computes the share."""
    takers = [taker for user in wait.users for taker in (user.users if user.target is ops.clip_value else (user,))]
    numbers = [taker.kwargs.get("part_elements") for taker in takers if taker.target is ops.update]
    return next((number for number in numbers if isinstance(number, int)), None)


def share_behind(update: fx.Node) -> fx.Node:
    """The update's operand before a clip by value."""
    gradient: Any = update.args[0]
    return gradient.all_input_nodes[0] if gradient.target is ops.clip_value else gradient


def is_made_in_updates(gradient: fx.Node) -> bool:
    launches = [launch for pack in gradient.users for launch in pack.users]
    waits = [wait for launch in launches for wait in launch.users if wait.target is ops.wait]
    return bool(waits) and all(part_elements_of(wait) is not None for wait in waits)


def why_not_in_parts(program: Program, update: fx.Node) -> str:
    """Why an update cannot compute its gradient in parts, as a clause; empty if it can."""
    wait = share_behind(update)
    launches = [source for source in wait.all_input_nodes if source.target in (ops.reduce_scatter, ops.gather_factors)]
    if wait.target is not ops.wait or not launches:
        return f"it takes {wait.name}, which is no wait for a share"
    gradient = update.all_input_nodes[0]
    others = [user for user in wait.users if user not in (update, gradient)]
    if others:
        return f"{others[0].name} takes {wait.name} as well"
    if len(gradient.users) > 1:
        return f"it does not take {gradient.name} alone"
    if len(update.args) > 1:
        return "it scales the gradient as a whole"
    if any(device.is_asynchronous for device in program.devices):
        return "devices run it behind the host's back"
    index, packs = bucket_of(update), [source for launch in launches for source in launch.all_input_nodes]
    packs = [pack for pack in packs if pack.target is ops.pack and has_link(pack)]
    if not any(pack.args for pack in packs):
        packs = [pack for graph in program.graphs() for pack in calls_to(graph, ops.pack)]
        packs = [pack for pack in packs if bucket_of(pack) == index and has_link(pack)]
    is_factored = program.buckets[index].is_sent_as_factors or any(map(left_to_shares, packs))
    return "" if is_factored else f"no gradient of bucket {index} is left as factors"


def has_link(pack: fx.Node) -> bool:
    """Links decide where factored gradients are computed."""
    return all(user.kwargs.get("link") for user in pack.users)


def elements_of_part(num_rows: int, width: int, num_inner: int, part_elements: int) -> int:
    """The number of elements of the largest part, in whole rows; 0 without a gain. ``num_inner``: addends per element."""
    is_worth_it = width <= part_elements <= _SMALLEST_PART * num_rows * width and num_inner <= MOST_INNER
    return min(num_rows, part_elements // width) * width if is_worth_it else 0
