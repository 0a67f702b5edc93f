"""Every plan of buckets, every algorithm and every placement together, against one device; and which pairs are refused."""

import itertools
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import pytest
import torch
from references import train_on_one_device
from selections import slow
from torch import nn
from torch.nn import functional as F
from twins import batches_of, layers_of_odd_sizes

import mirrorc
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes, EqualPacks, EqualSplits
from mirrorc.passes import ALGORITHMS

PACKINGS = ("auto", ByBytes(0.0003, 0.0001), EqualPacks(0), EqualPacks(3), EqualSplits(2))
PLACEMENTS = ("auto", "mirrored", "central", "least-loaded", "cached", {"0.weight": "cpu:0", "*": "least-loaded"})
NUM_DEVICES = (1, 2, 3, 4, 8)
LINKS = (None, "copy")
NUM_STEPS = 3
NUM_EXAMPLES = 9  # no number of devices but 3 deals them out evenly


@dataclass(frozen=True)
class Combination:
    buckets: Any = "auto"
    algorithm: str = "native"
    placement: Any = "auto"
    devices: int = 2
    link: str | None = None
    order: Any = "ready"
    exchange: str = "auto"
    exact_order: bool = False
    clip_grad_norm: float | None = None
    microbatches: int = 1

    def compile(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> mirrorc.Step:
        return mirrorc.compile(
            model, optimizer=optimizer, loss_fn=F.mse_loss, **grouped({"backend": "eager", **vars(self)})
        )


NAMED = {"wide.weight": "cpu:0", "*": "cached"}
CUTTING = (EqualPacks(3), EqualPacks(7), EqualSplits(2))
REORDERING = ("hierarchical-copy", "ring", "halving-doubling", "tree")
SENDING = ("reduce-to-one", "round-robin", *REORDERING)
OWNED = (*PLACEMENTS[2:], NAMED)
REFUSED: tuple[tuple[Mapping[str, Sequence[Any]], str], ...] = (
    (
        {"placement": OWNED, "buckets": CUTTING},
        "placement={placement!r} cannot be used with buckets={buckets!r}\n  why:  packs end within gradients there",
    ),
    (
        {"algorithm": REORDERING, "exact_order": (True,)},
        "algorithm={algorithm!r} as it is given cannot be used with exact_order=True\n  why:  replicas' gradients are added up",
    ),
    (
        {"algorithm": SENDING, "placement": OWNED},
        "algorithm={algorithm!r} cannot be used with placement={placement!r}\n  why:  with a placement, each gradient is "
        "reduced to the owner of its parameter",
    ),
    (
        {"exchange": ("factors",), "exact_order": (True,)},
        "exchange='factors' cannot be used with this pipeline\n  why:  the pass 'factor-gradients' is not in it",
    ),
)
"""Which values are refused together, and how the sentence begins; of several the first is said. All else trains."""


def refusal(combination: Combination) -> str:
    given = vars(combination)
    for values, sentence in REFUSED:
        if all(any(_is(given[axis], value) for value in some) for axis, some in values.items()):
            return sentence.format(**given)
    return ""


def _is(one: object, other: object) -> bool:
    return type(one) is type(other) and one == other


ADAM = partial(torch.optim.Adam, lr=0.01)
BATCHES = batches_of(*[NUM_EXAMPLES] * NUM_STEPS, features=7, outputs=3, name="input")


def check(combinations: Iterable[Combination]) -> None:
    expected = train_on_one_device(layers_of_odd_sizes(), ADAM, BATCHES, F.mse_loss).model
    for combination in combinations:
        model = layers_of_odd_sizes()
        optimizer = ADAM(model.parameters())
        if said := refusal(combination):
            with pytest.raises(ValueError, match=f"^MC1003: {re.escape(said)}"):
                combination.compile(model, optimizer)
            continue
        with combination.compile(model, optimizer) as step:
            for batch in BATCHES:
                step(**batch)
        for parameter, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(parameter, wanted, rtol=0, atol=1e-12, msg=str(combination))


def every_pair(axes: Sequence[Sequence[Any]]) -> Iterator[Combination]:
    missing = {
        (i, a, j, b)
        for (i, first), (j, second) in itertools.combinations(enumerate(axes), 2)
        for a, b in itertools.product(range(len(first)), range(len(second)))
    }
    table = list(itertools.product(*(range(len(axis)) for axis in axes)))

    def pairs(row: tuple[int, ...]) -> set[tuple[int, int, int, int]]:
        return {(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(row)), 2)}

    while missing:
        best = max(table, key=lambda row: len(pairs(row) & missing))
        missing -= pairs(best)
        yield Combination(*(axis[place] for axis, place in zip(axes, best, strict=True)))


def test_packings_algorithms_and_placements_together() -> None:
    rows = list(zip(itertools.cycle(PACKINGS), ALGORITHMS, strict=False))[::2]  # every other algorithm once
    check(Combination(buckets, name, devices=3) for buckets, name in rows)
    places = list(zip(itertools.cycle(PACKINGS), reversed(PLACEMENTS), strict=False))[::2]  # every other placement once
    check(Combination(buckets, placement=place, link="copy") for buckets, place in places)


@pytest.mark.fast
def test_what_is_refused_together_is_in_the_table() -> None:
    """Each row of the table with its first values, and nothing of it with one value alone."""
    for values, _ in REFUSED:
        given = {axis: some[0] for axis, some in values.items()}
        both = Combination(**given)
        assert refusal(both)
        check([both])
        for axis in given:
            assert not refusal(Combination(**{**given, axis: getattr(Combination(), axis)}))


def test_every_two_values_come_together() -> None:
    check(Combination(buckets, placement=place, link="copy") for buckets in PACKINGS for place in PLACEMENTS)
    check(every_pair((PACKINGS, tuple(ALGORITHMS), PLACEMENTS[:2], NUM_DEVICES, LINKS)))


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)  # minutes, also beside other work
@pytest.mark.parametrize("num_devices", NUM_DEVICES)
def test_the_whole_table(num_devices: int) -> None:
    rows = itertools.product(PACKINGS, ALGORITHMS, PLACEMENTS, (num_devices,), LINKS)
    check(itertools.starmap(Combination, rows))


class Varied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.wide, self.head = nn.Embedding(40, 6), nn.Linear(6, 9), nn.Linear(9, 3, bias=False)
        self.scale, self.nothing = nn.Parameter(torch.tensor(0.7)), nn.Parameter(torch.empty(0, 2))
        self.other = nn.Parameter(torch.linspace(0.5, 1, 9))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.wide(self.table(x).sum(1))) * self.other.to(self.scale.dtype)
        return self.head(hidden) * self.scale + self.nothing.sum()


TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 0.03}


def by_modules(gradients: Sequence[mirrorc.packing.Gradient]) -> list[list[str]]:
    groups: dict[Any, list[str]] = {}
    for one in gradients:
        groups.setdefault((one.name.partition(".")[0], one.dtype), []).append(one.name)
    return list(groups.values())


def largest_first(gradient: mirrorc.packing.Gradient) -> int:
    return -gradient.elements


def drawn(random: Random) -> Combination:
    while refusal(found := _any_options(random)) and random.random() < 0.8:
        pass
    return found


def _any_options(random: Random) -> Combination:
    return Combination(
        buckets=random.choice((*PACKINGS, math.inf, EqualPacks(1), EqualPacks(7), by_modules)),
        algorithm=random.choice(tuple(ALGORITHMS)),
        placement=random.choice((*PLACEMENTS[:-1], "shared", NAMED)),
        devices=random.randint(1, 4),
        link=random.choice(LINKS),
        order=random.choice(("ready", "reversed", largest_first)),
        exchange=random.choice(("auto", "dense", "factors")),
        exact_order=random.random() < 0.2,
        clip_grad_norm=random.choice((None, None, 0.01)),
        microbatches=random.choice((1, 1, 2)),
    )


def one_step(seed: int) -> None:
    random = Random(seed)
    combination, dtype, num_examples = drawn(random), random.choice(tuple(TOLERANCES)), random.randint(1, 9)
    torch.manual_seed(seed)
    model = Varied().to(dtype)
    model.other.data = model.other.data.to(random.choice(tuple(TOLERANCES)))
    x, y = torch.randint(40, (num_examples, 3)), torch.randn(num_examples, 3, dtype=dtype)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5, momentum=0.9)
    if said := refusal(combination):
        with pytest.raises(ValueError, match=f"^MC1003: {re.escape(said)}"):
            combination.compile(model, optimizer)
        return
    alone = Varied().to(dtype)
    alone.other.data = alone.other.data.to(model.other.dtype)
    alone.load_state_dict(start)
    F.mse_loss(alone(x), y).backward()
    if combination.clip_grad_norm is not None:
        nn.utils.clip_grad_norm_(alone.parameters(), combination.clip_grad_norm)
    torch.optim.SGD(alone.parameters(), lr=0.5, momentum=0.9).step()
    with combination.compile(model, optimizer) as step:
        step(x, target=y)
    for (name, found), wanted in zip(model.named_parameters(), alone.parameters(), strict=True):
        bound = max(TOLERANCES[dtype], TOLERANCES[found.dtype], TOLERANCES[model.other.dtype] / 10)
        torch.testing.assert_close(found, wanted, rtol=bound, atol=bound, msg=lambda text, name=name: f"{name}: {text}")  # type: ignore[misc]


def one_steps(seeds: Iterable[int]) -> None:
    for seed in seeds:
        try:
            one_step(seed)
        except (Exception, pytest.fail.Exception) as error:
            error.add_note(f"to repeat it: one_step({seed}), which draws {drawn(Random(seed))}")
            raise


def test_options_that_are_drawn_together() -> None:
    one_steps(range(8))


@pytest.mark.exhaustive
@pytest.mark.parametrize("case", range(10))
def test_many_options_that_are_drawn_together(case: int) -> None:
    one_steps(range(100 + 40 * case, 140 + 40 * case))


@pytest.mark.fast
@pytest.mark.parametrize(
    "placement", ["central", *slow(("least-loaded",), ({"narrow.weight": "cpu:1", "*": "cpu:2"},))]
)
def test_a_device_that_owns_nothing_measures_gradients_of_two_dtypes(placement: Any) -> None:
    class Narrowed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.wide, self.narrow = nn.Linear(4, 4, dtype=torch.float64), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.narrow(self.wide(x).float())

    found = []
    for place in (placement, "mirrored"):
        torch.manual_seed(3)
        model = Narrowed()
        x, y = torch.randn(6, 4, dtype=torch.float64), torch.randint(3, (6,))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        options: dict[str, Any] = {"clip_grad_norm": 0.1, "placement": place, "backend": "eager"}
        with mirrorc.compile(model, 3, optimizer=optimizer, loss_fn=F.cross_entropy, **grouped(options)) as step:
            step(x, target=y)
            found.append([step.grad_norm, *model.parameters()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other))
