"""Products with odd numbers of columns are made as parts of larger ones, and every value keeps its elements."""

import copy
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from memory_order import first_in_memory
from selections import slow
from tiny_programs import FunctionPass, captured_call
from torch import fx, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.errors import VerifyError
from mirrorc.ir.graph_edits import copied
from mirrorc.ir.program import Program
from mirrorc.ir.type_inference import reinfer_type
from mirrorc.options.table import grouped
from mirrorc.passes import PadProducts, default_pipeline
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.pipeline.protocol import Pass
from mirrorc.runtime.codegen.regions import backend_named
from mirrorc.torch_internals import is_operator
from mirrorc.verifier.verifier import Verify

aten = torch.ops.aten
ALL = PadProducts(fewest_rows=1, fewest_elements=1)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.even, self.last = nn.Linear(6, 9), nn.Linear(9, 8), nn.Linear(8, 5, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.even(self.first(x).tanh())))


class Views(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.even(h.view(-1).view(x.shape[0], 9) + h.view(x.shape[0], 3, 3).flatten(1)))


class Strided(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.even(torch.as_strided(self.first(x), (x.shape[0], 9), (9, 1))))


class Own(Net):
    """An operator of its own that reads memory in order, whatever the strides."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        return self.last(self.even(h * first_in_memory(h.detach(), 9)))


class Squares(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gram = torch.mm(self.first.weight, self.first.weight.T)
        return self.last(self.even(self.first(x) @ torch.mm(gram, gram)))


class Tied(nn.Module):
    """A table whose rows are the columns of the last product, as those of language models."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.inner = nn.Embedding(7, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.inner(self.table((x.abs() * 10).long() % 7))
        return F.linear(h, self.table.weight).mean(1)


def captured(model: nn.Module, x: torch.Tensor) -> Program:
    return captured_call(model, F.cross_entropy, (x,), {"target": torch.arange(len(x)) % 5})


@pytest.mark.slow
def test_results_have_rows_of_whole_blocks() -> None:
    after = run_passes(captured(Net(), torch.randn(4, 6)), [ALL], [Verify()])
    graph = after.shard_graphs[0]
    parts = [node.meta["val"] for node in graph.nodes if node.target is aten.slice.Tensor]
    first, last, in_backward = (4, 9), (4, 5), (4, 9)
    assert [tuple(part.shape) for part in parts] == [first, last, in_backward]
    assert [part.stride() for part in parts] == [(12, 1), (8, 1), (12, 1)]
    assert sum(node.target is aten.constant_pad_nd.default for node in graph.nodes) == 4, "a bias and the matrices"
    assert any(remark.text.startswith("3 products with an odd number of columns") for remark in after.remarks)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "columns"), [(torch.float32, 12), (torch.bfloat16, 16), (torch.float16, 16), (torch.float64, 9)]
)
def test_rows_are_of_sixteen_bytes(dtype: torch.dtype, columns: int) -> None:
    program = run_passes(captured(Net().to(dtype), torch.randn(4, 6).to(dtype)), [ALL], [Verify()])
    relu = next(node for node in program.shard_graphs[0].nodes if node.target is aten.tanh.default)
    assert relu.args[0].meta["val"].stride() == (columns, 1)  # type: ignore[union-attr]


def _takes_other_columns(part: fx.Node) -> None:
    part.args = (part.args[0], 1, 1, part.args[3] + 1)  # type: ignore[operator]


def _pads_in_front(part: fx.Node) -> None:
    padded = part.args[0].args[-1]  # type: ignore[union-attr]
    padded.args = (padded.args[0], [padded.args[1][1], 0])


def _pads_another_bias(part: fx.Node) -> None:
    padded = part.args[0].args[0]  # type: ignore[union-attr]
    with part.graph.inserting_before(padded):
        other = part.graph.call_function(aten.neg.default, (padded.args[0],))
    other.meta = {**padded.args[0].meta}
    padded.args = (other, padded.args[1])


def _multiplies_another_matrix(part: fx.Node) -> None:
    product = part.args[0]
    bias, x, weight = product.args  # type: ignore[union-attr]
    with part.graph.inserting_before(product):
        other = part.graph.call_function(aten.neg.default, (x,))
    other.meta = {**x.meta}
    product.args = (bias, other, weight)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "spoil", [_takes_other_columns, _pads_in_front, _pads_another_bias, _multiplies_another_matrix]
)
def test_what_is_no_part_of_the_product_is_refused(spoil: Callable[[fx.Node], None]) -> None:
    def change(program: Program) -> Program:
        graph = copied(program.shard_graphs[0])
        spoil(next(node for node in graph.nodes if node.target is aten.slice.Tensor))
        for node in graph.nodes:
            if node.op == "call_function" and is_operator(node.target):
                reinfer_type(node)
        return program.evolve(shard_graphs=(graph,))

    program = captured(Net(), torch.randn(4, 6))
    with pytest.raises(VerifyError, match=r"is computed in another way than before|has the type|is f32"):
        run_passes(program, [ALL, FunctionPass(change)], [Verify()])


def test_small_products_stay() -> None:
    program = captured(Net(), torch.randn(4, 6))
    for bounds in (PadProducts(), replace(ALL, fewest_rows=5), replace(ALL, fewest_elements=37)):
        after = bounds.run(program)
        assert after.shard_graphs == program.shard_graphs
        assert after.remarks[-1].text == "there is no large product with an odd number of columns"
    assert replace(ALL, fewest_elements=36).run(program).shard_graphs != program.shard_graphs


def test_only_compiled_gpu_code_gets_it() -> None:
    assert backend_named("inductor").preferences(torch.device("cuda"))["pads_products"]
    assert not backend_named("inductor").preferences(torch.device("cpu"))["pads_products"]
    assert "pads_products" not in backend_named("eager").preferences(torch.device("cuda"))
    names = [one.name for one in default_pipeline(pads_products=True)]
    assert "pad-products" in names and "pad-products" not in [one.name for one in default_pipeline()]


def padded_pipeline() -> list[Pass]:
    return [ALL if one.name == "pad-products" else one for one in default_pipeline(pads_products=True)]


CASES = [
    *((make, n, "eager") for make in (Net, Views, Tied, Squares) for n in (2, 3)),
    (Strided, 1, "eager"), (Own, 1, "eager"), (Views, 1, "inductor"),
    *slow((Net, 1, "eager"), (Net, 4, "eager"), (Tied, 4, "eager"), (Net, 2, "inductor"), (Tied, 3, "inductor")),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize(("make", "num_devices", "backend"), CASES)
def test_no_number_changes(make: Callable[[], nn.Module], num_devices: int, backend: str) -> None:
    torch.manual_seed(0)
    model = make()
    reference = copy.deepcopy(model)
    optimizer, expected = (torch.optim.SGD(one.parameters(), lr=0.1) for one in (model, reference))
    options = {"loss_fn": F.cross_entropy, "backend": backend, "passes": padded_pipeline()}
    with mirrorc.compile(model, num_devices, optimizer=optimizer, **grouped(options)) as step:
        for size in (7, 7, 5):
            x, target = torch.randn(size, 6), torch.arange(size) % 5
            expected.zero_grad()
            loss = F.cross_entropy(reference(x), target)
            loss.backward()
            expected.step()
            torch.testing.assert_close(step(x, target=target), loss.detach(), rtol=1e-5, atol=1e-6)
        said = [remark.text for remark in step.program.remarks]
        assert any(("not padded: " if make is Strided else "rows are padded") in text for text in said), said
    for one, other in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 3])
def test_outputs_lie_as_in_pytorch(num_devices: int) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"loss_fn": F.cross_entropy, "backend": "eager", "passes": padded_pipeline(), "return_outputs": True}
    with mirrorc.compile(model, num_devices, optimizer=optimizer, **grouped(options)) as step:
        x, target = torch.randn(7, 6), torch.arange(7) % 5
        for run in (step.evaluate, step):
            expected = model(x).detach()
            _, outputs = run(x, target=target)
            torch.testing.assert_close(outputs, expected, rtol=1e-5, atol=1e-6)
            assert outputs.is_contiguous()
        assert any("rows are padded" in remark.text for remark in step.program.remarks)
