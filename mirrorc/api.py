"""`compile`: a step from the user's options; `plan`: a worker's program, made without that worker."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from mirrorc.calls.data_parallel import DataParallel, refuse_options_of_steps
from mirrorc.capture.front_ends.front_end import ladder_named
from mirrorc.capture.model.function_module import FunctionModule, module_of_function, with_trained_modules
from mirrorc.capture.model.model_state import ModelState
from mirrorc.capture.model.refused_models import check_model
from mirrorc.cluster.bounded_calls import seconds_of
from mirrorc.coordination.compile_round import JointCompilation, joint_compilation
from mirrorc.errors import PassError
from mirrorc.ir.devices import Device
from mirrorc.ir.links import check_link
from mirrorc.ir.program import Program
from mirrorc.ir.workers import ALONE, Workers, World
from mirrorc.messages.problem import problem, with_line
from mirrorc.messages.source_lines import warn
from mirrorc.messages.wording import listed
from mirrorc.options.communication import Communication, checked_algorithm, planned_buckets
from mirrorc.options.compiler import Compiler
from mirrorc.options.debug import Debug
from mirrorc.options.dynamic_shapes import check_dynamic
from mirrorc.options.gradient_clipping import ClipNorms, clipping
from mirrorc.options.memory import Memory, activation_bound
from mirrorc.options.option import Request
from mirrorc.options.placement import placing
from mirrorc.options.step_options import (
    LONGEST_WAIT_SECONDS,
    StepOptions,
    check_devices_of_worker,
    check_loss_function,
    checked_autocast,
    dump_directory,
    joined_workers,
    worker_devices,
)
from mirrorc.options.step_pipeline import step_pipeline
from mirrorc.options.table import MODES, OPTIONS, Distributed, FiniteCheck, LossReduction, Mode, checked_arguments
from mirrorc.runtime.codegen.regions import Backend, backend_named
from mirrorc.step import Step, module_calls_of
from mirrorc.user.optimizer_groups import OptimizerGroups, check_optimizers

_AS_ASKED = ("model", "loss_reduction", "cuda_graphs", "microbatches", "progress", "check_replicas_every", "exchange")


def compile(
    model: nn.Module | Callable[..., Any],
    devices: int | Sequence[str | torch.device] | None = None,
    *,
    modules: nn.Module | Sequence[nn.Module] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    loss_reduction: LossReduction = "mean",
    return_outputs: bool = False,
    microbatches: int = 1,
    clip_grad_norm: ClipNorms = None,
    clip_grad_value: float | None = None,
    autocast: torch.dtype | str | bool | None = None,
    scaler: torch.amp.GradScaler | None = None,
    check_finite: FiniteCheck = False,
    distributed: Distributed = "auto",
    mode: Mode | None = None,
    program: str | os.PathLike[str] | Program | None = None,
    communication: Communication | None = None,
    memory: Memory | None = None,
    compiler: Compiler | None = None,
    debug: Debug | None = None,
    **declared: Any,
) -> Step:
    """Compiles a training step that runs on several devices and computes what it would compute on one.

    Args:
        model: a model written for one device. It stays the user's object, with the parameters of replica 0. Or a
            function of a batch that returns the loss: alone, as the first item of a tuple, or as ``loss`` of a dict or
            an object. The step then returns the function's result, with loss and metrics of the whole batch. See
            `train_step`.
        modules: for a function, the modules that it calls. Their parameters are trained, and each device has a copy.
        devices: names such as ``["cpu:0", "cpu:1"]`` or ``["cuda:0", "cuda:1"]``; a number of GPUs, or of CPUs if torch
            sees no GPU; None for all visible GPUs, else one CPU. Logical CPUs share the processor's threads.
            ``cuda:0/1`` is a second logical device on GPU 0.
        optimizer: over parameters of the model; or a list of optimizers over different parameters, which run in this
            order; None for a step without updates, for `Step.gradients` and evaluations.
        loss_fn: ``loss_fn(output, target)``; None if the model returns its loss. The loss is a scalar tensor: alone, as
            the first item of a tuple, or as ``loss`` of a dict or an object.
        loss_reduction: "mean" if the loss is a mean over the examples of a batch, "sum" if it is a sum.
        return_outputs: ``loss, outputs = step(...)``: the model's outputs, without gradients; if loss_fn returns more
            than the loss, a pair of both. Tensors with a row for each example have the rows of the whole batch, in its
            order. A floating-point scalar is the mean over examples. A value marked by `mirrorc.summed` is the sum over
            replicas. Anything else, such as an integer, is a `mirrorc.PerReplica`.
        microbatches: split each device's shard of the batch into this many parts, run in turn, with one reduction and
            one update. Memory then holds activations of one part only. Parts differ by at most one example; a small
            batch has fewer parts. Evaluations run in one part.
        clip_grad_norm: scale the gradients of the whole batch before each update so that their total norm is at most
            this, as `torch.nn.utils.clip_grad_norm_` does. `ClipGradNorm` selects another norm; a sequence has a bound
            for each group of the optimizers. `Step.grad_norm` has the norm; math.inf only measures it.
        clip_grad_value: clamp each element of a gradient to plus or minus this before each update, after scaling by the
            norm.
        autocast: run forward and loss under `torch.autocast` with this dtype, as a call within that context does.
        scaler: scale the loss as this scaler's ``scale``, ``unscale_``, ``step`` and ``update`` do on one device:
            multiply the loss, divide the gradients, skip the update if one is not finite, and set the next scale.
            `Step.num_skipped` counts skipped updates.
        check_finite: True raises `NonFiniteError`, without changes, if a replica's loss or a reduced gradient is
            infinite or NaN. "skip" skips the update of such a step, returns its loss, and counts it in
            `Step.num_skipped`.
        distributed: "auto" trains together with the other workers (processes) of an initialised process group, torchrun
            or TF_CONFIG, see `mirrorc.cluster`. Each worker compiles the same step over its own devices, and calls it
            with its own examples. True refuses to train without other workers; False trains in this process only.
        mode: a preset for options that are not given, with a remark: "debug" (eager regions in exact order, checks for
            finite values, dumps of every pass in ``mirrorc_dump``), "fast-start" (eager regions), "reproducible"
            (``exact_order=True``), "slow-network" (gradients are sent as bfloat16).
        program: an edited program of this step, or its file, at any stage (`Program.save`, `Debug.dump`). The remaining
            passes complete it. Buckets and the order of calls may be edited, the computation of regions may not. Calls
            with other sizes are compiled without it, with a remark.
        communication: buckets, algorithm, link, compression, timeout.
        memory: placement of parameters and optimizer state, and a bound of activations.
        compiler: backend, capture, symbolic sizes, CUDA graphs, passes of your own.
        debug: dumps, prints, progress, checks of replicas.
        declared: options declared outside of the package, see `mirrorc.options.option.Option`.

    Raises:
        TypeError, ValueError: an argument is wrong; names it and the remedy.
        PassError: `Compiler.passes`, ``add`` and ``disable`` do not result in a pipeline of a whole step.
        CommunicationError: a worker is missing, does not compile the same step, or raises any other error; raised by
            all present workers.
    """
    arguments = {**locals()}
    del arguments["declared"]
    with joint_compilation(distributed, communication) as joint:
        return make_step(arguments, declared, joint, ALONE)


def train_step(
    modules: nn.Module | Sequence[nn.Module],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    devices: int | Sequence[str | torch.device] | None = None,
    **options: Any,
) -> Callable[[Callable[..., Any]], Step]:
    """A decorator that compiles a function of a batch into a training step: any loss, any inputs.

    ::

        @mirrorc.train_step(model, optimizer, devices=2)
        def step(x, y):
            logits = model(x)
            return F.cross_entropy(logits, y), {"accuracy": (logits.argmax(1) == y).float().mean()}

        loss, metrics = step(x, y)

    Args:
        modules: as for `compile`; the function must refer to them by its closure or globals.
        **options: of `compile`.
    """
    return lambda function: compile(function, devices, modules=modules, optimizer=optimizer, **options)


def data_parallel(
    model: nn.Module,
    devices: int | Sequence[str | torch.device] | None = None,
    *,
    reduction: Literal["examples", "workers", "sum"] = "examples",
    distributed: Distributed = "auto",
    communication: Communication | None = None,
    compiler: Compiler | None = None,
    debug: Debug | None = None,
) -> DataParallel:
    """A module that runs a model on several devices, for a loop that computes the loss and updates itself.

    ::

        model = mirrorc.data_parallel(model, devices=2)
        loss = loss_fn(model(x), y)  # outputs of the whole batch
        loss.backward()              # p.grad has the gradient of the whole batch
        optimizer.step()

    Any loss is exact, because it gets the outputs of the whole batch. `compile` is faster, because its program has loss
    and update.

    Args:
        model: a model written for one device. It stays the user's object, and shares its parameters with the module.
        devices: as for `compile`.
        reduction: how to combine gradients of several workers, each of which computes a loss of its own batch: weighted
            by numbers of "examples", which is exact for means; by 1 / number of "workers", as DDP does; or their "sum".
        distributed: as for `compile`. Under torchrun, each worker runs the same loop on its own examples.
        communication: buckets, order, link, timeout.
        compiler: backend, symbolic sizes, passes of your own.
        debug: dumps, prints, progress.

    Raises:
        TypeError, ValueError: an argument is wrong; names it and the remedy.
    """
    if not isinstance(model, nn.Module):
        raise problem(
            TypeError,
            f"MC1201: model is a {type(model).__name__}, and data_parallel takes a module",
            fix=(
                "mirrorc.data_parallel(net), with a torch.nn.Module",
                "mirrorc.compile(function, modules=[net]), for a function that returns the loss",
            ),
        )
    if reduction not in ("examples", "workers", "sum"):
        fix = "reduction='examples', 'workers' or 'sum'"
        raise problem(ValueError, f"MC1002: reduction is {reduction!r}", fix=fix)
    shared: dict[str, Any] = {"distributed": distributed, "communication": communication}
    shared |= {"compiler": compiler, "debug": debug}
    arguments = {**OPTIONS.keywords, **shared, "model": model, "devices": devices}
    arguments |= {"loss_reduction": "sum", "return_outputs": True}
    with joint_compilation(distributed, communication) as joint:
        options, state = step_options(arguments, {}, joint, ALONE, is_module=True)
        refuse_options_of_steps(options)
        step = Step(options, state)
    again = functools.partial(data_parallel, devices=devices, reduction=reduction, **shared)
    return DataParallel(model, step, module_calls_of(step, reduction), step.close, again)


def plan(
    model: nn.Module | Callable[..., Any],
    batch: Any,
    devices: int | Sequence[str | torch.device] | None = None,
    *,
    world: World | None = None,
    rank: int = 0,
    **options: Any,
) -> Program:
    """Compiles the program of a training step without running it; also for one of several workers, none of which need
    exist.

    Without ``optimizer=`` it is the program of `Step.gradients`.

    Args:
        model: as for `compile`; it stays as it is.
        batch: this worker's examples: a tuple of positional arguments of a step, a dict of keyword arguments, or a pair
            of both.
        devices: of this worker; None for as many as ``world`` says.
        world: the workers; None for a process on its own.
        rank: the worker of ``world`` whose program is compiled.
        **options: as for `compile`.

    Raises:
        TypeError, ValueError, PassError: as `compile`.
        CaptureError: the model cannot be captured.
        ExecutionError: an open step has the model's parameters on other devices: plan before it, or with a copy of the
            model.
    """
    if world is not None and not isinstance(world, World):
        raise TypeError(f"MC1001: world is {world!r:.60}: give mirrorc.World(num_workers=2), or None")
    if world is None and rank:
        fix = "mirrorc.plan(..., world=mirrorc.World(num_workers=...))"
        raise problem(ValueError, f"MC1003: rank={rank} needs world=", fix=fix)
    if options.get("distributed", "auto") != "auto":
        why = "a plan joins no workers"
        fix = "mirrorc.plan(..., world=mirrorc.World(num_workers=2)), or leave distributed= out"
        raise problem(ValueError, "MC1003: distributed= cannot be used in a plan without world=", why, fix)
    arguments = {**OPTIONS.keywords, **options, "model": model, "devices": devices}
    declared = {name: arguments.pop(name) for name in options.keys() - OPTIONS.keywords.keys()}
    args, kwargs = _call_of(batch)
    with make_step(arguments, declared, JointCompilation(), world.worker(rank) if world is not None else ALONE) as step:
        return step.prepare(*args, **kwargs)


def _call_of(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, dict):
        return (), batch
    if not isinstance(batch, tuple):
        raise TypeError(
            f"MC1001: batch is a {type(batch).__name__}: give a tuple, (x, y), or a dict of keyword arguments"
        )
    if len(batch) == 2 and isinstance(batch[0], tuple) and isinstance(batch[1], dict):
        return batch
    return batch, {}


def make_step(
    arguments: Mapping[str, Any], declared: Mapping[str, Any], joint: JointCompilation, workers: Workers
) -> Step:
    return Step(*step_options(arguments, declared, joint, workers))


def step_options(
    arguments: Mapping[str, Any],
    declared: Mapping[str, Any],
    joint: JointCompilation,
    workers: Workers,
    *,
    is_module: bool = False,
) -> tuple[StepOptions, ModelState]:
    """Checks the options of a step. `plan` has ``workers``, and others have ``joint``."""
    others = {name: value for name, value in arguments.items() if name not in ("model", "devices")}
    asked, remarks = checked_arguments(others, declared)
    check_loss_function(asked["loss_fn"])
    asked["model"] = _trained_module(arguments["model"], asked)
    check_model(asked["model"], is_trained=not is_module)
    loss_fn = with_trained_modules(asked["loss_fn"], asked["model"], _optimized(asked["optimizer"]))
    devices = worker_devices(workers, arguments["devices"])
    if joint.round is not None:
        workers = joined_workers(joint.round, devices, _longest_wait(asked))
    check_devices_of_worker(workers, devices, asked["disable"])
    request = Request(asked, workers, devices)
    with _naming_mode(asked["mode"], remarks):
        OPTIONS.check_passes(request)
        OPTIONS.check_exclusions(request)
    check_link(asked["link"], devices)
    model_state = ModelState(asked["model"], loss_fn, has_autograds_gradients=is_module)
    model_state.check_memory()
    with _naming_mode(asked["mode"], remarks):
        return _chosen(request, joint, model_state, loss_fn, remarks, is_module=is_module), model_state


def _chosen(
    request: Request,
    joint: JointCompilation,
    model_state: ModelState,
    loss_fn: Callable[..., Any] | None,
    remarks: Sequence[str],
    *,
    is_module: bool,
) -> StepOptions:
    asked, workers, devices = request.asked, request.workers, request.devices
    backend = usable_backend(asked["backend"], devices)
    optimizers = check_optimizers(asked["optimizer"], model_state.parameters)
    scaler = asked["scaler"] if asked["scaler"] is not None and asked["scaler"].is_enabled() else None
    bound = activation_bound(asked["activations"])
    parameters = _pipeline_parameters(request, optimizers, model_state)
    parameters |= {"scales_loss": scaler is not None, "chooses_checkpoints": bound is not None}
    parameters |= backend.preferences(devices[0].torch_device)
    if bound is not None:  # reserved memory would come on top of activations
        parameters["reserves_memory"] = False
    pipeline, pipeline_remarks = step_pipeline(request, parameters)
    shards_optimizer = asked["shard_optimizer"] and workers.are_several
    chosen = StepOptions(
        **{name: asked[name] for name in _AS_ASKED},
        program=asked["program"],
        dynamic=asked["dynamic"],
        optimizers=optimizers,
        loss_fn=loss_fn,
        backend=backend,
        ladder=ladder_named(asked["capture"]),
        devices=devices,
        pipeline=pipeline,
        dump=dump_directory(asked["dump"]),
        print_after=asked["print_after"] if asked["print_after"] == "all" else tuple(asked["print_after"]),
        timeout_seconds=_longest_wait(asked),
        return_outputs=asked["return_outputs"] or isinstance(asked["model"], FunctionModule),
        activation_memory=bound,
        scaler=scaler,
        autocast=checked_autocast(asked["autocast"], devices),
        program_workers=replace(workers, shards_optimizer=True) if shards_optimizer else workers,
        cluster=joint.cluster,
        compilation=joint.round,
        remarks=(*remarks, *pipeline_remarks),
        is_module=is_module,
    )
    check_dynamic(chosen)
    return chosen


def _longest_wait(asked: Mapping[str, Any]) -> float:
    return min(seconds_of(asked["timeout"]), LONGEST_WAIT_SECONDS)


def _optimized(optimizers: Any) -> list[Any]:
    each = optimizers if isinstance(optimizers, list | tuple) else [optimizers]
    groups = [group for optimizer in each for group in getattr(optimizer, "param_groups", ())]
    return [parameter for group in groups for parameter in group["params"]]


def _trained_module(function: Any, asked: Mapping[str, Any]) -> nn.Module:
    if isinstance(function, DataParallel):
        why = "it runs on its devices by itself"
        fix = "mirrorc.compile(model.module, ...), with the plain model"
        raise problem(TypeError, "MC1201: model is a module of mirrorc.data_parallel already", why, fix)
    if isinstance(function, nn.Module) and asked["modules"] is None:
        return function
    if isinstance(function, nn.Module):
        raise problem(
            ValueError,
            f"MC1003: modules= ({type(asked['modules']).__name__}) cannot be used with a model",
            "it is for a function, and names the modules that this calls",
            "leave modules= out",
        )
    if isinstance(function, MethodType) and isinstance(function.__self__, nn.Module) and asked["modules"] is None:
        raise problem(
            TypeError,
            f"MC1201: model is the method {function.__name__} of {type(function.__self__).__name__}, not a module",
            "a step trains a module, or a function that computes the loss",
            (
                f"def loss(x, y): return loss_fn(net.{function.__name__}(x), y), with mirrorc.compile(loss, modules=[net])",
                f"give a module whose forward calls {function.__name__}",
            ),
        )
    if not callable(function) or isinstance(function, type) or asked["modules"] is None:
        raise problem(
            TypeError,
            f"MC1201: model is a {type(function).__name__}, neither a module nor a function",
            fix=(
                "mirrorc.compile(net, ...), with a torch.nn.Module",
                "mirrorc.compile(loss_of, modules=[net]), where def loss_of(x, y): return loss_fn(net(x), y)",
            ),
        )
    for name in ("loss_fn", "return_outputs"):
        if asked[name]:
            why = "the function computes the loss and what else it returns"
            fix = f"leave {name}= out"
            raise problem(ValueError, f"MC1003: {name}= cannot be used with a function in place of the model", why, fix)
    return module_of_function(function, asked["modules"])


@contextlib.contextmanager
def _naming_mode(mode: Mode | None, remarks: Sequence[str]) -> Iterator[None]:
    try:
        yield
    except (ValueError, PassError) as error:
        if mode is None or not any(f"{name}=" in str(error) for name in MODES[mode]):
            raise
        raise type(error)(with_line(str(error), "mode", listed(remarks))) from None


def _pipeline_parameters(request: Request, optimizers: OptimizerGroups, model_state: ModelState) -> dict[str, Any]:
    asked, workers, devices = request.asked, request.workers, request.devices
    same = ("order", "link", "microbatches", "check_finite", "early_update", "compression", "shard_optimizer")
    return {
        **{name: asked[name] for name in same},
        "buckets": planned_buckets(request),
        "algorithm": checked_algorithm(request),
        "over_workers": workers.are_several,
        "fused_groups": optimizers.fused(devices[0].torch_device.type),
        **clipping(asked["clip_grad_norm"], asked["clip_grad_value"], optimizers),
        **placing(model_state, devices, asked["placement"]),
    }


def usable_backend(name: str, devices: Sequence[Device]) -> Backend:
    """The backend of this name; "eager", with a warning, if it does not support the devices."""
    backend = backend_named(name)
    objection = backend.objection(devices[0].torch_device)
    if not objection:
        return backend
    fix = (
        "apt-get install g++, or another C++ compiler",
        "compiler=mirrorc.Compiler(backend='eager'), which does not warn",
    )
    warn(f"MC1502: backend='eager' is used instead of {name!r}", objection, fix)
    return backend_named("eager")
