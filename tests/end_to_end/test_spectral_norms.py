"""Spectral norms iterate their vectors once in each forward, as on one device with the whole batch, on all replicas alike."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from games import Turns
from references import assert_same_model, unchanged
from selections import exhaustive
from separate_memories import separate_memories
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.nn.utils.parametrizations import spectral_norm
from twins import Twins, compiled_step, sgd

import mirrorc
from mirrorc.ir.variables import Aggregation

SIZES = (6, 1, 5, 2)
LONG = [(0, 6), (1, 6), (1, 1), (0, 1), (1, 5), (0, 6)]
COPIES = {"link": "copy", "disable": ("share-parameters",)}


class Bounded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution = spectral_norm(nn.Conv1d(1, 2, 3))
        self.head = spectral_norm(nn.Linear(8, 2), n_power_iterations=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def judged(y: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.convolution(y.unsqueeze(1)).tanh().flatten(1))
            return out

        return judged(x) - judged(-x)


def batch(size: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(size, 6).double(), torch.randn(size, 2).double()


def assert_alike(step: mirrorc.Step, prefix: str = "") -> None:
    vectors = [v for name, v in step.variables.items() if name.startswith(prefix) and name.endswith(("._u", "._v"))]
    assert vectors and all(v.aggregation is Aggregation.SAME for v in vectors)
    assert all(torch.equal(value, v.value) for v in vectors for value in v.values)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "sizes", "options", "memories"),
    [
        (3, (6, 1), {}, "one"),
        (2, (4, 1), {"capture": "autograd", "microbatches": 2}, "one"),
        (3, SIZES, {"capture": "autograd"}, "two"),
        (2, (4,), {"microbatches": 2}, "two"),
        (1, SIZES, {}, "one"),
        (2, SIZES, {}, "two"),
        *exhaustive(
            (2, SIZES, {"backend": "inductor"}, "one"),
            (3, SIZES, {}, "one"),
            (2, SIZES, {"microbatches": 2}, "one"),
            (1, SIZES, {"microbatches": 3}, "one"),
        ),
    ],
)
def test_vectors_are_those_of_one_device(
    num_devices: int, sizes: tuple[int, ...], options: dict[str, Any], memories: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a batch has fewer examples than devices, in accumulated gradients, evaluations and a forward of the user's."""
    if memories == "two":
        separate_memories(monkeypatch)
        options = {**options, **COPIES}
    torch.manual_seed(0)
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    with Twins(Bounded().double(), make, F.mse_loss, num_devices, **options) as pair:
        step, twin = pair.step, pair.twin

        def evaluated() -> None:
            expected = F.mse_loss(twin(x), y).detach()
            torch.testing.assert_close(step.evaluate(x, target=y), expected, rtol=1e-10, atol=1e-12)

        for size in sizes:
            x, y = batch(size)
            pair.train(x, target=y)
        assert_alike(step)
        if sizes == SIZES:
            (x, y), (u, v) = batch(4), batch(4)
            step.accumulate(x, target=y)
            step(u, target=v)
            pair.backward(x, target=y, loss_scale=0.5)
            pair.backward(u, target=v, loss_scale=0.5)
            pair.update()
            evaluated()
            pair.on_both(lambda own, _: own(x))
            step.evaluate(x)
            twin(x)
            assert_alike(step)
            pair.on_both(lambda own, _: own.eval())
            evaluated()
        assert_same_model(pair.model, twin, 1e-9)


def game(num_devices: int) -> Turns:
    torch.manual_seed(0)
    generator = nn.Linear(3, 3).double()
    critic = nn.Sequential(spectral_norm(nn.Linear(3, 4)), nn.Tanh(), spectral_norm(nn.Linear(4, 1))).double()
    losses = (
        lambda made, real: -critic(made).mean(),
        lambda judged, noise: critic(generator(noise).detach()).mean() - judged.mean(),
    )
    nets = (generator, critic)
    return Turns(nets, [sgd(net.parameters()) for net in nets], losses, num_devices)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("num_devices", "turns"),
    [(2, [(0, 4), (1, 1)]), (3, LONG), *exhaustive((1, LONG), (2, LONG))],
)
def test_a_critic_outside_of_the_model_iterates_in_both_steps(num_devices: int, turns: list[Any]) -> None:
    own, plain = game(num_devices), game(0)
    for turn, size in turns:
        x = torch.randn(size, 3).double()
        torch.testing.assert_close(own.train(turn, x), plain.train(turn, x), rtol=1e-10, atol=1e-12)
    assert_same_model(own.nets, plain.nets, 1e-9)
    assert_alike(own.steps[0], "outside.critic.")
    own.close()


@pytest.mark.parametrize("capture", ["dynamo", "autograd"])
def test_vectors_of_weights_that_are_drawn_at_random_are_each_replicas_own(capture: str) -> None:
    layer = nn.Linear(8, 8)  # so many elements that no two replicas draw the same mask
    parametrize.register_parametrization(layer, "weight", nn.Dropout(0.5))
    with compiled_step(spectral_norm(layer), F.mse_loss, capture=capture) as step:
        step(torch.ones(4, 8), target=torch.ones(4, 8))
        vector = step.variables["parametrizations.weight.1._u"]
        assert vector.aggregation is Aggregation.MEAN and not torch.equal(*vector.values)


class OnePerExample(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.spectral_norm(nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack([self.layer(row) for row in x])


@pytest.mark.slow
def test_calls_that_follow_the_size_of_a_shard_are_refused() -> None:
    model = OnePerExample()
    with (
        compiled_step(model, nn.functional.mse_loss) as step,
        pytest.raises(mirrorc.CaptureError, match="is iterated another number of times for shards of other sizes"),
    ):
        step(torch.randn(5, 4), target=torch.randn(5, 3))


class ByData(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = spectral_norm(nn.Linear(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.layer(x)
        return self.layer(hidden) if x.sum() > 0 else hidden


def test_a_step_of_plain_pytorch_whose_shards_iterate_otherwise_is_refused() -> None:
    model, x = ByData(), torch.rand(4, 4)
    words = r"spectral norm '.*_[uv]' was computed more often"
    with compiled_step(model, F.mse_loss, capture="autograd") as step:
        step(x, target=x)
        with unchanged(model), pytest.raises(mirrorc.ExecutionError, match=f"(?s){words}"):
            step(torch.cat([x[:2], -x[2:]]), target=x)
        step(-x, target=x)
        assert_alike(step)
