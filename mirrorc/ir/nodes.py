"""Properties of FX nodes."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from types import FunctionType
from typing import Any

from torch import fx

from mirrorc.ir.buckets import Bucket, Pack
from mirrorc.ir.operation import Kind, Operation, Selection, operation_of
from mirrorc.torch_internals import bare_name, is_operator

_VARIANT = re.compile(r"_shard(\d+)$")


def is_compute(node: fx.Node) -> bool:
    return node.op == "call_function" and is_operator(node.target)


def is_computed(node: fx.Node) -> bool:
    record = operation_of(node.target)
    return record.kind is Kind.COMPUTE if record is not None else is_compute(node)


def is_of(node: Any, kind: Kind) -> bool:
    record = operation_of(node.target) if isinstance(node, fx.Node) else None
    return record is not None and record.kind is kind


def part_keywords(target: Any, args: tuple[Any, ...]) -> tuple[Operation, dict[str, Any]] | None:
    """The operation and its keywords for one bucket, if the target is `getitem` on a result per bucket."""
    source, place = args if target is operator.getitem else (None, None)
    record = operation_of(source.target) if isinstance(source, fx.Node) else None
    if record is None or not isinstance(record.operands, str):
        return None
    return record, {**source.kwargs, "bucket": source.kwargs[record.operands][place]}


def is_known(node: fx.Node) -> bool:
    return is_compute(node) or node.target is operator.getitem or operation_of(node.target) is not None


def replica_of(node: fx.Node) -> int | None:
    while True:
        target = node.target
        if target is operator.getitem:
            node = node.args[0]  # type: ignore[assignment]
        elif type(target) is not FunctionType and is_operator(target):
            sources = node.all_input_nodes
            if not sources:
                return None
            node = sources[0]
        else:
            replica = node.kwargs.get("replica")
            return replica if isinstance(replica, int) else None


def is_region_call(node: fx.Node) -> bool:
    record = operation_of(node.target)
    return record.kind is Kind.REGION if record is not None else node.op == "call_module"


def launch_of(wait: fx.Node) -> fx.Node:
    launch = wait.args[0]
    assert isinstance(launch, fx.Node), "a wait takes what a launch gives"
    return launch


def region_of(node: fx.Node) -> str:
    return str(node.target if node.op == "call_module" else node.kwargs["region"])


def region_title(name: str) -> str:
    """The printed name of a region, such as ``bwd_0.shard1``."""
    return _VARIANT.sub(r".shard\1", name)


def bucket_of(node: fx.Node) -> int:
    index = node.kwargs["bucket"]
    assert isinstance(index, int)
    return index


def pack_of(node: fx.Node) -> int:
    number = node.kwargs.get("pack")
    return number if isinstance(number, int) else bucket_of(node)


def pack_keywords(bucket: Bucket, pack: Pack) -> dict[str, Any]:
    return {"bucket": bucket.index, **({"pack": pack.number} if bucket.packs else {})}


def origin_of(node: fx.Node) -> fx.Node:
    while node.target is not operator.getitem and is_computed(node) and node.args and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def reached(starts: Iterable[fx.Node], onward: Callable[[fx.Node], Iterable[fx.Node]]) -> Iterator[fx.Node]:
    """The starts, and the nodes that ``onward`` leads to: each once, breadth first."""
    seen = dict.fromkeys(starts)
    waiting = list(seen)
    for node in waiting:
        yield node
        new = dict.fromkeys(other for other in onward(node) if other not in seen)
        seen.update(new)
        waiting += new


def ancestors(node: fx.Node) -> set[fx.Node]:
    return set(reached([node], lambda user: user.all_input_nodes))


def is_early(commit: fx.Node) -> bool:
    return bool(commit.kwargs.get("early"))


def users_of_sum(wait: fx.Node) -> list[fx.Node]:
    def onward(node: fx.Node) -> Iterable[fx.Node]:
        return node.users if node is wait or is_computed(node) or node.target is operator.getitem else ()

    return sorted(node for node in reached([wait], onward) if node is not wait)


def name_of(node: fx.Node) -> str:
    return str(getattr(node.target, "__name__", node.target))


def operation_name(target: Any) -> str:
    return bare_name(target) if is_operator(target) else str(target.__name__)


def target_name(target: Any) -> str:
    return str(target) if is_operator(target) else str(getattr(target, "__name__", target))


def calls_to(graph: fx.Graph, *targets: Callable[..., Any]) -> Iterator[fx.Node]:
    nodes = [node for target in targets for node in graph.find_nodes(op="call_function", target=target, sort=False)]
    return iter(sorted(nodes))


def region_calls(graph: fx.Graph) -> list[fx.Node]:
    return sorted([*calls_to(graph, *_REGION_CALLS), *graph.find_nodes(op="call_module", sort=False)])


def names_of_called_regions(graph: fx.Graph) -> list[str]:
    return list(dict.fromkeys(map(region_of, region_calls(graph))))


_REGION_CALLS = Selection(lambda operation: operation.kind is Kind.REGION)


def owners_of(graph: fx.Graph) -> dict[fx.Node, int | None]:
    owners: dict[fx.Node, int | None] = {}
    for node in graph.nodes:
        target = node.target
        if target is operator.getitem:
            owners[node] = owners.get(node.args[0])
        elif type(target) is not FunctionType and is_operator(target):
            sources = node.all_input_nodes
            owners[node] = owners.get(sources[0]) if sources else None
        else:
            replica = node.kwargs.get("replica")
            owners[node] = replica if isinstance(replica, int) else None
    return owners


def call_name(node: fx.Node) -> str:
    """A region's name, or an operation and its bucket, such as ``wait b0``."""
    if is_region_call(node):
        return region_title(region_of(node))
    about = f"b{node.kwargs['bucket']}" if "bucket" in node.kwargs else str(node.kwargs.get("variable", ""))
    about += f" pack {node.kwargs['pack']}" if node.kwargs.get("pack") is not None else ""
    return f"{name_of(node)} {about}".rstrip()


CHECKPOINT = "checkpoint"


@dataclass(frozen=True)
class Checkpoint:
    """A call of `torch.utils.checkpoint`, noted on an operator inside it. ``keeps``: the policy saves the operator's result."""

    number: int
    keeps: bool = False


def checkpoint_of(node: fx.Node) -> Checkpoint | None:
    while node.target is operator.getitem and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    checkpoint: Checkpoint | None = node.meta.get(CHECKPOINT)
    return checkpoint
