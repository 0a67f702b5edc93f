"""The interfaces of passes and instruments, and descriptions of passes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Protocol, cast, runtime_checkable

from mirrorc.ir.program import Program, Property, Stage


@runtime_checkable
class Pass(Protocol):
    """A pass of the compiler: a frozen dataclass whose fields are its options. `Traits` lists optional attributes.

    Attributes:
        name: the name of its file, in kebab-case.
    """

    @property
    def name(self) -> str: ...
    @property
    def input_stage(self) -> Stage: ...
    @property
    def output_stage(self) -> Stage: ...

    def run(self, program: Program) -> Program:
        """Must not change its argument."""
        ...


@dataclass(frozen=True)
class Traits:
    """The optional attributes of a pass.

    Attributes:
        latest_input_stage: the last accepted stage; by default the input stage, or a stage that refines it.
        requires: properties that its input must have.
        establishes: properties of its output, and of all later programs.
        precedes: properties that its input must not have yet.
        changes_dataflow: it intentionally changes the computation, so the verifier compares no expressions.
        changes_bits: how it may change the bits of a step's results, as a clause: ``"terms are added in another
            order"``. ``exact_order=True`` leaves the pass out. If it changes nothing, it must return the same graphs.
        trains_only: evaluations leave it out, because it is only about gradients, buckets or updates.
        updates_only: programs without updates leave it out, because it is only about updates.
        sums_only: accumulating programs leave it out, because it is only about sums over replicas.
    """

    latest_input_stage: Stage
    requires: tuple[Property, ...] = ()
    establishes: tuple[Property, ...] = ()
    precedes: tuple[Property, ...] = ()
    changes_dataflow: bool = False
    changes_bits: str = ""
    trains_only: bool = False
    updates_only: bool = False
    sums_only: bool = False


def traits_of(compiler_pass: Pass) -> Traits:
    first, last = compiler_pass.input_stage, compiler_pass.output_stage
    refining = [stage for stage in Stage if stage.refines is first and last > first]
    names = [trait.name for trait in fields(Traits) if hasattr(compiler_pass, trait.name)]
    declared = {name: getattr(compiler_pass, name) for name in names}
    return Traits(**{"latest_input_stage": max([first, *refining]), **declared})


class Instrument:
    """Observes a run of passes; subclasses override methods as needed."""

    def start(self, program: Program) -> None:
        """Called before the first pass; an exception stops the compilation."""

    def refused(self, program: Program, error: Exception) -> None:
        """Called with an error of an instrument's `start`, before the error is raised."""

    def after_pass(self, compiler_pass: Pass, before: Program, after: Program, seconds: float) -> None:
        """Called after each pass; an exception stops the compilation."""

    def failed(self, compiler_pass: Pass, before: Program, error: Exception) -> None:
        """Called with an error of a pass, or of an instrument's `after_pass`, before the error is raised."""

    def finish(self, program: Program) -> None:
        """Called after the last pass."""


@dataclass(frozen=True)
class PassDescription:
    """A pass in words.

    Attributes:
        stages: ``CAPTURED``, or ``REDUCED to UPDATED``.
    """

    stages: str
    left_out_of: str
    options: str
    docstring: str

    @classmethod
    def of(cls, compiler_pass: Pass) -> PassDescription:
        stages = dict.fromkeys((compiler_pass.input_stage.name, compiler_pass.output_stage.name))
        options = [_option(field) for field in fields(cast(Any, compiler_pass)) if field.init]
        return cls(
            " to ".join(stages),
            ", ".join(_left_out_of(compiler_pass)),
            ", ".join(options),
            inspect.getdoc(type(compiler_pass)) or "",
        )


def _left_out_of(compiler_pass: Pass) -> Iterator[str]:
    traits = traits_of(compiler_pass)
    if traits.trains_only or traits.updates_only or traits.sums_only:
        yield "evaluations"
    if traits.updates_only or traits.sums_only:
        yield "accumulating calls"
    if traits.updates_only:
        yield "calls for gradients"
    if traits.changes_bits:
        yield "exact_order=True"


def _option(field: Field[Any]) -> str:
    return field.name if field.default is MISSING else f"{field.name}={field.default!r}"
