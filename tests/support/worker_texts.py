"""Ragged text on which workers train, each with lengths of its own, and the same in one process; for processes of `outcomes`."""

import contextlib
import warnings
from typing import Any

import torch
from torch import nn
from torch.nn import functional

import mirrorc
from mirrorc.options.table import grouped

WORDS = 50


class Reader(nn.Module):
    """Pools what it has read of a text.

    Args:
        width: of the hidden layer; of 2800 units, gradients are large enough to be sent as factors.
        attends: whether words attend to each other; the graph for one text makes gradients in another order than for several.
    """

    def __init__(
        self, width: int = 12, *, takes_rows: bool = False, attends: bool = False, draws: bool = False
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(WORDS, 48, sparse=takes_rows)
        dropped = 0.2 if draws else 0.0
        self.attention = nn.MultiheadAttention(48, 2, dropout=dropped, batch_first=True) if attends else None
        self.hidden, self.head, self.draws = nn.Linear(48, width), nn.Linear(width, 5), draws

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        words = self.tokens(x)
        if self.attention is not None:
            words = words + self.attention(words, words, words, need_weights=False)[0]
        hidden = torch.tanh(self.hidden(words))
        if self.draws:
            hidden = functional.dropout(hidden, 0.2)
        return self.head(hidden.amax(1) + hidden.mean(1))


def made(given: dict[str, Any]) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = Reader(**given.get("model", {})).double()
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batch(number: int, rank: int, sizes: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """As many texts as the first size, of as many words as the second."""
    generator = torch.Generator().manual_seed(100 * number + rank)
    x = torch.randint(WORDS, tuple(sizes), generator=generator)
    return x, x[:, 0] % 5


def train(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """Trains as one of the workers; ``batches`` has the sizes of each worker's batch, by call, none for one that has left."""
    model, optimizer = made(given)
    options = {"backend": "eager", "timeout": 100.0, "dynamic": None, **given.get("options", {})}
    losses = []
    torch.manual_seed(1 + rank)  # the chief's stream is that of all
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there are many sizes
        with mirrorc.compile(
            model, given["devices"][rank], optimizer=optimizer, loss_fn=nn.CrossEntropyLoss(), **grouped(options)
        ) as step:
            with step.join() if given.get("joins") else contextlib.nullcontext():
                for number, sizes in enumerate(given["batches"]):
                    if not sizes[rank]:
                        break
                    x, y = batch(number, rank, sizes[rank])
                    losses.append(step(x, target=y).item())
            x, y = batch(0, rank, next(sizes[rank] for sizes in reversed(given["batches"]) if sizes[rank]))
            program = step.prepare(x, target=y)
            return {
                "losses": losses,
                "programs": step._specializer.num_programs,
                "text": program.to_text(),
                "values": {name: value.flatten().tolist() for name, value in model.state_dict().items()},
            }


def in_one_process(given: dict[str, Any]) -> tuple[list[float], dict[str, list[float]]]:
    """The losses and values of a step in one process, on a device for each worker, of which each has that worker's batches."""
    model, optimizer = made(given)
    losses = []
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that there are many sizes
        with mirrorc.compile(
            model,
            len(given["devices"]),
            optimizer=optimizer,
            loss_fn=nn.CrossEntropyLoss(),
            compiler=mirrorc.Compiler(backend="eager"),
        ) as step:
            for number, sizes in enumerate(given["batches"]):
                own = [batch(number, rank, size) for rank, size in enumerate(sizes)]
                x, y = map(mirrorc.PerReplica, zip(*own, strict=True))
                losses.append(step(x, target=y).item())
    return losses, {name: value.flatten().tolist() for name, value in model.state_dict().items()}


def reference(given: dict[str, Any]) -> tuple[list[float], dict[str, list[float]]]:
    model, optimizer = made(given)
    losses = []
    for number, sizes in enumerate(given["batches"]):
        own = [batch(number, rank, size) for rank, size in enumerate(sizes) if size]
        sums = [functional.cross_entropy(model(x), y, reduction="sum") for x, y in own]
        loss = sum(sums) / sum(len(x) for x, _ in own)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.flatten().tolist() for name, value in model.state_dict().items()}
