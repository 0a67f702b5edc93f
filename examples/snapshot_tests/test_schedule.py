"""Tests that hold the training schedule of a small classifier: run ``pytest examples/snapshot_tests``.

The snapshots are in ``__snapshots__/test_schedule``. Change ``WIDTH`` and run the tests again to see what a failure says;
``pytest --snapshot-update`` writes the snapshots anew.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import functional as F

import mirrorc
from mirrorc.packing import ByBytes
from mirrorc.testing import ProgramSnapshot, check

WIDTH = 64


class Block(nn.Module):
    """A normalized two-layer net around a shortcut."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Classifier(nn.Module):
    """Features [batch, 16] to logits [batch, 5]."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.stem = nn.Linear(16, width)
        self.first = Block(width)
        self.second = Block(width)
        self.head = nn.Linear(width, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.second(self.first(self.stem(x))))


def program_on(devices: Sequence[str]) -> mirrorc.Program:
    """The program of a step with small buckets, so that there are several; it is compiled, and never run."""
    model = Classifier()
    return mirrorc.plan(
        model,
        {"x": torch.zeros(8, 16), "target": torch.zeros(8, dtype=torch.int64)},
        devices,
        optimizer=torch.optim.AdamW(model.parameters(), lr=1e-3),
        loss_fn=F.cross_entropy,
        communication=mirrorc.Communication(buckets=ByBytes(0.05, 0.02)),
        compiler=mirrorc.Compiler(backend="eager"),
    )


def test_two_devices(mirror_snapshot: ProgramSnapshot) -> None:
    assert program_on(["cpu:0", "cpu:1"]) == mirror_snapshot


def test_an_uneven_batch_runs_two_programs(mirror_snapshot: ProgramSnapshot) -> None:
    assert program_on(["cpu:0", "cpu:1", "cpu:2"]) == mirror_snapshot


def test_the_operators_of_one_device(mirror_snapshot: ProgramSnapshot) -> None:
    assert program_on(["cpu:0"]) == mirror_snapshot(name="with-regions", regions=True)


def test_backward_goes_on_while_buckets_are_reduced() -> None:
    check(
        program_on(["cpu:0", "cpu:1"]),
        """
        CHECK: b0_pending: pending
        CHECK-SAME: reduce_scatter(bucket=0
        # nobody waits before backward is over:
        CHECK-NOT: wait(
        CHECK: bwd_1(
        CHECK-NOT: wait(
        CHECK: bwd_2(
        CHECK: wait(bucket=2
        CHECK-NEXT: update(bucket=2
        CHECK: return loss
        """,
    )
