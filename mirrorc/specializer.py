"""Compiles a step for each kind and purpose of call (capture, passes, regions), and caches the compiled programs.

It is long, as it has the whole way from a call to what runs it.
"""

from __future__ import annotations

import functools
import itertools
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn

from mirrorc.capture.arguments import Call
from mirrorc.capture.changing_arguments import CallKind
from mirrorc.capture.changing_numbers import ChangingNumbers
from mirrorc.capture.errors import HooksMissingError, LoneExampleError
from mirrorc.capture.evaluation_call import EvaluationCall
from mirrorc.capture.model_state import ModelState
from mirrorc.capture.output_capturing import install_capturing_hooks
from mirrorc.capture.shard_types import shard_types
from mirrorc.capture.shards import Shards, split_call
from mirrorc.capture.specialize import CapturedProgram, capture_program
from mirrorc.capture.training_call import TrainingCall
from mirrorc.capture_warnings import CaptureWarnings
from mirrorc.errors import CaptureError, PassError
from mirrorc.exchange_choice import ExchangeChoice
from mirrorc.instruments import instruments_for
from mirrorc.ir.nodes import names_of_called_regions
from mirrorc.ir.program import Program, Stage
from mirrorc.ir.variables import Synchronization
from mirrorc.measured_sizes import MeasuredSizes
from mirrorc.options import StepOptions
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.planned_sizes import PlannedSizes
from mirrorc.printing.wording import counted
from mirrorc.progress import Progress
from mirrorc.purposes import Purpose, states_of
from mirrorc.runtime.codegen.regions import RegionCompiler
from mirrorc.runtime.execution.cuda_graphs import CudaCapturer, StepGraph, check_captured_program
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.execution.interrupts import InterruptGuard
from mirrorc.runtime.profiling.clocks import clock_for
from mirrorc.runtime.profiling.recorder import Recorder
from mirrorc.runtime.state.open_states import parameters_in_training
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.state.unfinished_step import finish_all_steps
from mirrorc.runtime.workers.team import Team
from mirrorc.shared_memory import refuse_shared_memory
from mirrorc.specializations import Key, Specialization, Specializations
from mirrorc.torch_internals import attribute_source, is_dense, torch_modes

logger = logging.getLogger(__name__)


class Specializer:
    """Compiles a step for each kind of call, and looks compiled programs up for later calls.

    Args:
        options: the options of the step.
        model: the user's model, and the state that its graph depends on.
        state: the state that all specializations of the step share.
        num_threads: the number of threads of each device.
        interrupts: keeps Ctrl-C while Dynamo's guards are checked, which take an error in a function that they call for a change.

    Attributes:
        team: the workers that train together; None for a process on its own.
        exchange, sizes: choose how they send gradients, and how large buckets are.
    """

    def __init__(
        self, options: StepOptions, model: ModelState, state: StepState, num_threads: int, interrupts: InterruptGuard
    ) -> None:
        self._options = options
        self._model = model
        self._num_threads = num_threads
        self._interrupts = interrupts
        names = ", ".join(device.name for device in options.devices)
        self._what = f"{type(options.model).__name__} for {names}"
        self._home = options.devices[0].torch_device  # the user's parameters are replica 0's
        self._regions = RegionCompiler(options.backend, num_threads)
        self._capturer = CudaCapturer(self._home, options.timeout_seconds) if options.cuda_graphs else None
        self._kept = {purpose: Specializations(purpose.value) for purpose in Purpose}
        self._state, self._states = state, states_of(state)
        self._lone: set[Key] = set()  # the keys of calls of which torch has refused a shard of one example
        self._warnings = CaptureWarnings(len(options.devices))
        self._numbers = ChangingNumbers(can_be_inputs=not options.cuda_graphs)  # a graph would keep its first numbers
        self._planned = PlannedSizes(options, num_threads)
        are_several = options.program_workers.are_several
        self.sizes: MeasuredSizes | PlannedSizes = self._planned if are_several else MeasuredSizes(options, num_threads)
        self.exchange = ExchangeChoice(options, num_threads)
        self.team: Team | None = None

    def work_together(self, team: Team) -> None:
        """Compiles for workers that train together from now on."""
        self.team = self.exchange.team = self._planned.team = team

    @contextmanager
    def asked(self) -> Iterator[None]:
        """A block in which all workers are in a training call, so that what is chosen together can be chosen."""
        with self.exchange.asked(), self._planned.asked():
            yield

    def keeps(self, executor: Executor) -> bool:
        """Whether a program is what all workers choose; it may have been compiled without asking them."""
        return self.exchange.keeps(executor.program) and self._planned.keeps(executor)

    def specialization_for(
        self, call: Call, shards: Shards, *, is_stale: bool = False, purpose: Purpose = Purpose.STEP
    ) -> tuple[Specialization, Shards]:
        """What was compiled for calls of this kind, and the shards to run it on; compiles it if the call is the first one.

        If torch refuses a shard of one example, the batch is split anew, among fewer replicas.

        ``is_stale``: whether the user has changed the optimizer's state, which the buckets must hold. An evaluation depends on
        nothing of the optimizer.
        """
        if self._options.autocast is None:
            return self._found_or_compiled(call, shards, is_stale, purpose)
        with torch.autocast(self._home.type, self._options.autocast):
            return self._found_or_compiled(call, shards, is_stale, purpose)

    def _found_or_compiled(
        self, call: Call, shards: Shards, is_stale: bool, purpose: Purpose
    ) -> tuple[Specialization, Shards]:
        kept = self._kept[purpose]
        parts = self._options.microbatches if purpose.trains else 1
        by_twos = functools.partial(split_call, call, len(shards.num_examples), fewest=2, microbatches=parts)
        key = self._key(call, shards, purpose)
        if shards.have_one_example and key in self._lone:
            shards = by_twos()
            key = self._key(call, shards, purpose)
        try:
            self._interrupts.hold()
            found = kept.get(key, call.plain)
        finally:
            self._interrupts.let_go()
        program = found.executor.program if found is not None else None
        is_usable = program and not self._states[purpose].needs_other_buckets(program, is_stale=is_stale)
        if found is not None and is_usable and self.keeps(found.executor):
            return found, shards
        is_watched = found is None and self._options.front_end.guards_plain_values
        key = self._note_changes(kept, key, call, shards, purpose) if is_watched else key
        try:
            new = self._compile(call, shards, kept.what_is_new(key), purpose)
        except LoneExampleError:
            if not shards.have_one_example or by_twos().have_one_example:
                raise
            self._lone.add(key)
            return self._found_or_compiled(call, shards, is_stale, purpose)
        except HooksMissingError:
            if not install_capturing_hooks(self._options.model):
                raise
            return self._found_or_compiled(call, shards, is_stale, purpose)
        try:
            self._interrupts.hold()
            is_true = new.guards.hold()
        finally:
            self._interrupts.let_go()
        if not is_true:  # or it would be compiled in every step
            raise CaptureError(
                f"what {type(self._options.model).__name__} reads changes while it is captured, so no graph of it stays true: "
                f"{new.guards.broken()}. Remedy: read it between steps, and pass it to the step as an argument."
            )
        for dropped in kept.add(key, call, new, found, self._model.plain_attributes(), self._numbers.reasons):
            dropped.release()
        programs = [executor.program for kept in self._kept.values() for executor in kept]
        self._regions.keep_only(region for program in programs for region in program.regions.values())
        self._state.keep_only({name for program in programs for name in program.variables})
        return new, shards

    def _note_changes(self, kept: Specializations, key: Key, call: Call, shards: Shards, purpose: Purpose) -> Key:
        """Notes which numbers have changed since a program was compiled; gives the key, of which they are no part then."""
        freed = [attribute_source(path, name) for path, name in self._model.free_changed_numbers()]
        self._numbers.add([*freed, *kept.changed_numbers(call.structure, call.plain)])
        return self._key(call, shards, purpose) if freed else key

    @property
    def num_programs(self) -> int:
        """How many compiled programs there are."""
        return sum(map(len, self._kept.values()))

    def release(self) -> None:
        """Frees the memory that specializations keep on a GPU for later steps."""
        for kept in self._kept.values():
            for executor in kept:
                executor.release()

    def _key(self, call: Call, shards: Shards, purpose: Purpose) -> Key:
        """What a graph depends on besides what its guards watch, in the order that `mirrorc.specializations.Key` says."""
        devices = self._options.devices
        types = (shard_types(own, d.torch_device) for own, d in zip(shards.tensors, devices, strict=True))
        of_optimizers = self._options.optimizers.structure() if purpose.trains else ()
        return call.structure, (*types, shards.microbatches), self._model.fingerprint(), of_optimizers, torch_modes()

    def _compile(self, call: Call, shards: Shards, what_is_new: str, purpose: Purpose) -> Specialization:
        """Compiles for a call; if that fails, the model's tensors are moved back to their former devices."""
        finish_all_steps()
        self._model.note_numbers()
        self._model.check_memory()
        moved = self._move_to_home()
        what = purpose.of(self._what)
        progress = Progress(f"{what} ({what_is_new})", is_shown=self._options.progress)
        try:
            progress.begin()
            return self._compile_at_home(call, shards, what, progress, purpose)
        except BaseException as error:
            progress.is_over = True
            for tensor, data in moved:
                tensor.data = data
            if isinstance(error, CaptureError):  # its text names the user's line: our own frames say nothing more
                logger.debug("refused by the capture", exc_info=True)
                error.with_traceback(None)
            raise
        finally:
            progress.is_over = True
            progress.end()

    def _move_to_home(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Moves the model's tensors to replica 0's device and makes them dense; returns the moved tensors with their old data."""
        moved = []
        for tensor in self._model.tensors.values():
            data = tensor.data.to(self._home)
            if not is_dense(data) or not (data.is_contiguous() or isinstance(tensor, nn.Parameter)):
                data = data.contiguous()
            if data.data_ptr() != tensor.data_ptr() or data.device != tensor.device:
                moved.append((tensor, tensor.data))
                tensor.data = data
        return moved

    def _compile_at_home(
        self, call: Call, shards: Shards, what: str, progress: Progress, purpose: Purpose
    ) -> Specialization:
        options, times = self._options, [time.perf_counter()]
        types = shard_types(shards.tensors[0], self._home)
        logger.info("compiling %s, for a shard of %s", what, CallKind.of(call, types))
        if purpose.trains:
            options.optimizers.check(self._model.parameters)
        self._regions.prepare(self._home)
        progress.enter("capture")
        training_call = (TrainingCall if purpose.trains else EvaluationCall)(
            options.model, options.loss_fn, call.structure, call.plain, keeps_outputs=options.return_outputs
        )
        training_call.numbers, training_call.trained_elsewhere = self._numbers, parameters_in_training()
        captured = capture_program(
            training_call,
            call,
            shards,
            options.devices,
            self._model,
            options.optimizers,
            options.backend.decompositions(),
            loss_reduction=options.loss_reduction,
            front_end=options.front_end,
        )
        self._check_memory(captured)
        counters = self._model.outside.counters_of(captured.outside)
        last = dict(counters.values())  # so that errors name statistics, not their counters
        outside = {**{name: own for name, own in captured.outside.items() if name not in last}, **last}
        self._state.take_in(outside, {name: counter for name, (counter, _) in counters.items()}, captured.written())
        self._state.reads(captured.constants.values())
        times.append(time.perf_counter())
        if options.cuda_graphs and purpose.trains:
            check_captured_program(captured.program, options.optimizers)
        self._warnings.warn_of_differences(captured.differences)
        self._warnings.warn_of_notes(captured.notes)
        program = captured.program.evolve(accumulation=purpose.accumulation, workers=options.program_workers)
        program = self.exchange.put_into(program.with_remarks(*options.remarks))
        progress.enter("bucket sizes")
        program, pipeline = self.sizes.put_into(program) if purpose.trains else (program, options.pipeline)
        pipeline = purpose.passes_of(pipeline)
        progress.enter("passes", len(pipeline))
        instruments = instruments_for(pipeline, options.dump, options.print_after, options.print_after_all)
        program = run_passes(program, pipeline, [*instruments, progress])
        if program.stage is not Stage.LOWERED:
            raise PassError(
                f"the pipeline ends with a {program.stage.name} program, which cannot run: it must end at LOWERED, as "
                "'lower-devices' gives it"
            )
        times.append(time.perf_counter())
        places = zip(options.devices, program.device_graphs.values(), strict=True)
        called = [(device.torch_device, names_of_called_regions(module.graph)) for device, module in places]
        wanted = [(program.regions[name], device) for device, names in called for name in names]
        progress.enter("regions", len(wanted))
        functions = iter(self._regions.compile_all(wanted, progress.advance))
        regions = [{name: next(functions) for name in names} for _, names in called]
        times.append(time.perf_counter())
        _log_times(what, program, times)
        step_graph = StepGraph(self._capturer, self._home) if self._capturer is not None and purpose.updates else None
        is_recording = options.record and purpose.updates and step_graph is None
        recorder = Recorder([clock_for(d, options.timeout_seconds) for d in options.devices]) if is_recording else None
        executor = Executor(
            program,
            regions,
            self._states[purpose],
            captured.constants,
            options.timeout_seconds,
            recorder,
            step_graph,
            self.team if purpose.trains else None,
        )
        self._planned.note(executor)
        graph_of = captured.program.shard_of_replica
        return Specialization(
            executor, captured.guards, training_call, call.plain, captured.outputs, graph_of, captured.loss_dtype
        )

    def _check_memory(self, captured: CapturedProgram) -> None:
        """Refuses tensors that share memory with variables of a program that get memory of their own."""
        variables = captured.program.variables.values()
        moving = {v.name for v in variables if v.update or v.synchronization is Synchronization.PER_REPLICA}
        constants = {self._model.attribute_of(tensor, name): tensor for name, tensor in captured.constants.items()}
        refuse_shared_memory({**self._model.tensors, **captured.outside, **constants}, moving)


def _log_times(what: str, program: Program, times: Sequence[float]) -> None:
    seconds = [after - before for before, after in itertools.pairwise(times)]
    counts = f"{counted(len(program.regions), 'region')}, {counted(len(program.buckets), 'bucket')}"
    named = "%.2f s for the capture, %.2f s for the passes, %.2f s for the regions"
    logger.info(f"compiled %s in %.2f s: {named}; %s", what, sum(seconds), *seconds, counts)
