"""Search for a program within a bound on activation memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

from mirrorc.analysis.memory.activation_peaks import predicted_peak
from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.errors import CaptureError, PassError
from mirrorc.ir.program import Program
from mirrorc.passes import ChooseCheckpoints
from mirrorc.pipeline.protocol import Pass
from mirrorc.printing.values import size_text
from mirrorc.runtime.memory.report import MemoryReport

_MOST_TRIES = 6
"""The most tries after the program that keeps everything."""
_LEAST_STEP = 1 / 64
"""The least reduction from one try to the next, as a part of the bound."""
_MOST_NAMED = 3  # values at the peak, in an error

_Compiled = TypeVar("_Compiled")


class BoundedPrograms(Generic[_Compiled]):
    """Search for a program of a call that keeps its activations within a bound on each device.

    The pass predicts memory from the captured graph; the true size is known only when the regions are compiled.
    So the program that keeps everything comes first. While a program takes too much, the next one aims lower by the error.

    Args:
        bound: bytes as an int, or a part of the peak of the program that keeps everything.
        most_before: the largest such peak of earlier calls, as a short last batch has too few activations for a bound.
        lowered: runs passes on the captured program.

    Attributes:
        most: the larger of ``most_before`` and the peak of the program that keeps everything; set by `find`.
    """

    def __init__(
        self,
        bound: float,
        most_before: int,
        captured: Program,
        lowered: Callable[[Sequence[Pass], Sequence[str]], Program],
        compiled: Callable[[Program], _Compiled],
        memory: Callable[[Program, _Compiled], MemoryReport],
    ) -> None:
        self._bound, self._captured, self.most = bound, captured, most_before
        self._lowered, self._compiled, self._memory = lowered, compiled, memory

    def find(self, pipeline: Sequence[Pass]) -> tuple[Program, _Compiled]:
        """Finds the program and its compiled form.

        Raises:
            CaptureError: no pass sees the values that forward keeps.
            PassError: no program keeps within the bound.
        """
        self._refuse_opaque()
        program, compiled, report = self._made(pipeline, None, ())
        whole = _most(report)
        self.most = max(self.most, whole)
        limit = self._bound if isinstance(self._bound, int) else int(self._bound * self.most)
        if whole <= limit or not self._captured.shard_graphs:  # without examples, nothing is kept
            return program, compiled
        asked = f"activation_memory={self._bound!r} allows {size_text(limit)} for each device"
        remark = f"{asked}, and everything that forward keeps for backward would take {size_text(whole)}"
        target = predicted_peak(self._captured) * limit // whole
        least, report_of_least = whole, report
        for left in reversed(range(_MOST_TRIES)):
            target = target if left else 0  # the last try keeps as little as possible
            program, compiled, report = self._made(pipeline, target, (remark,))
            peak = _most(report)
            if peak <= limit:
                return program, compiled
            if peak < least:
                least, report_of_least = peak, report
            if target == 0:
                break
            target = max(0, target - max(peak - limit, int(limit * _LEAST_STEP)))
        raise PassError(_unreachable(asked, limit, least, report_of_least))

    def _made(
        self, pipeline: Sequence[Pass], target: int | None, remarks: Sequence[str]
    ) -> tuple[Program, _Compiled, MemoryReport]:
        told = [
            dataclasses.replace(one, max_bytes=target) if isinstance(one, ChooseCheckpoints) else one
            for one in pipeline
        ]
        program = self._lowered(told, remarks)
        compiled = self._compiled(program)
        return program, compiled, self._memory(program, compiled)

    def _refuse_opaque(self) -> None:
        if any(node.target in OPAQUE for graph in self._captured.shard_graphs for node in graph.nodes):
            raise CaptureError(
                "activation_memory cannot be kept to by a model that runs as plain PyTorch (capture='autograd'): what its "
                "forward keeps for backward is in no graph. Remedy: call torch.utils.checkpoint with use_reentrant=False in the "
                "model, and leave out activation_memory"
            )


def _most(report: MemoryReport) -> int:
    return max(device.own.activations for device in report.devices)


def _unreachable(asked: str, limit: int, least: int, report: MemoryReport) -> str:
    device = max(report.devices, key=lambda one: one.own.activations)
    peak = device.peak
    named = ", ".join(f"{one.name} ({size_text(one.num_bytes)})" for one in peak.largest[:_MOST_NAMED])
    where = f"{peak.call}, at {peak.operation}" if peak.operation else peak.call
    from_source = f" from {peak.source}" if peak.source else ""
    return (
        f"{asked}, but {size_text(least)} ({least} bytes) are the least that was reached by computing values again. The peak is "
        f"on {device.device} in {where}{from_source}; the largest values there are {named}. Remedy: allow {least} bytes, run "
        "each batch in more parts (microbatches=), or give smaller batches"
    )
