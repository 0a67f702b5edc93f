"""Headers that workers compare before a call, and the facts behind their digests."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

import torch

from mirrorc.capture.model.model_state import ModelState
from mirrorc.cluster.consistency import digest
from mirrorc.coordination.fingerprint import Facts, facts_of_program, hyperparameters_of, shapes, written_buffers
from mirrorc.coordination.state_sync import TakenValues
from mirrorc.ir.program import Accumulation, Program
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.protocol.checksums import checksums_of, checksums_of_state, updated_as_a_whole
from mirrorc.runtime.workers.protocol.header import BESIDES, TURN, Details, Header, kind_of
from mirrorc.runtime.workers.team.team import Team

_CALLS = {
    Accumulation.ADDS: "step.accumulate()",
    Accumulation.GRADIENTS: "backward, or step.gradients()",
    Accumulation.FORWARD: "forward",
}
_LOADED = "calls of step.load_state_dict()"


class Announcements:
    def __init__(
        self, options: StepOptions, model: ModelState, state: StepState, team: Team, taken: TakenValues
    ) -> None:
        self._options, self._model, self._state = options, model, state
        self._team, self._taken = team, taken
        self._facts: weakref.WeakKeyDictionary[Executor, Facts] = weakref.WeakKeyDictionary()
        self._variables = Facts({})

    def facts_of(self, executor: Executor) -> Facts:
        facts = self._facts.get(executor)
        if facts is None:
            facts = self._facts[executor] = facts_of_program(executor.program, needs_seed=executor.needs_seed)
        return facts

    def written(self, program: Program, *, is_stale: bool) -> int:
        """A digest of the user's writes since the last step; 0 for none.

        Buffers that the program writes are left out, because an evaluation on one worker may have written them.
        """
        is_behind = self._state.are_variables_written or self._state.optimizers.user_steps.have_written
        if not (is_stale or is_behind):
            return 0
        if self._taken.lack_any():
            return 1  # all workers receive the chief's values in any case
        tensors, optimizers = self._state.store.tensors, self._state.optimizers
        buffers = {variable.name for variable in written_buffers(program)}
        others = {name: tensor for name, tensor in tensors.items() if name not in buffers}
        variables = checksums_of(others) if is_behind else {}
        has_state = is_stale and not optimizers.is_dealt
        state = checksums_of_state(self._options.optimizers.optimizers, tensors.items()) if has_state else {}
        return 1 + digest(repr((variables, is_stale, state))) // 2

    def of_step(
        self,
        executor: Executor,
        num_examples: Sequence[int],
        *,
        written: int,
        num_steps: int,
        has_left: bool,
        batch: int,
    ) -> tuple[Header, dict[str, Details]]:
        program, tensors = executor.program, self._state.store.tensors
        if tensors.keys() != self._variables.texts.keys():
            self._variables = Facts(shapes(tensors))
        facts, is_fresh = self.facts_of(executor), self._taken.lack_any()
        num_loads = self._state.unsent.num_loads
        updated = set(updated_as_a_whole(program))
        by_itself = {name: tensor for name, tensor in tensors.items() if name in updated}
        deals_anew = program.has_parameters_in_buckets and self._state.optimizers.are_dealt_otherwise(
            self._state.store.in_store(program).buckets
        )
        header = Header(
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
            num_accumulated_calls=self._state.accumulated.num_calls,
            num_accumulated=self._state.accumulated.num_examples,
            parameters=digest(repr(checksums_of(by_itself))) if by_itself and not is_fresh else 0,
            num_steps=num_steps,
            has_left=has_left,
            deals_anew=deals_anew,
            batch=batch,
        )
        return header, {
            **self._details(facts),
            **({"schedule": lambda: {**facts.texts, _LOADED: str(num_loads)}} if num_loads else {}),
            "kind": lambda: {"the call": _CALLS.get(program.accumulation, "the step itself")},
            "parameters": lambda: checksums_of(by_itself),
            "deals_anew": lambda: {
                "the optimizer's state": "a part for other buckets" if deals_anew else "other state"
            },
        }

    def besides(self, name: str, *, has_changed: bool) -> tuple[Header, dict[str, Details]]:
        """A header for a call that does not train. If workers differ in ``has_changed``, they broadcast values."""
        facts = Facts({"the call": name})
        header = Header(
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
        return header, {**self._details(facts), "kind": lambda: facts.texts}

    def of_turn(self, number: int, *, has_left: bool) -> tuple[Header, dict[str, Details]]:
        """A header for the exchange before a call within `mirrorc.join`; ``number`` is the index of the step."""
        num_examples = 0 if has_left else 1  # a call without any would be refused
        header = Header(self._team.num_calls, num_examples=num_examples, kind=TURN, has_left=has_left, turn=number)
        return header, {
            "kind": lambda: {"the call": "one of a step inside of mirrorc.join() of several"},
            "turn": lambda: {"the step": f"number {number} of those that mirrorc.join() was given, counted from 0"},
        }

    def _details(self, facts: Facts) -> dict[str, Details]:
        return {
            "schedule": lambda: facts.texts,
            "variables": lambda: self._variables.texts,
            "hyperparameters": lambda: hyperparameters_of(self._options),
        }


def _next_seed() -> int:
    """Draws a seed without advancing torch's default generator."""
    state = torch.get_rng_state()
    seed = int(torch.randint(2**62, (), dtype=torch.int64))
    torch.set_rng_state(state)
    return seed
