"""The intermediate representation: a program, and the typed tables that its graphs refer to.

It is long, as all that a program has is declared and described in one place.
"""

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

CAPTURE = "capture"
"""Stands in the place of a pass in remarks on how a program was captured: by which front end, if it was not the first one, and
which sizes are numbers in it although they change."""


@dataclass(frozen=True)
class Remark:
    """What a pass did or did not do, and why, in one or two sentences.

    Attributes:
        text: the sentences. The same program gives the same text.
        by: the name of the pass, which the runner sets; empty for a remark from before the first pass.
        is_kept: whether the remark is printed with the program after this pass and all later ones. Other remarks are only
            in the dump of their own pass: they say what that pass did, and need not be true of later programs.
    """

    text: str
    by: str = ""
    is_kept: bool = True

    def __str__(self) -> str:
        return f"{self.by}: {self.text}" if self.by else self.text


LOSS_OUTPUT = "loss"
"""The name of the output that is the loss of an evaluation; the names of all others begin with ``outputs``."""


class Stage(enum.IntEnum):
    """How far a program has been compiled. A pass declares the stage that it takes and the stage that it gives.

    A SCHEDULED program is an UPDATED program that may have more properties (`Property`). Several passes establish these, and
    each of the passes may be left out.
    """

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
        """The earlier stage to which programs of this stage still belong: passes that take that stage also take this one."""
        return Stage.UPDATED if self is Stage.SCHEDULED else None


class Property(enum.Enum):
    """A property that a pass has established, besides the stage of the program; messages show the value."""

    ORDERED = "ordered"  # launches come early and waits late
    PLACED = "placed"  # each bucket has its placement, and reductions fit it
    EXCHANGED = "exchanged"  # updates take sums over all workers
    COMPRESSED = "compressed"  # workers exchange sums in a narrower dtype, or a part of each
    SHARDED = "sharded"  # each worker updates its part of the buckets alone, and all gather the new parameters
    CLIPPED = "clipped"  # gradients are bounded as they are to be
    UNSCALED = "unscaled"  # the loss is scaled, and gradients are divided by the scale
    CHECKED = "checked"  # each commit depends on whether losses and gradients are finite
    LINKED = "linked"  # every collective has a link


class Accumulation(enum.StrEnum):
    """What a training program does with the gradients of several calls; files and printed programs have its text."""

    NONE = "none"  # it updates with its own gradients alone
    ADDS = "accumulating"  # it adds its gradients to those that are kept, and updates nothing
    ENDS = "after accumulation"  # it updates with its own gradients and those that are kept


@dataclass(frozen=True)
class Region:
    """A piece of forward or backward that all replicas share: held, compiled and printed once.

    Attributes:
        name: such as ``fwd_0`` or ``bwd_2``; ``bwd_2_shard1`` is what ``bwd_2`` is for the second shape of a shard.
        phase: ``forward`` or ``backward``.
        graph_module: its body; placeholders are its arguments, the output is a tuple.
    """

    name: str
    phase: str
    graph_module: fx.GraphModule


class ArgumentKind(enum.StrEnum):
    """The kind of an argument of a device's program; files and printed programs have its text."""

    BATCH = "batch"  # a shard, or a tensor that is given whole
    LOSS_WEIGHT = "loss_weight"  # the replica's share of the batch, fed to backward as the loss's tangent
    SIZE = "size"  # a number that is computed of the sizes of the replica's shard, a Python number
    NUMBER = "number"  # a Python number that may be another one in each step, as a scalar of 64 bits
    SEED = "seed"  # the replica's random stream in this step
    REPLICA = "replica_id"  # the replica's place among those that have examples, a scalar of int64
    NUM_REPLICAS = "num_replicas"  # how many replicas have examples, a scalar of int64


@dataclass(frozen=True)
class Argument:
    """An argument of a device's program.

    Attributes:
        name: as printed.
        kind: what it is.
        leaf: of the batch, the index of the tensor among the call's tensor arguments; of a number, that among the step's numbers;
            of a size, that among the replica's sizes.
        has_examples: of the batch, whether its dim 0 counts the replica's examples; a tensor that is given whole has none.
    """

    name: str
    kind: ArgumentKind
    leaf: int | None = None
    has_examples: bool = False


def placeholders_of(graph: fx.Graph, arguments: Sequence[Argument], kind: ArgumentKind) -> list[fx.Node]:
    """The placeholders of a single device's graph that are arguments of a kind."""
    names = {argument.name for argument in arguments if argument.kind is kind}
    return [node for node in graph.nodes if node.op == "placeholder" and node.target in names]


@dataclass(frozen=True)
class Program:
    """A model's training step, or its evaluation, at one stage of compilation.

    An evaluation has forward alone: no gradients and no buckets. It takes no weight of a loss and its graphs return none; its
    loss, if there is one, is gathered as its other outputs are.

    Up to OUTLINED, ``shard_graphs`` holds one single-device graph for each distinct shard shape (one, two when the
    batch does not divide evenly, or more with `PerReplica`) and ``shard_of_replica`` says which one each replica runs: None for a
    replica without examples, which runs none. If replicas run their shards in microbatches, the graphs are those of
    microbatches, and ``shard_of_microbatch`` says which one each of them runs, until ``accumulate-microbatches`` has put them
    one after the other.
    From REPLICATED to SCHEDULED, ``graph`` is the mirrored graph: the nodes of every device side by side. In LOWERED,
    ``device_graphs`` holds one graph module per device.

    Attributes:
        stage: how far it has been compiled.
        devices: the logical devices; replica i runs on devices[i].
        variables: every parameter and buffer, by name.
        arguments: the arguments of a replica's program.
        shard_graphs: see above.
        shard_of_replica: see above; as long as graphs are those of microbatches, the graph of the replica's first one.
        shard_of_microbatch: for each replica, the graph of each of its microbatches, see above; empty otherwise.
        graph: see above.
        device_graphs: see above, keyed by device name.
        regions: shared pieces of forward and backward, by name.
        buckets: the bucket plan, in the order in which buckets become ready.
        remarks: what passes tell a reader, such as which gradients stay factors and why. A plain text becomes a `Remark`.
        num_examples: for each replica, how many examples of the batch it has; empty if that is not known. A replica that has
            none, because the batch is too small, runs nothing of forward and backward. See `present`.
        microbatches: for each replica, how many examples each of its microbatches has, which run one after the other; empty if
            all replicas run their shards at once.
        accumulation: whether it adds its gradients to those of other calls, or updates with them.
        loss_reduction: what the loss is over the examples of the batch, ``mean`` or ``sum``.
        optimizer_groups: the hyperparameters of each of the optimizer's groups at compilation, as text, by the label of its
            update rule. For people alone: a step takes what the optimizer's groups hold then.
        properties: what passes have made true of it, besides the stage; the runner notes what a pass establishes.
        gathered: the variables whose gradients devices gather as factors, in place of adding up whole buckets.
        workers: the workers that train together; devices, graphs and ``num_examples`` are those of one of them.
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

    def __post_init__(self) -> None:
        if isinstance(self.remarks, tuple) and any(isinstance(remark, str) for remark in self.remarks):
            remarks = tuple(Remark(remark) if isinstance(remark, str) else remark for remark in self.remarks)
            object.__setattr__(self, "remarks", remarks)

    @property
    def num_replicas(self) -> int:
        return len(self.devices)

    @functools.cached_property
    def own_replicas(self) -> range:
        """The replicas of this worker's devices, by their numbers over all workers."""
        first = self.workers.first_replica
        return range(first, first + self.num_replicas)

    @property
    def reduced_replicas(self) -> range:
        """The replicas over which updates take sums: all workers' once sums are exchanged, before that this worker's."""
        is_exchanged = self.workers.are_several and Property.EXCHANGED in self.properties
        return range(self.workers.num_all_replicas) if is_exchanged else self.own_replicas

    @property
    def deals_out(self) -> bool:
        """Whether each worker updates a part of buckets alone, so that it has the sum of no others' parts."""
        return any(bucket.part is not None for bucket in self.buckets)

    @functools.cached_property
    def present(self) -> tuple[int, ...]:
        """The replicas that have examples, in order; all, if the numbers of examples are not known."""
        sizes = self.num_examples if len(self.num_examples) == self.num_replicas else (1,) * self.num_replicas
        return tuple(replica for replica, size in enumerate(sizes) if size)

    @property
    def first_present(self) -> int:
        """The first replica that has examples, which has all that such replicas have; replica 0, if none of this worker's has."""
        return self.present[0] if self.present else 0

    def graphs_run_by(self, replica: int) -> tuple[int, ...]:
        """The shard graphs that a replica runs, in order: one for each of its microbatches, or one; none without examples."""
        if self.shard_of_microbatch:
            return self.shard_of_microbatch[replica]
        shard = self.shard_of_replica[replica]
        return (shard,) if shard is not None else ()

    @functools.cached_property
    def packs(self) -> tuple[tuple[Bucket, Pack], ...]:
        """What is communicated at a time, each with its bucket, in the order of launches."""
        return tuple(sorted(((b, pack) for b in self.buckets for pack in b.own_packs), key=lambda one: one[1].number))

    @property
    def trains(self) -> bool:
        """Whether it is a training step, and no evaluation."""
        return any(argument.kind is ArgumentKind.LOSS_WEIGHT for argument in self.arguments)

    @property
    def meets_workers(self) -> bool:
        """Whether its replicas meet those of other workers, where the model asks for it; an evaluation is a worker's own."""
        return self.trains and self.workers.are_several

    @property
    def accumulates(self) -> bool:
        """Whether it adds its gradients to those that are kept, and reduces and updates nothing."""
        return self.accumulation is Accumulation.ADDS

    @property
    def mirrored_graph(self) -> fx.Graph:
        """The mirrored graph. The program must be at a stage that has it; anything else is a bug in a pass."""
        assert self.graph is not None, f"a {self.stage.name} program has no mirrored graph"
        return self.graph

    def evolve(self, **changes: Any) -> Program:
        """A copy with some attributes replaced."""
        return replace(self, **changes)

    def with_remarks(self, *texts: str, is_kept: bool = True) -> Program:
        """A copy with additional remarks; for ``is_kept`` see `Remark`."""
        return self.evolve(remarks=(*self.remarks, *(Remark(text, is_kept=is_kept) for text in texts)))

    def graphs(self) -> list[fx.Graph]:
        """Every graph of the program outside of its regions."""
        mirrored = [self.graph] if self.graph is not None else []
        return [*self.shard_graphs, *mirrored, *(module.graph for module in self.device_graphs.values())]

    def to_text(
        self, *, regions: bool = False, slots: bool = False, sources: bool = True, fold: bool | None = None
    ) -> str:
        """The program as text; the grammar is in `mirrorc.printing.program_text`.

        Args:
            regions: print the bodies of the regions, too.
            slots: print every gradient of a bucket, each on a line of its own.
            sources: print the user's source lines. Without them, the text stays the same when code moves in its file.
            fold: print once what repeats: layers of a deep model, devices of a mirrored program, shards of another size. By
                default it is folded, unless ``slots`` asks for everything.
        """
        from mirrorc.printing.program_text import program_to_text

        return program_to_text(self, regions=regions, slots=slots, sources=sources, fold=fold)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the program, whatever its stage, to a file, compressed if its name ends in ``.gz``; see `mirrorc.serialization`.

        Folders that are missing are made.

        Raises:
            ValueError: a node calls or holds something that cannot be found by name; says which. A file at ``path`` stays.
            OSError: the file cannot be written.
        """
        from mirrorc.serialization import save_program

        save_program(self, path)

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Program:
        """Loads a program from a file that `save` has written. Runs nothing in the file, and needs none of its devices.

        Raises:
            ValueError: the file is no program, is damaged, of a later version, or calls operators that are unknown here.
        """
        from mirrorc.serialization import load_program

        return load_program(path)

    def __str__(self) -> str:
        return self.to_text()

    def __rich__(self) -> Any:
        """The text in color, for ``rich.print(program)``."""
        from mirrorc.printing.colors import colored

        return colored(self.to_text())
