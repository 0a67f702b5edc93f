"""`compile`: a step from the user's options."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mirrorc.capture.front_ends.fallback import ladder_named
from mirrorc.capture.model.model_state import ModelState
from mirrorc.capture.model.refused_models import check_model
from mirrorc.compression import Payload, TopK
from mirrorc.coordination.compile_round import JointCompilation
from mirrorc.ir.devices import Device
from mirrorc.ir.links import check_link
from mirrorc.ir.workers import World
from mirrorc.options.all_reduce import checked_all_reduce
from mirrorc.options.bucketing import checked_packing, with_default_cap
from mirrorc.options.dynamic_shapes import check_dynamic
from mirrorc.options.gradient_clipping import ClipNorms, clipping
from mirrorc.options.mixed_precision import checked_autocast
from mirrorc.options.option import Request
from mirrorc.options.placement import placing
from mirrorc.options.step_options import (
    LONGEST_WAIT_SECONDS,
    StepOptions,
    check_loss_function,
    dump_directory,
    example_call,
)
from mirrorc.options.step_pipeline import step_pipeline
from mirrorc.options.table import (
    OPTIONS,
    BackendName,
    Compression,
    Exchange,
    FiniteCheck,
    FrontEndName,
    LinkName,
    LossReduction,
    PlacementName,
    WorkersOption,
    checked_arguments,
)
from mirrorc.options.tf_communication import CommunicationOptions
from mirrorc.options.worker_options import check_devices_of_worker, joined_workers, worker_devices, workers_of
from mirrorc.packing import GradientOrder, Packing
from mirrorc.passes import AllReduceAlgorithm
from mirrorc.pipeline.pipeline_edits import Placed
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.codegen.backends import Backend, backend_named
from mirrorc.step import Step
from mirrorc.user.optimizer_groups import check_optimizers


def compile(
    model: nn.Module,
    devices: int | Sequence[str | torch.device] | None = None,
    *,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    loss_fn: Callable[[Any, Any], Any] | None = None,
    loss_reduction: LossReduction = "mean",
    backend: BackendName = "inductor",
    dump: str | Path | None = None,
    print_after: Sequence[str] = (),
    print_after_all: bool = False,
    passes: Sequence[Pass] | None = None,
    add_passes: Sequence[Placed] = (),
    disable_passes: Sequence[str] = (),
    bucket_cap_mb: float | None = None,
    first_bucket_mb: float | None = None,
    packing: Packing | None = None,
    gradient_order: GradientOrder = "ready",
    link: LinkName | None = None,
    all_reduce: str | AllReduceAlgorithm = "native",
    communication_options: CommunicationOptions | None = None,
    exact_order: bool = False,
    capture: FrontEndName = "auto",
    timeout_seconds: float = 1800.0,
    record: bool = True,
    cuda_graphs: bool = False,
    return_outputs: bool = False,
    microbatches: int = 1,
    activation_memory: float | None = None,
    progress: bool = True,
    autocast: torch.dtype | str | bool | None = None,
    scaler: torch.amp.GradScaler | None = None,
    clip_grad_norm: ClipNorms = None,
    clip_grad_value: float | None = None,
    check_finite: FiniteCheck = False,
    check_replicas_every: int | None = None,
    example_inputs: Any = None,
    workers: WorkersOption = "auto",
    process_group: Any = None,
    world: World | None = None,
    rank: int | None = None,
    exchange: Exchange = "auto",
    early_update: bool = True,
    compression: Compression | TopK | Payload | None = None,
    shard_optimizer: bool = False,
    placement: PlacementName | Mapping[str, str | torch.device] = "auto",
    dynamic: bool | None = False,
    **declared: Any,
) -> Step:
    """Compiles a training step that runs on several devices and computes what it would compute on one.

    Args:
        model: a model written for one device. It stays the user's: its parameters are replica 0's.
        devices: names such as ``["cpu:0", "cpu:1"]`` or ``["cuda:0", "cuda:1"]``; a number, of GPUs if
            torch sees any; None for all visible GPUs, else one CPU. Logical CPUs share the processor's threads. ``cuda:0/1``
            is a second logical device on GPU 0.
        optimizer: over parameters of the model; or a list of several over different ones, which run in this order.
        loss_fn: ``loss_fn(output, target)``; None if the model returns its loss. The loss is a scalar tensor: alone, as
            the first item of a tuple, or as ``loss`` of a dict or an object.
        loss_reduction: "mean" if the loss is a mean over the examples of a batch, "sum" if it is a sum.
        backend: "inductor" compiles regions; "eager" runs them as they are.
        dump: a directory for one file per pass, its diff and an index; default: the environment variable MIRRORC_DUMP.
        print_after: names of passes after which the program is printed, on standard error.
        print_after_all: print it after each pass.
        passes: a pipeline of your own, instead of `mirrorc.passes.default_pipeline`. Options of its passes, such as
            bucket sizes and the link, are set there, and refused here.
        add_passes: passes of your own, each placed by `mirrorc.before` or `mirrorc.after` a pass of the pipeline.
        disable_passes: names of passes to leave out.
        bucket_cap_mb, first_bucket_mb, link: see `mirrorc.passes.default_pipeline`, also for the defaults. Over several
            workers on CPUs the default cap is 4 MiB: the step waits for the bytes still unsent after backward.
        packing: the gradients that are reduced together: a plan of `mirrorc.packing`, where ``bucket_cap_mb`` and
            ``first_bucket_mb`` are short for `mirrorc.packing.ByBytes`; a number of packs of equal length
            (`EqualPacks`), 0 for one all-reduce per gradient; or a function from a list of `mirrorc.packing.Gradient`
            (name, elements, dtype, ready) to groups of their names.
        gradient_order: the order of gradients in packs: "ready" as backward computes them, "reversed" against the model's
            order of parameters, or a key function of a `mirrorc.packing.Gradient`. Buckets are always reduced as they
            become ready.
        all_reduce: the algorithm for sums over devices: "native" is the link's own; "reduce-to-one",
            "hierarchical-copy", "ring", "halving-doubling", "tree" and "round-robin" send messages between devices;
            "auto" chooses for each bucket, with a remark on the reason. With options: ``"reduce-to-one{device=1}"``, or
            an object of `mirrorc.all_reduce_algorithms`.
        communication_options: `mirrorc.CommunicationOptions`, in place of the options that it stands for.
        exact_order: leave out the passes that change the bits of a step (``changes_bits``), such as
            ``factor-gradients``. Each replica computes its gradients as the model's backward does, and they are added in
            the order of replicas. A remark names the passes.
        capture: the front end that traces the model. "dynamo" traces graphs for compiled regions. "autograd" runs
            forward and backward as plain PyTorch, for untraceable Python and control flow that depends on data. "auto"
            tries them in this order; a warning and a remark give the reason if "dynamo" fails.
        timeout_seconds: the longest wait of a device for another one; math.inf for no bound.
        record: keep the times of the last steps, for `Step.explain` and `Step.timeline`; costs a few microseconds a
            step.
        cuda_graphs: on one GPU, capture the step as a CUDA graph after a few calls, and replay it. It is for steps in
            which Python launches kernels more slowly than the GPU runs them. Times are not recorded.
        return_outputs: ``loss, outputs = step(...)``: the model's outputs, in containers of their own kinds, without
            gradients; if loss_fn returns more than the loss, a pair of both. Tensors with a row for each example have
            those of the whole batch, in its order. A scalar is the mean over examples; marked by `mirrorc.summed`, the
            sum over the replicas. Anything else, such as other scalars of integers, is a `mirrorc.PerReplica` with the
            value of each replica.
        microbatches: split each device's shard of the batch into this many parts, run in turn, with one reduction and
            one update, so that memory holds activations of one part. The gradient is that of the whole batch. Parts differ by at
            most one example; a part has at least one, so a small batch has fewer parts. Evaluations run in one part.
        activation_memory: the bound of each device's peak of activations, as `Step.memory` counts them: bytes as an
            int, or as a float a fraction of the peak without a bound (of the worst device, in the largest batch so far);
            1.0 and None for no bound. Backward recomputes the values of forward that take least time. Numbers are the
            same (with Inductor but for the last bits). The step is compiled several times until it keeps the bound.
        progress: report a compilation of more than 2 s: in a line on standard error if that is a terminal, else in the
            log (level INFO).
        autocast: run forward and loss under `torch.autocast` with this dtype, as a call within that context does.
        scaler: the loss scaling of this scaler, as its ``scale``, ``unscale_``, ``step`` and ``update`` do on one
            device: multiply the loss, divide the gradients, skip the update if one is not finite, and set the next
            scale. `Step.num_skipped` counts skipped updates.
        clip_grad_norm: scale the gradients before each update so that their norm, over all of them and the whole batch,
            is at most this, as `torch.nn.utils.clip_grad_norm_` does. `ClipGradNorm` gives another norm; a sequence
            gives a bound for each group of the optimizers in their order. `Step.grad_norm` has the norm; math.inf only
            measures it.
        clip_grad_value: clamp each element of a gradient to plus or minus this before each update, after the norm's
            scaling.
        check_finite: True raises `NonFiniteError` if a replica's loss or a reduced gradient is infinite or NaN, and
            changes nothing. "skip" skips the update of such a step, returns its loss, and counts it in
            `Step.num_skipped`.
        check_replicas_every: every so many steps, compare checksums of parameters and optimizer state of all replicas,
            and raise `ExecutionError` if the memory of one has gone bad; None or 0 for never. Devices that share their
            parameters have nothing to compare, with a remark. Several workers compare theirs, and all raise
            `CommunicationError`.
        example_inputs: compile now, not at the first call: a tuple of positional arguments, a dict of keyword
            arguments, or a pair of both.
        workers: "auto" trains together with the other workers (processes) of an initialised process group, torchrun or
            TF_CONFIG, see `mirrorc.cluster`: each compiles the same step over its own devices, and calls it with its
            own examples. None trains in this process alone.
        process_group: a group of `torch.distributed` with all workers, if that is not the default group.
        world: compile for one of several workers that need not be there: the step can be prepared, printed, saved and
            compared, but not called. None for a step that runs.
        rank: the worker of ``world`` whose program is compiled; None for worker 0.
        exchange: the form of gradients between workers, or between devices that do not share parameters. "dense" sends
            each bucket whole. "factors" sends the factors of all gradients that have some (the two matrices of a linear
            layer's product, rows and indices of a table); each receiver computes the sum, or its share, from them.
            "auto" chooses for each gradient: least time at the first call, or fewer bytes between devices. Where
            nothing is sent, a remark says that it has no effect.
        early_update: over several workers, update each bucket as soon as its own sum has arrived, while others are in
            flight. If a connection is lost meanwhile, parameters are between two steps, and nothing uses them until
            model and optimizer are restored. False commits when all sums have arrived, so a failure leaves the parameters
            before or after the step.
        compression: over several workers, send sums of gradients as "bfloat16" or "float16", half the bytes of float32;
            this changes numbers. A worker's devices add up in the gradients' dtype first, and norms, bounds and updates
            take the sum over workers in it. Factors are sent unchanged. A remark has the bytes with and without. With
            `mirrorc.TopK`, each worker sends the largest elements of its sum; with a `mirrorc.compression.Payload` of
            your own, its message. The rest is added in the next step (error feedback); `Step.unsent_state` has it for
            checkpoints.
        shard_optimizer: over several workers, each updates a shard of every bucket and has the optimizer's state of
            that shard alone; new parameters are gathered over all workers. Before ``optimizer.state_dict()``, all
            workers call `Step.gather_optimizer_state`.
        placement: the home of parameters, and the devices that update them. "shared": one copy in memory that all
            devices share, each updating a share. "mirrored": a copy on each device, which it updates whole. "auto":
            "shared" where possible, else "mirrored". "central": the first device has all sums, updates and the
            optimizer's state. "least-loaded": parameters are distributed over devices by bytes, the largest first; the owner
            sums up and updates each, and all others write a copy once a step. "cached": the same for large parameters,
            and the first device owns small ones. A dict names owners, ``{"embedding.weight": "cpu:0"}``, as a device's
            name or a `torch.device`, with ``"*"`` for all others: a device, "central", "least-loaded" or "cached".
            Numbers are the same but for the last bits, where the order of additions or the cuts of compiled regions
            differ.
        dynamic: False compiles each new size of an argument. None uses symbols for sizes that change: the second size
            of a dimension compiles one more program for all of its sizes. True uses symbols in the first program
            already. Some sizes stay numbers, such as numbers of examples beside microbatches: see docs/semantics.md.
        declared: options that were declared outside of the package, see `mirrorc.options.option.Option`.

    Raises:
        TypeError, ValueError: an argument is wrong; names it and the remedy.
        PassError: `passes`, `add_passes` and `disable_passes` make no pipeline of a whole step; says why, and the
            remedy.
        CommunicationError: a worker does not come, does not compile the same step, or raises any other error; all
            present workers raise it.
    """
    asked = {**locals()}
    del asked["declared"]
    with JointCompilation(asked) as joint:
        asked = checked_arguments(asked, declared)
        check_loss_function(loss_fn)
        check_model(model)
        planned = checked_packing(asked)
        longest_wait = min(float(asked["timeout_seconds"]), LONGEST_WAIT_SECONDS)
        program_workers = workers_of(world, rank)
        parsed = worker_devices(program_workers, devices)
        if joint.round is not None:
            program_workers = joined_workers(joint.round, parsed, longest_wait)
        check_devices_of_worker(program_workers, parsed, disable_passes)
        request = Request(asked, program_workers, parsed)
        OPTIONS.check_passes(request)
        OPTIONS.check_exclusions(request)
        if shard_optimizer and program_workers.are_several:
            program_workers = replace(program_workers, shards_optimizer=True)
        check_link(asked["link"], parsed)
        chosen_backend = usable_backend(backend, parsed)
        model_state = ModelState(model, loss_fn)
        model_state.check_memory()
        optimizers = check_optimizers(optimizer, model_state.parameters)
        used_scaler = scaler if scaler is not None and scaler.is_enabled() else None
        most_activations = (
            None if activation_memory == 1.0 and isinstance(activation_memory, float) else activation_memory
        )
        parameters = {
            **with_default_cap(planned, program_workers, parsed, asked),
            "link": asked["link"],
            "all_reduce": checked_all_reduce(request),
            "microbatches": microbatches,
            "chooses_checkpoints": most_activations is not None,
            **clipping(clip_grad_norm, clip_grad_value, optimizers),
            "scales_loss": used_scaler is not None,
            "fused_groups": optimizers.fused(parsed[0].torch_device.type),
            "check_finite": check_finite,
            "over_workers": program_workers.are_several,
            "early_update": early_update,
            "compression": compression,
            "shard_optimizer": shard_optimizer,
            **placing(model_state, parsed, placement),
            **chosen_backend.preferences(parsed[0].torch_device),
        }
        if most_activations is not None:  # reserved memory would come on top of activations
            parameters["reserves_memory"] = False
        pipeline, remarks = step_pipeline(request, parameters)
        chosen = StepOptions(
            model=model,
            optimizers=optimizers,
            loss_fn=loss_fn,
            loss_reduction=loss_reduction,
            backend=chosen_backend,
            ladder=ladder_named(capture),
            devices=parsed,
            pipeline=pipeline,
            dump=dump_directory(dump),
            print_after=tuple(print_after),
            print_after_all=print_after_all,
            timeout_seconds=longest_wait,
            record=record,
            cuda_graphs=cuda_graphs,
            return_outputs=return_outputs,
            microbatches=microbatches,
            activation_memory=most_activations,
            progress=progress,
            scaler=used_scaler,
            autocast=checked_autocast(autocast, parsed),
            check_replicas_every=check_replicas_every or 0,
            program_workers=program_workers,
            cluster=joint.cluster,
            compilation=joint.round,
            exchange=exchange,
            dynamic=dynamic,
            remarks=tuple(remarks),
        )
        check_dynamic(chosen)
        example = None if example_inputs is None else example_call(example_inputs)
        step = Step(chosen, model_state)
        if example is not None:
            with ExitStack() as closing:
                closing.push(step)  # nobody has a step whose preparation failed
                step.prepare(*example[0], **example[1])
                closing.pop_all()
        return step


def usable_backend(name: str, devices: Sequence[Device]) -> Backend:
    """The backend of this name; "eager", with a warning, if it cannot work on the devices."""
    backend = backend_named(name)
    objection = backend.objection(devices[0].torch_device)
    if not objection:
        return backend
    warnings.warn(f"{objection}: backend='eager' is used instead of {name!r}", stacklevel=3)
    return backend_named("eager")
