"""The operations of mirrored and lowered graphs.

In a mirrored graph every operation except collectives has the keyword ``replica``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mirrorc.ir import type_rules
from mirrorc.ir.operation import Effect, Kind, Printed, Selection, Symbol, TypeRule, operation
from mirrorc.ir.program import Stage
from mirrorc.ir.value_types import Pending as Pending

_Declaration = Callable[[Callable[..., Any]], Symbol]


def _source(gives: TypeRule, called: str, value: str, *, since: Stage, stem: str = "") -> _Declaration:
    printed = Printed.WHERE_USED
    return operation(Kind.SOURCE, since=since, gives=gives, stem=stem, value=value, called=called, printed=printed)


def _collective(
    gives: TypeRule, called: str, awaited: str, *effects: Effect, since: Stage, until: Stage = Stage.LOWERED
) -> _Declaration:
    return operation(
        Kind.LAUNCH,
        since=since,
        until=until,
        effects=(Effect.LAUNCHES, Effect.JOINS, *effects),
        gives=gives,
        stem=called,
        value="pending",
        called=called,
        awaited=awaited,
    )


def _bucket_value(gives: TypeRule, called: str, value: str, *, since: Stage) -> _Declaration:
    return operation(Kind.COMPUTE, since=since, gives=gives, stem=called, value=value, called=called)


def _meeting(gives: TypeRule, stem: str) -> _Declaration:
    return operation(Kind.WAIT, since=Stage.CAPTURED, effects=(Effect.MEETS,), gives=gives, stem=stem, value="computed")


@operation(
    Kind.SOURCE,
    since=Stage.REPLICATED,
    until=Stage.SCHEDULED,
    gives=None,
    stem="{name}",
    value="argument",
    called="{name}",
    printed=Printed.WHERE_USED,
)
def argument(*, name: str, replica: int) -> Any:
    """An argument of a replica's program."""


@_source(type_rules.of_variable, "{variable}", "variable", since=Stage.CAPTURED)
def read(*, variable: str, replica: int | None = None) -> Any:
    """A variable before the step's update."""


@_source(type_rules.of_slot, "slot({variable})", "slot", since=Stage.OUTLINED, stem="slot_{variable}")
def slot(*, bucket: int, variable: str, replica: int | None = None) -> Any:
    """A gradient's place in its bucket, where a region writes it."""


@operation(Kind.SOURCE, since=Stage.OUTLINED, gives=type_rules.of_reserved, stem="reserved_{number}", value="slot")
def reserved(*, number: int, shape: tuple[int, ...], dtype: Any, replica: int | None = None) -> Any:
    """Memory for a large result of a region, reused in each step.

    A replica's values with the same ``number`` share the memory; their lifetimes are disjoint.
    """


@_source(type_rules.of_loss_scale, "loss_scale", "computed", since=Stage.UPDATED, stem="loss_scale")
def loss_scale(*, replica: int) -> Any:
    """This step's loss scale, from the user's `GradScaler`."""


@operation(Kind.COMPUTE, since=Stage.OUTLINED, gives=type_rules.of_microbatch)
def microbatch(argument: Any, *, index: int, sizes: tuple[int, ...], replica: int | None = None) -> Any:
    """A view of the examples of one microbatch. ``sizes`` are the numbers of examples of all microbatches."""


@operation(Kind.COMPUTE, since=Stage.OUTLINED, gives=type_rules.of_operand)
def microbatch_seed(seed: Any, *, index: int, replica: int | None = None) -> Any:
    """The random stream of one microbatch, derived from its replica's."""


@operation(Kind.FACTORED, since=Stage.OUTLINED, gives=type_rules.of_product, stem="d_{variable}", hidden=("variable",))
def product(*factors: Any, bucket: int, variable: str, replica: int | None = None) -> Any:
    """A gradient as factors: a pair ``left, right`` for each microbatch. The gradient is the sum of ``left @ right``."""


@operation(
    Kind.FACTORED, since=Stage.OUTLINED, gives=type_rules.of_index_add, stem="d_{variable}", hidden=("variable",)
)
def index_add(*factors: Any, bucket: int, variable: str, padding_idx: int = -1, replica: int | None = None) -> Any:
    """A table's gradient as factors: ``rows`` [..., width] are added up at ``indices`` [...]; other rows are zero.

    Rows for ``padding_idx`` are not added.
    """


@operation(
    Kind.REGION,
    since=Stage.OUTLINED,
    until=Stage.SCHEDULED,
    gives=type_rules.of_region,
    stem="{region}",
    hidden=("region", "gradients"),
)
def call_region(*args: Any, region: str, gradients: dict[str, int], replica: int | None = None) -> Any:
    """Runs a region. ``gradients`` maps variables to the indices of their gradients among the outputs."""


@operation(
    Kind.CHECK, since=Stage.CAPTURED, effects=(Effect.CHECKS,), gives=type_rules.nothing, stem="check", hidden=("text",)
)
def check(condition: Any, *, text: str, replica: int | None = None) -> None:
    """Raises an error with this text unless the condition (one element) is true. No state has changed by then."""


@operation(
    Kind.GATHER, since=Stage.CAPTURED, effects=(Effect.GATHERS,), gives=type_rules.of_gather, stem="gather_{output}"
)
def gather(value: Any, *, output: str, how: str, replica: int | None = None) -> None:
    """Returns a replica's part of an output (other than the loss) to the step's caller.

    ``how``: "concatenated" along dim 0, "averaged" over examples, "summed", or each "apart".
    """


@operation(
    Kind.GATHER,
    since=Stage.CAPTURED,
    effects=(Effect.GATHERS,),
    gives=type_rules.nothing,
    stem="keep_{number}",
    hidden=("number",),
    printed=Printed.TOGETHER,
)
def keep(value: Any, *, number: int, replica: int | None = None) -> None:
    """Saves a value of forward for the program of backward."""


@operation(
    Kind.PACK,
    since=Stage.PACKED,
    gives=type_rules.of_pack,
    stem="b{bucket}{pack}",
    value="bucket",
    called="b{bucket}{pack}",
)
def pack(*gradients: Any, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Copies gradients into their slots. The result is the bucket, or one pack of it.

    A replica without examples packs zeros.
    """


@operation(Kind.COMPUTE, since=Stage.PACKED, gives=type_rules.of_packed)
def add_accumulated(packed: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Adds this replica's gradients of earlier calls to the packed ones, in place."""


@_collective(type_rules.pending_operand, "b{bucket}{pack}_pending", "sum", Effect.SUMS, since=Stage.REDUCED)
def all_reduce(*buckets: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket or pack over all replicas."""


@_collective(
    type_rules.pending_operand, "b{bucket}{pack}_pending", "share", Effect.SUMS, Effect.SCATTERS, since=Stage.REDUCED
)
def reduce_scatter(*buckets: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all replicas; each gets its share."""


@_collective(type_rules.of_gathered, "b{bucket}_pending", "sum", Effect.SUMS, since=Stage.REDUCED)
def all_gather(*buckets: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches an all-gather of a bucket's factors over all replicas.

    At the wait, each replica computes the sum, in the order of replicas. For a row-wise optimizer, it sums only the
    looked-up rows.
    """


@_collective(
    type_rules.pending_operand, "b{bucket}_pending", "sum", Effect.SUMS, Effect.SCATTERS, since=Stage.SCHEDULED
)
def reduce(*buckets: Any, bucket: int, op: str, root: int, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all replicas, for replica ``root`` alone."""


@_bucket_value(type_rules.of_compressed, "b{bucket}{pack}_compressed", "reduced", since=Stage.SCHEDULED)
def compress(local_sum: Any, *, dtype: Any, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Rounds a replica's part of its worker's sum to a narrower ``dtype``. The worker's replicas share the memory of
    the result.
    """


@_bucket_value(type_rules.of_decompressed, "b{bucket}{pack}_wide", "reduced", since=Stage.SCHEDULED)
def decompress(total: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Casts a sum of compressed values back to the bucket's dtype, in the bucket's memory."""


@_collective(type_rules.of_exchange, "b{bucket}{pack}_exchange", "total", Effect.EXCHANGES, since=Stage.SCHEDULED)
def exchange(*sums: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all workers, which have reduced it over their own replicas.

    An operand is a replica's share of the worker's sum, or the whole sum. The result has the same elements and memory.
    """


@_bucket_value(type_rules.of_operand, "b{bucket}{pack}_with_unsent", "reduced", since=Stage.SCHEDULED)
def add_unsent(local_sum: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Adds the residual of earlier steps to a replica's part of its worker's sum. The result has memory outside of the
    bucket.

    A failed or skipped step keeps the old residual.
    """


@_collective(type_rules.of_largest, "b{bucket}{pack}_largest", "total", Effect.EXCHANGES, since=Stage.SCHEDULED)
def gather_largest(
    *sums: Any, count: int, bucket: int, pack: int | None = None, op: str, link: str | None = None
) -> Any:
    """Launches an all-gather of each worker's ``count`` largest elements of a bucket by magnitude, with their indices.

    At the wait, each replica adds up its share in the order of ranks, so all workers get the same bits.
    """


@_collective(type_rules.of_payload, "b{bucket}{pack}_payload", "total", Effect.EXCHANGES, since=Stage.SCHEDULED)
def exchange_payload(
    *sums: Any, payload: str, num_bytes: int, bucket: int, pack: int | None = None, op: str, link: str | None = None
) -> Any:
    """Launches the exchange of a bucket through the user's `mirrorc.compression.Payload`, in ``num_bytes`` bytes.

    All workers get the same bits.
    """


@_collective(type_rules.of_gathered, "b{bucket}{pack}_factors", "total", Effect.EXCHANGES, since=Stage.SCHEDULED)
def gather_factors(*buckets: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches an all-gather of a bucket's factors over all workers.

    At the wait, each replica computes its share of the sum over all replicas, in their order.
    """


@_collective(
    type_rules.of_exchange, "b{bucket}_scatter", "part", Effect.EXCHANGES, Effect.SCATTERS, since=Stage.SCHEDULED
)
def scatter_sums(*sums: Any, bucket: int, op: str, link: str | None = None) -> Any:
    """Launches a reduce-scatter of a bucket over all workers. Each worker gets a part, divided into shares for its
    replicas.
    """


@_collective(type_rules.of_spread, "b{bucket}_gather", "parameters", Effect.SPREADS, since=Stage.SCHEDULED)
def gather_parameters(*, bucket: int, link: str | None = None) -> Any:
    """Launches an all-gather of a bucket's new parameters. Each worker has updated a part of them."""


@_collective(type_rules.pending_operand, "b{bucket}_pending", "parameters", since=Stage.UPDATED, until=Stage.SCHEDULED)
def broadcast(value: Any, *, bucket: int, root: int, link: str | None = None) -> Any:
    """Launches the broadcast of replica ``root``'s part of a bucket to all replicas."""


@operation(
    Kind.LAUNCH,
    since=Stage.UPDATED,
    effects=(Effect.SENDS,),
    gives=type_rules.nothing,
    stem="send_b{bucket}{pack}_to_r{destination}",
)
def send(
    value: Any,
    *,
    bucket: int,
    pack: int | None = None,
    destination: int,
    chunk: int = 0,
    round: int = 0,
    replica: int,
    link: str,
) -> None:
    """Sends a part of a bucket to replica ``destination``, without waiting. The tag is a `mirrorc.ir.routes.Route`."""


@operation(
    Kind.LAUNCH,
    since=Stage.UPDATED,
    effects=(Effect.LAUNCHES, Effect.RECEIVES),
    gives=type_rules.pending_sent,
    stem="b{bucket}{pack}{part}_incoming",
    value="pending",
    called="b{bucket}{pack}{part}_incoming",
    awaited="parameters",
)
def recv(
    *, bucket: int, pack: int | None = None, source: int, chunk: int = 0, round: int = 0, replica: int, link: str
) -> Any:
    """Launches the receive that matches the send of replica ``source`` with the same tag."""


@operation(
    Kind.WAIT,
    since=Stage.REDUCED,
    effects=(Effect.WAITS,),
    gives=type_rules.awaited,
    stem="b{bucket}{pack}{part}_{awaited}",
    value="reduced",
    called="b{bucket}{pack}{part}_{awaited}",
)
def wait(pending: Pending, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Turns a pending value into a tensor, once per replica."""


@_meeting(type_rules.of_sum_over_replicas, "sum_{number}")
def sum_over_replicas(value: Any, *, number: int, replica: int | None = None) -> Any:
    """Waits for the sum of a value over all replicas with examples: `mirrorc.all_reduce`.

    It is a collective of all replicas of all workers; ``number`` identifies it.
    """


@_meeting(type_rules.of_rows_of_replicas, "rows_{number}")
def rows_of_replicas(value: Any, *, number: int, rows: int, before: int = 0, replica: int | None = None) -> Any:
    """Concatenates the values of all replicas with examples: `mirrorc.all_gather`.

    The result has ``rows`` rows, ``before`` of them from earlier workers.
    """


@_meeting(type_rules.of_rows_of_replicas, "own_{number}")
def own_rows_of_sum(value: Any, *, number: int, rows: int, before: int = 0, replica: int | None = None) -> Any:
    """A replica's rows of a sum over all replicas: the gradient of `rows_of_replicas`."""


@operation(
    Kind.WAIT, since=Stage.REPLICATED, effects=(Effect.ATTENDS,), gives=type_rules.nothing, stem="attend_{number}"
)
def attend(*, number: int, meeting: str, shape: tuple[int, ...], dtype: Any, replica: int) -> None:
    """Joins a collective of the model on a worker that has no examples.

    ``meeting`` names the other workers' operation, and ``shape`` is the shape of its result.
    """


@_bucket_value(type_rules.of_unpacked, "b{bucket}_whole", "reduced", since=Stage.REDUCED)
def unpack(*packs: Any, bucket: int, replica: int) -> Any:
    """Joins all packs of a bucket. Only packs outside of the bucket's memory are copied."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=type_rules.of_finiteness)
def is_finite(value: Any, *, replica: int) -> Any:
    """Tests that all elements of a value are finite. Only `commit` takes the result."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=type_rules.of_norm)
def norm(*values: Any, norm_type: float, row: int = 0, replica: int) -> Any:
    """The ``norm_type``-norm of all elements of its operands together.

    If the operand is the result of a `commit`, ``row`` selects the row with all replicas' norms.
    """


@operation(
    Kind.WAIT,
    since=Stage.UPDATED,
    effects=(Effect.COMMITS,),
    gives=type_rules.of_commit,
    stem="commit",
    value="computed",
    called="met",
)
def commit(*operands: Any, otherwise: str | None = None, early: bool = False, replica: int) -> Any:
    """A barrier of all replicas. No operation after it can stop the step.

    Operations that can fail come before it, writes of variables after it. If a boolean operand of any replica is false,
    the step raises (``otherwise="raise"``) or returns its loss without an update (``otherwise="skip"``). The result has
    a row for each numeric operand, with the values of all replicas. After an ``early`` commit, a lost connection can
    still fail the step.
    """


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=type_rules.number)
def clip_factor(norm: Any, *, max_norm: float, replica: int) -> Any:
    """The factor that scales gradients with this norm to at most ``max_norm``; 1 if they need no scaling."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=type_rules.of_operand)
def scale(gradient: Any, factor: Any, *, replica: int) -> Any:
    """A reduced gradient times a factor. It may overwrite the gradient, so nothing may read the gradient afterwards."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=type_rules.of_operand)
def clip_value(gradient: Any, *, max_value: float, replica: int) -> Any:
    """A reduced gradient, clamped to ``-max_value`` to ``max_value``. It may overwrite the gradient."""


@operation(Kind.GATHER, since=Stage.UPDATED, effects=(Effect.TELLS,), gives=type_rules.of_report, stem="tell_{what}")
def tell(value: Any, *, what: str, replica: int) -> None:
    """Reports a number, equal on all replicas, to the step's caller."""


@operation(
    Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.UPDATES,), gives=type_rules.of_update, stem="update_b{bucket}"
)
def update(gradient: Any, *factor: Any, part_elements: int | None = None, bucket: int, replica: int) -> None:
    """Applies an element-wise optimizer to a bucket's parameters, or to the replica's share of them.

    A factor scales the gradient, maybe in its memory. With ``part_elements``, the gradient is computed from factors and
    applied in parts of at most so many elements. Such a gradient has no other user, except for a `clip_value`.
    """


@operation(
    Kind.UPDATE,
    since=Stage.UPDATED,
    effects=(Effect.UPDATES,),
    gives=type_rules.of_buckets,
    operands_for="buckets",
    hidden=("buckets",),
    value="parameters",
    called="b{bucket}_parameters",
)
def step_optimizer(*gradients: Any, buckets: tuple[int, ...], replica: int) -> Any:
    """Runs the user's optimizers of these buckets, in order. The results are the new parameters, each 1-D."""


@_source(type_rules.of_bucket, "updated(b{bucket})", "parameters", since=Stage.SCHEDULED, stem="b{bucket}_updated")
def updated(*, bucket: int, replica: int) -> Any:
    """The updated parameters of a bucket, 1-D, in their memory."""


@_bucket_value(type_rules.of_rows, "b{bucket}_rows", "parameters", since=Stage.UPDATED)
def updated_rows(parameters: Any, gradient: Any, *, bucket: int, replica: int) -> Any:
    """The new rows of a table, at the indices of its reduced gradient, sorted and without duplicates."""


@operation(
    Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.UPDATES,), gives=type_rules.nothing, stem="store_b{bucket}"
)
def store(value: Any, *, bucket: int, replica: int) -> None:
    """Writes a bucket's parameters."""


@operation(
    Kind.UPDATE,
    since=Stage.UPDATED,
    effects=(Effect.UPDATES,),
    gives=type_rules.of_stored_rows,
    stem="store_rows_b{bucket}",
)
def store_rows(rows: Any, gradient: Any, *, bucket: int, replica: int) -> None:
    """Writes rows of a table that another replica has updated, at the gradient's indices."""


@operation(
    Kind.UPDATE,
    since=Stage.UPDATED,
    effects=(Effect.ACCUMULATES,),
    gives=type_rules.nothing,
    stem="accumulate_b{bucket}",
)
def accumulate(packed: Any, *, bucket: int, replica: int) -> None:
    """Adds a replica's packed gradients to its sums of earlier calls."""


@operation(
    Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.LEAVES,), gives=type_rules.nothing, stem="add_to_grad_b{bucket}"
)
def add_to_grad(gradient: Any, *, bucket: int, replica: int) -> None:
    """Adds the sum of a bucket's gradients to ``grad`` of the user's parameters at the end of the call."""


@operation(
    Kind.WRITE,
    since=Stage.UPDATED,
    effects=(Effect.WRITES,),
    gives=type_rules.nothing,
    stem="write_{variable}",
    hidden=("variable",),
    printed=Printed.TOGETHER,
)
def write(value: Any, *, variable: str, replica: int) -> None:
    """Writes a per-replica variable, such as BatchNorm's statistics, at the end of the step."""


FACTORED = Selection(lambda record: record.kind is Kind.FACTORED)

REDUCTIONS = Selection(lambda record: Effect.SUMS in record.effects)
SHARED_OUT = Selection(lambda record: {Effect.SUMS, Effect.SCATTERS} <= record.effects)
"""Reductions of which each replica gets a share."""

EXCHANGES = Selection(lambda record: Effect.EXCHANGES in record.effects)
EXCHANGES_OF_PARTS = (gather_largest, exchange_payload)
"""Exchanges that send a part of each worker's sum, and leave a residual."""

EXCHANGES_OF_SUMS = (exchange, *EXCHANGES_OF_PARTS)

BETWEEN_WORKERS = Selection(lambda record: bool(record.effects & {Effect.EXCHANGES, Effect.SPREADS}))

COLLECTIVES = Selection(lambda record: Effect.JOINS in record.effects)
LAUNCHES = Selection(lambda record: Effect.LAUNCHES in record.effects)

UPDATES = Selection(lambda record: Effect.UPDATES in record.effects)

_WRITES = {Effect.UPDATES, Effect.ACCUMULATES, Effect.LEAVES, Effect.WRITES, Effect.SPREADS}
WRITERS = Selection(lambda record: bool(record.effects & _WRITES))
"""Operations that write parameters, other variables, or gradients that outlive the call."""

OUTPUT_MEMORY = Selection(lambda record: record.symbol in (slot, reserved))
OF_FORWARD = Selection(lambda record: Effect.CHECKS in record.effects or Effect.GATHERS in record.effects)
"""Operations directly after forward."""

MEETINGS = Selection(lambda record: Effect.MEETS in record.effects)
"""Collectives of the model, such as `mirrorc.all_reduce`."""

ATTENDED = Selection(lambda record: bool(record.effects & {Effect.MEETS, Effect.ATTENDS}))

WAITING = Selection(lambda record: bool(record.effects & {Effect.WAITS, Effect.MEETS, Effect.ATTENDS, Effect.COMMITS}))

RESCALING = Selection(lambda record: record.symbol in (scale, clip_value))
"""Operations that may overwrite the operand of an update."""
