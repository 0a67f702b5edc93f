"""Compares the code of one device with torch.compile's: the processor time of a step, and of its generated kernels.

    python benchmarks/kernels.py [--workloads resnet-16 words-16k] [--steps 12] [--calls]

mirrorc trains each workload on one logical CPU, and torch.compile compiles the model with its loss; both with one thread and
fused AdamW, from the same weights, in turns in one process. Prints a Markdown table. Processor time depends less than time on
what else the machine does. The kernels' own time, as torch's profiler tells it, is that of the generated code without
the library calls in it, such as matrix products: what fusion and vectorization make better or worse. ``--calls`` lists the
calls that take the most time on each side.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile
from workloads import WORKLOADS, Workload

import mirrorc

_GENERATED = "## Call CompiledFxGraph"  # how Inductor marks a call of its code
_PROFILED = 3  # steps


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


def _tokens(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randint(0, 256, (n, 50)), torch.randint(0, 10, (n,))


def _pairs(n: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(n, 3, 32, 32), torch.randn(n, 3, 32, 32)


_IMAGES = WORKLOADS["resnet-16"].make_batch
MODELS = {name: workload for name, workload in WORKLOADS.items() if name != "tiny"} | {
    "lstm-32": Workload("lstm-32", Recurrent, F.cross_entropy, _tokens, 32),
    "norms-16": Workload("norms-16", Norms, F.cross_entropy, _IMAGES, 16),
    "patches-16": Workload("patches-16", Patches, F.cross_entropy, _IMAGES, 16),
    "depthwise-16": Workload("depthwise-16", Depthwise, F.cross_entropy, _IMAGES, 16),
    "unet-8": Workload("unet-8", UpAndDown, F.mse_loss, _pairs, 8),
    "gated-16": Workload("gated-16", Gated, F.cross_entropy, _tokens, 16),
}


def steps_of(workload: Workload) -> dict[str, Callable[[], object]]:
    """A step of each side, from equal weights on the same batch."""
    x, y = workload.make_batch(workload.per_replica)
    torch.manual_seed(0)
    model, same = workload.make_model(), workload.make_model()
    same.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-3, fused=True) for one in (model, same)]
    step = mirrorc.compile(model, ["cpu:0"], optimizer=optimizers[0], loss_fn=workload.loss_fn)
    compiled = torch.compile(lambda x, y: workload.loss_fn(same(x), y))

    def theirs() -> None:
        compiled(x, y).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()

    return {"mirrorc": lambda: step(x, target=y), "torch.compile": theirs}


def profiled(step: Callable[[], object], num_calls: int) -> tuple[float, str]:
    """The seconds of a step's generated kernels, and a table of its most expensive calls."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        for _ in range(_PROFILED):
            step()
    averages = found.key_averages()
    kernels = sum(event.self_cpu_time_total for event in averages if event.key.startswith(_GENERATED))
    table = averages.table(sort_by="self_cpu_time_total", row_limit=num_calls, max_name_column_width=60)
    return kernels / _PROFILED / 1e6, table


def main() -> None:
    """Measures what the command line names and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workloads", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--steps", type=int, default=12, help="of each side")
    parser.add_argument("--calls", action="store_true", help="list the most expensive calls")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print("| workload | mirrorc, ms | torch.compile, ms | ratio | kernels alone: mirrorc, ms | torch.compile, ms |")
    print("|---|---|---|---|---|---|")
    for name in options.workloads:
        torch._dynamo.reset()
        steps = steps_of(MODELS[name])
        seconds: dict[str, list[float]] = {side: [] for side in steps}
        for turn in range(options.steps + 3):
            for side, step in steps.items():
                begun = time.process_time()
                step()
                if turn >= 3:
                    seconds[side].append(time.process_time() - begun)
        own, other = (1e3 * statistics.median(times) for times in seconds.values())
        found = {side: profiled(step, 20) for side, step in steps.items()}
        kernels = " | ".join(f"{1e3 * seconds:.2f}" for seconds, _ in found.values())
        print(f"| {name} | {own:.1f} | {other:.1f} | {own / other:.3f} | {kernels} |", flush=True)
        for side, (_, table) in found.items() if options.calls else ():
            print(f"{side}:\n{table}", flush=True)


if __name__ == "__main__":
    main()
