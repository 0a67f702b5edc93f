"""Programs that users have edited. They are compared with the captured program, and completed by the remaining passes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields

from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, replica_of
from mirrorc.ir.operation import Kind, operation_of
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import listed
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.printing.printed_values import type_of
from mirrorc.serialization import body_text, load_program
from mirrorc.verifier.verifier import verify

_OF_CALLS = ("num_examples", "microbatches", "shard_of_replica", "shard_of_microbatch")
_EDITABLE = ("buckets", "shard_graphs", "graph", "device_graphs", "regions", "remarks", "optimizer_groups", "passes")
_MAY_MOVE = (Kind.SOURCE, Kind.REGION, Kind.FACTORED, Kind.PACK, Kind.LAUNCH, Kind.WAIT, Kind.UPDATE)
_OF_PLACES = ("bucket", "buckets", "replica")  # keywords that say where, not what

_WORDS = {
    Accumulation.NONE: "updates",
    Accumulation.ADDS: "accumulates",
    Accumulation.ENDS: "accumulates",
    Accumulation.GRADIENTS: "leaves gradients to the user",
    Accumulation.FORWARD: "is forward of a module",
}


class EditedProgram:
    """The program of `mirrorc.compile`'s option ``program``: a file, or a program."""

    def __init__(self, source: str | os.PathLike[str] | Program) -> None:
        """Raises ValueError if the file cannot be read, or has no program."""
        self._name = "the given program" if isinstance(source, Program) else f"the program of {os.fspath(source)}"
        try:
            self._edited = source if isinstance(source, Program) else load_program(source)
        except OSError as error:
            fix = "mirrorc.compile(..., program='program.mirror.gz'), a file of step.program.save(...)"
            raise problem(
                ValueError, f"MC7102: cannot read the file of program={source!r}", f"{error.strerror}", fix
            ) from error
        self._takes_part = False  # in the current compilation
        self._is_compiled = False  # once it is, calls of other sizes compile without it

    def note_compiled(self) -> None:
        self._is_compiled |= self._takes_part

    def continued(self, captured: Program, pipeline: Sequence[Pass]) -> tuple[Program, Sequence[Pass]]:
        """The edited program and the remaining passes; for a call of another kind ``captured``, with a remark, and all
        passes.

        Raises ValueError for a program of another model, call or pipeline, and VerifyError if it computes something
        else.
        """
        self._takes_part = False
        if self._edited.accumulation is not captured.accumulation:
            return self._without(captured, f"this call {_WORDS[captured.accumulation]}"), pipeline
        done, names = self._edited.passes, tuple(entry.name for entry in pipeline)
        if done != names[: len(done)]:
            wrong = next((i for i, name in enumerate(done) if names[i : i + 1] != (name,)), 0)
            other = names[wrong] if wrong < len(names) else "none"
            raise self._refusal(f"its pass {wrong + 1} is {done[wrong]}, and that of this step {other}", _SAME_OPTIONS)
        expected = run_passes(captured, pipeline[: len(done)])
        other_step = list(_differences_of_steps(self._edited, expected))
        other_call = list(_differences_of_calls(self._edited, expected))
        if (other_step or other_call) and self._is_compiled:  # such as a layer that is frozen now
            return self._without(captured, listed([*other_call, *other_step])), pipeline
        if other_step or other_call:
            raise self._refusal(listed(other_step or other_call), _SAME_OPTIONS if other_step else _SAME_BATCH)
        other_work = list(_differences_of_work(self._edited, expected))
        if other_work:
            raise self._refusal(listed(other_work), "edit buckets, and the order of calls, not what they compute")
        verify(self._edited, before=expected)
        remark = f"{self._name} takes the place of what {len(done)} passes make"
        edited = self._edited.evolve(optimizer_groups=expected.optimizer_groups).with_remarks(remark)
        self._takes_part = True
        return edited, pipeline[len(done) :]

    def _without(self, captured: Program, why: str) -> Program:
        return captured.with_remarks(f"{self._name} does not take part: {why}")

    def _refusal(self, why: str, fix: str) -> ValueError:
        return problem(ValueError, f"MC4102: {self._name} is not of this step", why, fix)


_SAME_OPTIONS = "compile the same model, with the options that the program was made with"
_SAME_BATCH = "call the step first with a batch of the sizes that the program was made for"


def _differences_of_steps(edited: Program, expected: Program) -> Iterator[str]:
    if edited.stage is not expected.stage:
        yield f"its stage is {edited.stage.name}, not {expected.stage.name}"
    for name in (field.name for field in fields(Program)):
        if name not in ("stage", *_EDITABLE, *_OF_CALLS):
            yield from _differing_entries(name, getattr(edited, name), getattr(expected, name))


def _differing_entries(title: str, mine: object, other: object) -> Iterator[str]:
    if mine == other:
        return
    if isinstance(mine, Mapping) and isinstance(other, Mapping):
        names = [str(name) for name in {**other, **mine} if mine.get(name) != other.get(name)]
        yield f"{title}: {listed(names)} differ" if names else f"{title} come in another order"
    elif isinstance(mine, tuple) and isinstance(other, tuple) and len(mine) == len(other):
        pairs = enumerate(zip(mine, other, strict=True))
        yield next(f"{title}[{i}] is {one}, not {two}" for i, (one, two) in pairs if one != two)
    elif isinstance(mine, tuple) and isinstance(other, tuple):
        yield f"it has {len(mine)} {title}, not {len(other)}"
    else:
        yield f"{title} is {mine}, not {other}"


def _differences_of_calls(edited: Program, expected: Program) -> Iterator[str]:
    for name in _OF_CALLS:
        if getattr(edited, name) != getattr(expected, name):
            yield f"{name} is {getattr(edited, name)}, not {getattr(expected, name)}"
    types, others = (dict(_argument_types(program)) for program in (edited, expected))
    for name in others:
        if types.get(name) != others[name]:
            yield f"argument {name} is {types.get(name, 'missing')}, not {others[name]}"


def _argument_types(program: Program) -> Iterator[tuple[str, str]]:
    names = [*program.device_graphs] or [""] * len(program.graphs())
    for graph, device in zip(program.graphs(), names, strict=True):
        for node in graph.nodes:
            if node.op == "placeholder":
                yield f"{node.target} {device}".rstrip(), type_of(node.meta.get("val"))
        for node in calls_to(graph, ops.argument):
            yield f"{node.kwargs['name']} of replica {node.kwargs['replica']}", type_of(node.meta.get("val"))


def _differences_of_work(edited: Program, expected: Program) -> Iterator[str]:
    bodies, others = (
        {name: (region.phase, body_text(region.graph_module.graph)) for name, region in program.regions.items()}
        for program in (edited, expected)
    )
    for name in [*others, *(name for name in bodies if name not in others)]:
        if bodies.get(name) != others.get(name):
            why = "is missing" if name not in bodies else "is new" if name not in others else "computes something else"
            yield f"region {name} {why}"
    captured = [[*map(body_text, p.shard_graphs)] if p.stage is Stage.CAPTURED else [] for p in (edited, expected)]
    if captured[0] != captured[1]:
        yield "the captured graph computes something else"
    mine, other = (dict.fromkeys(_settings(program)) for program in (edited, expected))
    yield from (f"{text} is new" for text in mine if text not in other)
    yield from (f"{text} is missing" for text in other if text not in mine)


def _settings(program: Program) -> Iterator[str]:
    for graph in program.graphs():
        for node in graph.nodes:
            operation = operation_of(node.target)
            if operation is not None and operation.kind not in _MAY_MOVE:
                given = [f"{key}={value}" for key, value in node.kwargs.items() if key not in _OF_PLACES]
                yield f"{operation.name}({', '.join(given)}) of replica {replica_of(node)}"
