"""The operations of mirrored and lowered graphs.

In a mirrored graph every operation except collectives has the keyword ``replica``.
"""

from __future__ import annotations

from typing import Any

from mirrorc.ir.operation import Effect, Kind, Printed, Selection, operation
from mirrorc.ir.program import Stage
from mirrorc.ir.type_rules import (
    awaited,
    nothing,
    number,
    of_bucket,
    of_buckets,
    of_commit,
    of_compressed,
    of_decompressed,
    of_exchange,
    of_finiteness,
    of_gather,
    of_gathered,
    of_index_add,
    of_largest,
    of_loss_scale,
    of_microbatch,
    of_norm,
    of_operand,
    of_pack,
    of_packed,
    of_payload,
    of_product,
    of_region,
    of_report,
    of_reserved,
    of_rows,
    of_rows_of_replicas,
    of_slot,
    of_spread,
    of_stored_rows,
    of_sum_over_replicas,
    of_unpacked,
    of_update,
    of_variable,
    pending_operand,
    pending_sent,
)
from mirrorc.ir.value_types import Pending as Pending


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


@operation(
    Kind.SOURCE,
    since=Stage.CAPTURED,
    gives=of_variable,
    value="variable",
    called="{variable}",
    printed=Printed.WHERE_USED,
)
def read(*, variable: str, replica: int | None = None) -> Any:
    """A variable before the step's update."""


@operation(
    Kind.SOURCE,
    since=Stage.OUTLINED,
    gives=of_slot,
    stem="slot_{variable}",
    value="slot",
    called="slot({variable})",
    printed=Printed.WHERE_USED,
)
def slot(*, bucket: int, variable: str, replica: int | None = None) -> Any:
    """A gradient's place in its bucket, where a region writes it."""


@operation(Kind.SOURCE, since=Stage.OUTLINED, gives=of_reserved, stem="reserved_{number}", value="slot")
def reserved(*, number: int, shape: tuple[int, ...], dtype: Any, replica: int | None = None) -> Any:
    """Memory for a large result of a region, kept from step to step.

    Values of a replica with the same ``number`` use the memory one after the other.
    """


@operation(
    Kind.SOURCE,
    since=Stage.UPDATED,
    gives=of_loss_scale,
    stem="loss_scale",
    value="computed",
    called="loss_scale",
    printed=Printed.WHERE_USED,
)
def loss_scale(*, replica: int) -> Any:
    """This step's loss scale, from the user's `GradScaler`."""


@operation(Kind.COMPUTE, since=Stage.OUTLINED, gives=of_microbatch)
def microbatch(argument: Any, *, index: int, sizes: tuple[int, ...], replica: int | None = None) -> Any:
    """A view of the examples of one microbatch. ``sizes`` are the numbers of examples of all microbatches."""


@operation(Kind.COMPUTE, since=Stage.OUTLINED, gives=of_operand)
def microbatch_seed(seed: Any, *, index: int, replica: int | None = None) -> Any:
    """The random stream of one microbatch, derived from its replica's."""


@operation(Kind.FACTORED, since=Stage.OUTLINED, gives=of_product, stem="d_{variable}", hidden=("variable",))
def product(*factors: Any, bucket: int, variable: str, replica: int | None = None) -> Any:
    """A gradient as the factors ``left, right`` of ``left @ right``, a pair for each microbatch."""


@operation(Kind.FACTORED, since=Stage.OUTLINED, gives=of_index_add, stem="d_{variable}", hidden=("variable",))
def index_add(*factors: Any, bucket: int, variable: str, padding_idx: int = -1, replica: int | None = None) -> Any:
    """A table's gradient as factors: ``rows`` [..., width] are added up at ``indices`` [...], and all else is zero.

    Rows for ``padding_idx`` are not added.
    """


@operation(
    Kind.REGION,
    since=Stage.OUTLINED,
    until=Stage.SCHEDULED,
    gives=of_region,
    stem="{region}",
    hidden=("region", "gradients"),
)
def call_region(*args: Any, region: str, gradients: dict[str, int], replica: int | None = None) -> Any:
    """Runs a region. ``gradients`` maps variables to the indices of their gradients among the outputs."""


@operation(Kind.CHECK, since=Stage.CAPTURED, effects=(Effect.CHECKS,), gives=nothing, stem="check", hidden=("text",))
def check(condition: Any, *, text: str, replica: int | None = None) -> None:
    """Stops the step with this text, before any change of state, unless the condition (one element) is true."""


@operation(
    Kind.GATHER,
    since=Stage.CAPTURED,
    effects=(Effect.GATHERS,),
    gives=of_gather,
    stem="gather_{output}",
)
def gather(value: Any, *, output: str, how: str, replica: int | None = None) -> None:
    """Hands a replica's part of an output, not of the loss, to the step's caller.

    ``how``: "concatenated" along dim 0, "averaged" over examples, "summed", or each "apart".
    """


@operation(
    Kind.GATHER,
    since=Stage.CAPTURED,
    effects=(Effect.GATHERS,),
    gives=nothing,
    stem="keep_{number}",
    hidden=("number",),
    printed=Printed.TOGETHER,
)
def keep(value: Any, *, number: int, replica: int | None = None) -> None:
    """Keeps a value of forward, as it is, for the program of backward."""


@operation(
    Kind.PACK, since=Stage.PACKED, gives=of_pack, stem="b{bucket}{pack}", value="bucket", called="b{bucket}{pack}"
)
def pack(*gradients: Any, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Puts gradients, in the order of the slots, into their slots, and gives the bucket, or one pack of it.

    A replica without examples packs zeros.
    """


@operation(Kind.COMPUTE, since=Stage.PACKED, gives=of_packed)
def add_accumulated(packed: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Adds this replica's gradients of earlier calls to the packed ones, in place."""


@operation(
    Kind.LAUNCH,
    since=Stage.REDUCED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.SUMS),
    gives=pending_operand,
    stem="b{bucket}{pack}_pending",
    value="pending",
    called="b{bucket}{pack}_pending",
    awaited="sum",
)
def all_reduce(*buckets: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket, or pack, over all replicas."""


@operation(
    Kind.LAUNCH,
    since=Stage.REDUCED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.SUMS, Effect.SCATTERS),
    gives=pending_operand,
    stem="b{bucket}{pack}_pending",
    value="pending",
    called="b{bucket}{pack}_pending",
    awaited="share",
)
def reduce_scatter(*buckets: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all replicas; each gets its share."""


@operation(
    Kind.LAUNCH,
    since=Stage.REDUCED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.SUMS),
    gives=of_gathered,
    stem="b{bucket}_pending",
    value="pending",
    called="b{bucket}_pending",
    awaited="sum",
)
def all_gather(*buckets: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches an all-gather of a bucket's factors over all replicas.

    At the wait, each replica computes the sum, in their order; for a row-wise optimizer, of the looked-up rows alone.
    """


@operation(
    Kind.LAUNCH,
    since=Stage.SCHEDULED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.SUMS, Effect.SCATTERS),
    gives=pending_operand,
    stem="b{bucket}_pending",
    value="pending",
    called="b{bucket}_pending",
    awaited="sum",
)
def reduce(*buckets: Any, bucket: int, op: str, root: int, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all replicas, for replica ``root`` alone."""


@operation(
    Kind.COMPUTE,
    since=Stage.SCHEDULED,
    gives=of_compressed,
    stem="b{bucket}{pack}_compressed",
    value="reduced",
    called="b{bucket}{pack}_compressed",
)
def compress(local_sum: Any, *, dtype: Any, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Rounds a replica's part of its worker's sum to a narrower ``dtype``, in memory that the worker's replicas share."""


@operation(
    Kind.COMPUTE,
    since=Stage.SCHEDULED,
    gives=of_decompressed,
    stem="b{bucket}{pack}_wide",
    value="reduced",
    called="b{bucket}{pack}_wide",
)
def decompress(total: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Casts a sum of compressed values back to the bucket's dtype, in the bucket's memory."""


@operation(
    Kind.LAUNCH,
    since=Stage.SCHEDULED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.EXCHANGES),
    gives=of_exchange,
    stem="b{bucket}{pack}_exchange",
    value="pending",
    called="b{bucket}{pack}_exchange",
    awaited="total",
)
def exchange(*sums: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all workers, each of which has summed it over its replicas.

    An operand is a replica's share of the worker's sum, or the whole sum. The result has the same elements and memory.
    """


@operation(
    Kind.COMPUTE,
    since=Stage.SCHEDULED,
    gives=of_operand,
    stem="b{bucket}{pack}_with_unsent",
    value="reduced",
    called="b{bucket}{pack}_with_unsent",
)
def add_unsent(local_sum: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Adds the residual of earlier steps to a replica's part of its worker's sum, outside of the bucket.

    A step that fails, or skips its update, leaves the residual as it is.
    """


@operation(
    Kind.LAUNCH,
    since=Stage.SCHEDULED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.EXCHANGES),
    gives=of_largest,
    stem="b{bucket}{pack}_largest",
    value="pending",
    called="b{bucket}{pack}_largest",
    awaited="total",
)
def gather_largest(
    *sums: Any, count: int, bucket: int, pack: int | None = None, op: str, link: str | None = None
) -> Any:
    """Launches an all-gather of each worker's ``count`` largest elements of a bucket, by magnitude, with their places.

    At the wait, each replica adds up its share in the order of ranks, so all workers have the same bits.
    """


@operation(
    Kind.LAUNCH,
    since=Stage.SCHEDULED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.EXCHANGES),
    gives=of_payload,
    stem="b{bucket}{pack}_payload",
    value="pending",
    called="b{bucket}{pack}_payload",
    awaited="total",
)
def exchange_payload(
    *sums: Any, payload: str, num_bytes: int, bucket: int, pack: int | None = None, op: str, link: str | None = None
) -> Any:
    """Launches the exchange of a bucket as a user's `mirrorc.compression.Payload` encodes it, in ``num_bytes`` bytes.

    All workers get the same bits.
    """


@operation(
    Kind.LAUNCH,
    since=Stage.SCHEDULED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.EXCHANGES),
    gives=of_gathered,
    stem="b{bucket}{pack}_factors",
    value="pending",
    called="b{bucket}{pack}_factors",
    awaited="total",
)
def gather_factors(*buckets: Any, bucket: int, pack: int | None = None, op: str, link: str | None = None) -> Any:
    """Launches an all-gather of a bucket's factors over all workers.

    At the wait, each replica computes its share of the sum over all replicas, in their order.
    """


@operation(
    Kind.LAUNCH,
    since=Stage.SCHEDULED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.EXCHANGES, Effect.SCATTERS),
    gives=of_exchange,
    stem="b{bucket}_scatter",
    value="pending",
    called="b{bucket}_scatter",
    awaited="part",
)
def scatter_sums(*sums: Any, bucket: int, op: str, link: str | None = None) -> Any:
    """Launches the sum of a bucket over all workers. Each worker gets a part, and each of its replicas a share of the part."""


@operation(
    Kind.LAUNCH,
    since=Stage.SCHEDULED,
    effects=(Effect.LAUNCHES, Effect.JOINS, Effect.SPREADS),
    gives=of_spread,
    stem="b{bucket}_gather",
    value="pending",
    called="b{bucket}_gather",
    awaited="parameters",
)
def gather_parameters(*, bucket: int, link: str | None = None) -> Any:
    """Launches an all-gather of a bucket's new parameters, of which each worker has updated a part."""


@operation(
    Kind.LAUNCH,
    since=Stage.UPDATED,
    until=Stage.SCHEDULED,
    effects=(Effect.LAUNCHES, Effect.JOINS),
    gives=pending_operand,
    stem="b{bucket}_pending",
    value="pending",
    called="b{bucket}_pending",
    awaited="parameters",
)
def broadcast(value: Any, *, bucket: int, root: int, link: str | None = None) -> Any:
    """Launches the copy of replica ``root``'s part of a bucket to all replicas."""


@operation(
    Kind.LAUNCH,
    since=Stage.UPDATED,
    effects=(Effect.SENDS,),
    gives=nothing,
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
    """Offers a part of a bucket to replica ``destination``, without waiting. The tag is a `mirrorc.ir.routes.Route`."""


@operation(
    Kind.LAUNCH,
    since=Stage.UPDATED,
    effects=(Effect.LAUNCHES, Effect.RECEIVES),
    gives=pending_sent,
    stem="b{bucket}{pack}{part}_incoming",
    value="pending",
    called="b{bucket}{pack}{part}_incoming",
    awaited="parameters",
)
def recv(
    *, bucket: int, pack: int | None = None, source: int, chunk: int = 0, round: int = 0, replica: int, link: str
) -> Any:
    """Launches the receipt of the value sent by replica ``source`` under the same tag."""


@operation(
    Kind.WAIT,
    since=Stage.REDUCED,
    effects=(Effect.WAITS,),
    gives=awaited,
    stem="b{bucket}{pack}{part}_{awaited}",
    value="reduced",
    called="b{bucket}{pack}{part}_{awaited}",
)
def wait(pending: Pending, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Turns a pending value into a tensor, once per replica."""


@operation(
    Kind.WAIT,
    since=Stage.CAPTURED,
    effects=(Effect.MEETS,),
    gives=of_sum_over_replicas,
    stem="sum_{number}",
    value="computed",
)
def sum_over_replicas(value: Any, *, number: int, replica: int | None = None) -> Any:
    """Waits for the sum of a value over all replicas with examples: `mirrorc.all_reduce`.

    All replicas of all workers meet in the same order; ``number`` identifies the meeting.
    """


@operation(
    Kind.WAIT,
    since=Stage.CAPTURED,
    effects=(Effect.MEETS,),
    gives=of_rows_of_replicas,
    stem="rows_{number}",
    value="computed",
)
def rows_of_replicas(value: Any, *, number: int, rows: int, before: int = 0, replica: int | None = None) -> Any:
    """Concatenates the values of all replicas with examples: `mirrorc.all_gather`.

    The result has ``rows`` rows, ``before`` of them from earlier workers.
    """


@operation(
    Kind.WAIT,
    since=Stage.CAPTURED,
    effects=(Effect.MEETS,),
    gives=of_rows_of_replicas,
    stem="own_{number}",
    value="computed",
)
def own_rows_of_sum(value: Any, *, number: int, rows: int, before: int = 0, replica: int | None = None) -> Any:
    """Gives a replica's rows of a sum over all replicas: the gradient of `rows_of_replicas`."""


@operation(
    Kind.WAIT,
    since=Stage.REPLICATED,
    effects=(Effect.ATTENDS,),
    gives=nothing,
    stem="attend_{number}",
)
def attend(*, number: int, meeting: str, shape: tuple[int, ...], dtype: Any, replica: int) -> None:
    """Meets the replicas of other workers for a worker without examples.

    ``meeting`` names their operation, and ``shape`` is that of its result.
    """


@operation(
    Kind.COMPUTE,
    since=Stage.REDUCED,
    gives=of_unpacked,
    stem="b{bucket}_whole",
    value="reduced",
    called="b{bucket}_whole",
)
def unpack(*packs: Any, bucket: int, replica: int) -> Any:
    """Joins all packs of a bucket. It copies only packs outside of the bucket's memory."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=of_finiteness)
def is_finite(value: Any, *, replica: int) -> Any:
    """Tests that all elements of a value are finite. Only `commit` takes the result."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=of_norm)
def norm(*values: Any, norm_type: float, row: int = 0, replica: int) -> Any:
    """The ``norm_type``-norm of all elements of its operands together.

    Of a `commit`'s result it takes one ``row``: the norms of all replicas.
    """


@operation(
    Kind.WAIT,
    since=Stage.UPDATED,
    effects=(Effect.COMMITS,),
    gives=of_commit,
    stem="commit",
    value="computed",
    called="met",
)
def commit(*operands: Any, otherwise: str | None = None, early: bool = False, replica: int) -> Any:
    """A barrier of all replicas: behind it nothing stops the step any more.

    Operations that can fail come before it, writes of variables behind it. If a truth value of any replica is false,
    the step raises (``otherwise="raise"``) or returns its loss (``otherwise="skip"``). The result has a row for each
    number among the operands. After an ``early`` commit, a lost connection can still fail the step.
    """


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=number)
def clip_factor(norm: Any, *, max_norm: float, replica: int) -> Any:
    """The factor that scales gradients of this norm to a norm of at most ``max_norm``, or 1."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=of_operand)
def scale(gradient: Any, factor: Any, *, replica: int) -> Any:
    """A reduced gradient times a factor, maybe in the gradient's memory; nothing may read the gradient afterwards."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=of_operand)
def clip_value(gradient: Any, *, max_value: float, replica: int) -> Any:
    """A reduced gradient, clamped to ``-max_value`` to ``max_value``, in memory as for `scale`."""


@operation(Kind.GATHER, since=Stage.UPDATED, effects=(Effect.TELLS,), gives=of_report, stem="tell_{what}")
def tell(value: Any, *, what: str, replica: int) -> None:
    """Reports a number that is the same on all replicas to the step's caller."""


@operation(Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.UPDATES,), gives=of_update, stem="update_b{bucket}")
def update(gradient: Any, *factor: Any, part_elements: int | None = None, bucket: int, replica: int) -> None:
    """Applies the optimizer to a bucket's parameters, or to the replica's share of them, element by element.

    A factor scales the gradient, maybe in its memory. With ``part_elements``, the gradient is computed from factors and
    applied in parts of at most so many elements. Only a `clip_value` may take that gradient, too.
    """


@operation(
    Kind.UPDATE,
    since=Stage.UPDATED,
    effects=(Effect.UPDATES,),
    gives=of_buckets,
    operands_for="buckets",
    hidden=("buckets",),
    value="parameters",
    called="b{bucket}_parameters",
)
def step_optimizer(*gradients: Any, buckets: tuple[int, ...], replica: int) -> Any:
    """Runs the user's optimizers of these buckets, in order, and gives the new parameters, 1-D each."""


@operation(
    Kind.SOURCE,
    since=Stage.SCHEDULED,
    gives=of_bucket,
    stem="b{bucket}_updated",
    value="parameters",
    called="updated(b{bucket})",
    printed=Printed.WHERE_USED,
)
def updated(*, bucket: int, replica: int) -> Any:
    """The updated parameters of a bucket, 1-D, in their memory."""


@operation(
    Kind.COMPUTE,
    since=Stage.UPDATED,
    gives=of_rows,
    stem="b{bucket}_rows",
    value="parameters",
    called="b{bucket}_rows",
)
def updated_rows(parameters: Any, gradient: Any, *, bucket: int, replica: int) -> Any:
    """The new rows of a table, for the rows of its reduced gradient, sorted by index, each once."""


@operation(Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.UPDATES,), gives=nothing, stem="store_b{bucket}")
def store(value: Any, *, bucket: int, replica: int) -> None:
    """Writes a bucket's parameters."""


@operation(
    Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.UPDATES,), gives=of_stored_rows, stem="store_rows_b{bucket}"
)
def store_rows(rows: Any, gradient: Any, *, bucket: int, replica: int) -> None:
    """Writes the rows of a table that another replica has updated, at the gradient's indices."""


@operation(Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.ACCUMULATES,), gives=nothing, stem="accumulate_b{bucket}")
def accumulate(packed: Any, *, bucket: int, replica: int) -> None:
    """Adds a replica's packed gradients to its sums of earlier calls."""


@operation(Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.LEAVES,), gives=nothing, stem="add_to_grad_b{bucket}")
def add_to_grad(gradient: Any, *, bucket: int, replica: int) -> None:
    """Adds the sum of a bucket's gradients to ``grad`` of the user's parameters, when the call ends."""


@operation(
    Kind.WRITE,
    since=Stage.UPDATED,
    effects=(Effect.WRITES,),
    gives=nothing,
    stem="write_{variable}",
    hidden=("variable",),
    printed=Printed.TOGETHER,
)
def write(value: Any, *, variable: str, replica: int) -> None:
    """Writes a per-replica variable, such as BatchNorm's statistics, at the end of the step."""


FACTORED = Selection(lambda record: record.kind is Kind.FACTORED)

REDUCTIONS = Selection(lambda record: Effect.SUMS in record.effects)
SHARED_OUT = Selection(lambda record: {Effect.SUMS, Effect.SCATTERS} <= record.effects)
"""Reductions that give each replica its share."""

EXCHANGES = Selection(lambda record: Effect.EXCHANGES in record.effects)
"""Sums over workers."""

EXCHANGES_OF_PARTS = (gather_largest, exchange_payload)
"""They leave a residual of each worker's sum."""

EXCHANGES_OF_SUMS = (exchange, *EXCHANGES_OF_PARTS)

BETWEEN_WORKERS = Selection(lambda record: bool(record.effects & {Effect.EXCHANGES, Effect.SPREADS}))

COLLECTIVES = Selection(lambda record: Effect.JOINS in record.effects)
LAUNCHES = Selection(lambda record: Effect.LAUNCHES in record.effects)

UPDATES = Selection(lambda record: Effect.UPDATES in record.effects)

WRITERS = Selection(
    lambda record: bool(
        record.effects & {Effect.UPDATES, Effect.ACCUMULATES, Effect.LEAVES, Effect.WRITES, Effect.SPREADS}
    )
)
"""They write parameters, other variables, or gradients that outlive the call."""

OUTPUT_MEMORY = Selection(lambda record: record.symbol in (slot, reserved))
"""Memory for a region to write into."""

OF_FORWARD = Selection(lambda record: Effect.CHECKS in record.effects or Effect.GATHERS in record.effects)
"""Operations right behind forward."""

MEETINGS = Selection(lambda record: Effect.MEETS in record.effects)
"""Operations at which all replicas with examples meet."""

ATTENDED = Selection(lambda record: bool(record.effects & {Effect.MEETS, Effect.ATTENDS}))

WAITING = Selection(lambda record: bool(record.effects & {Effect.WAITS, Effect.MEETS, Effect.ATTENDS, Effect.COMMITS}))

RESCALING = Selection(lambda record: record.symbol in (scale, clip_value))
"""Changes of an update's operand, in its memory."""
