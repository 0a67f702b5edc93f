"""Figures of a step for loggers."""

from __future__ import annotations

from mirrorc.runtime.memory.report import MemoryReport
from mirrorc.runtime.profiling.explanation import Explanation


def metrics_of(explanation: Explanation, memory: MemoryReport | None = None) -> dict[str, float]:
    """The figures of `mirrorc.Step.metrics`, without counts of calls."""
    times = {"step": explanation.step_ms, "compute": explanation.compute_ms, "exposed": explanation.exposed_ms}
    times |= {"hidden": explanation.hidden_ms, **explanation.parts_ms}
    moved = [bucket for bucket in explanation.buckets if bucket.link]
    figures = {f"time/{name}_ms": ms for name, ms in times.items()}
    figures["communication/sent_bytes"] = float(sum(bucket.num_bytes for bucket in moved))
    figures["communication/launches"] = float(len(moved))
    if memory is not None:
        figures["memory/peak_bytes"] = float(memory.total)
        figures["memory/activations_bytes"] = float(memory.activations)
    return figures
