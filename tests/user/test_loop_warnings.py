"""Modes around a step that its devices' threads do not have: one warning says so, and the step is as without them."""

import contextlib
import copy
import io
import pickle
import warnings
from typing import Any

import pytest
import torch
from tiny_programs import sgd_step
from torch import nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from mirrorc.torch_internals import as_subclass
from mirrorc.user.loop_warnings import TrainedLoss


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


def loss_of(value: float = 2.5) -> torch.Tensor:
    return as_subclass(torch.tensor(value), TrainedLoss)


def test_backward_warns_and_changes_nothing() -> None:
    model = nn.Linear(3, 1)
    with sgd_step(model, 2, loss_fn=F.mse_loss, return_outputs=True) as step:
        loss, _ = step(torch.ones(4, 3), torch.ones(4, 1))
        before = copy.deepcopy(model.state_dict())
        with pytest.warns(
            UserWarning, match=r"loss\.backward\(\) did nothing\n  why:  the call that returned it has run backward"
        ):
            loss.backward(retain_graph=True)
        with pytest.warns(UserWarning, match="did nothing"):
            step.accumulate(torch.ones(4, 3), torch.ones(4, 1))[0].backward()
        assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
        assert all(parameter.grad is None for parameter in model.parameters())
        assert not loss.requires_grad


def test_results_and_copies_are_plain_tensors() -> None:
    loss, saved = loss_of(), io.BytesIO()
    torch.save({"loss": loss}, saved)
    saved.seek(0)
    copies = [
        copy.deepcopy(loss),
        pickle.loads(pickle.dumps(loss)),
        torch.load(saved, weights_only=True)["loss"],
        loss / torch.tensor(1.0),
        loss.clone(),
        torch.stack([loss])[0],
        loss.detach(),
    ]
    assert all(type(value) is torch.Tensor and value.item() == 2.5 for value in copies)


def test_scaled_by_a_number_its_backward_still_only_warns() -> None:
    for scaled, expected in ((loss_of() / 2, 1.25), (loss_of() * 2.0, 5.0), (loss_of() / True, 2.5)):
        assert type(scaled) is TrainedLoss and scaled.item() == expected
        with pytest.warns(UserWarning, match="did nothing"):
            scaled.backward()


def test_it_prints_and_counts_as_a_tensor() -> None:
    loss = loss_of()
    assert (repr(loss), str(loss), f"{loss:.1f}", f"{loss}") == ("tensor(2.5000)", "tensor(2.5000)", "2.5", "2.5")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert float(loss) == 2.5 == loss.numpy()
        loss += 1
    assert loss.item() == 3.5


def test_a_term_with_a_gradient_that_is_added_in_place_has_its_backward() -> None:
    weight, loss = torch.tensor(3.0, requires_grad=True), loss_of()
    loss += weight**2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loss.backward()
    assert weight.grad is not None and weight.grad.item() == 6.0
