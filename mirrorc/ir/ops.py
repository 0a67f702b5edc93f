"""The operations of mirrored and lowered graphs, each declared once. It is one table, and long for one file.

Operations are symbols: they are the targets of ``call_function`` nodes, and the runtime runs them. In a mirrored graph every
operation has the keyword ``replica``, except for collectives, which join the replicas. A collective has its bucket as a tag, so
that two buckets of equal shape cannot be confused.

A pass may also insert functional ATen operators (`is_compute`), such as a cast of a packed bucket. They belong to the replica
of their arguments.
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
    of_reserved,
    of_rows,
    of_rows_of_replicas,
    of_slot,
    of_spread,
    of_stored_rows,
    of_sum_over_replicas,
    of_told,
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
    """An argument of a replica's program (a placeholder, once lowered)."""


@operation(
    Kind.SOURCE,
    since=Stage.CAPTURED,
    gives=of_variable,
    value="variable",
    called="{variable}",
    printed=Printed.WHERE_USED,
)
def read(*, variable: str, replica: int | None = None) -> Any:
    """The value of a variable before the step's update."""


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
    """A gradient's place in its bucket; the region that takes it as an argument writes the gradient there."""


@operation(Kind.SOURCE, since=Stage.OUTLINED, gives=of_reserved, stem="reserved_{number}", value="slot")
def reserved(*, number: int, shape: tuple[int, ...], dtype: Any, replica: int | None = None) -> Any:
    """Memory that stays from step to step, for a large result of the region that takes it as an argument.

    Values of a replica that have the same ``number`` lie in the same memory, one after the other.
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
    """The number by which this step's loss is multiplied before backward, as the user's `GradScaler` has it."""


@operation(Kind.COMPUTE, since=Stage.OUTLINED, gives=of_microbatch)
def microbatch(argument: Any, *, index: int, sizes: tuple[int, ...], replica: int | None = None) -> Any:
    """The examples of one microbatch of an argument, a view of it; ``sizes`` says how many examples each microbatch has."""


@operation(Kind.COMPUTE, since=Stage.OUTLINED, gives=of_operand)
def microbatch_seed(seed: Any, *, index: int, replica: int | None = None) -> Any:
    """The random stream of one microbatch, made from that of its replica."""


@operation(Kind.FACTORED, since=Stage.OUTLINED, gives=of_product, stem="d_{variable}", hidden=("variable",))
def product(*factors: Any, bucket: int, variable: str, replica: int | None = None) -> Any:
    """A variable's gradient as the factors ``left, right`` of ``left @ right``: `pack` makes it, or each device its share of it.

    Microbatches have a pair of factors each, one pair after the other, and the gradient is the sum of the products.
    """


@operation(Kind.FACTORED, since=Stage.OUTLINED, gives=of_index_add, stem="d_{variable}", hidden=("variable",))
def index_add(*factors: Any, bucket: int, variable: str, padding_idx: int = -1, replica: int | None = None) -> Any:
    """A table's gradient as factors: ``rows`` [..., width] are added up at ``indices`` [...], and all else is zero.

    Rows for the index ``padding_idx`` are not added. As for `product`, `pack` makes the gradient, or each device its share, and
    microbatches have a pair of rows and indices each.
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
    """Runs a region; gives the tuple of its outputs. ``gradients`` maps variables to the outputs that are their gradients."""


@operation(Kind.CHECK, since=Stage.CAPTURED, effects=(Effect.CHECKS,), gives=nothing, stem="check", hidden=("text",))
def check(condition: Any, *, text: str, replica: int | None = None) -> None:
    """Stops the step with this text, before anything has changed, unless the condition (one element) is true."""


@operation(
    Kind.GATHER,
    since=Stage.CAPTURED,
    effects=(Effect.GATHERS,),
    gives=of_gather,
    stem="gather_{output}",
)
def gather(value: Any, *, output: str, how: str, replica: int | None = None) -> None:
    """Hands a replica's part of an output, which the step returns beside its loss, to the caller.

    ``how`` says what the caller gets: the parts "concatenated" along dim 0, their mean over examples ("averaged"), their sum
    ("summed"), or each by itself ("apart").
    """


@operation(
    Kind.PACK, since=Stage.PACKED, gives=of_pack, stem="b{bucket}{pack}", value="bucket", called="b{bucket}{pack}"
)
def pack(*gradients: Any, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Puts gradients, which are in the order of the slots, into their slots of the bucket; gives the bucket.

    Of a bucket that is cut, it gives the elements of one pack, and takes the gradients that lie in it. A gradient that lies in
    several packs is put into its slot by the first of them.

    A replica without examples has no gradients: its ``pack()`` fills the bucket with zeros, which is what it adds to the sum.
    """


@operation(Kind.COMPUTE, since=Stage.PACKED, gives=of_packed)
def add_accumulated(packed: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Adds the gradients that earlier calls have accumulated on this replica to those that it has packed, in their memory.

    Both get the weights with which the sum is that of one batch with the examples of all calls.
    """


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
    """Launches the sum of a bucket, or of one pack of it, over all replicas; takes every replica's (one, once lowered)."""


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
    """Launches the sum of a bucket over all replicas, of which each gets its own share."""


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
    """Launches an all_gather of a bucket's factors over all replicas, which is less than the bucket.

    It takes the packed bucket of each replica (one, once lowered), all of whose gradients are left as factors. Each replica makes
    the sum over all replicas, in their order, when it waits. Of a table whose optimizer takes rows, the sum has the rows alone
    that any replica has looked up, each once.
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
    """Launches the sum of a bucket over all replicas, which replica ``root`` alone gets; all others get no element of it."""


@operation(
    Kind.COMPUTE,
    since=Stage.SCHEDULED,
    gives=of_compressed,
    stem="b{bucket}{pack}_compressed",
    value="reduced",
    called="b{bucket}{pack}_compressed",
)
def compress(own: Any, *, dtype: Any, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Rounds what a replica has of its worker's sum to a narrower ``dtype``, which `exchange` sends: this changes numbers.

    The replicas of a worker write their shares into one memory, apart from the bucket. What is infinite or not a number stays
    so, and what ``dtype`` is too narrow for becomes infinite.
    """


@operation(
    Kind.COMPUTE,
    since=Stage.SCHEDULED,
    gives=of_decompressed,
    stem="b{bucket}{pack}_wide",
    value="reduced",
    called="b{bucket}{pack}_wide",
)
def decompress(total: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Gives a sum over workers of what `compress` has rounded in the bucket's own dtype, in the bucket's memory."""


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
    """Launches the sum over all workers of the sums of a bucket that each has made over its own replicas.

    It takes what each replica of this worker holds of that sum (one, once lowered), its share or all of it, and each gets the
    same elements of the sum over workers, in the same memory. A worker sends each element once, however many devices it has.
    What `compress` gives is added up as it is, in its narrower dtype.
    """


@operation(
    Kind.COMPUTE,
    since=Stage.SCHEDULED,
    gives=of_operand,
    stem="b{bucket}{pack}_with_unsent",
    value="reduced",
    called="b{bucket}{pack}_with_unsent",
)
def add_unsent(own: Any, *, bucket: int, pack: int | None = None, replica: int) -> Any:
    """Adds to what a replica has of its worker's sum what earlier steps have not sent of theirs: `gather_largest` or
    `exchange_payload` sends its part.

    The replicas of a worker write their shares into one memory, apart from the bucket. What is not sent of it is kept for the
    next step when this step has taken place; a step that fails, or leaves its update out, leaves what was kept before.
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
    """Launches an all_gather of each worker's ``count`` largest elements of a bucket, by magnitude, with their places.

    It takes what `add_unsent` gives for each replica of this worker (one, once lowered). When it waits, each replica makes its
    share of the sum over all workers, or all of it, in the order of ranks, in the memory of the bucket; what nobody has sent is
    zero there. So all workers have the same bits.
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
    """Launches the exchange of a payload from outside of the package, a `mirrorc.compression.Payload`, by its text.

    It takes what `add_unsent` gives for each replica of this worker (one, once lowered). A message takes as long as
    ``num_bytes`` of a sum. When it waits, each replica gets its share of the sum over all workers that the payload has made, or
    all of it, in the memory of the bucket. All workers make the same bits; what the payload leaves out is kept.
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
    """Launches an all_gather of a bucket's factors over all workers, which is less than the bucket.

    It takes the packed bucket of each replica of this worker (one, once lowered), all of whose gradients are left as factors.
    Each replica makes its elements of the sum over the replicas of all workers, in their order, when it waits: its share of the
    bucket, or of its worker's part; or all of them on a worker's only device that updates all.
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
    """Launches the sum over all workers of the sums of a bucket that each has made over its own replicas; each gets a part of it.

    It takes what `exchange` takes. Each replica gets its share of its worker's part of the sum over workers, in the memory where
    these elements lie. A worker sends each element once at most, to the worker whose part has it.
    """


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
    """Launches an all_gather of a bucket's new parameters, of which each worker has updated a part, over all workers.

    A replica launches it when it has updated its share, and after the wait the whole bucket is new, in the memory of parameters.
    """


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
    """Launches the copy of replica ``root``'s value, which is a part of a bucket, to all replicas."""


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
    """Offers a value, which is a part of a bucket, to replica ``destination``, without waiting for it.

    ``chunk`` and ``round`` distinguish several sends of one bucket between the same replicas, see `mirrorc.ir.routes`.
    """


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
    """Launches the receipt of the value that replica ``source`` sends under the same tag."""


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
    """Gives the sum of a value over all replicas that have examples, for which it waits: what `mirrorc.all_reduce` asks for.

    Each of them meets the others as often, in the same order, and ``number`` tells these meetings apart. The result lies in
    memory of its own. In a training step of several workers, the replicas of all of them meet.
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
    """Gives the values of all replicas that have examples, one after the other: what `mirrorc.all_gather` asks for.

    It meets the others as `sum_over_replicas` does; ``rows`` is how many rows all of them have together, of which ``before`` are
    those of the workers before this one.
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
    """Gives so many rows of the sum of a value over all replicas that have examples: the gradient of `rows_of_replicas`.

    It meets the others as `sum_over_replicas` does. A replica's rows come behind those of the replicas before it, and behind
    ``before`` rows of the workers before this one.
    """


@operation(
    Kind.WAIT,
    since=Stage.REPLICATED,
    effects=(Effect.ATTENDS,),
    gives=nothing,
    stem="attend_{number}",
)
def attend(*, number: int, meeting: str, shape: tuple[int, ...], dtype: Any, replica: int) -> None:
    """Meets the replicas of other workers for a worker none of whose replicas has examples, so that they do not wait for it.

    It gives nothing to the sum, or no rows, and takes nothing. ``meeting`` is the operation that the others have under this
    ``number``, ``shape`` that of what is added up, or of all rows.
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
    """Gives a bucket of which it takes all packs, in order of their elements.

    Packs that lie in the bucket's memory lie side by side, so nothing is copied; others are put together in new memory.
    """


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=of_finiteness)
def is_finite(value: Any, *, replica: int) -> Any:
    """Whether no element of a value is infinite or not a number; `commit` alone takes it."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=of_norm)
def norm(*values: Any, norm_type: float, row: int = 0, replica: int) -> Any:
    """The norm of all elements of its operands together: the ``norm_type``-th root of the sum of their powers, or the largest.

    Given what `commit` gives, it takes the numbers of all replicas in one ``row``: the norm of norms is the norm of all.
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
def commit(*found: Any, otherwise: str | None = None, early: bool = False, replica: int) -> Any:
    """Waits until every replica has come here: the step is then decided, and nothing stops it any more.

    What can fail comes before, what writes variables after. A failure or an interrupt before leaves everything as it was.
    If a truth value among the operands of any replica is false, no replica goes on: ``otherwise`` says whether the step then
    raises an error (``raise``) or returns its loss (``skip``). Numbers among the operands are exchanged: the result has a row
    for each, with the numbers of all replicas in order; of those of all workers, where each has a part of the sums. An ``early``
    commit comes before sums over several workers, whose buckets are in flight: a lost connection can still fail the step then,
    and it may have updated a part of its buckets.
    """


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=number)
def clip_factor(norm: Any, *, max_norm: float, replica: int) -> Any:
    """The factor by which gradients of this norm are scaled so that their norm is at most ``max_norm``; 1 if it is."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=of_operand)
def scale(gradient: Any, factor: Any, *, replica: int) -> Any:
    """A reduced gradient times a factor. It may be made in the gradient's memory, which nothing may read afterwards."""


@operation(Kind.COMPUTE, since=Stage.UPDATED, gives=of_operand)
def clip_value(gradient: Any, *, max_value: float, replica: int) -> Any:
    """A reduced gradient, its elements brought to between ``-max_value`` and ``max_value``; uses memory as `scale` does."""


@operation(Kind.GATHER, since=Stage.UPDATED, effects=(Effect.TELLS,), gives=of_told, stem="tell_{what}")
def tell(value: Any, *, what: str, replica: int) -> None:
    """Tells the step's caller a number that is the same on all replicas, such as the norm of the gradients."""


@operation(Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.UPDATES,), gives=of_update, stem="update_b{bucket}")
def update(gradient: Any, *factor: Any, part_elements: int | None = None, bucket: int, replica: int) -> None:
    """Applies the optimizer to a bucket's parameters, or to the replica's share of them, element by element.

    Given a factor, the optimizer gets the gradient times it, as if by `scale`, and may make that in the gradient's memory.

    With ``part_elements``, the wait that it takes leaves the share of the sum to it; nothing else takes that. The update makes
    products of factors some rows after the other, so many elements at a time at most, and applies the optimizer to each part
    right away. All these parts are made in one memory, so the gradient of such a matrix is never there as a whole. If a
    `clip_value` takes the wait and the update alone takes that, each part is bounded.
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
    """Lets the user's optimizers of these buckets update them by themselves, in order; gives the new parameters, 1-D each."""


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
    """The parameters of a bucket, 1-D, in their memory, once this replica has updated them."""


@operation(
    Kind.COMPUTE,
    since=Stage.UPDATED,
    gives=of_rows,
    stem="b{bucket}_rows",
    value="parameters",
    called="b{bucket}_rows",
)
def updated_rows(parameters: Any, gradient: Any, *, bucket: int, replica: int) -> Any:
    """The rows of a table that its reduced gradient has, of the parameters that `step_optimizer` gives, in memory of their own.

    They stand in the order of their indices, each once, as in the sum of the gathered rows. No other row is written by an
    optimizer of which the bucket's rule says so.
    """


@operation(Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.UPDATES,), gives=nothing, stem="store_b{bucket}")
def store(value: Any, *, bucket: int, replica: int) -> None:
    """Writes a bucket's parameters."""


@operation(
    Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.UPDATES,), gives=of_stored_rows, stem="store_rows_b{bucket}"
)
def store_rows(rows: Any, gradient: Any, *, bucket: int, replica: int) -> None:
    """Writes the rows of a table that its gradient has, of which `updated_rows` has given the new values on another replica.

    Of the gradient, which this replica has gathered, it takes alone which rows that has.
    """


@operation(Kind.UPDATE, since=Stage.UPDATED, effects=(Effect.ACCUMULATES,), gives=nothing, stem="accumulate_b{bucket}")
def accumulate(packed: Any, *, bucket: int, replica: int) -> None:
    """Adds the gradients that a replica has packed to its sums of earlier calls, which a later step updates with."""


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


FACTORED = Selection(lambda found: found.kind is Kind.FACTORED)
"""Operations that give a gradient as factors."""

REDUCTIONS = Selection(lambda found: Effect.SUMS in found.effects)
SHARED_OUT = Selection(lambda found: {Effect.SUMS, Effect.SCATTERS} <= found.effects)
"""Reductions of which each replica gets its share of the sum alone."""

EXCHANGES = Selection(lambda found: Effect.EXCHANGES in found.effects)
"""Operations that join workers, to add up what they have."""

EXCHANGES_OF_PARTS = (gather_largest, exchange_payload)
"""Those that send a part of each worker's sum, with what was not sent before: what is left of it is kept."""

EXCHANGES_OF_SUMS = (exchange, *EXCHANGES_OF_PARTS)
"""Those that take the sum of each worker, and give all of the sum over workers, or what is sent of it."""

BETWEEN_WORKERS = Selection(lambda found: bool(found.effects & {Effect.EXCHANGES, Effect.SPREADS}))
"""All operations that join workers."""

COLLECTIVES = Selection(lambda found: Effect.JOINS in found.effects)
LAUNCHES = Selection(lambda found: Effect.LAUNCHES in found.effects)
"""Operations that give a pending value."""

UPDATES = Selection(lambda found: Effect.UPDATES in found.effects)
"""Operations that write the parameters of buckets."""

WRITERS = Selection(
    lambda found: bool(found.effects & {Effect.UPDATES, Effect.ACCUMULATES, Effect.WRITES, Effect.SPREADS})
)
"""Operations that write what stays from call to call: parameters, other variables, accumulated gradients."""

GIVEN_MEMORY = Selection(lambda found: found.symbol in (slot, reserved))
"""Operations that give a region memory to write into."""

OF_FORWARD = Selection(lambda found: Effect.CHECKS in found.effects or Effect.GATHERS in found.effects)
"""Operations that come right behind the forward that gives their value, outside of regions."""

MEETINGS = Selection(lambda found: Effect.MEETS in found.effects)
"""Operations in forward and backward at which all replicas that have examples meet, each with a value."""

ATTENDED = Selection(lambda found: bool(found.effects & {Effect.MEETS, Effect.ATTENDS}))
"""Meetings, and what takes part in those of other workers in place of a replica with examples."""

WAITING = Selection(lambda found: bool(found.effects & {Effect.WAITS, Effect.MEETS, Effect.ATTENDS, Effect.COMMITS}))
"""Operations that may wait for others: for a sum, or for other replicas."""

RESCALING = Selection(lambda found: found.symbol in (scale, clip_value))
"""Operations that change what an update takes, in the memory where it lies."""
