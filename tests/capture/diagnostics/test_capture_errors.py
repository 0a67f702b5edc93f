"""Errors of the tracer are told by line and module: a remedy speaks of a line only where the error names one."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from tiny_programs import sgd_step
from torch import nn

from mirrorc import CaptureError


class Block(nn.Module):
    """Fails for an input of four columns, at a line that all its copies have."""

    def __init__(self, num_columns: int = 4) -> None:
        super().__init__()
        self.inside = nn.Sequential(nn.Linear(num_columns, 4), nn.ReLU())
        self.num_columns = num_columns

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.inside(x)
        return y if self.num_columns == 4 else y @ torch.ones(3, 3)


class Refuses(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if x.shape[1] == 4:
            raise ValueError("four columns, say: it's 'too many'")
        return self.layer(x)


def own_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output @ torch.ones(9)).sum() * target.mean()


LINE, MODULE = "that this line takes", "that this module takes"
CASES: list[tuple[nn.Module, Any, tuple[str, ...]]] = [
    (
        nn.Sequential(nn.Linear(5, 4), nn.Linear(4, 1)),
        F.mse_loss,
        ("MC2103: Sequential or its loss raised", "at:   '0' (Linear)\n", "[2, 4]", MODULE),
    ),
    (nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(5, 1))), F.mse_loss, ("at:   '1.0' (Linear)\n", MODULE)),
    (nn.Sequential(nn.Conv2d(1, 1, 3)), F.mse_loss, ("at:   '0' (Conv2d)\n", "Expected 3D", MODULE)),
    (nn.Linear(5, 1), F.mse_loss, ("MC2103: Linear or its loss raised", "that the model takes")),
    (
        nn.Linear(4, 3),
        F.cross_entropy,
        ("MC2103: Linear or its loss raised", "at:   the loss\n", "that the loss takes"),
    ),
    (nn.Linear(4, 3), nn.CrossEntropyLoss(), ("at:   the loss (CrossEntropyLoss)\n", "try loss_fn(")),
    (nn.Linear(4, 1), own_loss, ("test_capture_errors.py:", "torch.ones(9)", LINE)),
    (
        nn.Sequential(Block(), Block(5)),
        F.mse_loss,
        ("test_capture_errors.py:", "self.inside(x)", "in '1.inside.0' (Linear)", LINE),
    ),
    (
        nn.Sequential(nn.Linear(4, 5), Block(5)),
        F.mse_loss,
        ("test_capture_errors.py:", "torch.ones(3, 3)", "in '1' (Block)", LINE),
    ),
    (
        Refuses(),
        F.mse_loss,
        (
            "test_capture_errors.py:",
            "MC2103: Refuses or its loss raised",
            "ValueError: four columns, say: it's 'too many'",
            LINE,
        ),
    ),
    (
        nn.BatchNorm2d(4),
        F.mse_loss,
        ("batchnorm.py:", "ValueError: expected 4D input (got 2D input)", "that the model takes"),
    ),
    (
        nn.Sequential(nn.BatchNorm2d(4)),
        F.mse_loss,
        ("batchnorm.py:", "ValueError: expected 4D input", "that the model takes"),
    ),
]


def test_a_wrong_batch_is_told_with_its_module_or_line() -> None:
    for model, loss_fn, words in CASES:
        with sgd_step(model, 2, loss_fn=loss_fn) as step, pytest.raises(CaptureError) as refused:
            step(torch.ones(4, 4), target=torch.ones(4, 1))
        text = str(refused.value)
        assert all(word in text for word in words), f"{words} of {text}"
        assert "this line" not in text or "test_capture_errors.py:" in text, text
        assert "Dynamo" not in text and "Explanation" not in text, text
