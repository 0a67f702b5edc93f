"""The pass reserve-memory: large products of regions in memory that stays from step to step."""

from pathlib import Path
from typing import Any

import pytest
import torch
from saved_programs import assert_same, reload
from selections import exhaustive, slow
from tiny_programs import Gated, captured_model, sgd_step, targets
from torch import fx, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.program import Program
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes
from mirrorc.passes import ReserveMemory, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.verifier.verifier import Verify

RESERVING = ReserveMemory(min_bytes=0)


def pipeline(one: ReserveMemory = RESERVING, **options: Any) -> list[Pass]:
    return [one if other.name == one.name else other for other in default_pipeline(**options)]


def reserved(program: Program) -> list[fx.Node]:
    return [node for graph in program.graphs() for node in targets(graph, ops.reserved)]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(4, 7), nn.Linear(4, 7, bias=False), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(x) * self.second(x))


def trained(num_devices: int, passes: list[Pass], backend: str = "eager", **options: Any) -> tuple[list[Any], Program]:
    torch.manual_seed(0)
    model = Net().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    x, target = torch.randn(9, 4, dtype=torch.float64), torch.arange(9) % 3
    given: dict[str, Any] = {"loss_fn": F.cross_entropy, "backend": backend, "return_outputs": True, **options}
    with mirrorc.compile(model, num_devices, optimizer=optimizer, **grouped({"passes": passes, **given})) as step:
        found = []
        for num_examples in (7, 9, 7):
            found.append(step.evaluate(x[:num_examples]))
            found += step(x[:num_examples], target=target[:num_examples])
        return [*found, *(parameter.detach().clone() for parameter in model.parameters())], step.program


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [(2, {"microbatches": 2}), *slow((3, {}), (2, {"backend": "inductor"})), *exhaustive((1, {}), (2, {}))],
    ids=str,
)
def test_not_a_bit_changes(num_devices: int, options: dict[str, Any]) -> None:
    given = {"microbatches": 2} if "microbatches" in options else {}
    found, program = trained(num_devices, pipeline(**given), **options)
    expected, without = trained(num_devices, pipeline(ReserveMemory(), **given), **options)
    assert reserved(program) and not reserved(without)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("min_factored_elements", "num_devices", "num_parts"),
    [(1, 3, 2), *slow((1, 1, 1), (2**40, 2, 1)), *exhaustive((1, 2, 1), (2**40, 1, 1), (2**40, 3, 2))],
)
def test_a_view_of_a_result_that_outlives_its_readers_is_not_overwritten(
    min_factored_elements: int, num_devices: int, num_parts: int
) -> None:
    """Linear layers in a row: one product is multiplied into the next, and backward gives transposed ones as factors."""
    caps = {"min_factored_elements": min_factored_elements, "buckets": ByBytes(1e-6, 1e-6)}
    parts = {"microbatches": num_parts} if num_parts > 1 else {}
    found = []
    for one in (RESERVING, ReserveMemory()):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(12, 12) for _ in range(5)), nn.Linear(12, 3)).double()
        x, target = torch.randn(9, 12, dtype=torch.float64), torch.arange(9) % 3
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        given: dict[str, Any] = {
            "loss_fn": F.cross_entropy,
            "backend": "eager",
            "passes": pipeline(one, **caps, **parts),
        }
        with mirrorc.compile(model, num_devices, optimizer=optimizer, **grouped({**given, **parts})) as step:
            losses = [step(x, target=target) for _ in range(3)]
            assert bool(reserved(step.program)) == (one is RESERVING)
        found.append([*losses, *(parameter.detach() for parameter in model.parameters())])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow
def test_values_that_exist_one_after_the_other_have_the_same_memory() -> None:
    """Each of two microbatches has two values at a time."""
    _, program = trained(1, pipeline(microbatches=2), microbatches=2)
    assert sorted(node.kwargs["number"] for node in reserved(program)) == [0, 0, 1, 1]


@pytest.mark.slow
def test_what_something_else_reads_stays_out_of_it() -> None:
    """Logits are an output of the step, too, and a gradient is read by its bucket."""
    _, program = trained(2, pipeline())
    assert [node.kwargs["shape"][1] for node in reserved(program)] == [7] * 4  # type: ignore[index]


@pytest.mark.slow
def test_steps_and_programs_use_the_same_memory() -> None:
    torch.manual_seed(0)
    model = Net()
    with sgd_step(model, 2, loss_fn=F.cross_entropy, passes=pipeline(), dynamic=False) as step:
        memory = step._state.reserved
        seen = []
        for num_examples in (4, 4, 8, 4):
            step(torch.randn(num_examples, 4), target=torch.arange(num_examples) % 3)
            seen.append({key: (block.data_ptr(), block.numel()) for key, block in memory._blocks.items()})
        assert seen[0] == seen[1] and seen[2] == seen[3]
        assert {key: 2 * size for key, (_, size) in seen[0].items()} == {
            key: size for key, (_, size) in seen[2].items()
        }
        by_device = [sum(size for (owner, _), (_, size) in seen[0].items() if owner == replica) for replica in (0, 1)]
        report = step.memory()
        assert [device.own.reserved for device in report.devices] == by_device == [2 * (7 + 7) * 4] * 2
        assert report.reserved == sum(by_device) and "reserved" in str(report)
    assert not memory._blocks


def test_a_program_with_reserved_memory_is_saved_and_read_back(tmp_path: Path) -> None:
    for program in _every_stage():
        assert_same(reload(program, tmp_path), program)
        assert "reserved" in program.to_text(regions=True)


def _every_stage() -> list[Program]:
    program, found = captured_model(Gated()), []
    for one in pipeline():
        program = run_passes(program, [one], [Verify()])
        found.append(program)
    return [program for program in found if reserved(program)]


def test_what_is_small_or_not_wanted_stays_and_the_program_given_is_not_changed() -> None:
    passes = pipeline()
    before = run_passes(captured_model(Gated()), passes[: passes.index(RESERVING)])
    assert reserved(RESERVING.run(before)) and not reserved(before)
    for unwanted in (ReserveMemory(), ReserveMemory(wanted=False, min_bytes=0)):
        assert not reserved(unwanted.run(before))
