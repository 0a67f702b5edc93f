"""Batches with fewer examples than devices, or with too few for statistics on each: they run on as many devices as they can."""

import copy
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import (
    OptimizerMaker,
    assert_mirrored,
    assert_same_bits,
    assert_same_training,
    assert_trains_alike,
    refused,
    train_mirrored,
    train_on_one_device,
    train_shard_by_shard,
    unchanged,
)
from selections import exhaustive, slow
from small_modules import Parts, module_of
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from twins import Twins, batches_of, compiled_step, make_net

import mirrorc
from mirrorc.all_reduce_algorithms import Ring
from mirrorc.comparison.diff import diff_programs
from mirrorc.errors import CaptureError, NonFiniteError
from mirrorc.packing import ByBytes
from mirrorc.passes import FactorGradients, default_pipeline
from mirrorc.runtime.execution.binding.interleaving import InterleavingTrial

TOLERANCE = 1e-10
ADAMW, SGD = partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
MUON_LIKE = partial(torch.optim.Adadelta, lr=1.0)  # runs by itself
OPTIMIZERS = (ADAMW, SGD, MUON_LIKE)
SIZES = (5, 1, 2, 5, 2)


def batches(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    return batches_of(*sizes, outputs=3, name="input")


WAYS: dict[str, dict[str, Any]] = {
    "shared": {},
    "small buckets": {"buckets": ByBytes(1e-4, 1e-4)},
    "mirrored": {"disable": ["share-parameters"]},
    "copies": {"link": "copy", "disable": ["share-parameters"]},
    "shared by copies": {"link": "copy"},
    "ring": {"disable": ["share-parameters"], "add": [mirrorc.after("lower-collectives", Ring())]},
    "checked": {"check_finite": True},
}

OF_WAY = {"ring": (ADAMW, SGD)}  # that pass does not take the sends of an optimizer that runs by itself


@pytest.mark.parametrize(
    ("num_devices", "way", "optimizer"),
    [
        (4, "small buckets", ADAMW),
        (3, "copies", MUON_LIKE),
        *((3, way, OF_WAY.get(way, OPTIMIZERS)[i % 2]) for i, way in enumerate(WAYS)),
        (3, "shared", MUON_LIKE),
        *exhaustive(*((n, way, o) for n in (2, 3, 4) for way in WAYS for o in OF_WAY.get(way, OPTIMIZERS))),
    ],
)
def test_a_step_is_that_of_one_device_whatever_the_size(num_devices: int, way: str, optimizer: OptimizerMaker) -> None:
    model = make_net()
    with Twins(model, optimizer, F.mse_loss, num_devices, **WAYS[way]) as pair:
        for batch in batches():
            pair.train(**batch)
            assert_mirrored(pair.step, pair.model, num_devices)
        pair.check()


@pytest.mark.parametrize("num_devices", [2, 3])
def test_a_compiled_step_is_that_of_one_device(num_devices: int) -> None:
    model = make_net()
    few = batches((5, 1, 2, 4))
    assert_trains_alike(model, ADAMW, few, num_devices, F.mse_loss, tolerance=TOLERANCE, backend="inductor")


def test_a_sum_over_examples() -> None:
    loss_fn = partial(F.mse_loss, reduction="sum")
    model = make_net()
    assert_trains_alike(model, ADAMW, batches((7, 4, 2)), 3, loss_fn, tolerance=TOLERANCE, loss_reduction="sum")


@pytest.mark.parametrize(
    ("optimizer", "disabled"),
    [(SGD, ()), (SGD, ("share-parameters",)), (partial(torch.optim.Adam, lr=0.01, foreach=True), ())],
)
def test_shares_of_factored_gradients_are_made_of_the_factors_that_there_are(
    optimizer: OptimizerMaker, disabled: tuple[str, ...]
) -> None:
    """What the last steps have left in the rows of a table's gradient is cleared, whichever devices had looked them up."""
    torch.manual_seed(0)
    model, few = (
        module_of(
            lambda self, input: self.head(torch.tanh(self.layer(self.table(input).mean(1)))),
            table=nn.Embedding(40, 24),
            layer=nn.Linear(24, 24),
            head=nn.Linear(24, 3),
        ).double(),
        [],
    )
    for n in (5, 2, 5, 2, 2, 5):
        target = torch.randn(n, 3, dtype=torch.float64)
        few.append({"input": torch.randint(40, (n, 2)), "target": target})
    passes = [
        replace(p, parameters_are_shared=True) if isinstance(p, FactorGradients) else p
        for p in default_pipeline(min_factored_elements=0)
        if p.name not in disabled
    ]
    assert_trains_alike(model, optimizer, few, 3, F.mse_loss, tolerance=TOLERANCE, passes=passes)


class Whitened(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.batch_norm(x, None, None, training=True)


NORM = partial(nn.BatchNorm1d, 5)


@pytest.mark.parametrize(
    ("num_devices", "norm", "last"),
    [
        (4, NORM, 5),
        (3, NORM, 2),
        (3, NORM, 9),
        (3, Whitened, 3),
        (3, Whitened, 5),
        *exhaustive(*((n, norm, last) for n in (2, 3, 4) for norm in (NORM, Whitened) for last in (2, 3, 5, 9))),
    ],
)
def test_with_batch_norm_each_shard_has_two_examples(
    num_devices: int, norm: Callable[[], nn.Module], last: int
) -> None:
    """The buffers that the model shows are the mean over the shards of the last batch, here of fewer than all devices."""
    model, few = make_net(norm()), batches((9, 5, 9, last))
    mirrored = train_mirrored(model, SGD, few, num_devices, F.mse_loss)
    expected = train_shard_by_shard(model, SGD, few, num_devices, F.mse_loss)
    assert_same_training(mirrored, expected, TOLERANCE)


def test_five_examples_on_four_devices_are_three_and_two() -> None:
    model = make_net(nn.BatchNorm1d(5))
    with compiled_step(model, F.mse_loss, 4, optimizer=SGD) as step:
        (batch,) = batches((5,))
        assert step.prepare(**batch).num_examples == (3, 2, 0, 0)
        step(**batch)
        own = step.variables["1.running_mean"].values
        assert torch.equal(own[2], torch.zeros(5)) and torch.equal(own[3], own[2]) and own[0].abs().min() > 0.0
        assert torch.equal(model[1].running_mean, (own[0] + own[1]) / 2)
        model.eval()
        assert step.prepare(**batch).num_examples == (2, 1, 1, 1), "statistics that are fixed need no other example"


@pytest.mark.parametrize("norm", [Whitened, NORM])
def test_only_a_batch_of_one_has_no_statistics(norm: Callable[[], nn.Module]) -> None:
    model = make_net(norm())
    optimizer = SGD(model.parameters())
    with compiled_step(model, F.mse_loss, 3, optimizer=optimizer) as step:
        for size in (3, 2):
            step(**batches((size,))[0])
        with refused(
            CaptureError,
            r"this shard has a single one\n(?s:.*)one device, too: .*more than 1 value per channel",
            model,
            optimizer,
        ):
            step(**batches((1,))[0])
        step(**batches((7,))[0])
        compiled = step._specializer.num_programs
        step(**batches((3,))[0])
        assert step._specializer.num_programs == compiled == 3


class Normalized(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (x - x.mean(0)) / x.std(0)


class Covariance(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        centered = x - x.mean(0)
        return x @ (centered.T @ centered / (len(x) - 1))


class Squeezed(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.squeeze()[:, 1:]


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
@pytest.mark.parametrize("kind", [Normalized, Covariance, Squeezed])
def test_no_shard_has_one_example_where_that_gives_no_number_or_an_error(kind: type[nn.Module], capture: str) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), kind(), nn.Linear(3 if kind is Squeezed else 4, 3)).double()
    few = batches((3, 5, 2, 7, 3))
    for num_devices in (1, 2, 3):
        mirrored = train_mirrored(model, SGD, few, num_devices, F.mse_loss, capture=capture)
        expected = train_shard_by_shard(model, SGD, few, num_devices, F.mse_loss)
        assert_same_training(mirrored, expected, TOLERANCE)


@pytest.mark.fast
@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_one_example_that_gives_no_number_is_refused_in_a_shard_of_the_users_own(capture: str) -> None:
    model = make_net(Normalized())
    (whole,) = batches((3,))
    split = {key: mirrorc.PerReplica(value.split((2, 1))) for key, value in whole.items()}
    with compiled_step(model, F.mse_loss, capture=capture) as step:
        with refused(CaptureError, r"MC2104: .*less one(?s:.*)test_ragged_batches.py:\d+ .*x\.std\(0\)", model):
            step(**split)
        assert step(**batches((1,))[0]).isnan(), "as on one device"


def test_images_have_statistics_of_one_example() -> None:
    """As on one device, where torch takes them over the pixels."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 3)).double()
    one = {"input": torch.randn(1, 2, 2, 2, dtype=torch.float64), "target": torch.randn(1, 3, dtype=torch.float64)}
    assert_trains_alike(model, SGD, [one] * 2, 3, F.mse_loss, tolerance=TOLERANCE)


def test_a_data_loader_needs_no_drop_last() -> None:
    generator = torch.Generator().manual_seed(0)
    data = TensorDataset(*(torch.randn(10, n, generator=generator, dtype=torch.float64) for n in (6, 3)))
    with Twins(make_net(), ADAMW, F.mse_loss, 3) as pair:
        for _ in range(3):
            for x, y in DataLoader(data, batch_size=4):
                pair.train(x, target=y)
        assert pair.step._specializer.num_programs == 2
        pair.check()


@pytest.mark.parametrize(
    ("sizes", "optimizer"), [((0, 2, 1), MUON_LIKE), ((2, 0, 1), ADAMW), ((0, 0, 3), ADAMW), ((0, 0, 3), MUON_LIKE)]
)
def test_a_shard_of_the_users_own_may_be_empty(sizes: tuple[int, ...], optimizer: OptimizerMaker) -> None:
    model = make_net(nn.BatchNorm1d(5).eval(), nn.Identity())
    whole = batches((sum(sizes),) * 3)
    split = [{key: mirrorc.PerReplica(value.split(sizes)) for key, value in batch.items()} for batch in whole]
    mirrored = train_mirrored(model, optimizer, split, 3, F.mse_loss)
    assert_same_training(mirrored, train_on_one_device(model, optimizer, whole, F.mse_loss), TOLERANCE)


class Several(Parts):
    def forward(self, input: torch.Tensor) -> dict[str, Any]:
        rows = self.layer(input)
        return {
            "rows": rows,
            "mean": rows.mean(),
            "count": mirrorc.summed((rows > 0).sum()),
            "columns": rows.abs().amax(0),
            "number": len(input),
        }


def test_outputs_are_those_of_the_replicas_that_have_examples() -> None:
    torch.manual_seed(0)
    model = Several(layer=nn.Linear(6, 3)).double()
    twin = copy.deepcopy(model)
    loss_fn = lambda output, target: F.mse_loss(output["rows"], target)  # noqa: E731
    with compiled_step(model, loss_fn, 4, optimizer=SGD, return_outputs=True) as step:
        for n in (2, 1):
            (batch,) = batches((n,))
            twin.load_state_dict(model.state_dict())
            wanted = twin(batch["input"])
            _, found = step(**batch)
            torch.testing.assert_close(found["rows"], wanted["rows"].detach())
            torch.testing.assert_close(found["mean"], wanted["mean"].detach())
            assert found["count"] == wanted["count"]
            each = [rows.abs().amax(0) for rows in wanted["rows"].detach().split(1)]
            assert isinstance(found["columns"], mirrorc.PerReplica) and len(found["columns"].values) == n
            torch.testing.assert_close(list(found["columns"].values), each)
            assert found["number"].values == (1,) * n


def test_random_numbers_are_those_of_the_replica() -> None:
    model, found = make_net(nn.Dropout(0.5)), []
    for num_devices in (1, 3, 3):
        torch.manual_seed(0)
        found.append(train_mirrored(model, SGD, batches((1, 1)), num_devices, F.mse_loss))
    assert_same_training(found[1], found[0], TOLERANCE)
    assert_same_bits(found[2], found[1])


@pytest.mark.fast
@pytest.mark.parametrize("otherwise", ["skip", *slow((True,))])
def test_what_is_not_finite_is_found_on_the_replicas_that_have_examples(otherwise: Any) -> None:
    model = make_net()
    optimizer = ADAMW(model.parameters())
    good, bad = batches((2, 2))
    bad["input"][1, 0] = torch.nan
    with compiled_step(model, F.mse_loss, 4, optimizer=optimizer, check_finite=otherwise) as step:
        step(**good)
        with unchanged(model, optimizer):
            if otherwise == "skip":
                assert step(**bad).isnan() and step.num_skipped == 1
            else:
                with pytest.raises(NonFiniteError, match="the loss on cpu:1 is nan"):
                    step(**bad)
        assert step(**good).isfinite()


def test_a_step_that_runs_in_the_callers_thread_gives_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    model, few = make_net(), batches((5, 2, 5, 2))
    by_threads = train_mirrored(model, ADAMW, few, 3, F.mse_loss)
    init = InterleavingTrial.__init__

    def begin_interleaved(self: Any, can_interleave: bool) -> None:
        init(self, can_interleave)
        assert can_interleave
        self.interleaves, self.is_decided = True, True

    monkeypatch.setattr(InterleavingTrial, "__init__", begin_interleaved)
    assert_same_bits(train_mirrored(model, ADAMW, few, 3, F.mse_loss), by_threads)


def test_a_program_says_which_devices_have_no_examples(tmp_path: Path) -> None:
    model = make_net()
    with compiled_step(model, F.mse_loss, 4, optimizer=ADAMW) as step:
        full, few = batches((4, 2))
        step(**full)
        whole = step.programs[-1]
        for _ in range(3):
            step(**few)
        program, text = step.programs[-1], str(step.programs[-1])
        assert program.present == (0, 1)
        assert (
            "(replica 2) runs this on none of the batch's 2 examples: it adds zeros to each sum\ndef cpu_2():" in text
        )
        assert "# zeros: this device has no examples" in text and "return None" in text
        assert "cpu:3" in diff_programs(whole, program)
        program.save(tmp_path / "program.mirror")
        loaded = mirrorc.Program.load(tmp_path / "program.mirror")
        assert str(loaded) == text and loaded.present == (0, 1)
        explained, memory = step.explain(), step.memory()
        assert [device.compute_ms > 0.0 for device in explained.devices] == [True, True, False, False]
        assert "cpu:3" in str(explained) and "cpu:3" in str(memory)
        assert step.timeline(tmp_path / "steps.json").exists()


@pytest.mark.fast
def test_check_loss_compares_the_shards_that_there_are() -> None:
    (batch,) = batches((2,))
    for model, shards in ((make_net(), (1, 1)), (make_net(NORM()), (2,))):
        found = mirrorc.check_loss(model, num_replicas=4, loss_fn=F.mse_loss, **batch)
        assert found.same and found.num_examples == shards
