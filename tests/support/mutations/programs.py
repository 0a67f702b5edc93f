"""Valid programs to change: all tiny models and handmade ones, on several devices, after every pass."""

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from asserting import Asserting
from broken_meetings import Meeting
from memory_order import first_in_memory
from module_programs import Noisy, cut_module
from payloads import FirstElements
from tiny_models import MODELS, TinyModel
from tiny_programs import MUON, SMALL_BUCKETS, Gated, Weight, captured_call, captured_model, handmade, outputs
from torch import fx, nn

import mirrorc
from mirrorc.all_reduce_algorithms import ALGORITHMS, Ring, Tree
from mirrorc.capture.eager.autograd_front_end import AutogradFrontEnd
from mirrorc.compression import TopK
from mirrorc.ir import ops
from mirrorc.ir.devices import parse_devices
from mirrorc.ir.nodes import calls_to
from mirrorc.ir.program import Accumulation, Program
from mirrorc.ir.variables import UpdateRule
from mirrorc.ir.workers import World
from mirrorc.packing import ByBytes, EqualPacks
from mirrorc.passes import ChooseCheckpoints, ReserveMemory, ReuseArguments, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.pipeline_edits import for_accumulation, for_evaluation, for_gradients, select_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.user.optimizer_groups import gradient_rule

_WITHOUT_LIMITS = {one.name: one for one in (ReuseArguments(min_bytes=0), ReserveMemory(min_bytes=0))}
_SHARED_UNTIL = "schedule-overlap"  # up to this pass, programs with and without shared parameters are the same
_BOUND_OF_PRODUCTS = 2_200  # bytes for activations of `Products` on 32 examples; keeping everything takes more
_WHOLE = {"min_factored_elements": 2**40}


@dataclass(frozen=True)
class Subject:
    """A valid program, and the one that the pass was given that made it."""

    name: str
    made_by: Pass
    before: Program
    program: Program

    def __str__(self) -> str:
        return f"{self.name} after {self.made_by.name}"


@dataclass(frozen=True)
class Source:
    """A captured program and the options to compile it with; ``since``: the pass from which on its programs are subjects."""

    name: str
    made: Program | Callable[[], Program]
    caps: dict[str, Any]
    is_shared: bool = True
    since: str = ""

    @functools.cached_property
    def captured(self) -> Program:
        return self.made if isinstance(self.made, Program) else self.made()

    def subjects(self) -> Iterator[Subject]:
        """The program after every pass, with shared parameters and, where that differs, with a copy for each device."""
        for name, pipeline in self._pipelines():
            program, is_new, is_since = self.captured, not name, not self.since
            for compiler_pass in pipeline:
                before, program = program, compiler_pass.run(program)
                is_since = is_since or compiler_pass.name == self.since
                if is_new and is_since:
                    yield Subject(self.name + name, compiler_pass, before, program)
                is_new = is_new or compiler_pass.name == _SHARED_UNTIL

    def _pipelines(self) -> Iterator[tuple[str, list[Pass]]]:
        pipeline = default_pipeline(**{"min_factored_elements": 0, "part_elements": 16, **self.caps})
        pipeline = [_WITHOUT_LIMITS.get(one.name, one) for one in pipeline]
        pipeline = for_accumulation(pipeline) if self.captured.accumulates else pipeline
        pipeline = for_gradients(pipeline) if self.captured.leaves_gradients else pipeline
        pipeline = pipeline if self.captured.trains else for_evaluation(pipeline)
        has_sharing = any(one.name == "share-parameters" for one in pipeline)
        unshared = select_passes(pipeline, ["share-parameters"] if has_sharing else [])
        if not self.is_shared or not self.captured.trains:
            yield "", unshared
            return
        yield "", pipeline
        if self.captured.num_replicas > 1 and not self.captured.workers.are_several:
            yield ", parameters not shared", unshared


def model_sources(name: str) -> Iterator[Source]:
    captured = _captured(MODELS[name])
    large, small = captured.shard_graphs
    num_bytes = sum(v.dtype.itemsize * torch.Size(v.shape).numel() for v in captured.variables.values() if v.update)
    caps = {"buckets": ByBytes(num_bytes / 4 / 2**20, num_bytes / 16 / 2**20)}
    for num_devices in (2, 3):
        devices = parse_devices([f"cpu:{i}" for i in range(num_devices)])
        even = captured.evolve(devices=devices, shard_graphs=(large,), shard_of_replica=(0,) * num_devices)
        yield Source(f"{name} on {num_devices}", even, caps)
        shards = (*[0] * (num_devices - 1), 1)
        uneven = captured.evolve(devices=devices, shard_graphs=(large, small), shard_of_replica=shards)
        yield Source(f"{name} on {num_devices}, uneven", uneven, caps)


def _captured(tiny: TinyModel) -> Program:
    return captured_call(tiny.make(torch.float32), tiny.loss_fn, (), tiny.batch(5, torch.float32, 0), 2)


class Branching(nn.Sequential):
    """Goes another way for each example, by its values, which no graph does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(torch.stack([row if row.sum().item() > 0 else -2 * row for row in x]))


class Products(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(4, 4) for _ in range(3)])
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = torch.tanh(torch.mm(weight.t(), x.t()).t())
        return self.head(x)


class Tables(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(9, 4), nn.Embedding(9, 4, padding_idx=3)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (x > 0).long()
        return self.head(self.one(places[:, 0]) + self.two(places[:, 1]))


class SparseTables(nn.Module):
    """Two tables of one shape, of which few rows are looked up, whose optimizer takes rows."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Embedding(60, 3, sparse=True), nn.Embedding(60, 3, padding_idx=3, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = (x.abs() * 20).long() % 60
        return self.one(places[:, 0]) + self.two(places[:, 1])


class Tied(nn.Module):
    """A head with the weight of a table: its gradient is a product to which another region adds rows."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.body = nn.Embedding(5, 4, padding_idx=1), nn.Linear(4, 4)
        self.head = nn.Linear(4, 5, bias=False)
        self.head.weight = self.table.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.table((x > 0).long()).sum(1)))


class LaidOut(nn.Module):
    """Convolutions of one shape, GELU by tanh, a reshape, and an operator that reads memory in order."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Conv2d(2, 2, 3, padding=1), nn.Conv2d(2, 2, 3, padding=1)
        self.head = nn.Linear(32, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one = self.one(x.view(-1, 2, 4, 4))
        h = self.two(nn.functional.gelu(one, approximate="tanh"))
        return self.head(torch.tanh(h).flatten(1)) * first_in_memory(h.detach(), 3)


class Returning(nn.Module):
    """Logits, and beside them values of equal types: along the batch, scalars, counts, and what replicas have for themselves.

    ``norm``: what comes before the hidden values.
    """

    def __init__(self, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)
        self.norm = norm or nn.Identity()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = torch.tanh(self.norm(self.one(x)))
        logits = self.two(hidden)
        counts = mirrorc.summed((logits > 0).sum()), mirrorc.summed((hidden > 0).sum())
        return logits, logits.sin(), hidden.mean(), logits.mean(), *counts, hidden.sum(0), hidden.amax(0)


def _reads_others(num_devices: int, weights: list[Weight]) -> Program:
    """Each gradient reads the variable whose gradient is made before it, the last one a buffer that is written."""
    program = handmade(num_devices, weights, buffer=True)
    for graph in program.shard_graphs:
        reads = {str(node.kwargs["variable"]): node for node in calls_to(graph, ops.read)}
        gradients = list(outputs(graph)["gradients"].items())
        for (name, gradient), (before, _) in zip(gradients[1:], gradients, strict=False):
            is_last = name == gradients[-1][0]
            gradient.replace_input_with(reads[name], reads["stat" if is_last else before])
            _after(reads["stat"], reads.values())
    return program


def _after(node: fx.Node, others: object) -> None:
    """Moves a read to the others, so that gradients may use it."""
    first = next(iter(others))  # type: ignore[call-overload]
    if node is not first:
        first.prepend(node)


def summed_by_messages() -> Iterator[Source]:
    """Sums that every algorithm of all-reduce makes of messages, of two buckets of one type; shares of some are empty."""
    for n in (2, 3, 5):
        for name, algorithm in ALGORITHMS.items():
            if algorithm().sends:
                weights = [Weight("a", (100,)), Weight("b", (100,))]
                caps = SMALL_BUCKETS | {"algorithm": algorithm()}
                yield Source(f"{name} on {n}", handmade(n, weights), caps, since=name)
    own = [Weight("a", (300,), rule=MUON), Weight("b", (300,))]
    yield Source("ring, own optimizer on 3", handmade(3, own), SMALL_BUCKETS | {"algorithm": Ring()}, since="ring")
    clipped = {"max_grad_norm": 1.0, "check_finite": True, "algorithm": Tree()}
    yield Source("tree, clipped and checked on 3", handmade(3, own[1:]), SMALL_BUCKETS | clipped, since="tree")


def left_to_the_user() -> Iterator[Source]:
    """Programs that add gradients to those of the user's parameters."""
    rule = gradient_rule(is_sparse=False, may_be_unused=False)
    weights = [Weight(name, (20, 10), rule=rule) for name in "abcd"]
    kind, over_workers = Accumulation.GRADIENTS, SMALL_BUCKETS | {"over_workers": True}
    for n in (1, 2):
        yield Source(f"gradients on {n}", handmade(n, weights, buffer=True).evolve(accumulation=kind), SMALL_BUCKETS)
        worker = handmade(n, weights).evolve(accumulation=kind, workers=World(2, n).worker(1))
        yield Source(f"gradients of worker 1 of 2, on {n}", worker, over_workers | {"check_finite": True})


def of_modules() -> Iterator[Source]:
    """Programs of forward and of backward of a module."""
    for n in (2, 3):
        torch.manual_seed(0)
        both = cut_module(Noisy(), torch.randn(5, 4), n, differentiated=[0])
        yield Source(f"forward on {n}, uneven", both.forward, {})
        yield Source(f"backward on {n}, uneven", both.backward, SMALL_BUCKETS)
    frozen = Noisy().requires_grad_(False)
    yield Source("backward to an argument on 2", cut_module(frozen, torch.randn(4, 4), differentiated=[0]).backward, {})


def cut_into_packs() -> Iterator[Source]:
    """Buckets that are cut into three packs: gradients lie in two of them, and packs go before their bucket is complete."""
    packs = {"buckets": EqualPacks(3)}
    pairs = [Weight(name, (200,)) for name in "abcd"]
    mixed = [Weight("a", (300,), rule=MUON), Weight("b", (300,)), Weight("c", (300,), rule=MUON), Weight("d", (300,))]
    bounds = {"max_grad_norm": 1.0, "check_finite": True}
    world = World(3, (1, 2, 3))
    for n in (1, 2, 3):
        yield Source(f"packs on {n}", handmade(n, pairs, buffer=True), packs)
        over_workers = packs | {"over_workers": True}
        captured = handmade(n, pairs).evolve(workers=world.worker(n - 1))
        yield Source(f"packs, worker {n - 1} of 3", captured, over_workers)
    yield Source("packs, own optimizer and AdamW on 3", handmade(3, mixed), packs)
    yield Source(
        "packs, own optimizer and AdamW, worker 1 of 2",
        handmade(1, mixed).evolve(workers=World(2, 1).worker(1)),
        over_workers | bounds,
    )
    yield Source("packs, clipped and checked on 2", handmade(2, mixed), packs | bounds)
    for kind in (Accumulation.ADDS, Accumulation.ENDS):
        yield Source(f"packs, {kind} on 2", handmade(2, pairs).evolve(accumulation=kind), packs)
    few = handmade(3, pairs).evolve(shard_of_replica=(0, 0, None), num_examples=(2, 2, 0))
    yield Source("packs, ragged on 3", few, packs)
    for algorithm in (Ring(), Tree()):
        summed = packs | {"algorithm": algorithm}
        yield Source(f"packs, {algorithm.name} on 3", handmade(3, pairs), summed, since=algorithm.name)


def handmade_sources(num_devices: Sequence[int] = (2, 3)) -> Iterator[Source]:
    """Several buckets of equal shapes, of one gradient and of more, two dtypes, buffers, an optimizer that runs by itself."""
    pairs = [Weight(name, (200,)) for name in "abcdef"]
    caps = {"buckets": ByBytes(1700 / 2**20, 1700 / 2**20)}  # two gradients a bucket
    own = [Weight(name, (300,), rule=MUON) for name in "abc"]
    mixed = [Weight("a", (300,), rule=MUON), Weight("b", (300,)), Weight("c", (300,), rule=MUON), Weight("d", (300,))]
    dtypes = [
        Weight(f"{name}{i}", (100,), dtype) for i, dtype in enumerate((torch.float32, torch.float64)) for name in "ab"
    ]
    small = [Weight(name, (2,)) for name in "abcd"]
    for n in num_devices:
        yield Source(f"pairs on {n}", handmade(n, pairs, buffer=True), caps)
        yield Source(f"one bucket on {n}, uneven", handmade(n, pairs, uneven=True), {})
        yield Source(f"own optimizer on {n}", handmade(n, own), SMALL_BUCKETS)
        yield Source(f"own optimizer and AdamW on {n}", handmade(n, mixed, buffer=True), SMALL_BUCKETS)
        yield Source(f"two dtypes on {n}", handmade(n, dtypes), {})
        yield Source(f"reads others on {n}", _reads_others(n, small), SMALL_BUCKETS)
        early = [*small[:3], Weight("d", (2,), rule=MUON)]  # steps by itself before the others' last region
        yield Source(f"reads others, own optimizer on {n}", _reads_others(n, early), SMALL_BUCKETS, is_shared=False)
        torch.manual_seed(0)
        yield Source(f"products on {n}", partial(captured_model, Products(), n), SMALL_BUCKETS)
        yield Source(f"tables on {n}", partial(captured_model, Tables(), n, rows=2 * n), SMALL_BUCKETS)
        yield Source(f"sparse tables on {n}", partial(captured_model, SparseTables(), n, rows=2 * n), SMALL_BUCKETS)
        yield Source(f"tied on {n}", partial(captured_model, Tied(), n, rows=2 * n), SMALL_BUCKETS)
        laid_out = partial(captured_model, LaidOut(), n, rows=2 * n, columns=32)
        yield Source(f"laid out on {n}", laid_out, SMALL_BUCKETS | {"channels_last": True, "gelu_by_sigmoid": True})
        checked = {"check_finite": True if n == 2 else "skip"}
        yield Source(f"pairs, checked on {n}", handmade(n, pairs, buffer=True), caps | checked)
        yield Source(f"own optimizer and AdamW, checked on {n}", handmade(n, mixed), SMALL_BUCKETS | checked)
        clipped = (
            {"max_grad_norm": 1.0, "max_grad_value": 0.5}
            if n == 2
            else {"max_grad_norm": (1.0,), "grad_norm_type": 3.0}
        )
        scaled = {"scales_loss": True, "fused_groups": (0,)}
        yield Source(f"own optimizer and AdamW, scaled on {n}", handmade(n, mixed), SMALL_BUCKETS | scaled)
        yield Source(f"pairs, scaled and clipped on {n}", handmade(n, pairs), caps | clipped | scaled)
        yield Source(f"pairs, clipped on {n}", handmade(n, pairs, buffer=True), caps | clipped)
        yield Source(f"own optimizer and AdamW, clipped on {n}", handmade(n, mixed), SMALL_BUCKETS | clipped)

    for n, placement in ((2, "least-loaded"), (3, "least-loaded"), (3, "central")):
        placed = {"placement": placement}
        yield Source(f"pairs, {placement} on {n}", handmade(n, pairs, buffer=True), caps | placed, is_shared=False)
        several = handmade(n, mixed, buffer=True)
        yield Source(f"own optimizer and AdamW, {placement} on {n}", several, SMALL_BUCKETS | placed, is_shared=False)
        bounds = placed | {"max_grad_norm": 1.0, "check_finite": True}
        yield Source(f"pairs, clipped and {placement} on {n}", handmade(n, pairs), caps | bounds, is_shared=False)
    groups = [Weight(name, (200,), rule=UpdateRule(f"AdamW group {i % 2}", i % 2)) for i, name in enumerate("abcd")]
    apart = {"max_grad_norm": (1.0, 2.0), "check_finite": True, "fused_groups": (1,)}
    yield Source("two groups, clipped and checked on 2", handmade(2, groups), SMALL_BUCKETS | apart)
    yield Source("tables on 1", partial(captured_model, Tables(), 1), SMALL_BUCKETS)
    chosen = run_passes(captured_model(Products(), 2, rows=64), [ChooseCheckpoints(_BOUND_OF_PRODUCTS)])
    yield Source("products, bounded activations on 2", chosen, SMALL_BUCKETS)
    yield Source("pairs, clipped on 1", handmade(1, pairs), caps | {"max_grad_norm": 1.0})
    yield Source("pairs, checked on 1", handmade(1, pairs), caps | {"check_finite": True})
    yield Source(
        "asserts, checked on 2", partial(captured_model, Asserting(), 2), SMALL_BUCKETS | {"check_finite": True}
    )
    yield Source(
        "plain PyTorch on 2", partial(captured_model, Branching(), 2, front_end=AutogradFrontEnd()), SMALL_BUCKETS
    )
    uneven = partial(captured_model, Branching(), 3, rows=7, front_end=AutogradFrontEnd())
    yield Source("plain PyTorch on 3, uneven", uneven, SMALL_BUCKETS)
    yield Source("meetings on 2", partial(captured_model, Meeting(), 2), SMALL_BUCKETS)
    yield Source("meetings on 3, uneven", partial(captured_model, Meeting(), 3, rows=7), SMALL_BUCKETS)
    yield Source("meetings, ragged on 3", partial(captured_model, Meeting(), 3, rows=2), SMALL_BUCKETS)
    yield Source("meetings, evaluated on 2", partial(captured_model, Meeting(), 2, evaluates=True), {})
    yield Source("asserts on 2", partial(captured_model, Asserting(), 2), SMALL_BUCKETS)
    yield Source("outputs on 2", partial(captured_model, Returning(), 2, keeps_outputs=True), SMALL_BUCKETS)
    yield Source("outputs on 3, uneven", partial(captured_model, Returning(), 3, keeps_outputs=True), SMALL_BUCKETS)
    writing = partial(captured_model, Returning(nn.BatchNorm1d(5)), 3, keeps_outputs=True, evaluates=True)
    yield Source("evaluation that writes on 3, uneven", writing, {})
    yield Source("evaluation, ragged on 3", partial(captured_model, Returning(), 3, rows=2, evaluates=True), {})
    yield Source("asserts, evaluated on 1", partial(captured_model, Asserting(), 1, evaluates=True), {})
    yield Source("gated on 2", partial(captured_model, Gated(), 2), _WHOLE)
    parts = {"microbatches": 2}
    torch.manual_seed(0)
    yield Source(
        "products, microbatches on 2", partial(captured_model, Products(), 2, rows=7, **parts), SMALL_BUCKETS | parts
    )
    yield Source(
        "tables, microbatches on 2", partial(captured_model, Tables(), 2, rows=7, **parts), SMALL_BUCKETS | parts
    )
    for kind in (Accumulation.ADDS, Accumulation.ENDS):
        bounds = clipped | {"check_finite": True}
        yield Source(f"pairs, {kind} on 2", handmade(2, pairs, buffer=True).evolve(accumulation=kind), caps | bounds)
        yield Source(
            f"own optimizer and AdamW, {kind} on 3", handmade(3, mixed).evolve(accumulation=kind), SMALL_BUCKETS
        )
        yield Source(f"pairs, {kind} on 1", handmade(1, pairs).evolve(accumulation=kind), caps)
    yield from left_to_the_user()
    yield from of_modules()
    yield from summed_by_messages()
    yield from cut_into_packs()
    world = World(3, (1, 2, 3))
    for n in (1, 2, 3):
        workers, over_workers = world.worker(n - 1), caps | {"over_workers": True}
        yield Source(
            f"pairs, worker {n - 1} of 3", handmade(n, pairs, buffer=True).evolve(workers=workers), over_workers
        )
        yield Source(
            f"pairs, compressed by worker {n - 1} of 3",
            handmade(n, pairs, buffer=True).evolve(workers=workers),
            over_workers | {"compression": "bfloat16"},
        )
        yield Source(
            f"pairs, sent in part by worker {n - 1} of 3",
            handmade(n, pairs, buffer=True).evolve(workers=workers),
            over_workers | {"compression": TopK(0.1)},
        )
        yield Source(
            f"matrices, sent as a payload by worker {n - 1} of 3",
            handmade(n, [Weight("a", (20, 30)), Weight("b", (30, 20)), Weight("c", (5,))]).evolve(workers=workers),
            caps | {"over_workers": True, "compression": FirstElements()},
        )
        dealt = replace(workers, shards_optimizer=True)
        yield Source(
            f"pairs, dealt out to worker {n - 1} of 3",
            handmade(n, pairs, buffer=True).evolve(workers=dealt),
            over_workers | {"shard_optimizer": True},
        )
    alike = World(2, 2).worker(1)
    scaled = caps | {"over_workers": True, "scales_loss": True, "max_grad_norm": 1.0}
    yield Source("pairs, scaled and clipped, worker 1 of 2", handmade(2, pairs).evolve(workers=alike), scaled)
    for n in (1, 2):
        dealt = replace(World(2, n).worker(1), shards_optimizer=True)
        captured = handmade(n, mixed).evolve(workers=dealt)
        yield Source(f"own optimizer and AdamW, dealt out on {n}", captured, scaled | {"shard_optimizer": True})
    for n, model, names in (
        (1, Products(), ("weights.0", "weights.2", "head.weight")),
        (2, Tables(), ("one.weight", "two.weight", "head.weight")),
    ):
        sent = replace(World(2, n).worker(1), sent_as_factors=names)
        found = captured_model(model, n).evolve(workers=sent)
        yield Source(f"sent as factors by worker 1 of 2 on {n}", found, SMALL_BUCKETS | {"over_workers": True})
        made = found.evolve(workers=replace(sent, shards_optimizer=True))
        options = SMALL_BUCKETS | {"over_workers": True, "shard_optimizer": True}
        yield Source(f"sent as factors, dealt out to worker 1 of 2 on {n}", made, options)
    few = handmade(3, pairs, buffer=True).evolve(shard_of_replica=(0, 0, None), num_examples=(2, 2, 0))
    yield Source("pairs, ragged on 3", few, caps)
    yield Source("pairs, ragged and checked on 3", few, caps | {"check_finite": True})
    yield Source("tables, ragged on 3", partial(captured_model, Tables(), 3, rows=2), SMALL_BUCKETS)
    yield Source(
        "outputs, ragged on 3", partial(captured_model, Returning(), 3, rows=2, keeps_outputs=True), SMALL_BUCKETS
    )
    yield Source("pairs on 1", handmade(1, pairs, buffer=True), caps)
    yield Source("own optimizer on 1", handmade(1, own), SMALL_BUCKETS)
