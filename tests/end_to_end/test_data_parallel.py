"""A module of `mirrorc.data_parallel` trains in a loop of the user's own as the plain model does on one device."""

import copy
import dataclasses
import pickle
from collections.abc import Iterator
from typing import Any

import pytest
import selections
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from module_twins import EAGER, PLAIN, QUIET, Both, assert_close, batch, net
from small_modules import Parts, module_of
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mirrorc
from mirrorc.errors import CaptureError, ExecutionError

pytestmark = pytest.mark.fast


@pytest.fixture(params=[EAGER, pytest.param(PLAIN, marks=pytest.mark.slow)], ids=["compiled", "plain"])
def both(request: pytest.FixtureRequest) -> Iterator[Both]:
    made = Both(compiler=request.param)
    yield made
    made.close()


@pytest.mark.parametrize(
    "case", selections.slow_but([(2, 7)], [(devices, size) for devices in (1, 2, 3, 4) for size in (1, 2, 7)]), ids=str
)
def test_a_loop_trains_as_plain_pytorch(case: tuple[int, int]) -> None:
    devices, size = case
    both = Both(devices=devices)

    def train(model: nn.Module) -> list[torch.Tensor]:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        losses = []
        for seed in range(3):
            x, y = batch(size, seed)
            loss = F.cross_entropy(model(x.requires_grad_()), y)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            losses += [loss.detach(), x.grad]
        return losses

    for own, other in zip(*both.run(train), strict=True):
        assert_close(own, other)
    both.check()
    both.close()


def test_gradients_are_views_of_the_sum_of_their_bucket(both: Both) -> None:
    x, y = batch(6)
    F.cross_entropy(both.parallel(x), y).backward()
    assert len({p.grad.untyped_storage().data_ptr() for p in both.parallel.parameters() if p.grad is not None}) == 1


def test_a_loss_that_needs_the_whole_batch_is_exact(both: Both) -> None:
    def contrastive(model: nn.Module) -> torch.Tensor:
        features = F.normalize(model(batch(7)[0]), dim=1)
        loss = F.cross_entropy(features @ features.T / 0.1, torch.arange(7))
        loss.backward()
        return loss

    assert_close(*both.run(contrastive))
    both.check()


def test_gradients_are_accumulated_and_zeroed_either_way(both: Both) -> None:
    def accumulate(model: nn.Module) -> None:
        for set_to_none in (True, False):
            for seed in (0, 1, 2):
                x, y = batch(5, seed)
                (F.cross_entropy(model(x), y) / 3).backward()
            model.zero_grad(set_to_none=set_to_none)
        x, y = batch(4, 3)
        with model.no_sync() if hasattr(model, "no_sync") else torch.enable_grad():
            F.cross_entropy(model(x), y).backward()
        F.cross_entropy(model(x), y).backward()

    both.run(accumulate)
    both.check()


def test_several_forwards_before_one_backward(both: Both) -> None:
    def siamese(model: nn.Module) -> None:
        (left, _), (right, _), (other, _) = batch(5, 0), batch(5, 1), batch(3, 2)
        a, b, c = model(left), model(right), model(other)
        ((a - b).square().sum() + c.sum()).backward()
        model(left).square().sum().backward()

    both.run(siamese)
    both.check()


@pytest.mark.parametrize("compiler", [EAGER, pytest.param(PLAIN, marks=pytest.mark.slow)], ids=["compiled", "plain"])
def test_a_part_of_the_outputs_may_reach_the_loss(compiler: mirrorc.Compiler) -> None:
    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = (nn.Linear(6, 2).double() for _ in range(3))

        def forward(self, x: torch.Tensor) -> dict[str, Any]:
            late = self.c(self.a(x).repeat(1, 3))
            return {
                "late": late,
                "a": self.a(x),
                "rest": [self.b(x).argmax(1), (self.b(x), x.shape[0] * 0 + 2)],
                "mean": self.c(x).mean(),
            }

    torch.manual_seed(0)
    both = Both(Heads(), 2, compiler)
    for use in (
        lambda out: out["a"].sum(),
        lambda out: out["mean"] * 3,
        lambda out: out["rest"][1][0].square().mean() + out["mean"],
    ):
        own, other = both.run(lambda model, use=use: use(model(batch(7)[0])))
        assert_close(own, other)
        own.backward()
        other.backward()
        both.check()
        both.parallel.zero_grad()
        both.plain.zero_grad()
    outputs = both.parallel(batch(7)[0])
    assert outputs["rest"][0].shape == (7,) and outputs["rest"][1][1] == 2 and not outputs["rest"][0].requires_grad
    both.close()


def test_outputs_of_an_object() -> None:
    @dataclasses.dataclass
    class Output:
        logits: torch.Tensor
        loss: torch.Tensor

    class Model(Parts):
        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> Output:
            logits = self.layer(x)
            return Output(logits, F.cross_entropy(logits, labels))

    torch.manual_seed(0)
    both = Both(Model(layer=nn.Linear(6, 3).double()), 3)

    def train(model: nn.Module) -> torch.Tensor:
        x, y = batch(7)
        output = model(x, labels=y)
        output.loss.backward()
        return output.logits.detach()

    assert_close(*both.run(train))
    both.check()
    both.close()


@pytest.mark.parametrize("devices", [1, 2])
def test_buffers_and_random_numbers_are_those_of_a_step(devices: int) -> None:
    both = Both(net(nn.BatchNorm1d(8)), devices)

    def train(model: nn.Module) -> None:
        for seed in range(3):
            x, y = batch(8, seed)
            model(x)  # writes buffers, though no backward follows
            F.cross_entropy(model(x), y).backward()
            with torch.no_grad():
                model(x)

    both.run(train)
    if devices == 1:
        both.check()
    assert both.parallel.module[1].num_batches_tracked.item() == 9
    both.close()


def test_evaluation(both: Both) -> None:
    x, _ = batch(7)
    both.parallel.eval()
    assert not both.parallel.module.training
    with torch.no_grad():
        assert_close(both.parallel(x), both.plain(x))
        assert not both.parallel(x).requires_grad
    with torch.inference_mode():
        assert_close(both.parallel(x), both.plain(x))
    both.parallel(x).sum().backward()
    both.plain(x).sum().backward()
    both.check()


def test_frozen_and_thawed_parameters(both: Both) -> None:
    def train(model: nn.Module) -> None:
        inner = getattr(model, "module", model)
        for frozen in (True, False, True):
            inner[0].requires_grad_(not frozen)
            x, y = batch(5)
            F.cross_entropy(model(x), y).backward()
        inner.requires_grad_(False)

    both.run(train)
    both.check()
    x, y = batch(5)
    assert not both.parallel(x).requires_grad
    own, other = x.clone().requires_grad_(), x.clone().requires_grad_()
    F.cross_entropy(both.parallel(own), y).backward()  # through a model that gets no gradient itself
    F.cross_entropy(both.plain(other), y).backward()
    assert_close(own.grad, other.grad)
    both.check()


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [EAGER, PLAIN], ids=["compiled", "plain"])
def test_a_model_that_is_frozen_from_the_start(compiler: mirrorc.Compiler) -> None:
    frozen = net().requires_grad_(False)
    both = Both(frozen, 2, compiler)
    own, other = (batch(5)[0].requires_grad_() for _ in range(2))
    both.parallel(own).square().sum().backward()
    both.plain(other).square().sum().backward()
    assert_close(own.grad, other.grad)
    both.check()
    both.close()


@pytest.mark.slow
def test_a_game_of_two_modules() -> None:
    torch.manual_seed(0)
    generator, discriminator = nn.Linear(4, 6).double(), net()
    games = []
    for wraps in (True, False):
        pair = [copy.deepcopy(generator), copy.deepcopy(discriminator)]
        g, d = pair
        if wraps:
            d = mirrorc.data_parallel(d, 2, compiler=EAGER, debug=QUIET)
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (g, d)]
        for seed in range(3):
            noise, real = torch.randn(5, 4, generator=torch.Generator().manual_seed(seed)).double(), batch(5, seed)[0]
            fake = g(noise)
            optimizers[1].zero_grad()
            (d(real).mean() - d(fake.detach()).mean()).backward()
            optimizers[1].step()
            optimizers[0].zero_grad()
            d(fake).mean().backward()
            optimizers[0].step()
        games.append([p.detach() for model in pair for p in model.parameters()])
    for own, other in zip(*games, strict=True):
        assert_close(own, other)


def test_hooks_on_parameters_get_the_gradient_of_the_whole_batch(both: Both) -> None:
    def hooked(model: nn.Module) -> list[torch.Tensor]:
        inner, seen = getattr(model, "module", model), []
        handles = [
            inner[0].weight.register_hook(lambda gradient: gradient * 2),
            inner[0].bias.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone())),
        ]
        x, y = batch(7)
        F.cross_entropy(model(x), y).backward()
        for handle in handles:
            handle.remove()
        return seen

    own, other = both.run(hooked)
    assert len(own) == len(other) == 1
    assert_close(own[0], other[0])
    both.check()


@pytest.mark.slow
def test_gradients_are_given_without_being_accumulated(both: Both) -> None:
    x, y = batch(7)
    own = torch.autograd.grad(F.cross_entropy(both.parallel(x), y), [*both.parallel.parameters()])
    other = torch.autograd.grad(F.cross_entropy(both.plain(x), y), [*both.plain.parameters()])
    for mine, theirs in zip(own, other, strict=True):
        assert_close(mine, theirs)
    assert all(p.grad is None for p in both.parallel.parameters())


def test_a_graph_is_kept_if_asked(both: Both) -> None:
    def twice(model: nn.Module) -> None:
        x, y = batch(7)
        loss = F.cross_entropy(model(x), y)
        loss.backward(retain_graph=True)
        loss.backward()

    both.run(twice)
    both.check()
    x, y = batch(7)
    loss = F.cross_entropy(both.parallel(x), y)
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()
    loss = F.cross_entropy(both.parallel(x), y)
    with pytest.raises(ExecutionError, match=r"MC3210.*create_graph"):
        loss.backward(create_graph=True)
    output = both.parallel(x)
    with torch.no_grad():
        both.parallel.module[2].weight.add_(1)
    with pytest.raises((RuntimeError, ExecutionError), match="modified by an inplace operation"):
        output.sum().backward()


class Reading(Parts):
    """Backward reads a part of a parameter, an attribute that is no parameter, and parts of its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.weight.chunk(2)
        a, b, c = x.chunk(3, 1)
        return (a @ first) @ second.T * self.scale * b.sigmoid() + c


@pytest.mark.parametrize("written", selections.slow_but(["weight"], ["weight", "scale", "x", "part"]))
def test_what_backward_reads_again_may_not_be_written_before(written: str) -> None:
    both = Both(Reading(weight=nn.Parameter(torch.ones(4, 3).double()), scale=torch.full((2,), 2.0).double()), 2)
    x = batch(6)[0]
    argument = mirrorc.PerReplica([x[:3].clone(), x[3:].clone()]) if written == "part" else x
    both.parallel(argument).sum().backward()
    both.plain(x).sum().backward()
    both.check()
    output = both.parallel(argument)
    with torch.no_grad():
        {"x": x, "part": argument.values[0] if written == "part" else None}.get(
            written, getattr(both.parallel.module, written, None)
        ).mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()
    both.close()


def test_an_output_without_a_gradient_is_that_of_an_evaluation(both: Both) -> None:
    both = Both(module_of(lambda self, x: self.layer(x).argmax(1), layer=nn.Linear(6, 3).double()), 2)
    own, other = both.run(lambda model: model(batch(5)[0]))
    assert torch.equal(own, other) and not own.requires_grad
    both.close()


def test_what_it_cannot_keep_is_refused(both: Both) -> None:
    x, _ = batch(6)
    with pytest.raises(ExecutionError, match="MC3210"), torch.autograd.forward_ad.dual_level():
        both.parallel(torch.autograd.forward_ad.make_dual(x, torch.ones_like(x)))
    output = both.parallel(x)
    with pytest.raises(ExecutionError, match="MC3210"):
        torch.autograd.grad(
            output, [*both.parallel.parameters()], torch.stack([torch.ones_like(output)] * 2), is_grads_batched=True
        )
    outside = torch.ones(3, dtype=torch.float64, requires_grad=True)

    with (
        mirrorc.data_parallel(
            module_of(lambda self, x: self.layer(x) * outside, layer=nn.Linear(6, 3).double()), 2, compiler=EAGER
        ) as model,
        pytest.raises(CaptureError, match="MC3305"),
    ):
        model(x)
    both.parallel.module = net()
    with pytest.raises(ValueError, match="MC1206"):
        both.parallel(x)


def test_updates_without_a_version_are_seen(both: Both) -> None:
    def by_hand(model: nn.Module) -> None:
        for seed in range(3):
            x, y = batch(7, seed)
            F.cross_entropy(model(x), y).backward()
            for p in model.parameters():
                p.data -= 0.1 * p.grad
            model.zero_grad()

    both.run(by_hand)
    both.check()


def test_state_has_the_names_of_the_plain_model(both: Both) -> None:
    plain = net()
    assert list(both.parallel.state_dict()) == list(plain.state_dict())
    plain.load_state_dict(both.parallel.state_dict())
    changed = {name: value + 1 for name, value in plain.state_dict().items()}
    both.parallel.load_state_dict(changed)
    for name, value in both.parallel.module.state_dict().items():
        assert_close(value, changed[name])
    parent, other = nn.ModuleDict({"inner": both.parallel}), nn.ModuleDict({"inner": plain})
    assert list(parent.state_dict()) == list(other.state_dict())
    parent.load_state_dict(other.state_dict())
    assert_close(both.parallel.module[0].weight, plain[0].weight)
    with pytest.raises(ValueError, match="MC1206"):
        both.parallel.load_state_dict(changed, assign=True)


@pytest.mark.slow
def test_copies_compile_anew(both: Both) -> None:
    x, _ = batch(5)
    averaged = torch.optim.swa_utils.AveragedModel(both.parallel)
    both.parallel(x).sum().backward()
    with torch.no_grad():
        both.parallel.module[0].weight.add_(1)
    averaged.update_parameters(both.parallel)
    for copied in (copy.deepcopy(both.parallel), pickle.loads(pickle.dumps(both.parallel)), averaged.module):
        inner = copied.module
        assert inner[0].weight is not both.parallel.module[0].weight
        assert_close(copied(x), inner(x))
        copied.close()


def test_it_is_not_moved(both: Both) -> None:
    assert both.parallel.to("cpu") is both.parallel.double()  # where it is already
    for move in (nn.Module.half, nn.Module.float, lambda m: m.to(torch.float32)):
        with pytest.raises(RuntimeError, match=r"MC1604.*move the parameters"):
            move(both.parallel)


@pytest.mark.slow
def test_checkpoints_autocast_and_a_scaler() -> None:
    torch.manual_seed(0)
    both = Both(
        module_of(
            lambda self, x: self.last(checkpoint(lambda v: self.inner(v).relu(), x, use_reentrant=False)),
            inner=nn.Linear(6, 16),
            last=nn.Linear(16, 3),
        ),
        2,
    )

    def train(model: nn.Module) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for seed in range(2):
            x, y = batch(6, seed)
            with torch.autocast("cpu", torch.bfloat16):
                loss = F.cross_entropy(model(x.float()), y)
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()

    both.run(train)
    both.check(0.02)
    both.close()


@pytest.mark.slow
def test_batches_of_changing_sizes(both: Both) -> None:
    def train(model: nn.Module) -> None:
        for size in (7, 4, 9, 12, 2, 1):
            x, y = batch(size)
            F.cross_entropy(model(x), y).backward()

    both.run(train)
    both.check()


def test_a_failure_leaves_it_usable(both: Both) -> None:
    x, y = batch(6)
    output = both.parallel(x)
    with pytest.raises(ValueError, match="batch_size"):
        F.cross_entropy(output, y[:3])
    with pytest.raises((TypeError, ValueError), match="MC1301"):
        both.parallel(x, x)
    with pytest.raises((RuntimeError, CaptureError)):
        both.parallel(x[:, :3])
    both.run(lambda model: F.cross_entropy(model(x), y).backward())
    both.check()
    both.close()
    with pytest.raises(ExecutionError, match="MC5003"):
        both.parallel(x)


@pytest.mark.slow
def test_values_of_each_replica_have_gradients(both: Both) -> None:
    torch.manual_seed(0)
    both = Both(nn.LSTM(6, 4, num_layers=2, batch_first=True).double(), 2)
    x = batch(15)[0].view(5, 3, 6)
    output, (hidden, _) = both.parallel(x)
    (output.sum() + hidden.gather(1).square().sum()).backward()
    output, (hidden, _) = both.plain(x)
    (output.sum() + hidden.square().sum()).backward()
    both.check()
    both.close()


@pytest.mark.slow
def test_torch_compile_leaves_it_as_it_is(both: Both) -> None:
    x, y = batch(6)
    F.cross_entropy(torch.compile(both.parallel, backend="eager")(x), y).backward()
    F.cross_entropy(both.plain(x), y).backward()
    both.check()


def test_wrong_arguments() -> None:
    model = net()
    compressed = mirrorc.Communication(compression="bfloat16")
    for options in ({"communication": compressed}, {"debug": mirrorc.Debug(check_replicas_every=1)}):
        with pytest.raises(ValueError, match="MC1003"):
            mirrorc.data_parallel(model, 2, **options)
    with mirrorc.data_parallel(net(), 2, compiler=EAGER) as wrapped:
        for wrap in (mirrorc.data_parallel, mirrorc.compile):
            with pytest.raises(TypeError, match=r"MC1201[^~]*model\.module"):
                wrap(wrapped, 2)
    with pytest.raises(ValueError, match="MC1002"):
        mirrorc.data_parallel(model, 2, reduction="mean")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="MC1201"):
        mirrorc.data_parallel(lambda x: x)  # type: ignore[arg-type]


@pytest.mark.slow
def test_sparse_gradients_and_tied_parameters() -> None:
    class Words(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows, self.tied = nn.Embedding(20, 4, sparse=True).double(), nn.Embedding(20, 4).double()
            self.head = nn.Linear(4, 20, bias=False).double()
            self.head.weight = self.tied.weight

        def forward(self, words: torch.Tensor) -> torch.Tensor:
            return self.head(self.rows(words) + self.tied(words))

    torch.manual_seed(0)
    both = Both(Words(), 3)
    words = torch.randint(20, (7, 3))

    def train(model: nn.Module) -> None:
        for _ in range(2):
            F.cross_entropy(model(words).flatten(0, 1), words.flatten()).backward()

    both.run(train)
    rows, expected = both.parallel.module.rows.weight.grad, both.plain.rows.weight.grad
    assert rows.is_sparse and expected.is_sparse
    assert_close(rows.to_dense(), expected.to_dense())
    assert_close(both.parallel.module.tied.weight.grad, both.plain.tied.weight.grad)
    both.close()


@pytest.mark.slow
def test_arguments_that_get_a_gradient_in_several_ways(both: Both) -> None:
    both = Both(
        module_of(
            lambda self, x, scale, states: self.layer(x) * scale + states["hidden"].sum(0),
            layer=nn.Linear(6, 3).double(),
        ),
        2,
    )
    leaves = [torch.randn(shape, dtype=torch.float64) for shape in ((5, 6), (3,), (4, 5, 3))]
    grads = []
    for model in both:
        x, scale, hidden = (leaf.clone().requires_grad_() for leaf in leaves)
        marks = (mirrorc.replicated(scale), mirrorc.batch_dim(hidden, 1)) if model is both.parallel else (scale, hidden)
        model(x, marks[0], {"hidden": marks[1]}).square().sum().backward()
        grads.append([x.grad, scale.grad, hidden.grad])
    for own, other in zip(*grads, strict=True):
        assert_close(own, other)
    both.check()
    x = leaves[0].requires_grad_()
    with pytest.raises(ValueError, match="MC1308"):
        both.parallel(mirrorc.PerReplica([x[:2], x[2:]]), leaves[1], {"hidden": leaves[2]})
    both.close()


ACTIONS = st.sampled_from(
    [
        "forward",
        "backward",
        "forward twice",
        "no_grad",
        "eval",
        "train",
        "clip",
        "step",
        "zero",
        "freeze",
        "thaw",
        "bad batch",
    ]
)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(ACTIONS, st.integers(1, 7)), min_size=3, max_size=12),
    st.integers(1, 3),
    st.sampled_from([EAGER, PLAIN]),
)
def test_any_loop_is_that_of_plain_pytorch(
    actions: list[tuple[str, int]], devices: int, compiler: mirrorc.Compiler
) -> None:
    both = Both(net(), devices, compiler)

    def loop(model: nn.Module) -> None:
        inner, waiting = getattr(model, "module", model), []
        optimizer = torch.optim.AdamW(inner.parameters(), lr=0.1)
        for number, (action, size) in enumerate(actions):
            x, y = batch(size, number)
            if action.startswith("forward"):
                waiting.append(F.cross_entropy(model(x), y))
                waiting += [model(x).square().mean()] if action == "forward twice" else []
            elif action == "backward" and waiting:
                losses, waiting = [loss for loss in waiting if loss.requires_grad], []
                if losses:
                    torch.stack(losses).sum().backward()
            elif action == "no_grad":
                with torch.no_grad():
                    model(x)
            elif action in ("eval", "train"):
                model.train(action == "train")
            elif action == "clip":
                nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            elif action == "step" and not waiting:
                optimizer.step()
            elif action == "zero":
                optimizer.zero_grad(set_to_none=bool(size % 2))
            elif action in ("freeze", "thaw") and not waiting:
                inner[0].requires_grad_(action == "thaw")
            elif action == "bad batch":
                with pytest.raises((RuntimeError, CaptureError)):
                    model(x[:, :2])

    both.run(loop)
    both.check(1e-9)
    both.close()
