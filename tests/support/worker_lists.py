"""A detector, whose targets are a list with an item for each example, and workers that train it, for `outcomes`."""

from typing import Any

import torch
from torch import nn

import mirrorc
from mirrorc.options.table import grouped

Targets = list[dict[str, torch.Tensor]]


def targets_of(*counts: int) -> Targets:
    return [{"boxes": torch.randn(k, 4).double(), "labels": torch.randint(3, (k,))} for k in counts]


class Detector(nn.Module):
    """Each example has a number of boxes of its own; the loss is their mean over examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.scores = nn.Linear(5, 4).double(), nn.Linear(5, 3).double()

    def forward(self, x: torch.Tensor, targets: Targets) -> torch.Tensor:
        assert len(x) == len(targets)
        boxes, scores = self.body(x).tanh(), self.scores(x).log_softmax(-1)
        losses = [
            (box - target["boxes"]).square().sum() - score[target["labels"]].sum()
            for box, score, target in zip(boxes, scores, targets, strict=True)
        ]
        return torch.stack(losses).mean()


def images(number: int) -> torch.Tensor:
    return torch.randn(number, 5).double()


def batch_of(number: int, rank: int, counts: list[int]) -> tuple[torch.Tensor, Targets]:
    torch.manual_seed(10 * number + rank)
    return images(len(counts)), targets_of(*counts)


def train(rank: int, given: dict[str, Any]) -> dict[str, Any]:
    """``counts`` has the numbers of boxes of each worker's examples, by call; none for one that has left."""
    model = Detector()
    options = grouped({"backend": "eager", "timeout": 100.0, "capture": given["capture"]})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    with mirrorc.compile(model, given["devices"][rank], optimizer=optimizer, **options) as step:
        with step.join():
            for number, of_workers in enumerate(given["counts"]):
                if of_workers[rank]:
                    x, targets = batch_of(number, rank, of_workers[rank])
                    losses.append(step(x, mirrorc.examples(targets)).item())
        whole = batch_of(99, 0, [1, 2, 5, 3, 1])
        losses.append(step(*step.shard_batch((whole[0], mirrorc.examples(whole[1])))).item())
    return {"losses": losses, "values": {name: value.tolist() for name, value in model.state_dict().items()}}


def on_one_device(given: dict[str, Any]) -> tuple[list[float], dict[str, Any]]:
    model = Detector()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    calls = [
        [batch_of(number, rank, counts) for rank, counts in enumerate(of_workers) if counts]
        for number, of_workers in enumerate(given["counts"])
    ]
    for parts in [*calls, [batch_of(99, 0, [1, 2, 5, 3, 1])]]:
        optimizer.zero_grad()
        loss = model(torch.cat([x for x, _ in parts]), [target for _, targets in parts for target in targets])
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.tolist() for name, value in model.state_dict().items()}
