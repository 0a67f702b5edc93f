"""Searches for a program within a bound on each device's activation memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Generic, TypeVar

from mirrorc.analysis.memory.activation_peaks import predicted_peak
from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.errors import CaptureError, PassError
from mirrorc.ir.program import Program
from mirrorc.messages.problem import problem
from mirrorc.options.memory import bound_text
from mirrorc.passes import ChooseCheckpoints
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.printing.printed_values import size_text
from mirrorc.runtime.memory.report import MemoryReport

_MOST_TRIES = 6
_LEAST_STEP = 1 / 64
"""The smallest reduction from one try to the next, as a fraction of the bound."""
_MOST_NAMED = 3  # values at the peak, in an error

_Compiled = TypeVar("_Compiled")


class BoundedPrograms(Generic[_Compiled]):
    """Compiles programs with more and more recomputation until one is within the bound.

    The first program keeps all activations. `ChooseCheckpoints` predicts memory from the captured graph. The memory of
    the compiled regions (`report_memory`) calibrates the next prediction. ``most`` is the largest peak so far of a
    program without recomputation, of which a bound that is a float is a fraction.
    """

    def __init__(
        self,
        bound: float,
        most_before: int,
        captured: Program,
        lowered: Callable[[Sequence[Pass], Sequence[str], Instrument], Program],
        compiled: Callable[[Program], _Compiled],
        memory: Callable[[Program, _Compiled], MemoryReport],
    ) -> None:
        self._bound, self._captured, self.most = bound, captured, most_before
        self._lowered, self._compiled, self._memory = lowered, compiled, memory

    def find(self, pipeline: Sequence[Pass]) -> tuple[Program, _Compiled]:
        """Raises PassError if no program is within the bound."""
        self._refuse_opaque()
        choice = _Choice()
        program = self._lowered(_bounded(pipeline, None), (), choice)
        compiled = self._compiled(program)
        report = self._memory(program, compiled)
        whole = _most(report)
        self.most = max(self.most, whole)
        limit = self._bound if isinstance(self._bound, int) else int(self._bound * self.most)
        if whole <= limit or not self._captured.shard_graphs:  # without examples, nothing is kept
            return program, compiled
        asked = f"activations={bound_text(self._bound)} allows {size_text(limit)} for each device"
        remark = f"{asked}, and everything that forward keeps for backward would take {size_text(whole)}"
        predicted = choice.predicted_peak()
        target = predicted * limit // whole
        least, report_of_least = whole, report
        for tries_left in reversed(range(_MOST_TRIES)):
            target = target if tries_left else 0  # the last try keeps as little as possible
            program = self._lowered(_bounded(pipeline, target), (remark,), choice)
            before, predicted = predicted, choice.predicted_peak()
            if predicted >= before:
                break
            compiled = self._compiled(program)
            report = self._memory(program, compiled)
            peak = _most(report)
            if peak <= limit:
                return program, compiled
            if peak < least:
                least, report_of_least = peak, report
            if predicted > target:  # the least that can be predicted
                break
            step = max(peak - limit, int(limit * _LEAST_STEP))
            target = max(0, min(predicted * limit // peak, predicted - step))
        raise _unreachable(asked, least, report_of_least)

    def _refuse_opaque(self) -> None:
        if any(node.target in OPAQUE for graph in self._captured.shard_graphs for node in graph.nodes):
            raise problem(
                CaptureError,
                "MC1003: Memory(activations=) cannot be kept to by a model that runs as plain PyTorch (capture='autograd')",
                "what its forward keeps for backward is in no graph",
                "leave activations= out, and call torch.utils.checkpoint(..., use_reentrant=False) in the model",
            )


class _Choice(Instrument):
    def __init__(self) -> None:
        self._program: Program | None = None

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        if isinstance(compiler_pass, ChooseCheckpoints):
            self._program = after

    def predicted_peak(self) -> int:
        assert self._program is not None, "the options ask for the pass"
        return predicted_peak(self._program)


def _bounded(pipeline: Sequence[Pass], max_bytes: int | None) -> list[Pass]:
    return [
        replace(entry, max_bytes=max_bytes) if isinstance(entry, ChooseCheckpoints) else entry for entry in pipeline
    ]


def _most(report: MemoryReport) -> int:
    return max(device.peak.num_bytes for device in report.devices)


def _unreachable(asked: str, least: int, report: MemoryReport) -> PassError:
    device = max(report.devices, key=lambda device: device.peak.num_bytes)
    peak = device.peak
    named = ", ".join(f"{value.name} ({size_text(value.num_bytes)})" for value in peak.largest[:_MOST_NAMED])
    where = f"{peak.call}, at {peak.operation}" if peak.operation else peak.call
    return problem(
        PassError,
        f"MC1508: {asked}, and recomputing values reaches {size_text(least)} ({least} bytes) at least",
        f"the peak is on {device.device} in {where}; the largest values there are {named}",
        (f"memory=mirrorc.Memory(activations={least})", "more parts of each batch, microbatches=, or smaller batches"),
        at=peak.source,
    )
