"""Chooses how workers send each gradient: the sum of a worker whole, or the factors from which every worker makes the sum.

It is long, as what is chosen, by which figures, and what is said of it stand together.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, replace

import torch

from mirrorc.analysis.gradients.sent_factors import fake_rows, sendable, sent_factors
from mirrorc.analysis.graph.aliases import ViewedVariables
from mirrorc.compilation.choices.exchange_costs import Candidate, Figures, chosen
from mirrorc.ir import ops
from mirrorc.ir.links import carries_between_workers, why_no_factors_for_workers
from mirrorc.ir.program import Accumulation, Program
from mirrorc.options.dynamic_shapes import sends_whole
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import CompressExchange, FactorGradients, SendLargest, SendPayload
from mirrorc.passes.workers.compress_exchange import NARROW
from mirrorc.runtime.devices.machine import product_facts, seconds_per_multiplication
from mirrorc.runtime.workers.team.team import Team
from mirrorc.torch_internals import size_now

_WHOLE_FOR_SYMBOLS = (
    "workers send gradients whole, none as factors, because sizes of arguments may become symbols: how many factors there are is "
    "part of a program; dynamic=False, or exchange='factors', makes a program for each size and sends factors"
)


class ExchangeChoice:
    """How the workers of a step send each gradient, chosen at its first training call and kept from then on.

    A worker compiles for its own batches alone, but all workers must send alike. So each tells the others what it has at the
    first call, all decide by the same figures, and batches of other sizes change nothing any more. So it is if that call
    accumulates gradients, which are not sent: another worker may make another call, which is found out when all have come.

    Args:
        options: of the step.
        num_threads: of each device.

    Attributes:
        team: the workers that train together; None for those of a world that is not there.
    """

    def __init__(self, options: StepOptions, num_threads: int) -> None:
        self._options, self._num_threads = options, num_threads
        self.team: Team | None = None
        self._is_in_call = False
        self._found: Sequence[Candidate] | None = None  # at the first capture
        self._names: tuple[str, ...] = ()
        self._remark = ""
        self._is_held = False
        self._told: Figures | None = None
        self._loaded: tuple[str, ...] | None = None

    @property
    def kept(self) -> tuple[str, ...] | None:
        """The variables whose gradients are sent as factors, as chosen or loaded; None if neither has happened yet."""
        return self._names if self._is_held else self._loaded

    @property
    def is_open(self) -> bool:
        """Whether the workers are yet to choose."""
        return not self._is_held and self._told is None

    def load(self, names: tuple[str, ...]) -> None:
        """Takes what was chosen in an earlier run in place of what would be measured now; before the workers choose."""
        assert self.is_open, "what all have chosen stays"
        self._loaded = names

    @contextmanager
    def asked(self) -> Iterator[None]:
        """A block in which all workers are in a training call, so that they can be asked."""
        self._is_in_call = True
        try:
            yield
        finally:
            self._is_in_call = False

    def keeps(self, program: Program) -> bool:
        """Whether a program sends what all workers choose; it may have been compiled without asking them.

        Raises:
            CommunicationError: as `put_into`.
        """
        if not self._concerns(program):
            return self._taken_as_rows(program) == program.workers.sent_as_factors
        if not self._is_held and self._is_in_call and self._found is not None:
            self._choose(self._found)
        return program.workers.sent_as_factors == self._names_for(program)

    def _concerns(self, program: Program) -> bool:
        """Whether it is for a training call, in the first of which all workers tell each other what they have."""
        return self._may_send_factors and program.trains

    def _names_for(self, program: Program) -> tuple[str, ...]:
        """The variables whose gradients a program sends as factors; gradients that are accumulated are whole."""
        names = self._names if program.accumulation is Accumulation.NONE else ()
        return (*names, *self._taken_as_rows(program))

    def _taken_as_rows(self, program: Program) -> tuple[str, ...]:
        """The tables whose optimizers take rows: workers always send these.

        Raises:
            ValueError: the workers cannot.
        """
        if not (self._options.program_workers.are_several and program.trains):
            return ()
        names = tuple(n for n, variable in program.variables.items() if variable.update and variable.update.takes_rows)
        if names and self._options.exchange == "dense":
            raise ValueError(
                f"exchange='dense' has workers send whole gradients, and the optimizer takes rows of that of {names[0]!r}, which "
                "is looked up with sparse=True: leave exchange out, or look it up with sparse=False"
            )
        if names and not carries_between_workers(self._options.devices, ops.gather_factors):
            raise ValueError(
                f"the gradient of {names[0]!r} is sparse, and nothing gathers rows between workers with such devices: look it up "
                "with sparse=False"
            )
        return names

    @property
    def _may_send_factors(self) -> bool:
        return self._options.program_workers.are_several and self._factoring is not None

    @property
    def _factoring(self) -> FactorGradients | None:
        """The pass that leaves gradients as factors, if anything may be sent so."""
        if self._options.exchange == "dense" or sends_whole(self._options):
            return None
        found = next((one for one in self._options.pipeline if isinstance(one, FactorGradients)), None)
        if found is None or why_no_factors_for_workers(found.link, self._options.devices):
            return None
        return found

    def put_into(self, program: Program) -> Program:
        """Notes in a captured program of a training step which gradients are sent as factors, and adds a remark.

        Raises:
            CommunicationError: factors are asked for, and the workers would make different gradients of them; on all workers.
        """
        if sends_whole(self._options) and program.trains and program.accumulation is Accumulation.NONE:
            program = program.with_remarks(_WHOLE_FOR_SYMBOLS)
        if not self._concerns(program):
            rows = self._taken_as_rows(program)
            return program.evolve(workers=replace(program.workers, sent_as_factors=rows)) if rows else program
        if not self._is_held:
            self._found = list(self._candidates(program))
            self._choose(self._found)
        program = program.evolve(workers=replace(program.workers, sent_as_factors=self._names_for(program)))
        is_remarked = self._remark and program.accumulation is Accumulation.NONE
        return program.with_remarks(self._remark) if is_remarked else program

    def _choose(self, found: Sequence[Candidate]) -> None:
        """Chooses by the figures of all workers, or as if all had this one's where they cannot be asked, and keeps the former."""
        workers = self._options.program_workers
        own = self._figures(found) if self._told is None else self._told
        everyone = [own] * workers.num_workers
        is_asked = self.team is not None and self._is_in_call
        if self.team is not None and is_asked:
            self._told = own
            everyone = [
                Figures(**json.loads(text)) for text in self.team.words.kept_texts("factors", json.dumps(asdict(own)))
            ]
        with self.team.words.raising_alike() if self.team is not None else nullcontext():
            self._names, self._remark = chosen(found, everyone, workers, self._options.exchange)
        if self._remark and not is_asked:
            self._remark += "; taken as if all workers had as many examples as this one"
        self._is_held = self.team is None or is_asked

    def _figures(self, found: Sequence[Candidate]) -> Figures:
        rows, machine = {one.variable: one.num_rows for one in found}, product_facts(self._num_threads)
        link = self.team.link if self.team is not None else None
        if link is None or not found:
            return Figures(rows, machine, loaded=self._loaded)
        return Figures(rows, machine, link.seconds_per_byte, seconds_per_multiplication(), self._loaded)

    def _candidates(self, program: Program) -> Iterator[Candidate]:
        """The gradients of a captured program whose factors can be sent, in the order of the program's output."""
        factoring = self._factoring
        assert factoring is not None, "something may be sent as factors"
        fewest = factoring.min_elements if self._options.exchange == "auto" else 1
        variables = ViewedVariables(program)
        recognized = [sendable(graph, variables) for graph in program.shard_graphs]
        graphs = [shard for replica in range(program.num_replicas) for shard in program.graphs_run_by(replica)]
        for name, (node, gradient) in recognized[0].items():
            variable, value = program.variables[name], node.meta["val"]
            is_plain = (
                variable.update is not None and variable.update.elementwise and value.stride() == variable.strides
            )
            own = [found[name][1] for found in recognized if name in found]
            if not is_plain or value.numel() < fewest or len(own) < len(recognized):
                continue
            if any(len(program.graphs_run_by(r)) > 1 for r in program.present) and not gradient.form.takes_parts:
                continue
            rows = [(fake_rows(one) or [])[0] for one in own]
            number = sum(size_now(rows[shard].shape[0]) for shard in graphs)
            row_bytes = sum(kind.num_bytes for kind in sent_factors(program, name).rows)
            work = gradient.form.num_multiplications(value, 1)
            yield Candidate(name, self._bytes_sent(name, value), row_bytes, number, work)

    def _bytes_sent(self, name: str, gradient: torch.Tensor) -> int:
        """The bytes of a sum that is sent whole, or takes as long as what is sent of this one."""
        num_elements, dtype = gradient.numel(), gradient.dtype
        num_workers = self._options.program_workers.num_workers
        for compiler_pass in self._options.pipeline:
            if isinstance(compiler_pass, SendLargest):
                return compiler_pass.bytes_of_sum(num_elements, dtype, num_workers)
            if isinstance(compiler_pass, SendPayload):
                return compiler_pass.bytes_of_gradient(name, gradient, num_workers)
            if isinstance(compiler_pass, CompressExchange) and compiler_pass.narrows(dtype):
                return num_elements * NARROW[compiler_pass.dtype].itemsize
        return num_elements * dtype.itemsize
