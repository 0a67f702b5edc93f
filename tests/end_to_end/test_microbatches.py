"""A shard that is run in microbatches trains as the user's own loop over them does, and has activations of one at a time."""

import copy
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import Trained, assert_same_losses, assert_same_model, assert_trains_alike, train_mirrored, unchanged
from selections import exhaustive
from small_modules import Parts
from torch import nn
from twins import Twins, batches_of, compiled_step, make_net

import mirrorc
from mirrorc.errors import CaptureError, ExecutionError
from mirrorc.options.table import grouped
from mirrorc.packing import ByBytes
from mirrorc.passes import Replicate, default_pipeline

TOLERANCE = 1e-10
ADAMW, SGD = partial(torch.optim.AdamW, lr=0.01), partial(torch.optim.SGD, lr=0.05, momentum=0.9)
SIZES = (7, 2, 7)


def batches(sizes: tuple[int, ...] = SIZES) -> list[dict[str, Any]]:
    return batches_of(*sizes, classes=3, name="input")


def parts_of(size: int, most: int, fewest: int = 1) -> list[int]:
    return [len(part) for part in torch.zeros(size).tensor_split(max(1, min(most, size // fewest)))]


def train_part_by_part(model: nn.Module, num_devices: int, microbatches: int) -> Trained:
    """The user's own loop: each device's shard in parts, whose buffers follow one another; parts have two examples or more."""
    copies = [copy.deepcopy(model) for _ in range(num_devices)]
    home, losses, num_shards = copies[0], [], num_devices
    optimizer = SGD(home.parameters())
    for batch in batches((8, 5)):
        x, y = batch["input"], batch["target"]
        shards = parts_of(len(y), num_devices, 2)
        num_shards, total, start = len(shards), torch.zeros(()), 0
        for own, shard in zip(copies, shards, strict=False):
            own.zero_grad()
            for size in parts_of(shard, microbatches, 2):
                rows = slice(start, start + size)
                loss = F.cross_entropy(own(x[rows]), y[rows]) * (size / len(y))
                loss.backward()
                total, start = total + loss.detach(), start + size
        with torch.no_grad():
            for parameters in zip(*(own.parameters() for own in copies[:num_shards]), strict=True):
                parameters[0].grad = sum(p.grad for p in parameters)
            optimizer.step()
            for parameters in zip(*(own.parameters() for own in copies), strict=True):
                for other in parameters[1:]:
                    other.copy_(parameters[0])
        losses.append(total.item())
    for buffers in zip(*(own.buffers() for own in copies[:num_shards]), strict=True):
        if buffers[0].is_floating_point():
            buffers[0].copy_(torch.stack(list(buffers)).mean(0))
    return Trained(home, optimizer, losses)


@pytest.mark.parametrize(
    ("num_devices", "microbatches"),
    [(2, 2), (1, 3), (2, 4), (3, 2), (4, 3), *exhaustive(*product((1, 2, 3, 4), (2, 3, 4)))],
)
def test_training_equals_one_device_on_the_whole_batch(num_devices: int, microbatches: int) -> None:
    model = make_net()
    assert_trains_alike(
        model, ADAMW, batches(), num_devices, F.cross_entropy, tolerance=TOLERANCE, microbatches=microbatches
    )


@pytest.mark.parametrize(("num_devices", "microbatches"), [(2, 3), (1, 4), (4, 2)])
def test_buffers_go_from_one_microbatch_to_the_next(num_devices: int, microbatches: int) -> None:
    model = make_net(nn.BatchNorm1d(5, dtype=torch.float64))
    expected = train_part_by_part(model, num_devices, microbatches)
    given = batches((8, 5))
    found = train_mirrored(model, SGD, given, num_devices, F.cross_entropy, microbatches=microbatches)
    assert_same_losses(found, expected, TOLERANCE)
    assert_same_model(found.model, expected.model, TOLERANCE)


def test_compiled_regions_add_to_slots_too() -> None:
    model = make_net()
    options = {"backend": "inductor", "microbatches": 2, "buckets": 1e-4}
    assert_trains_alike(model, ADAMW, batches((7,)), 2, F.cross_entropy, tolerance=TOLERANCE, **options)


class Factored(Parts):
    def forward(self, input: torch.Tensor) -> torch.Tensor:
        words = (input[:, :2] * 3).long().abs()
        return self.head(torch.tanh(self.wide(self.table(words).sum(1))))


@pytest.mark.parametrize(("num_devices", "microbatches"), [(2, 3), (1, 2), (4, 3), *exhaustive((2, 2), (3, 2))])
def test_factors_of_all_microbatches_make_the_gradient(num_devices: int, microbatches: int) -> None:
    torch.manual_seed(0)
    model = Factored(table=nn.Embedding(40, 9, padding_idx=2), wide=nn.Linear(9, 31), head=nn.Linear(31, 3)).double()
    passes = default_pipeline(min_factored_elements=0, microbatches=microbatches)
    options = {"passes": passes, "microbatches": microbatches}
    assert_trains_alike(model, SGD, batches(), num_devices, F.cross_entropy, tolerance=TOLERANCE, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"disable": ["share-parameters"], "link": "copy"},
        {"check_finite": True, "clip_grad_norm": 1e6},
        {"disable": ["place-gradients"]},
        {"exact_order": True, "buckets": ByBytes(1e-4, 1e-4)},
        {"loss_reduction": "sum"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_other_options_hold_beside_it(options: dict[str, Any]) -> None:
    loss = partial(F.cross_entropy, reduction=options.get("loss_reduction", "mean"))
    model = make_net()
    given = batches((7, 7))
    assert_trains_alike(model, SGD, given, 2, loss, tolerance=TOLERANCE, microbatches=2, **options)


class TakesMore(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.weight, self.unused = nn.Parameter(torch.randn(6, 6)), nn.Parameter(torch.ones(2))
        self.table = nn.Embedding(4, 6)

    def forward(self, x: torch.Tensor, shift: torch.Tensor, indices: torch.Tensor, scale: float) -> Any:
        torch._assert_async((x < 100).all())
        h = torch.tanh(x @ self.weight + shift) @ self.weight * scale + self.table(indices)
        return h.square().mean(), {"rows": h, "mean": h.mean(), "count": mirrorc.summed((h > 0).sum())}


def test_whole_arguments_numbers_outputs_and_checks_of_each_microbatch() -> None:
    model = TakesMore().double()
    reference = copy.deepcopy(model)
    optimizer, other = SGD(model.parameters()), SGD(reference.parameters())
    step = compiled_step(model, optimizer=optimizer, microbatches=2, return_outputs=True)
    with step:
        for scale, n in ((1.0, 7), (0.5, 7), (0.25, 7)):
            x, shift, indices = torch.randn(n, 6).double(), torch.randn(6).double(), torch.randint(4, (n,))
            loss, (_, outputs) = step(x, mirrorc.replicated(shift), indices, scale)
            expected, found = reference(x, shift, indices, scale)
            other.zero_grad()
            expected.backward()
            other.step()
            torch.testing.assert_close(loss, expected.detach(), rtol=TOLERANCE, atol=0)
            for name, value in found.items():
                torch.testing.assert_close(outputs[name], value.detach(), rtol=1e-9, atol=1e-12)
            assert_same_model(model, reference, TOLERANCE)
        x[-1] = 1000.0  # in the last microbatch of the last device
        with unchanged(model, optimizer), pytest.raises(ExecutionError, match="assert"):
            step(x, mirrorc.replicated(shift), indices, scale)


def test_each_microbatch_draws_masks_of_its_own_again_and_again() -> None:
    def masks() -> torch.Tensor:
        torch.manual_seed(3)
        model = nn.Sequential(nn.Linear(4, 64, bias=False), nn.Dropout(0.5))
        nn.init.ones_(model[0].weight)

        def loss_fn(output: torch.Tensor, target: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return output.mean(), (output != 0).float()

        with compiled_step(
            model, loss_fn, optimizer=torch.optim.SGD(model.parameters(), lr=0.0), microbatches=2, return_outputs=True
        ) as step:
            return step(torch.ones(4, 4), target=torch.zeros(4))[1][1]

    first, second = masks(), masks()
    assert torch.equal(first, second)
    assert len({tuple(row.tolist()) for row in first}) == 4  # each row is that of another microbatch


def test_a_per_replica_argument_is_run_in_parts_of_its_own_size() -> None:
    (batch,) = batches((9,))
    with Twins(make_net(), SGD, F.cross_entropy, microbatches=3) as pair:
        pair.step(**{name: mirrorc.PerReplica([value[:7], value[7:]]) for name, value in batch.items()})
        assert pair.step.programs[-1].microbatches == ((3, 2, 2), (1, 1))
        pair.plain(**batch)
        pair.check()
        loss = pair.step.evaluate(**batch)  # at once
        torch.testing.assert_close(loss, pair.backward(**batch), rtol=TOLERANCE, atol=0)
        assert pair.step.programs[-1].microbatches == ()


def test_activations_of_one_microbatch_are_in_memory() -> None:
    def activations(microbatches: int) -> int:
        model = nn.Sequential(*[nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(4)])
        with compiled_step(model, F.mse_loss, 1, microbatches=microbatches) as step:
            step.prepare(torch.ones(64, 16), target=torch.ones(64, 16))
            return step.memory().devices[0].own.activations

    assert activations(4) < 0.3 * activations(1)


@pytest.mark.fast
def test_microbatches_that_no_shard_is_large_enough_for_leave_a_remark() -> None:
    model = nn.Linear(4, 2)
    options: dict[str, Any] = {"optimizer": SGD(model.parameters()), "loss_fn": F.mse_loss, "backend": "eager"}
    remark = "microbatches=2 is left out: shards have size 1, and a part has at least one example"
    with mirrorc.compile(model, 2, microbatches=2, **grouped(options)) as step:
        for num_examples, is_said in ((2, True), (4, False)):
            program = step.prepare(torch.ones(num_examples, 4), target=torch.ones(num_examples, 2))
            assert (remark in str(program)) == is_said


@pytest.mark.fast
def test_shards_with_fewer_microbatches_than_asked_leave_a_remark() -> None:
    model = nn.Linear(4, 2)
    options: dict[str, Any] = {"optimizer": SGD(model.parameters()), "loss_fn": F.mse_loss, "backend": "eager"}
    said = {5: "cpu:1 runs 2 parts", 4: "cpu:0 runs 2 parts and cpu:1 runs 2 parts", 6: "", 2: ""}
    with mirrorc.compile(model, 2, microbatches=3, **grouped(options)) as step:
        for num_examples, few in said.items():
            remarks = str(step.prepare(torch.ones(num_examples, 4), target=torch.ones(num_examples, 2)).remarks)
            assert ("microbatches=3, but a part has at least one example" in remarks) == bool(few)
            assert few in remarks


@pytest.mark.fast
def test_no_batch_has_more_than_two_sizes_of_microbatches() -> None:
    from mirrorc.capture.call.call_arguments import flatten_call
    from mirrorc.capture.call.shards import split_call

    for n in range(1, 60):
        call = flatten_call(["x"], (torch.ones(n),), {})
        for num_devices in (1, 2, 3, 4):
            for microbatches in (2, 3, 4, 7):
                for fewest in (1, 2):
                    shards = split_call(call, num_devices, fewest=fewest, microbatches=microbatches)
                    sizes = [size for own in shards.microbatches for size in own]
                    if sizes:
                        assert max(sizes) - min(sizes) <= 1 and min(sizes) >= fewest
                        assert [sum(own) for own in shards.microbatches] == list(shards.num_examples)


class CountsWhole(nn.Linear):
    def forward(self, x: torch.Tensor) -> Any:
        return super().forward(x).mean(), {"table": self.weight * 1.0}


@pytest.mark.fast
def test_what_cannot_be_kept_is_refused() -> None:
    model = CountsWhole(4, 4)
    common: dict[str, Any] = {"optimizer": SGD(model.parameters()), "backend": "eager"}
    with pytest.raises(ValueError, match="microbatches is 0: give a number of parts"):
        mirrorc.compile(model, 1, microbatches=0, **grouped(common))
    for given in (1.5, True, "2"):
        with pytest.raises(TypeError, match=r"microbatches is .*: give a number of parts"):
            mirrorc.compile(model, 1, microbatches=given, **grouped(common))
    with pytest.raises(ValueError, match="which disable= switches off"):
        mirrorc.compile(model, 1, microbatches=2, **grouped({"disable": ["accumulate-microbatches"], **common}))
    with pytest.raises(ValueError, match=r"put mirrorc.passes.AccumulateMicrobatches\(\) there"):
        mirrorc.compile(model, 1, microbatches=2, **grouped({"passes": default_pipeline(), **common}))
    with (
        mirrorc.compile(model, 1, microbatches=2, return_outputs=True, **grouped(common)) as step,
        pytest.raises(CaptureError, match="each microbatch gives one of its own"),
    ):
        step(torch.ones(8, 4))
    assert Replicate().name in {one.name for one in default_pipeline(microbatches=2)}
