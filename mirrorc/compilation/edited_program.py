"""Programs that users have edited: compared with what is captured, and completed by the passes that are left."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Program, Region, Stage
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import listed
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.printing.printed_values import type_of
from mirrorc.serialization import body_text, load_program
from mirrorc.verifier.verifier import verify

_EDITABLE = ("buckets", "shard_graphs", "graph", "device_graphs", "regions", "remarks", "optimizer_groups", "passes")
_OF_A_CALL = ("num_examples", "microbatches", "accumulation", "shard_of_replica", "shard_of_microbatch")


class EditedProgram:
    """The program of `mirrorc.compile`'s option ``program``: a file, or a program."""

    def __init__(self, source: str | os.PathLike[str] | Program) -> None:
        """Raises ValueError if the file holds no program, and OSError if it cannot be read."""
        self._name = "program=" if isinstance(source, Program) else os.fspath(source)
        self._edited = source if isinstance(source, Program) else load_program(source)
        self._has_run = False

    def continued(self, captured: Program, pipeline: Sequence[Pass]) -> tuple[Program, Sequence[Pass]]:
        """The edited program and the passes that are left. For a later call of other sizes, the arguments, with a remark.

        Raises:
            ValueError: the program is not one of this model, call and pipeline, and says in what it differs.
            VerifyError: the program breaks a rule, or computes something else.
        """
        done, names = self._edited.passes, tuple(entry.name for entry in pipeline)
        if done != names[: len(done)]:
            wrong = next((i for i, name in enumerate(done) if names[i : i + 1] != (name,)), 0)
            raise self._refusal(
                f"its pass {wrong + 1} is {done[wrong]}, and that of this step {names[wrong] if wrong < len(names) else 'none'}",
                "compile with the options that the program was made with",
            )
        expected = run_passes(captured, pipeline[: len(done)])
        differing = list(_differences_of_calls(self._edited, expected))
        if differing and self._has_run:
            return captured.with_remarks(f"not the program of {self._name}: {listed(differing)}"), pipeline
        differing = [*_differences_of_steps(self._edited, expected), *differing]
        if differing:
            raise self._refusal(
                listed(differing), "edit buckets and calls of regions alone, not what a region computes"
            )
        verify(self._edited, before=expected)
        self._has_run = True
        remark = f"the program of {self._name} takes the place of what {len(done)} passes make"
        edited = self._edited.evolve(optimizer_groups=expected.optimizer_groups).with_remarks(remark)
        return edited, pipeline[len(done) :]

    def _refusal(self, why: str, fix: str) -> ValueError:
        return problem(ValueError, f"MC4102: {self._name} is no program of this step", why, fix)


def _differences_of_calls(edited: Program, expected: Program) -> Iterator[str]:
    """What another batch makes different."""
    for name in _OF_A_CALL:
        if getattr(edited, name) != getattr(expected, name):
            yield f"{name} is {getattr(edited, name)}, not {getattr(expected, name)}"
    types, others = (dict(_argument_types(program)) for program in (edited, expected))
    for name in [*others, *(name for name in types if name not in others)]:
        if types.get(name) != others.get(name):
            yield f"argument {name} is {types.get(name, 'missing')}, not {others.get(name, 'there')}"


def _argument_types(program: Program) -> Iterator[tuple[str, str]]:
    for graph, whose in zip(program.graphs(), program.device_graphs or [""] * len(program.graphs()), strict=False):
        for node in graph.nodes:
            if node.op == "placeholder":
                yield f"{node.target} {whose}".rstrip(), type_of(node.meta.get("val"))
        for node in calls_to(graph, ops.argument):
            yield f"{node.kwargs['name']} of replica {node.kwargs['replica']}", type_of(node.meta.get("val"))


def _differences_of_steps(edited: Program, expected: Program) -> Iterator[str]:
    for name in (field.name for field in fields(Program)):
        if name not in (*_EDITABLE, *_OF_A_CALL) and getattr(edited, name) != getattr(expected, name):
            yield from _differing_entries(name, getattr(edited, name), getattr(expected, name))
    for name in [*expected.regions, *(name for name in edited.regions if name not in expected.regions)]:
        mine, other = edited.regions.get(name), expected.regions.get(name)
        if mine is None or other is None:
            yield f"region {name} is {'missing' if mine is None else 'of another step'}"
        elif not _are_alike(mine, other):
            yield f"region {name} computes something else"
    captured = [[*map(body_text, p.shard_graphs)] if p.stage is Stage.CAPTURED else [] for p in (edited, expected)]
    if captured[0] != captured[1]:
        yield "the captured graph computes something else"


def _differing_entries(title: str, mine: object, other: object) -> Iterator[str]:
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        names = [name for name in {**other, **mine} if mine.get(name) != other.get(name)]
        yield f"{title}: {listed(names)} differ" if names else f"{title} come in another order"
    else:
        yield f"{title} is {mine!s:.60}, not {other!s:.60}"


def _are_alike(mine: Region, other: Region) -> bool:
    return mine.phase == other.phase and body_text(mine.graph_module.graph) == body_text(other.graph_module.graph)
