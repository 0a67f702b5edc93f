"""Programs of forward and of backward of a module, whose loss and updates are the caller's."""

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx, nn

from mirrorc.capture.call.call_arguments import flatten_call
from mirrorc.capture.call.shards import SymbolicDims, split_call
from mirrorc.capture.call.traced_loss import TracedForward
from mirrorc.capture.model.model_state import ModelState
from mirrorc.capture.program.capture_program import CapturedProgram, capture_program
from mirrorc.compilation.call_kind import Purpose
from mirrorc.compilation.forward_and_backward import ForwardAndBackward, cut_at_outputs
from mirrorc.ir import ops
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.program import ArgumentKind, Program, placeholders_of
from mirrorc.ir.workers import ALONE, Workers
from mirrorc.passes import PlanBuckets, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass


class Noisy(nn.Module):
    """Draws, writes a buffer that backward reads, and returns two outputs; the second has no row for each example."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.drop, self.head = nn.Linear(4, 6), nn.Dropout(0.5), nn.Linear(6, 3)
        self.scale: torch.Tensor
        self.register_buffer("scale", torch.ones(6))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.drop(self.layer(x).sin() * self.scale)
        self.scale = self.scale * 0.9
        return self.head(hidden), hidden.square().mean()


def capture_module(
    model: nn.Module,
    x: torch.Tensor,
    num_devices: int = 2,
    *,
    differentiated: Iterable[int] = (),
    symbolic: SymbolicDims = (),
    workers: Workers = ALONE,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> CapturedProgram:
    """What is captured of a module that is called with ``x``, before it is cut."""
    call, devices = flatten_call(["x"], (x,), {}), parse_devices([f"cpu:{i}" for i in range(num_devices)])
    module_call = TracedForward(model, None, call.structure, keeps_outputs=True)
    module_call.differentiated = frozenset(differentiated)
    how: dict[str, Any] = {"symbolic": symbolic, "loss_reduction": "sum", "workers": workers}
    shards, state = split_call(call, num_devices), ModelState(model, None)
    captured = capture_program(module_call, call, shards, devices, state, None, decompositions or {}, **how)
    return replace(captured, program=captured.program.evolve(workers=workers))


def captured_module(model: nn.Module, x: torch.Tensor, num_devices: int = 2, **how: Any) -> Program:
    """The CAPTURED program before it is cut; for the arguments see `capture_module`."""
    return capture_module(model, x, num_devices, **how).program


def cut_module(model: nn.Module, x: torch.Tensor, num_devices: int = 2, **how: Any) -> ForwardAndBackward:
    return cut_at_outputs(captured_module(model, x, num_devices, **how), 1, type(model).__name__)


def passes_before_cut(**options: Any) -> list[Pass]:
    return list(itertools.takewhile(lambda one: not isinstance(one, PlanBuckets), default_pipeline(**options)))


def passes_of(program: Program, **options: Any) -> list[Pass]:
    """Those that a program of forward or backward goes through."""
    passes = default_pipeline(**options)[len(passes_before_cut(**options)) :]
    return (Purpose.BACKWARD if program.trains else Purpose.FORWARD).passes_of(passes)


def stages(program: Program, **options: Any) -> Iterator[Program]:
    """A program of forward or backward, and what each pass makes of it."""
    yield program
    for compiler_pass in passes_of(program, **options):
        program = run_passes(program, [compiler_pass])
        yield program


def lowered(program: Program, **options: Any) -> Program:
    return run_passes(program, passes_of(program, **options))


def cut_programs(num_examples: int = 5) -> dict[str, Program]:
    """CAPTURED programs of forward, of backward, and of backward to an argument alone."""
    torch.manual_seed(0)
    x = torch.randn(num_examples, 4)
    both = cut_module(Noisy(), x, differentiated=[0])
    of_argument = cut_module(Noisy().requires_grad_(False), x, differentiated=[0])
    return {"forward": both.forward, "backward": both.backward, "backward to x": of_argument.backward}


def module_programs() -> Iterator[Program]:
    """Programs of every stage."""
    for program in cut_programs().values():
        yield from stages(program)


@dataclass
class Results:
    """What a captured graph computes."""

    outputs: dict[str, torch.Tensor] = field(default_factory=dict)
    kept: list[torch.Tensor] = field(default_factory=list)
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    writes: dict[str, torch.Tensor] = field(default_factory=dict)


def run_graph(graph: fx.Graph, arguments: Mapping[str, Any], variables: Mapping[str, torch.Tensor]) -> Results:
    """Runs a captured graph, a node at a time."""
    results, values = Results(), dict[fx.Node, Any]()
    for node in graph.nodes:
        args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
        if node.op == "placeholder":
            values[node] = arguments[str(node.target)]
        elif node.target is ops.read:
            values[node] = variables[kwargs["variable"]]
        elif node.target is ops.keep:
            assert kwargs["number"] == len(results.kept)
            results.kept.append(args[0])
        elif node.target is ops.gather:
            results.outputs[kwargs["output"]] = args[0].clone()
        elif node.op == "output":
            results.gradients, results.writes = args[0]["gradients"], args[0]["writes"]
        else:
            values[node] = node.target(*args, **kwargs)
    return results


def run_cut(
    both: ForwardAndBackward,
    variables: Mapping[str, torch.Tensor],
    x: torch.Tensor,
    tangents: Sequence[torch.Tensor],
    *,
    shard: int = 0,
    **others: Any,
) -> tuple[Results, Results]:
    """Runs forward of a shard, writes its buffers, and runs backward. ``others``: arguments such as sizes and the seed."""
    given = {"x": x, "loss_weight": torch.ones((), dtype=x.dtype), **others}
    forward = run_graph(both.forward.shard_graphs[shard], given, variables)
    for name, value in forward.writes.items():
        variables[name].copy_(value)
    graph = both.backward.shard_graphs[shard]
    for kind, values in ((ArgumentKind.TANGENT, tangents), (ArgumentKind.SAVED, forward.kept)):
        names = [str(node.target) for node in placeholders_of(graph, both.backward.arguments, kind)]
        given |= dict(zip(names, values, strict=True))
    return forward, run_graph(graph, given, variables)
