"""Broadcasts one worker's values before a step if values would differ between workers."""

from __future__ import annotations

import torch

from mirrorc.errors import CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.messages.source_lines import warn
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.protocol.header import Agreement
from mirrorc.runtime.workers.team.broadcast_state import take_over_values
from mirrorc.runtime.workers.team.team import Team


class TakenValues:
    """Tracks which variables are equal on all workers, and broadcasts values."""

    def __init__(self, options: StepOptions, state: StepState, team: Team) -> None:
        self._options, self._state, self._team = options, state, team
        self._ids: dict[str, int] | None = None  # of the variables, by name; None before the first call

    def lack_any(self) -> bool:
        """True if variables are new since the last broadcast, or may differ between workers."""
        return self._ids is None or not self._ids_now().items() <= self._ids.items() or self._team.have_parted

    def _ids_now(self) -> dict[str, int]:
        return {name: id(tensor) for name, tensor in self._state.store.tensors.items()}

    def note(self) -> None:
        """Marks the current variables as broadcast. A variable that is dropped and comes back counts as new."""
        self._ids = self._ids_now()

    def broadcast_from_source(self, agreed: Agreement, written: int) -> None:
        """Broadcasts parameters, buffers, optimizer state and the scaler. ``written`` is that of `Announcements`.

        All workers raise CommunicationError if shards of the optimizer's state may be of different steps.
        """
        if written not in (0, agreed.written) and self._ids is not None:
            source = f"worker {agreed.source}"
            why = "something else" if agreed.written else "nothing"
            warn(
                f"MC3502: parameters, buffers or optimizer state of worker {self._team.cluster.rank} differ from those of "
                f"{source}, and are replaced by these",
                f"it wrote them since the last call, and {source} wrote {why}",
                ("make the same change, such as load_state_dict(), on all workers", f"make it on {source} alone"),
            )
        self._make_state_whole_for(agreed.source)
        optimizers, scaler = self._options.optimizers.optimizers, self._options.scaler
        take_over_values(self._team, self._state.store.tensors, optimizers, scaler, agreed.source)
        self.note()
        self._team.come_together()

    def _make_state_whole_for(self, source: int) -> None:
        if not self._options.program_workers.shards_optimizer:
            return
        control = self._team.control
        is_dealt = torch.tensor(self._state.optimizers.is_dealt)
        control.broadcast(is_dealt, source)
        num_parted = torch.tensor(float(self._team.have_parted))
        control.all_reduce(num_parted)
        if is_dealt and num_parted:
            with control.raising_alike():
                raise problem(
                    CommunicationError,
                    f"MC6401: worker {source}, from which all copy, holds only its part of the optimizer's state",
                    "the connection was lost during an update, and the others' parts may be of another step",
                    "load a checkpoint into model and optimizer on all workers, and make the call again",
                    now="Nothing was changed",
                )
        if is_dealt:
            self._state.optimizers.gather(control.all_gather)
