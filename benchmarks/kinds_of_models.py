"""Small models of six kinds, whose generated code is compared with torch.compile's, and whose steps with all contenders."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


class Recurrent(nn.Module):
    """Two layers of an LSTM over 50 tokens of width 64, and a linear layer on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.head = (
            nn.Embedding(256, 64),
            nn.LSTM(64, 128, 2, batch_first=True),
            nn.Linear(128, 10),
        )

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.lstm(self.embedding(tokens))[0][:, -1])


class Norms(nn.Module):
    """Convolutions of 64 channels with GroupNorm and SiLU, as in diffusion models."""

    def __init__(self) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, padding=1)]
        for _ in range(4):
            layers += [nn.GroupNorm(8, 64), nn.SiLU(), nn.Conv2d(64, 64, 3, padding=1)]
        self.body, self.head = nn.Sequential(*layers), nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class Patches(nn.Module):
    """A transformer over 64 patches of an image of 32x32: 4 encoder layers of width 192."""

    def __init__(self) -> None:
        super().__init__()
        self.cut = nn.Conv2d(3, 192, 4, 4)
        layer = nn.TransformerEncoderLayer(192, 4, 768, 0.0, F.gelu, batch_first=True, norm_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False), nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.cut(x).flatten(2).transpose(1, 2)).mean(1))


class DepthwiseBlock(nn.Module):
    """A 7x7 convolution of each channel, LayerNorm over channels and two layers, added to the input, as in ConvNeXt."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.spread = nn.Conv2d(channels, channels, 7, padding=3, groups=channels)
        self.mix = nn.Sequential(
            nn.LayerNorm(channels), nn.Linear(channels, 4 * channels), nn.GELU(), nn.Linear(4 * channels, channels)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mix(self.spread(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class Depthwise(nn.Module):
    """Four blocks of 64 channels over 16x16 places."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 64, 2, 2), *(DepthwiseBlock(64) for _ in range(4)))
        self.head = nn.Linear(64, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x).mean((2, 3)))


class UpAndDown(nn.Module):
    """A U-Net of two levels: convolutions with BatchNorm and ReLU, pooling, transposed convolutions and skip connections."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([self._level(3, 32), self._level(32, 64), self._level(64, 128)])
        self.widen = nn.ModuleList([nn.ConvTranspose2d(128, 64, 2, 2), nn.ConvTranspose2d(64, 32, 2, 2)])
        self.up = nn.ModuleList([self._level(128, 64), self._level(64, 32)])
        self.head = nn.Conv2d(32, 3, 1)

    @staticmethod
    def _level(channels_in: int, channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels_in, channels, 3, padding=1), nn.BatchNorm2d(channels), nn.ReLU())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = []
        for level in self.down:
            x = level(F.max_pool2d(x, 2) if kept else x)
            kept.append(x)
        for widen, level, same in zip(self.widen, self.up, kept[-2::-1], strict=True):
            x = level(torch.cat([widen(x), same], 1))
        return self.head(x)


class GatedBlock(nn.Module):
    """Causal attention and a gated layer (SwiGLU), each after RMSNorm, as in decoders of today."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norms, self.heads = nn.ModuleList([nn.RMSNorm(width), nn.RMSNorm(width)]), heads
        self.project, self.join = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.narrow = nn.Linear(width, 4 * width, bias=False), nn.Linear(2 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.project(self.norms[0](x)).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.join(F.scaled_dot_product_attention(*parts, is_causal=True).transpose(1, 2).flatten(2))
        gate, value = self.gate(self.norms[1](x)).chunk(2, 2)
        return x + self.narrow(F.silu(gate) * value)


class Gated(nn.Module):
    """Four gated blocks of width 192 over 50 tokens, and a linear layer on the last."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(256, 192), nn.Linear(192, 10)
        self.body = nn.Sequential(*(GatedBlock(192, 4) for _ in range(4)), nn.RMSNorm(192))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(self.embedding(tokens))[:, -1])
