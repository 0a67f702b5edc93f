"""Prints the program that the questions of tests/legibility.md are about.

python tests/support/legibility_dump.py                 the lowered program, as ``print(step.program)`` shows it
python tests/support/legibility_dump.py --into FOLDER   the dump of every pass, as ``mirrorc.Debug(dump=FOLDER)`` has it written
"""

import argparse
import sys
import warnings
from pathlib import Path

import torch
from torch.optim import AdamW
from transformers import GPT2Config, GPT2LMHeadModel

import mirrorc
from mirrorc.packing import ByBytes

NUM_DEVICES, NUM_EXAMPLES, NUM_TOKENS = 4, 6, 16
LAYERS, WIDTH, VOCABULARY = 3, 256, 97


def dumped_program(dump: Path | None = None) -> mirrorc.Program:
    """The lowered program of a 3-layer GPT-2 with dropout, for 4 devices, 6 examples and 2 groups of parameters."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_positions=32, n_embd=WIDTH, n_layer=LAYERS, n_head=4, eos_token_id=0, bos_token_id=0
    )
    model = GPT2LMHeadModel(config).train()
    parameters = list(model.parameters())
    decayed = {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1}
    plain = {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": 1e-3}
    tokens = torch.zeros(NUM_EXAMPLES, NUM_TOKENS, dtype=torch.int64)
    with warnings.catch_warnings(action="ignore"):  # of the tracer, about side effects in transformers
        return mirrorc.plan(
            model,
            {"input_ids": tokens, "labels": tokens},
            [f"cpu:{i}" for i in range(NUM_DEVICES)],
            optimizer=AdamW([decayed, plain], lr=3e-4, betas=(0.9, 0.95)),
            communication=mirrorc.Communication(buckets=ByBytes(4.0, 1.0)),
            compiler=mirrorc.Compiler(backend="eager"),
            debug=mirrorc.Debug(dump=dump),
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--into", type=Path)
    folder = parser.parse_args().into
    program = dumped_program(folder)
    if folder is None:
        sys.stdout.write(program.to_text())


if __name__ == "__main__":
    main()
