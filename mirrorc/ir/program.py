"""A program, and its tables."""

from __future__ import annotations

import enum
import functools
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any

from torch import fx

from mirrorc.ir.buckets import Bucket, Pack
from mirrorc.ir.devices import Device
from mirrorc.ir.variables import Variable
from mirrorc.ir.workers import ALONE, Workers
from mirrorc.messages.wording import notebook_html

CAPTURE = "capture"
"""Used in place of a pass's name in remarks on capture."""


@dataclass(frozen=True)
class Remark:
    """A remark in a program. ``is_kept``: later programs print it, too."""

    text: str
    by: str = ""
    is_kept: bool = True

    def __str__(self) -> str:
        return f"{self.by}: {self.text}" if self.by else self.text


LOSS_OUTPUT = "loss"
"""Name of an evaluation's loss among the outputs; all other names begin with ``outputs``."""


def gradient_output(argument: str) -> str:
    return f"gradient of {argument}"


class Stage(enum.IntEnum):
    """The stages of a program. SCHEDULED is UPDATED with further properties."""

    CAPTURED = 0
    OUTLINED = 1
    REPLICATED = 2
    PACKED = 3
    REDUCED = 4
    UPDATED = 5
    SCHEDULED = 6
    LOWERED = 7

    @property
    def refines(self) -> Stage | None:
        """The stage whose passes also take programs of this stage."""
        return Stage.UPDATED if self is Stage.SCHEDULED else None


class Property(enum.Enum):
    """A property of programs, established by passes. Messages show the value."""

    ORDERED = "ordered"  # launches come early and waits late
    PLACED = "placed"  # each bucket has its placement, and reductions fit it
    EXCHANGED = "exchanged"  # updates take sums over all workers
    COMPRESSED = "compressed"  # workers exchange sums in a narrower dtype, or a part of each
    SHARDED = "sharded"  # each worker updates its part of the buckets alone, and all gather the new parameters
    CLIPPED = "clipped"  # gradients are clipped
    UNSCALED = "unscaled"  # the loss is scaled, and gradients are divided by the scale
    CHECKED = "checked"  # each commit depends on whether losses and gradients are finite
    LINKED = "linked"  # every collective has a link

    @property
    def and_later(self) -> tuple[Property, ...]:
        return tuple(Property)[tuple(Property).index(self) :]


class Accumulation(enum.StrEnum):
    """The use of accumulated gradients in a program. Saved and printed programs contain the value."""

    NONE = "none"  # the program updates with its own gradients alone
    ADDS = "accumulating"  # the program adds its gradients to the accumulated ones, and updates nothing
    ENDS = "after accumulation"  # the program updates with its own and the accumulated gradients
    GRADIENTS = "gradients alone"  # the program adds its gradients to those of the parameters, and updates nothing
    FORWARD = "forward of a module"  # the program keeps values for that of backward, which computes the gradients


@dataclass(frozen=True)
class Region:
    """A piece of forward or backward, shared by replicas: ``fwd_0``, or ``bwd_2_shard1`` for the second shard shape."""

    name: str
    phase: str
    graph_module: fx.GraphModule


class ArgumentKind(enum.StrEnum):
    """The kind of an argument. Saved and printed programs contain the value."""

    BATCH = "batch"  # a shard, or a whole tensor
    TANGENT = "tangent"  # a replica's part of the gradient of an output
    SAVED = "saved"  # a value saved by the program of forward
    LOSS_WEIGHT = "loss_weight"  # the replica's share of the batch, fed to backward as the loss's tangent
    SIZE = "size"  # a Python number computed from the sizes of the replica's shard
    NUMBER = "number"  # a Python number that may change in each step, as a scalar of 64 bits
    SEED = "seed"  # the replica's random stream in this step
    REPLICA = "replica_id"  # the replica's place among those that have examples, a scalar of int64
    NUM_REPLICAS = "num_replicas"  # how many replicas have examples, a scalar of int64


@dataclass(frozen=True)
class Argument:
    """An argument. ``leaf`` is an index into the call's tensors, the step's numbers or the replica's sizes."""

    name: str
    kind: ArgumentKind
    leaf: int | None = None
    has_examples: bool = False


def placeholders_of(graph: fx.Graph, arguments: Sequence[Argument], kind: ArgumentKind) -> list[fx.Node]:
    names = {argument.name for argument in arguments if argument.kind is kind}
    return [node for node in graph.nodes if node.op == "placeholder" and node.target in names]


@dataclass(frozen=True)
class Program:
    """A training step, an evaluation, or forward or backward alone, at one stage of compilation.

    An evaluation has no gradients, buckets or loss weight. Its loss is gathered with its other outputs. Forward alone
    is an evaluation that also saves values for backward. Backward alone takes these values and the gradients of
    outputs; it has no loss.

    Up to OUTLINED, ``shard_graphs`` holds a single-device graph for each distinct shard shape. ``shard_of_replica``
    maps each replica to its graph's index, or to None if the replica has no examples. From REPLICATED to SCHEDULED,
    ``graph`` has the nodes of all devices side by side. In LOWERED, ``device_graphs`` holds one graph module per
    device.

    Attributes:
        devices: replica i runs on devices[i].
        buckets: in the order in which they become ready.
        num_examples: of each replica; empty if unknown.
        microbatches: the sizes of each replica's microbatches.
        loss_reduction: ``mean`` or ``sum`` over the batch.
        optimizer_groups: only for printing.
        gathered: variables whose gradients are all-gathered as factors between devices.
        workers: all workers; devices, graphs and ``num_examples`` are those of this one.
        passes: names of the passes that have run, in order.
    """

    stage: Stage
    devices: tuple[Device, ...]
    variables: Mapping[str, Variable]
    arguments: tuple[Argument, ...]
    shard_graphs: tuple[fx.Graph, ...] = ()
    shard_of_replica: tuple[int | None, ...] = ()
    shard_of_microbatch: tuple[tuple[int, ...], ...] = ()
    graph: fx.Graph | None = None
    device_graphs: Mapping[str, fx.GraphModule] = field(default_factory=lambda: MappingProxyType({}))
    regions: Mapping[str, Region] = field(default_factory=lambda: MappingProxyType({}))
    buckets: tuple[Bucket, ...] = ()
    remarks: tuple[Remark, ...] = ()
    num_examples: tuple[int, ...] = ()
    microbatches: tuple[tuple[int, ...], ...] = ()
    accumulation: Accumulation = Accumulation.NONE
    loss_reduction: str = "mean"
    optimizer_groups: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    properties: tuple[Property, ...] = ()
    gathered: tuple[str, ...] = ()
    workers: Workers = ALONE
    passes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if isinstance(self.remarks, tuple) and any(isinstance(remark, str) for remark in self.remarks):
            remarks = tuple(Remark(remark) if isinstance(remark, str) else remark for remark in self.remarks)
            object.__setattr__(self, "remarks", remarks)

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def local_replicas(self) -> range:
        """Numbers of this worker's replicas, counted over all workers."""
        first = self.workers.first_replica
        return range(first, first + self.num_replicas)

    @property
    def reduced_replicas(self) -> range:
        """The replicas that a sum is over: this worker's, or all workers' once sums are exchanged."""
        is_exchanged = self.workers.are_several and Property.EXCHANGED in self.properties
        return range(self.workers.num_all_replicas) if is_exchanged else self.local_replicas

    @property
    def has_sharded_optimizer(self) -> bool:
        return any(bucket.part is not None for bucket in self.buckets)

    @functools.cached_property
    def present(self) -> tuple[int, ...]:
        """The replicas with examples; all replicas if ``num_examples`` is unknown."""
        sizes = self.num_examples if len(self.num_examples) == self.num_replicas else (1,) * self.num_replicas
        return tuple(replica for replica, size in enumerate(sizes) if size)

    @property
    def first_present(self) -> int:
        return self.present[0] if self.present else 0

    def graphs_run_by(self, replica: int) -> tuple[int, ...]:
        """Indices of a replica's shard graphs: one, or one per microbatch; none without examples."""
        if self.shard_of_microbatch:
            return self.shard_of_microbatch[replica]
        shard = self.shard_of_replica[replica]
        return (shard,) if shard is not None else ()

    @functools.cached_property
    def packs(self) -> tuple[tuple[Bucket, Pack], ...]:
        packs = ((bucket, pack) for bucket in self.buckets for pack in bucket.launch_units)
        return tuple(sorted(packs, key=lambda item: item[1].number))

    @functools.cached_property
    def trains(self) -> bool:
        return any(argument.kind is ArgumentKind.LOSS_WEIGHT for argument in self.arguments)

    @functools.cached_property
    def takes_tangents(self) -> bool:
        """True for backward of a module, which begins with the gradients of outputs."""
        return any(argument.kind is ArgumentKind.TANGENT for argument in self.arguments)

    @property
    def has_loss(self) -> bool:
        """False in an evaluation, and in forward and backward of a module."""
        return self.trains and not self.takes_tangents

    @property
    def meets_workers(self) -> bool:
        """Whether replicas of all workers exchange values that the model asks for; an evaluation is each worker's own."""
        return self.workers.are_several and (self.trains or self.accumulation is Accumulation.FORWARD)

    @property
    def accumulates(self) -> bool:
        return self.accumulation is Accumulation.ADDS

    @property
    def leaves_gradients(self) -> bool:
        return self.accumulation is Accumulation.GRADIENTS

    @property
    def has_parameters_in_buckets(self) -> bool:
        return self.trains and not self.leaves_gradients

    @property
    def updates(self) -> bool:
        return self.trains and self.accumulation in (Accumulation.NONE, Accumulation.ENDS)

    @property
    def mirrored_graph(self) -> fx.Graph:
        assert self.graph is not None, f"a {self.stage.name} program has no mirrored graph"
        return self.graph

    def evolve(self, **changes: Any) -> Program:
        return replace(self, **changes)

    def with_remarks(self, *texts: str, is_kept: bool = True) -> Program:
        return self.evolve(remarks=(*self.remarks, *(Remark(text, is_kept=is_kept) for text in texts)))

    def graphs(self) -> list[fx.Graph]:
        mirrored = [self.graph] if self.graph is not None else []
        return [*self.shard_graphs, *mirrored, *(module.graph for module in self.device_graphs.values())]

    def to_text(
        self,
        *,
        regions: bool = False,
        slots: bool = False,
        sources: bool = True,
        fold: bool | None = None,
        complete: bool = False,
    ) -> str:
        """The program as text; the grammar is in `mirrorc.printing.program_text`.

        Args:
            complete: print everything, as `save` does, for `mirrorc.parse`. Other arguments are then ignored.
            regions: print bodies of regions, too.
            slots: print every gradient of a bucket on its own line.
            sources: print the user's source lines. Without them, the text does not depend on line numbers.
            fold: print repeated layers, devices and shard sizes once. By default, the opposite of ``slots``.
        """
        if complete:
            from mirrorc.serialization import text_of

            return text_of(self)
        from mirrorc.printing.program_text import ProgramPrinter

        return ProgramPrinter(self).text(regions=regions, slots=slots, sources=sources, fold=fold)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program's complete text, at any stage, to a file; compressed if its name ends in ``.gz``.

        Creates missing folders.

        Raises:
            ValueError: a node calls or holds an object without an importable name. An earlier file stays.
            OSError: the file cannot be written.
        """
        from mirrorc.serialization import save_program

        save_program(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Program:
        """Loads a program that `save` has written; ``-`` is standard input. Loading runs no code of the file, and needs
        none of its devices.

        Raises:
            ValueError: the file is not a program, is damaged or of a later version, or calls unknown operators.
        """
        from mirrorc.serialization import load_program

        return load_program(path)

    def __str__(self) -> str:
        return self.to_text()

    def _repr_html_(self) -> str:
        text = self.to_text()
        return notebook_html(text.partition("\n")[0].removeprefix("# "), text)

    def __rich__(self) -> Any:
        """The text in color, for ``rich.print(program)``."""
        from mirrorc.printing.colors import colored

        return colored(self.to_text())
