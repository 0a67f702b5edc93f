"""A tiny model trained on two logical CPUs, and on one device by plain PyTorch."""

from __future__ import annotations

import copy
import time
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import nn

import mirrorc

Backend = Literal["eager", "inductor"]
BACKENDS: tuple[Backend, ...] = get_args(Backend)

_NUM_STEPS = 2
_DEVICES = ("cpu:0", "cpu:1")
_REPORT = "report this, with the whole output"
_REMEDIES = {
    "eager": _REPORT,
    "inductor": "check the C++ compiler above, remove the folder of Inductor's cache, and try again; "
    "compiler=mirrorc.Compiler(backend='eager') trains without Inductor",
}


@dataclass(frozen=True)
class Trial:
    """Training with one backend; ``fault`` is empty if it gives the parameters of plain PyTorch."""

    seconds: float
    fault: str

    @classmethod
    def of(cls, backend: Backend) -> Trial:
        began = time.monotonic()
        try:
            difference = _largest_difference(backend)
            fault = f"parameters differ by {difference:.1e}: {_REPORT}" if not difference < 1e-5 else ""
        except Exception as error:  # noqa: BLE001 - the fault that is looked for
            reason = next(iter(str(error).splitlines()), "")
            fault = f"{type(error).__name__}: {reason}. What to do: {_REMEDIES[backend]}"
        return cls(time.monotonic() - began, fault)

    def __str__(self) -> str:
        done = f"{_NUM_STEPS} steps on {', '.join(_DEVICES)} train as one device does"
        return f"{f'failed: {self.fault}' if self.fault else done} ({self.seconds:.1f} s)"


def _largest_difference(backend: Backend) -> float:
    generator = torch.Generator().manual_seed(0)
    x, target = (torch.randn(6, size, generator=generator) for size in (4, 2))
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    expected = copy.deepcopy(model)
    with mirrorc.compile(
        model,
        _DEVICES,
        optimizer=torch.optim.SGD(model.parameters(), lr=0.1),
        loss_fn=nn.functional.mse_loss,
        distributed=False,
        compiler=mirrorc.Compiler(backend=backend),
    ) as step:
        for _ in range(_NUM_STEPS):
            step(x, target)
    optimizer = torch.optim.SGD(expected.parameters(), lr=0.1)
    for _ in range(_NUM_STEPS):
        optimizer.zero_grad()
        nn.functional.mse_loss(expected(x), target).backward()
        optimizer.step()
    pairs = zip(model.parameters(), expected.parameters(), strict=True)
    return max(float((mine - other).detach().abs().max()) for mine, other in pairs)
