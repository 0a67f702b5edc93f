"""Chooses how workers exchange each gradient: as a sum, or as factors."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace

import torch

from mirrorc.analysis.cost.link_speed import Candidate
from mirrorc.analysis.gradients.sent_factors import fake_rows, sendable, sent_factors
from mirrorc.compilation.choices.exchange_decision import Figures, choose_sent_as_factors, why_bits_differ
from mirrorc.compilation.choices.joint_choice import JointChoice
from mirrorc.ir import ops
from mirrorc.ir.links import carries_between_workers, why_no_factors_for_workers
from mirrorc.ir.program import Accumulation, Program
from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import CompressExchange, FactorGradients, SendLargest, SendPayload
from mirrorc.passes.workers.compress_exchange import NARROW
from mirrorc.runtime.devices.machine import product_facts, seconds_per_multiplication
from mirrorc.runtime.workers.team.team import Team
from mirrorc.torch_internals import size_now

_AS_IF_ALIKE = "; taken as if all workers had as many examples as this one"


class ExchangeChoice(JointChoice):
    """Chooses by the batch sizes of the first call, even if that call sends nothing."""

    subject = "factors"

    def __init__(self, options: StepOptions, num_threads: int, team: Team | None) -> None:
        super().__init__(options, team)
        self._num_threads = num_threads
        self._candidates: Sequence[Candidate] = ()  # of the last captured program
        self._names: tuple[str, ...] = ()
        self._remark = ""
        self._do_bits_differ = False
        self._loaded: tuple[str, ...] | None = None

    @property
    def names(self) -> tuple[str, ...] | None:
        """The variables whose gradients are sent as factors; None before a choice."""
        return self._names if self.is_final else self._loaded

    @property
    def is_open(self) -> bool:
        return not self.is_final and self._sent is None

    def load(self, names: tuple[str, ...]) -> None:
        assert self.is_open, "what all have chosen stays"
        self._loaded = names

    def concerns(self, program: Program) -> bool:
        return self._may_send_factors and program.trains

    def observe(self, program: Program) -> None:
        self._candidates = list(self._candidates_in(program)) if self._may_send_factors else []

    def propose(self) -> str:
        rows, machine = (
            {gradient.variable: gradient.num_rows for gradient in self._candidates},
            product_facts(self._num_threads),
        )
        figures = Figures(rows, machine, loaded=self._loaded)
        link = self._team.link if self._team is not None else None
        if link is not None and rows:
            figures = replace(
                figures,
                seconds_per_byte=link.seconds_per_byte,
                seconds_per_multiplication=seconds_per_multiplication(),
            )
        return json.dumps(asdict(figures))

    def decide(self, proposals: Sequence[str]) -> None:
        workers = self._options.program_workers
        everyone = [Figures(**json.loads(text)) for text in proposals]
        self._names, self._remark = choose_sent_as_factors(self._candidates, everyone, workers, self._options.exchange)
        self._do_bits_differ = bool(why_bits_differ(everyone, workers.devices_per_worker))

    def applies_to(self, program: Program) -> bool:
        return not program.trains or program.workers.sent_as_factors == self._names_for(program)

    def noted_in(self, program: Program) -> Program:
        """Raises ValueError if workers cannot send the rows that an optimizer takes."""
        is_sent = program.trains and not _accumulates(program)
        self._check_rows(program)
        names, concerns = self._names_for(program), self.concerns(program)
        if not concerns and not names:
            return program
        program = program.evolve(workers=replace(program.workers, sent_as_factors=names))
        if not (self._remark and concerns and is_sent):
            return program
        return program.with_remarks(self._remark + ("" if self._is_joint else _AS_IF_ALIKE))

    def _names_for(self, program: Program) -> tuple[str, ...]:
        """Accumulated gradients are sent whole, as are the user's where workers would make other bits of them."""
        is_sent = self.concerns(program) and not _accumulates(program)
        is_sent = is_sent and not (program.leaves_gradients and self._do_bits_differ)
        return (*(self._names if is_sent else ()), *self._rows_of(program))

    def _rows_of(self, program: Program) -> tuple[str, ...]:
        """Tables with row-wise updates are always sent as rows."""
        if not (self._options.program_workers.are_several and program.trains):
            return ()
        variables = program.variables.values()
        return tuple(variable.name for variable in variables if variable.update and variable.update.takes_rows)

    def _check_rows(self, program: Program) -> None:
        names = self._rows_of(program)
        if names and self._options.exchange == "dense":
            raise problem(
                ValueError,
                f"MC1003: exchange='dense' cannot send the gradient of {names[0]!r}, an embedding with sparse=True",
                "its optimizer takes rows of a gradient, and 'dense' sends whole ones",
                ("leave exchange= out", "nn.Embedding(..., sparse=False), with an optimizer for dense gradients"),
            )
        if names and not carries_between_workers(self._options.devices, ops.gather_factors):
            raise problem(
                ValueError,
                f"MC2501: the gradient of {names[0]!r} is sparse, and workers cannot exchange rows from these devices",
                "nothing gathers rows there",
                "nn.Embedding(..., sparse=False)",
            )

    @property
    def _may_send_factors(self) -> bool:
        return self._options.program_workers.are_several and self._factoring is not None

    @property
    def _factoring(self) -> FactorGradients | None:
        if self._options.exchange == "dense":
            return None
        factoring = next((entry for entry in self._options.pipeline if isinstance(entry, FactorGradients)), None)
        if factoring is None or why_no_factors_for_workers(factoring.link, self._options.devices):
            return None
        return factoring

    def _candidates_in(self, program: Program) -> Iterator[Candidate]:
        factoring = self._factoring
        assert factoring is not None, "something may be sent as factors"
        graphs = [shard for replica in range(program.num_replicas) for shard in program.graphs_run_by(replica)]
        for gradient in sendable(program, factoring.min_elements if self._options.exchange == "auto" else 1):
            rows = [(fake_rows(part) or [])[0] for part in gradient.of_shards]
            number = sum(size_now(rows[shard].shape[0]) for shard in graphs)
            row_bytes = sum(kind.num_bytes for kind in sent_factors(program, gradient.variable).rows)
            work = gradient.form.num_multiplications(gradient.value, 1)
            update = program.variables[gradient.variable].update
            if update is not None and update.leaves_whole_gradient:
                work *= program.num_replicas  # one device makes all of it
            yield Candidate(
                gradient.variable, self._bytes_sent(gradient.variable, gradient.value), row_bytes, number, work
            )

    def _bytes_sent(self, name: str, gradient: torch.Tensor) -> int:
        """The bytes of an uncompressed sum that takes as long as this gradient's sum with its compression."""
        num_elements, dtype = gradient.numel(), gradient.dtype
        num_workers = self._options.program_workers.num_workers
        for entry in self._options.pipeline:
            if isinstance(entry, SendLargest):
                return entry.bytes_of_sum(num_elements, dtype, num_workers)
            if isinstance(entry, SendPayload):
                return entry.bytes_of_gradient(name, gradient, num_workers)
            if isinstance(entry, CompressExchange) and entry.narrows(dtype):
                return num_elements * NARROW[entry.dtype].itemsize
        return num_elements * dtype.itemsize


def _accumulates(program: Program) -> bool:
    return program.accumulation in (Accumulation.ADDS, Accumulation.ENDS)
