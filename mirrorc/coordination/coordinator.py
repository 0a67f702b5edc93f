"""Training calls that several workers make together: what begins and ends each of them, and what all have agreed about."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext

import torch

from mirrorc.analysis.communication.worker_meetings import RowsElsewhere, no_gathered_rows, rows_agree, rows_elsewhere
from mirrorc.analysis.gradients.sent_factors import no_rows
from mirrorc.capture.model.model_state import ModelState
from mirrorc.coordination.call_header import Announcements
from mirrorc.coordination.fingerprint import facts_of_options, written_buffers
from mirrorc.coordination.results import show_buffers, total_loss
from mirrorc.coordination.state_sync import TakenValues
from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.ir.program import Accumulation, Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.gradients.accumulated_gradients import Examples
from mirrorc.runtime.state.shared.torn_state import TornState
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.protocol.checksums import checksums_of, checksums_of_state, updated_as_a_whole
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.runtime.workers.team.broadcast_state import stream_of_chief, take_over_hyperparameters
from mirrorc.runtime.workers.team.team import Team
from mirrorc.runtime.workers.transport.lane import LostConnectionError
from mirrorc.user.optimizer_groups import OptimizerGroups

_SLACK_SECONDS = 5.0
_MOST_MEETINGS = 4  # of one call; the second is after values were taken over, or programs found that go together
_MOST_TOLD = 4  # times that workers tell each other how many rows they gather


class JointCalls:
    """The training calls of one step, of which every worker makes as many, at the same time.

    A call meets the others when its program is found, and before anything has changed. If a worker has not taken over the
    chief's values yet, or the user has written on some workers and not on others, all take them over, and meet again. So they do
    if a worker has come with a program that does not go with the others', see `protocol.header.agreement`.

    Optimizers that are not element-wise run on every worker by itself, so that each has their state: if the chief ran them for
    all, that of the others would be stale when it leaves `mirrorc.step.Step.join` before them. They get sums of the same bits,
    and draw from one stream of random numbers. Before each call workers compare what these optimizers have written: if one gives
    other numbers on another machine, or draws from elsewhere, that is an error, and nobody trains models that have parted.

    Args:
        options: the options of the step, with a cluster of several workers.
        model: the user's model.
        state: the state of the step.

    Raises:
        CommunicationError: the workers do not compile the same step; or one did not come to compare.

    Attributes:
        team: the workers.
        before_call: what the block of `mirrorc.join` does before each call of the step; None if this worker is in none.
        has_left: whether it has left its loop there, and takes part in the calls of the others.
        rows_elsewhere: how many rows the other workers gather in this call where the model asks for those of all; None where
            no program gathers any, or programs do not go together yet.
    """

    def __init__(self, options: StepOptions, model: ModelState, state: StepState) -> None:
        assert options.cluster is not None and options.compilation is not None, "several workers have joined"
        self._options, self._state = options, state
        home = options.devices[0].torch_device
        self.team = Team(options.cluster, options.compilation.name, options.timeout_seconds, home)
        self.before_call: Callable[[], object] | None = None
        self.has_left = False
        self.rows_elsewhere: RowsElsewhere | None = None
        self._num_told = 0
        self._agreed: Agreement | None = None
        self._num_present = self._num_meetings = self._num_steps = 0
        self._taken = TakenValues(options, state, self.team)
        self._announcements = Announcements(options, model, state, self.team, self._taken)
        try:
            facts = facts_of_options(options, model)
            options.compilation.check_same(
                "the arguments of mirrorc.compile", facts, timeout_seconds=options.timeout_seconds
            )
        except BaseException as error:
            self.team.note_why(error)
            self.team.close()
            raise

    @contextlib.contextmanager
    def call(self) -> Iterator[None]:
        """A block that is one training call, see `Team.call`; what it leaves between two steps is guarded."""
        self._num_meetings, known, had_parted = 0, self._state.torn, self.team.have_parted
        self._num_told = 0
        try:
            with self.team.call(lambda: self._state.is_whole, self._torn, has_left=self.has_left):
                yield
        finally:
            self._guard_torn(known)
            if self.team.have_parted and not had_parted:
                self._go_on_from_a_checkpoint()

    def _guard_torn(self, known: TornState | None) -> None:
        """Guards what a step has left between two steps; ``known``: what was guarded before."""
        torn = self._state.torn
        if torn is not None and torn is not known:
            torn.guard(self._options.model, self.optimizers.optimizers)

    def _go_on_from_a_checkpoint(self) -> None:
        """Drops what earlier calls have left for later ones: some workers have used theirs, and others not."""
        self._state.accumulated.clear()
        self._state.unsent.forget()

    def _torn(self) -> str:
        """Which buckets a step has updated that has left parameters between two steps; empty if none has."""
        torn = self._state.torn
        return torn.what if torn is not None and not torn.is_restored else ""

    @property
    def optimizers(self) -> OptimizerGroups:
        """Those of the step."""
        return self._options.optimizers

    def meet(self, executor: Executor, num_examples: Sequence[int], *, is_stale: bool) -> bool:
        """Begins a call together with the others; called again, with the program for what there is then, until it gives True.

        The program must then be one that does what all have agreed about with the gradients of several calls.

        Args:
            executor: of the step's program; of a worker that has left, that of its last call.
            num_examples: for each replica of this worker; empty for one that has left.
            is_stale: whether the user has changed the optimizer's state since the last step.
        """
        self._num_meetings += 1
        self.team.stop = executor.interrupt
        is_first = self._num_meetings == 1  # what was taken over in this call was written, but not by the user
        written = self._announcements.written(executor.program, is_stale=is_stale) if is_first else 0
        self._num_present = sum(number > 0 for number in num_examples)
        facts, program = self._announcements.facts_of(executor), executor.program
        counts = facts.row_counts if num_examples else no_rows(program)
        told = facts.gathered_rows if num_examples else no_gathered_rows(program)
        own, details = self._announcements.of_step(
            executor, num_examples, written=written, num_steps=self._num_steps, has_left=self.has_left
        )
        self._agreed = agreed = self.team.meet(own, details, counts, told)
        self.rows_elsewhere = None
        if agreed.is_other and not agreed.takes_over:
            return False
        if not (agreed.takes_over or agreed.is_over) and not self._have_agreeing_rows():
            return False
        if not agreed.takes_over:
            self._begin(agreed, meets=facts.meets)
            return True
        assert self._num_meetings < _MOST_MEETINGS, "values that were taken over are taken over"
        self._taken.take_over(agreed, written)
        return False

    def _have_agreeing_rows(self) -> bool:
        """Whether all programs are those for the rows that all replicas gather, which follow from the batches of all workers.

        Otherwise some workers find other programs, and all meet again.

        Raises:
            CommunicationError: no programs agree, however often workers tell each other; all raise it.
        """
        told = self.team.gathered_rows
        if not told[0]:
            return True
        self.rows_elsewhere = rows_elsewhere(told, self.team.cluster.rank)
        if rows_agree(told):
            return True
        self._num_told += 1
        if self._num_told >= _MOST_TOLD:
            with self.team.words.raising_alike():
                raise CommunicationError(
                    "how many rows the model gathers by mirrorc.all_gather on one worker follows from how many it gathers on the "
                    "others, without end. No parameter was changed. Give all workers as many examples"
                )
        return False

    def _begin(self, agreed: Agreement, *, meets: bool) -> None:
        """Does what all have agreed to do before the program runs, whose replicas meet those of other workers or not."""
        if meets and not agreed.is_over:
            self.team.open_values()
        self._num_steps = agreed.num_steps + (agreed.accumulation is not Accumulation.ADDS)
        self._taken.note()
        if agreed.tells_hyperparameters:
            groups = list(self.optimizers.hyperparameters)
            take_over_hyperparameters(self.team, groups, self._options.scaler, agreed.source, has_left=self.has_left)
        if agreed.deals_anew:
            self._state.optimizers.gather(self.team.words.gather)

    def meet_besides(self, what: str, *, has_changed: bool) -> Agreement:
        """Begins a call together with the others that is no training call, and for which all of them make the same one.

        Args:
            what: the call.
            has_changed: what all workers must have alike of it, or the agreement is to take over values.
        """
        return self.team.meet(*self._announcements.besides(what, has_changed=has_changed))

    def meet_before(self, number: int) -> Agreement:
        """Meets the others before a call of one of several steps, of which this worker calls that of the number, if any."""
        return self.team.meet(*self._announcements.of_turn(number, has_left=self.has_left))

    def compare_replicas(self, program: Program) -> None:
        """Compares what all workers have copies of, where the step that begins is due for that.

        Buffers that the program writes are none: each step makes them alike, and an evaluation between two may write one
        worker's.

        Raises:
            CommunicationError: two workers have different copies; all raise it, again until copies are written anew.
        """
        every = self._options.check_replicas_every
        if not every or self._num_steps % every:
            return
        own = {variable.name for variable in written_buffers(program)}
        tensors = {name: tensor for name, tensor in self._state.store.tensors.items() if name not in own}
        facts = checksums_of(tensors)
        if not self._state.optimizers.is_dealt:  # of state that is dealt out there are no copies
            facts |= checksums_of_state(self.optimizers.optimizers, tensors.items())
        remedy = (
            "Memory has gone bad, or something has written to one copy alone, as step.evaluate() on one worker writes buffers: "
            "load a checkpoint of model and optimizer on all workers, which writes all copies anew"
        )
        try:
            self.team.words.compare("the copies of variables and optimizer state", facts, remedy)
        except LostConnectionError:
            raise
        except CommunicationError:  # all workers raise it
            self._num_steps -= 1
            raise

    def one_stream(self, program: Program) -> AbstractContextManager[None]:
        """A block in which a program runs: optimizers that every worker runs by itself draw the same random numbers in it."""
        runs_by_itself = not program.accumulates and updated_as_a_whole(program)
        return stream_of_chief(self.team) if runs_by_itself else nullcontext()

    def take_part(self, executor: Executor, last: Executor) -> None:
        """Called when a worker that has left has found the program that it runs on no examples, in place of its last one.

        Raises:
            ExecutionError: it exchanges something else, so that the others would wait in vain.
        """
        self.team.stop = executor.interrupt
        if self._announcements.facts_of(executor).said != self._announcements.facts_of(last).said:
            raise ExecutionError(
                "without examples, this worker would exchange something else than in its last call, because groups, modes or "
                "what forward reads have changed since: leave them as they are until step.join() ends"
            )

    @property
    def longest_step_seconds(self) -> float:
        """How long devices may take in all. They compute as long as a step of one worker may; then they wait for others, and
        find out by themselves who is late."""
        return 2 * self._options.timeout_seconds + _SLACK_SECONDS

    @property
    def agreed(self) -> Agreement:
        """What the workers have agreed about."""
        assert self._agreed is not None, "the workers have met"
        return self._agreed

    def examples(self, own: int) -> Examples:
        """How many examples the call has that the workers have agreed about, of which this worker has ``own``."""
        kept_elsewhere = self.agreed.num_kept - self._state.accumulated.num_examples
        before = sum(self.agreed.present[: self.team.cluster.rank])
        return Examples(own, self.agreed.num_examples, kept_elsewhere, before, self.agreed.num_present)

    def finish(self, executor: Executor, loss: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Ends a step that is made: shows buffers as all workers have them; gives the loss of all workers' examples.

        Args:
            executor: has made the step.
            loss: the weighted sum of this worker's losses, a scalar; None if it has no examples.
            dtype: of losses.
        """
        self.team.end_updates()
        total = total_loss(self.team.words, loss)
        if not executor.commit.is_skipped:
            show_buffers(self.team.words, executor.program, self._state, self.agreed, self._num_present)
        self.team.finish()
        return total.to(self._options.devices[0].torch_device, dtype)

    def close(self) -> None:
        """Leaves the other workers; may be repeated."""
        self.team.close()


def gather_state(joint: JointCalls, state: StepState) -> None:
    """Makes the optimizer's state whole on all workers, all of which call it.

    Args:
        joint: the calls of the step.
        state: of the step.

    Raises:
        ExecutionError: this worker is inside of `mirrorc.step.Step.join`, where others may have left.
        CommunicationError: another worker makes another call, or has loaded state where others have not.
    """
    if joint.before_call is not None:
        raise ExecutionError(
            "step.gather_optimizer_state() was called inside of step.join(), where a worker that has left makes no calls of its "
            "own: call it on all workers after the block"
        )
    with joint.call():
        state.refuse_if_torn()
        is_whole = not state.optimizers.is_dealt
        if joint.meet_besides("step.gather_optimizer_state()", has_changed=is_whole).takes_over:
            with joint.team.words.raising_alike():
                raise CommunicationError(
                    "the workers have no parts of one state of the optimizer: some have loaded or cleared it since the last "
                    "step, and others have not, or that step has failed while it updated. Nothing was changed. Load it on all "
                    "workers, make a step, and call step.gather_optimizer_state() then"
                )
        if not is_whole:
            state.optimizers.gather(joint.team.words.gather)
        joint.team.finish()
