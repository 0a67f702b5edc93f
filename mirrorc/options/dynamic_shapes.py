"""The option ``dynamic``, for symbolic sizes of arguments, and options that exclude it."""

from __future__ import annotations

from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions


def why_sizes_are_numbers(options: StepOptions, front_end: str = "") -> str:
    """Why sizes of arguments cannot be symbols; empty if they can. ``front_end`` is empty before the first capture."""
    if options.activation_memory is not None:
        return "Memory(activations=) bounds what a step of known size takes"
    if options.cuda_graphs:
        return "a CUDA graph is captured for the sizes of a step"
    if (front_end or options.ladder.names[0]) == "autograd":
        return "capture='autograd' runs the model once for each size"
    return ""


def check_dynamic(options: StepOptions) -> None:
    why = why_sizes_are_numbers(options)
    if options.dynamic and why:
        fix = "leave dynamic= out; each new size is then compiled once"
        raise problem(ValueError, "MC1003: dynamic=True cannot make symbols of sizes here", why, fix)
