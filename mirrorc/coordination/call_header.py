"""What a worker says of a call when it meets the others: numbers that must go together, and in detail what they stand for."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from mirrorc.capture.model.model_state import ModelState
from mirrorc.coordination.fingerprint import Facts, facts_of_program, hyperparameters_of, shapes, written_buffers
from mirrorc.coordination.state_sync import TakenValues
from mirrorc.ir.program import Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.protocol.checksums import checksums_of, checksums_of_state, updated_as_a_whole
from mirrorc.runtime.workers.protocol.header import BESIDES, TURN, Header, digest, kind_of
from mirrorc.runtime.workers.team.meetings import Details
from mirrorc.runtime.workers.team.team import Team

_LOADED = "calls of step.load_unsent_states()"


class Announcements:
    """What one worker says of the calls of a step.

    Args:
        options, model, state: those of the step.
        team: the workers.
        taken: which variables have values that all workers have.
    """

    def __init__(
        self, options: StepOptions, model: ModelState, state: StepState, team: Team, taken: TakenValues
    ) -> None:
        self._options, self._model, self._state = options, model, state
        self._team, self._taken = team, taken
        self._facts: weakref.WeakKeyDictionary[Executor, Facts] = weakref.WeakKeyDictionary()
        self._variables = Facts({})

    def facts_of(self, executor: Executor) -> Facts:
        """What must be the same in the programs of all workers."""
        found = self._facts.get(executor)
        if found is None:
            found = self._facts[executor] = facts_of_program(executor.program, needs_seed=executor.needs_seed)
        return found

    def written(self, program: Program, *, is_stale: bool) -> int:
        """A digest of what the user has written since the last step, by which workers know whether they have written the same;
        0 for nothing. Of variables these are all but the buffers that the step writes: forwards of a worker's own may have
        written those, and they count in the step's mean.

        Args:
            program: of the step.
            is_stale: whether the user has changed the optimizer's state.
        """
        is_behind = self._state.are_variables_written or self._state.optimizers.user_steps.have_written
        if not (is_stale or is_behind):
            return 0
        if self._taken.lack_any():
            return 1  # all take over the chief's values, whatever these are
        tensors, optimizers = self._state.store.tensors, self._state.optimizers
        own = {variable.name for variable in written_buffers(program)}
        variables = checksums_of({name: it for name, it in tensors.items() if name not in own}) if is_behind else {}
        has_state = is_stale and not optimizers.is_dealt
        state = checksums_of_state(self._options.optimizers.optimizers, tensors.items()) if has_state else {}
        return 1 + digest(repr((variables, is_stale, state))) // 2

    def of_step(
        self, executor: Executor, num_examples: Sequence[int], *, written: int, num_steps: int, has_left: bool
    ) -> tuple[Header, dict[str, Details]]:
        """Of a training call.

        Args:
            executor: of the step's program; of a worker that has left, that of its last call.
            num_examples: for each replica of this worker; empty for one that has left.
            written: see `written`.
            num_steps: how many steps this worker has made, of those that count for comparisons of copies.
            has_left: whether it makes no calls of its own any more.
        """
        program, tensors = executor.program, self._state.store.tensors
        if tensors.keys() != self._variables.said.keys():
            self._variables = Facts(shapes(tensors))
        facts, is_fresh = self.facts_of(executor), self._taken.lack_any()
        num_loads = self._state.unsent.num_loads
        updated = set(updated_as_a_whole(program))
        by_itself = {name: tensor for name, tensor in tensors.items() if name in updated}
        deals_anew = self._state.optimizers.are_dealt_otherwise(self._state.store.in_store(program).buckets)
        own = Header(
            call=self._team.num_calls,
            is_fresh=is_fresh,
            written=written,
            schedule=digest(f"{facts.digest} {num_loads}") if num_loads else facts.digest,
            variables=self._variables.digest,
            hyperparameters=digest(repr(hyperparameters_of(self._options))),
            modes=digest(self._model.modes()),
            num_examples=sum(num_examples),
            num_present=sum(number > 0 for number in num_examples),
            seed=_next_seed(),
            kind=kind_of(program.accumulation),
            num_kept_calls=self._state.accumulated.num_calls,
            num_kept=self._state.accumulated.num_examples,
            parameters=digest(repr(checksums_of(by_itself))) if by_itself and not is_fresh else 0,
            num_steps=num_steps,
            has_left=has_left,
            deals_anew=deals_anew,
        )
        return own, {
            **self._details(facts),
            **({"schedule": lambda: {**facts.said, _LOADED: str(num_loads)}} if num_loads else {}),
            "kind": lambda: {"the call": "step.accumulate()" if program.accumulates else "the step itself"},
            "parameters": lambda: checksums_of(by_itself),
            "deals_anew": lambda: {
                "the optimizer's state": "a part for other buckets" if deals_anew else "other state"
            },
        }

    def besides(self, what: str, *, has_changed: bool) -> tuple[Header, dict[str, Details]]:
        """Of a call that is no training call, and for which all workers make the same one.

        Args:
            what: the call.
            has_changed: what all workers must have alike of it, or the agreement is to take over values.
        """
        facts = Facts({"the call": what})
        own = Header(
            self._team.num_calls,
            is_fresh=self._team.have_parted,
            written=int(has_changed),
            schedule=facts.digest,
            variables=self._variables.digest,
            hyperparameters=digest(repr(hyperparameters_of(self._options))),
            modes=digest(self._model.modes()),
            num_examples=1,  # a call without any would be refused
            num_present=0,
            seed=0,
            kind=BESIDES,
        )
        return own, {**self._details(facts), "kind": lambda: facts.said}

    def of_turn(self, number: int, *, has_left: bool) -> tuple[Header, dict[str, Details]]:
        """Before a call of one of several steps of a block, of which this one is the first.

        Args:
            number: of the step, in the block.
            has_left: whether this worker makes no calls of its own any more, and so says nothing of it.
        """
        num_examples = 0 if has_left else 1  # a call without any would be refused
        own = Header(self._team.num_calls, num_examples=num_examples, kind=TURN, has_left=has_left, turn=number)
        return own, {
            "kind": lambda: {"the call": "one of a step inside of mirrorc.join() of several"},
            "turn": lambda: {"the step": f"number {number} of those that mirrorc.join() was given, counted from 0"},
        }

    def _details(self, facts: Facts) -> dict[str, Details]:
        return {
            "schedule": lambda: facts.said,
            "variables": lambda: self._variables.said,
            "hyperparameters": lambda: hyperparameters_of(self._options),
        }


def _next_seed() -> int:
    """The seed that a step that draws random numbers takes next, which is left there."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    torch.set_rng_state(state)
    return seed
