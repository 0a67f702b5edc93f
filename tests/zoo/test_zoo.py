"""Tiny models of many kinds train on two devices as in plain PyTorch, each by the front end that its entry names."""

import functools
import importlib.util
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from references import (
    Trained,
    assert_same_training,
    relative_error,
    train_mirrored,
    train_on_one_device,
    train_shard_by_shard,
    unchanged,
)
from zoo import FAMILIES, models_of, table
from zoo_models import Batch, ZooModel

import mirrorc

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "models.md"
SGD = functools.partial(torch.optim.SGD, lr=0.02)
MARKS = {"test": [], "test-slow": [pytest.mark.slow], "test-all": [pytest.mark.exhaustive]}
ALL = [(family, entry) for family in FAMILIES for entry in models_of(family)]


ONCE_TRACED = ("critic with a gradient penalty",)
"""The models that Dynamo refuses, and the withdrawn ``capture="trace"`` took."""

UNEVEN = 5  # examples: shards of two devices differ in size, and each has a graph of its own


def cases(entries: list[tuple[str, ZooModel]]) -> Iterator[Any]:
    for family, entry in entries:
        yield pytest.param(family, entry, marks=MARKS[entry.run_by], id=entry.name)


def trainings() -> Iterator[Any]:
    """Each entry with uneven shards; those of `make test-slow` have even ones there, and uneven ones in `make test-all`."""
    for family, entry in ALL:
        if entry.run_by == "test-slow":
            yield pytest.param(family, entry, UNEVEN - 1, marks=MARKS["test-slow"], id=entry.name)
        marks = MARKS["test-all" if entry.run_by == "test-slow" else entry.run_by]
        yield pytest.param(family, entry, UNEVEN, marks=marks, id=f"{entry.name}, uneven")


@pytest.mark.slow
@pytest.mark.parametrize(("family", "entry", "size"), [*trainings()])
def test_trains_as_in_plain_pytorch(family: str, entry: ZooModel, size: int) -> None:
    _skip_without_library(family)
    model, batches = entry.made(), entry.batches((size, size))
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        found = train_mirrored(model, SGD, batches, 2, entry.loss_fn, capture=entry.rung)
    expected = _trained_in_plain_pytorch(entry, model, batches)
    _check_that_it_learns(model, expected)
    assert_same_training(found, expected, entry.tolerance)
    told = [str(one.message) for one in seen if type(model).__name__ in str(one.message)]
    assert len(told) == bool(entry.warns) and all(entry.warns in words for words in told), told


@pytest.mark.slow
@pytest.mark.parametrize(("family", "entry"), cases([own for own in ALL if own[1].name in ONCE_TRACED]))
def test_the_fallback_trains_models_that_were_traced_in_python(family: str, entry: ZooModel) -> None:
    model, batches = entry.made(), entry.batches((UNEVEN, UNEVEN))
    with pytest.warns(UserWarning, match="trains with capture='autograd'"):
        trained = train_mirrored(model, SGD, batches, 2, entry.loss_fn, capture="auto")
    assert entry.rung == "autograd"  # with which `test_trains_as_in_plain_pytorch` trains it
    assert_same_training(trained, _trained_in_plain_pytorch(entry, model, batches), entry.tolerance)


@pytest.mark.parametrize(
    ("family", "entry"), cases([(family, entry) for family, entry in ALL if entry.rung != "dynamo"])
)
def test_no_higher_front_end_captures_it(family: str, entry: ZooModel) -> None:
    """Where this fails, the entry may name a better front end."""
    _skip_without_library(family)
    model, batch = entry.made(), entry.batches()[0]
    optimizer = SGD(model.parameters())
    step = mirrorc.compile(
        model,
        2,
        optimizer=optimizer,
        loss_fn=entry.loss_fn,
        compiler=mirrorc.Compiler(backend="eager", capture="dynamo"),
    )
    with step, unchanged(model), pytest.raises(mirrorc.CaptureError):
        step(**batch)


def test_the_committed_table_is_what_the_entries_give() -> None:
    assert table() in PAGE.read_text(encoding="utf-8"), "run: python tests/support/zoo_table.py"


@pytest.mark.slow
def test_the_selections_are_as_large_as_they_are_said_to_be() -> None:
    names = [entry.name for _, entry in ALL]
    assert len(set(names)) == len(names) >= 40
    by_command = {command: sum(entry.run_by == command for _, entry in ALL) for command in MARKS}
    assert by_command["test"] >= 12 and by_command["test"] + by_command["test-slow"] >= len(names) / 2
    assert all(bool(entry.why) == (entry.rung != "dynamo") for _, entry in ALL)


def _trained_in_plain_pytorch(entry: ZooModel, model: torch.nn.Module, batches: list[Batch]) -> Trained:
    if entry.couples:
        return train_shard_by_shard(model, SGD, batches, 2, entry.loss_fn)
    return train_on_one_device(model, SGD, batches, entry.loss_fn)


def _check_that_it_learns(before: torch.nn.Module, after: Trained) -> None:
    """Nothing is compared that has no numbers, or does not move."""
    pairs = list(zip(before.parameters(), after.model.parameters(), strict=True))
    assert all(parameter.isfinite().all() for _, parameter in pairs)
    assert max(relative_error(new.detach().to(old.dtype), old.detach()) for old, new in pairs) > 1e-5


def _skip_without_library(family: str) -> None:
    if family == "image_models" and importlib.util.find_spec("timm") is None:
        pytest.skip(
            "timm and torchvision are not installed here: make test-all installs them beside the other packages"
        )
