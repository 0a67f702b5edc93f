"""Bounds of activations: steps keep within it, and train as without it, bit for bit."""

import copy
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from deep import Deep
from games import Game
from references import Trained, assert_mirrored, assert_same_bits, assert_same_model, train_mirrored, train_step
from selections import exhaustive, slow, slow_but
from separate_memories import separate_memories
from tiny_models import make_mlp, mlp_batch
from torch import nn
from torch.nn import functional as F
from twins import MlpTwins, batches_of, compiled_step

import mirrorc
from mirrorc.compilation import step_compiler
from mirrorc.errors import CaptureError, PassError
from mirrorc.packing import ByBytes
from mirrorc.passes import ChooseCheckpoints, default_pipeline

ADAMW = partial(torch.optim.AdamW, lr=0.01)


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        blocks = [
            nn.Sequential(nn.Conv2d(4 if i else 1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for i in range(5)
        ]
        self.blocks, self.head = nn.Sequential(*blocks), nn.Linear(4, 3)
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x[:, :36].reshape(-1, 1, 6, 6)).mean((2, 3)))


def train(
    model: nn.Module, num_devices: int, bound: int | str | None, sizes: tuple[int, ...] = (40, 40), **options: Any
) -> Trained:
    torch.manual_seed(1)
    width = 36 if isinstance(model, Images) else 6
    given = batches_of(*sizes, features=width, classes=3)
    return train_mirrored(model, ADAMW, given, num_devices, F.cross_entropy, activations=bound, **options)


@pytest.mark.parametrize(
    ("num_devices", "options"),
    [
        (3, {"buckets": ByBytes(0.002, 0.002)}),
        (1, {}),
        (2, {"microbatches": 2}),
        (2, {}),
        (2, {"exact_order": True}),
        (2, {"clip_grad_norm": 0.1, "check_finite": True}),
    ],
)
def test_the_bits_are_those_without_a_bound(num_devices: int, options: dict[str, Any]) -> None:
    assert_same_bits(train(Deep(), num_devices, "70%", **options), train(Deep(), num_devices, None, **options))


@pytest.mark.parametrize("num_devices", [1, 2, 3])
def test_images_are_learned_with_the_same_bits(num_devices: int) -> None:
    assert_same_bits(train(Images(), num_devices, "80%"), train(Images(), num_devices, None))


@pytest.mark.fast
@pytest.mark.parametrize("num_devices", [*slow((2,)), *exhaustive((1,), (3,))])
def test_compiled_steps_are_those_without_a_bound(num_devices: int) -> None:
    one, other = (train(Deep(), num_devices, bound, backend="inductor") for bound in ("70%", None))
    assert one.losses == pytest.approx(other.losses, rel=1e-12)
    others = other.model.state_dict()
    for name, value in one.model.state_dict().items():
        torch.testing.assert_close(value, others[name], rtol=1e-10, atol=1e-12)


def compiled(model: nn.Module, bound: int | str | None, num_devices: int = 2, **options: Any) -> mirrorc.Step:
    return compiled_step(model, F.cross_entropy, num_devices, optimizer=ADAMW, activations=bound, **options)


def peaks(model: nn.Module, bound: int | str | None, rows: int = 256, **options: Any) -> list[int]:
    (batch,) = batches_of(rows, features=36 if isinstance(model, Images) else 6, classes=3)
    with compiled(model, bound, **options) as step:
        step.prepare(**batch)
        return [device.own.activations for device in step.memory().devices]


@pytest.mark.parametrize(
    ("model", "options"),
    [
        (Deep, {}),
        (Images, {}),
        (Deep, {"microbatches": 2, "num_devices": 1}),
        (Deep, {"num_devices": 3}),
        *exhaustive((Deep, {"backend": "inductor"}), (Images, {"backend": "inductor"})),
    ],
)
def test_a_step_takes_no_more_than_what_is_allowed(model: type[nn.Module], options: dict[str, Any]) -> None:
    percent = (
        70 if options and model is Images else 60
    )  # compiled regions of convolutions have temporaries of their own
    whole = peaks(model(), None, **options)
    assert max(peaks(model(), f"{percent}%", **options)) <= percent / 100 * max(whole)
    assert max(peaks(model(), int(0.75 * max(whole)), **options)) <= int(0.75 * max(whole))


def test_a_bound_that_is_kept_anyway_changes_nothing() -> None:
    (batch,) = batches_of(40, classes=3)
    names = []
    for given in (None, "100%", 2**40):
        with compiled(Deep(), given, disable=["reserve-memory"]) as step:
            step.prepare(**batch)
            bodies = [region.graph_module.graph.nodes for region in step.program.regions.values()]
            names.append([[node.name for node in nodes] for nodes in bodies])
    assert names[0] == names[1] == names[2]


def test_what_was_chosen_is_in_the_program_and_in_the_figures() -> None:
    (batch,) = batches_of(256, classes=3)
    with compiled(Deep(), "60%") as step:
        step.prepare(**batch)
        told = [str(remark) for remark in step.program.remarks]
        report = step.memory()
    assert any(re.match(r"activations='60%' allows \S+ KiB for each device, and everything", one) for one in told)
    assert any(re.match(r"choose-checkpoints: \d+ values .* which is \d+\.\d% more work: ", one) for one in told)
    assert any(re.match(r"recompute-checkpoints: \d+ checkpoints?: backward runs \d+ operators", one) for one in told)
    assert any("to be computed again, which is" in remark for remark in report.remarks)


def test_checkpoints_of_the_model_are_kept_too() -> None:
    deep = partial(Deep, num_blocks=5)
    assert max(peaks(deep(num_own=2), "80%")) <= 0.8 * max(peaks(deep(num_own=2), None))
    assert_same_bits(train(deep(num_own=2), 2, "80%"), train(deep(), 2, None))


def test_evaluations_and_gradients_of_several_calls_are_those_without_a_bound() -> None:
    first, second = batches_of(40, 27, classes=3)
    found = []
    for bound in ("70%", None):
        torch.manual_seed(1)
        model = Deep()
        with compiled(model, bound) as step:
            losses = [step.accumulate(**first), step(**second), step.evaluate(**first)]
        found.append([*losses, *model.state_dict().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_short_batch_has_the_bound_of_a_large_one() -> None:
    large, short = batches_of(257, 2, classes=3)
    with compiled(Deep(), "60%") as step:
        step(**large)
        most = max(device.own.activations for device in step.memory().devices)
        step(**short)
        assert max(device.own.activations for device in step.memory().devices) < most
        about_bounds = [remark for remark in step.program.remarks if "sizes of arguments" not in str(remark)]
        assert not any("activations=" in str(remark) for remark in about_bounds)


def test_a_bound_that_cannot_be_kept_names_the_least(monkeypatch: pytest.MonkeyPatch) -> None:
    counted = Mock(side_effect=step_compiler.report_memory)
    monkeypatch.setattr(step_compiler, "report_memory", counted)
    with pytest.raises(PassError) as raised:
        peaks(Deep(), 1000)
    assert counted.call_count == 2  # lower targets have the same choice, so they are not compiled
    text = str(raised.value)
    found = re.match(
        r"MC1508: activations=1000 allows 1\.0 KiB for each device, and recomputing .* \((\d+) bytes\) at least"
        r"\n  at:   deep\.py:\d+ .*\n  why:  the peak is on cpu:0 in .*; "
        r"the largest values there are .*\n"
        r"  fix:  memory=mirrorc\.Memory\(activations=\1\)\n  or:   .*microbatches=",
        text,
    )
    assert found is not None, text
    assert max(peaks(Deep(), int(found[1]))) <= int(found[1])


@pytest.mark.fast
@pytest.mark.parametrize(
    ("bound", "options", "words"),
    [
        ("0%", {}, "activations is '0%': give a size .* a part of what activations would take, such as '50%'"),
        ("150%", {}, "activations is '150%': give .* a part"),
        ("nan%", {}, "activations is 'nan%': give .* a part"),
        (
            "50%",
            {"disable": ["recompute-checkpoints"]},
            "activations='50%' needs the pass 'recompute-checkpoints', which disable= switches off",
        ),
        (
            "50%",
            {"disable": ["choose-checkpoints"]},
            "activations='50%' needs the pass 'choose-checkpoints', which disable= switches off",
        ),
        ("50%", {"passes": default_pipeline()}, r"put mirrorc.passes.ChooseCheckpoints\(\) there"),
    ],
)
def test_wrong_bounds_are_refused(bound: int | str, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        compiled(Deep(), bound, **options)


def test_a_pipeline_of_ones_own_may_choose() -> None:
    whole = max(peaks(Deep(), None))
    pipeline = default_pipeline(chooses_checkpoints=True, reserves_memory=False)
    assert max(peaks(Deep(), "70%", passes=pipeline)) <= 0.7 * whole
    own = [mirrorc.before("recompute-checkpoints", ChooseCheckpoints(0))]
    assert max(peaks(Deep(), None, add=own)) < 0.8 * whole


@pytest.mark.fast
def test_a_model_that_runs_as_plain_pytorch_is_refused() -> None:
    (batch,) = batches_of(8, classes=3)
    with (
        compiled(Deep(), "50%", capture="autograd") as step,
        pytest.raises(CaptureError, match="what its forward keeps"),
    ):
        step(**batch)


# Parameters move into buckets: who else writes them is seen, and who else holds their memory is told.


ADAM = partial(torch.optim.Adam, lr=0.05)
COPIES = {"link": "copy", "disable": ("share-parameters",)}


def compiled_layers(model: nn.Module, optimizer: Any, num_devices: int = 2, **options: Any) -> mirrorc.Step:
    options = {"loss_fn": F.cross_entropy} | options
    return compiled_step(model, devices=num_devices, optimizer=optimizer, **options)


@pytest.fixture(params=["shared", "copies", "two memories"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Options of compile; devices with memory of their own, such as GPUs, are CPUs that say so."""
    if request.param == "two memories":
        separate_memories(monkeypatch)
    return {} if request.param == "shared" else COPIES


@pytest.mark.parametrize("who_is_compiled", ["both", "generator"])
def test_what_another_step_trains_is_read_as_it_is(way: dict[str, Any], who_is_compiled: str) -> None:
    def games() -> list[tuple[nn.Module, torch.optim.Optimizer]]:
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, n)).double() for n in (3, 1)]
        make = partial(torch.optim.Adam, lr=0.05, fused=True)
        return [(Game(*nets, bool(i)), make(nets[i].parameters())) for i in (1, 0)]

    plain, own = games(), games()
    names = {"both": (0, 1), "generator": (1,)}[who_is_compiled]
    steps = {i: compiled_layers(*own[i], loss_fn=None, **way) for i in names}
    for seed in range(6):
        torch.manual_seed(seed)
        batch = {"noise": torch.randn(6, 3).double(), "real": torch.randn(6, 3).double()}
        for i in range(2):
            expected = train_step(*plain[i], batch, None)
            found = steps[i](**batch).item() if i in steps else train_step(*own[i], batch, None)
            assert found == pytest.approx(expected, rel=1e-9)
            for model, optimizer in (plain[i], own[i]):
                model.zero_grad() if i not in steps else optimizer.zero_grad()
            plain[i][0].zero_grad()
    assert_same_model(own[0][0], plain[0][0], 1e-9)
    for i, step in steps.items():
        step(**batch)
        assert_mirrored(step, own[i][0], 2)
        step.close()


@pytest.mark.fast
@pytest.mark.parametrize("num_devices", slow_but([2], [1, 2]))
def test_a_backward_through_parameters_that_a_step_has_changed_is_refused_by_torch(num_devices: int) -> None:
    model = make_mlp()
    with compiled_layers(model, ADAM(model.parameters()), num_devices) as step:
        for _ in range(2):
            step(**mlp_batch(6))
            loss = F.cross_entropy(model(mlp_batch(4)["x"]), mlp_batch(4)["target"])
            step(**mlp_batch(6))
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
            model.zero_grad()


def swap(model: nn.Module, _: Any, kept: list[Any]) -> None:
    kept.append([p.data for p in model.parameters()])
    for p in model.parameters():
        p.data = p.data + 0.1


def put_back(model: nn.Module, _: Any, kept: list[Any]) -> None:
    for p, data in zip(model.parameters(), kept[-1], strict=True):
        p.data = data


def exchange(model: nn.Module, _: Any, kept: list[Any]) -> None:
    kept.append(model.first.bias.data)
    model.first.bias.data, model.first.bias.grad = model.first.bias.data.flip(0).clone(), None


def restart(_: nn.Module, optimizer: torch.optim.Optimizer, __: list[Any]) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data.zero_()


def restart_count(_: nn.Module, optimizer: torch.optim.Optimizer, __: list[Any]) -> None:
    for state in optimizer.state.values():
        state["step"].numpy()[...] = 1


@pytest.mark.parametrize(
    ("events", "options"),
    [
        *itertools.product([(swap, exchange, swap, put_back), (restart_count,)], [COPIES]),
        *itertools.product([(swap, exchange, swap, put_back), (restart_count,)], [{}]),
        *itertools.product([(swap, put_back)], [{}, COPIES]),
        ((restart,), {}),  # moments that are written so are not seen by copies
    ],
)
def test_memory_that_is_replaced_or_written_behind_torchs_back(
    events: tuple[Callable[..., None], ...], options: dict[str, Any]
) -> None:
    with MlpTwins(ADAM, **options) as pair:
        kept: dict[int, list[Any]] = {id(model): [] for model, _ in pair.sides}
        for event in [None, *events, None, *events, None]:
            if event is not None:
                pair.on_both(lambda own, its, event=event: event(own, its, kept[id(own)]))
            pair.steps(1)
        pair.check()


def holders(model: nn.Module) -> Iterator[Any]:
    yield model.state_dict()
    yield [p.data for p in model.parameters()]
    yield [p.detach() for p in model.parameters()]
    yield model.second.weight[0].detach()
    yield model.second.weight.data.numpy()


TAKEN_BEFORE = (
    r"MC3207: .* taken before the first step .* \((1 parameter, |6 parameters, such as )'(first|second)\.weight'\)\n"
    r"(?s:.*) copy\.deepcopy\(model\.state_dict\(\)\)"
)


@pytest.mark.parametrize("index", range(5))
def test_memory_of_parameters_that_others_hold_is_told_before_they_move(index: int) -> None:
    model = make_mlp()
    held = list(holders(model))[index]
    with compiled_layers(model, ADAM(model.parameters())) as step:
        with pytest.warns(UserWarning, match=TAKEN_BEFORE) as told:
            step(**mlp_batch(6))
        assert len(told) == 1 and told[0].filename == __file__
        later = next(holders(model))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            step(**mlp_batch(6))
            step(**mlp_batch(3))
        assert all(torch.equal(later[name], value) for name, value in model.state_dict().items())
    del held


def test_nothing_is_told_where_nobody_holds_the_memory_of_parameters() -> None:
    model = make_mlp()
    twin = copy.deepcopy(model)
    saved = copy.deepcopy(model.state_dict())
    averaged = torch.optim.swa_utils.AveragedModel(model)
    optimizer = ADAM(model.parameters())
    train_step(model, optimizer, mlp_batch(6), F.cross_entropy)
    circle: list[Any] = [model.state_dict()]  # garbage that is collected one day
    circle.append(circle)
    del circle
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compiled_layers(model, optimizer, 3) as step:
            step(**mlp_batch(6))
            step(**mlp_batch(4, seed=1))
    assert_same_model(twin, make_mlp(), 0)
    assert saved and averaged is not None


@pytest.mark.fast
def test_nothing_is_told_where_parameters_and_buffers_lie_in_one_memory() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.Linear(3, 2))
    model[0].requires_grad_(False)
    flat, begin = torch.zeros(100), 0
    for name, value in model.state_dict().items():
        if value.is_floating_point():
            part = flat[begin : begin + value.numel()].view(value.shape).copy_(value)
            model.load_state_dict({name: part}, strict=False, assign=True)
            begin += value.numel()
    del flat, part, value
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with compiled_step(model, F.mse_loss, optimizer=ADAM) as step:
            step(torch.ones(4, 3), target=torch.zeros(4, 2))


def test_parameters_in_memory_that_processes_share_are_refused() -> None:
    """Other processes would keep the values of before the first step."""
    model = make_mlp().share_memory()
    with compiled_layers(model, ADAM(model.parameters())) as step:
        for _ in range(2):
            with pytest.raises(ValueError, match=r"(?s)'first\.weight'.*share_memory.*load_state_dict"):
                step(**mlp_batch(6))
    assert all(p.is_shared() for p in model.parameters())
    model = make_mlp()
    with compiled_layers(model, ADAM(model.parameters())) as step:
        step(**mlp_batch(6))
        model.share_memory()
        with pytest.raises(ValueError, match=r"share_memory"):
            step(**mlp_batch(6))
