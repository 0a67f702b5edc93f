"""Operations are declared once: each is known to every part that deals with operations."""

import functools
import operator
from dataclasses import replace

import pytest
import torch
from asserting import Asserting
from broken_meetings import meeting_stages, stages_of_worker
from broken_programs import LooksUp
from module_programs import module_programs
from payloads import FirstElements
from saved_programs import HANDMADE
from tiny_programs import MUON, Gated, Weight, captured_model, every_stage, handmade, run_up_to
from torch import nn

from mirrorc.compression import TopK
from mirrorc.ir import ops
from mirrorc.ir.graph_edits import call
from mirrorc.ir.operation import (
    Effect,
    Handlers,
    Kind,
    Printed,
    operation,
    operation_named,
    operation_of,
    operations,
    withdraw,
)
from mirrorc.ir.program import Accumulation, Program, Stage
from mirrorc.ir.type_inference import is_inferable
from mirrorc.ir.type_rules import of_operand
from mirrorc.ir.workers import World
from mirrorc.packing import EqualPacks
from mirrorc.passes import ReserveMemory, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.printing.colors import colored
from mirrorc.runtime.execution.binding.binder import binds
from mirrorc.runtime.memory.activations import accounts
from mirrorc.runtime.profiling.timeline import category_of
from mirrorc.serialization.operator_names import find_operator, operator_name


class Table(nn.Module):
    """Looks its features' signs up, and has a layer whose gradient is larger than its factors."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide = nn.Embedding(500, 4), nn.Linear(16, 30)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wide(self.table((x > 0).long()).flatten(1))


@functools.cache
def programs() -> list[Program]:
    found = [stage for name in ("buffer", "uneven") for stage in every_stage(HANDMADE[name]()).values()]
    found += every_stage(captured_model(Table()), min_factored_elements=1).values()
    found += every_stage(captured_model(Asserting())).values()
    found += every_stage(captured_model(nn.Linear(4, 3), keeps_outputs=True)).values()
    found += every_stage(HANDMADE["buffer"](), check_finite=True).values()
    found += every_stage(HANDMADE["buffer"](), buckets=EqualPacks(3)).values()
    found += every_stage(HANDMADE["buffer"](), max_grad_norm=1.0, max_grad_value=1.0).values()
    found += every_stage(HANDMADE["buffer"](), scales_loss=True).values()
    found += every_stage(HANDMADE["buffer"](), placement="central").values()
    of_workers = HANDMADE["buffer"]().evolve(workers=World(2, 2).worker(1))
    found += every_stage(of_workers, over_workers=True).values()
    found += every_stage(of_workers, over_workers=True, compression="bfloat16").values()
    found += every_stage(of_workers, over_workers=True, compression=TopK(0.1)).values()
    found += every_stage(of_workers, over_workers=True, compression=FirstElements()).values()
    dealt = HANDMADE["buffer"]().evolve(workers=replace(World(2, 2).worker(1), shards_optimizer=True))
    found += every_stage(dealt, over_workers=True, shard_optimizer=True).values()
    sent = replace(World(2, 2).worker(1), sent_as_factors=("table.weight", "wide.weight"))
    found += every_stage(captured_model(Table()).evolve(workers=sent), over_workers=True).values()
    made = captured_model(Table()).evolve(workers=replace(sent, shards_optimizer=True))
    found += every_stage(made, over_workers=True, shard_optimizer=True).values()
    gathered = captured_model(Table()).evolve(gathered=("table.weight", "wide.weight"))
    apart = [one for one in default_pipeline() if one.name != "share-parameters"]
    found += [run_passes(gathered, apart[:n]) for n in range(len(apart) + 1)]
    found.append(run_passes(captured_model(LooksUp()), apart))
    dropping = nn.Sequential(nn.Linear(4, 3), nn.Dropout())
    found += every_stage(captured_model(dropping, microbatches=2), microbatches=2).values()
    reserving = [ReserveMemory(min_bytes=0) if one.name == "reserve-memory" else one for one in default_pipeline()]
    found.append(run_passes(captured_model(Gated()), reserving))
    found += meeting_stages().values()
    found += stages_of_worker(0).values()
    found += module_programs()
    for kind in (Accumulation.ADDS, Accumulation.ENDS, Accumulation.GRADIENTS):
        found += every_stage(HANDMADE["buffer"]().evolve(accumulation=kind)).values()
    mirrored = handmade(2, [Weight("a", rule=MUON)])
    return [*found, run_up_to("insert-update", mirrored), run_up_to("lower-devices", mirrored)]


def test_every_operation_is_known_to_every_part() -> None:
    others = (Kind.SOURCE, Kind.CHECK, Kind.GATHER, Kind.COMPUTE, Kind.FACTORED)
    categories = dict.fromkeys(others, "other") | {Kind.WRITE: "update"}
    for found in operations():
        graph = torch.fx.Graph()
        node = call(graph, found.symbol, (), {})
        assert operation_of(node.target) is found is operation_named(found.name)
        assert is_inferable(node) == (found.gives is not None) == (found.symbol is not ops.argument), found.name
        assert find_operator(operator_name(found.symbol)) is found.symbol
        if found.until is Stage.LOWERED:  # else passes make something else of it before it runs
            assert found.symbol in binds, f"nothing runs {found.name}"
            assert found.symbol in accounts, f"nothing accounts for the memory of {found.name}"
            assert category_of(node) == categories.get(found.kind, found.kind.value)
        if found.printed is not Printed.WHERE_USED and found.kind is not Kind.REGION:
            text = colored(f"x = {found.name}(y)")
            assert found.name in {text.plain[s.start : s.end] for s in text.spans}, f"{found.name} has no color"
        assert found.summary.endswith("."), f"{found.name} does not say what it does"


@pytest.mark.slow
def test_operations_stand_at_their_stages_with_their_keywords() -> None:
    seen = set()
    for program in programs():
        for graph in program.graphs():
            for node in graph.nodes:
                found = operation_of(node.target)
                if found is not None:
                    seen.add(found.name)
                    assert found.since <= program.stage <= found.until, f"{found.name} at {program.stage.name}"
                    assert set(found.keywords) <= set(node.kwargs)
    assert seen == {found.name for found in operations()}


def test_selections_are_made_of_effects() -> None:
    assert list(ops.REDUCTIONS) == [ops.all_reduce, ops.reduce_scatter, ops.all_gather, ops.reduce]
    assert list(ops.SHARED_OUT) == [ops.reduce_scatter, ops.reduce]
    assert list(ops.EXCHANGES) == [*ops.EXCHANGES_OF_SUMS, ops.gather_factors, ops.scatter_sums]
    assert list(ops.BETWEEN_WORKERS) == [*ops.EXCHANGES, ops.gather_parameters]
    assert list(ops.COLLECTIVES) == [*ops.REDUCTIONS, *ops.BETWEEN_WORKERS, ops.broadcast]
    assert list(ops.LAUNCHES) == [*ops.COLLECTIVES, ops.recv]
    assert list(ops.FACTORED) == [ops.product, ops.index_add] and len(ops.FACTORED) == 2
    assert list(ops.UPDATES) == [ops.update, ops.step_optimizer, ops.store, ops.store_rows]
    assert ops.recv in ops.LAUNCHES and ops.send not in ops.LAUNCHES
    for target in (operator.getitem, torch.ops.aten.mm.default, "x"):
        assert target not in ops.LAUNCHES and operation_of(target) is None


def test_a_declaration_is_the_signature() -> None:
    found = operation_of(ops.index_add)
    assert found is not None
    assert (found.operands, found.keywords, found.shown) == (None, ("bucket", "variable"), ("padding_idx",))
    step = operation_of(ops.step_optimizer)
    assert step is not None and (step.operands, step.keywords, step.shown) == ("buckets", ("buckets",), ())
    assert {effect for found in operations() for effect in found.effects} == set(Effect)


def test_a_name_is_declared_once_and_can_be_given_back() -> None:
    with pytest.raises(ValueError, match="'pack' is declared already"):

        @operation(Kind.COMPUTE, since=Stage.REPLICATED, gives=of_operand)
        def pack() -> None:
            """Another pack."""

    assert operation_named("pack") is operation_of(ops.pack)
    handlers: Handlers = Handlers("admire")

    @operation(Kind.COMPUTE, since=Stage.REPLICATED, gives=of_operand)
    def toy(value: object) -> None:
        """A toy."""

    handlers(toy)(lambda: "toy")
    handlers(ops.FACTORED)(lambda: "factored")
    assert handlers.of(toy)() == "toy" and handlers.of(ops.product)() == "factored"
    withdraw(toy)
    assert operation_named("toy") is None and operation_of(toy) is None
    with pytest.raises(LookupError, match="nothing is registered to admire the operation toy"):
        handlers.of(toy)


def test_symbols_do_not_run() -> None:
    with pytest.raises(TypeError, match="pack is an operation of the IR: only mirrorc's runtime can run it"):
        ops.pack()
