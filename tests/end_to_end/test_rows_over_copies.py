"""Rows of tables that one device has updated and sends: every device has the bits that the whole table gives it."""

import copy
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from references import assert_same_training, train_by_several, train_mirrored, train_on_one_device
from separate_memories import separate_memories
from small_modules import module_of
from torch import nn
from torch.nn import functional as F
from torch.optim.optimizer import register_optimizer_step_pre_hook
from twins import batches_of, compiled_step, same_each_time

from mirrorc.ir import ops
from mirrorc.ir.nodes import bucket_of, calls_to
from mirrorc.ir.program import Program
from mirrorc.packing import EqualPacks
from mirrorc.step import Step

Maker = Callable[[nn.Module], list[torch.optim.Optimizer]]
COPIES = {"link": "copy", "disable": ["share-parameters"]}
WHOLE = {"link": "copy", "disable": ["share-parameters", "send-rows"]}


class Lookups(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(200, 4, padding_idx=1, sparse=True)
        self.bags = nn.EmbeddingBag(300, 4, padding_idx=0, sparse=True)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.words(x).mean(1) + self.words(x[:, 0])
        return self.head(torch.tanh(words + self.bags(x % 7)))

    def tables(self) -> list[nn.Parameter]:
        return [self.words.weight, self.bags.weight]


def dense_of(model: Any) -> list[nn.Parameter]:
    return [p for p in model.parameters() if all(p is not table for table in model.tables())]


MAKERS: dict[str, Maker] = {
    "SparseAdam": lambda model: [
        torch.optim.SparseAdam(model.tables(), lr=0.1),  # type: ignore[operator]
        torch.optim.AdamW(dense_of(model), lr=0.1),
    ],
    "SGD": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1)],
    "momentum": lambda model: [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)],
    "Adagrad": lambda model: [torch.optim.Adagrad(model.parameters(), lr=0.1, lr_decay=0.1)],
    "two": lambda model: [
        torch.optim.SGD([model.words.weight, *dense_of(model)], lr=0.1),  # type: ignore[list-item]
        torch.optim.Adagrad([model.bags.weight], lr=0.1),  # type: ignore[list-item]
    ],
}


def seeded() -> Lookups:
    return same_each_time(Lookups)


def batches(sizes: Sequence[int] = (4, 1, 4)) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(3)
    for size in sizes:
        x = torch.randint(0, 14, (size, 3), generator=generator)
        x[0] = 7  # 0 in the bags
        yield x, torch.randn(size, 3, generator=generator)


def copies_of(step: Step, name: str) -> tuple[torch.Tensor, ...]:
    return tuple(step.variables[name].values)


def trained(make: Maker, devices: int, **options: Any) -> tuple[Lookups, list[dict[str, Any]], int]:
    model = seeded()
    optimizers = make(model)
    with warnings.catch_warnings(), compiled_step(model, F.mse_loss, devices, optimizer=optimizers, **options) as step:
        warnings.simplefilter("ignore", UserWarning)
        for x, y in batches():
            step(x, target=y)
        assert_copies_are_equal(step, model)
        count = count_stores(step)
    return model, [optimizer.state_dict()["state"] for optimizer in optimizers], count


def count_stores(step: Step) -> int:
    graphs = [module.graph for module in step.programs[-1].device_graphs.values()]
    return sum(1 for graph in graphs for _ in calls_to(graph, ops.store_rows))


def assert_copies_are_equal(step: Step, model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        for own in copies_of(step, name):
            assert torch.equal(own, parameter), name


def assert_same(one: Any, other: Any) -> None:
    if isinstance(one, torch.Tensor):
        assert one.layout == other.layout
        assert torch.equal(one.to_dense(), other.to_dense())
    elif isinstance(one, dict):
        assert one.keys() == other.keys()
        for key, value in one.items():
            assert_same(value, other[key])
    elif isinstance(one, list):
        for value, another in zip(one, other, strict=True):
            assert_same(value, another)
    else:
        assert one == other


ROWS_OF = {"SparseAdam": 2, "SGD": 2, "momentum": 0, "Adagrad": 2, "two": 2}
"""Of how many tables each other device writes rows."""


@pytest.mark.parametrize("case", [(devices, name) for devices in (2, 3, 4) for name in MAKERS])
def test_rows_give_each_device_the_bits_that_the_whole_table_gives_it(case: tuple[int, str]) -> None:
    devices, name = case
    model, states, count = trained(MAKERS[name], devices, **COPIES)
    other, others, none = trained(MAKERS[name], devices, **WHOLE)
    assert (count, none) == (ROWS_OF[name] * (devices - 1), 0)
    assert_same(model.state_dict(), other.state_dict())
    assert_same(states, others)
    alone = seeded()
    train_by_several(alone, MAKERS[name](alone), (((x,), y) for x, y in batches()), F.mse_loss)
    torch.testing.assert_close([*model.parameters()], [*alone.parameters()], rtol=1e-5, atol=1e-6)


OPTIONS: dict[str, dict[str, Any]] = {
    "bound": {"clip_grad_norm": 0.05},
    "bound by value": {"clip_grad_value": 0.01},
    "checked": {"check_finite": True},
    "microbatches": {"microbatches": 2},
    "scaled": {"scaler": lambda: torch.amp.GradScaler("cpu", init_scale=8.0)},
    "by messages": {"algorithm": "ring"},
    "packs": {"buckets": EqualPacks(3)},
}


@pytest.mark.parametrize("name", list(OPTIONS))
def test_rows_go_with_all_that_gradients_go_through(name: str) -> None:
    options = {key: value() if callable(value) else value for key, value in OPTIONS[name].items()}
    model, states, count = trained(MAKERS["SparseAdam"], 2, **COPIES, **options)
    options = {key: value() if callable(value) else value for key, value in OPTIONS[name].items()}
    other, others, _ = trained(MAKERS["SparseAdam"], 2, **WHOLE, **options)
    assert count == 2
    assert_same([model.state_dict(), states], [other.state_dict(), others])


@pytest.mark.parametrize("placement", ["mirrored", "least-loaded"])
def test_devices_with_memories_of_their_own_get_rows(monkeypatch: pytest.MonkeyPatch, placement: str) -> None:
    separate_memories(monkeypatch)
    model, states, count = trained(MAKERS["Adagrad"], 3, link="copy", placement=placement)
    other, others, none = trained(MAKERS["Adagrad"], 3, link="copy", placement=placement, disable=["send-rows"])
    assert (count, none) == (4, 0)
    assert_same([model.state_dict(), states], [other.state_dict(), others])


class Table(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(100, 2, sparse=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.table(x)


def compiled(optimizer: torch.optim.Optimizer, model: nn.Module, **options: Any) -> Step:
    return compiled_step(model, F.mse_loss, optimizer=optimizer, **COPIES, **options)


def test_what_changes_the_rows_that_a_step_writes_is_seen_between_steps() -> None:
    """Momentum writes rows of earlier steps, and a hook any row: the copies are equal after each step, with and without."""
    model, y = Table(), torch.ones(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)

    def shrink(*_: Any) -> None:
        with torch.no_grad():
            model.table.weight.mul_(0.5)

    with compiled(optimizer, model) as step:

        def trained_with(places: list[int]) -> int:
            before = model.table.weight.detach().clone()
            step(torch.tensor(places), target=y)
            assert_copies_are_equal(step, model)
            written.append((model.table.weight != before).any(1).sum().item())
            return count_stores(step)

        written: list[Any] = []
        assert trained_with([1, 2]) == 1
        optimizer.param_groups[0]["momentum"] = 0.9
        assert trained_with([3, 4]) == 0
        assert trained_with([5, 6]) == 0
        optimizer.param_groups[0]["momentum"] = 0
        assert trained_with([7, 7]) == 1
        hook = optimizer.register_step_post_hook(shrink)
        assert trained_with([8, 9]) == 0
        hook.remove()
        assert trained_with([8, 9]) == 1
        of_all = register_optimizer_step_pre_hook(shrink)
        assert trained_with([8, 9]) == 0
        of_all.remove()
        assert trained_with([1, 2]) == 1
    assert written == [2, 2, 4, 1, 100, 2, 100, 2]


@pytest.mark.fast
def test_a_hook_of_one_of_several_optimizers_has_all_tables_sent() -> None:
    model = seeded()
    optimizers = MAKERS["two"](model)

    def shrink(*_: Any) -> None:
        with torch.no_grad():
            model.words.weight.mul_(0.5)

    optimizers[1].register_step_pre_hook(shrink)
    with compiled_step(model, F.mse_loss, optimizer=optimizers, **COPIES) as step:
        for x, y in batches((4,)):
            step(x, target=y)
        assert count_stores(step) == 0
        assert_copies_are_equal(step, model)


def test_a_step_that_is_skipped_writes_no_rows() -> None:
    model, x = Table(), torch.tensor([1, 2])
    before = copy.deepcopy(model.state_dict())
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    with compiled(torch.optim.SGD(model.parameters(), lr=0.5), model, scaler=scaler) as step:
        step(x, target=torch.full((2, 2), torch.inf))
        assert_same(dict(model.state_dict()), dict(before))
        assert_copies_are_equal(step, model)
        step(x, target=torch.ones(2, 2))
        assert count_stores(step) == 1
        assert_copies_are_equal(step, model)
    assert not torch.equal(model.table.weight, before["table.weight"])


@pytest.mark.fast
def test_rows_are_counted_where_bytes_are() -> None:
    """Four lookups on each device, 8 bytes each: at most 64 bytes, in place of 800."""
    model = Table()
    with compiled(torch.optim.SGD(model.parameters(), lr=0.5), model) as step:
        step(torch.arange(8), target=torch.ones(8, 2))
        explained, memory, text = step.explain(), step.memory(), str(step.programs[-1])
    (sent,) = [bucket for bucket in explained.buckets if bucket.kind == "send"]
    assert sent.num_bytes == 64
    assert "the rows that SGD group 0 writes are sent to each other device, at most 0.1 KiB in place of 0.8 KiB" in text
    assert "updated_rows(bucket=0" in text and "store_rows(bucket=0" in text
    assert "at most 8 of 100" in text
    assert all(row.activations < 2048 for row in memory.rows)


def test_where_rows_may_be_a_large_part_of_the_table_it_is_sent_whole() -> None:
    model = Table()
    with compiled(torch.optim.SGD(model.parameters(), lr=0.5), model) as step:
        step(torch.arange(13), target=torch.ones(13, 2))
        assert count_stores(step) == 0
        assert "all of table.weight is sent, 0.8 KiB, and not its rows, 0.1 KiB at most: devices of one" in str(
            step.programs[-1]
        )
        assert_copies_are_equal(step, model)
        step(torch.arange(12), target=torch.ones(12, 2))
        assert count_stores(step) == 1
        assert_copies_are_equal(step, model)


# Devices that do not read one memory gather the factors of gradients where that moves fewer bytes than whole buckets.


APART = {"link": "copy", "disable": ["share-parameters"]}


class Words(nn.Module):
    def __init__(self, *, is_tied: bool = False) -> None:
        super().__init__()
        self.table = nn.Embedding(500, 300, padding_idx=3)
        self.wide, self.head = nn.Linear(300, 450), nn.Linear(450, 3)
        self.is_tied = is_tied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.table(x).mean(1)
        if self.is_tied:
            words = words + 0.1 * torch.tanh(words @ self.table.weight.t()) @ self.table.weight
        return self.head(torch.tanh(self.wide(words)))


momentum = partial(torch.optim.SGD, lr=0.1, momentum=0.9)


def seeded_factors(**options: Any) -> nn.Module:
    return same_each_time(lambda: Words(**options).double())


def batches_of_factors(sizes: Sequence[int] = (5, 2, 5)) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    words = [torch.randint(0, 9, (size, 3), generator=generator) for size in sizes]
    return [{**batch, "x": x} for batch, x in zip(batches_of(*sizes, outputs=3), words, strict=True)]


def prepared(devices: int = 2, model: nn.Module | None = None, **options: Any) -> Program:
    model = model or seeded_factors()
    with compiled_step(model, F.mse_loss, devices, **APART | options) as step:
        return step.prepare(**batches_of_factors()[0])


def gathered(program: Program) -> set[str]:
    found = []
    for module in program.device_graphs.values():
        buckets = [program.buckets[bucket_of(node)] for node in calls_to(module.graph, ops.all_gather)]
        found.append({slot.variable for bucket in buckets for slot in bucket.slots})
    assert all(own == found[0] for own in found)
    return found[0]


@pytest.mark.parametrize(
    ("devices", "is_tied", "options"),
    [
        (2, False, {}),
        (3, True, {"clip_grad_norm": 0.1}),
        (3, False, {"microbatches": 2}),
        (2, True, {"exchange": "factors"}),
        (1, False, {}),
    ],
)
def test_devices_train_as_one(devices: int, is_tied: bool, options: dict[str, Any]) -> None:
    model, data = seeded_factors(is_tied=is_tied), batches_of_factors()
    found = train_mirrored(model, momentum, data, devices, F.mse_loss, **options, **APART)
    if "clip_grad_norm" not in options:
        assert_same_training(found, train_on_one_device(model, momentum, data, F.mse_loss), 1e-12)
    else:
        whole = train_mirrored(model, momentum, data, 1, F.mse_loss, **options)
        assert_same_training(found, whole, 1e-12)


def test_what_moves_fewer_bytes_is_chosen_and_can_be_asked_for() -> None:
    program = prepared()
    assert gathered(program) == {"table.weight", "wide.weight"}
    (remark,) = [text for remark in program.remarks if "how devices send gradients" in (text := str(remark))]
    # the rows of 2 or 3 examples with 3 words each, and their indices, against a table of 500 x 300 numbers of 64 bits
    assert "chosen by bytes alone" in remark
    assert (
        f"table.weight as factors ({3 * 3 * 301 * 8 / 1024:.1f} KiB against {500 * 300 * 8 / 2**20:.1f} MiB)" in remark
    )
    assert gathered(prepared(exchange="dense")) == set()
    assert gathered(prepared(exchange="factors")) == {"table.weight", "wide.weight", "head.weight"}
    assert gathered(prepared(exact_order=True)) == set()
    assert gathered(prepared(model=seeded_factors(is_tied=True))) == {
        "wide.weight"
    }  # rows and a product are one dense gradient


@pytest.mark.fast
def test_devices_that_share_parameters_make_shares_instead() -> None:
    assert gathered(prepared(disable=[])) == set()


def test_owners_and_algorithms_get_whole_sums() -> None:
    for options, expected in (
        ({"placement": "mirrored"}, {"table.weight", "wide.weight"}),
        ({"placement": "central"}, set()),
        ({"placement": "mirrored", "algorithm": "ring"}, set()),
        (
            {"placement": "mirrored", "algorithm": "ring", "exchange": "factors"},
            {"table.weight", "wide.weight", "head.weight"},
        ),
    ):
        assert gathered(prepared(disable=[], **options)) == expected, options


NOTHING = "devices share their parameters, and read gradients in the memory that they share, so nothing is sent"
OWNED = "each gradient is added up whole, by the device that owns its variable"


@pytest.mark.parametrize(
    ("options", "dense", "factors"),
    [
        ({"devices": 1}, "one device sends no gradient", "one device sends no gradient"),
        ({"disable": []}, NOTHING, NOTHING),
        (
            {"model": module_of(lambda self, x: self.table(x).mean(1), table=nn.Embedding(50, 3, sparse=True))},
            "devices gather rows of table.weight for the optimizer",
            "",
        ),
        ({"disable": [], "placement": "central"}, "", OWNED),
        (
            {"model": module_of(lambda self, x: x.double() + self.bias, bias=nn.Parameter(torch.zeros(3)))},
            "",
            "no gradient is a product, or rows of a table, that they could gather",
        ),
        ({"capture": "autograd"}, "", "no gradient is a product, or rows of a table, that they could gather"),
        ({}, "", ""),
    ],
)
def test_what_is_asked_for_and_has_no_effect_is_said(options: dict[str, Any], dense: str, factors: str) -> None:
    for exchange, why in (("auto", ""), ("dense", dense), ("factors", factors)):
        program = prepared(**{"model": seeded_factors(), **options}, exchange=exchange)
        said = [text for one in program.remarks if "has no effect" in (text := one.text)]
        assert said == ([f"exchange={exchange!r} has no effect: {why}"] if why else [])


@pytest.mark.fast
def test_factors_are_not_asked_for_where_the_pass_is_left_out() -> None:
    for left_out in ({"exact_order": True}, {"disable": ["factor-gradients"]}):
        with pytest.raises(
            ValueError,
            match=r"exchange='factors' cannot be used with this pipeline\n  why:  the pass 'factor-gradients'",
        ):
            prepared(exchange="factors", **left_out)
