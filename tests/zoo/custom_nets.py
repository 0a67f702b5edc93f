"""Nets as people write them themselves."""

from typing import Any

import torch
import torch.nn.functional as F
from small_modules import Parts
from torch import nn
from torch.utils.checkpoint import checkpoint
from zoo_models import BATCH_NORM, CLASSES, Batch, ZooModel, classes, features, numbers

import mirrorc


def grids(num_examples: int, generator: torch.Generator) -> Batch:
    x = numbers(num_examples, generator, 2, 8, 8)
    return {"x": x, "target": numbers(num_examples, generator, 2, 8, 8)}


class Unet(nn.Module):
    """Goes down and up again, with a shortcut."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.low = nn.Conv2d(2, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1)
        self.up = nn.ConvTranspose2d(4, 4, 2, stride=2)
        self.norm, self.last = nn.GroupNorm(2, 4), nn.Conv2d(8, 2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        high = F.gelu(self.norm(self.down(x)))
        return self.last(torch.cat([high, self.up(F.gelu(self.low(F.avg_pool2d(high, 2))))], 1))


class Fourier(Parts):
    """A Fourier neural operator: a product with complex weights among the lowest frequencies."""

    def __init__(self) -> None:
        super().__init__(weight=nn.Parameter(torch.randn(2, 2, 3, 3, 2) * 0.3), skip=nn.Conv2d(2, 2, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spectrum = torch.fft.rfft2(x)
        low = torch.einsum("bixy,ioxy->boxy", spectrum[:, :, :3, :3], torch.view_as_complex(self.weight))
        wide = F.pad(torch.view_as_real(low), (0, 0, 0, spectrum.size(-1) - 3, 0, spectrum.size(-2) - 3))
        return torch.fft.irfft2(torch.view_as_complex(wide.contiguous()), s=x.shape[-2:]) + self.skip(x)


class Mixer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(2, 6, 4, stride=4)
        self.places, self.channels = nn.Linear(4, 4), nn.Linear(6, 6)
        self.norm, self.head = nn.LayerNorm(6), nn.Linear(6, 128)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.patches(x).flatten(2)
        h = (h + self.places(h).relu()).mT
        return self.head((h + self.channels(self.norm(h)).relu()).mean(1)).view_as(x)


class Flow(nn.Module):
    """A normalizing flow of coupling layers; gives the negative log-likelihood."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 6)) for _ in range(2))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(len(x), dtype=x.dtype)
        for layer in self.layers:
            kept, moved = x.chunk(2, -1)
            scale, shift = layer(kept).chunk(2, -1)
            x, total = torch.cat([moved * scale.tanh().exp() + shift, kept], -1), total + scale.tanh().sum(-1)
        return (0.5 * x.square().sum(-1) - total).mean()


class Graph(Parts):
    """Passes messages along the edges of a graph for each example."""

    def __init__(self) -> None:
        super().__init__(own=nn.Linear(4, 8), other=nn.Linear(4, 8), head=nn.Linear(8, CLASSES))

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        messages = self.other(x).gather(1, edges[..., 0, None].expand(-1, -1, 8))
        sums = torch.zeros_like(self.own(x)).scatter_add(1, edges[..., 1, None].expand(-1, -1, 8), messages)
        return self.head((self.own(x) + sums).relu().mean(1))


def graphs(num_examples: int, generator: torch.Generator) -> Batch:
    x = numbers(num_examples, generator, 5, 4)
    edges = torch.randint(5, (num_examples, 7, 2), generator=generator)
    return {"x": x, "edges": edges, "target": classes(num_examples, generator)}


class Recommender(nn.Module):
    """Tables of categories, their products in pairs, and numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(9, 4) for _ in range(3))
        self.numbers, self.head = nn.Linear(6, 4), nn.Linear(4 + 6, 1)

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        rows = torch.stack([self.numbers(x), *(table(ids[:, i]) for i, table in enumerate(self.tables))], 1)
        products = (rows @ rows.mT)[:, *torch.triu_indices(4, 4, 1)]
        return self.head(torch.cat([rows[:, 0], products], -1)).squeeze(-1)


def clicks(num_examples: int, generator: torch.Generator) -> Batch:
    batch = features(num_examples, generator)
    clicked = torch.randint(2, (num_examples,), generator=generator).double()
    return {"x": batch["x"], "ids": torch.randint(9, (num_examples, 3), generator=generator), "target": clicked}


class Ode(Parts):
    """Integrates a differential equation by Runge and Kutta's method, in steps that are checkpoints."""

    def __init__(self) -> None:
        super().__init__(first=nn.Linear(6, 12), second=nn.Linear(12, 6), head=nn.Linear(6, CLASSES))

    def slope(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x).tanh())

    def step(self, x: torch.Tensor) -> torch.Tensor:
        a = self.slope(x)
        b = self.slope(x + 0.1 * a)
        c = self.slope(x + 0.1 * b)
        return x + 0.2 / 6 * (a + 2 * b + 2 * c + self.slope(x + 0.2 * c))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = checkpoint(self.step, x, use_reentrant=False)
        return self.head(x)


class FixedPoint(Parts):
    """Repeats a layer until it changes little, and takes one more step with a gradient."""

    def __init__(self) -> None:
        super().__init__(own=nn.Linear(6, 6), given=nn.Linear(6, 6), head=nn.Linear(6, CLASSES))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = []
        for row in x.split(1):
            with torch.no_grad():
                z = torch.zeros_like(row)
                for _ in range(50):
                    z, before = (0.3 * self.own(z) + self.given(row)).tanh(), z
                    if (z - before).abs().max() < 1e-3:
                        break
            rows.append((0.3 * self.own(z) + self.given(row)).tanh())
        return self.head(torch.cat(rows))


class Capsules(Parts):
    """Routes capsules by agreement."""

    def __init__(self) -> None:
        super().__init__(weight=nn.Parameter(torch.randn(2, CLASSES, 3, 4) * 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        votes = torch.einsum("nij,icjk->nick", x.view(-1, 2, 3), self.weight)
        logits = torch.zeros_like(votes[..., 0])
        for _ in range(2):
            sums = (logits.softmax(2)[..., None] * votes).sum(1)
            squares = sums.square().sum(-1, keepdim=True)
            sums = sums * squares.sqrt() / (1 + squares)
            logits = logits + (votes * sums[:, None]).sum(-1)
        return sums.norm(dim=-1)


class Rounded(torch.autograd.Function):
    """Rounds, with the gradient of the identity."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.round()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Quantized(Parts):
    """Finds the nearest entry of a codebook, and lets gradients through."""

    def __init__(self) -> None:
        super().__init__(encoder=nn.Linear(6, 4), book=nn.Embedding(8, 4), head=nn.Linear(4, CLASSES))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        h = Rounded.apply(self.encoder(x) * 8) / 8
        entry = self.book(torch.cdist(h, self.book.weight).argmin(-1))
        losses = F.mse_loss(entry, h.detach()) + 0.25 * F.mse_loss(h, entry.detach())
        return losses + F.cross_entropy(self.head(h + (entry - h).detach()), target)


class Contrastive(Parts):
    """Compares two views of each example with those of all examples of the batch, on all devices."""

    def __init__(self) -> None:
        super().__init__(one=nn.Linear(6, 4), other=nn.Linear(6, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        one, other = F.normalize(self.one(x), dim=-1), F.normalize(self.other(y), dim=-1)
        everyone = mirrorc.all_gather(other)
        losses = -(one * other).sum(-1) / 0.1 + (one @ everyone.mT / 0.1).logsumexp(-1)
        return losses.mean()


def views(num_examples: int, generator: torch.Generator) -> Batch:
    return {key: numbers(num_examples, generator, 6) for key in "xy"}


class Penalized(Parts):
    """A critic whose gradient by its input is kept near 1 (`torch.autograd.grad` with ``create_graph``)."""

    def __init__(self) -> None:
        super().__init__(net=nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1)))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        between = (0.3 * x + 0.7 * y).requires_grad_()
        (slope,) = torch.autograd.grad(self.net(between).sum(), between, create_graph=True)
        return (self.net(x) - self.net(y)).mean() + (slope.norm(dim=-1) - 1).square().mean()


class Tree(Parts):
    """Reads an expression by recursion over a tree that the data describe."""

    def __init__(self) -> None:
        super().__init__(leaf=nn.Embedding(9, 6), join=nn.Linear(12, 6), head=nn.Linear(6, CLASSES))

    def read(self, words: torch.Tensor, cuts: list[int]) -> torch.Tensor:
        if len(words) == 1:
            return self.leaf(words[0])
        cut = 1 + cuts[len(words) - 2] % (len(words) - 1)
        return self.join(torch.cat([self.read(words[:cut], cuts), self.read(words[cut:], cuts)])).tanh()

    def forward(self, words: torch.Tensor, cuts: torch.Tensor) -> torch.Tensor:
        return self.head(torch.stack([self.read(own, c) for own, c in zip(words, cuts.tolist(), strict=True)]))


def trees(num_examples: int, generator: torch.Generator) -> Batch:
    words, cuts = (torch.randint(9, (num_examples, 5), generator=generator) for _ in range(2))
    return {"words": words, "cuts": cuts, "target": classes(num_examples, generator)}


class EarlyExit(nn.Module):
    """Runs further layers only for the examples of which it is unsure."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 8)
        self.exits = nn.ModuleList(nn.Linear(8, CLASSES) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.first(x).tanh()
        scores = self.exits[0](h)
        unsure = scores.softmax(-1).max(-1).values < 0.5
        if unsure.any():
            scores = scores.index_put((unsure.nonzero().flatten(),), self.exits[1](self.second(h[unsure]).tanh()))
        return scores


class PerExample(Parts):
    """Adds the squared norm of each example's gradient, by vmap of a gradient."""

    def __init__(self) -> None:
        super().__init__(weight=nn.Parameter(torch.randn(6) * 0.5))

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        def loss(weight: torch.Tensor, own: torch.Tensor, label: torch.Tensor) -> torch.Tensor:
            return F.softplus(-(weight @ own) * (label - 1.0))

        losses = torch.vmap(loss, (None, 0, 0))(self.weight, x, target.to(x.dtype))
        slopes = torch.vmap(torch.func.grad(loss), (None, 0, 0))(self.weight, x, target.to(x.dtype))
        return losses.mean() + 0.1 * slopes.square().sum(-1).mean()


class Normalized(nn.Module):
    """Layers of a convolution, a BatchNorm and an activation."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, padding=1),
            nn.BatchNorm2d(4),
            nn.ReLU6(),
            nn.Conv2d(4, 4, 3, padding=1, groups=4),
            nn.BatchNorm2d(4),
            nn.Hardswish(),
            nn.Conv2d(4, 2, 1),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x)


MODELS = [
    ZooModel("U-Net", Unet, grids, F.mse_loss, run_by="test"),
    ZooModel("Fourier neural operator", Fourier, grids, F.mse_loss, run_by="test"),
    ZooModel("MLP-Mixer", Mixer, grids, F.l1_loss, run_by="test-slow"),
    ZooModel("convolutions with BatchNorm", Normalized, grids, F.mse_loss, couples=BATCH_NORM, run_by="test"),
    ZooModel("normalizing flow", Flow, features, run_by="test-slow"),
    ZooModel("graph net", Graph, graphs, F.cross_entropy, run_by="test-slow"),
    ZooModel("recommender", Recommender, clicks, F.binary_cross_entropy_with_logits, run_by="test"),
    ZooModel("neural ODE with checkpoints", Ode, features, F.cross_entropy, run_by="test-slow"),
    ZooModel("capsules", Capsules, features, F.multi_margin_loss, run_by="test-slow"),
    ZooModel("quantized codes", Quantized, features, run_by="test"),
    ZooModel("contrast over the whole batch", Contrastive, views, run_by="test"),
    ZooModel("gradients of each example by vmap", PerExample, features, run_by="test-slow"),
    ZooModel(
        "fixed point",
        FixedPoint,
        features,
        F.cross_entropy,
        rung="autograd",
        why="it repeats a layer until it has converged",
        run_by="test",
    ),
    ZooModel(
        "critic with a gradient penalty",
        Penalized,
        views,
        rung="autograd",
        why="it takes a gradient in forward, by torch.autograd.grad",
        run_by="test",
    ),
    ZooModel(
        "tree of words",
        Tree,
        trees,
        F.cross_entropy,
        rung="autograd",
        why="the data say in which order it reads",
        run_by="test",
    ),
    ZooModel(
        "early exit",
        EarlyExit,
        features,
        F.cross_entropy,
        rung="autograd",
        why="it asks whether some example is unsure",
        run_by="test",
    ),
]
