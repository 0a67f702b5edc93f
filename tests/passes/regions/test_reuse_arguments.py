"""The pass reuse-arguments: on the decomposed losses that Inductor gets, run eagerly, and compiled."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from selections import exhaustive, slow
from tiny_programs import captured_call
from torch import fx, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.analysis.graph.dying_arguments import dying_places, stored_product
from mirrorc.errors import VerifyError
from mirrorc.ir import ops
from mirrorc.ir.nodes import region_calls, region_of
from mirrorc.ir.program import Program
from mirrorc.options.table import grouped
from mirrorc.passes import (
    OutlineRegions,
    PlaceGradients,
    PlanBuckets,
    RecomputeElementwise,
    ReuseArguments,
    default_pipeline,
)
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.torch_internals import inductor_decompositions
from mirrorc.verifier.rules.gradients import regions_write_only_their_memory
from mirrorc.verifier.verifier import Verify, verify

pytestmark = pytest.mark.usefixtures("decomposed")

aten = torch.ops.aten
REUSING = ReuseArguments(min_bytes=0)


class Tied(nn.Module):
    def __init__(self, num_classes: int = 20) -> None:
        super().__init__()
        self.words = nn.Embedding(num_classes, 8)
        self.middle = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.gelu(self.middle(self.words(x)), approximate="tanh") @ self.words.weight.T


def pipeline(reused: bool = True, **options: Any) -> list[Pass]:
    passes = default_pipeline(recomputes=True, **options)
    return [REUSING if one.name == "reuse-arguments" else one for one in passes if reused or one.name != REUSING.name]


def trained(
    num_devices: int,
    passes: list[Pass],
    *,
    dtype: torch.dtype = torch.float64,
    accumulates: bool = False,
    **options: Any,
) -> tuple[list[torch.Tensor], Program]:
    torch.manual_seed(0)
    model = Tied().to(dtype)
    x, target = torch.arange(7) % 5, torch.arange(7)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    given: dict[str, Any] = {"loss_fn": F.cross_entropy, "backend": "decomposed", **options}
    with mirrorc.compile(model, num_devices, optimizer=optimizer, **grouped({"passes": passes, **given})) as step:
        found = [step.accumulate(x, target=target)] if accumulates else []
        found += [step(x, target=target) for _ in range(2)]
        return [*found, *(parameter.detach().clone() for parameter in model.parameters())], step.program


def written(program: Program) -> list[str]:
    nodes = [node for region in program.regions.values() for node in region.graph_module.graph.nodes]
    return [str(node.args[0]) for node in nodes if node.name.startswith("reuse_")]


def assert_bits(found: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    assert len(found) == len(expected) and all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (3, {}),
        *slow((2, {"microbatches": 2}), (2, {"accumulates": True})),
        *exhaustive((1, {}), (2, {"dtype": torch.float32})),
    ],
    ids=str,
)
def test_not_a_bit_changes(num_devices: int, options: dict[str, Any]) -> None:
    given = {"microbatches": 2} if "microbatches" in options else {}
    found, program = trained(num_devices, pipeline(**given), **options)
    assert written(program)
    expected, without = trained(num_devices, pipeline(reused=False, **given), **options)
    assert not written(without)
    assert_bits(found, expected)


def outlined() -> Program:
    call = {"args": (torch.arange(4),), "kwargs": {"target": torch.arange(4)}}
    captured = captured_call(Tied(), F.cross_entropy, **call, decompositions=inductor_decompositions())
    passes = [RecomputeElementwise(), PlanBuckets(), OutlineRegions(), PlaceGradients()]
    return run_passes(captured, passes, [Verify()])


def logits_of(program: Program) -> tuple[fx.Node, fx.Node, int]:
    _, call = region_calls(program.shard_graphs[0])
    (place,) = (i for i in dying_places(program, call) if call.args[i].meta["val"].shape == (4, 20))  # type: ignore[union-attr]
    return call, call.args[place], place  # type: ignore[return-value]


def read_by_another_node(program: Program, call: fx.Node, given: fx.Node) -> None:
    with given.graph.inserting_after(given):
        given.graph.call_function(aten.neg.default, (given,)).meta["val"] = given.meta["val"]


def read_by_a_check(program: Program, call: fx.Node, given: fx.Node) -> None:
    with given.graph.inserting_after(given):
        given.graph.call_function(ops.check, (given,), {"text": "no"})


def read_by_another_call(program: Program, call: fx.Node, given: fx.Node) -> None:
    with call.graph.inserting_after(call):
        call.graph.node_copy(call, lambda node: node)


def given_twice(program: Program, call: fx.Node, given: fx.Node) -> None:
    call.update_arg(0, given)


def handed_out(program: Program, call: fx.Node, given: fx.Node) -> None:
    output = call.graph.output_node()
    output.args = ({**output.args[0], "outputs": (given,)},)  # type: ignore[dict-item]


def taken_apart_twice(program: Program, call: fx.Node, given: fx.Node) -> None:
    with given.graph.inserting_after(given):
        given.graph.node_copy(given, lambda node: node)


def expanded(program: Program, call: fx.Node, given: fx.Node) -> None:
    value = given.meta["val"]
    given.meta["val"] = value[:1].expand(value.shape)


def gives_more(make: Callable[[fx.Graph, fx.Node], fx.Node]) -> Callable[[Program, fx.Node, fx.Node], None]:
    def change(program: Program, call: fx.Node, given: fx.Node) -> None:
        body = program.regions[region_of(given.args[0])].graph_module.graph  # type: ignore[arg-type]
        results: Any = body.output_node().args[0]
        logits = results[given.args[1]]
        with body.inserting_before(body.output_node()):
            made = make(body, logits)
        made.meta["val"] = made.meta.get("val", logits.meta["val"])
        body.output_node().args = ((*results, made),)

    return change


def times_ones(body: fx.Graph, logits: fx.Node) -> fx.Node:
    ones = body.call_function(aten.full.default, ([4, 20], 1.0))
    return body.call_function(aten.mul.Tensor, (logits, ones))


STILL_READ: dict[str, Callable[[Program, fx.Node, fx.Node], None]] = {
    "another node": read_by_another_node,
    "a check": read_by_a_check,
    "another call": read_by_another_call,
    "twice": given_twice,
    "an output": handed_out,
    "two parts": taken_apart_twice,
    "expanded": expanded,
    "a view": gives_more(lambda body, logits: body.call_function(aten.permute.default, (logits, [1, 0]))),
    "an equal product": gives_more(lambda body, logits: body.node_copy(origin(logits), lambda node: node)),
    "a product with ones": gives_more(times_ones),
}


def origin(node: fx.Node) -> fx.Node:
    found = stored_product(node)
    assert found is not None
    return found


@pytest.mark.slow
@pytest.mark.parametrize("change", STILL_READ)
def test_what_something_else_reads_is_not_written(change: str) -> None:
    program = outlined()
    call, given, place = logits_of(program)
    STILL_READ[change](program, call, given)
    assert place not in dying_places(program, call)


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [lambda value: value.double(), lambda value: value.t().contiguous().t(), lambda value: value[:, :1]],
    ids=["another dtype", "other strides", "another shape"],
)
def test_a_result_that_lies_otherwise_keeps_its_own_memory(change: Callable[[torch.Tensor], torch.Tensor]) -> None:
    program = outlined()
    call, _, place = logits_of(program)
    argument = program.regions[region_of(call)].graph_module.graph.find_nodes(op="placeholder")[place]
    name = argument.name
    assert name in written(REUSING.run(program))
    argument.meta["val"] = change(argument.meta["val"])
    assert name not in written(REUSING.run(program))


def test_what_is_small_or_not_wanted_stays_and_the_program_given_is_not_changed() -> None:
    program = outlined()
    REUSING.run(program)
    assert not written(program)
    for unwanted in (ReuseArguments(), ReuseArguments(wanted=False, min_bytes=0)):
        assert not written(unwanted.run(program))


@pytest.mark.slow
@pytest.mark.parametrize("reads", ["the argument", "an earlier view"])
def test_the_verifier_refuses_reads_of_what_is_overwritten(reads: str) -> None:
    program = REUSING.run(outlined())
    verify(program)
    nodes = program.regions["bwd_0"].graph_module.graph.nodes
    write = next(node for node in nodes if node.name.startswith("reuse_"))
    argument: Any = write.args[0]
    reader = next(user for user in write.users if user.op == "call_function")
    stale = argument
    if reads == "an earlier view":
        with write.graph.inserting_before(write):
            stale = write.graph.call_function(aten.alias.default, (argument,))
        stale.meta["val"] = argument.meta["val"]
    reader.replace_input_with(write, stale)
    with pytest.raises(
        VerifyError, match=rf"{reader.name} in bwd_0 reads {stale.name}, whose memory {write.name} has written"
    ):
        verify(program)


def test_the_verifier_refuses_writes_into_what_does_not_die() -> None:
    program = REUSING.run(outlined())
    call, given, place = logits_of(program)
    name = program.regions["bwd_0"].graph_module.graph.find_nodes(op="placeholder")[place].name
    read_by_another_node(program, call, given)
    with pytest.raises(VerifyError, match=f"writes {name}, which is no slot, nor an argument that dies in {call.name}"):
        verify(program)


@pytest.mark.slow
def test_the_verifier_refuses_to_give_back_what_is_written() -> None:
    program = REUSING.run(outlined())
    body = program.regions["bwd_0"].graph_module.graph
    write = next(node for node in body.nodes if node.name.startswith("reuse_"))
    output = body.output_node()
    output.args = ((*output.args[0], write),)  # type: ignore[misc]
    found = [str(violation) for violation in regions_write_only_their_memory(program)]
    assert any(f"bwd_0 gives back {write.args[0]}, into which {write.name} writes" in text for text in found)


@pytest.mark.slow
def test_compiled_regions_take_less_memory_and_give_the_same_bits() -> None:
    found, peaks = [], []
    for without in ([], ["reuse-arguments"]):
        torch.manual_seed(0)
        model = Tied(8192)
        x, target = torch.arange(36) * 7, torch.arange(36) * 9
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with mirrorc.compile(
            model,
            1,
            optimizer=optimizer,
            loss_fn=F.cross_entropy,
            compiler=mirrorc.Compiler(backend="inductor", disable=without),
        ) as step:
            found.append([step(x, target=target), *(parameter.detach() for parameter in model.parameters())])
            assert bool(written(step.program)) is not bool(without)
            peaks.append(step.memory().devices[0].peak.num_bytes)
    logits, embedding_gradient = 36 * 8192 * 4, 8 * 8192 * 4
    assert peaks[1] > 2 * logits > peaks[0], peaks  # logits and their gradient, in one memory or two
    assert peaks[0] < 1.05 * (logits + embedding_gradient), peaks
    assert_bits(*found)
