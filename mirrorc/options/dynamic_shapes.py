"""The option ``dynamic``, for symbolic sizes of arguments, and options that exclude it."""

from __future__ import annotations

from mirrorc.messages.problem import problem
from mirrorc.options.step_options import StepOptions


def why_sizes_are_numbers(options: StepOptions, *, sends_factors: bool, front_end: str = "") -> str:
    """Why sizes of arguments cannot be symbols; empty if they can. ``front_end`` is empty before the first capture."""
    if sends_factors:
        return "workers may send each other factors of gradients, of which they know how many there are"
    if options.activation_memory is not None:
        return "Memory(activations=) bounds what a step of known size takes"
    if options.cuda_graphs:
        return "a CUDA graph is captured for the sizes of a step"
    if (front_end or options.ladder.names[0]) == "autograd":
        return "capture='autograd' runs the model once for each size"
    return ""


def sends_whole(options: StepOptions) -> bool:
    """True if workers send whole gradients, because a program with symbolic sizes does not know the rows of factors."""
    return options.program_workers.are_several and options.exchange == "auto" and bool(options.dynamic)


def check_dynamic(options: StepOptions) -> None:
    """Refuses ``dynamic=True`` with options that need constant sizes."""
    sends_factors = options.program_workers.are_several and options.exchange == "factors"
    why = why_sizes_are_numbers(options, sends_factors=sends_factors)
    if options.dynamic and why:
        fix = "leave dynamic= out; each new size is then compiled once"
        raise problem(ValueError, "MC1003: dynamic=True cannot make symbols of sizes here", why, fix)
