"""Coordinates the training calls of a step on several workers."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from contextvars import ContextVar

import torch

from mirrorc.analysis.communication.worker_meetings import RowsElsewhere, no_gathered_rows, rows_agree, rows_elsewhere
from mirrorc.analysis.cost.link_speed import LinkSpeed
from mirrorc.analysis.gradients.sent_factors import Counts, no_rows
from mirrorc.capture.call.call_arguments import Call, without_examples
from mirrorc.capture.model.model_state import ModelState
from mirrorc.coordination.call_header import Announcements
from mirrorc.coordination.coordinator import Coordinator, Retry
from mirrorc.coordination.equal_batches import EqualBatches
from mirrorc.coordination.fingerprint import facts_of_options, written_buffers
from mirrorc.coordination.state_sync import TakenValues
from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.ir.program import Accumulation, Program
from mirrorc.ir.variables import Aggregation, Variable
from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.protocol.checksums import checksums_of, checksums_of_state, updated_as_a_whole
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.runtime.workers.team.broadcast_state import stream_of_chief, take_over_hyperparameters
from mirrorc.runtime.workers.team.control_messages import ControlCollectives
from mirrorc.runtime.workers.team.team import Team
from mirrorc.runtime.workers.transport.lane import LostConnectionError
from mirrorc.user.optimizer_groups import OptimizerGroups

_SLACK_SECONDS = 5.0
_MOST_HEADERS = 4  # of one call; the second is after values were taken over, or other programs looked up
_MOST_ROW_EXCHANGES = 4  # of one call, with different numbers of gathered rows

current_block: ContextVar[Sequence[TeamCoordinator]] = ContextVar("the block around this thread's code", default=())


class TeamCoordinator(Coordinator):
    """Coordinates this worker's calls with those of the others.

    Workers exchange headers when each has its program, before anything changes. They repeat this after a broadcast, or
    if programs did not match.

    An optimizer that is not element-wise runs on every worker, because the chief may leave its loop first. It gets the
    same sums and random numbers on all workers, which compare its parameters before each call.
    """

    team: Team

    def __init__(self, options: StepOptions, model: ModelState, state: StepState) -> None:
        super().__init__(2 * options.timeout_seconds + _SLACK_SECONDS)  # the other workers may take as long again
        assert options.cluster is not None and options.compilation is not None, "several workers have joined"
        self._options, self._state = options, state
        home = options.devices[0].torch_device
        self.team = Team(options.cluster, options.compilation.name, options.timeout_seconds, home)
        self._before_call: Callable[[], object] | None = None  # set inside of a block of join()
        self._has_left = False  # this worker's loop in the block has ended
        self.rows_elsewhere: RowsElsewhere | None = None  # gathered by other workers in this call
        self.call_without_examples: Call | None = None  # the last one
        self._equal_batches = EqualBatches(self.team.cluster.rank)
        self._batch = 0  # digest of the batch of this call
        self._num_row_exchanges = 0
        self._agreed: Agreement | None = None
        self._num_present = self._num_headers = self._num_steps = 0
        self._taken = TakenValues(options, state, self.team)
        self._announcements = Announcements(options, model, state, self.team, self._taken)
        try:
            facts = facts_of_options(options, model)
            function = "mirrorc.data_parallel" if options.is_module else "mirrorc.compile"
            options.compilation.check_same(
                f"the arguments of {function}", facts, timeout_seconds=options.timeout_seconds
            )
        except BaseException as error:
            self.team.note_why(error)
            self.team.close()
            raise

    # The block of `mirrorc.join`

    @property
    def optimizers(self) -> OptimizerGroups:
        return self._options.optimizers

    @property
    def is_in_block(self) -> bool:
        return self._before_call is not None

    def enter_block(self, before_call: Callable[[], object]) -> None:
        """``before_call`` runs before each call of the step until the block ends."""
        self._before_call = before_call

    def leave_loop(self) -> None:
        """Marks this worker's loop as ended. The worker then takes part in calls of other workers."""
        self._has_left = True

    def exit_block(self) -> None:
        self._before_call, self._has_left = None, False

    def take_turn(self, number: int) -> Agreement:
        """Exchanges headers before a call of the block's step ``number``."""
        with self.call():
            agreed = self.team.exchange_headers(*self._announcements.of_turn(number, has_left=self._has_left))
            self.team.finish()
        return agreed

    def abandon(self, error: BaseException) -> None:
        """Ends the next call of the other workers with this error."""
        self.team.abandon(error)

    # A call, from its beginning to its end

    def begin_call(self) -> None:
        """In a block of several steps, workers first agree on the step to call."""
        refuse_within_others(self, "a step was called")
        if self._before_call is not None:
            self._before_call()

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """At its end, guards partly updated parameters: saving them raises an error."""
        torn_before, had_parted = self._state.torn, self.team.have_parted
        self._num_headers = self._num_row_exchanges = 0
        try:
            with self.team.call(lambda: self._state.is_whole, self._torn, has_left=self._has_left):
                yield
        finally:
            torn = self._state.torn
            if torn is not None and torn is not torn_before:
                torn.guard(self._options.model, self.optimizers.optimizers)
            if self.team.have_parted and not had_parted:  # the user goes on from a checkpoint
                self._state.accumulated.clear()
                self._state.unsent.forget()

    def _torn(self) -> str:
        torn = self._state.torn
        return torn.clause if torn is not None and not torn.is_restored else ""

    def note_call(self, call: Call) -> None:
        self.call_without_examples = without_examples(call)
        self._batch = self._equal_batches.digest(call)

    def exchange_header(
        self,
        executor: Executor,
        num_examples: Sequence[int],
        row_counts: Counts = (),
        *,
        is_stale: bool = False,
        backward: Executor | None = None,
    ) -> Retry | None:
        """Broadcasts one worker's values and returns a retry if the users' writes differ, or a worker has new
        variables. On a worker whose loop has ended, ``executor`` is of the last call, and ``num_examples`` is empty.
        """
        self._num_headers += 1
        self.team.stop_on_failure(executor.interrupt)
        is_first = self._num_headers == 1  # values taken over in this call were not written by the user
        written = self._announcements.written(executor.program, is_stale=is_stale) if is_first else 0
        self._num_present = sum(number > 0 for number in num_examples)
        facts, program = self._announcements.facts_of(executor), executor.program
        counts = row_counts if num_examples else no_rows(program)
        rows = facts.gathered_rows if num_examples else no_gathered_rows(program)
        rows += self._announcements.facts_of(backward).gathered_rows if backward is not None else ()
        header, details = self._announcements.of_step(
            executor,
            num_examples,
            written=written,
            num_steps=self._num_steps,
            has_left=self._has_left,
            batch=0 if self._has_left else self._batch,
        )
        self._agreed = agreed = self.team.exchange_headers(header, details, counts, rows)
        self.rows_elsewhere = None
        if agreed.takes_over:
            assert self._num_headers < _MOST_HEADERS, "values that were taken over are taken over"
            self._taken.broadcast_from_source(agreed, written)
        elif not agreed.is_other and (agreed.is_over or self._compare_rows()):
            self._begin(agreed, meets=facts.meets)
            return None
        return Retry(agreed.accumulation, self.rows_elsewhere)

    def _compare_rows(self) -> bool:
        rows = self.team.gathered_rows
        if not rows[0]:
            return True
        self.rows_elsewhere = rows_elsewhere(rows, self.team.cluster.rank)
        if rows_agree(rows):
            return True
        self._num_row_exchanges += 1
        if self._num_row_exchanges >= _MOST_ROW_EXCHANGES:
            with self.team.control.raising_alike():
                raise problem(
                    CommunicationError,
                    "MC2503: the model gathers as many rows by mirrorc.all_gather as an earlier one decides",
                    "with different numbers of examples on the workers this number has no upper limit",
                    "batches of one size for all workers",
                    now="No parameter was changed",
                )
        return False

    def _begin(self, agreed: Agreement, *, meets: bool) -> None:
        if meets and not agreed.is_over:
            self.team.open_values()
        self._num_steps = agreed.num_steps + (agreed.accumulation in (Accumulation.NONE, Accumulation.ENDS))
        self._taken.note()
        self._equal_batches.note(agreed.batches)
        if agreed.tells_hyperparameters:
            groups = list(self.optimizers.hyperparameters)
            take_over_hyperparameters(self.team, groups, self._options.scaler, agreed.source, has_left=self._has_left)
        if agreed.deals_anew:
            self._state.optimizers.gather(self.team.control.all_gather)

    def compare_replicas(self, program: Program) -> None:
        """Every ``check_replicas_every`` steps, compares the workers' copies of variables and optimizer state.

        If copies differ, all workers raise CommunicationError, at each step until copies are written again.
        """
        every = self._options.check_replicas_every
        if not every or self._num_steps % every:
            return
        buffers = {variable.name for variable in written_buffers(program)}
        tensors = {name: tensor for name, tensor in self._state.store.tensors.items() if name not in buffers}
        facts = checksums_of(tensors)
        if not self._state.optimizers.is_dealt:  # sharded state has no copies
            facts |= checksums_of_state(self.optimizers.optimizers, tensors.items())
        remedy = (
            "Memory has gone bad, or something has written to one copy alone, as step.evaluate() on one worker writes buffers: "
            "load a checkpoint of model and optimizer on all workers, which writes all copies anew"
        )
        try:
            self.team.control.compare("the copies of variables and optimizer state", facts, remedy)
        except LostConnectionError:
            raise
        except CommunicationError:  # all workers raise it
            self._num_steps -= 1
            raise

    def random_stream(self, program: Program) -> AbstractContextManager[None]:
        runs_by_itself = program.updates and updated_as_a_whole(program)
        return stream_of_chief(self.team) if runs_by_itself else nullcontext()

    def take_part(self, executor: Executor, last: Executor) -> None:
        """Prepares a run of ``executor`` without examples; refuses other exchanges than those of ``last``."""
        self.team.stop_on_failure(executor.interrupt)
        if self._announcements.facts_of(executor).texts != self._announcements.facts_of(last).texts:
            raise problem(
                ExecutionError,
                "MC6302: without examples, this worker would exchange something else than in its last call",
                "groups, modes or what forward reads have changed since",
                "leave optimizer groups, model.train() and what forward reads as they are until step.join() ends",
            )

    @property
    def agreed(self) -> Agreement:
        assert self._agreed is not None, "the workers have met"
        return self._agreed

    def examples(self, local: int) -> Examples:
        calls_elsewhere = self.agreed.num_accumulated - self._state.accumulated.num_examples
        before = sum(self.agreed.present[: self.team.cluster.rank])
        return Examples(local, self.agreed.num_examples, calls_elsewhere, before, self.agreed.num_present)

    def seed(self, local: int | None) -> int | None:
        return self.agreed.seed

    def end_call(self, executor: Executor, loss: torch.Tensor | None, dtype: torch.dtype | None) -> torch.Tensor | None:
        """Sums the loss, and makes buffers equal on all workers. Forward of a module, without ``dtype``, leaves its buffers
        to `end_backward`.
        """
        self.team.end_updates()
        if dtype is None:
            self.team.finish()
            return None
        total = torch.zeros((), dtype=torch.float64)
        if loss is not None:
            total.copy_(loss.detach())
        self.team.control.all_reduce(total)
        if not executor.commit.is_skipped:
            show_buffers(self.team.control, executor.program, self._state, self.agreed, self._num_present)
        self.team.finish()
        return total.to(self._options.devices[0].torch_device, dtype)

    def union(self, flags: Sequence[bool]) -> list[bool]:
        counts = torch.tensor(flags, dtype=torch.float64)
        self.team.control.all_reduce(counts)
        return [bool(count) for count in counts]

    def end_backward(self, program: Program) -> None:
        self.team.end_updates()
        show_buffers(self.team.control, program, self._state, self.agreed, self._num_present)
        self.team.finish()

    # Besides training calls

    def gather_optimizer_state(self, exclusively: Callable[[Callable[[], None]], None]) -> None:
        """Gathers sharded optimizer state on all workers, in a separate call."""
        if self._options.program_workers.shards_optimizer:
            refuse_within_others(self, "step.gather_optimizer_state() was called")
            exclusively(self._gather_state)

    def _gather_state(self) -> None:
        if self.is_in_block:
            raise problem(
                ExecutionError,
                "MC6302: step.gather_optimizer_state() was called inside of step.join()",
                "a worker that has left makes no calls of its own there",
                "step.gather_optimizer_state() on all workers, after the block",
            )
        with self.call():
            self._state.refuse_if_torn()
            is_whole = not self._state.optimizers.is_dealt
            announcement = self._announcements.besides("step.gather_optimizer_state()", has_changed=is_whole)
            if self.team.exchange_headers(*announcement).takes_over:
                with self.team.control.raising_alike():
                    raise problem(
                        CommunicationError,
                        "MC6401: cannot gather the optimizer's state: workers have states of different steps",
                        "some have loaded or cleared it since the last step, or that step failed while it updated",
                        "optimizer.load_state_dict(...) on every worker, one step, then step.gather_optimizer_state()",
                        now="Nothing was changed",
                    )
            if not is_whole:
                self._state.optimizers.gather(self.team.control.all_gather)
            self.team.finish()

    @property
    def link(self) -> LinkSpeed | None:
        return self.team.link

    def note_failure(self, error: BaseException) -> None:
        self.team.note_why(error)

    def close(self) -> None:
        self.team.close()


def refuse_within_others(coordinator: TeamCoordinator, action: str) -> None:
    """Refuses an action in a block of other steps, because some workers may have left it."""
    block = current_block.get()
    if block and coordinator not in block:
        why = "a worker that has left takes part in the calls of its step alone, and the two would wait for each other"
        fix = "with mirrorc.join(one_step, other_step): around the calls of both"
        raise problem(ExecutionError, f"MC6302: {action} inside of step.join() of another step", why, fix)


def show_buffers(
    control: ControlCollectives, program: Program, state: StepState, agreed: Agreement, num_present: int
) -> None:
    """Gives written buffers equal values on all workers: the mean, or the values of the first worker with examples."""
    kinds: dict[tuple[Aggregation, torch.dtype], list[Variable]] = {}
    for variable in written_buffers(program):
        kinds.setdefault((variable.aggregation, variable.dtype), []).append(variable)
    values: dict[str, torch.Tensor] = {}
    for (aggregation, _), variables in kinds.items():
        buffers = [state.store.tensors[variable.name].detach() for variable in variables]
        flat = torch.cat([value.reshape(-1) for value in buffers])
        if aggregation is Aggregation.MEAN:
            control.all_reduce(flat.mul_(num_present) if num_present else flat.zero_())
            flat.div_(agreed.num_present)
        else:
            control.broadcast(flat, agreed.first_present)
        parts = flat.split([value.numel() for value in buffers])
        values |= {v.name: part.view_as(value) for v, value, part in zip(variables, buffers, parts, strict=True)}
    if values:
        state.store.show(values)
