"""What an entry of the zoo says of a model, and the batches that many of them take."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Batch = dict[str, Any]
Loss = Callable[[Any, Any], torch.Tensor]
BatchMaker = Callable[[int, torch.Generator], Batch]

CLASSES = 3
WORDS = 31
LENGTH = 10
SPECIAL = 4
"""The first words are none of a sentence: padding, its beginning and end, and a place for a picture."""

FLOAT32_LOSS = "loss in float32"
FLOAT32_WITHIN = "float32 within"
BATCH_NORM = "BatchNorm"


@dataclass(frozen=True)
class ZooModel:
    """A tiny model, and how it is trained.

    Attributes:
        batch: from a number of examples and a generator to the arguments of a step, in float64 where they are numbers.
        rung: the highest front end that captures it (``capture=``).
        why: why no higher front end does.
        run_by: the first command that runs it: ``"test"``, ``"test-slow"`` or ``"test-all"``.
        couples: what makes the loss of a batch something else than the mean over its examples, so that it is compared with plain
            PyTorch shard by shard, as in DDP; empty if nothing does.
        narrow: what is computed in float32, whatever the dtype of the model; empty if nothing is.
        warns: the words of a warning that its step gives.
    """

    name: str
    make: Callable[[], nn.Module]
    batch: BatchMaker
    loss_fn: Loss | None = None
    rung: str = "dynamo"
    why: str = ""
    run_by: str = "test-all"
    couples: str = ""
    narrow: str = ""
    dtype: torch.dtype = torch.float64
    warns: str = ""

    @property
    def tolerance(self) -> float:
        if self.dtype is torch.float32:
            return 1e-4
        if self.couples == BATCH_NORM:
            return 1e-7  # of two or three pixels the variance is small, and its inverse makes roundings large
        return 1e-6 if self.narrow else 1e-9

    def made(self) -> nn.Module:
        """The model in train mode, the same each time, with no parameter of zeros alone."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = self.make()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
        return model.to(self.dtype).train()

    def batches(self, sizes: tuple[int, ...] = (5, 5)) -> list[Batch]:
        """A batch for each step, of an odd number of examples: shards of two devices differ in size."""
        made = (self.batch(size, torch.Generator().manual_seed(seed)) for seed, size in enumerate(sizes))
        return [self._typed(batch) for batch in made]

    def _typed(self, value: Any) -> Any:
        if isinstance(value, dict):
            return {key: self._typed(item) for key, item in value.items()}
        is_number = isinstance(value, torch.Tensor) and value.is_floating_point()
        return value.to(self.dtype) if is_number else value


def tokens(num_examples: int, generator: torch.Generator, length: int = LENGTH) -> torch.Tensor:
    return torch.randint(SPECIAL, WORDS, (num_examples, length), generator=generator)


def classes(num_examples: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(CLASSES, (num_examples,), generator=generator)


def numbers(num_examples: int, generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(num_examples, *shape, generator=generator, dtype=torch.float64)


def text(num_examples: int, generator: torch.Generator) -> Batch:
    words = tokens(num_examples, generator)
    return {"input_ids": words, "labels": words}


def classified_text(num_examples: int, generator: torch.Generator) -> Batch:
    """Sentences of several lengths, each of a class."""
    words, mask = tokens(num_examples, generator), torch.ones(num_examples, LENGTH, dtype=torch.int64)
    mask[::2, LENGTH - 3 :] = 0
    return {"input_ids": words, "attention_mask": mask, "labels": classes(num_examples, generator)}


def translated(num_examples: int, generator: torch.Generator) -> Batch:
    return {"input_ids": tokens(num_examples, generator), "labels": tokens(num_examples, generator, 6)}


def pictures(size: int, key: str = "pixel_values", label: str = "labels") -> BatchMaker:
    """Makes batches of square pictures, each of a class."""

    def batch(num_examples: int, generator: torch.Generator) -> Batch:
        return {key: numbers(num_examples, generator, 3, size, size), label: classes(num_examples, generator)}

    return batch


def features(num_examples: int, generator: torch.Generator) -> Batch:
    return {"x": numbers(num_examples, generator, 6), "target": classes(num_examples, generator)}


def hugging_face(kind: str, *parts: dict[str, Any], **config: Any) -> Callable[[], nn.Module]:
    """Makes a model of Hugging Face from a configuration; later ones of its parts win."""

    def make() -> nn.Module:
        import transformers  # when the model is made: it takes seconds

        model = getattr(transformers, kind)
        common = {key: value for part in parts for key, value in part.items()}
        made: nn.Module = model(model.config_class(**{**common, **config}))
        return made

    return make


_OF_ZOO = ("loss_fn", "rung", "why", "run_by", "couples", "narrow", "dtype", "warns")


def of_hugging_face(name: str, kind: str, batch: BatchMaker, *parts: dict[str, Any], **more: Any) -> ZooModel:
    """A model of Hugging Face; what is no field of `ZooModel` is of its configuration."""
    config = {key: value for part in (*parts, more) for key, value in part.items()}
    fields = {key: config.pop(key) for key in _OF_ZOO if key in config}
    return ZooModel(name, hugging_face(kind, config), batch, **fields)


def without(config: dict[str, Any], *keys: str) -> dict[str, Any]:
    """A configuration without some of its entries."""
    return {key: value for key, value in config.items() if key not in keys}
