"""Descriptions of passes, for the command line and the site."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, cast

from mirrorc.pipeline.protocol import Pass, traits_of


@dataclass(frozen=True)
class PassDescription:
    """A pass in words.

    Attributes:
        stages: ``CAPTURED``, or ``REDUCED to UPDATED``.
        left_out_of: programs that are compiled without the pass.
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
