"""Steps whose forward and backward run as plain PyTorch, with capture="autograd": what Dynamo cannot read trains exactly, too."""

import copy
import gc
import random
import re
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from branching import SGD, batches
from references import (
    assert_same_bits,
    assert_same_parameters,
    assert_same_state,
    assert_same_training,
    assert_trains_alike,
    refused,
    train_mirrored,
    train_on_one_device,
    train_shard_by_shard,
    unchanged,
)
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from twins import Twins, compiled_step

from mirrorc import CaptureError, ExecutionError
from mirrorc.custom_ops.random import mix
from mirrorc.packing import ByBytes

TOLERANCE = 1e-11


def plain_twins(model: nn.Module, make_optimizer: Any = SGD, **options: Any) -> Twins:
    return Twins(model, make_optimizer, F.cross_entropy, capture="autograd", tolerance=TOLERANCE, **options)


ADAM = partial(torch.optim.AdamW, lr=0.01)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.first, self.last = nn.Linear(6, 8).double(), nn.Linear(8, 4).double()

    def between(self, h: torch.Tensor) -> torch.Tensor:
        return h.tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.between(self.first(x)))


class Branches(Net):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return torch.stack([row.tanh() if row.sum().item() > 0 else 2 * row for row in h])


class Indexes(Net):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        rows, columns = torch.nonzero(h > 0.3, as_tuple=True)
        return h.index_put((rows, columns), h[rows, columns] ** 2)


class UsesNumpy(Net):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        signs = np.sign(h.detach().numpy())
        return h * torch.from_numpy(signs)


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.scale = 2.0 if x.numel() else 1.0
        return x * ctx.scale

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient * ctx.scale


class OwnFunction(Net):
    def between(self, h: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(h).tanh()


class Penalized(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = super().forward(x)
        (gradient,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        return y + gradient.norm(dim=1, keepdim=True)


class Tied(Net):
    def __init__(self) -> None:
        super().__init__()
        self.again, self.shared = nn.Linear(6, 8).double(), self.first
        self.again.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last((self.first(x) + self.again(x) + self.shared(x)).tanh())


class HooksBackward(Net):
    def __init__(self) -> None:
        super().__init__()
        self.layers = [self.first, self.last]
        self.steps = {"encode": self.encode}
        self.first.register_full_backward_hook(lambda module, given, got: None)
        self.last.register_forward_hook(lambda module, given, result: result * module.in_features)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers[1](self.steps["encode"](x).tanh())


MODELS = [Branches, Indexes, UsesNumpy, OwnFunction, Penalized, Tied, HooksBackward]


@pytest.mark.parametrize("num_devices", [1, 2, 3])
@pytest.mark.parametrize("model", MODELS, ids=lambda kind: kind.__name__)
def test_what_dynamo_cannot_read_equals_one_device(model: Callable[[], nn.Module], num_devices: int) -> None:
    assert_trains_alike(model(), ADAM, batches(7, 6, 7), num_devices, F.cross_entropy, capture="autograd")


@pytest.mark.parametrize(
    ("num_devices", "sizes", "options"),
    [
        (3, (7, 2, 1, 5), {}),  # fewer examples than devices
        (2, (7, 9), {"link": "copy"}),
        (2, (7, 9), {"microbatches": 2}),
        (2, (7, 9), {"backend": "inductor"}),
    ],
    ids=str,
)
def test_sizes_and_options_are_those_of_any_other_step(
    num_devices: int, sizes: tuple[int, ...], options: dict[str, Any]
) -> None:
    assert_trains_alike(Branches(), SGD, batches(*sizes), num_devices, F.cross_entropy, capture="autograd", **options)


def test_gradients_are_accumulated_over_calls() -> None:
    (batch,) = batches(8)
    with plain_twins(Branches()) as pair:
        pair.step.accumulate(batch["x"][:4], target=batch["target"][:4])
        pair.step(batch["x"][4:], target=batch["target"][4:])
        pair.plain(**batch)
        pair.check()


class Mixture(Net):
    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8).double() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, chosen = self.first(x), x[:, 0].long()
        parts = torch.zeros_like(h)
        for number in chosen.unique().tolist():
            rows = torch.nonzero(chosen == number).squeeze(1)
            parts = parts.index_add(0, rows, self.experts[number](h[rows]))
        return self.last(parts)


ROWS = ([0, 0, 1, 1, 0, 0, 1, 1], [2] * 8, [0, 1, 2, 0, 1, 2, 0, 1], [0] * 8, [1, 1, 2, 2, 1, 1, 2, 2])
"""Which expert each example of a batch goes to: no batch but one uses all, and the third one is new in the second."""
ONE_ALONE = ([0, 1, 2, 0, 1, 2, 0, 1], [0, 0, 0, 0, 1, 1, 2, 2], [2, 2, 2, 1, 0, 0, 0, 0])


def of_experts(rows_of_batches: Any = ROWS) -> list[dict[str, torch.Tensor]]:
    data = batches(*map(len, rows_of_batches))
    for batch, rows in zip(data, rows_of_batches, strict=True):
        batch["x"][:, 0] = torch.tensor(rows)
    return data


@pytest.mark.parametrize("options", [{}, {"microbatches": 2}, {"link": "copy"}], ids=str)
def test_what_one_replica_alone_uses_has_zeros_on_the_others(options: dict[str, Any]) -> None:
    assert_trains_alike(Mixture(), ADAM, of_experts(ONE_ALONE), 2, F.cross_entropy, capture="autograd", **options)


"""Which expert each example of a batch goes to: no batch but one uses all, and the third one is new in the second."""
LEAVING_OUT: list[tuple[type[torch.optim.Optimizer], dict[str, Any]]] = [
    (torch.optim.AdamW, {"lr": 0.01}),
    (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}),
    (torch.optim.SGD, {"lr": 0.1, "weight_decay": 0.1}),
    (torch.optim.NAdam, {"lr": 0.01}),
    (torch.optim.RAdam, {"lr": 0.01}),
    (torch.optim.RMSprop, {"lr": 0.01, "centered": True, "momentum": 0.5}),
    (torch.optim.Adagrad, {"lr": 0.01}),
    (torch.optim.Adamax, {"lr": 0.01}),
    (torch.optim.Adadelta, {}),  # which runs by itself
]
WAYS: list[tuple[int, dict[str, Any]]] = [
    (1, {}),
    (3, {}),
    (2, {"buckets": ByBytes(1e-4, 1e-4)}),
    (2, {"placement": "mirrored"}),
    (2, {"placement": "central"}),
    (2, {"microbatches": 2}),
    (2, {"clip_grad_norm": 1e6, "check_finite": True}),
]


def assert_updates_alike(make: Any, data: Any, num_devices: int = 2, **options: Any) -> None:
    """The state has no entries of what was never used."""
    expected = train_on_one_device(Mixture(), make, data, F.cross_entropy)
    found = train_mirrored(Mixture(), make, data, num_devices, F.cross_entropy, capture="autograd", **options)
    assert_same_training(found, expected, TOLERANCE)
    assert_same_state(found.optimizer, expected.optimizer, TOLERANCE)


@pytest.mark.parametrize(("kind", "options"), [*LEAVING_OUT[::3], *LEAVING_OUT[1::3], *LEAVING_OUT[2::3]], ids=str)
def test_what_no_replica_uses_is_not_updated(kind: Any, options: dict[str, Any]) -> None:
    """Neither by weight decay nor by moments, whose numbers of steps stand still; what was never used has no state."""
    for number in (1, len(ROWS)):
        assert_updates_alike(partial(kind, **options), of_experts()[:number])


@pytest.mark.parametrize(("num_devices", "options"), [*WAYS[1:4], WAYS[0], *WAYS[4:]], ids=str)
def test_what_is_not_updated_stays_so_in_every_kind_of_step(num_devices: int, options: dict[str, Any]) -> None:
    assert_updates_alike(ADAM, of_experts(), num_devices, **options)


def test_an_optimizer_that_is_loaded_goes_on_with_the_numbers_of_each_parameter() -> None:
    data = of_experts()
    with plain_twins(Mixture(), ADAM) as pair:
        pair.train(**data[0])
        program = pair.step.programs[-1]
        for batch in data[1:]:
            pair.optimizer.load_state_dict(copy.deepcopy(pair.optimizer.state_dict()))
            pair.train(**batch)
        assert pair.step.programs[-1] is program  # buckets hold parameters whose numbers differ
        pair.check()


def test_what_an_earlier_call_has_used_is_updated() -> None:
    data = of_experts()
    with plain_twins(Mixture(), ADAM) as pair:
        for parts in ((data[0], data[3], data[3]), (data[4],)):
            for i, part in enumerate(parts):
                (pair.step.accumulate if i < len(parts) - 1 else pair.step)(**part)
                pair.backward(**part, loss_scale=1 / len(parts))
            pair.update()
        pair.check()


def test_a_skipped_step_leaves_no_trace_of_what_it_has_used() -> None:
    data = of_experts()
    broken = {**data[2], "x": data[2]["x"].clone()}
    broken["x"][3, 1] = torch.inf
    with plain_twins(Mixture(), ADAM, check_finite="skip") as pair:
        pair.step(**broken)
        pair.train(**data[0])
        assert pair.step.num_skipped == 1
        pair.check()


class Normalizes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8).double()
        self.register_buffer("positive", torch.zeros((), dtype=torch.float64))
        self.register_buffer("never_written", torch.ones(8, dtype=torch.float64))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.positive.add_(1.0 if h.sum().item() > 0 else 0.0)
        return self.norm(h).relu() * self.never_written


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_buffers_are_those_of_each_shard(num_devices: int) -> None:
    data = batches(7, 6, 8)
    expected = train_shard_by_shard(Normalizes(), SGD, data, num_devices, F.cross_entropy)
    found = train_mirrored(Normalizes(), SGD, data, num_devices, F.cross_entropy, capture="autograd")
    assert_same_training(found, expected, TOLERANCE)


class Drops(Net):
    def __init__(self, reenters: bool | None = None) -> None:
        super().__init__()
        self.drop, self.reenters = nn.Dropout(0.5), reenters

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if h.sum().item() == 0:
            return h
        return self.drop(h.tanh())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x)
        if self.reenters is None:
            return self.last(self.between(h))
        return self.last(checkpoint(self.between, h, use_reentrant=self.reenters))


@pytest.mark.parametrize("reenters", [None, False], ids=["plain", "checkpoint"])
def test_replicas_draw_from_streams_of_their_own(reenters: bool | None) -> None:
    data = batches(8, 8)
    trained = []
    for _ in range(2):
        model = Drops(reenters)
        torch.manual_seed(3)
        trained.append(train_mirrored(model, SGD, data, 2, F.cross_entropy, capture="autograd"))
        drawn = torch.rand(())
    assert_same_bits(*trained)
    torch.manual_seed(3)
    seeds = [torch.randint(2**62, (), dtype=torch.int64).item() for _ in data]
    assert torch.equal(torch.rand(()), drawn), "a step draws one number, its seed"
    model = Drops()
    optimizer = SGD(model.parameters())
    for seed, batch in zip(seeds, data, strict=True):
        optimizer.zero_grad()
        for replica in range(2):
            torch.manual_seed(mix(mix(int(seed), replica), 0))
            rows = slice(4 * replica, 4 * replica + 4)
            (F.cross_entropy(model(batch["x"][rows]), batch["target"][rows]) / 2).backward()
        optimizer.step()
    assert_same_parameters(trained[0].model, model, TOLERANCE)


def test_attributes_are_those_that_the_model_has_in_each_step() -> None:
    class Scales(Branches):
        def __init__(self) -> None:
            super().__init__()
            self.options = {"scale": 1.0}

        def between(self, h: torch.Tensor) -> torch.Tensor:
            return super().between(h) * self.options["scale"]

    with plain_twins(Scales()) as pair:
        for scale in (1.0, 3.0):
            pair.model.options = pair.twin.options = {"scale": scale}
            pair.train(**batches(6)[0])


class Passes(Net):
    def __init__(self) -> None:
        super().__init__()
        self.scale, self.kind, self.is_read_first = 5.0, "none", torch.tensor(False)

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.is_read_first:
            h = h * self.scale
        if self.kind == "none" and h.sum() > 0:  # never assigned
            self.hidden = h.tanh()
        else:
            self.hidden = h.sigmoid()
        self.scale = 2.0
        self.scale *= float(self.hidden.detach().abs().max() > 0.5) + 1.0
        return self.hidden * self.scale


def test_attributes_that_are_assigned_before_they_are_read_pass_values_within_a_call() -> None:
    model, data = Passes(), batches(5, 4, 6)
    single = train_on_one_device(model, SGD, data, F.cross_entropy)
    sharded = train_shard_by_shard(model, SGD, data, 2, F.cross_entropy)
    with pytest.warns(UserWarning, match=r"MC3304: .* sets attributes of modules \('hidden', 'scale'\)"):
        found = train_mirrored(model, SGD, data, 2, F.cross_entropy, capture="autograd")
    assert_same_training(found, sharded, TOLERANCE)
    assert (found.model.scale, hasattr(found.model, "hidden")) == (5.0, False)
    assert single.model.scale != 5.0


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:forward of Passes assigns attributes")
def test_an_attribute_that_a_later_call_reads_first_is_refused() -> None:
    model, batch = Passes(), batches(5)[0]
    with compile_plain(model) as step:
        step(**batch)
        model.is_read_first = torch.tensor(True)
        with refused(ExecutionError, r"sets its attribute 'scale'\n(?s:.*)it reads the attribute before", model):
            step(**batch)
        model.is_read_first = torch.tensor(False)
        step(**batch)


@pytest.mark.fast
def test_an_attribute_that_one_shard_reads_first_is_refused() -> None:
    class ReadsInOne(Net):
        scale = 1.0

        def between(self, h: torch.Tensor) -> torch.Tensor:
            if len(h) == 3:
                self.scale = 2.0
            return h * self.scale

    model, batch = ReadsInOne(), batches(5)[0]
    with (
        compile_plain(model) as step,
        pytest.raises(CaptureError, match=r"changes model\.scale, and each replica leaves another value"),
    ):
        step(**batch)


def test_autocast_is_as_in_the_callers_thread() -> None:
    class Sees(Net):
        def between(self, h: torch.Tensor) -> torch.Tensor:
            assert h.dtype is torch.bfloat16
            return h.tanh()

    model = Sees().float()
    batch = batches(6)[0]
    with compile_plain(model) as step, torch.autocast("cpu", torch.bfloat16):
        step(batch["x"].float(), target=batch["target"])


class Reads(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.layer, self.last = layer.double(), nn.Linear(8, 4).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layer(x[..., None])[0].mean(1))


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layers(kind: type[nn.RNNBase]) -> None:
    model, data = Reads(kind(1, 4, 2, batch_first=True, bidirectional=True)), batches(5, 4)
    for num_devices in (1, 2):
        own = assert_trains_alike(model, SGD, data, num_devices, F.cross_entropy, capture="autograd")
        assert own.model(data[0]["x"]).shape == (5, 4)


# What is refused


compile_plain = partial(compiled_step, loss_fn=F.cross_entropy, optimizer=SGD, capture="autograd")


class Does(Net):
    def __init__(self, deed: Callable[[Any, torch.Tensor], Any]) -> None:
        super().__init__()
        self.deed = deed
        self.is_on = torch.tensor(True)
        self.kept: list[Any] = []
        self.holder = Holder(self.last)
        self.register_buffer("seen", torch.zeros((), dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(8, dtype=torch.float64), requires_grad=False)
        self.spare = nn.Parameter(torch.ones(8, dtype=torch.float64))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        if self.is_on:
            found = self.deed(self, h)
            return found if isinstance(found, torch.Tensor) else h
        return h


def assigns(model: Any, h: torch.Tensor) -> None:
    model.last_seen = h.sum().item()


def collects(model: Any, h: torch.Tensor) -> None:
    model.kept.append(h.sum().item())


def draws_of_python(model: Any, h: torch.Tensor) -> Any:
    return h * random.random()


def draws_of_numpy(model: Any, h: torch.Tensor) -> Any:
    return h * float(np.random.rand())


def replaces_a_buffer(model: Any, h: torch.Tensor) -> None:
    model.seen = (model.seen + 1.0).half()


def writes_a_parameter(model: Any, h: torch.Tensor) -> None:
    model.frozen.add_(1.0)


def writes_an_argument(model: Any, h: torch.Tensor) -> None:
    model.frozen.data.numpy()[0] = 5.0


def bounds_a_norm(model: Any, h: torch.Tensor) -> None:
    """By a bound that the first weights keep."""
    model.frozen.data = torch.renorm(model.frozen.data[None], 2, 0, 1e3)[0]


def bounds_a_norm_in_place(model: Any, h: torch.Tensor) -> None:
    model.frozen.data[None].renorm_(2, 0, 1e3)


def keeps_a_graph(model: Any, h: torch.Tensor) -> None:
    model.seen.add_(h.sum())


def raises(model: Any, h: torch.Tensor) -> None:
    raise KeyError("no such word")


def detaches(model: Any, h: torch.Tensor) -> Any:
    return h.detach().tanh()


REFUSED = [
    (replaces_a_buffer, r"assigns a tensor of f16\[.*to its buffer 'seen'"),
    (collects, r"changes model\.kept, and each replica leaves another value"),
    (draws_of_python, r"draws from Python's random or numpy's.*torch.rand"),
    (draws_of_numpy, r"draws from Python's random or numpy's.*torch.rand"),
    (writes_a_parameter, r"writes the parameter 'frozen' in place"),
    (writes_an_argument, r"writes the parameter 'frozen' in place"),
    (bounds_a_norm, r"writes the parameter 'frozen' in place.*write it in your loop, between calls"),
    (bounds_a_norm_in_place, r"writes the parameter 'frozen' in place"),
    (keeps_a_graph, r"writes a value that requires a gradient to the buffer 'seen'"),
    (raises, r"KeyError: 'no such word'\n.*test_plain_pytorch.py:\d+.*\n.*\n  fix"),
]


@pytest.mark.parametrize(("deed", "words"), REFUSED, ids=[deed.__name__ for deed, _ in REFUSED])
def test_a_first_run_is_refused(deed: Callable[[Any, torch.Tensor], Any], words: str) -> None:
    model = Does(deed)
    states = random.getstate(), torch.get_rng_state()
    numpys = np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    with compile_plain(model) as step:
        for _ in range(2):
            with unchanged(model), pytest.raises(CaptureError, match=f"(?s){words}"):
                step(**batches(6)[0])
        assert model.kept == []
        assert random.getstate() == states[0] and torch.equal(torch.get_rng_state(), states[1])
        assert np.random.get_state()[1].tolist() == numpys  # type: ignore[index, union-attr]
        model.is_on = torch.tensor(False)
        step(**batches(6)[0])


@pytest.mark.fast
@pytest.mark.parametrize("generator", [random, np.random])
def test_a_generator_that_forward_seeds_itself_is_refused_whatever_its_state(generator: Any) -> None:
    """Replicas would seed and draw in any order."""

    def seeds(model: Any, h: torch.Tensor) -> torch.Tensor:
        generator.seed(3)
        return h * generator.random()

    batch = batches(6)[0]
    with compile_plain(Does(seeds)) as step:
        generator.seed(3)
        generator.random()  # the state in which forward leaves it
        with pytest.raises(CaptureError, match="draws from Python's random or numpy's"):
            step(**batch)


def draws(model: Any, h: torch.Tensor) -> Any:
    return F.dropout(h)


def uses_the_spare(model: Any, h: torch.Tensor) -> Any:
    return h * model.spare


class Holder:
    """An object that holds a layer, which is that of no replica."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer

    def __call__(self, model: Any, h: torch.Tensor) -> Any:
        return h * self.layer.weight[0]  # type: ignore[index]


def uses_what_an_object_holds(model: Any, h: torch.Tensor) -> Any:
    return model.holder(model, h)


def counts(model: Any, h: torch.Tensor) -> None:
    model.seen.add_(1.0)


def counts_uncounted(model: Any, h: torch.Tensor) -> None:
    model.seen.data.add_(1.0)


def replaces_the_memory(model: Any, h: torch.Tensor) -> None:
    model.frozen.data = model.frozen.data * 0.5


LATER = [
    (
        raises,
        r"replica \d on cpu:\d in fwd_0 > \S+ raised KeyError: .*  at:   test_plain_pytorch.py:\d+  raise KeyError.*No parameter",
    ),
    (assigns, r"^MC2301: forward of a module sets its attribute 'last_seen'"),
    (draws, r"forward of Does drew random numbers of torch, and drew none when it was captured"),
    (counts, r"MC2601: .* wrote the buffer 'seen', and did not when it was captured"),
    (counts_uncounted, r"MC2601: .* wrote the buffer 'seen', and did not when it was captured"),
    (replaces_the_memory, r"MC2601: .* wrote its parameter 'frozen' in place.*now:  No parameter was .*between calls"),
    (keeps_a_graph, r"MC2601: .* wrote the buffer 'seen', and did not when it was captured"),
    (uses_what_an_object_holds, r"MC2306: .* uses the parameter 'last.weight' through .* or an object.*No parameter"),
]


@pytest.mark.parametrize(("deed", "words"), LATER, ids=[deed.__name__ for deed, _ in LATER])
def test_a_later_run_that_differs_fails_before_anything_is_updated(
    deed: Callable[[Any, torch.Tensor], Any], words: str
) -> None:
    model, batch = Does(deed), batches(6)[0]
    model.is_on = torch.tensor(False)
    with compile_plain(model) as step:
        before = step(**batch)
        model.is_on = torch.tensor(True)
        for _ in range(2):
            with unchanged(model), pytest.raises(ExecutionError, match=re.compile(words, re.DOTALL)):
                step(**batch)
        model.is_on = torch.tensor(False)
        assert step(**batch).item() < before.item()


class Decays(Net):
    """Its first write through ``.data`` leaves the value as it was."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros((), dtype=torch.float64))
        self.register_buffer("decayed", torch.zeros(8, dtype=torch.float64))

    def between(self, h: torch.Tensor) -> torch.Tensor:
        self.decayed.data.mul_(0.5).add_(self.calls)
        self.calls += 1
        return h.tanh() * (1 + self.decayed)


@pytest.mark.parametrize("devices", [1, 2, 3])
def test_a_buffer_that_a_first_run_writes_with_its_own_value_is_written_later(devices: int) -> None:
    with plain_twins(Decays(), devices=devices) as pair:
        for size in (6, 5, 6, 7):
            pair.train(**batches(size)[0])
        pair.check()


@pytest.mark.parametrize("devices", [1, 2])
def test_a_norm_that_is_bounded_before_each_step_is_that_of_one_bounded_in_forward(devices: int) -> None:
    class Bounded(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.first.weight.data = torch.renorm(self.first.weight.data, 2, 0, 0.3)
            return super().forward(x)

    model, twin = Net(), Bounded()
    optimizer, few = SGD(model.parameters()), batches(6, 5, 7)
    trained = train_on_one_device(twin, SGD, few, F.cross_entropy)
    with compile_plain(model, devices=devices, optimizer=optimizer) as step:
        for batch in few:
            with torch.no_grad():
                model.first.weight.copy_(torch.renorm(model.first.weight, 2, 0, 0.3))
            step(**batch)
    assert_same_parameters(model, trained.model, TOLERANCE)


@pytest.mark.parametrize("deed", [uses_the_spare, detaches])
def test_a_later_run_may_use_other_parameters(deed: Callable[[Any, torch.Tensor], Any]) -> None:
    """The first run has used no spare, or all others."""
    model = Does(deed)
    model.is_on = torch.tensor(False)
    with plain_twins(model) as pair:
        for is_on in (False, True, False):
            pair.model.is_on = pair.twin.is_on = torch.tensor(is_on)
            pair.train(**batches(6)[0])
        pair.check()


def test_a_replica_that_fails_alone_leaves_nothing_behind() -> None:
    kept: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def fails_for_large_ones(model: Any, h: torch.Tensor) -> Any:
        h = h * 2
        kept.add(h)
        if h.max().item() > 1e6:
            raise ValueError("too large")
        return h

    model, batch = Does(fails_for_large_ones), batches(6)[0]
    broken = {**batch, "x": batch["x"].clone()}
    broken["x"][5] = 1e9
    with compile_plain(model) as step:
        step(**batch)
        with refused(ExecutionError, r"replica 1 on cpu:1 .* raised ValueError: too large\n", model):
            step(**broken)
        gc.collect()
        assert not kept
        step(**batch)


@pytest.mark.fast
def test_a_closure_over_the_model_is_refused() -> None:
    model = Branches()
    held = [model]

    def penalized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(output, target) + held[0].first.weight.pow(2).sum()

    with (
        compile_plain(model, loss_fn=penalized) as step,
        pytest.raises(CaptureError, match=r"uses the parameter 'first.weight'"),
    ):
        step(**batches(6)[0])


def test_modules_outside_are_named_if_they_are_trained_or_written() -> None:
    teacher = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8)).double()
    model, batch = Does(lambda own, h: h + teacher(h)), batches(6)[0]
    with compile_plain(model) as step, refused(CaptureError, r"writes teacher\.1\.\w+ in place", teacher):
        step(**batch)
    teacher.eval()
    model = Does(lambda own, h: h + teacher(h))
    with compile_plain(model) as step, pytest.warns(UserWarning, match="depends on 4 parameter"):
        step(**batch)
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_other_purposes_are_refused(tmp_path: Path) -> None:
    batch = batches(6)[0]
    with compile_plain(Branches()) as step:
        step(**batch)
        with pytest.raises(ValueError, match="captured with capture='autograd'"):
            step.programs[-1].save(tmp_path / "program.mirror.gz")
        text = step.programs[-1].to_text()
        assert "run as plain PyTorch" in text
    model = Drops(reenters=True)
    with (
        compile_plain(model) as step,
        pytest.raises(CaptureError, match=r"fix:  give torch\.utils\.checkpoint use_reentrant=False"),
    ):
        step(**batch)
    embedding = nn.Embedding(5, 4, sparse=True)
    with compile_plain(embedding, loss_fn=F.cross_entropy) as step, pytest.raises(CaptureError, match="is sparse"):
        step(torch.arange(5), target=torch.zeros(5, dtype=torch.int64))
    loss = copy.deepcopy(Branches())
    with (
        compile_plain(loss, loss_fn=lambda output, target: output) as step,
        pytest.raises(CaptureError, match="no scalar"),
    ):
        step(**batch)
