"""Fine-tunes a Hugging Face classifier on several devices, with metrics, clipping of gradients and a scheduler.

    python examples/finetune_classifier.py                                       # a small BERT, from scratch
    python examples/finetune_classifier.py --pretrained distilbert-base-uncased  # a model that is at hand, or is downloaded

The task: which package of Python's standard library a piece of source is from. A quarter of the pieces is held out.
"""

from __future__ import annotations

import argparse
import re
import sysconfig
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from tqdm import tqdm
from transformers import (
    AutoModelForSequenceClassification,
    AutoTokenizer,
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

import mirrorc

PACKAGES = ("asyncio", "email", "multiprocessing", "unittest")
VOCABULARY = 8192


@dataclass(frozen=True)
class Texts:
    """Tokens [examples, tokens], the mask of those that are not padding, and labels [examples]."""

    input_ids: torch.Tensor
    attention_mask: torch.Tensor
    labels: torch.Tensor

    def batch(self, chosen: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments of the model for some of the examples."""
        return {name: tensor[chosen] for name, tensor in vars(self).items()}


Piece = tuple[list[str], int]


def read_pieces(length: int, per_package: int) -> tuple[list[Piece], list[Piece]]:
    """Pieces of source as words, each with the number of its package: to train on, and held out."""
    library = Path(sysconfig.get_path("stdlib"))
    train: list[Piece] = []
    held_out: list[Piece] = []
    for label, package in enumerate(PACKAGES):
        texts = [re.findall(r"\w+", file.read_text("utf-8")) for file in sorted((library / package).glob("*.py"))]
        pieces = [text[i : i + length] for text in texts for i in range(0, len(text), length)]
        for i, piece in enumerate(pieces[:per_package]):
            (train if i % 4 else held_out).append((piece, label))
    return train, held_out


def by_hash(pieces: Sequence[Piece], length: int) -> Texts:
    """A number for each word: 0 is padding, 1 begins a text."""
    rows = [[1, *(2 + zlib.crc32(word.encode()) % (VOCABULARY - 2) for word in words)] for words, _ in pieces]
    input_ids = torch.tensor([row + [0] * (length + 1 - len(row)) for row in rows])
    return Texts(input_ids, (input_ids != 0).long(), torch.tensor([label for _, label in pieces]))


def by_tokenizer(pieces: Sequence[Piece], name: str) -> Texts:
    """The tokens of a pretrained model, all padded to one length: each other length would be compiled anew."""
    texts = [" ".join(words) for words, _ in pieces]
    found = AutoTokenizer.from_pretrained(name)(
        texts, padding="max_length", truncation=True, max_length=128, return_tensors="pt"
    )
    return Texts(found["input_ids"], found["attention_mask"], torch.tensor([label for _, label in pieces]))


def make_model(pretrained: str | None, length: int) -> nn.Module:
    """A classifier that returns its loss and its logits."""
    if pretrained is not None:
        return AutoModelForSequenceClassification.from_pretrained(pretrained, num_labels=len(PACKAGES))
    return BertForSequenceClassification(
        BertConfig(
            vocab_size=VOCABULARY,
            hidden_size=96,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=384,
            max_position_embeddings=length + 1,
            num_labels=len(PACKAGES),
        )
    )


def accuracy(step: mirrorc.Step, texts: Texts, batch: int) -> float:
    """The part of the texts that the model names rightly; forward runs on all devices."""
    right = 0
    for chosen in torch.arange(len(texts.labels)).split(batch):
        _, outputs = step.evaluate(**texts.batch(chosen))
        right += int((outputs.logits.argmax(1) == texts.labels[chosen]).sum())
    return right / len(texts.labels)


def main(arguments: Sequence[str] | None = None) -> float:
    """Trains, and returns the accuracy on pieces that were held out."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--pretrained", help="name or folder of a model, for transformers' from_pretrained")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--per-package", type=int, default=400, help="pieces of each package")
    parser.add_argument("--length", type=int, default=48, help="words of a piece")
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    pieces = read_pieces(options.length, options.per_package)
    train, held_out = (
        by_tokenizer(some, options.pretrained) if options.pretrained else by_hash(some, options.length)
        for some in pieces
    )
    model = make_model(options.pretrained, options.length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-5 if options.pretrained else 4e-4, weight_decay=0.01)
    num_steps = options.epochs * -(-len(train.labels) // options.batch)
    scheduler = get_linear_schedule_with_warmup(optimizer, num_steps // 10, num_steps)
    with mirrorc.compile(
        model,
        devices=options.devices,
        optimizer=optimizer,
        clip_grad_norm=1.0,
        return_outputs=True,
        compiler=mirrorc.Compiler(backend=options.backend),
    ) as step:
        for epoch in range(options.epochs):
            progress = tqdm(torch.randperm(len(train.labels)).split(options.batch), unit="step", dynamic_ncols=True)
            for chosen in progress:
                loss, outputs = step(**train.batch(chosen))
                scheduler.step()
                right = (outputs.logits.argmax(1) == train.labels[chosen]).float().mean()
                progress.set_postfix_str(f"loss {loss:.3f}, accuracy {right:.0%}, norm {step.grad_norm:.2f}")
            model.eval()
            found = accuracy(step, held_out, options.batch)
            model.train()
            print(f"epoch {epoch + 1}: held-out accuracy {found:.1%}")
    return found


if __name__ == "__main__":
    main()
