"""Builds tiny programs: by hand, one ATen operator at a time, and by capturing a two-layer net."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import mirrorc
from mirrorc.capture.call.call_arguments import flatten_call
from mirrorc.capture.call.shards import SymbolicDims, split_call
from mirrorc.capture.call.traced_loss import TracedEvaluation, TracedLoss
from mirrorc.capture.front_ends.front_end import FrontEnd
from mirrorc.capture.model.model_state import ModelState
from mirrorc.capture.program.capture_program import capture_program
from mirrorc.ir import ops
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Argument, ArgumentKind, Program, Stage
from mirrorc.ir.variables import Aggregation, Role, Synchronization, UpdateRule, Variable
from mirrorc.ir.workers import ALONE, Workers, World
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.user.optimizer_groups import OptimizerGroups

ADAMW = UpdateRule("AdamW group 0", 0)
MUON = UpdateRule("Muon group 0", 0, elementwise=False)
PASS_NAMES = (
    "plan-buckets", "outline-regions", "replicate", "pack-gradients", "insert-all-reduce", "insert-update",
    "schedule-overlap", "lower-collectives", "lower-devices",
)  # fmt: skip
"""The passes that a program needs; the default pipeline has others, which make it faster, among them."""


@dataclass(frozen=True)
class Weight:
    name: str
    shape: tuple[int, ...] = (4,)
    dtype: torch.dtype = torch.float32
    rule: UpdateRule = ADAMW


TWO_WEIGHTS = (Weight("fc1.weight", (4, 2)), Weight("fc2.weight", (3,)))


class _GraphBuilder:
    def __init__(self, fake_mode: FakeTensorMode) -> None:
        self.graph = fx.Graph()
        self.fake_mode = fake_mode

    def empty(self, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> torch.Tensor:
        with self.fake_mode:
            return torch.empty(tuple(shape), dtype=dtype)

    def placeholder(self, name: str, shape: Sequence[int], dtype: torch.dtype = torch.float32) -> fx.Node:
        node = self.graph.placeholder(name)
        node.meta["val"] = self.empty(shape, dtype)
        return node

    def read(self, variable: str, shape: Sequence[int], dtype: torch.dtype) -> fx.Node:
        node = self.graph.call_function(ops.read, (), {"variable": variable})
        node.meta["val"] = self.empty(shape, dtype)
        return node

    def call(self, target: Any, *args: Any) -> fx.Node:
        node = self.graph.call_function(target, args)
        with self.fake_mode:
            node.meta["val"] = target(*fx.node.map_arg(args, lambda n: n.meta["val"]))
        return node


def handmade_graph(weights: Sequence[Weight], rows: int, *, buffer: bool, fake_mode: FakeTensorMode) -> fx.Graph:
    """A captured graph whose loss adds up ``x`` and the weights; gradients come in the reverse order of the weights."""
    aten = torch.ops.aten
    build = _GraphBuilder(fake_mode)
    x = build.placeholder("x", (rows, 4))
    tangent = build.placeholder("loss_weight", ())
    reads = {weight.name: build.read(weight.name, weight.shape, weight.dtype) for weight in weights}
    loss = build.call(aten.sum.default, x)
    for weight in weights:
        loss = build.call(aten.add.Tensor, loss, build.call(aten.sum.default, reads[weight.name]))
    writes = {}
    if buffer:
        writes["stat"] = build.call(aten.mul.Tensor, build.read("stat", (2,), torch.float32), 0.5)
    gradients = {w.name: build.call(aten.mul.Tensor, reads[w.name], tangent) for w in reversed(weights)}
    build.graph.output({"loss": loss, "gradients": gradients, "writes": writes})
    return build.graph


def strides_of(shape: tuple[int, ...]) -> tuple[int, ...]:
    return torch.empty(shape, device="meta").stride()


def handmade(
    num_devices: int = 2, weights: Sequence[Weight] = TWO_WEIGHTS, *, buffer: bool = False, uneven: bool = False
) -> Program:
    """A CAPTURED program, made without the tracer. ``uneven``: the last replica's shard has fewer rows."""
    fake_mode = FakeTensorMode()
    variables = {
        w.name: Variable(w.name, w.shape, strides_of(w.shape), w.dtype, Role.PARAMETER, update=w.rule) for w in weights
    }
    if buffer:
        variables["stat"] = Variable(
            "stat", (2,), (1,), torch.float32, Role.BUFFER, Synchronization.PER_REPLICA, Aggregation.MEAN
        )
    rows = (2, 1) if uneven else (2,)
    return Program(
        stage=Stage.CAPTURED,
        devices=parse_devices([f"cpu:{i}" for i in range(num_devices)]),
        variables=variables,
        arguments=(Argument("x", ArgumentKind.BATCH, 0), Argument("loss_weight", ArgumentKind.LOSS_WEIGHT)),
        shard_graphs=tuple(handmade_graph(weights, n, buffer=buffer, fake_mode=fake_mode) for n in rows),
        shard_of_replica=tuple(int(uneven and i == num_devices - 1) for i in range(num_devices)),
    )


def handmade_of_worker(
    world: World, rank: int = 0, weights: Sequence[Weight] = TWO_WEIGHTS, *, is_sharded: bool = False, **how: bool
) -> Program:
    """What a worker captures; ``is_sharded``: each worker updates a part of every bucket."""
    workers = replace(world.worker(rank), shards_optimizer=is_sharded)
    return handmade(workers.devices_per_worker[rank], weights, **how).evolve(workers=workers)


def core_pipeline(**options: Any) -> list[Pass]:
    """The passes that a program needs, in the order of the default pipeline, with its options."""
    return [compiler_pass for compiler_pass in default_pipeline(**options) if compiler_pass.name in PASS_NAMES]


def run_up_to(pass_name: str, program: Program, **options: Any) -> Program:
    """The program after this pass of the core pipeline, with all passes before it. ``options``: the pipeline's."""
    return run_passes(program, core_pipeline(**options)[: PASS_NAMES.index(pass_name) + 1])


def run_before(pass_name: str, program: Program, **options: Any) -> Program:
    return run_passes(program, core_pipeline(**options)[: PASS_NAMES.index(pass_name)])


def every_stage(program: Program, **options: Any) -> dict[str, Program]:
    found = {}
    for compiler_pass in default_pipeline(**options):
        program = found[compiler_pass.name] = compiler_pass.run(program)
    return found


SMALL_BUCKETS = {"buckets": ByBytes(1e-6, 1e-6)}
"""Options of the pipeline that give every gradient a bucket of its own."""


def targets(graph: fx.Graph, *wanted: Any) -> list[fx.Node]:
    return list(calls_to(graph, *wanted))


def outputs(graph: fx.Graph) -> dict[str, Any]:
    found = graph.output_node().args[0]
    assert isinstance(found, dict)
    return found


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1 = nn.Linear(4, 6)
        self.fc2 = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.fc2(torch.relu(self.fc1(x)))


class Gated(nn.Module):
    """Backward reads each of the two factors for the gradient of the other one alone, which may take its place."""

    def __init__(self) -> None:
        super().__init__()
        self.value, self.gate, self.head = nn.Linear(4, 6), nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.value(x) * self.gate(x))


def sgd_step(model: nn.Module, devices: Any = 2, *, lr: float = 0.1, **options: Any) -> mirrorc.Step:
    """A step that runs eagerly and trains by SGD."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr)
    return mirrorc.compile(model, devices, optimizer=optimizer, **grouped({"backend": "eager", **options}))


def captured_call(
    model: nn.Module,
    loss_fn: Any,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    num_devices: int = 1,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
    **how: Any,
) -> Program:
    """A CAPTURED program of a call, whose only positional argument is x."""
    call = flatten_call(["x"][: len(args)], args, kwargs)
    groups = OptimizerGroups([optimizer or torch.optim.SGD(model.parameters(), lr=0.1)])
    shards, devices = split_call(call, num_devices), parse_devices([f"cpu:{i}" for i in range(num_devices)])
    traced_loss, state = TracedLoss(model, loss_fn, call.structure), ModelState(model, loss_fn)
    return capture_program(traced_loss, call, shards, devices, state, groups, decompositions or {}, **how).program


@dataclass(frozen=True)
class FunctionPass:
    """A pass that does what a function does."""

    change: Callable[[Program], Program] = lambda program: program
    name: str = "custom"
    input_stage: Stage = Stage.CAPTURED
    output_stage: Stage = Stage.CAPTURED

    def run(self, program: Program) -> Program:
        return self.change(program)


def captured_two_layers(num_devices: int = 2, rows: int = 8, microbatches: int = 1) -> Program:
    """A CAPTURED program of `TwoLayers` with cross-entropy and SGD, as `mirrorc.compile` captures it."""
    torch.manual_seed(0)
    return captured_model(TwoLayers(), num_devices, rows, microbatches=microbatches)


def captured_model(
    model: nn.Module,
    num_devices: int = 2,
    rows: int = 8,
    columns: int = 4,
    *,
    keeps_outputs: bool = False,
    microbatches: int = 1,
    evaluates: bool = False,
    symbolic: SymbolicDims = (),
    front_end: FrontEnd | None = None,
    workers: Workers = ALONE,
) -> Program:
    """The same of any classifier of so many features; one whose outputs are kept gives logits and more.

    ``evaluates``: as ``step.evaluate`` captures it. ``symbolic``: the dimensions of x and target that are symbolic. ``workers``:
    those that train together, as one of them sees them, which may have no rows.
    """

    def loss_fn(output: Any, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(output if isinstance(output, torch.Tensor) else output[0], target)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    call = flatten_call(["x"], (torch.randn(rows, columns),), {"target": torch.arange(rows) % 3})
    shards = split_call(call, num_devices, microbatches=microbatches, may_be_empty=workers.are_several)
    devices = parse_devices([f"cpu:{i}" for i in range(num_devices)])
    kind = TracedEvaluation if evaluates else TracedLoss
    traced_loss = kind(model, loss_fn, call.structure, keeps_outputs=keeps_outputs)
    state, groups = ModelState(model, loss_fn), OptimizerGroups([optimizer])
    how: dict[str, Any] = {"symbolic": symbolic, "front_end": front_end, "workers": workers}
    captured = capture_program(traced_loss, call, shards, devices, state, groups, {}, **how)
    return captured.program.evolve(workers=workers)
