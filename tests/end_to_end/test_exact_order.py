"""Which passes change the bits of a step, and that ``exact_order=True`` leaves them out."""

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from selections import slow_but
from torch import nn
from torch.nn import functional as F
from twins import compiled_step

import mirrorc
from mirrorc.packing import ByBytes
from mirrorc.passes import default_pipeline
from mirrorc.pipeline.protocol import Pass, traits_of

SGD = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
FLAGGED = ["decompose-gelu", "lay-channels-last", "factor-gradients"]


class EveryFlag(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.second = nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.Conv2d(16, 24, 3)
        self.up, self.down = nn.Linear(24, 65), nn.Linear(65, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.second(torch.relu(self.norm(self.conv(x)))).relu().mean((2, 3))
        return self.down(F.gelu(self.up(h), approximate="tanh"))


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(50, 12), nn.Linear(12, 33), nn.Linear(33, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.table(x)), approximate="tanh").mean(1))


IMAGES, INDICES = torch.randn(7, 3, 12, 12), torch.randint(0, 50, (7, 4))
TARGET = torch.arange(7) % 5


def everything_on(**buckets: float) -> list[Pass]:
    """The passes of compiled code, each of which also does what it would leave to larger gradients."""
    return default_pipeline(min_factored_elements=0, gelu_by_sigmoid=True, channels_last=True, **buckets)


def trained(
    make: type[nn.Module], x: torch.Tensor, passes: Sequence[Pass], num_devices: int = 2, **options: object
) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = make()
    with compiled_step(model, F.cross_entropy, num_devices, SGD, passes=passes, **options) as step:
        losses = [step(x, target=TARGET) for _ in range(2)]
    return [*losses, *(parameter.detach() for parameter in model.parameters())]


def are_equal(one: Sequence[torch.Tensor], other: Sequence[torch.Tensor]) -> bool:
    return all(map(torch.equal, one, other))


def test_every_pass_with_the_flag_changes_bits() -> None:
    flagged = [one.name for one in everything_on() if traits_of(one).changes_bits]
    assert flagged == [*FLAGGED, "update-in-parts"]  # of which products as small as here may have the same bits
    with_all = trained(EveryFlag, IMAGES, everything_on())
    for name in FLAGGED:
        without = trained(EveryFlag, IMAGES, everything_on(), disable=[name])
        assert not are_equal(with_all, without), name
        for one, other in zip(with_all, without, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_leaving_out_a_pass_without_the_flag_keeps_all_bits() -> None:
    exact = trained(EveryFlag, IMAGES, everything_on(), exact_order=True)
    optional = []
    for name in (one.name for one in everything_on() if not traits_of(one).changes_bits):
        try:
            found = trained(EveryFlag, IMAGES, everything_on(), exact_order=True, disable=[name])
        except mirrorc.MirrorcError:
            continue  # no program can do without it
        optional.append(name)
        assert are_equal(found, exact), name
    assert {"place-gradients", "schedule-overlap", "share-parameters"} <= {*optional}


@pytest.mark.fast
@pytest.mark.parametrize("num_devices", slow_but([3], [2, 3]))
def test_in_exact_order_gradients_are_summed_in_the_order_of_replicas_whatever_the_buckets(num_devices: int) -> None:
    """The bits are those of the model's own backward on each shard, added up one replica after the other."""
    expected = in_order(num_devices)
    for sizes in ({}, {"buckets": ByBytes(1e-3, 1e-4)}, {"buckets": 1e-6}):
        found = trained(Plain, INDICES, everything_on(**sizes), num_devices, exact_order=True)
        assert are_equal(found, expected), sizes


def in_order(num_devices: int) -> list[torch.Tensor]:
    torch.manual_seed(0)
    model = Plain()
    optimizer = SGD(model.parameters())
    losses = []
    for _ in range(2):
        loss: torch.Tensor | float = 0.0
        sums: list[torch.Tensor] = []
        for x, target in zip(INDICES.tensor_split(num_devices), TARGET.tensor_split(num_devices), strict=True):
            replica = copy.deepcopy(model)
            weight = torch.tensor(len(x) / len(TARGET))
            own = F.cross_entropy(replica(x), target)
            own.backward(weight)
            gradients = [parameter.grad for parameter in replica.parameters()]
            sums = [a + b for a, b in zip(sums, gradients, strict=True)] if sums else gradients  # type: ignore[operator, misc]
            loss = loss + own.detach() * weight
        for parameter, gradient in zip(model.parameters(), sums, strict=True):
            parameter.grad = gradient
        optimizer.step()
        losses.append(loss)
    return [*losses, *(parameter.detach() for parameter in model.parameters())]  # type: ignore[list-item]


@dataclass(frozen=True)
class Flagged:
    changes_bits: str = "it would add in another order"
    name: str = "flagged"
    input_stage = output_stage = mirrorc.ir.program.Stage.CAPTURED

    def run(self, program: mirrorc.Program) -> mirrorc.Program:
        return program


def test_what_is_left_out_is_named_and_what_changed_bits_says_so() -> None:
    model = EveryFlag()
    own = {"passes": everything_on(), "add": [mirrorc.after("plan-buckets", Flagged())]}
    texts = {}
    for exact_order in (False, True):
        with compiled_step(model, F.cross_entropy, exact_order=exact_order, **own) as step:
            texts[exact_order] = str(step.prepare(IMAGES, target=TARGET))
    for name in FLAGGED:
        assert f"{name}: this changes bits, as " in texts[False] and f"{name}: this changes bits" not in texts[True]
    assert "flagged: " not in texts[False], "it has done nothing"
    left_out = "Compiler(exact_order=True) leaves out decompose-gelu, lay-channels-last, flagged, factor-gradients"
    assert left_out in texts[True] and left_out not in texts[False]


@pytest.mark.fast
def test_exact_order_is_true_or_false() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(TypeError, match="exact_order is 'yes': say True"):
        mirrorc.compile(
            model, 2, optimizer=torch.optim.SGD(model.parameters()), compiler=mirrorc.Compiler(exact_order="yes")
        )  # type: ignore[arg-type]
