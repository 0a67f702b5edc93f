"""Tables with sparse gradients, and bags of rows, train as on one device: parameters, and the optimizer's state, in which rows
that no example looks up stay as they are."""

import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_parameters, train_by_several, unchanged
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step, same_each_time

import mirrorc
from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.options.table import grouped
from mirrorc.packing import EqualPacks

Maker = Callable[[nn.Module], list[torch.optim.Optimizer]]
Batch = tuple[tuple[torch.Tensor, ...], torch.Tensor]


class Lookups(nn.Module):
    def __init__(self, *, is_sparse: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(30, 4, padding_idx=1, sparse=is_sparse)
        self.bags = nn.EmbeddingBag(20, 4, padding_idx=0, sparse=is_sparse)
        self.weighted = nn.EmbeddingBag(20, 4, mode="sum", sparse=is_sparse)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        words = self.words(x).mean(1) + self.words(x[:, 0])
        return self.head(torch.tanh(words + self.bags(x % 7) + self.weighted(x, per_sample_weights=weights)))

    def tables(self) -> list[nn.Parameter]:
        return [self.words.weight, self.bags.weight, self.weighted.weight]


class Largest(Lookups):
    def __init__(self) -> None:
        super().__init__(is_sparse=False)
        self.largest = nn.EmbeddingBag(20, 4, mode="max", padding_idx=2)

    def forward(self, x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return super().forward(x, weights) + self.head(self.largest(x))


def batches(sizes: Sequence[int] = (6, 3, 6)) -> Iterator[Batch]:
    generator = torch.Generator().manual_seed(3)
    for size in sizes:
        x = torch.randint(0, 14, (size, 3), generator=generator)
        x[0] = 7  # 0 in the bags
        weights, y = (torch.randn(size, 3, generator=generator, dtype=torch.float64) for _ in range(2))
        yield (x, weights), y


def lazy_adam(model: Any) -> list[torch.optim.Optimizer]:
    dense = [p for p in model.parameters() if all(p is not table for table in model.tables())]
    return [torch.optim.SparseAdam(model.tables(), lr=0.1), torch.optim.AdamW(dense, lr=0.1)]


MAKERS: dict[str, Maker] = {
    "SparseAdam": lazy_adam,
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, nesterov=True)],
    "Adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1)],
}


def clip(model: nn.Module, most: float) -> None:
    """As `torch.nn.utils.clip_grad_norm_`, which refuses sparse gradients: of the elements that each has once."""
    own = []
    for parameter in model.parameters():
        if parameter.grad is not None and parameter.grad.is_sparse:
            parameter.grad = parameter.grad.coalesce()
        own.append(parameter.grad.values() if parameter.grad.is_sparse else parameter.grad)
    norm = torch.stack([part.norm() for part in own]).norm()
    for part in own:
        part.mul_(min(1.0, most / (float(norm) + 1e-6)))


def trained_alone(model: nn.Module, make: Maker, most: float | None = None) -> list[torch.optim.Optimizer]:
    before_update = (lambda: clip(model, most)) if most is not None else (lambda: None)
    return train_by_several(model, make(model), batches(), F.mse_loss, before_update)


def seeded(make: Callable[[], nn.Module] = Lookups) -> nn.Module:
    return same_each_time(lambda: make().double())


def table_twins(model: nn.Module | None = None, loss_fn: Any = F.mse_loss, **options: Any) -> Twins:
    return Twins(Table() if model is None else model, loss_fn=loss_fn, **options)


def trained(model: nn.Module, make: Maker, devices: int, **options: Any) -> list[torch.optim.Optimizer]:
    optimizers = make(model)
    with warnings.catch_warnings(), compiled_step(model, F.mse_loss, devices, optimizer=optimizers, **options) as step:
        warnings.simplefilter("ignore", UserWarning)
        for x, y in batches():
            step(*x, target=y)
    return optimizers


def assert_alike(own: Sequence[torch.optim.Optimizer], others: Sequence[torch.optim.Optimizer]) -> None:
    for one, other in zip(own, others, strict=True):
        found, expected = one.state_dict()["state"], other.state_dict()["state"]
        assert found.keys() == expected.keys()
        for key, entries in expected.items():
            assert found[key].keys() == entries.keys()
            for name, value in entries.items():
                values = [torch.as_tensor(value) for value in (found[key][name], value)]
                assert values[0].layout == values[1].layout, name
                torch.testing.assert_close(values[0].to_dense(), values[1].to_dense(), rtol=0, atol=1e-12)


def check(devices: int, name: str, most: float | None = None, **options: Any) -> None:
    alone, model = seeded(), seeded()
    expected = trained_alone(alone, MAKERS[name], most)
    found = trained(model, MAKERS[name], devices, **({"clip_grad_norm": most} if most else {}), **options)
    assert_same_parameters(model, alone)
    assert_alike(found, expected)


@pytest.mark.parametrize("case", [(devices, name) for devices in (1, 2, 3) for name in MAKERS])
def test_optimizers_get_the_rows_that_are_looked_up(case: tuple[int, str]) -> None:
    check(*case)


OTHERS: dict[str, tuple[int, str, dict[str, Any]]] = {
    "bound": (2, "SparseAdam", {"most": 0.05}),
    "microbatches": (2, "SGD", {"microbatches": 2}),
    "checked": (2, "Adagrad", {"check_finite": True}),
    "mirrored": (3, "SparseAdam", {"link": "copy", "disable": ["share-parameters"]}),
    "mirrored, bound": (2, "momentum", {"link": "copy", "disable": ["share-parameters"], "most": 0.05}),
    "over copies": (2, "Adagrad", {"link": "copy"}),
    "owned": (3, "SparseAdam", {"placement": "least-loaded"}),
    "ring": (2, "momentum", {"placement": "mirrored", "algorithm": "ring"}),
    "packs": (2, "SGD", {"buckets": EqualPacks(3)}),
    "packs, mirrored": (2, "SGD", {"link": "copy", "disable": ["share-parameters"], "buckets": EqualPacks(3)}),
    "scaled": (2, "SparseAdam", {"scaler": torch.amp.GradScaler("cpu", init_scale=8.0)}),
}


@pytest.mark.parametrize("case", list(OTHERS))
def test_rows_go_through_all_that_gradients_do(case: str) -> None:
    devices, name, options = OTHERS[case]
    check(devices, name, **options)


@pytest.mark.parametrize("devices", [1, 3])
def test_bags_train_as_on_one_device(devices: int) -> None:
    alone, model = seeded(Largest), seeded(Largest)
    make = MAKERS["momentum"]
    assert_alike(trained(model, make, devices), trained_alone(alone, make))
    assert_same_parameters(model, alone)


def test_rows_cannot_be_given_to_an_owner() -> None:
    with pytest.raises(
        mirrorc.MirrorcError,
        match=r"'words.weight' cannot be owned by cpu:1\n  why:  SGD group 0 takes rows of a table, so the optimizer runs",
    ):
        check(2, "SGD", placement={"words.weight": "cpu:1"})


class Recorder(torch.optim.Optimizer):
    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {})
        self.found: list[torch.Tensor] = []

    def step(self, closure: Any = None) -> None:
        self.found += [p.grad.clone() for group in self.param_groups for p in group["params"] if p.grad is not None]


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(5, 2, padding_idx=4, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


@pytest.mark.parametrize("options", [{}, {"link": "copy", "disable": ["share-parameters"]}])
def test_gradients_of_replicas_are_added_up_by_rows(options: dict[str, Any]) -> None:
    x = mirrorc.PerReplica([torch.tensor([1, 4]), torch.tensor([1, 3])])
    gradients = [torch.tensor([[1.0, 2.0], [9.0, 9.0]]), torch.tensor([[3.0, 4.0], [5.0, 6.0]])]
    for reduction, factor in (("sum", 1.0), ("mean", 0.5)):
        model = Table()
        optimizer = Recorder(model.parameters())

        def loss_fn(rows: torch.Tensor, target: torch.Tensor, reduction: str = reduction) -> torch.Tensor:
            products = (rows * target).sum(1)
            return products.sum() if reduction == "sum" else products.mean() * len(products)

        with compiled_step(model, loss_fn, optimizer=optimizer, loss_reduction=reduction, **options) as step:
            step(x, target=mirrorc.PerReplica(gradients))
        (found,) = optimizer.found
        assert found.is_sparse
        assert found.is_coalesced()
        assert found.indices().tolist() == [[1, 3]]
        assert found.values().tolist() == [[4 * factor, 6 * factor], [5 * factor, 6 * factor]]


@pytest.mark.fast
def test_a_row_whose_gradients_cancel_each_other_is_updated() -> None:
    model = Table()
    optimizer = Recorder(model.parameters())
    with compiled_step(model, lambda y, t: (y * t).sum(), optimizer=optimizer, loss_reduction="sum") as step:
        step(torch.tensor([2, 2]), target=torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))
        step(torch.tensor([4, 4]), target=torch.ones(2, 2))
    assert [own.indices().tolist() for own in optimizer.found] == [[[2]], [[]]]
    assert optimizer.found[0].values().tolist() == [[0.0, 0.0]]


def test_a_table_that_is_a_layer_too_has_a_dense_gradient() -> None:
    class Tied(Table):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.table(x) @ self.table.weight.t()

    with table_twins(seeded(Tied)) as pair:
        pair.train(torch.tensor([1, 3, 1]), target=torch.randn(3, 5).double())
        assert not any(bucket.rule.takes_rows for bucket in pair.step.programs[-1].buckets)
        assert_same_parameters(pair.model, pair.twin)


def test_rows_are_gathered_in_the_program_and_nothing_else_is_kept_of_the_gradient() -> None:
    model = nn.Sequential(nn.Embedding(4000, 8, sparse=True), nn.Flatten(), nn.Linear(16, 2))
    with compiled_step(model, F.cross_entropy) as step:
        step(torch.arange(8).view(4, 2), target=torch.tensor([0, 1, 0, 1]))
        memory, explained, program = step.memory(), str(step.explain()), step.programs[-1]
    (table,) = [bucket for bucket in program.buckets if bucket.rule.takes_rows]
    for module in program.device_graphs.values():
        assert [bucket_of(node) for node in calls_to(module.graph, ops.all_gather)] == [table.index]
    assert sum(row.gradients for row in memory.rows) < table.num_bytes / 10
    assert "all_gather over shared-memory" in explained
    assert "adds up the rows of it, of all replicas' factors" in str(program)


REFUSED: dict[str, tuple[Maker, str]] = {
    "Adam": (
        lambda model: [torch.optim.Adam(model.parameters())],
        "Adam cannot update '[a-z.]+', whose gradient is sparse\n.*SparseAdam instead\n  fix:  .*sparse=False",
    ),
    "weight decay": (
        lambda model: [torch.optim.Adagrad(model.parameters(), weight_decay=0.1)],
        "weight_decay option is not compatible with sparse gradients",
    ),
    "fused": (
        lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, fused=True)],
        "does not support sparse gradients",
    ),
    "dense": (
        lambda model: [torch.optim.SparseAdam(model.parameters())],
        "SparseAdam cannot update 'head[a-z.]+', whose gradient is dense\n.*\n  fix:  nn\\.Embedding\\(\\.\\.\\., sparse=True",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_torch_refuses_is_refused_before_anything_changes(case: str) -> None:
    make, words = REFUSED[case]
    model, (x, y) = seeded(), next(batches())
    optimizers = make(model)
    states = [len(optimizer.state) for optimizer in optimizers]  # Adagrad has some from the beginning
    step = compiled_step(model, F.mse_loss, optimizer=optimizers)
    with step, unchanged(model), pytest.raises(ValueError, match=f"(?s){words}"):
        step(*x, target=y)
    assert [len(optimizer.state) for optimizer in optimizers] == states


@pytest.mark.fast
def test_hyperparameters_that_torch_refuses_later_stop_a_step_before_it_begins() -> None:
    model, (x, y) = Table(), (torch.tensor([1, 2]), torch.ones(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with compiled_step(model, F.mse_loss, optimizer=optimizer) as step:
        step(x, target=y)
        optimizer.param_groups[0]["weight_decay"] = 0.1
        with unchanged(model), pytest.raises(ValueError, match=r"SGD cannot update 'table.weight', whose gradient is"):
            step(x, target=y)
        optimizer.param_groups[0]["weight_decay"] = 0
        step(x, target=y)


@pytest.mark.fast
def test_plain_pytorch_takes_no_rows_and_says_which_lookup_it_takes() -> None:
    model, (x, y) = Table(), (torch.tensor([1, 2]), torch.ones(2, 2))
    with (
        compiled_step(model, F.mse_loss, capture="autograd") as step,
        pytest.raises(mirrorc.CaptureError, match=r"(?s)sparse.*fix:  .*sparse=False") as told,
    ):
        step(x, target=y)
    assert "plain PyTorch, with" not in str(told.value)  # which takes no rows either


@pytest.mark.fast
def test_gradients_of_several_calls_are_refused() -> None:
    model, (x, y) = Table(), (torch.tensor([1, 2]), torch.ones(2, 2))
    with compiled_step(model, F.mse_loss) as step:
        with pytest.raises(ValueError, match=r"'table.weight' is sparse\n.*\n.*microbatches=4"):
            step.accumulate(x, target=y)
        step(x, target=y)


@pytest.mark.parametrize("options", [{}, {"shard_optimizer": True, "clip_grad_norm": 1.0}])
def test_workers_send_each_other_rows(options: dict[str, Any]) -> None:
    def prepared(**others: Any) -> Any:
        model = seeded()
        x, y = next(batches())
        asked: dict[str, Any] = {
            "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
            "loss_fn": F.mse_loss,
            "backend": "eager",
        }
        return mirrorc.plan(
            model, (x, {"target": y}), world=mirrorc.World(2, 2), rank=1, **grouped({**asked, **options, **others})
        )

    program = prepared()
    sent = {b.slots[0].variable for b in program.buckets if b.is_sent_as_factors}
    assert sent == {"words.weight", "bags.weight", "weighted.weight"}
    for module in program.device_graphs.values():
        assert len(list(calls_to(module.graph, ops.gather_factors))) == 3
        assert not list(calls_to(module.graph, ops.all_gather))
    if not options:
        with pytest.raises(
            ValueError, match=r"(?s)exchange='dense' cannot send the gradient of '\w+.weight'.*takes rows.*sparse=False"
        ):
            prepared(exchange="dense")


@pytest.mark.fast
def test_rows_need_their_pass() -> None:
    model = Table()
    with (
        compiled_step(model, F.mse_loss, disable=["factor-gradients"]) as step,
        pytest.raises(mirrorc.MirrorcError, match=r"(?s)rows of the gradient of table.weight.*'factor-gradients'"),
    ):
        step(torch.tensor([1, 2]), target=torch.ones(2, 2))


class Bags(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.bags = nn.EmbeddingBag(6, 3, **{"mode": "mean", "sparse": True} | options)

    def forward(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        return self.bags(indices, offsets)


@pytest.mark.fast
def test_offsets_are_not_split() -> None:
    with compiled_step(Bags(), F.mse_loss) as step:
        with pytest.raises(mirrorc.CaptureError, match=r"(?s)takes argument 'offsets' as offsets.*2-D indices"):
            step(torch.arange(4), torch.arange(4), target=torch.ones(4, 3))
        with pytest.raises(ValueError, match=r"(?s)disagree on dim 0.*2-D indices.*in place of offsets"):
            step(torch.arange(5), torch.arange(4), target=torch.ones(4, 3))


@pytest.mark.fast
@pytest.mark.parametrize("options", [{}, {"include_last_offset": True, "padding_idx": 1, "mode": "sum"}])
def test_one_device_takes_offsets_and_empty_bags(options: dict[str, Any]) -> None:
    indices, offsets, target = torch.tensor([5, 1, 1, 2, 5]), torch.tensor([0, 0, 2, 5]), torch.ones(4, 3).double()
    target = target[:3] if options else target  # the last offset is the end
    given = mirrorc.replicated(offsets) if options else offsets
    with table_twins(Bags(**options).double(), devices=1) as pair:
        pair.step(mirrorc.replicated(indices), given, target=target)
        pair.plain(indices, offsets, target=target)
        assert_same_parameters(pair.model, pair.twin)


class Learned(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.bags, self.weights = nn.EmbeddingBag(9, 3, mode="sum", sparse=True), nn.Embedding(9, 1, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.bags(x, per_sample_weights=self.weights(x).squeeze(-1))


@pytest.mark.parametrize("devices", [2, 1, 3])
def test_weights_of_bags_are_trained(devices: int) -> None:
    adagrad = partial(torch.optim.Adagrad, lr=0.1)
    x, y = torch.tensor([[1, 2], [1, 1], [8, 2]]), torch.randn(3, 3, dtype=torch.float64)
    with table_twins(seeded(Learned), make_optimizer=adagrad, devices=devices) as pair:
        for size in (3, 1):
            pair.train(x[:size], target=y[:size])
        assert_same_parameters(pair.model, pair.twin)
        assert_alike([pair.optimizer], [pair.twin_optimizer])
