"""Replays the steady state of a step on one GPU as a CUDA graph: one launch in place of one for every kernel."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from mirrorc.errors import ExecutionError
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.ir.source_lines import source_line
from mirrorc.optimizers import check_capturable

NUM_WARM_UP_STEPS = 3  # as torch.cuda.make_graphed_callables has it: kernels are tuned, optimizers make their state
_MANY_RENEWALS = 8  # so many are reported, once

Function = Callable[[list[Any]], torch.Tensor]
"""A replica's generated function: takes a list of tensors, which it empties, and gives the loss."""


def check_captured_program(program: Program, optimizer: torch.optim.Optimizer) -> None:
    """Refuses a captured program of which it is known that its steps cannot be replayed.

    Raises:
        ValueError: names the random operation or the update, and the remedy.
    """
    seeds = [n for g in program.shard_graphs for n in placeholders_of(g, program.arguments, ArgumentKind.SEED)]
    drawn = next((user for seed in seeds for user in seed.users), None)
    if drawn is not None:
        line = source_line(drawn)
        raise ValueError(
            f"cuda_graphs=True cannot capture random numbers: {drawn.name}{f', at {line},' if line else ''} draws them from a "
            "seed that is given on the host in every step; train without them (dropout with p=0), or compile with "
            "cuda_graphs=False"
        )
    check_capturable(optimizer, program.variables)


class Graph(Protocol):
    """What a GPU was given to do, kept. `torch.cuda.CUDAGraph` is one."""

    def replay(self) -> None:
        """Does it again, on the same memory."""

    def reset(self) -> None:
        """Frees it; it must not be running."""


class Capturer(Protocol):
    """Makes graphs. `CudaCapturer` is the one of CUDA's; tests have one of their own."""

    def capture(self, function: Callable[[], None]) -> Graph:
        """What a function queues on the current stream, which is not run by that; raises what the function raises."""

    def wait(self) -> None:
        """Returns when nothing runs any more."""


class CudaCapturer:
    """Captures with `torch.cuda.graph`, all into one private pool of memory. This has not run on a GPU yet.

    Graphs may share a pool if nothing in it has to outlive the replay of another. Nothing has: inputs, loss, variables and the
    optimizer's state are memory from outside. As pools end with their last graph, an anchor keeps this one.

    Args:
        device: the GPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._anchor: torch.cuda.CUDAGraph | None = None
        # torch's allocator keeps pointers to graphs whose capture did not end
        self._failed: list[torch.cuda.CUDAGraph] = []

    def capture(self, function: Callable[[], None]) -> Graph:
        """As in `Capturer`; in the device's thread, whose stream is the one that warmed up."""
        if self._anchor is None:
            self._anchor = self._capture(lambda: torch.zeros((), device=self._device))
        return self._capture(function, pool=self._anchor.pool())

    def _capture(self, function: Callable[[], Any], **options: Any) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.current_stream(self._device)
        try:
            # other threads, which pin batches say, may go on: all that is captured is queued by this one
            with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local", **options):
                function()
        except BaseException:
            self._failed.append(graph)
            raise
        return graph

    def wait(self) -> None:
        """As in `Capturer`."""
        torch.cuda.synchronize(self._device)


class StepGraph:
    """One replica's function, run as it is for a few steps, then captured and replayed.

    Arguments are copied into memory that stays where it is, and the loss is put in such memory.

    Args:
        capturer: captures it.
        device: what it runs on.
    """

    def __init__(self, capturer: Capturer, device: torch.device) -> None:
        self._capturer, self._device = capturer, device
        self._key: tuple[Any, ...] = ()
        self._num_renewals = 0
        self._num_left = NUM_WARM_UP_STEPS
        self._inputs: list[torch.Tensor] = []
        self._loss: torch.Tensor | None = None
        self._graph: Graph | None = None

    def is_for(self, **fixed: Any) -> bool:
        """Whether all is as it was when the steps before were run; takes what `renew` takes."""
        return tuple(fixed.values()) == self._key

    def renew(self, **fixed: Any) -> None:
        """Drops the graph, as something is other than it was when the steps before were run.

        Args:
            **fixed: what a graph is captured for, beside the function, by a name for people.
        """
        key = tuple(fixed.values())
        changed = [name for name, old, new in zip(fixed, self._key, key, strict=False) if old != new]
        self._key = key
        self.release()
        self._num_renewals += bool(changed)
        if self._num_renewals == _MANY_RENEWALS and changed:
            warnings.warn(
                f"cuda_graphs=True: the step's graph was dropped {_MANY_RENEWALS} times, now because {' and '.join(changed)} "
                f"changed; after every change but the learning rate's, {NUM_WARM_UP_STEPS} steps run without a graph: change "
                "less often, or compile with cuda_graphs=False",
                stacklevel=6,
            )

    def release(self) -> None:
        """Frees the graph; the next steps run without one, until it is captured anew."""
        if self._graph is not None:
            self._capturer.wait()
            self._graph.reset()
        self._graph, self._loss, self._num_left = None, None, NUM_WARM_UP_STEPS

    @property
    def is_captured(self) -> bool:
        """Whether `run` replays a graph."""
        return self._graph is not None

    @property
    def is_due(self) -> bool:
        """Whether it is to be captured before it is run."""
        return self._graph is None and self._num_left == 0

    def load(self, values: Sequence[torch.Tensor]) -> None:
        """Copies a step's arguments to where the function reads them; of the same shapes and strides in every step."""
        if not self._inputs:
            self._inputs = [_room_for(value, self._device) for value in values]
        for own, value in zip(self._inputs, values, strict=True):
            _copy(own, value)

    def capture(self, function: Function) -> None:
        """Captures the function, on the arguments that are loaded. That runs nothing: variables stay as they are.

        Raises:
            ExecutionError: it cannot be captured; says why.
        """
        loss = self._loss
        assert loss is not None, "it has run before"
        raised: list[BaseException] = []  # leaving torch.cuda.graph raises another, which says less

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
            raise ExecutionError(
                f"the step cannot be captured as a CUDA graph: {type(cause).__name__}: {cause}; compile with "
                "cuda_graphs=False, which runs it call by call"
            ).with_traceback(cause.__traceback__) from cause

    def run(self, function: Function) -> torch.Tensor:
        """Runs a step on the arguments that are loaded.

        Returns:
            The loss, in memory that the next step may write.
        """
        if self._graph is not None:
            assert self._loss is not None
            self._graph.replay()
            return self._loss
        loss = function(list(self._inputs))
        self._num_left -= 1
        if self._loss is None:
            self._loss = torch.empty_like(loss)
        return loss


def _room_for(value: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory with the strides that ``value.to(device)`` has."""
    if value.device == device:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    return torch.empty_like(value, device=device)


def _copy(own: torch.Tensor, value: torch.Tensor) -> None:
    """``own.copy_(value)``, also where both are expanded: there once."""
    for dim, stride in enumerate(own.stride()):
        if stride == 0:
            own, value = own.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    own.copy_(value, non_blocking=True)
