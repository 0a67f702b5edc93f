"""Modes around a step that its devices' threads do not have: one warning says so, and the step is as without them."""

import contextlib
import warnings
from typing import Any

import pytest
import torch
from tiny_programs import sgd_step
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode


class Doubles(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return 2 * found if func is torch.ops.aten.addmm.default else found


class DetectsAnomalies(contextlib.AbstractContextManager[None]):
    def __enter__(self) -> None:
        torch.autograd.set_detect_anomaly(True)

    def __exit__(self, *_: object) -> None:
        torch.autograd.set_detect_anomaly(False)


def trained(mode: contextlib.AbstractContextManager[Any]) -> tuple[list[float], str, list[str]]:
    torch.manual_seed(0)
    model = nn.Linear(4, 4)
    x, y = torch.randn(6, 4), torch.randn(6, 4)
    with warnings.catch_warnings(record=True) as caught, sgd_step(model, 2, loss_fn=F.mse_loss, progress=False) as step:
        warnings.simplefilter("always")
        losses = []
        for call in (step, step, step.evaluate):
            with mode:
                losses.append(call(x, target=y).item())
        return losses, str(step.program), [str(warning.message) for warning in caught]


@pytest.mark.parametrize(
    ("mode", "words"),
    [
        (Doubles(), "within Doubles, a TorchDispatchMode, which does not see what devices run"),
        (torch.autograd.graph.save_on_cpu(), "within saved_tensors_hooks"),
        (DetectsAnomalies(), "within detect_anomaly, which sees nothing of its backward"),
    ],
    ids=["dispatch", "saved tensors", "anomalies"],
)
def test_a_mode_that_devices_do_not_have_is_warned_of_once(mode: Any, words: str) -> None:
    losses, program, told = trained(mode)
    assert (losses, program) == trained(contextlib.nullcontext())[:2]
    assert len(told) == 1 and words in told[0]


def test_hooks_on_saved_tensors_are_no_matter_of_an_evaluation() -> None:
    model = nn.Linear(4, 4)
    with warnings.catch_warnings(), sgd_step(model, 2, loss_fn=F.mse_loss) as step, torch.autograd.graph.save_on_cpu():
        warnings.simplefilter("error")
        assert step.evaluate(torch.randn(6, 4), target=torch.randn(6, 4)).isfinite()
