"""Programs to save, and what must be equal when they are loaded again."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from tiny_models import MODELS, TinyModel, make_mlp, mlp_batch
from tiny_programs import MUON, TWO_WEIGHTS, Weight, captured_call, every_stage, handmade
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensor

from mirrorc.ir import ops
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.program import Program, Stage
from mirrorc.messages.source_lines import last_users_line


class Noisy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.last = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(x + torch.rand_like(x)) + torch.randn(6) + torch.bernoulli(torch.sigmoid(x)))


MODELS_TO_SAVE = {
    **MODELS,
    "dropout": TinyModel(lambda dtype: make_mlp(dtype, dropout=0.5), mlp_batch, nn.functional.cross_entropy),
    "noisy": TinyModel(lambda dtype: Noisy(), mlp_batch, nn.functional.cross_entropy),
}
LARGE_MODELS = {"gpt2", "gpt2-own-loss", "bert", "vit"}
SMALL_MODELS = [name for name in MODELS_TO_SAVE if name not in LARGE_MODELS]


@functools.cache
def captured(name: str) -> Program:
    """A model, captured for three devices and five examples, so in two shapes of a shard; a large one in one shape."""
    tiny, num_devices, num_examples = MODELS_TO_SAVE[name], *((2, 2) if name in LARGE_MODELS else (3, 5))
    torch.manual_seed(0)
    model = tiny.make(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    batch = tiny.batch(num_examples, torch.float32, 0)
    return _shared(name, captured_call(model, tiny.loss_fn, (), batch, num_devices, optimizer=optimizer))


def on_devices(program: Program, num_devices: int) -> Program:
    return program.evolve(
        devices=program.devices[:num_devices],
        shard_graphs=program.shard_graphs[:1],
        shard_of_replica=(0,) * num_devices,
        num_examples=program.num_examples[:1] * num_devices,
    )


@functools.cache
def stages_of(name: str) -> Mapping[str, Program]:
    """A captured model at every stage; every test of a process gets the same programs."""
    after = {made_by: _shared(f"{name} after {made_by}", p) for made_by, p in every_stage(captured(name)).items()}
    return MappingProxyType({"capture": captured(name), **after})


_SHARED: dict[str, tuple[Program, list[str]]] = {}


def _shared(name: str, program: Program) -> Program:
    """The program, which tests share from now on: it is remembered what it is."""
    _SHARED[name] = program, _contents(program)
    return program


def _contents(program: Program) -> list[str]:
    return [
        f"{node.name} {node.op} {node.target} {node.args} {node.kwargs} {sorted(node.meta)}"
        for graph in graphs_of(program)
        for node in graph.nodes
    ]


def changed_programs() -> list[str]:
    """The names of shared programs that some test has changed: every later test of the process got something else."""
    return [name for name, (program, contents) in _SHARED.items() if _contents(program) != contents]


HANDMADE: dict[str, Callable[[], Program]] = {
    "one device": lambda: handmade(1),
    "buffer": lambda: handmade(2, buffer=True),
    "uneven": lambda: handmade(3, buffer=True, uneven=True),
    "own optimizer": lambda: handmade(2, [Weight("a", rule=MUON), Weight("b.c", (3, 5)), Weight("e", (0,), rule=MUON)]),
    "two dtypes": lambda: handmade(3, [*TWO_WEIGHTS, Weight("half", (7,), torch.bfloat16)]),
    "names": lambda: handmade(2, [Weight("größe.☃"), Weight('"quoted\\"\n')]),
}


def with_graph(graph: fx.Graph) -> Program:
    return Program(Stage.UPDATED, parse_devices(1), {}, (), graph=graph)


def one_call(target: Any, args: tuple[Any, ...] = (), kwargs: Any = None, **meta: Any) -> Program:
    graph = fx.Graph()
    graph.placeholder("x")
    node = graph.call_function(target, args, kwargs or {})
    node.meta.update(meta)
    graph.output(node)
    return with_graph(graph)


def called(program: Program) -> fx.Node:
    return list(program.mirrored_graph.nodes)[1]


def reload(program: Program, directory: Path, name: str = "program.mirror") -> Program:
    program.save(directory / name)
    return Program.load(directory / name)


def described(value: Any) -> Any:
    """A value in plain terms, for comparison: types of containers count, and all of a tensor's type."""
    if isinstance(value, fx.Node):
        return ("node", value.name)
    if isinstance(value, torch.Tensor):
        assert isinstance(value, FakeTensor)
        place = value.dtype, value.device, tuple(value.shape), value.stride(), value.storage_offset()
        return ("tensor", *place, value.is_conj(), value.is_neg())
    if isinstance(value, ops.Pending):
        return ("pending", described(value.value))
    if isinstance(value, list | tuple):
        return (type(value), *map(described, value))
    if isinstance(value, dict):
        return (type(value), *((key, described(item)) for key, item in value.items()))
    if isinstance(value, slice):
        return (slice, described(value.start), described(value.stop), described(value.step))
    return (type(value), repr(value))


@functools.cache
def _line_of(stack_trace: str) -> str:
    return last_users_line(stack_trace)


def nodes_of(graph: fx.Graph) -> list[Any]:
    """A graph's nodes in plain terms; of their meta, what the passes and `source_line` look at."""
    nodes = []
    for node in graph.nodes:
        call = (node.op, node.name, node.target, described(node.args), described(node.kwargs))
        value = ("val" in node.meta, described(node.meta.get("val")))
        trace = node.meta.get("stack_trace")
        modules = list((node.meta.get("nn_module_stack") or {}).values())
        module = [(path, getattr(kind, "__name__", kind)) for path, kind in modules[-1:]]
        nodes.append((*call, *value, _line_of(trace) if trace else None, module))
    return nodes


def graphs_of(program: Program) -> list[fx.Graph]:
    return [*program.graphs(), *(region.graph_module.graph for region in program.regions.values())]


_GRAPHS = ("shard_graphs", "graph", "device_graphs", "regions")


def assert_same(found: Program, expected: Program) -> None:
    """Every field of two programs is equal, every graph node by node, and so is their text."""
    for field in dataclasses.fields(Program):
        if field.name not in _GRAPHS:
            assert getattr(found, field.name) == getattr(expected, field.name)
    assert list(found.variables) == list(expected.variables)
    assert [nodes_of(graph) for graph in graphs_of(found)] == [nodes_of(graph) for graph in graphs_of(expected)]
    assert _modules_of(found) == _modules_of(expected)
    assert found.to_text(regions=True) == expected.to_text(regions=True)


def _modules_of(program: Program) -> list[tuple[str, ...]]:
    regions = [
        (name, region.name, region.phase, type(region.graph_module).__name__)
        for name, region in program.regions.items()
    ]
    return [*regions, *((name, type(module).__name__) for name, module in program.device_graphs.items())]
