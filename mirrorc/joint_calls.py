"""Training calls that several workers make together: what this one tells the others, and takes from them.

It is long, as all that workers tell each other in a call is here, from its meeting to its end.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from mirrorc.analysis.sent_factors import Counts, no_rows, row_counts
from mirrorc.analysis.worker_schedule import worker_schedule
from mirrorc.capture.model_state import ModelState
from mirrorc.errors import CommunicationError, ExecutionError
from mirrorc.ir.program import Accumulation, Program
from mirrorc.ir.source_lines import users_stack_level
from mirrorc.ir.variables import Aggregation, Synchronization, Variable
from mirrorc.optimizer_groups import OptimizerGroups, hyperparameters_by_label
from mirrorc.options import StepOptions
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.accumulated_gradients import Examples
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.torn_state import TornState
from mirrorc.runtime.workers.copies import checksums_of, checksums_of_state, updated_as_a_whole
from mirrorc.runtime.workers.header import BESIDES, Agreement, Header, digest, kind_of
from mirrorc.runtime.workers.lane import LostConnectionError
from mirrorc.runtime.workers.start import stream_of_chief, take_over_hyperparameters, take_over_values
from mirrorc.runtime.workers.team import Team

_SLACK_SECONDS = 5.0
_MOST_MEETINGS = 4  # of one call; the second is after values were taken over, or programs found that go together


class _Facts:
    """What a worker has, by name, and a number made of it; of a program also how many rows the factors have that it sends."""

    def __init__(self, said: Mapping[str, str], row_counts: Counts = ()) -> None:
        self.said, self.digest, self.row_counts = said, digest(repr(said)), row_counts


class JointCalls:
    """The training calls of one step, of which every worker makes as many, at the same time.

    A call meets the others when its program is found, and before anything has changed. If a worker has not taken over the
    chief's values yet, or the user has written on some workers and not on others, all take them over, and meet again. So they do
    if a worker has come with a program that does not go with the others', see `mirrorc.runtime.workers.header.agreement`.

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
        is_joining: whether this worker is inside of `mirrorc.step.Step.join`.
        has_left: whether it has left its loop there, and takes part in the calls of the others.
    """

    def __init__(self, options: StepOptions, model: ModelState, state: StepState) -> None:
        assert options.cluster is not None, "several workers have joined"
        self._options, self._model, self._state = options, model, state
        home = options.devices[0].torch_device
        self.team = Team(options.cluster, options.cluster.new_name(), options.timeout_seconds, home)
        self.is_joining = self.has_left = False
        self._agreed: Agreement | None = None
        self._num_present = self._num_meetings = self._num_steps = 0
        self._taken: dict[str, int] | None = None  # the ids of variables that were taken over, by name
        self._facts: weakref.WeakKeyDictionary[Executor, _Facts] = weakref.WeakKeyDictionary()
        self._variables = _Facts({})
        try:
            facts = _facts_of_options(options, model)
            options.cluster.check_same(
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
        try:
            with self.team.call(lambda: self._state.is_whole, self._torn):
                yield
        finally:
            self._guard_torn(known)
            if self.team.have_parted and not had_parted:
                self._state.accumulated.clear()  # some workers have used theirs; all go on from a checkpoint

    def _guard_torn(self, known: TornState | None) -> None:
        """Guards what a step has left between two steps; ``known``: what was guarded before."""
        torn = self._state.torn
        if torn is not None and torn is not known:
            torn.guard(self._options.model, self.optimizers.optimizers)

    @contextlib.contextmanager
    def rest_of_call(self) -> Iterator[None]:
        """A block that does what is left of a call that has returned; see `Team.rest_of_call`."""
        known, had_parted = self._state.torn, self.team.have_parted
        try:
            with self.team.rest_of_call(self._torn):
                yield
        finally:
            self._guard_torn(known)
            if self.team.have_parted and not had_parted:
                self._state.accumulated.clear()

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
        facts = self._facts_of_program(executor)
        tensors = self._state.store.tensors
        now = {name: id(tensor) for name, tensor in tensors.items()}
        if now.keys() != self._variables.said.keys():
            self._variables = _Facts(_shapes(tensors))
        is_fresh = self._taken is None or not now.items() <= self._taken.items() or self.team.have_parted
        is_first = self._num_meetings == 1  # what was taken over in this call was written, but not by the user
        wrote = is_first and (is_stale or self._state.is_behind or self._state.optimizers.user_steps.have_written)
        updated = set(updated_as_a_whole(executor.program))
        by_itself = {name: tensor for name, tensor in tensors.items() if name in updated}
        self._num_present = sum(number > 0 for number in num_examples)
        planned = self._state.store.in_store(executor.program).buckets
        deals_anew = self._state.optimizers.are_dealt_otherwise(planned)
        own = Header(
            call=self.team.num_calls,
            is_fresh=is_fresh,
            has_written=wrote,
            schedule=facts.digest,
            variables=self._variables.digest,
            hyperparameters=digest(repr(self._hyperparameters())),
            modes=digest(self._model.modes()),
            num_examples=sum(num_examples),
            num_present=self._num_present,
            seed=_next_seed(),
            kind=kind_of(executor.program.accumulation),
            num_kept_calls=self._state.accumulated.num_calls,
            num_kept=self._state.accumulated.num_examples,
            parameters=digest(repr(checksums_of(by_itself))) if by_itself and not is_fresh else 0,
            num_steps=self._num_steps,
            has_left=self.has_left,
            deals_anew=deals_anew,
        )
        details = {
            "kind": lambda: {"the call": "step.accumulate()" if executor.program.accumulates else "the step itself"},
            "schedule": lambda: facts.said,
            "variables": lambda: self._variables.said,
            "parameters": lambda: checksums_of(by_itself),
            "hyperparameters": self._hyperparameters,
            "deals_anew": lambda: {
                "the optimizer's state": "a part for other buckets" if deals_anew else "other state"
            },
        }
        self._agreed = agreed = self.team.meet(
            own, details, facts.row_counts if num_examples else no_rows(executor.program)
        )
        if agreed.is_other and not agreed.takes_over:
            return False
        if not agreed.takes_over:
            self._num_steps = agreed.num_steps + (agreed.accumulation is not Accumulation.ADDS)
            self._taken = now  # what is gone would be another one when it comes back
            if agreed.tells_hyperparameters:
                groups = list(self.optimizers.hyperparameters)
                take_over_hyperparameters(
                    self.team, groups, self._options.scaler, agreed.source, has_left=self.has_left
                )
            if agreed.deals_anew:
                self._state.optimizers.gather(self.team.words.gather)
            return True
        assert self._num_meetings < _MOST_MEETINGS, "values that were taken over are taken over"
        self._state.finish_last()
        if wrote and not agreed.has_source_written and self._taken is not None:
            warnings.warn(
                f"what was written to parameters, buffers or the optimizer's state of worker {self.team.cluster.rank} since the "
                f"last step is replaced by the values of worker {agreed.source}, which has not written: write on all workers, or "
                f"on worker {agreed.source}",
                stacklevel=users_stack_level(),
            )
        self._make_state_whole_for(agreed.source)
        take_over_values(self.team, tensors, self.optimizers.optimizers, self._options.scaler, agreed.source)
        self._taken = now
        self.team.come_together()
        return False

    def _make_state_whole_for(self, source: int) -> None:
        """Gathers the optimizer's state where the worker whose values all take over has a part of it alone.

        Raises:
            CommunicationError: the workers' parts may be of two steps; all raise it.
        """
        if not self._options.program_workers.shards_optimizer:
            return
        is_dealt = torch.tensor(self._state.optimizers.is_dealt)
        self.team.words.copy(is_dealt, source)
        num_parted = torch.tensor(float(self.team.have_parted))
        self.team.words.sum(num_parted)
        if is_dealt and num_parted:
            with self.team.words.raising_alike():
                raise CommunicationError(
                    f"worker {source}, whose values all take over, has a part of the optimizer's state alone, and those of "
                    "others may be of another step, as the connection was lost while parameters were updated. Nothing was "
                    "changed. Load a checkpoint into model and optimizer on all workers, and call the step again"
                )
        if is_dealt:
            self._state.optimizers.gather(self.team.words.gather)

    def meet_besides(self, what: str, *, has_changed: bool) -> Agreement:
        """Begins a call together with the others that is no training call, and for which all of them make the same one.

        Args:
            what: the call.
            has_changed: what all workers must have alike of it, or the agreement is to take over values.
        """
        said = {"the call": what}
        own = Header(
            self.team.num_calls,
            is_fresh=self.team.have_parted,
            has_written=has_changed,
            schedule=digest(repr(said)),
            variables=self._variables.digest,
            hyperparameters=digest(repr(self._hyperparameters())),
            modes=digest(self._model.modes()),
            num_examples=1,  # a call without any would be refused
            num_present=0,
            seed=0,
            kind=BESIDES,
        )
        details = {"kind": lambda: said, "schedule": lambda: said, "variables": lambda: self._variables.said}
        return self.team.meet(own, {**details, "hyperparameters": self._hyperparameters})

    def compare_replicas(self) -> None:
        """Compares what all workers have copies of, where the step that begins is due for that.

        Raises:
            CommunicationError: two workers have different copies; all raise it, again until copies are written anew.
        """
        every = self._options.check_replicas_every
        if not every or self._num_steps % every:
            return
        tensors = self._state.store.tensors
        facts = checksums_of(tensors)
        if not self._state.optimizers.is_dealt:  # of state that is dealt out there are no copies
            facts |= checksums_of_state(self.optimizers.optimizers, tensors.items())
        remedy = (
            "Memory has gone bad, or something has written to one copy alone: load a checkpoint of model and optimizer on all "
            "workers, which writes all copies anew"
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
        if self._facts_of_program(executor).said != self._facts_of_program(last).said:
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
        return Examples(own, self.agreed.num_examples, kept_elsewhere)

    def _facts_of_program(self, executor: Executor) -> _Facts:
        """What must be the same in the programs of all workers, by name."""
        found = self._facts.get(executor)
        if found is None:
            lines = {f"line {number}": line for number, line in enumerate(worker_schedule(executor.program))}
            written = ", ".join(variable.name for variable in _written(executor.program))
            more = {"buffers that forward writes": written, "random numbers": str(executor.needs_seed)}
            found = self._facts[executor] = _Facts({**lines, **more}, row_counts(executor.program))
        return found

    def _hyperparameters(self) -> dict[str, str]:
        found = hyperparameters_by_label(self._options.optimizers)
        scaler = self._options.scaler
        return found if scaler is None else {**found, "the scaler": str(scaler.state_dict())}

    def finish(self, executor: Executor, loss: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
        """Ends a step that is made: shows buffers as all workers have them; gives the loss of all workers' examples.

        Args:
            executor: has made the step.
            loss: the weighted sum of this worker's losses, a scalar; None if it has no examples.
            dtype: of losses.
        """
        if self._options.overlap_next_step and not executor.program.accumulates:
            self.team.leave_buckets()
        self.team.end_updates()
        total = torch.zeros((), dtype=torch.float64)
        if loss is not None:
            total.copy_(loss.detach())
        self.team.words.sum(total)
        if not executor.commit.is_skipped:
            self._show_buffers(executor.program)
        self.team.finish()
        return total.to(self._options.devices[0].torch_device, dtype)

    def _show_buffers(self, program: Program) -> None:
        """Gives all replicas of all workers what they have of their own as one; all workers send it in one order."""
        kinds: dict[tuple[Aggregation, torch.dtype], list[Variable]] = {}
        for variable in _written(program):
            kinds.setdefault((variable.aggregation, variable.dtype), []).append(variable)
        values: dict[str, torch.Tensor] = {}
        for (aggregation, _), variables in kinds.items():
            own = [self._state.store.tensors[variable.name].detach() for variable in variables]
            flat = torch.cat([value.reshape(-1) for value in own])
            if aggregation is Aggregation.MEAN:
                self.team.words.sum(flat.mul_(self._num_present) if self._num_present else flat.zero_())
                flat.div_(self.agreed.num_present)
            else:
                self.team.words.copy(flat, self.agreed.first_present)
            parts = flat.split([value.numel() for value in own])
            values |= {v.name: part.view_as(value) for v, value, part in zip(variables, own, parts, strict=True)}
        if values:
            self._state.store.show(values)

    def close(self) -> None:
        """Leaves the other workers; may be repeated."""
        self.team.close()


def _next_seed() -> int:
    """The seed that a step that draws random numbers takes next, which is left there."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    torch.set_rng_state(state)
    return seed


def _written(program: Program) -> list[Variable]:
    """The buffers that a program's steps write, in the order of their names."""
    written = [v for v in program.variables.values() if v.synchronization is Synchronization.PER_REPLICA]
    return sorted(written, key=lambda variable: variable.name)


def _facts_of_options(options: StepOptions, model: ModelState) -> dict[str, str]:
    """What must be the same on all workers before anything is captured, by name. Values come from the chief later."""
    frozen = {name for name, parameter in model.parameters.items() if not parameter.requires_grad}
    variables = {name: text + ", frozen" * (name in frozen) for name, text in _shapes(model.tensors).items()}
    names = {id(parameter): name for name, parameter in model.parameters.items()}
    groups = [
        (type(optimizer).__qualname__, [names.get(id(parameter), "another parameter") for parameter in group["params"]])
        for optimizer in options.optimizers.optimizers
        for group in optimizer.param_groups
    ]
    return {
        "model": type(options.model).__qualname__,
        "loss_fn": _text_of_loss(options.loss_fn),
        "loss_reduction": options.loss_reduction,
        **{f"variable {name}": text for name, text in variables.items()},
        **{f"group {number}": f"{kind} of {', '.join(own)}" for number, (kind, own) in enumerate(groups)},
        "backend": options.backend.name,
        **{f"pass {number}": repr(one) for number, one in enumerate(options.pipeline)},
        "microbatches": str(options.microbatches),
        "check_replicas_every": str(options.check_replicas_every),
        "bucket sizes": "given" if options.to_measure is None else "chosen",
        "exchange": options.exchange,
        "autocast": str(options.autocast),
        "scaler": "none" if options.scaler is None else "one",
        "devices": " ".join(map(str, options.program_workers.devices_per_worker)),
    }


def _text_of_loss(loss: Any) -> str:
    """The name of a loss, with the plain settings that it has."""
    settings: Mapping[str, Any] = {}
    if isinstance(loss, functools.partial):
        loss, settings = loss.func, loss.keywords
    elif isinstance(loss, nn.Module):
        settings = vars(loss)
    name = getattr(loss, "__qualname__", type(loss).__qualname__)
    plain = [f"{key}={value!r}" for key, value in settings.items() if type(value) in (bool, int, float, str)]
    return f"{name}({', '.join(plain)})" if plain else name


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype}{list(tensor.shape)}" for name, tensor in tensors.items()}
