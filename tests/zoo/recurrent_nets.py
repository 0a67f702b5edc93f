"""Recurrent nets, and a loss that aligns sequences."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence
from zoo_models import CLASSES, WORDS, Batch, ZooModel, classes, numbers, tokens


class MeanState(nn.Module):
    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.layer = kind(6, 8, batch_first=True, **options)
        self.head = nn.Linear(16 if options.get("bidirectional") else 8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x)[0].mean(1))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.layer = nn.Embedding(WORDS, 6), nn.GRU(6, 8, batch_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        packed = pack_padded_sequence(self.words(x), lengths.cpu(), batch_first=True, enforce_sorted=False)
        return self.head(self.layer(packed)[1][-1])


class Cells(nn.Module):
    """Reads each sequence up to its own length, in a Python loop."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.cell, self.head = nn.Embedding(WORDS, 6), nn.LSTMCell(6, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found = []
        for one, length in zip(self.words(x), lengths.tolist(), strict=True):
            h = c = one.new_zeros(1, 8)
            for word in one[:length]:
                h, c = self.cell(word[None], (h, c))
            found.append(h)
        return self.head(torch.cat(found))


class Spelled(nn.Module):
    """Gives letters for the frames of a sound."""

    def __init__(self) -> None:
        super().__init__()
        self.frames = nn.Conv1d(4, 6, 3, padding=1)
        self.layer, self.head = nn.LSTM(6, 8, batch_first=True, bidirectional=True), nn.Linear(16, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(self.frames(x.mT).relu().mT)[0]).log_softmax(-1)


class Translator(nn.Module):
    """An encoder and a decoder with attention, which is told the words before."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(WORDS, 8), nn.Linear(8, WORDS)
        self.encoder, self.decoder = nn.GRU(8, 8, batch_first=True), nn.GRUCell(16, 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        states, last = self.encoder(self.words(x))
        h, found = last[0], []
        for word in self.words(y).unbind(1):
            weights = (states @ h[:, :, None]).softmax(1)
            h = self.decoder(torch.cat([word, (weights * states).sum(1)], -1), h)
            found.append(self.head(h))
        return torch.stack(found, -1)


def ctc(log_chances: torch.Tensor, target: dict[str, torch.Tensor]) -> torch.Tensor:
    lengths = torch.full((len(log_chances),), log_chances.size(1))
    return F.ctc_loss(log_chances.transpose(0, 1), target["labels"], lengths, target["lengths"], zero_infinity=True)


def waves(num_examples: int, generator: torch.Generator) -> Batch:
    return {"x": numbers(num_examples, generator, 7, 6), "target": classes(num_examples, generator)}


def ragged(num_examples: int, generator: torch.Generator) -> Batch:
    words = tokens(num_examples, generator)
    lengths = torch.randint(1, words.size(1) + 1, (num_examples,), generator=generator)
    return {"x": words, "lengths": lengths, "target": classes(num_examples, generator)}


def spelled(num_examples: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(1, 6, (num_examples, 3), generator=generator)
    lengths = torch.randint(1, 4, (num_examples,), generator=generator)
    return {"x": numbers(num_examples, generator, 12, 4), "target": {"labels": labels, "lengths": lengths}}


def told(num_examples: int, generator: torch.Generator) -> Batch:
    words, others, target = (tokens(num_examples, generator, length) for length in (7, 4, 4))
    return {"x": words, "y": others, "target": target}


MODELS = [
    ZooModel(
        "LSTM of two layers and directions",
        lambda: MeanState(nn.LSTM, num_layers=2, bidirectional=True),
        waves,
        F.cross_entropy,
        run_by="test-slow",
    ),
    ZooModel("GRU", lambda: MeanState(nn.GRU), waves, F.cross_entropy, run_by="test"),
    ZooModel("RNN", lambda: MeanState(nn.RNN), waves, F.cross_entropy, run_by="test-slow"),
    ZooModel("GRU of packed sequences", Packed, ragged, F.cross_entropy, run_by="test-slow"),
    ZooModel(
        "LSTM cell in a loop over each length",
        Cells,
        ragged,
        F.cross_entropy,
        rung="autograd",
        why="how often it loops follows from the data",
        run_by="test-slow",
    ),
    ZooModel(
        "LSTM and CTC",
        Spelled,
        spelled,
        ctc,
        rung="autograd",
        why="the loss needs memory that follows from the labels",
        run_by="test",
    ),
    ZooModel("GRU with attention", Translator, told, F.cross_entropy),
]
