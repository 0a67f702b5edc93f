"""Compiles a step for one call: capture, passes, regions, executor."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from mirrorc.analysis.communication.worker_meetings import worker_meetings
from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.call.changing_inputs import ChangingNumbers
from mirrorc.capture.call.recompile_reasons import CallKind
from mirrorc.capture.call.shards import Shards, SymbolicDims, shard_types
from mirrorc.capture.call.traced_loss import TracedEvaluation, TracedForward, TracedForwardAlone, TracedLoss
from mirrorc.capture.diagnostics.capture_errors import NoGradientError, RaisedError, StateError
from mirrorc.capture.eager.carried_state import CarriedState
from mirrorc.capture.front_ends.front_end import FrontEnd
from mirrorc.capture.model.model_state import ModelState
from mirrorc.capture.program.capture_program import CapturedProgram, capture_program
from mirrorc.capture.rewrites.replica_exchanges import refuse_over_workers
from mirrorc.compilation.activation_memory import BoundedPrograms
from mirrorc.compilation.call_kind import Purpose, states_of
from mirrorc.compilation.capture_warnings import CaptureWarnings
from mirrorc.compilation.choices.device_exchange import with_gathered
from mirrorc.compilation.choices.worker_choices import WorkerChoices
from mirrorc.compilation.edited_program import EditedProgram
from mirrorc.compilation.forward_and_backward import cut_at_outputs
from mirrorc.compilation.instruments import instruments_for
from mirrorc.compilation.program_cache import Backward, Specialization
from mirrorc.compilation.program_facts import remarks_on_facts, remarks_on_whole_sums
from mirrorc.compilation.progress import Progress
from mirrorc.custom_ops.eager_calls import take_gradient
from mirrorc.errors import CaptureError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to, names_of_called_regions
from mirrorc.ir.program import CAPTURE, Accumulation, Program, Remark
from mirrorc.ir.variables import Synchronization
from mirrorc.ir.workers import ALONE
from mirrorc.messages.problem import problem, with_line
from mirrorc.messages.wording import counted
from mirrorc.options.gradient_clipping import check_bounds_of_groups
from mirrorc.options.placement import check_owned_names
from mirrorc.options.step_options import StepOptions
from mirrorc.passes import PlanBuckets
from mirrorc.pipeline.pass_manager import check_end, run_passes
from mirrorc.pipeline.protocol import Instrument, Pass
from mirrorc.runtime.codegen.regions import RegionCompiler, RegionFunction
from mirrorc.runtime.execution.cuda_graphs import CudaCapturer, StepGraph, check_captured_program
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.memory.estimate import report_memory
from mirrorc.runtime.profiling.recorder import Recorder, clock_for
from mirrorc.runtime.state.shared.shared_state import parameters_in_training
from mirrorc.runtime.state.step_state import StepState
from mirrorc.runtime.workers.team.team import Team
from mirrorc.torch_internals import is_dense
from mirrorc.user.aliased_tensors import refuse_shared_memory

logger = logging.getLogger(__name__)


class StepCompiler:
    def __init__(
        self,
        options: StepOptions,
        model: ModelState,
        state: StepState,
        num_threads: int,
        numbers: ChangingNumbers,
        choices: WorkerChoices,
        team: Team | None,
    ) -> None:
        self._options, self._model, self._state, self._numbers = options, model, state, numbers
        self._choices, self._team = choices, team
        self.front_ends: dict[Purpose, str] = {}  # of the last capture for each purpose
        self._carried = {trains: CarriedState(type(options.model).__name__) for trains in (True, False)}
        names = ", ".join(device.name for device in options.devices)
        self._subject = f"{type(options.model).__name__} for {names}"
        self._home = options.devices[0].torch_device  # the user's parameters are those of replica 0
        self._regions = RegionCompiler(options.backend, num_threads)
        self._capturer = CudaCapturer(self._home, options.timeout_seconds) if options.cuda_graphs else None
        self._warnings = CaptureWarnings(len(options.devices))
        self._edited = EditedProgram(options.program) if options.program is not None else None
        self._most_activations = 0  # the peak of a device, in programs that keep everything for backward
        self.states = states_of(state)
        if options.is_module:
            self.states[Purpose.EVALUATION] = self.states[Purpose.FORWARD]

    def compile(
        self,
        call: Call,
        shards: Shards,
        changes: str,
        purpose: Purpose,
        symbolic: SymbolicDims = (),
        on_sizes: str = "",
    ) -> Specialization:
        """If it fails, the model's tensors return to their former devices.

        Args:
            changes: describes how this call differs from earlier ones.
        """
        self._model.note_numbers()
        self._model.check_memory()
        self._warnings.warn_of_listed_examples(call, sum(shards.num_examples))
        moved = self._move_to_home()
        subject = purpose.of(self._subject)
        kind = CallKind.of(call, shard_types(shards.tensors[0], self._home))
        logger.info("compiling %s (%s), for a shard of %s", subject, changes, kind)
        progress = Progress(
            subject, changes, is_shown=self._options.progress and self._options.program_workers.rank == 0
        )
        try:
            progress.begin()
            return self._compile_at_home(call, shards, subject, progress, purpose, symbolic, on_sizes)
        except BaseException as error:
            progress.is_over = True
            for tensor, data in moved:
                tensor.data = data
            if isinstance(error, CaptureError):  # its text names the user's line: our own frames add nothing
                logger.debug("refused by the capture", exc_info=True)
                error.with_traceback(None)
                if isinstance(error, RaisedError) and call.unpacked:
                    error.args = (
                        with_line(str(error), "fix", f"{call.unpacked}, if the batch holds forward's arguments"),
                    )
            raise
        finally:
            progress.is_over = True
            progress.end()

    def _move_to_home(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
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
        self,
        call: Call,
        shards: Shards,
        subject: str,
        progress: Progress,
        purpose: Purpose,
        symbolic: SymbolicDims,
        on_sizes: str,
    ) -> Specialization:
        times = [time.perf_counter()]
        if purpose.has_optimizer:
            self._options.optimizers.check(self._model.parameters)
            check_bounds_of_groups(self._options.pipeline, self._options.optimizers)
        self._regions.prepare(self._home)
        try:
            traced_loss, captured = self._captured(call, shards, progress, purpose, symbolic, on_sizes)
        except NoGradientError:
            purpose = Purpose.EVALUATION  # no backward follows this forward
            traced_loss, captured = self._captured(call, shards, progress, purpose, symbolic, on_sizes)
        if purpose is Purpose.FORWARD:
            return self._forward_and_backward(traced_loss, captured, call, symbolic, progress)
        times.append(time.perf_counter())
        program, regions = self._lowered_and_compiled(captured, progress, purpose, times)
        _log_times(subject, program, times)
        executor = self._executor(program, regions, captured, purpose)
        graph_of = captured.program.shard_of_replica
        return Specialization(
            executor,
            captured.guards,
            traced_loss,
            call.plain,
            CallKind.of_batch(call),
            captured.outputs,
            graph_of,
            captured.loss_dtype,
            captured.sizes,
            symbolic,
        )

    def _forward_and_backward(
        self,
        traced_loss: TracedLoss,
        captured: CapturedProgram,
        call: Call,
        symbolic: SymbolicDims,
        progress: Progress,
    ) -> Specialization:
        """Runs the passes on operators before the cut, so that they see both forward and backward."""
        prepared, _ = self._prepared(captured, Purpose.FORWARD)
        common = [*itertools.takewhile(lambda entry: not isinstance(entry, PlanBuckets), self._options.pipeline)]
        joint = self._passed(prepared, common, progress)
        cut = cut_at_outputs(joint, len(call.leaves), type(self._options.model).__name__)
        rest, executors = self._options.pipeline[len(common) :], {}
        for purpose, program in ((Purpose.FORWARD, cut.forward), (Purpose.BACKWARD, cut.backward)):
            has_gradients = any(variable.update is not None for variable in program.variables.values())
            passes = (purpose if has_gradients else Purpose.FORWARD).passes_of(rest)
            lowered = self._lowered(program, passes, progress)
            regions = self._compiled_regions(lowered, progress)
            executors[purpose] = self._executor(lowered, regions, captured, purpose)
        gradients = [name for name, variable in cut.backward.variables.items() if variable.update is not None]
        constants = [captured.constants[name] for name in cut.read_variables if name in captured.constants]
        runs_plain = any(True for graph in cut.backward.shard_graphs for _ in calls_to(graph, take_gradient))
        backward = Backward(executors[Purpose.BACKWARD], cut, tuple(gradients), tuple(constants), runs_plain)
        return Specialization(
            executors[Purpose.FORWARD],
            captured.guards,
            traced_loss,
            call.plain,
            CallKind.of_batch(call),
            captured.outputs,
            captured.program.shard_of_replica,
            None,
            captured.sizes,
            symbolic,
            backward,
        )

    def _captured(
        self, call: Call, shards: Shards, progress: Progress, purpose: Purpose, symbolic: SymbolicDims, on_sizes: str
    ) -> tuple[TracedLoss | TracedEvaluation, CapturedProgram]:
        """Also adds the program's variables to the step's state."""
        progress.enter("capture")
        ladder = (
            self._options.ladder.first if symbolic else self._options.ladder
        )  # without symbols, the whole ladder is tried
        climbed = ladder.climb(lambda front_end: self._captured_by(front_end, call, shards, purpose, symbolic))
        traced_loss, captured = climbed.result
        self.front_ends[purpose] = climbed.front_end.name
        for error in climbed.errors:
            if isinstance(error, StateError) and not self._carried[purpose.trains].is_advanced:
                raise error  # plain PyTorch did not show the changes of forward, either
        self._carried[purpose.trains].note_capture(is_fallback=bool(climbed.failed))
        model = type(self._options.model).__name__
        self._warnings.warn_of_ladder(climbed.warning(model))
        remarks = [Remark(text, by=CAPTURE) for text in (*climbed.remarks(model), on_sizes) if text]
        captured = replace(captured, program=captured.program.evolve(remarks=(*captured.program.remarks, *remarks)))
        self._check_memory(captured)
        counters = self._model.outside.counters_of(captured.outside)
        last = dict(counters.values())  # errors then name statistics, not their counters
        outside = {**{name: tensor for name, tensor in captured.outside.items() if name not in last}, **last}
        self._state.take_in(outside, {name: counter for name, (counter, _) in counters.items()}, captured.written())
        self._state.reads(captured.constants.values())
        return traced_loss, captured

    def _captured_by(
        self, front_end: FrontEnd, call: Call, shards: Shards, purpose: Purpose, symbolic: SymbolicDims
    ) -> tuple[TracedLoss | TracedEvaluation, CapturedProgram]:
        options = self._options
        kinds = (TracedForwardAlone, TracedForward) if options.is_module else (TracedEvaluation, TracedLoss)
        traced_loss = kinds[purpose.trains](
            options.model, options.loss_fn, call.structure, call.plain, keeps_outputs=options.return_outputs
        )
        traced_loss.numbers = self._numbers
        traced_loss.trained_elsewhere = parameters_in_training() if not options.is_module else frozenset()
        traced_loss.carried = self._carried[purpose.trains]
        traced_loss.differentiated = call.differentiated
        captured = capture_program(
            traced_loss,
            call,
            shards,
            options.devices,
            self._model,
            options.optimizers if purpose.has_optimizer else None,
            options.backend.decompositions(),
            loss_reduction=options.loss_reduction,
            front_end=front_end,
            symbolic=symbolic,
            workers=options.program_workers if purpose.trains else ALONE,
        )
        return traced_loss, captured

    def _lowered_and_compiled(
        self, captured: CapturedProgram, progress: Progress, purpose: Purpose, times: list[float]
    ) -> tuple[Program, list[dict[str, RegionFunction]]]:
        """Appends the end time of each phase to ``times``."""
        bound = self._options.activation_memory
        prepared, pipeline = self._prepared(captured, purpose)
        if bound is None or not purpose.trains:
            program = self._lowered(prepared, pipeline, progress)
            times.append(time.perf_counter())
            regions = self._compiled_regions(program, progress)
        else:
            times.append(time.perf_counter())  # passes and compilation take turns
            search = BoundedPrograms(
                bound,
                self._most_activations,
                prepared,
                lambda passes, remarks, choice: self._lowered(
                    prepared.with_remarks(*remarks), passes, progress, choice
                ),
                lambda program: self._compiled_regions(program, progress),
                lambda program, regions: report_memory(program, regions, self._state),
            )
            program, regions = search.find(pipeline)
            self._most_activations = search.most
        times.append(time.perf_counter())
        if self._edited is not None and purpose.trains:
            self._edited.note_compiled()
        return program, regions

    def _prepared(self, captured: CapturedProgram, purpose: Purpose) -> tuple[Program, Sequence[Pass]]:
        options = self._options
        if purpose.accumulation in (Accumulation.ADDS, Accumulation.ENDS):
            _refuse_rows(captured.program)
        if options.cuda_graphs and purpose.has_optimizer:
            check_captured_program(captured.program, options.optimizers)
        self._warnings.warn_of_differences(captured.differences)
        self._warnings.warn_of_notes(captured.notes)
        check_owned_names(options.pipeline, {*self._model.parameters, *captured.program.variables})
        accumulation = purpose.accumulation
        if purpose is Purpose.EVALUATION and options.is_module and options.model.training and _meets(captured.program):
            accumulation = Accumulation.FORWARD  # all workers make it
        program = captured.program.evolve(accumulation=accumulation, workers=options.program_workers)
        refuse_over_workers(program)
        remarks = [*options.remarks, *remarks_on_facts(program, self._model, options.microbatches)]
        if purpose in (Purpose.GRADIENTS, Purpose.FORWARD):
            remarks += remarks_on_whole_sums(options.pipeline)
        program = with_gathered(self._choices.put_into(program.with_remarks(*remarks)), options)
        pipeline = purpose.passes_of(options.pipeline)
        return self._edited.continued(program, pipeline) if self._edited and purpose.trains else (program, pipeline)

    def _lowered(self, program: Program, pipeline: Sequence[Pass], progress: Progress, *more: Instrument) -> Program:
        program = self._passed(program, pipeline, progress, *more)
        check_end(program.stage)
        return program

    def _passed(self, program: Program, passes: Sequence[Pass], progress: Progress, *more: Instrument) -> Program:
        progress.enter("passes", len(passes))
        instruments = instruments_for(passes, self._options.dump, self._options.print_after)
        return run_passes(program, passes, [*instruments, progress, *more])

    def _compiled_regions(self, program: Program, progress: Progress) -> list[dict[str, RegionFunction]]:
        places = zip(self._options.devices, program.device_graphs.values(), strict=True)
        called = [(device.torch_device, names_of_called_regions(module.graph)) for device, module in places]
        wanted = [(program.regions[name], device) for device, names in called for name in names]
        progress.enter("regions", len(wanted))
        functions = iter(self._regions.compile_all(wanted, progress.advance))
        return [{name: next(functions) for name in names} for _, names in called]

    def _executor(
        self,
        program: Program,
        regions: Sequence[Mapping[str, RegionFunction]],
        captured: CapturedProgram,
        purpose: Purpose,
    ) -> Executor:
        options = self._options
        step_graph = StepGraph(self._capturer, self._home) if self._capturer is not None and purpose.updates else None
        is_recording = (purpose.updates or purpose is Purpose.BACKWARD) and step_graph is None
        recorder = Recorder([clock_for(d, options.timeout_seconds) for d in options.devices]) if is_recording else None
        return Executor(
            program,
            regions,
            self.states[purpose],
            captured.constants,
            options.timeout_seconds,
            recorder,
            step_graph,
            self._team if program.trains or worker_meetings(program) else None,
        )

    def keep_only(self, programs: Sequence[Program]) -> None:
        self._regions.keep_only(region for program in programs for region in program.regions.values())
        self._state.keep_only({name for program in programs for name in program.variables})

    def _check_memory(self, captured: CapturedProgram) -> None:
        variables = captured.program.variables.values()
        moving = {v.name for v in variables if v.update or v.synchronization is Synchronization.PER_REPLICA}
        constants = {self._model.attribute_of(tensor, name): tensor for name, tensor in captured.constants.items()}
        refuse_shared_memory({**self._model.tensors, **captured.outside, **constants}, moving)


def _refuse_rows(program: Program) -> None:
    for name, variable in program.variables.items():
        if variable.update is not None and variable.update.takes_rows:
            raise problem(
                ValueError,
                f"MC1003: gradients of several calls cannot be accumulated: that of {name!r} is sparse",
                "a step keeps dense gradients from call to call, not rows",
                (
                    "mirrorc.compile(..., microbatches=4), and step(x, y) for each update",
                    "nn.Embedding(..., sparse=False)",
                ),
            )


def _log_times(subject: str, program: Program, times: Sequence[float]) -> None:
    seconds = [after - before for before, after in itertools.pairwise(times)]
    counts = f"{counted(len(program.regions), 'region')}, {counted(len(program.buckets), 'bucket')}"
    named = "%.2f s for the capture, %.2f s for the passes, %.2f s for the regions"
    logger.info(f"compiled %s in %.2f s: {named}; %s", subject, sum(seconds), *seconds, counts)


def _meets(program: Program) -> bool:
    return any(True for graph in program.shard_graphs for _ in calls_to(graph, *ops.MEETINGS))
