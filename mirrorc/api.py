"""The public API: `compile` makes a `Step`, and a call of it trains on one batch.

Long for one file, because it alone may know compiler, passes and runtime.
"""

from __future__ import annotations

import dataclasses
import inspect
import os
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import fx, nn

from mirrorc.capture.arguments import Call, Shards, flatten_call, split_call
from mirrorc.capture.model_state import ModelState, check_model
from mirrorc.capture.specialize import argument_kinds, capture_program, shard_types
from mirrorc.capture.training_call import TrainingCall
from mirrorc.errors import ExecutionError, PassError
from mirrorc.instruments import instruments_for
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.links import best_link, check_link, share_one_memory
from mirrorc.ir.program import Program, Stage
from mirrorc.optimizers import check_optimizer, is_elementwise
from mirrorc.options import (
    StepOptions,
    check_additions,
    check_bucket_sizes,
    check_choices,
    check_cuda_graphs,
    dump_directory,
    example_call,
)
from mirrorc.passes import LowerCollectives, PlanBuckets, ShareParameters, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.placement import Placed, check_pass_names, select_passes
from mirrorc.pipeline.placement import add_passes as put_in
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.codegen.regions import BACKENDS, RegionCompiler, decompositions_for, likes_channels_last
from mirrorc.runtime.devices.thread_pool import DevicePool
from mirrorc.runtime.execution.binding import Memory
from mirrorc.runtime.execution.cuda_graphs import CudaCapturer, StepGraph, check_captured_program
from mirrorc.runtime.execution.executor import Executor
from mirrorc.runtime.memory.estimate import report_memory
from mirrorc.runtime.memory.report import MemoryReport
from mirrorc.runtime.profiling.clocks import clock_for
from mirrorc.runtime.profiling.explanation import Explanation, explain_steps
from mirrorc.runtime.profiling.recorder import RecordedStep, Recorder, recorded_steps
from mirrorc.runtime.profiling.timeline import write_timeline
from mirrorc.runtime.state.bucket_optimizers import BucketOptimizers
from mirrorc.runtime.state.mirrored_variable import MirroredVariable
from mirrorc.runtime.state.variables import VariableStore
from mirrorc.runtime.tuning.bucket_sizes import BucketSizes, ChosenSizes, choose_bucket_sizes, setting_of
from mirrorc.torch_internals import has_cpp_compiler, is_dense, mark_optimizer_stepped, torch_modes

_MANY_SPECIALISATIONS = 8  # so many of one step are reported, once


def compile(
    model: nn.Module,
    devices: int | Sequence[str | torch.device] | None = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
    loss_reduction: str = "mean",
    backend: str = "inductor",
    dump: str | Path | None = None,
    print_after: Sequence[str] = (),
    print_after_all: bool = False,
    passes: Sequence[Pass] | None = None,
    add_passes: Sequence[Placed] = (),
    disable_passes: Sequence[str] = (),
    bucket_cap_mb: float | str = 25.0,
    first_bucket_mb: float | None = None,
    all_reduce: str | None = None,
    timeout_seconds: float = 1800.0,
    record: bool = True,
    cuda_graphs: bool = False,
    example_inputs: Any = None,
) -> Step:
    """Makes a training step that runs on several devices and means what it would mean on one.

    Args:
        model: a model written for one device. It stays the user's: its parameters are replica 0's.
        devices: names such as ``["cpu:0", "cpu:1"]`` or ``["cuda:0", "cuda:1"]``; a number; None for every visible GPU,
            else one CPU. Logical CPUs share the processor's threads. ``cuda:0/1`` is a second logical device on GPU 0.
        optimizer: over parameters of the model.
        loss_fn: ``loss_fn(output, target)``, a scalar tensor; None if the model returns its loss, or an object with
            ``.loss``.
        loss_reduction: "mean" if the loss is a mean over the examples of a batch, "sum" if it is a sum.
        backend: "inductor" compiles regions; "eager" runs them as they are.
        dump: a directory for one file per pass, its diff and an index; also the environment variable MIRRORC_DUMP.
        print_after: names of passes after which the program is printed, on standard error.
        print_after_all: print it after each pass.
        passes: a pipeline of one's own, instead of `mirrorc.passes.default_pipeline`.
        add_passes: passes of one's own, each placed by `mirrorc.before` or `mirrorc.after` one of the pipeline.
        disable_passes: names of passes to leave out.
        bucket_cap_mb, first_bucket_mb, all_reduce: see `mirrorc.passes.default_pipeline`, which has their defaults.
            ``bucket_cap_mb="auto"`` chooses both sizes by measurement when the step is first compiled, a second or two; what
            was measured is kept in MIRRORC_CACHE_DIR (``~/.cache/mirrorc``) and looked up from then on.
        timeout_seconds: bound of every wait among devices.
        record: keep the times of the last steps, for `Step.explain` and `Step.timeline`; costs a few microseconds a step.
        cuda_graphs: on one GPU, capture the step after a few calls as a CUDA graph, and replay it from then on: for steps that
            the GPU does faster than Python hands it their kernels. Nothing is recorded then. This has not run on a GPU yet.
        example_inputs: compile now, not at the first call: a tuple of positional arguments, a dict of keyword arguments,
            or a pair of both.

    Raises:
        TypeError, ValueError: an argument is wrong; names it and the remedy.
    """
    check_choices(loss_fn, loss_reduction, backend, BACKENDS, timeout_seconds, record)
    check_bucket_sizes(bucket_cap_mb, first_bucket_mb, passes, disable_passes)
    check_additions(add_passes)
    dump_to = dump_directory(dump)
    parsed = parse_devices(devices)
    check_link(all_reduce, parsed)
    check_cuda_graphs(cuda_graphs, parsed)
    check_model(model)
    is_measured = bucket_cap_mb == "auto"
    sizes: dict[str, Any] = {} if is_measured else {"bucket_cap_mb": bucket_cap_mb}
    sizes |= {} if first_bucket_mb is None else {"first_bucket_mb": first_bucket_mb}
    base = default_pipeline(**sizes, all_reduce=all_reduce) if passes is None else passes
    pipeline = select_passes(put_in(select_passes(base, ()), add_passes), disable_passes)
    check_pass_names("print_after", print_after, pipeline)
    if backend == "inductor" and parsed[0].torch_device.type == "cpu" and not has_cpp_compiler():
        warnings.warn("no C++ compiler was found: backend='eager' is used instead of 'inductor'", stacklevel=2)
        backend = "eager"
    state = ModelState(model, loss_fn)
    trainer = check_optimizer(optimizer, state.parameters)
    chosen = StepOptions(
        model=model,
        optimizer=trainer,
        loss_fn=loss_fn,
        loss_reduction=loss_reduction,
        backend=backend,
        devices=parsed,
        pipeline=pipeline,
        to_measure=next(p for p in base if isinstance(p, PlanBuckets)) if is_measured else None,
        dump=dump_to,
        print_after=tuple(print_after),
        print_after_all=print_after_all,
        timeout_seconds=timeout_seconds,
        record=record,
        cuda_graphs=cuda_graphs,
    )
    step = Step(chosen, state)
    if example_inputs is not None:
        args, kwargs = example_call(example_inputs)
        step.prepare(*args, **kwargs)
    return step


class Step:
    """A compiled training step; made by `compile`. Call it with a batch; it returns the batch's loss.

    It compiles at the first call for a batch's shapes; other shapes are further specialisations over the same variables.
    Use it as a context manager, or `close` it, to end its threads; the model keeps its weights.
    """

    def __init__(self, options: StepOptions, state: ModelState) -> None:
        self._options = options
        self._state = state
        self._store = VariableStore(state.tensors, options.devices)
        self._optimizers = BucketOptimizers(options.optimizer, self._store, is_captured=options.cuda_graphs)
        self._capturer = CudaCapturer(options.devices[0].torch_device) if options.cuda_graphs else None
        on_cpu = options.devices[0].torch_device.type == "cpu"
        self._num_threads = (
            max(1, torch.get_num_threads() // len(options.devices)) if on_cpu else torch.get_num_threads()
        )
        self._regions = RegionCompiler(options.backend, self._num_threads)
        self._executors: dict[Any, Executor] = {}
        self._last: Executor | None = None
        self._pool: DevicePool | None = None
        self._pid = os.getpid()
        self._busy = threading.Lock()
        self._is_closed = False
        self._is_broken = False  # a run was stopped: replicas may differ
        self._chosen_sizes: ChosenSizes | None = None  # measured for the first program, and used for all
        self._signature = inspect.signature(options.model.forward)
        parameters = self._signature.parameters.values()
        self._parameter_names = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]

    def __call__(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Trains on one batch: forward, backward, all-reduce, update.

        Args:
            *args: for the model; tensors are split along dim 0, see `mirrorc.replicated` and `mirrorc.PerReplica`.
            **kwargs: likewise; with a loss_fn, ``target`` is what that gets second.

        Returns:
            The loss of the whole batch, a scalar without gradient.

        Raises:
            ValueError, TypeError: a wrong argument; nothing has changed.
            CaptureError: the model cannot be captured; nothing has changed.
            ExecutionError: a device failed, or the step is closed or in use.
        """
        if torch.is_inference_mode_enabled():
            raise ExecutionError(
                "the step was called inside torch.inference_mode(), where nothing can be trained: leave it"
            )
        with self._exclusive():
            call, shards = self._split(args, kwargs)
            executor = self._executor(call, shards)
            self._synchronize(executor)
            return self._run(executor, shards)

    def prepare(self, *args: Any, **kwargs: Any) -> Program:
        """Compiles for a batch like this one, without training on it."""
        with self._exclusive():
            call, shards = self._split(args, kwargs)
            self._last = self._executor(call, shards)
            return self._last.program

    @contextmanager
    def _exclusive(self) -> Iterator[None]:
        if self._is_closed:
            raise ExecutionError("the step is closed: its threads have ended; make a new one with mirrorc.compile()")
        if os.getpid() != self._pid:
            raise ExecutionError(
                "the step was compiled in the parent of this forked process and its threads live there: compile it here, in "
                "the child, or start the process with the 'spawn' method"
            )
        if not self._busy.acquire(blocking=False):
            raise ExecutionError(
                "the step is running in another thread: one step changes all parameters, so steps run one after the other; "
                "call it from one thread, or guard it with a lock"
            )
        try:
            yield
        finally:
            self._busy.release()

    def _split(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[Call, Shards]:
        if self._options.loss_fn is not None and "target" not in kwargs:
            raise TypeError(
                "target is missing: with a loss_fn, call step(x, target=y); y is what the loss_fn gets second"
            )
        model_kwargs = {k: v for k, v in kwargs.items() if k != "target" or self._options.loss_fn is None}
        try:
            self._signature.bind(*args, **model_kwargs)
        except TypeError as error:
            name = type(self._options.model).__name__
            raise TypeError(f"{name}.forward{self._signature} cannot be called with these arguments: {error}") from None
        call = flatten_call(self._parameter_names, args, kwargs)
        return call, split_call(call, len(self._options.devices))

    def _executor(self, call: Call, shards: Shards) -> Executor:
        """The specialisation for a call; compiled if it is the first of its kind."""
        groups = tuple(tuple(id(p) for p in group["params"]) for group in self._options.optimizer.param_groups)
        key = (
            call.structure,
            tuple(
                shard_types(shard, device.torch_device)
                for shard, device in zip(shards.tensors, self._options.devices, strict=True)
            ),
            self._state.fingerprint(),
            (groups, is_elementwise(self._options.optimizer)),
            torch_modes(),
        )
        executor = self._executors.get(key)
        if executor is not None:
            moves = self._store.plan != executor.program.buckets or self._optimizers.is_stale()
            if moves and not self._optimizers.fits(executor.program.buckets):
                executor = None  # its buckets cannot hold the optimizer's present state: plan them anew
        if executor is None:
            executor = self._executors[key] = self._compile(call, shards)
            self._warn_of_many()
        return executor

    def _warn_of_many(self) -> None:
        """Says once what keeps changing, when there are many specialisations."""
        if len(self._executors) != _MANY_SPECIALISATIONS:
            return
        parts = ("plain arguments", "shapes", "the model's attributes", "the optimizer's groups", "torch's modes")
        keys = list(self._executors)
        changing = [part for i, part in enumerate(parts) if len({k[i] for k in keys}) > 1]
        warnings.warn(
            f"the step was compiled {len(keys)} times, because {' and '.join(changing)} keep changing; each new value is "
            "compiled anew: pass numbers that change as tensors (mirrorc.replicated), and pad batches to few shapes",
            stacklevel=5,
        )

    def _compile(self, call: Call, shards: Shards) -> Executor:
        """Compiles for a call; if that fails, the model's tensors are where they were."""
        moved = self._move_to_home()
        try:
            return self._compile_at_home(call, shards)
        except BaseException:
            for tensor, data in moved:
                tensor.data = data
            raise

    def _compile_at_home(self, call: Call, shards: Shards) -> Executor:
        options = self._options
        check_optimizer(options.optimizer, self._state.parameters)
        self._regions.prepare(options.devices[0].torch_device)
        training_call = TrainingCall(options.model, options.loss_fn, call.structure)
        captured = capture_program(
            training_call,
            call,
            shards,
            options.devices,
            self._state,
            options.optimizer,
            decompositions_for(options.backend),
            channels_last=likes_channels_last(options.backend, options.devices[0].torch_device),
        )
        if options.cuda_graphs:
            check_captured_program(captured.program, options.optimizer)
        program, pipeline = self._with_measured_sizes(captured.program)
        instruments = instruments_for(pipeline, options.dump, options.print_after, options.print_after_all)
        program = run_passes(program, pipeline, instruments)
        if program.stage is not Stage.LOWERED:
            raise PassError(
                f"the pipeline ends with a {program.stage.name} program, which cannot run: it must end at LOWERED, as "
                "'lower-devices' gives it"
            )
        with self._regions.together():
            regions = [
                {name: self._regions.compile(program.regions[name], device.torch_device) for name in _called(module)}
                for device, module in zip(options.devices, program.device_graphs.values(), strict=True)
            ]
        memory = Memory(self._store, self._optimizers)
        step_graph = StepGraph(self._capturer, options.devices[0].torch_device) if self._capturer is not None else None
        is_recording = options.record and step_graph is None
        recorder = Recorder([clock_for(device) for device in options.devices]) if is_recording else None
        return Executor(program, regions, memory, captured.constants, options.timeout_seconds, recorder, step_graph)

    def _with_measured_sizes(self, program: Program) -> tuple[Program, Sequence[Pass]]:
        """The pipeline with numbers in place of "auto", and the program with a remark on them, so that both can be replayed."""
        options, plan = self._options, self._options.to_measure
        if plan is None:
            return program, options.pipeline
        assert isinstance(plan, PlanBuckets)
        if self._chosen_sizes is None:
            asked = next((p.link for p in options.pipeline if isinstance(p, LowerCollectives)), None)
            is_shared = any(isinstance(p, ShareParameters) for p in options.pipeline) and share_one_memory(program)
            setting = setting_of(
                program,
                options.optimizer,
                num_threads=self._num_threads,
                link=asked or best_link(options.devices)[0],
                shares_parameters=is_shared,
                timeout_seconds=options.timeout_seconds,
            )
            self._chosen_sizes = choose_bucket_sizes(setting, BucketSizes(plan.bucket_cap_mb, plan.first_bucket_mb))
        chosen = self._chosen_sizes
        sized = dataclasses.replace(plan, **dataclasses.asdict(chosen.sizes))
        pipeline = [sized if p is plan else p for p in options.pipeline]
        return program.evolve(remarks=(*program.remarks, chosen.remark)), pipeline

    def _move_to_home(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Moves parameters, which are replica 0's, to its device, and lays them densely; gives what moved and its old data."""
        home = self._options.devices[0].torch_device
        moved = []
        for tensor in self._state.tensors.values():
            data = tensor.data.to(home)
            if not is_dense(data) or not (data.is_contiguous() or isinstance(tensor, nn.Parameter)):
                data = data.contiguous()
            if data.data_ptr() != tensor.data_ptr() or data.device != tensor.device:
                moved.append((tensor, tensor.data))
                tensor.data = data
        return moved

    def _synchronize(self, executor: Executor) -> None:
        """Lays memory out for a program, and takes over what the user changed since the last step."""
        if self._is_broken:
            self._store.mirror_all()
        moved = self._store.lay_out(executor.program)
        if moved or self._is_broken or self._optimizers.is_stale():
            self._optimizers.lay_out()
            self._store.layout += 1
        self._is_broken = False
        self._store.mirror_changes()
        self._optimizers.sync_hyperparameters()

    def _run(self, executor: Executor, shards: Shards) -> torch.Tensor:
        options = self._options
        if self._pool is None:
            self._pool = DevicePool(options.devices, self._num_threads, options.timeout_seconds)
        total = sum(shards.num_examples)
        is_mean = options.loss_reduction == "mean"
        weights = [n / total if is_mean else 1.0 for n in shards.num_examples]
        draws = "seed" in argument_kinds(executor.program.arguments)
        seed = int(torch.randint(2**62, (), dtype=torch.int64)) if draws else None
        self._last = executor
        self._is_broken = True  # until all is done
        loss = executor.run(self._pool, shards.tensors, weights, seed)
        self._optimizers.finish_step()
        self._store.aggregate()
        mark_optimizer_stepped(options.optimizer)
        self._is_broken = False
        return loss

    @property
    def program(self) -> Program:
        """The lowered program of the last call; ``print(step.program)`` is the schedule."""
        if self._last is None:
            raise ExecutionError("there is no program yet: it is compiled at the first call, or with example_inputs=")
        return self._last.program

    @property
    def graphs(self) -> Mapping[str, fx.GraphModule]:
        """The lowered graph of each device, by name."""
        return self.program.device_graphs

    @property
    def variables(self) -> Mapping[str, MirroredVariable]:
        """The variables of the last call's program, by name; tied weights by each of their names."""
        program = self.program
        if self._last is not None and not self._store.holds(program):
            with self._exclusive():
                self._synchronize(self._last)
        found = {
            name: MirroredVariable(variable, self._options.devices, self._store)
            for name, variable in program.variables.items()
            if name in self._state.tensors
        }
        for name, variable in self._state.names.items():
            if variable in found:
                found.setdefault(name.removeprefix("model."), found[variable])
        return found

    def explain(self) -> Explanation:
        """Where the time of the last steps went, bucket by bucket: `mirrorc.runtime.profiling.explanation.Explanation`; print it.

        Raises:
            ExecutionError: no step was recorded; says why.
        """
        program, steps = self._recorded()
        return explain_steps(program, steps, self._last is not None and self._last.is_interleaved)

    def memory(self) -> MemoryReport:
        """What memory a step takes, in bytes by device and kind: `mirrorc.runtime.memory.report.MemoryReport`; print it.

        It is added up from the program of the last call, or of `prepare`; that need not have run.

        Raises:
            ExecutionError: there is no program yet.
        """
        program, last = self.program, self._last
        assert last is not None, "who has a program has an executor"
        return report_memory(program, last.regions, self._optimizers)

    def timeline(self, path: str | os.PathLike[str]) -> Path:
        """Writes the last steps, call by call, as a trace for https://ui.perfetto.dev or chrome://tracing; gives its path.

        Args:
            path: the file to write, as JSON; compressed if it ends in ``.gz``. Folders that are missing are made.

        Raises:
            ExecutionError: no step was recorded; says why.
        """
        return write_timeline(path, *self._recorded())

    def _recorded(self) -> tuple[Program, tuple[RecordedStep, ...]]:
        last = self._last  # another thread may run the step meanwhile
        if self._options.cuda_graphs:
            raise ExecutionError(
                "no step was recorded: with cuda_graphs=True a step is one launch, and none of its calls has a time of its "
                "own; compile with cuda_graphs=False to see where the time goes, or profile with torch.profiler"
            )
        steps = recorded_steps(self._options.record, last.recorder if last is not None else None)
        assert last is not None, "what has no program has no steps"
        return last.program, steps

    def close(self) -> None:
        """Ends the threads. The model and the optimizer keep their values; the step cannot be called again."""
        self._is_closed = True
        if self._pool is not None:
            self._pool.close()
        for executor in self._executors.values():
            executor.release()

    def __enter__(self) -> Step:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _called(module: fx.GraphModule) -> list[str]:
    return list(dict.fromkeys(str(node.target) for node in module.graph.nodes if node.op == "call_module"))
