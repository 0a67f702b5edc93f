"""Replays a step on a single GPU as a CUDA graph."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from mirrorc.custom_ops.eager_calls import OPAQUE
from mirrorc.errors import ExecutionError
from mirrorc.ir import ops
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.messages.problem import message, problem
from mirrorc.messages.source_lines import source_line, users_stack_level
from mirrorc.runtime.devices.events import wait_device
from mirrorc.runtime.state.optimizers.bucket_optimizers import BucketOptimizers
from mirrorc.user.optimizer_groups import OptimizerGroups, check_capturable

NUM_WARM_UP_STEPS = 3  # as in torch.cuda.make_graphed_callables: kernels are tuned, optimizers make their state
_MANY_RENEWALS = 8  # after this many, a warning says so, once

Function = Callable[[list[Any]], torch.Tensor]
"""A replica's generated function. It takes a list of tensors, empties it, and returns the loss."""


def check_captured_program(program: Program, groups: OptimizerGroups) -> None:
    seeds = [n for g in program.shard_graphs for n in placeholders_of(g, program.arguments, ArgumentKind.SEED)]
    drawn = next((user for seed in seeds for user in seed.users), None)
    if drawn is not None:
        what, why = (
            f"capture random numbers, as {drawn.name} draws them",
            "their seed is given on the host in every step",
        )
        raise _refusal(what, why, "train without them, dropout with p=0", at=source_line(drawn))
    if checked := _first_call(program, ops.check):
        what = f"capture an assert on a tensor, {checked.kwargs['text']!r}"
        raise _refusal(what, "the host looks at it in every step", "leave the assert out", at=source_line(checked))
    if _first_call(program, *OPAQUE):
        raise _refusal("capture what runs as plain PyTorch (capture='autograd')", "each run may go another way")
    if _first_call(program, ops.gather):
        raise _refusal("hand outputs to the caller", "the next step uses the same memory", "leave return_outputs out")
    check_capturable(groups, program.variables)


def _first_call(program: Program, *targets: Any) -> fx.Node | None:
    return next((node for graph in program.shard_graphs for node in calls_to(graph, *targets)), None)


def _refusal(what: str, why: str, *remedies: str, at: str = "") -> ValueError:
    fixes = (*remedies, "compiler=mirrorc.Compiler(cuda_graphs=False)")
    return problem(ValueError, f"MC1501: cuda_graphs=True cannot {what}", why, fixes, at=at)


class CudaCapturer:
    """Captures graphs with `torch.cuda.graph` into one private memory pool.

    Each replay may overwrite the pool, so inputs, loss, variables and optimizer state are outside. An anchor graph
    keeps the pool alive. After a failed capture, the next graph gets a new pool.
    """

    def __init__(self, device: torch.device, timeout_seconds: float) -> None:
        self._device, self._timeout_seconds = device, timeout_seconds
        self._anchor: torch.cuda.CUDAGraph | None = None
        # torch's allocator keeps pointers to graphs whose capture did not end
        self._failed: list[torch.cuda.CUDAGraph] = []

    def capture(self, function: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Runs in the device's thread, on the stream of the warm-up steps."""
        if self._anchor is None:
            self._anchor = self._capture(lambda: torch.zeros((), device=self._device))
        try:
            return self._capture(function, pool=self._anchor.pool())
        except BaseException:
            # torch still counts allocations of the failed capture as the pool's, and refuses another capture into this pool
            self._failed.append(self._anchor)
            self._anchor = None
            raise

    def _capture(self, function: Callable[[], Any], **options: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # other threads may use the GPU meanwhile, to pin batches for example: only this thread queues work to capture
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local", **options):
                function()
        except BaseException:
            self._failed.append(graph)
            raise
        return graph

    def wait(self) -> bool:
        """Waits for the device; False after a timeout."""
        return wait_device(self._device, self._timeout_seconds)


_still_running: list[torch.cuda.CUDAGraph] = []
"""Graphs on GPUs that hang are never freed, because a running graph still uses its memory."""


class StepGraph:
    """Runs a replica's function eagerly for a few steps, then captures and replays it.

    Arguments and loss have static device memory.
    """

    def __init__(self, capturer: CudaCapturer, device: torch.device) -> None:
        self._capturer, self._device = capturer, device
        self._key: tuple[Any, ...] = ()
        self._num_renewals = 0
        self._num_left = NUM_WARM_UP_STEPS
        self._inputs: list[torch.Tensor] = []
        self._loss: torch.Tensor | None = None
        self._graph: torch.cuda.CUDAGraph | None = None

    def is_for(self, **fixed: Any) -> bool:
        """True if the graph, or the warm-up, is valid for these arguments of `renew`."""
        return tuple(fixed.values()) == self._key

    def renew_for(self, program: Program, optimizers: BucketOptimizers, *, memory: int) -> None:
        fixed = {"memory": memory, "hyperparameters": optimizers.baked_hyperparameters()}
        if not self.is_for(**fixed):
            check_capturable(optimizers.groups, program.variables)
            self.renew(**fixed)

    def renew(self, **fixed: Any) -> None:
        """Drops the graph. ``fixed`` has the constants of the next graph, by readable names."""
        key = tuple(fixed.values())
        changed = [name for name, old, new in zip(fixed, self._key, key, strict=False) if old != new]
        self._key = key
        self.release()
        self._num_renewals += bool(changed)
        if self._num_renewals == _MANY_RENEWALS and changed:
            warnings.warn(
                message(
                    f"MC3404: the CUDA graph of the step was dropped {_MANY_RENEWALS} times, now because of "
                    f"{' and '.join(changed)}",
                    f"after every change but the learning rate's, {NUM_WARM_UP_STEPS} steps run without a graph",
                    (
                        f"leave {' and '.join(changed)} as they are between steps",
                        "compiler=mirrorc.Compiler(cuda_graphs=False)",
                    ),
                ),
                stacklevel=users_stack_level(),
            )

    def release(self) -> None:
        if self._graph is not None:
            if self._capturer.wait():
                self._graph.reset()
            else:
                _still_running.append(self._graph)
        self._graph, self._loss, self._num_left = None, None, NUM_WARM_UP_STEPS

    @property
    def is_captured(self) -> bool:
        return self._graph is not None

    @property
    def is_due(self) -> bool:
        return self._graph is None and self._num_left == 0

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Copies a step's arguments, of constant shapes and strides, into the graph's static inputs."""
        if not self._inputs:
            self._inputs = [
                torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=self._device)
                for value in values
            ]
        for memory, value in zip(self._inputs, values, strict=True):
            _copy(memory, value)

    def capture(self, function: Function) -> None:
        """Runs nothing, so variables stay unchanged."""
        loss = self._loss
        assert loss is not None, "it has run before"
        raised: list[BaseException] = []  # leaving torch.cuda.graph raises a less precise exception

        def step() -> None:
            try:
                loss.copy_(function(list(self._inputs)))
            except Exception as error:
                raised.append(error)
                raise

        try:
            self._graph = self._capturer.capture(step)
        except Exception as error:  # noqa: BLE001 - whatever it is, it says why
            cause = raised[0] if raised else error
            raise problem(
                ExecutionError,
                "MC1501: the step cannot be captured as a CUDA graph",
                f"{type(cause).__name__}: {cause}",
                "compiler=mirrorc.Compiler(cuda_graphs=False), which runs it call by call",
            ).with_traceback(cause.__traceback__) from cause

    def run(self, function: Function) -> torch.Tensor:
        if self._graph is not None:
            assert self._loss is not None
            self._graph.replay()
            return self._loss
        loss = function(list(self._inputs))
        self._num_left -= 1
        if self._loss is None:
            self._loss = torch.empty_like(loss)
        return loss


def _copy(memory: torch.Tensor, value: torch.Tensor) -> None:
    """Copies expanded elements only once."""
    for dim, stride in enumerate(memory.stride()):
        if stride == 0:
            memory, value = memory.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    memory.copy_(value)
