"""Speech models of Hugging Face train as they come, with masked spans, layers that are left out and all dropouts."""

from __future__ import annotations

import functools
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import assert_same_parameters, assert_trains_alike, train_mirrored, train_on_one_device
from torch import nn
from transformers import (
    HubertConfig,
    HubertForSequenceClassification,
    SegformerConfig,
    SegformerForSemanticSegmentation,
    Wav2Vec2Config,
    Wav2Vec2ForCTC,
    Wav2Vec2ForSequenceClassification,
)
from twins import Twins, compiled_step

import mirrorc

SGD = functools.partial(torch.optim.SGD, lr=0.05)
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


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_runs"), [("wav2vec2", 1), ("wav2vec2", 2), ("hubert", 1)])
def test_speech_models_train_as_they_come(kind: str, num_runs: int) -> None:
    losses = []
    for _ in range(num_runs):
        model, batch = speech(kind, mask_time_prob=0.5, mask_time_length=2), sounds(is_padded=num_runs == 1)
        with (
            warnings.catch_warnings(),
            compiled_step(model, optimizer=SGD(model.parameters(), lr=0.0)) as step,
        ):
            warnings.simplefilter("error")
            losses.append([step(**batch).item() for _ in range(2)])
    assert losses[0] == losses[-1] and len(set(losses[0])) == 2


@pytest.mark.slow
def test_masked_features_train_as_on_one_device() -> None:
    masked = {"mask_time_prob": 1.0, "mask_time_length": 1, "mask_feature_prob": 0.01, "mask_feature_length": 1}
    model = speech(**masked, **NO_DROPOUT, mask_feature_min_masks=8).double()
    batches = [{**sounds(), "input_values": torch.randn(5, 220).double()} for _ in range(2)]
    mirrored, single = train_mirrored(model, SGD, batches, 2), train_on_one_device(model, SGD, batches)
    assert_same_parameters(mirrored.model, single.model, 1e-9)


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 3])
def test_layers_are_left_out_as_on_one_device(num_devices: int) -> None:
    """Each of two layers is drawn before a step; of six steps, some have both, one or none."""
    options = {**NO_DROPOUT, "layerdrop": 0.5, "num_hidden_layers": 2, "mask_time_prob": 0.0}
    with Twins(speech(**options).double(), SGD, devices=num_devices) as pair:
        for seed in range(6):
            batch = {name: v.double() if v.is_floating_point() else v for name, v in sounds().items()}
            torch.manual_seed(seed)
            loss = pair.step(**batch)
            torch.manual_seed(seed)
            torch.testing.assert_close(loss, pair.plain(**batch), rtol=1e-10, atol=0)
        assert_same_parameters(pair.model, pair.twin, 1e-9)


class Tokens(nn.Module):
    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.first, self.token = nn.Linear(3, 3), nn.Parameter(torch.randn(shape))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        y = self.first(x)
        y[mask] = self.token.tanh()
        y[mask[:, :1].expand(-1, y.size(1))] = 0.5
        return y


@pytest.mark.slow
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
    assert_trains_alike(chosen, SGD, batches, 2, F.mse_loss)


def test_an_argument_whose_gradient_is_asked_for_is_refused() -> None:
    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.requires_grad = True
            return self.layer(x)

    model = Asks()
    step = compiled_step(model, F.mse_loss, optimizer=SGD, capture="dynamo")
    with step, pytest.raises(mirrorc.CaptureError, match="requires_grad of a tensor that was there before it"):
        step(torch.ones(4, 3), target=torch.ones(4, 3))


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
    step = compiled_step(model, loss, optimizer=SGD, capture="dynamo")
    with step, pytest.raises(mirrorc.CaptureError, match="a CTC loss needs memory that depends on the values"):
        step(torch.ones(4, 9, 3), target=labels)
    model = Wav2Vec2ForCTC(Wav2Vec2Config(**SIZES)).train()
    step = compiled_step(model, optimizer=SGD, loss_reduction="sum", capture="dynamo")
    with step, pytest.raises(mirrorc.CaptureError, match="its CTC loss looks at the labels"):
        step(torch.ones(4, 220), labels=labels["labels"])


@pytest.mark.slow
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
