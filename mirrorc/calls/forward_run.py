"""A forward of a module that has run, and its outputs as one node of autograd."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from mirrorc.calls.program_runs import Draws
from mirrorc.capture.call.call_arguments import Call
from mirrorc.capture.call.shards import Shards
from mirrorc.compilation.program_cache import Backward, Specialization
from mirrorc.errors import ExecutionError
from mirrorc.messages.problem import problem
from mirrorc.torch_internals import backward_keeps_graph, runs_transform

RunBackward = Callable[["ForwardRun", Sequence[torch.Tensor | None]], list[torch.Tensor | None]]


@dataclass(eq=False)
class ForwardRun:
    """A forward that has run, and waits for its backward."""

    call: Call
    compiled: Specialization
    shards: Shards
    outputs: dict[str, Any]  # gathered, by name; a list with one for each replica if they are not combined
    kept: list[list[torch.Tensor]] | None  # the values that each replica saves for backward; None after it
    draws: Draws
    differentiable: frozenset[str]
    likes: list[torch.Tensor] = field(default_factory=list)  # without memory, for the results of `_Outputs`

    @property
    def backward(self) -> Backward | None:
        return self.compiled.backward

    def release(self) -> None:
        """Frees saved values and batch, because a caller may hold a loss for long."""
        self.kept, self.outputs, self.likes = None, {}, []
        self.shards = replace(self.shards, tensors=())
        self.call = replace(self.call, leaves=())

    def by_output(self, values: Sequence[Any]) -> dict[str, list[Any]]:
        assert self.backward is not None
        parts = iter(values)
        return {name: [*itertools.islice(parts, self._num_parts(name))] for name in self.backward.cut.tangents}

    def is_apart(self, name: str) -> bool:
        """True for an output that the caller gets per replica."""
        return self._way(name) == "apart" and len(self.shards.num_examples) > 1

    def _way(self, name: str) -> str:
        assert self.compiled.outputs is not None, "a module has outputs"
        return self.compiled.outputs.ways[name]

    def _num_parts(self, name: str) -> int:
        return sum(map(bool, self.shards.num_examples)) if self.is_apart(name) else 1

    def tangents_of_replicas(self, tangents: Sequence[torch.Tensor | None]) -> Iterator[tuple[torch.Tensor, ...]]:
        """For each replica, its part of each output's gradient; zeros for outputs that the loss does not depend on."""
        assert self.backward is not None
        device = self.backward.executor.program.devices[0].torch_device
        whole = [
            tangent if tangent is not None else torch.zeros_like(like, device=device)
            for tangent, like in zip(tangents, self.likes, strict=True)
        ]
        return zip(*(self._parts(name, values) for name, values in self.by_output(whole).items()), strict=True)

    def _parts(self, name: str, values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        way, sizes = self._way(name), self.shards.num_examples
        if self.is_apart(name):
            present = iter(values)
            return [next(present).contiguous() if size else values[0] for size in sizes]
        (tangent,) = values
        if way == "concatenated":
            return [part.contiguous() for part in tangent.split_with_sizes(sizes)]
        if way == "averaged":
            return [(tangent * (size / max(sum(sizes), 1))).contiguous() for size in sizes]
        return [tangent.contiguous()] * len(sizes)


def outputs_in_autograd(
    run: ForwardRun, run_backward: RunBackward, read: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> dict[str, Any]:
    """The outputs that need a gradient, by name, as results of one autograd node.

    Backward reads the tensors ``read`` again; autograd refuses it if they were modified. ``run_backward`` returns
    gradients of ``inputs``.
    """
    results = run.by_output(_Outputs.apply(run, run_backward, read, *inputs))
    return {name: values if run.is_apart(name) else values[0] for name, values in results.items()}


class _Outputs(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, run: ForwardRun, run_backward: RunBackward, read: Sequence[torch.Tensor], *inputs: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        assert run.backward is not None
        ctx.run, ctx.run_backward = run, run_backward
        ctx.save_for_backward(*read)
        ctx.set_materialize_grads(False)
        outputs, without = [], []
        for name in run.backward.cut.tangents:
            value = run.outputs.pop(name)
            parts = value if isinstance(value, list) else [value]
            outputs += parts
            without += parts if name not in run.differentiable else []
        ctx.mark_non_differentiable(*without)
        run.likes = [output.to("meta") for output in outputs]
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *tangents: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        _ = ctx.saved_tensors
        run: ForwardRun = ctx.run
        if torch.is_grad_enabled() or runs_transform(*tangents):
            raise problem(
                ExecutionError,
                "MC3210: a compiled module gives no gradient of a gradient (create_graph=True), and no batch of gradients",
                "its backward is a program, which has no backward of its own",
                "model.module(x), the plain model, in a penalty on gradients",
            )
        if run.kept is None:
            raise problem(
                ExecutionError,
                "MC3210: backward was called a second time, and its values are freed",
                fix=(
                    "loss.backward(retain_graph=True) in the first call",
                    "loss = loss_fn(model(x), y), for another backward",
                ),
            )
        gradients = ctx.run_backward(run, tangents)
        if not backward_keeps_graph():
            run.release()
        return (None, None, None, *gradients)
