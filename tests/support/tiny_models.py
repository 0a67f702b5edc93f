"""Small models of the kinds that people train, and batches for them; every parameter is random, none all zeros."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
    ViTConfig,
    ViTForImageClassification,
)

Batch = dict[str, Any]
Loss = Callable[[Any, Any], torch.Tensor]


@dataclass(frozen=True)
class TinyModel:
    """A model to test with; ``batch`` gives the arguments of a step from a number of examples, a dtype and a seed."""

    make: Callable[[torch.dtype], nn.Module]
    batch: Callable[[int, torch.dtype, int], Batch]
    loss_fn: Loss | None

    def batches(self, num_examples: int, dtype: torch.dtype, steps: int = 5) -> list[Batch]:
        return [self.batch(num_examples, dtype, seed) for seed in range(steps)]


def randomized(model: nn.Module, dtype: torch.dtype) -> nn.Module:
    """Moves every parameter a little from where it is, biases too: tolerances are relative to the largest entry."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.to(dtype).train()


class Mlp(nn.Module):
    def __init__(self, width: int = 16, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(6, width)
        self.second = nn.Linear(width, width)
        self.last = nn.Linear(width, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.dropout(torch.tanh(self.second(torch.tanh(self.first(x))))))


class ConvNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3)
        self.second = nn.Conv2d(4, 6, 3)
        self.classifier = nn.Linear(6 * 2 * 2, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.max_pool2d(F.gelu(self.first(x)), 2)
        return self.classifier(torch.tanh(self.second(hidden)).flatten(1))


class ResidualBlock(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(x + self.second_norm(self.second(hidden)))


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(4)
        self.blocks = nn.Sequential(ResidualBlock(4), ResidualBlock(4))
        self.classifier = nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.blocks(F.relu(self.stem_norm(self.stem(x))))
        return self.classifier(hidden.mean(dim=(2, 3)))


def _seeded(make: Callable[[], nn.Module]) -> Callable[[torch.dtype], nn.Module]:
    def make_seeded(dtype: torch.dtype) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return randomized(make(), dtype)

    return make_seeded


def make_mlp(dtype: torch.dtype = torch.float64, width: int = 16, dropout: float = 0.0) -> nn.Module:
    return _seeded(lambda: Mlp(width, dropout))(dtype)


def mlp_batch(num_examples: int, dtype: torch.dtype = torch.float64, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_examples, 6, generator=generator, dtype=dtype)
    return {"x": x, "target": torch.randint(3, (num_examples,), generator=generator)}


def _image_batch(channels: int, size: int) -> Callable[[int, torch.dtype, int], Batch]:
    def batch(num_examples: int, dtype: torch.dtype, seed: int) -> Batch:
        generator = torch.Generator().manual_seed(seed)
        x = torch.randn(num_examples, channels, size, size, generator=generator, dtype=dtype)
        return {"x": x, "target": torch.randint(5, (num_examples,), generator=generator)}

    return batch


def _gpt2() -> nn.Module:
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=61, n_positions=16, n_embd=16, n_layer=2, n_head=2, **dropout))


def _bert() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    config = BertConfig(vocab_size=61, max_position_embeddings=16, num_labels=3, **sizes, **dropout)
    return BertForSequenceClassification(config)


def _vit() -> nn.Module:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
    return ViTForImageClassification(ViTConfig(image_size=8, patch_size=4, num_labels=5, **sizes, **dropout))


def _tokens(num_examples: int, seed: int) -> torch.Tensor:
    return torch.randint(61, (num_examples, 12), generator=torch.Generator().manual_seed(seed))


def _gpt2_batch(num_examples: int, dtype: torch.dtype, seed: int) -> Batch:
    return {"input_ids": _tokens(num_examples, seed), "labels": _tokens(num_examples, seed)}


def _gpt2_logits_batch(num_examples: int, dtype: torch.dtype, seed: int) -> Batch:
    return {"input_ids": _tokens(num_examples, seed), "target": _tokens(num_examples, seed)}


def _bert_batch(num_examples: int, dtype: torch.dtype, seed: int) -> Batch:
    tokens = _tokens(num_examples, seed)
    mask = torch.ones_like(tokens)
    mask[::2, 9:] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens[:, 0] % 3}


def _vit_batch(num_examples: int, dtype: torch.dtype, seed: int) -> Batch:
    batch = _image_batch(3, 8)(num_examples, dtype, seed)
    return {"pixel_values": batch["x"], "labels": batch["target"]}


def next_token_loss(output: Any, tokens: torch.Tensor) -> torch.Tensor:
    """The language model's loss, in the dtype of its logits (Hugging Face computes its own in float32)."""
    return F.cross_entropy(output.logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())


MODELS = {
    "mlp": TinyModel(make_mlp, mlp_batch, F.cross_entropy),
    "conv": TinyModel(_seeded(ConvNet), _image_batch(1, 10), F.cross_entropy),
    "resnet": TinyModel(_seeded(ResNet), _image_batch(3, 8), F.cross_entropy),
    "gpt2": TinyModel(_seeded(_gpt2), _gpt2_logits_batch, next_token_loss),
    "gpt2-own-loss": TinyModel(_seeded(_gpt2), _gpt2_batch, None),
    "bert": TinyModel(_seeded(_bert), _bert_batch, None),
    "vit": TinyModel(_seeded(_vit), _vit_batch, None),
}
