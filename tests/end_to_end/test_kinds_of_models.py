"""Kinds of layers, losses and batches that people use: each trains as on one device, or is refused in one clear sentence."""

import functools
import logging
import traceback
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import (
    assert_same_parameters,
    assert_trains_alike,
    train_mirrored,
    train_on_one_device,
    train_step,
    unchanged,
)
from small_modules import Parts, module_of
from torch import nn
from torch.nn.utils import parametrizations, prune, spectral_norm, weight_norm
from transformers import (
    HubertConfig,
    HubertForSequenceClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    Wav2Vec2ForSequenceClassification,
)
from twins import Twins, compiled_step, same_each_time

import mirrorc
from mirrorc import CaptureError

SGD = partial(torch.optim.SGD, lr=0.1)
TOLERANCE = 1e-9


class WithMatrices(Parts):
    def __init__(self, solve: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__(matrix=nn.Linear(4, 16), head=nn.Linear(4, 3), solve=solve)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        matrix = self.matrix(x).view(-1, 4, 4)
        matrix = matrix @ matrix.mT + 2 * torch.eye(4, dtype=x.dtype)
        return self.head(self.solve(matrix, x.unsqueeze(-1)))


class Words(Parts):
    def __init__(self, table: nn.Module) -> None:
        super().__init__(table=table, head=nn.Linear(4, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.table((x.abs() * 5).long().clamp(max=9)).reshape(len(x), -1, 4).mean(1))


class LooksUp(Parts):
    def __init__(self, factor: float) -> None:
        super().__init__(weight=nn.Parameter(torch.ones(10, 4)), factor=factor)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.factor:
            return F.embedding(x, self.weight * self.factor, sparse=True)
        return F.embedding(x, self.weight, 0, sparse=True) + F.embedding(x, self.weight, sparse=True)


def batch(num_examples: int = 4, width: int = 4, seed: int = 0) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    x, target = (torch.randn(num_examples, n, generator=generator, dtype=torch.float64) for n in (width, 3))
    return {"x": x, "target": target}


def between(*layers: nn.Module) -> nn.Module:
    return module_of(lambda self, x: self.head(self.layers(x)), layers=nn.Sequential(*layers), head=nn.Linear(4, 3))


TRAINED: dict[str, Callable[[], nn.Module]] = {
    "inv": lambda: WithMatrices(lambda a, b: (torch.linalg.inv(a) @ b).squeeze(-1)),
    "solve": lambda: WithMatrices(lambda a, b: torch.linalg.solve(a, b).squeeze(-1)),
    "cholesky": lambda: WithMatrices(lambda a, b: (torch.linalg.cholesky(a) @ b).squeeze(-1)),
    "slogdet": lambda: WithMatrices(lambda a, b: torch.linalg.slogdet(a)[1][:, None] * b.squeeze(-1)),
    "bag": lambda: Words(nn.EmbeddingBag(10, 4)),
    "weight_norm": lambda: between(parametrizations.weight_norm(nn.Linear(4, 4))),
    "spectral_norm in eval mode": lambda: between(in_eval_mode(parametrizations.spectral_norm(nn.Linear(4, 4)))),
    "orthogonal": lambda: between(parametrizations.orthogonal(nn.Linear(4, 4))),
}


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    return same_each_time(lambda: make().double())


@pytest.mark.parametrize("name", TRAINED)
def test_kinds_of_models_train_as_on_one_device(name: str) -> None:
    batches = [batch(seed=seed) for seed in range(2)]
    assert_trains_alike(seeded(TRAINED[name]), SGD, batches, 2, F.mse_loss, tolerance=TOLERANCE)


def pruned() -> nn.Module:
    layer = nn.Linear(4, 4)
    return prune.l1_unstructured(layer, "weight", amount=0.5)


def in_eval_mode(layer: nn.Module) -> nn.Module:
    layer.parametrizations.eval()
    return layer


REFUSED: dict[str, tuple[Callable[[], nn.Module], dict[str, Any], str]] = {
    "momentum of None": (lambda: between(nn.BatchNorm1d(4, momentum=None)), batch(), "'layers.0' .*momentum=None.*0.1"),
    "a batch of one": (lambda: between(nn.BatchNorm1d(4)), batch(1), r"MC2104: .*one device.*more than 1 value"),
    "sparse bag": (
        lambda: Words(nn.EmbeddingBag(10, 4, mode="max", sparse=True)),
        batch(),
        "EmbeddingBag 'table' .*sparse=True and mode='max'\n.*\n  fix:  sparse=False",
    ),
    "scaled": (
        lambda: Words(nn.Embedding(10, 4, scale_grad_by_freq=True, sparse=True)),
        batch(),
        "lookup in 'table.weight' of Words .*scale_grad_by_freq=True.*sparse=False",
    ),
    "computed": (lambda: Words(LooksUp(2.0)), batch(), "lookup of Words has sparse=True.*no parameter\n.*\n  fix:  sparse=False"),
    "two paddings": (lambda: Words(LooksUp(0.0)), batch(), "'table.weight' of Words have different values of padding_idx"),
    "weight_norm": (lambda: between(weight_norm(nn.Linear(4, 4))), batch(), "'layers.0' .*WeightNorm.*parametrizations"),
    "spectral_norm": (lambda: between(spectral_norm(nn.Linear(4, 4))), batch(), "'layers.0' .*SpectralNorm.*parametrizations"),
    "pruned": (lambda: between(pruned()), batch(), "'layers.0' .*L1Unstructured.*prune.remove"),
    "shape": (
        lambda: between(nn.Identity()),
        batch(4, 5),
        r"\[2, 5\] X \[4, 3\]\n.*test_kinds_of_models.py:\d+.*\n.*shard, float64\[2, 5\], float64\[2, 3\]\n  fix:",
    ),
}  # fmt: skip


def test_what_cannot_be_captured_is_refused_in_a_few_lines(capfd: pytest.CaptureFixture[str]) -> None:
    for name, (make, data, words) in REFUSED.items():
        model = seeded(make)
        optimizer = SGD(model.parameters())
        with (
            unchanged(model, optimizer),
            compiled_step(model, F.mse_loss, optimizer=optimizer, capture="dynamo") as step,
            pytest.raises(CaptureError, match=f"(?s){words}") as caught,
        ):
            step(**data)
        text = "".join(traceback.format_exception(caught.value))
        assert text.count("\n") < 48 and len(str(caught.value)) < 600, f"{name}: {text}"
    assert capfd.readouterr() == ("", "")


@pytest.mark.filterwarnings("ignore:MC2701", "ignore:MC3304", "ignore:MC3207")
@pytest.mark.parametrize("name", ["weight_norm", "spectral_norm", "pruned"])
def test_weights_that_hooks_compute_in_forward_train_as_plain_pytorch(name: str) -> None:
    make, data, _ = REFUSED[name]
    for num_devices in (1, 2, 3):
        model, plain = seeded(make), seeded(make)
        optimizer = SGD(plain.parameters())
        with compiled_step(model, F.mse_loss, num_devices, SGD) as step:
            for _ in range(3):
                step(**data)
                train_step(plain, optimizer, data, F.mse_loss)
        for own, expected in zip(model.state_dict().values(), plain.state_dict().values(), strict=True):
            assert torch.allclose(own, expected, rtol=0, atol=TOLERANCE)


class Grows(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(4, 3))
        self.register_buffer("seen", torch.zeros(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.seen.numel() == 0:
            self.seen.resize_(3).fill_(2.0)
        return self.layer(x) * self.seen


@pytest.mark.fast
@pytest.mark.filterwarnings("ignore:MC2701")
def test_a_buffer_that_grows_in_forward_is_refused_until_it_has_its_size() -> None:
    model, data = seeded(Grows), batch()
    words = r"MC2304: .*changes the size of the buffer 'seen'\n.*of \[0\], not \[3\]\n  fix:  model\(x\) on a batch"
    with compiled_step(model, F.mse_loss) as step, pytest.raises(CaptureError, match=words):
        step(**data)
    model(data["x"])
    assert_trains_alike(model, SGD, [data], 2, F.mse_loss, tolerance=TOLERANCE)


@pytest.mark.fast
def test_the_log_has_the_error_of_the_tracer(caplog: pytest.LogCaptureFixture) -> None:
    make, data, _ = REFUSED["shape"]
    model = seeded(make)
    with (
        caplog.at_level(logging.DEBUG, logger="mirrorc.capture"),
        compiled_step(model, F.mse_loss, optimizer=SGD) as step,
        pytest.raises(CaptureError),
    ):
        step(**data)
    assert "Dynamo failed to run FX node" in caplog.text


@pytest.mark.fast
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_singular_matrix_stops_the_step_before_it_changes_anything(backend: str) -> None:
    model = module_of(
        lambda self, x: torch.linalg.inv(x * self.scale).sum(), scale=nn.Parameter(torch.ones((), dtype=torch.float64))
    )
    whole = torch.eye(3, dtype=torch.float64).repeat(4, 1, 1)
    broken = whole.clone()
    broken[3, 1, 1] = 0.0
    optimizer = SGD(model.parameters())
    with compiled_step(model, optimizer=optimizer, backend=backend, loss_reduction="sum") as step:
        singular = pytest.raises(mirrorc.MirrorcError, match=r"(?s)linalg.inv failed: a matrix is singular")
        with unchanged(model, optimizer), singular:
            step(broken)
        assert step(whole).item() == 12.0
    assert model.scale.item() == pytest.approx(1.0 + 0.1 * 12.0)


def test_embeddings_that_count_are_spoken_of_on_several_devices() -> None:
    """One device gives the update of plain PyTorch, and no word; several give another one, and say so at the line."""

    class Functions(Parts):
        def __init__(self, bag: bool) -> None:
            super().__init__(weight=nn.Parameter(torch.randn(5, 3)), bag=bag)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.bag:
                return F.embedding_bag(x, self.weight, mode="sum", scale_grad_by_freq=True)
            return F.embedding(x, self.weight, scale_grad_by_freq=True).sum(1)

    makers: list[tuple[Callable[[], nn.Module], bool]] = [
        (lambda: nn.EmbeddingBag(5, 3, mode="sum", scale_grad_by_freq=True), True),
        (lambda: nn.Embedding(5, 3, scale_grad_by_freq=True), True),
        (lambda: Functions(bag=True), True),
        (lambda: Functions(bag=False), True),
        (lambda: nn.Embedding(5, 3), False),
    ]
    x = torch.tensor([[0, 1], [1, 2], [2, 2], [0, 0]])
    for make, counts in makers:
        for devices in (1, 2):
            torch.manual_seed(0)
            model = nn.Sequential(make()).double()
            with (
                warnings.catch_warnings(record=True) as caught,
                Twins(model, loss_fn=lambda y, t: (y * y).mean(), devices=devices, tolerance=1e-12) as pair,
            ):
                warnings.simplefilter("always")
                pair.train(x, target=x)
            said = [w for w in caught if "scale_grad_by_freq=True" in str(w.message)]
            assert len(said) == (counts and devices == 2), [str(w.message) for w in caught]
            if (devices == 1 and not isinstance(model[0], nn.Embedding)) or not counts:
                pair.check()


# Speech models of Hugging Face train as they come, with masked spans, layers that are left out and all dropouts.


SLOW_SGD = functools.partial(torch.optim.SGD, lr=0.05)
KINDS: dict[str, tuple[Any, Any]] = {
    "wav2vec2": (Wav2Vec2ForSequenceClassification, Wav2Vec2Config),
    "hubert": (HubertForSequenceClassification, HubertConfig),
}
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "intermediate_size": 8,
    "conv_dim": (6, 6),
    "conv_stride": (5, 2),
    "conv_kernel": (10, 3),
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 6,
    "num_labels": 3,
}
NO_DROPOUT = dict.fromkeys(
    ("hidden_dropout", "activation_dropout", "attention_dropout", "feat_proj_dropout", "final_dropout", "layerdrop"),
    0.0,
)


def speech(kind: str = "wav2vec2", **options: Any) -> nn.Module:
    model, config = KINDS[kind]
    torch.manual_seed(0)
    made: nn.Module = model(config(**{**SIZES, **options})).train()
    return made


def sounds(*, is_padded: bool = False) -> dict[str, torch.Tensor]:
    lengths = torch.tensor([220, 130, 180, 220, 200])
    batch = {"input_values": torch.randn(5, 220), "labels": torch.tensor([0, 1, 2, 0, 1])}
    return batch | ({"attention_mask": (torch.arange(220) < lengths[:, None]).long()} if is_padded else {})


@pytest.mark.parametrize(("kind", "num_runs"), [("wav2vec2", 1), ("wav2vec2", 2), ("hubert", 1)])
def test_speech_models_train_as_they_come(kind: str, num_runs: int) -> None:
    losses = []
    for _ in range(num_runs):
        model, batch = speech(kind, mask_time_prob=0.5, mask_time_length=2), sounds(is_padded=num_runs == 1)
        with warnings.catch_warnings(), compiled_step(model, optimizer=SLOW_SGD(model.parameters(), lr=0.0)) as step:
            warnings.simplefilter("error")
            losses.append([step(**batch).item() for _ in range(2)])
    assert losses[0] == losses[-1] and len(set(losses[0])) == 2


def test_masked_features_train_as_on_one_device() -> None:
    masked = {"mask_time_prob": 1.0, "mask_time_length": 1, "mask_feature_prob": 0.01, "mask_feature_length": 1}
    model = speech(**masked, **NO_DROPOUT, mask_feature_min_masks=8).double()
    batches = [{**sounds(), "input_values": torch.randn(5, 220).double()} for _ in range(2)]
    mirrored, single = train_mirrored(model, SLOW_SGD, batches, 2), train_on_one_device(model, SLOW_SGD, batches)
    assert_same_parameters(mirrored.model, single.model, 1e-9)


@pytest.mark.parametrize("num_devices", [1, 3])
def test_layers_are_left_out_as_on_one_device(num_devices: int) -> None:
    """Each of two layers is drawn before a step; of six steps, some have both, one or none."""
    options = {**NO_DROPOUT, "layerdrop": 0.5, "num_hidden_layers": 2, "mask_time_prob": 0.0}
    with Twins(speech(**options).double(), SLOW_SGD, devices=num_devices) as pair:
        for seed in range(6):
            batch = {name: v.double() if v.is_floating_point() else v for name, v in sounds().items()}
            torch.manual_seed(seed)
            loss = pair.step(**batch)
            torch.manual_seed(seed)
            torch.testing.assert_close(loss, pair.plain(**batch), rtol=1e-10, atol=0)
        assert_same_parameters(pair.model, pair.twin, 1e-9)


class Tokens(Parts):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__(first=nn.Linear(3, 3), token=nn.Parameter(torch.randn(shape)))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y[mask] = self.token.tanh()
        y[mask[:, :1].expand(-1, y.size(1))] = 0.5
        return y


@pytest.mark.parametrize(("shape", "dims"), [((3,), 2), ((4, 3), 1), ((), 2), ((1, 1, 1), 3)])
def test_learned_values_in_masked_places_train_as_on_one_device(shape: tuple[int, ...], dims: int) -> None:
    torch.manual_seed(0)
    model, target = Tokens(shape).double(), torch.randn(5, 4, 3).double()
    masks = torch.rand(5, 4, 3) < 0.5
    mask = {1: masks[:, 0, 0], 2: masks[:, :, 0], 3: masks}[dims]
    batches = [{"x": torch.randn(5, 4, 3).double(), "mask": mask, "target": target} for _ in range(2)]

    class Own(Tokens):
        def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            y[mask] = self.token.tanh()
            return y

    own = Own(shape).double()
    own.load_state_dict(model.state_dict())
    chosen = model if dims == 2 else own
    assert_trains_alike(chosen, SLOW_SGD, batches, 2, F.mse_loss)


@pytest.mark.fast
def test_an_argument_whose_gradient_is_asked_for_is_refused() -> None:
    class Asks(Parts):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.requires_grad = True
            return self.layer(x)

    model = Asks(layer=nn.Linear(3, 3))
    step = compiled_step(model, F.mse_loss, optimizer=SLOW_SGD, capture="dynamo")
    with step, pytest.raises(mirrorc.CaptureError, match="requires_grad of a tensor that was there before it"):
        step(torch.ones(4, 3), target=torch.ones(4, 3))


@pytest.mark.fast
def test_a_ctc_loss_is_refused_by_name() -> None:
    labels = {
        "labels": torch.randint(1, 4, (4, 3)),
        "lengths": torch.full((4,), 9),
        "sizes": torch.tensor([3, 2, 3, 1]),
    }

    def loss(y: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
        return F.ctc_loss(
            y.log_softmax(-1).transpose(0, 1), target["labels"], target["lengths"], target["sizes"], reduction="mean"
        )

    model = nn.Linear(3, 4)
    step = compiled_step(model, loss, optimizer=SLOW_SGD, capture="dynamo")
    with step, pytest.raises(mirrorc.CaptureError, match="a CTC loss needs memory that depends on the values"):
        step(torch.ones(4, 9, 3), target=labels)
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES)).train()
    step = compiled_step(model, optimizer=SLOW_SGD, loss_reduction="sum", capture="dynamo")
    with step, pytest.raises(mirrorc.CaptureError, match="its CTC loss looks at the labels"):
        step(torch.ones(4, 220), labels=labels["labels"])


def test_segformer_trains_as_it_comes() -> None:
    sizes: dict[str, Any] = {"depths": [1, 1], "sr_ratios": [2, 1], "hidden_sizes": [4, 4], "patch_sizes": [3, 3]}
    sizes |= {"strides": [2, 2], "num_attention_heads": [1, 2], "mlp_ratios": [2, 2], "decoder_hidden_size": 4}
    batch = {"pixel_values": torch.randn(4, 3, 8, 8), "labels": torch.randint(0, 3, (4, 8, 8))}
    losses = []
    for _ in range(2):
        torch.manual_seed(0)
        config = SegformerConfig(num_encoder_blocks=2, num_labels=3, **sizes)
        assert config.drop_path_rate > 0 and config.classifier_dropout_prob > 0
        model = SegformerForSemanticSegmentation(config).train()
        with compiled_step(model, optimizer=torch.optim.AdamW(model.parameters(), lr=0.01)) as step:
            losses.append([step(**batch).item() for _ in range(8)])
    assert losses[0] == losses[1] and losses[0][-1] < losses[0][0]
