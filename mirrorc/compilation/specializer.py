"""Looks up compiled programs by kind and purpose of a call, and compiles on a miss.

A new shape has a new key (`Specializer._key`) and is compiled, unless a program with symbolic sizes fits.
"""

from __future__ import annotations

import functools
import logging
from collections import Counter
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch

from mirrorc.analysis.communication.worker_meetings import RowsElsewhere
from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.call.changing_inputs import ChangingNumbers, ChangingSizes, without_numbers_of_examples
from mirrorc.capture.call.shards import Shards, shard_types, split_call
from mirrorc.capture.diagnostics.capture_errors import HooksMissingError, LoneExampleError
from mirrorc.capture.model.hf_output_hooks import install_capturing_hooks
from mirrorc.capture.model.model_state import ModelState
from mirrorc.compilation.call_kind import Purpose
from mirrorc.compilation.choices.worker_choices import WorkerChoices
from mirrorc.compilation.program_cache import Key, Specialization, Specializations
from mirrorc.compilation.step_compiler import StepCompiler
from mirrorc.errors import CaptureError, CommunicationError
from mirrorc.messages.problem import problem
from mirrorc.options.dynamic_shapes import why_sizes_are_numbers
from mirrorc.options.step_options import StepOptions
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.team.team import Team
from mirrorc.torch_internals import attribute_source, torch_modes, without_dispatch_modes

logger = logging.getLogger(__name__)

_CUT_BY_EXAMPLES = "microbatches are cut by numbers of examples"  # the reason for numbers instead of symbols
_MOST_KINDS = 4096  # kinds of calls with a known number of other workers' rows


class Specializer:
    """The compiled programs of a step; ``team`` is None for a process on its own."""

    def __init__(
        self,
        options: StepOptions,
        model: ModelState,
        state: StepState,
        num_threads: int,
        interrupts: InterruptGuard,
        team: Team | None,
    ) -> None:
        self._options = options
        self._model = model
        self._interrupts = interrupts  # deferred during Dynamo's guards, which take any error for a failure
        are_numbers = options.dynamic is False and not why_sizes_are_numbers(options)
        self._caches = {
            purpose: Specializations(purpose.value, has_numbers_as_sizes=are_numbers) for purpose in Purpose
        }
        self._lone: set[Key] = set()  # call keys with a shard of one example that was refused
        self._rows_elsewhere: dict[Key, RowsElsewhere] = {}
        self._numbers = ChangingNumbers(can_be_inputs=not options.cuda_graphs)  # a graph would keep its first numbers
        self.sizes = ChangingSizes(dynamic=options.dynamic)
        self.num_compilations: Counter[Purpose] = Counter()
        self.choices = WorkerChoices(options, num_threads, team)
        self._compiler = StepCompiler(options, model, state, num_threads, self._numbers, self.choices, team)

    def specialization_for(
        self, call: Call, shards: Shards, *, is_stale: bool = False, purpose: Purpose = Purpose.STEP
    ) -> tuple[Specialization, Shards]:
        """Splits the batch among fewer replicas if a shard of one example is refused, or results in nan."""
        with self._autocast():
            return self._cached_or_compiled(call, shards, is_stale, purpose)

    def _autocast(self) -> AbstractContextManager[object]:
        """The context of captures. Its modes are part of the cache key."""
        if self._options.autocast is None:
            return nullcontext()
        return torch.autocast(self._options.devices[0].torch_device.type, self._options.autocast)

    def _cached_or_compiled(
        self, call: Call, shards: Shards, is_stale: bool, purpose: Purpose
    ) -> tuple[Specialization, Shards]:
        cache = self._caches[purpose]
        parts = self._options.microbatches if purpose.trains else 1
        by_twos = functools.partial(split_call, call, len(shards.num_examples), fewest=2, microbatches=parts)
        shards = self._with_rows(call, shards, purpose)
        key = self._key(call, shards, purpose)
        if shards.have_one_example and key in self._lone:
            shards = self._with_rows(call, by_twos(), purpose)
            key = self._key(call, shards, purpose)
        try:
            self._interrupts.hold()
            cached = cache.get(key, call.plain)
            if cached is None:
                about = _kind_of_call(purpose, shards)
                symbolic = self.sizes.compiled_dims(call, about, has_microbatches=bool(shards.microbatches))
                cached = cache.fitting(key, call.plain, shards, symbolic) if symbolic else None
        finally:
            self._interrupts.let_go()
        program = cached.executor.program if cached is not None else None
        is_usable = program and not self._compiler.states[purpose].needs_other_buckets(program, is_stale=is_stale)
        if cached is not None and is_usable:
            trained = cached.executors[-1].program
            self.choices.settle(trained)
            if self.choices.apply_to(trained):
                return cached, shards
        key = self._promote_changed_numbers(cache, key, call, shards, purpose) if cached is None else key
        try:
            self._interrupts.hold()
            changes = cache.changes(key, call, shards)
        finally:
            self._interrupts.let_go()
        try:
            with without_dispatch_modes():  # a dispatch mode would mistake traced values for computed ones
                new: Specialization | None = self._compiled(call, shards, changes, purpose)
        except HooksMissingError:
            if not install_capturing_hooks(self._options.model):
                raise
            return self._cached_or_compiled(call, shards, is_stale, purpose)
        except CaptureError:
            if not shards.have_one_example or by_twos().have_one_example:
                raise
            new = None
        if new is None:  # outside of the handler: a second error would name the first one as its context
            self._lone.add(key)
            try:
                return self._cached_or_compiled(call, shards, is_stale, purpose)
            except CaptureError:
                self._lone.discard(key)
                raise
        try:
            self._interrupts.hold()
            is_true = new.guards.hold()
        finally:
            self._interrupts.let_go()
        if not is_true:  # else every step would compile
            raise problem(
                CaptureError,
                f"MC2601: what {type(self._options.model).__name__} reads changes while it is captured",
                f"no graph of it stays true: {new.guards.broken()}",
                "read it in your loop, between calls, and pass it as an argument",
            )
        if self._model.lacks_carried():
            key = self._key(call, shards, purpose)
        self.num_compilations[purpose] += 1
        reasons = [*self._numbers.reasons, *self.sizes.reasons]
        for dropped in cache.add(key, call, new, cached, self._model.plain_attributes(), reasons):
            dropped.release()
        self._compiler.keep_only([executor.program for cache in self._caches.values() for executor in cache])
        return new, shards

    def _compiled(self, call: Call, shards: Shards, changes: str, purpose: Purpose) -> Specialization:
        about = _kind_of_call(purpose, shards)
        is_lone = shards.have_one_example
        why = self._why_numbers(shards, purpose)
        is_evaluation = purpose is Purpose.EVALUATION and not why
        wished = self.sizes.symbolic_dims(call, about, has_one_example=is_lone, is_evaluation=is_evaluation)
        symbolic = without_numbers_of_examples(call, wished) if shards.microbatches else wished
        if wished and (why or not symbolic):
            remark = _remark_on_numbers(why or _CUT_BY_EXAMPLES)
            return self._compiler.compile(call, shards, changes, purpose, on_sizes=remark)
        if symbolic:
            remark = f"numbers of examples are numbers: {_CUT_BY_EXAMPLES}" if symbolic != wished else ""
            inputs = self._numbers.inputs
            try:
                new = self._compiler.compile(call, shards, changes, purpose, symbolic, remark)
                if new.fits(shards) if new.sizes is not None else self._are_alike(shards):
                    self.sizes.note_program(call, about, symbolic, has_microbatches=bool(shards.microbatches))
                    return new
                why = "shards of these sizes need other graphs"
            except (LoneExampleError, HooksMissingError, CommunicationError):
                raise
            except Exception as error:
                logger.debug("not compiled with symbolic sizes", exc_info=error)
                why = next(iter(str(error).splitlines()), type(error).__name__)
            remark = _remark_on_numbers(why)
            new = self._compiler.compile(call, shards, changes, purpose, on_sizes=remark)  # raises if that is no reason
            if self._numbers.inputs == inputs:  # else these sizes may be symbols, now that fewer numbers are inputs
                self.sizes.give_up(call, about, why, has_one_example=is_lone)
            return new
        why = self.sizes.why_not(call, about, has_one_example=is_lone)
        return self._compiler.compile(call, shards, changes, purpose, on_sizes=_remark_on_numbers(why))

    def _are_alike(self, shards: Shards) -> bool:
        each = zip(shards.tensors, self._options.devices, shards.num_examples, strict=True)
        return len({shard_types(tensors, device.torch_device) for tensors, device, count in each if count}) <= 1

    def _why_numbers(self, shards: Shards, purpose: Purpose) -> str:
        if shards.have_unequal_parts:
            return "microbatches of a shard have different numbers of examples, and each number has a graph"
        return why_sizes_are_numbers(self._options, self._compiler.front_ends.get(purpose, ""))

    def _promote_changed_numbers(
        self, cache: Specializations, key: Key, call: Call, shards: Shards, purpose: Purpose
    ) -> Key:
        freed = [attribute_source(path, name) for path, name in self._model.free_changed_numbers()]
        self._numbers.add([*freed, *cache.changed_numbers(call.structure, call.plain)])
        return self._key(call, shards, purpose) if freed else key

    def note_rows(self, call: Call, shards: Shards, purpose: Purpose, elsewhere: RowsElsewhere) -> None:
        """Records the numbers of rows gathered by other workers, because shapes in programs depend on them."""
        with self._autocast():
            self._rows_elsewhere[self._key(call, replace(shards, rows_elsewhere=None), purpose)] = elsewhere
        if len(self._rows_elsewhere) > _MOST_KINDS:
            del self._rows_elsewhere[next(iter(self._rows_elsewhere))]

    def _with_rows(self, call: Call, shards: Shards, purpose: Purpose) -> Shards:
        if not self._rows_elsewhere or not (purpose.trains or self._options.is_module):
            return shards
        rows = self._rows_elsewhere.get(self._key(call, replace(shards, rows_elsewhere=None), purpose))
        return replace(shards, rows_elsewhere=rows)

    @property
    def num_programs(self) -> int:
        return sum(map(len, self._caches.values()))

    def release(self) -> None:
        """Frees GPU memory held for later steps."""
        for cache in self._caches.values():
            for executor in cache:
                executor.release()

    def _key(self, call: Call, shards: Shards, purpose: Purpose) -> Key:
        devices = self._options.devices
        types = (shard_types(tensors, d.torch_device) for tensors, d in zip(shards.tensors, devices, strict=True))
        of_optimizers = self._options.optimizers.structure() if purpose.has_optimizer else ()
        parts, rows = (*types, shards.microbatches), shards.rows_elsewhere
        modes = (torch_modes(), call.differentiated)
        return call.structure, parts, self._model.fingerprint(), of_optimizers, modes, rows


def _kind_of_call(purpose: Purpose, shards: Shards) -> str:
    return f"{purpose.value} on {len(shards.num_examples)}"


def _remark_on_numbers(why: str) -> str:
    return f"sizes of arguments are numbers: {why}" if why else ""
