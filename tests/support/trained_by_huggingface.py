"""Models of Hugging Face that its Trainer trains: a classifier of texts, of tokens, and a language model.

Under torchrun, ``python trained_by_huggingface.py FOLDER`` trains on both workers, and the first saves the values.
"""

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from finetune_classifier import VOCABULARY
from trained_by_accelerate import LENGTH, OPTIONS, classifier, examples
from transformers import BertForTokenClassification, GPT2Config, GPT2LMHeadModel, TrainingArguments

from mirrorc.integrations.huggingface import DataParallelTrainer

NUM_WORKERS = int(os.environ.get("WORLD_SIZE", 1))


def tagger() -> BertForTokenClassification:
    return BertForTokenClassification(classifier().config).double()


def language_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": LENGTH + 1}
    dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, **sizes, **dropout)).double()


def labelled_tokens(number: int, labels: Callable[[torch.Tensor], torch.Tensor]) -> list[dict[str, torch.Tensor]]:
    """Texts whose rows have 1 to 7 labels; every third has none."""
    rows = examples(number)
    for i, row in enumerate(rows):
        is_labelled = torch.arange(LENGTH + 1) < (0 if i % 3 == 2 else i % 7 + 2)
        row["labels"] = torch.where(is_labelled, labels(row["input_ids"]), -100)
    return rows


KINDS: dict[str, tuple[Callable[[], Any], Callable[[int], list[Any]]]] = {
    "texts": (classifier, examples),
    "tokens": (tagger, lambda number: labelled_tokens(number, lambda ids: ids % 4)),
    "language": (language_model, lambda number: labelled_tokens(number, lambda ids: ids)),
}


def trained(kind: type[transformers.Trainer], task: str, folder: Path, checkpoint: Any = None, **options: Any) -> Any:
    """The trainer at its end."""
    make_model, make_data = KINDS[task]
    arguments = TrainingArguments(
        output_dir=str(folder),
        use_cpu=True,
        num_train_epochs=1,
        per_device_train_batch_size=4 // NUM_WORKERS,
        per_device_eval_batch_size=4 // NUM_WORKERS,
        gradient_accumulation_steps=2,
        learning_rate=0.01,
        eval_strategy="epoch",
        logging_steps=1,
        save_steps=1,
        max_grad_norm=0.5,
        report_to=[],
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    model, train, test = make_model(), make_data(16), make_data(8)
    trainer = kind(model=model, args=arguments, train_dataset=train, eval_dataset=test, **options)
    trainer.train(resume_from_checkpoint=checkpoint)
    return trainer


def values_of(trainer: Any) -> dict[str, Any]:
    """Parameters, and what was logged at each step."""
    logged = [
        {name: entry.get(name, 0.0) for name in ("loss", "grad_norm", "eval_loss")}
        for entry in trainer.state.log_history
    ]
    return {"state": dict(trainer.model.state_dict()), "logged": logged}


def main(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    values = {}
    uneven = 1 if os.environ["RANK"] == "1" else 2
    for task, devices in (("texts", None), ("texts", uneven), ("language", uneven)):
        trainer = trained(DataParallelTrainer, task, folder, devices=devices, **OPTIONS)
        name = "one device" if devices is None else "uneven devices"
        values[task, name] = {**values_of(trainer), "batches": trainer._weights._num_batches}
    if trainer.is_world_process_zero():
        torch.save(values, folder / "values.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
