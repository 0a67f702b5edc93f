"""The passes read-row-elements and recompute-elementwise, on the decomposed losses that Inductor gets, run eagerly."""

import copy
import math
from collections.abc import Callable

import pytest
import torch
from selections import slow_but
from tiny_programs import captured_call, targets
from torch import fx, nn
from torch.nn import functional as F

import mirrorc
from mirrorc.errors import VerifyError
from mirrorc.ir.program import Program
from mirrorc.passes import ReadRowElements, RecomputeElementwise
from mirrorc.pipeline.pass_manager import run_passes
from mirrorc.torch_internals import inductor_decompositions
from mirrorc.verifier.verifier import Verify

pytestmark = pytest.mark.usefixtures("decomposed")

aten = torch.ops.aten
NUM_CLASSES, IGNORED = 40, -100
WEIGHTS = torch.linspace(0.5, 2, NUM_CLASSES, dtype=torch.float64)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def by_hand(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return -logits.log_softmax(1).gather(1, target.clamp(min=0)[:, None]).mean()


def of_images(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Classes are dim 1 of four, and logits are made by no product."""
    spread = logits[:, :, None, None] * torch.arange(1, 7, dtype=logits.dtype).view(2, 3)
    return F.cross_entropy(spread, target[:, None, None].expand(-1, 2, 3))


def soft(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, F.one_hot(target.clamp(min=0), NUM_CLASSES).to(logits) * 0.9 + 0.1 / NUM_CLASSES)


def with_logits(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    logarithms = logits.log_softmax(1)
    return F.nll_loss(logarithms, target) + (logarithms @ logits.new_ones(NUM_CLASSES, 2)).mean()


LOSSES: dict[str, tuple[Loss, bool]] = {
    "mean": (F.cross_entropy, True),
    "weights": (lambda x, t: F.cross_entropy(x, t, weight=WEIGHTS.to(x.dtype)), True),
    "by hand": (by_hand, False),
    "images": (of_images, True),
    "smooth": (lambda x, t: F.cross_entropy(x, t, label_smoothing=0.1), False),
    "soft": (soft, False),
    "with logits": (with_logits, False),
}
"""Losses, and whether a sum over one-hot rows is known beforehand in them."""


def captured(loss_fn: Loss, dtype: torch.dtype = torch.float64) -> Program:
    model, x = nn.Linear(3, NUM_CLASSES).to(dtype), torch.randn(4, 3, dtype=dtype)
    return captured_call(model, loss_fn, (x,), {"target": torch.arange(4)}, decompositions=inductor_decompositions())


def changed(program: Program) -> fx.Graph:
    return run_passes(program, [ReadRowElements(), RecomputeElementwise()], [Verify()]).shard_graphs[0]


def wide_sums(graph: fx.Graph) -> list[fx.Node]:
    return [node for node in targets(graph, aten.sum.dim_IntList) if node.args[1] == [1]]


@pytest.mark.slow
@pytest.mark.parametrize("loss", LOSSES)
def test_a_sum_of_one_hot_rows_is_left_out_and_others_stay(loss: str) -> None:
    loss_fn, is_known = LOSSES[loss]
    before = captured(loss_fn)
    after = changed(before)
    assert len(wide_sums(before.shard_graphs[0])) - len(wide_sums(after)) == is_known


@pytest.mark.slow
@pytest.mark.parametrize("loss", slow_but(("mean", "by hand", "images", "soft"), LOSSES))
def test_training_is_that_of_one_device(loss: str) -> None:
    torch.manual_seed(0)
    loss_fn, _ = LOSSES[loss]
    model = nn.Linear(3, NUM_CLASSES).double()
    x, target = torch.randn(7, 3, dtype=torch.float64), torch.arange(7) * 5
    ours, optimizer = copy.deepcopy(model), torch.optim.SGD(model.parameters(), lr=0.5)
    of_step = torch.optim.SGD(ours.parameters(), lr=0.5)
    with mirrorc.compile(
        ours, 3, optimizer=of_step, loss_fn=loss_fn, compiler=mirrorc.Compiler(backend="decomposed")
    ) as step:
        for _ in range(2):
            optimizer.zero_grad()
            expected = _weighted(loss_fn, model, x, target)
            expected.backward()
            optimizer.step()
            torch.testing.assert_close(step(x, target=target), expected.detach(), rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(list(ours.parameters()), list(model.parameters()), rtol=1e-11, atol=1e-12)


def _weighted(loss_fn: Loss, model: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean of the shards' losses by their examples, which differs from the whole where classes have weights."""
    shards = zip(x.tensor_split(3), target.tensor_split(3), strict=True)
    return sum(loss_fn(model(own), t) * len(own) for own, t in shards) / len(x)  # type: ignore[return-value]


@pytest.mark.slow
@pytest.mark.parametrize("target", [[0, IGNORED, 2], [IGNORED] * 3], ids=["some ignored", "all ignored"])
@pytest.mark.parametrize("worst", [0.0, -math.inf, math.nan], ids=str)
def test_numbers_that_are_not_finite_are_those_of_torch(target: list[int], worst: float) -> None:
    model = nn.Linear(3, NUM_CLASSES).double()
    with torch.no_grad():
        model.bias[5] = worst
    x, classes = torch.randn(3, 3, dtype=torch.float64), torch.tensor(target)
    ours, expected = copy.deepcopy(model), F.cross_entropy(model(x), classes)
    expected.backward()
    optimizer = torch.optim.SGD(ours.parameters(), lr=1.0)
    with mirrorc.compile(
        ours, 1, optimizer=optimizer, loss_fn=F.cross_entropy, compiler=mirrorc.Compiler(backend="decomposed")
    ) as step:
        found = step(x, target=classes)
    torch.testing.assert_close(found, expected.detach(), equal_nan=True)
    updated = [parameter.detach() - parameter.grad for parameter in model.parameters()]  # type: ignore[operator]
    torch.testing.assert_close([p.detach() for p in ours.parameters()], updated, equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_short_numbers_are_summed_in_float32_as_before(dtype: torch.dtype) -> None:
    x, target = torch.randn(6, 3).to(dtype), torch.arange(6)
    trained = []
    for without in ([], ["read-row-elements", "recompute-elementwise"]):
        torch.manual_seed(0)
        model = nn.Linear(3, NUM_CLASSES).to(dtype)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        with mirrorc.compile(
            model,
            2,
            optimizer=optimizer,
            loss_fn=F.cross_entropy,
            compiler=mirrorc.Compiler(backend="decomposed", disable=without),
        ) as step:
            trained.append([step(x, target=target), *(parameter.detach() for parameter in model.parameters())])
            sums = wide_sums(step.program.regions["bwd_0"].graph_module.graph)
            assert len(sums) == bool(without)
    for one, other in zip(*trained, strict=True):
        assert torch.equal(one, other)


def test_backward_recomputes_the_logarithms_from_the_stored_product() -> None:
    after = changed(captured(F.cross_entropy))
    (whole,) = [node for node in after.nodes if node.target is aten.addmm.default]
    (exponential,) = [node for node in targets(after, aten.exp.default) if node.name != "exp" and _is_backward(node)]
    chain = [exponential]
    while chain[-1] is not whole:
        chain.append(chain[-1].all_input_nodes[0])
    assert [node.name.endswith("_again") for node in chain[1:-1]].count(True) == 3
    assert all(len(node.users) == 1 or node is whole for node in chain[1:])


def _is_backward(node: fx.Node) -> bool:
    nodes = list(node.graph.nodes)
    weight = next(user for n in nodes if n.op == "placeholder" and "weight" in n.name for user in n.users)
    return nodes.index(node) > nodes.index(weight)


@pytest.mark.slow
def test_what_forward_stores_in_any_case_is_not_recomputed() -> None:
    """Logarithms that forward multiplies with a matrix."""
    assert not any(node.name.endswith("_again") for node in changed(captured(with_logits)).nodes)
    unwanted = RecomputeElementwise(wanted=False).run(captured(F.cross_entropy))
    assert "wanted is not set" in unwanted.remarks[-1].text


@pytest.mark.parametrize(
    "break_it",
    [
        lambda node: node.update_arg(1, 1.0),  # the element has another sign
        lambda node: node.update_arg(0, node.graph.find_nodes(op="call_function", target=aten.amax.default)[0]),
    ],
    ids=["another element", "another factor"],
)
def test_the_verifier_refuses_any_other_element(break_it: Callable[[fx.Node], None]) -> None:
    class Wrong(ReadRowElements):
        def run(self, program: Program) -> Program:
            after = super().run(program)
            break_it(next(n for n in after.shard_graphs[0].nodes if n.name.endswith("_mul") and n.args[1:] == (-1.0,)))
            return after

    with pytest.raises(VerifyError, match=r"the gradient of (weight|bias) on cpu:0 is computed in another way"):
        run_passes(captured(F.cross_entropy), [Wrong()], [Verify()])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("made", "is_same"),
    [
        (lambda x, i: (x - x.amax(1, True)).gather(1, i), True),
        (lambda x, i: (x - x.amax(0, True)).gather(1, i), False),  # another number along the row
        (lambda x, i: (x - x.amax(1, True)).gather(1, i[:2]), False),  # reads some rows
        (lambda x, i: (x - x.double().amax(1, True)).gather(1, i), False),  # promoted
        (lambda x, i: torch.sub(x, x.amax(1, True), alpha=2).gather(1, i), False),
        (lambda x, i: torch.scatter(torch.zeros(3, 5), 1, i, 2.0).mul(x.amax(1, True)).sum(1, True), True),
        (lambda x, i: torch.scatter(torch.zeros(3, 5), 1, i, 2.0).mul(x).sum(1, True), True),
        (lambda x, i: torch.scatter(torch.ones(3, 5), 1, i, 2.0).mul(x.amax(1, True)).sum(1, True), False),
        (lambda x, i: torch.scatter(torch.zeros(3, 5), 0, i, 2.0).mul(x.amax(1, True)).sum(1, True), False),
        (lambda x, i: torch.scatter(torch.zeros(3, 5), 1, i, 2.0).mul(x.amax(1, True)).sum(0, True), False),
        (lambda x, i: torch.scatter(torch.zeros(3, 5), 1, i[:2], 2.0).mul(x.amax(1, True)).sum(1, True), False),
        (lambda x, i: torch.scatter(torch.zeros(3, 5).long(), 1, i, 2).mul(i).sum(1, True), False),  # sums to 64 bits
    ],
)
def test_an_operator_matches_only_if_one_element_is_enough(
    made: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], is_same: bool
) -> None:
    def loss_fn(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return logits.sum() + made(torch.arange(15.0).view(3, 5).cos() * logits.detach().sum(), target).sum()

    x, target = torch.randn(3, 3), torch.tensor([[1], [4], [2]])
    how = {"decompositions": inductor_decompositions()}
    before = captured_call(nn.Linear(3, 2), loss_fn, (x,), {"target": target}, **how)
    after = run_passes(before, [ReadRowElements()], [Verify()])
    assert (after.shard_graphs is not before.shard_graphs) is is_same
