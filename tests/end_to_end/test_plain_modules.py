"""A module of `mirrorc.data_parallel` whose model Dynamo cannot trace runs as plain PyTorch, and trains as on one device."""

import gc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from module_twins import PLAIN, Both, assert_close, batch, net
from references import assert_trains_alike, relative_error
from selections import slow
from small_modules import Parts, module_of
from torch import nn
from torch.utils.checkpoint import checkpoint
from twins import compiled_step, same_each_time

import mirrorc
from mirrorc import CaptureError, ExecutionError
from mirrorc.capture.eager.eager_run import Run
from mirrorc.ir.nodes import calls_to

pytestmark = pytest.mark.fast


class Branching(nn.Module):
    """Goes by a value, counts its calls, and uses one of two layers."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.even, self.odd = (nn.Linear(6, size).double() for size in (6, 3, 3))
        self.drop, self.calls = nn.Dropout(0.5), 0

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        self.calls += 1
        hidden = self.layer(x).tanh()
        logits = self.odd(hidden) if self.calls % 2 else self.even(hidden)
        if hidden.sum().item() > 1e9:
            logits = logits * 2
        return logits, {"mean": hidden.square().mean(), "labels": logits.argmax(1)}


def losses(model: nn.Module, num_steps: int, sizes: tuple[int, ...] = (5, 2, 7)) -> list[torch.Tensor]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    found = []
    for step in range(num_steps):
        x, y = batch(sizes[step % len(sizes)], step)
        optimizer.zero_grad()
        logits, more = model(x.requires_grad_())
        loss = F.cross_entropy(logits, y) + (more["mean"] if step % 3 else 0)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        found += [loss.detach(), x.grad]
    return found


@pytest.mark.parametrize("devices", [2, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 3))])
def test_a_model_that_cannot_be_traced_trains_after_a_warning(devices: int) -> None:
    both = Both(Branching().eval(), devices)
    with pytest.warns(UserWarning, match=r"MC2701.*Branching"):
        both.parallel(batch(4)[0])
    both.plain(batch(4)[0])
    for own, other in zip(*both.run(lambda model: losses(model, 6)), strict=True):
        assert_close(own, other)
    both.check()
    assert both.parallel.module.calls == both.plain.calls == 7
    assert len(both.parallel.programs) == 2 and "as plain PyTorch" in both.parallel.programs[1].to_text()
    both.close()


class Dropped(nn.Module):
    """Drops out in a checkpoint, so that backward draws again."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.drop = nn.Linear(6, 8).double(), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shifted = self.layer(x) + (1 if x.sum().item() > 1e9 else 0)
        return checkpoint(self.drop, shifted, use_reentrant=False)


def test_its_random_numbers_are_new_in_each_forward_and_the_same_in_backward() -> None:
    both = Both(Dropped(), 2, PLAIN)
    x = batch(6)[0]
    first, again = (both.parallel(x) for _ in range(2))
    assert not torch.equal(first, again)
    again.sum().backward()
    bias = both.parallel.module.layer.bias.grad
    assert bias is not None and torch.equal(bias, 2.0 * (again != 0).sum(0))
    both.close()


def runs_alive() -> int:
    return sum(isinstance(known, Run) and bool(known.attached) for known in gc.get_objects())


def test_several_forwards_wait_for_their_backwards_and_are_freed_without_one() -> None:
    both = Both(Branching().eval(), 2, PLAIN)

    def use(model: nn.Module) -> None:
        outputs = [model(batch(size, size)[0])[0] for size in (3, 5, 4)]
        (outputs[2].square().mean() + outputs[0].sum()).backward()

    both.run(use)
    both.check()
    gc.collect()
    gc.disable()
    try:
        dropped = both.parallel(batch(3)[0])[0]
        assert runs_alive() == 2, "one for each device"
        del dropped
        assert not runs_alive(), "a cycle would keep all activations until a collection"
    finally:
        gc.enable()
    both.close()


class Masked(nn.Module):
    """Without labels, the loss is a constant."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(6, 3).double()

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        labelled = y >= 0
        if not labelled.any():
            return x.new_zeros(len(x))
        return F.cross_entropy(self.layer(x), y.clamp(min=0), reduction="none") * labelled


def test_outputs_need_a_gradient_in_some_calls_and_on_some_devices() -> None:
    both = Both(Masked(), 2, PLAIN)
    x = batch(4)[0]
    for labels in ([-1, -1, -1, -1], [0, 1, -1, -1], [0, 1, 2, 0], [-1, -1, -1, -1], [-1, -1, 1, 0]):
        own, other = (model(x, torch.tensor(labels)).sum() for model in both)
        assert_close(own.detach(), other.detach())
        assert own.requires_grad is other.requires_grad
        if own.requires_grad:
            own.backward()
            other.backward()
        both.check()
    both.close()


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, factor)
        return x * factor

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, factor = ctx.saved_tensors
        return gradient * factor, (gradient * x).sum().reshape(factor.shape)


class Apart(nn.Module):
    """Two halves that share nothing; the second is an autograd.Function of an argument of its own."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.factor = nn.Linear(6, 3).double(), nn.Parameter(torch.ones(1, dtype=torch.float64))

    def forward(self, x: torch.Tensor, z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.left(x) + (1 if x.sum().item() > 1e9 else 0), Doubled.apply(z, self.factor)


def test_what_the_loss_does_not_reach_is_not_run_and_may_be_updated_meanwhile() -> None:
    both = Both(Apart(), 2, PLAIN)

    def use(model: nn.Module) -> list[torch.Tensor | None]:
        inner = getattr(model, "module", model)
        x, z = (batch(5, seed)[0].requires_grad_() for seed in (1, 2))
        first, second = model(x, z), model(x, z)
        first[0].square().sum().backward()
        assert z.grad is None and inner.factor.grad is None
        torch.optim.SGD(inner.left.parameters(), lr=0.1).step()
        second[1].sum().backward()  # needs nothing of what was updated
        return [x.grad, z.grad]

    for own, other in zip(*both.run(use), strict=True):
        assert own is not None and other is not None
        assert_close(own, other)
    both.check()
    both.close()


class Partial(nn.Module):
    """Each output has a layer of its own, of which a shard may use none."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left, self.right, self.never = (nn.Linear(6, 2).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        left = self.left(x) if x.sum().item() > -1e9 else self.never(x)
        return left, self.right(x)


@pytest.mark.parametrize("reached", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_the_loss_does_not_reach_gets_no_gradient(reached: int) -> None:
    both = Both(Partial(), 2, PLAIN)
    both.run(lambda model: model(batch(5)[0])[reached].square().sum().backward())
    both.check()
    assert both.parallel.module.never.weight.grad is None
    assert (both.parallel.module.right.weight.grad is None) == (reached == 0)
    both.close()


@pytest.mark.slow
def test_spectral_norms_have_one_vector_on_all_replicas() -> None:
    both = Both(nn.Sequential(nn.utils.parametrizations.spectral_norm(nn.Linear(6, 3))).double(), 3, PLAIN)
    for own, other in zip(*both.run(lambda m: [m(batch(size)[0]).square().mean() for size in (4, 7)]), strict=True):
        assert_close(own, other)
        own.backward()
        other.backward()
    both.check()
    both.close()


class Outside(Parts):
    def __init__(self, scale: torch.Tensor) -> None:
        super().__init__(layer=nn.Linear(6, 3).double(), scale=[scale])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale[0]


class Complex(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.complex(super().forward(x), x[:, :3])


@pytest.mark.parametrize(
    ("model", "argument", "code"),
    [
        (Outside(torch.ones(3, dtype=torch.float64, requires_grad=True)), batch(4)[0], "MC3305"),
        (
            module_of(lambda self, words: self.rows(words), rows=nn.Embedding(9, 3, sparse=True)),
            torch.arange(4),
            "MC2501",
        ),
        (Complex(6, 3).double(), batch(4)[0], "MC2203"),
    ],
    ids=["a tensor outside", "sparse", "complex"],
)
def test_what_it_cannot_keep_is_refused(model: nn.Module, argument: torch.Tensor, code: str) -> None:
    with mirrorc.data_parallel(model, 2, compiler=PLAIN) as parallel, pytest.raises(CaptureError, match=code):
        parallel(argument)


def test_a_backward_is_made_once_unless_its_graph_is_kept() -> None:
    both = Both(net(), 2, PLAIN)

    def loss() -> Any:
        return both.parallel(batch(5)[0]).square().mean()

    once = loss()
    once.backward()
    with pytest.raises(RuntimeError, match="second time"):
        once.backward()
    both.close()


# Values that lie in memory otherwise than in order: after dropout, after operators whose fake versions lay them otherwise, in


SGD = partial(torch.optim.SGD, lr=0.1)
TOLERANCE = 1e-10


class Strided(Parts):
    def __init__(self, shape: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(norm=nn.BatchNorm1d(4), layer=nn.Linear(4, 4), head=nn.Linear(4, 3), shape=shape)
        self.norm.eval()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        normalized = self.norm(x.transpose(1, 2)).transpose(1, 2)
        return self.head(torch.tanh(self.layer(self.shape(x, normalized))).flatten(1, -2).mean(1))


class TimeSeriesLayer(Parts):
    def __init__(self) -> None:
        super().__init__(first=nn.BatchNorm1d(8), second=nn.BatchNorm1d(8))
        self.query, self.key, self.value, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.first(x.transpose(1, 2)).transpose(1, 2)
        heads = (*hidden.shape[:2], 2, 4)
        query, key, value = (f(hidden).view(heads).transpose(1, 2) for f in (self.query, self.key, self.value))
        mixed = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        hidden = self.second((hidden + self.out(mixed)).transpose(1, 2)).transpose(1, 2)
        return self.head(hidden.view(len(x), -1, 8).mean(1))


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    return same_each_time(lambda: make().double())


def shaped_batch(*shape: int, seed: int = 0) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64)
    return {"x": x, "target": torch.randint(3, shape[:1], generator=generator)}


# Dropout


class Dropping(Parts):
    def __init__(self, lay: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__(lay=lay, dropout=nn.Dropout(0.5), weight=nn.Parameter(torch.ones(())))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.dropout(self.lay(x) * self.weight) ** 2).sum()


@pytest.mark.slow
def test_dropout_takes_values_in_any_layout() -> None:
    lays: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda x: x.transpose(1, 2),
        lambda x: x.permute(3, 1, 0, 2),
        lambda x: x.to(memory_format=torch.channels_last),
        lambda x: x[:, ::2, 1:],
        lambda x: x[:, :1].expand(-1, 4, -1, -1),
        lambda x: x.transpose(0, 1)[:1].expand(4, -1, -1, -1).permute(3, 2, 0, 1),
    ]
    x = torch.ones(6, 5, 4, 7, dtype=torch.float64)
    for lay in lays:
        model = Dropping(lay).double()
        with compiled_step(model, optimizer=SGD, loss_reduction="sum") as step:
            loss = step(x).item()
            kept = loss / 4.0  # a kept element is 2
            total = lay(x).numel()
            assert kept == int(kept) and 0.35 < kept / total < 0.65
            # the gradient goes through the same elements: d/dw of (2 w x) ** 2 is 8
            assert model.weight.item() == pytest.approx(1.0 - 0.1 * 8.0 * kept)


@pytest.mark.slow
def test_models_with_dropout_on_values_in_another_layout_train() -> None:
    encoder = seeded(lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True))
    convolution = seeded(lambda: nn.Sequential(nn.Conv2d(2, 4, 3), nn.Dropout(0.2), nn.Flatten()))
    convolution[0].to(memory_format=torch.channels_last)
    for model, x in ((encoder, torch.randn(4, 5, 8).double()), (convolution, torch.randn(4, 2, 6, 6).double())):
        x = x.to(memory_format=torch.channels_last) if x.dim() == 4 else x
        loss_fn: Any = lambda output, target: (output.flatten(1) - target).square().mean()  # noqa: E731
        with compiled_step(model, loss_fn, optimizer=SGD) as step:
            losses = [step(x, target=torch.ones(4, 1).double()).item() for _ in range(3)]
        assert losses[2] < losses[0]


# Operators whose results lie otherwise than those of their fake versions


@pytest.mark.slow
def test_no_view_depends_on_the_layout_of_a_normalization() -> None:
    """The operator that normalizes gives its result in the layout of its argument; its fake version gives it contiguous."""
    model = seeded(TimeSeriesLayer)
    for mode in (model.train, model.eval):
        mode()
        batches = [
            shaped_batch(1, 5, 8, seed=seed) if model.training else shaped_batch(4, 5, 8, seed=seed)
            for seed in range(3)
        ]
        devices = 1 if model.training else 2
        assert_trains_alike(model, SGD, batches, devices, F.cross_entropy, tolerance=TOLERANCE)


@pytest.mark.slow
def test_operators_that_need_a_layout_get_it() -> None:
    shapes: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, y: torch.view_as_real(torch.view_as_complex(y.reshape(-1, 3, 2, 2).contiguous()) * (1 + 1j)).flatten(
            2
        ),
        lambda x, y: y * y.detach().contiguous().view(torch.int64).ne(0),
    ]
    for shape in shapes:
        check(Strided(shape))


# as_strided


def check(model: nn.Module) -> None:
    model = model.double()
    batches = [shaped_batch(4, 3, 4, seed=seed) for seed in range(2)]
    assert_trains_alike(model, SGD, batches, 2, F.cross_entropy, tolerance=TOLERANCE)


@pytest.mark.slow
def test_as_strided_addresses_the_elements_of_its_own_shard() -> None:
    shapes: list[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = [
        lambda x, y: x.as_strided((len(x), 3, 4), (12, 4, 1)),
        lambda x, y: x.as_strided((len(x), 3, 4), (12, 4, 1), 0),
        lambda x, y: x.as_strided((len(x), 2, 2, 4), (12, 4, 4, 1)),
        lambda x, y: (x * 2)[:, 1:].as_strided((len(x), 2, 4), (12, 4, 1), 0),
        lambda x, y: (x * 2).split([1, 2], 1)[1].as_strided((len(x), 2, 4), (12, 4, 1), 0),
        lambda x, y: (x * 2).unbind(1)[2].as_strided((len(x), 2, 4), (12, 4, 1), 0),
        lambda x, y: torch.as_strided_scatter(x * 2, x[:, :2], (len(x), 2, 4), (12, 4, 1), 4),
    ]
    for shape in shapes:
        check(seeded(lambda shape=shape: Strided(shape)))


def test_a_view_of_another_value_is_addressed_from_its_own_first_element() -> None:
    """With an offset that counts from the first element of what is viewed."""
    model = seeded(lambda: Strided(lambda x, y: (x * 2)[:, 1:].as_strided((len(x), 2, 4), (12, 4, 1))))
    with compiled_step(model, F.cross_entropy, optimizer=SGD) as step:
        data = shaped_batch(4, 3, 4)
        expected = F.cross_entropy(model(data["x"]), data["target"]).detach()
        assert relative_error(step(**data), expected) < TOLERANCE
        offsets = [
            node.args[3] for graph in step.program.regions.values()
            for node in calls_to(graph.graph_module.graph, torch.ops.aten.as_strided.default)
        ]  # fmt: skip
        assert offsets and set(offsets) <= {0, 4}


REFUSED: list[tuple[Callable[[torch.Tensor, torch.Tensor], torch.Tensor], type[Exception], str]] = [
    (lambda x, y: x.as_strided((len(x), 3, 4), (12, 4, 1), 1), CaptureError, "not contiguous"),  # one past the end
    (  # in a layout of its own
        lambda x, y: (x.exp().transpose(1, 2) * 2).as_strided((len(x), 3, 4), (12, 4, 1)),
        CaptureError,
        r"MC2508: as_strided .*  at:   test_plain_modules.py:\d+ .* not contiguous.*contiguous\(\)",
    ),
    (  # otherwise than while tracing
        lambda x, y: y.as_strided(y.shape, (12, 4, 1)) if y.is_contiguous() else y,
        ExecutionError,
        r"as_strided.*position in memory.*contiguous_format.*test_plain_modules.py",
    ),
]


@pytest.mark.parametrize(("shape", "error", "words"), [*slow(*REFUSED[:2]), REFUSED[2]])
def test_what_as_strided_cannot_address_is_refused(shape: Any, error: type[Exception], words: str) -> None:
    step = compiled_step(seeded(lambda: Strided(shape)), F.cross_entropy)
    with step, pytest.raises(error, match=f"(?s){words}"):
        step(**shaped_batch(4, 3, 4))
