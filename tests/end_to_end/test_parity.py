"""A step on several devices means what it means on one: numbers, bits, buffers and random draws."""

import itertools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from parts import WAYS
from references import (
    NormalizedSgd,
    OptimizerMaker,
    Trained,
    assert_same_bits,
    assert_same_losses,
    assert_same_parameters,
    assert_same_state,
    assert_same_training,
    assert_trains_alike,
    train_mirrored,
    train_on_one_device,
    train_shard_by_shard,
)
from selections import exhaustive, slow
from small_modules import Parts, module_of
from tiny_models import MODELS, make_mlp
from torch import nn
from twins import MlpTwins, Twins, compiled_step

import mirrorc
from mirrorc.packing import ByBytes
from mirrorc.passes import FactorGradients, default_pipeline
from mirrorc.pipeline.pipeline_edits import select_passes

SGD = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
DOUBLE_TOLERANCE = 1e-10
SINGLE_TOLERANCE = 1e-5


OPTIMIZERS: dict[str, OptimizerMaker] = {
    "sgd": partial(torch.optim.SGD, lr=0.1),
    "momentum": SGD,
    "sgd-momentum": partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "sgd-nesterov": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
    "adam": partial(torch.optim.Adam, lr=0.01),
    "adam-amsgrad": partial(torch.optim.Adam, lr=0.01, amsgrad=True, weight_decay=0.01),
    "adam-foreach": partial(torch.optim.Adam, lr=0.01, foreach=True),
    "adamw": partial(torch.optim.AdamW, lr=0.01),
    "rmsprop": partial(torch.optim.RMSprop, lr=0.001, centered=True, momentum=0.5),
    "adagrad": partial(torch.optim.Adagrad, lr=0.01, lr_decay=0.1, initial_accumulator_value=0.1),
    "adamax": partial(torch.optim.Adamax, lr=0.01),
    "nadam": partial(torch.optim.NAdam, lr=0.01),
    "radam": partial(torch.optim.RAdam, lr=0.01),
    "adadelta": partial(torch.optim.Adadelta, lr=1.0),
    "user-defined": partial(NormalizedSgd, lr=0.1),
}


def both(
    name: str, dtype: torch.dtype, num_devices: int, num_examples: int, optimizer: OptimizerMaker = SGD, **options: Any
) -> tuple[Trained, Trained]:
    tiny = MODELS[name]
    model, batches = tiny.make(dtype), tiny.batches(num_examples, dtype)
    mirrored = train_mirrored(model, optimizer, batches, num_devices, tiny.loss_fn, **options)
    return mirrored, train_on_one_device(model, optimizer, batches, tiny.loss_fn)


DOUBLE, SINGLE = torch.float64, torch.float32
AGREEING: list[tuple[str, torch.dtype, str, int, int, str]] = [
    ("mlp", DOUBLE, "momentum", 1, 1, "eager"),
    ("mlp", DOUBLE, "momentum", 4, 4, "eager"),
    ("conv", DOUBLE, "momentum", 3, 5, "eager"),
    ("conv", DOUBLE, "momentum", 1, 4, "eager"),
    ("gpt2", DOUBLE, "momentum", 2, 6, "eager"),
    ("bert", DOUBLE, "momentum", 3, 5, "eager"),
    ("vit", DOUBLE, "momentum", 2, 3, "eager"),
    ("conv", SINGLE, "momentum", 3, 7, "eager"),
    ("bert", SINGLE, "momentum", 3, 4, "eager"),
    ("gpt2-own-loss", SINGLE, "momentum", 2, 5, "eager"),
    *(("mlp", DOUBLE, name, 3, 6, "eager") for name in OPTIMIZERS),
    ("mlp", DOUBLE, "adamw", 3, 6, "inductor"),
    ("mlp", DOUBLE, "radam", 3, 7, "inductor"),
    ("mlp", DOUBLE, "user-defined", 2, 5, "inductor"),
    ("conv", DOUBLE, "sgd-nesterov", 2, 4, "inductor"),
    ("gpt2", DOUBLE, "sgd-momentum", 3, 6, "inductor"),
]
RARELY: list[tuple[str, torch.dtype, str, int, int, str]] = [
    ("vit", SINGLE, "momentum", 2, 7, "eager"),
    ("gpt2", SINGLE, "momentum", 4, 5, "eager"),
    ("mlp", SINGLE, "sgd", 4, 7, "inductor"),
    *(
        (name, DOUBLE, "momentum", devices, examples, backend)
        for name in ("mlp", "conv", "gpt2", "bert", "vit")
        for devices in (1, 2, 3, 4)
        for examples in (2 * devices, 2 * devices + 1)
        for backend in ("eager", "inductor")
    ),
    *(
        ("mlp", DOUBLE, name, devices, 7, backend)
        for name in OPTIMIZERS
        for devices in (1, 2, 3, 4)
        for backend in ("eager", "inductor")
    ),
]


@pytest.mark.parametrize(
    ("name", "dtype", "optimizer", "num_devices", "num_examples", "backend"), [*AGREEING, *exhaustive(*RARELY)]
)
def test_training_agrees_with_one_device(
    name: str, dtype: torch.dtype, optimizer: str, num_devices: int, num_examples: int, backend: str
) -> None:
    mirrored, single = both(name, dtype, num_devices, num_examples, OPTIMIZERS[optimizer], backend=backend)
    tolerance = DOUBLE_TOLERANCE if dtype is DOUBLE else SINGLE_TOLERANCE
    assert_same_training(mirrored, single, tolerance)
    assert mirrored.losses[0] != mirrored.losses[-1]
    if (name, dtype) == ("mlp", DOUBLE):
        assert_same_state(mirrored.optimizer, single.optimizer, tolerance)


@pytest.mark.fast
@pytest.mark.parametrize(
    "make_optimizer",
    [
        *slow((partial(torch.optim.AdamW, lr=1e-3),)),
        *exhaustive((partial(torch.optim.Adam, lr=1e-3),), (partial(torch.optim.NAdam, lr=1e-3),)),
    ],
    ids=["adamw", "adam", "nadam"],
)
def test_adams_losses_agree_in_single_precision(make_optimizer: OptimizerMaker) -> None:
    mirrored, single = both("gpt2-own-loss", torch.float32, 3, 7, make_optimizer)
    assert_same_losses(mirrored, single, 1e-4)


@pytest.mark.parametrize(
    ("num_devices", "num_examples", "backend"),
    [(4, 9, "eager"), (1, 4, "eager"), (2, 7, "eager"), *exhaustive((3, 6, "eager")), (2, 4, "inductor")],
)
def test_batch_norm_agrees_with_training_shard_by_shard(num_devices: int, num_examples: int, backend: str) -> None:
    tiny = MODELS["resnet"]
    model, batches = tiny.make(torch.float64), tiny.batches(num_examples, torch.float64)
    mirrored = train_mirrored(model, SGD, batches, num_devices, tiny.loss_fn, backend=backend)
    expected = train_shard_by_shard(model, SGD, batches, num_devices, F.cross_entropy)
    assert_same_training(mirrored, expected, DOUBLE_TOLERANCE)
    assert mirrored.model.stem_norm.num_batches_tracked == len(batches)


def test_batch_norms_statistics_are_each_replicas_own() -> None:
    tiny = MODELS["resnet"]
    model = tiny.make(torch.float64)
    with compiled_step(model, tiny.loss_fn, optimizer=SGD) as step:
        step(**tiny.batch(4, torch.float64, 0))
        first, second = step.variables["stem_norm.running_mean"].values
        assert not torch.equal(first, second)
        assert torch.equal(model.stem_norm.running_mean, (first + second) / 2)


def make_groups(optimizer_class: type[torch.optim.Optimizer], parameters: Iterable[nn.Parameter]) -> Any:
    members = list(parameters)
    biases, weights = [p for p in members if p.dim() == 1], [p for p in members if p.dim() > 1]
    groups = [{"params": weights, "lr": 0.02, "weight_decay": 0.1}, {"params": biases, "lr": 0.05, "weight_decay": 0.0}]
    return optimizer_class(groups)


STEPS_OF_RATE = partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.3)
ONE_CYCLE = partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.05, total_steps=6)  # which changes momentum, too


@pytest.mark.parametrize(
    ("make_optimizer", "make_scheduler"),
    [
        (partial(make_groups, torch.optim.AdamW), STEPS_OF_RATE),
        (partial(make_groups, torch.optim.Adadelta), STEPS_OF_RATE),
        (partial(make_groups, torch.optim.SGD), STEPS_OF_RATE),
        (partial(torch.optim.AdamW, lr=0.01), ONE_CYCLE),
    ],
)
def test_parameter_groups_and_a_scheduler(make_optimizer: OptimizerMaker, make_scheduler: Any) -> None:
    with MlpTwins(make_optimizer) as pair, warnings.catch_warnings():
        warnings.simplefilter("error")
        before = pair.optimizer.param_groups[0]["lr"]
        schedulers = [make_scheduler(own) for _, own in pair.sides]
        for _ in range(5):
            pair.steps(1)
            for scheduler in schedulers:
                scheduler.step()
        pair.check()
        assert pair.optimizer.param_groups[0]["lr"] != before
        assert "1 compiled program" in repr(pair.step)


def train_with_dropout(seed: int, num_devices: int = 3, **options: Any) -> Trained:
    torch.manual_seed(seed)
    model = make_mlp(torch.float32, dropout=0.5)
    batches = MODELS["mlp"].batches(7, torch.float32)
    return train_mirrored(model, SGD, batches, num_devices, F.cross_entropy, **options)


@pytest.mark.parametrize("options", [{}, {"num_devices": 2, "backend": "inductor"}], ids=["eager", "inductor"])
def test_two_runs_are_equal_bit_for_bit(options: dict[str, Any]) -> None:
    first, second = (train_with_dropout(seed=5, **options) for _ in range(2))
    assert_same_bits(first, second)
    assert options or train_with_dropout(seed=6).losses != first.losses


@pytest.mark.parametrize(
    "options",
    [
        {"buckets": ByBytes(1e-6, 1e-6)},
        {"link": "copy"},
        {"buckets": ByBytes(1e-3, 1e-4)},
        {"buckets": ByBytes(1e3, 1e3)},
        {"disable": ("schedule-overlap",)},
        {"link": "shared-memory"},
    ],
    ids=str,
)
def test_options_that_keep_the_order_of_additions_keep_the_bits(options: dict[str, Any]) -> None:
    assert_same_bits(train_with_dropout(seed=5, **options), train_with_dropout(seed=5))


FACTORED_USUAL: list[tuple[Any, ...]] = [
    (3, torch.float64, ("share-parameters",), {"buckets": 1e-3}),
    (4, torch.bfloat16, (), {"buckets": 1e-3}),
    (2, torch.float64, (), {}),
    (3, torch.float32, (), {"buckets": 1e-3}),
    (3, torch.float32, ("share-parameters",), {}),
    (3, torch.bfloat16, ("share-parameters",), {}),
]
FACTORED_CASES = itertools.product(
    [2, 3, 4], [torch.float64, torch.float32, torch.bfloat16], [(), ("share-parameters",)], [{}, {"buckets": 1e-3}]
)


@pytest.mark.parametrize(
    ("num_devices", "dtype", "disabled", "caps"),
    [*FACTORED_USUAL, *exhaustive(*(case for case in FACTORED_CASES if case not in FACTORED_USUAL))],
)
def test_factored_gradients_are_the_same_numbers(
    num_devices: int, dtype: torch.dtype, disabled: tuple[str, ...], caps: dict[str, float]
) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 40), nn.ReLU(), nn.Linear(40, 24), nn.ReLU(), nn.Linear(24, 3)).to(dtype)
    batches = [{"input": torch.randn(n, 48, dtype=dtype), "target": torch.randint(0, 3, (n,))} for n in (7, 7)]
    pipeline = default_pipeline(min_factored_elements=0, part_elements=100, **caps)
    pipeline = [replace(p, parameters_are_shared=True) if isinstance(p, FactorGradients) else p for p in pipeline]
    factored, whole = (
        train_mirrored(model, SGD, batches, num_devices, F.cross_entropy, passes=select_passes(pipeline, left_out))
        for left_out in (disabled, ("factor-gradients", *disabled))
    )
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 2e-2}[dtype]
    assert_same_parameters(factored.model, whole.model, tolerance)


class ProductsOfParts(nn.Module):
    """Weights that are products of a parameter and of a part of another: the gradient of the one has that part as a factor.

    They have different sizes, so that no two gradients are made by one region, which would have factors for all or none.
    """

    def __init__(self) -> None:
        super().__init__()
        sizes = {way: 4 + i for i, way in enumerate(WAYS)}
        self.left = nn.ParameterDict({way: nn.Parameter(torch.randn(16, n) / n) for way, n in sizes.items()})
        self.right = nn.ParameterDict({way: nn.Parameter(torch.randn(n, 2)) for way, n in sizes.items()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        columns = []
        for way, take in WAYS.items():
            one, other = take(self.right[way])
            columns.append(torch.tanh(x @ (self.left[way] @ one) + x[:, : len(other)] @ other))
        return torch.cat(columns, 1)


@pytest.mark.parametrize(
    ("num_devices", "optimizer", "caps"),
    [(3, "adam", {"buckets": ByBytes(1e-5, 1e-5)}), (1, "adam", {}), (2, "sgd", {}), (2, "adam", {}), (3, "sgd", {})],
)
def test_parts_of_a_parameter_may_be_operands_of_products(
    num_devices: int, optimizer: str, caps: dict[str, float]
) -> None:
    """They are no factors of gradients, because an update writes them."""
    torch.manual_seed(0)
    model, make = ProductsOfParts().double(), OPTIMIZERS[optimizer]
    batches = [
        {"x": torch.randn(6, 16, dtype=torch.float64), "target": torch.randn(6, len(WAYS), dtype=torch.float64)}
        for _ in range(3)
    ]
    pipeline = default_pipeline(min_factored_elements=0, **caps)
    assert_trains_alike(model, make, batches, num_devices, F.mse_loss, tolerance=DOUBLE_TOLERANCE, passes=pipeline)


def tables() -> nn.Module:
    return module_of(
        lambda self, user, item, tags: self.head(
            torch.cat([self.user(user), self.item(item), self.tags(tags).mean(1)], 1)
        ),
        user=nn.Embedding(40, 7),
        item=nn.Embedding(30, 9, padding_idx=2),
        tags=nn.Embedding(25, 16),
        head=nn.Linear(32, 3),
    )


def looked_up(num_examples: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def rows(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        return torch.randint(6, shape, generator=generator, dtype=dtype)

    batch = {"user": rows(num_examples), "item": rows(num_examples, dtype=torch.int32), "tags": rows(num_examples, 3)}
    return {**batch, "target": rows(num_examples) % 3}


OPTIMIZERS_OF_TABLES: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adamw": partial(torch.optim.AdamW, lr=1e-2),
    "nesterov in place": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adadelta": torch.optim.Adadelta,
}


@pytest.mark.parametrize(
    ("num_devices", "optimizer", "backend"),
    [
        (4, "adamw", "eager"),
        (1, "nesterov in place", "eager"),
        (3, "nesterov in place", "eager"),
        (2, "adamw", "eager"),
        (3, "adadelta", "eager"),
        (2, "adamw", "inductor"),
        (1, "adadelta", "eager"),
        *exhaustive((1, "adamw", "eager"), (3, "adamw", "eager"), (1, "adamw", "inductor")),
        *exhaustive(*((n, name, "eager") for n in (2, 4) for name in ("nesterov in place", "adadelta"))),
    ],
)
def test_tables_are_trained_as_on_one_device(num_devices: int, optimizer: str, backend: str) -> None:
    """Step by step on other rows, with batches of two sizes in turn, so that two programs write one bucket."""
    torch.manual_seed(0)
    model = tables().double()
    batches = [looked_up(n, seed) for seed, n in enumerate((8, 8, 9, 8, 9, 40, 8))]  # 40: factors are not worth it
    make = OPTIMIZERS_OF_TABLES[optimizer]
    pipeline = default_pipeline(min_factored_elements=0)
    assert_trains_alike(
        model, make, batches, num_devices, F.cross_entropy, tolerance=1e-10, passes=pipeline, backend=backend
    )


@pytest.mark.fast
@pytest.mark.parametrize("num_devices", [2, *slow((1,))])
def test_a_step_that_failed_leaves_nothing_in_the_gradients_of_tables(num_devices: int) -> None:
    torch.manual_seed(0)
    wrong = {**looked_up(8, 9), "tags": torch.full((8, 3), 25)}
    pipeline = default_pipeline(min_factored_elements=0)
    with Twins(tables().double(), SGD, F.cross_entropy, num_devices, passes=pipeline) as pair:
        for seed in range(4):
            if seed == 2:
                with pytest.raises(mirrorc.ExecutionError, match="index out of range"):
                    pair.step(**wrong)
            pair.train(**looked_up(8, seed))
        pair.check()


class Words(nn.Module):
    def __init__(self, padding_idx: int | None) -> None:
        super().__init__()
        self.table = nn.Embedding(30, 8, padding_idx)
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 30, bias=False)
        self.head.weight = self.table.weight

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(self.table(words))))


def next_word_loss(logits: torch.Tensor, words: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), words.flatten())


def sentences(num_examples: int, seed: int) -> dict[str, torch.Tensor]:
    words = torch.randint(7, (num_examples, 5), generator=torch.Generator().manual_seed(seed))
    return {"words": words, "target": words.roll(-1, 1)}


TIED: list[tuple[int, dict[str, Any]]] = [
    (2, {"microbatches": 2}),
    (1, {}),
    (3, {}),
    (1, {"microbatches": 3}),
    (3, {"link": "copy"}),
    (2, {"backend": "inductor"}),
    (2, {"exact_order": True}),
]
TIED_RARE: list[tuple[int, dict[str, Any]]] = [(2, {}), (4, {}), (1, {"backend": "inductor"})]


@pytest.mark.parametrize(
    ("num_devices", "options", "padding_idx"),
    [
        *((*case, None) for case in TIED),
        (2, {}, 3),
        *exhaustive(*((*case, None) for case in TIED_RARE)),
        *exhaustive(*((*case, 3) for case in [*TIED, *TIED_RARE] if case != (2, {}))),
    ],
    ids=str,
)
def test_a_tied_table_is_trained_as_on_one_device(
    num_devices: int, options: dict[str, Any], padding_idx: int | None
) -> None:
    """Words repeat, batches are uneven and of several sizes, some smaller than the number of devices."""
    torch.manual_seed(0)
    model = Words(padding_idx).double()
    batches = [sentences(n, seed) for seed, n in enumerate((8, 7, 1, 8, 7))]
    caps = {"buckets": ByBytes(1e-4, 1e-4)}
    make = OPTIMIZERS_OF_TABLES["adamw"]
    assert_trains_alike(model, make, batches, num_devices, next_word_loss, tolerance=1e-10, **caps, **options)


@pytest.mark.parametrize("optimizer", ["adamw", "adadelta"])
def test_copies_and_shared_memory_give_the_same_bits(optimizer: str) -> None:
    runs = [
        both("conv", torch.float32, 3, 5, OPTIMIZERS[optimizer], link=link)[0] for link in ("copy", "shared-memory")
    ]
    assert_same_bits(*runs)


class ShowsItsMask(Parts):
    """Its gradient tells which entries dropout kept: with x = 1 and x = 2 on two replicas, the sum tells both masks."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (F.dropout(self.weight, 0.5, self.training) * x).sum(dim=1).mean()


def masks_of(backend: str, seed: int = 3, steps: int = 2) -> list[tuple[torch.Tensor, torch.Tensor]]:
    torch.manual_seed(seed)
    model = ShowsItsMask(weight=nn.Parameter(torch.zeros(256, dtype=torch.float64)))
    x = torch.tensor([[1.0], [2.0]], dtype=torch.float64)
    masks = []
    with compiled_step(model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), backend=backend) as step:
        for _ in range(steps):
            before = model.weight.detach().clone()
            step(x)
            both_masks = (before - model.weight.detach()).round().long()
            masks.append((both_masks % 2, both_masks // 2))
    return masks


@pytest.mark.fast
def test_dropout_masks_differ_between_replicas_and_steps() -> None:
    (first_0, first_1), (second_0, second_1) = masks_of("eager")
    for mask in (first_0, first_1, second_0, second_1):
        assert 80 < mask.sum() < 176  # of 256, six standard deviations
    assert not torch.equal(first_0, first_1)
    assert not torch.equal(first_0, second_0)
    assert not torch.equal(first_1, second_1)


def test_both_backends_draw_the_same_masks() -> None:
    for eager, compiled in zip(masks_of("eager"), masks_of("inductor"), strict=True):
        assert torch.equal(eager[0], compiled[0])
        assert torch.equal(eager[1], compiled[1])


def test_replicas_with_the_same_shard_draw_for_themselves() -> None:
    torch.manual_seed(0)
    model = module_of(
        lambda self, x: (self.weight * torch.randn_like(self.weight) * x).sum(), weight=nn.Parameter(torch.zeros(32))
    )
    x = torch.ones(1)
    with compiled_step(model, optimizer=torch.optim.SGD(model.parameters(), 1.0)) as step:
        step(mirrorc.PerReplica([x, -x]))  # equal draws would cancel
    assert model.weight.count_nonzero() == 32


@pytest.mark.parametrize("backend", ["eager", "inductor"])
def test_the_model_stays_usable_while_the_step_is_open(backend: str) -> None:
    with MlpTwins(SGD, backend=backend) as pair:
        for _ in range(3):
            batch = pair.next_batch()
            pair.train(**batch)
            torch.testing.assert_close(pair.model(batch["x"]), pair.twin(batch["x"]), rtol=1e-10, atol=1e-12)
        assert all(parameter.grad is None for parameter in pair.model.parameters())
