"""Trains on scikit-learn's digits, keeps an exponential moving average (EMA) of the weights, and evaluates both on all devices.

python examples/average_digits.py
"""

from __future__ import annotations

import argparse
import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from tqdm import tqdm
from train_digits import DigitNet, load_data

import mirrorc


@contextmanager
def weights_of(model: nn.Module, other: nn.Module) -> Iterator[None]:
    """Within it, a model has the weights and buffers of another one."""
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict(other.state_dict())
    try:
        yield
    finally:
        model.load_state_dict(own)


def evaluate(step: mirrorc.Step, model: nn.Module, images: torch.Tensor, labels: torch.Tensor) -> tuple[float, float]:
    """The loss and the accuracy."""
    model.eval()
    loss, logits = step.evaluate(images, target=labels)
    model.train()
    return float(loss), float((logits.argmax(1) == labels).float().mean())


def main(arguments: Sequence[str] | None = None) -> tuple[float, float]:
    """Trains, and returns the held-out accuracy of the weights, and that of their average."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", nargs="+", default=["cpu:0", "cpu:1"])
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--decay", type=float, default=0.9)
    parser.add_argument("--backend", choices=["inductor", "eager"], default="inductor")
    options = parser.parse_args(arguments)
    torch.manual_seed(0)
    images, labels, held_out_images, held_out_labels = load_data(0)
    model = DigitNet()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(options.decay), use_buffers=True)
    with mirrorc.compile(
        model,
        devices=options.devices,
        optimizer=optimizer,
        loss_fn=F.cross_entropy,
        return_outputs=True,
        compiler=mirrorc.Compiler(backend=options.backend),
    ) as step:
        for _ in tqdm(range(options.epochs), unit="epoch", dynamic_ncols=True):
            for chosen in torch.randperm(len(labels)).split(options.batch):
                step(images[chosen], target=labels[chosen])
                average.update_parameters(model)  # the model's parameters are those of the last step
        loss, found = evaluate(step, model, held_out_images, held_out_labels)
        with weights_of(model, average.module):
            average_loss, average_found = evaluate(step, model, held_out_images, held_out_labels)
    print(f"held out: loss {loss:.4f}, accuracy {found:.1%}; of the average {average_loss:.4f}, {average_found:.1%}")
    return found, average_found


if __name__ == "__main__":
    main()
