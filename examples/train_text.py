"""Trains a byte-level GPT on the source text of Python's own standard library, on several devices.

    python examples/train_text.py                          # two logical CPUs
    python examples/train_text.py --devices cuda:0 cuda:1

Prints the compiled schedule, where the time of a step goes, the first losses beside those of plain PyTorch on one device, the
loss on held-out files against that of byte frequencies alone, and a sample of text.
"""

from __future__ import annotations

import argparse
import copy
import math
import sysconfig
import time
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

import mirrorc

NUM_COMPARED = 8
"""Steps that are taken in plain PyTorch, too."""


@dataclass(frozen=True)
class GPTConfig:
    """Sizes of a `GPT`."""

    num_layers: int = 3
    num_heads: int = 4
    width: int = 128
    context: int = 128
    vocabulary: int = 256


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each on a normalized input, added to it."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.num_heads = config.num_heads
        self.attention_norm = nn.LayerNorm(config.width)
        self.attention_in = nn.Linear(config.width, 3 * config.width)
        self.attention_out = nn.Linear(config.width, config.width)
        self.mlp_norm = nn.LayerNorm(config.width)
        self.mlp_in = nn.Linear(config.width, 4 * config.width)
        self.mlp_out = nn.Linear(4 * config.width, config.width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        qkv = self.attention_in(self.attention_norm(x)).view(batch, tokens, 3, self.num_heads, width // self.num_heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.attention_out(attended.transpose(1, 2).reshape(batch, tokens, width))
        return x + self.mlp_out(F.gelu(self.mlp_in(self.mlp_norm(x)), approximate="tanh"))


class GPT(nn.Module):
    """A decoder-only transformer over bytes; tokens [batch, tokens] to logits [batch, tokens, vocabulary]."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Parameter(torch.randn(config.context, config.width) * 0.02)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocabulary, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def next_byte_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats per byte."""
    return F.cross_entropy(logits.flatten(0, 1), target.flatten())


@dataclass(frozen=True)
class Corpus:
    """Bytes to train on, and bytes of other files to test on; both 1-D uint8."""

    train: torch.Tensor
    held_out: torch.Tensor

    def byte_frequency_loss(self) -> float:
        """The held-out loss of a model that knows how frequent each byte is, in nats per byte."""
        counts = torch.bincount(self.train.long(), minlength=256).double() + 1
        return float(-(counts / counts.sum()).log()[self.held_out.long()].mean())


def standard_library(max_bytes: int) -> Corpus:
    """The source files of this machine's Python; every tenth file is held out."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    for i, file in enumerate(files):
        parts[i % 10 == 9].append(file.read_bytes())
    train, held_out = (torch.frombuffer(bytearray(b"".join(part)), dtype=torch.uint8) for part in parts)
    return Corpus(train[:max_bytes], held_out[: max_bytes // 10])


def windows(text: torch.Tensor, starts: torch.Tensor, context: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and targets [len(starts), context]: the bytes from each start, and those one further on."""
    index = starts[:, None] + torch.arange(context + 1)
    taken = text[index].long()
    return taken[:, :-1], taken[:, 1:]


@torch.no_grad()
def held_out_loss(model: GPT, corpus: Corpus, device: torch.device, num_windows: int = 64) -> float:
    """Mean loss over windows spread evenly over the held-out text."""
    context = model.config.context
    starts = torch.linspace(0, len(corpus.held_out) - context - 2, num_windows).long()
    losses = []
    for chunk in starts.split(32):
        x, y = windows(corpus.held_out, chunk, context)
        losses.append(next_byte_loss(model(x.to(device)), y.to(device)) * len(chunk))
    return float(torch.stack(losses).sum()) / num_windows


@torch.no_grad()
def sample(model: GPT, prompt: str, num_bytes: int, device: torch.device) -> str:
    """Continues a prompt, byte by byte, at temperature 0.7."""
    tokens = torch.tensor([list(prompt.encode())], device=device)
    for _ in range(num_bytes):
        logits = model(tokens[:, -model.config.context :])[:, -1]
        tokens = torch.cat([tokens, torch.multinomial((logits / 0.7).softmax(-1), 1)], dim=1)
    return bytes(tokens[0].tolist()).decode(errors="replace")


def learning_rate(step: int, num_steps: int) -> float:
    """Warm-up, then a cosine to a tenth; as a factor."""
    warm_up = max(1, num_steps // 20)
    if step < warm_up:
        return (step + 1) / warm_up
    return 0.1 + 0.45 * (1 + math.cos(math.pi * (step - warm_up) / max(1, num_steps - warm_up)))


def make_optimizer(
    model: nn.Module, num_steps: int
) -> tuple[torch.optim.Optimizer, torch.optim.lr_scheduler.LRScheduler]:
    """AdamW and its schedule."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    return optimizer, torch.optim.lr_scheduler.LambdaLR(optimizer, lambda i: learning_rate(i, num_steps))


def plain_losses(model: GPT, batches: list[tuple[torch.Tensor, torch.Tensor]], num_steps: int) -> list[float]:
    """The losses of the same batches in plain PyTorch, on one device; changes the model."""
    optimizer, scheduler = make_optimizer(model, num_steps)
    losses = []
    for x, y in batches:
        loss = next_byte_loss(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss.detach()))
    return losses


def save_curve(losses: list[float], checks: list[tuple[int, float]], baseline: float, path: Path) -> None:
    """Draws the training and held-out losses."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(7, 4))
    axes.plot(losses, linewidth=0.8, alpha=0.7, label="training")
    axes.plot(*zip(*checks, strict=True), marker="o", label="held out")
    axes.axhline(baseline, color="grey", linestyle="--", label="byte frequencies alone")
    axes.set(xlabel="step", ylabel="loss, nats per byte", ylim=(0, None))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def parse_arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--steps", type=int, default=240)
    parser.add_argument("--batch", type=int, default=32, help="windows per step, over all devices")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--max-bytes", type=int, default=8_000_000)
    parser.add_argument("--curve", type=Path, default=Path("out/train_text.png"))
    return parser.parse_args()


def main() -> None:
    """Trains, and shows what came of it."""
    options = parse_arguments()
    torch.manual_seed(options.seed)
    started = time.perf_counter()
    corpus = standard_library(options.max_bytes)
    model = GPT(GPTConfig())
    context = model.config.context
    plain_model = copy.deepcopy(model)
    optimizer, scheduler = make_optimizer(model, options.steps)
    size = sum(parameter.numel() for parameter in model.parameters()) / 1e6
    print(
        f"{len(corpus.train) / 1e6:.1f} MB of text, {len(corpus.held_out) / 1e6:.1f} MB held out; {size:.1f} M parameters"
    )

    def draw_batch() -> tuple[torch.Tensor, torch.Tensor]:
        return windows(corpus.train, torch.randint(len(corpus.train) - context - 1, (options.batch,)), context)

    with mirrorc.compile(
        model,
        devices=options.devices,
        optimizer=optimizer,
        loss_fn=next_byte_loss,
        compiler=mirrorc.Compiler(backend=options.backend),
    ) as step:
        x, y = draw_batch()
        print(f"\n{step.prepare(x, target=y)}")
        print(f"compiled in {time.perf_counter() - started:.0f} s\n", flush=True)
        home = next(model.parameters()).device
        baseline, losses, checks = corpus.byte_frequency_loss(), [], [(0, held_out_loss(model, corpus, home))]
        first_batches = []
        progress = tqdm(range(options.steps), unit="step", dynamic_ncols=True)
        for i in progress:
            begun = time.perf_counter()
            x, y = draw_batch()
            losses.append(float(step(x, target=y)))
            if i < NUM_COMPARED:
                first_batches.append((x, y))
            scheduler.step()
            rate = x.numel() / (time.perf_counter() - begun)
            progress.set_postfix_str(f"loss {losses[-1]:.3f}, {rate:,.0f} tokens/s")
            if (i + 1) % max(1, options.steps // 5) == 0:
                checks.append((i + 1, held_out_loss(model, corpus, home)))
        print(f"\n{step.explain()}")
    plain = plain_losses(plain_model, first_batches, options.steps)
    print(f"\nloss on {len(options.devices)} devices   " + " ".join(f"{loss:.5f}" for loss in losses[: len(plain)]))
    print("on one, plain     " + " ".join(f"{loss:.5f}" for loss in plain))
    save_curve(losses, checks, baseline, options.curve)
    print(f"\nheld-out loss {checks[-1][1]:.3f} nats per byte; byte frequencies alone {baseline:.3f}")
    print(f"loss curve in {options.curve}\n\n--- a sample ---")
    print(sample(model, "def read_file(path", 300, home))
    print(f"--- all in {time.perf_counter() - started:.0f} s ---")


if __name__ == "__main__":
    main()
