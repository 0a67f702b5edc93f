"""A classifier of texts with a loop for Accelerate, as in its examples.

Under torchrun, ``python trained_by_accelerate.py FOLDER`` trains on both workers, and the first saves the values.
"""

import contextlib
import sys
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.utils import DataLoaderConfiguration
from finetune_classifier import PACKAGES, VOCABULARY, by_hash, read_pieces
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

import mirrorc
from mirrorc.integrations.accelerate import Accelerator

OPTIONS: dict[str, Any] = {"compiler": mirrorc.Compiler(backend="eager"), "debug": mirrorc.Debug(progress=False)}
LENGTH = 6


def classifier() -> BertForSequenceClassification:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=8,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        max_position_embeddings=LENGTH + 1,
        num_labels=len(PACKAGES),
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return BertForSequenceClassification(config).double()


def examples(number: int) -> list[dict[str, torch.Tensor]]:
    """A few pieces of source, and the number of the package that each is from."""
    pieces = read_pieces(LENGTH, number)[0]
    texts = by_hash(pieces[:: len(pieces) // number], LENGTH)
    return [texts.batch(torch.tensor(i)) for i in range(number)]


def accelerated(kind: type[accelerate.Accelerator], **options: Any) -> accelerate.Accelerator:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    splitting = DataLoaderConfiguration(split_batches=True)
    return kind(cpu=True, gradient_accumulation_steps=2, dataloader_config=splitting, **options)


def trained(
    accelerator: accelerate.Accelerator, folder: Path, saves: bool = False, resumes: bool = False
) -> dict[str, Any]:
    """The values at the end, of the plain model, and the predictions; resumes behind an epoch that has saved its state."""
    model = classifier()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, 2, 8)
    loader = DataLoader(examples(16), batch_size=4)
    tests = DataLoader(examples(8), batch_size=4)
    model, optimizer, loader, tests, scheduler = accelerator.prepare(model, optimizer, loader, tests, scheduler)
    if resumes:
        accelerator.load_state(str(folder))
    for epoch in range(resumes, 2):
        model.train()
        for batch in loader:
            with accelerator.accumulate(model):
                loss = model(**batch).loss
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        if saves and epoch == 0:
            accelerator.save_state(str(folder))
    model.eval()
    predictions = []
    for batch in tests:
        with torch.no_grad():
            logits = model(**batch).logits
        predictions.append(accelerator.gather_for_metrics(logits))
    plain = accelerator.unwrap_model(model)
    assert isinstance(plain, BertForSequenceClassification)
    with contextlib.closing(model) if hasattr(model, "close") else contextlib.nullcontext():
        return {**accelerator.get_state_dict(model), "predictions": torch.cat(predictions)}


def main(folder: Path) -> None:
    accelerator = accelerated(Accelerator, **OPTIONS)
    values = trained(accelerator, folder)
    if accelerator.is_main_process:
        torch.save(values, folder / "values.pt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
