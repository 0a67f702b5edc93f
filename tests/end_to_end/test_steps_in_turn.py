"""Several steps over the same parameters and optimizer hold one state: what one writes, the others go on from, without copies."""

from __future__ import annotations

import copy
import threading
from functools import partial
from typing import Any

import pytest
import torch
from selections import exhaustive
from torch import nn
from torch.nn import functional as F
from twins import Twins, compiled_step

import mirrorc
from mirrorc import ExecutionError
from mirrorc.runtime.state.optimizers.bucket_optimizers import BucketOptimizers

LOSSES = (F.mse_loss, F.l1_loss)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 3))


class Turns(Twins):
    def __init__(self, make: Any = torch.optim.AdamW, num_devices: int = 2, **options: Any) -> None:
        torch.manual_seed(0)
        super().__init__(Net().double(), partial(make, lr=0.05), LOSSES[0], num_devices, tolerance=1e-9, **options)
        self.num_devices, self.options = num_devices, options
        self.steps = [self.step, self.another_step(LOSSES[1])]

    def another_step(self, loss_fn: Any, **options: Any) -> mirrorc.Step:
        return compiled_step(self.model, loss_fn, self.num_devices, self.optimizer, **self.options, **options)

    def train(self, *turns: int) -> None:
        for turn in turns:
            torch.manual_seed(turn)
            x, target = torch.randn(6, 4).double(), torch.randn(6, 3).double()
            self.on_both(lambda model, _: model[1].eval())
            self.step, self.loss_fn = self.steps[turn], LOSSES[turn]
            super().train(x, target=target)
        self.check()

    def follow(self) -> None:
        """The twin has what the model has."""
        self.twin.load_state_dict(self.model.state_dict())
        self.twin_optimizer.load_state_dict(copy.deepcopy(self.optimizer.state_dict()))

    def close(self) -> None:
        for step in self.steps:
            step.close()


def load(net: Any, optimizer: Any) -> None:
    net.load_state_dict({name: 0.5 * value for name, value in net.state_dict().items()})
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0]["lr"] = 0.02
    optimizer.load_state_dict(state)


def freeze(net: Any, optimizer: Any) -> None:
    net[2].bias.requires_grad_(not net[2].bias.requires_grad)


def own_step(net: Any, optimizer: Any) -> None:
    net(torch.ones(2, 4).double()).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def new_memory(net: Any, optimizer: Any) -> None:
    net[0].weight.data = 2 * net[0].weight.data


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "num_devices", "options"),
    [
        (torch.optim.AdamW, 2, {}),
        (torch.optim.SGD, 3, {"disable": ["share-parameters"]}), (torch.optim.AdamW, 1, {}),
        (torch.optim.Adadelta, 2, {}),
        *exhaustive((torch.optim.AdamW, 4, {"link": "copy"}), (torch.optim.SGD, 4, {})),
        *exhaustive((torch.optim.AdamW, 2, {"backend": "inductor"})),
    ],
)  # fmt: skip
def test_each_goes_on_from_what_the_other_has_written(make: Any, num_devices: int, options: dict[str, Any]) -> None:
    turns = Turns(make, num_devices, **options)
    turns.train(0, 1, 1, 0)
    for change in (load, own_step, freeze, new_memory, freeze):
        turns.on_both(change)
        turns.train(1, 0, 1)
    turns.close()


@pytest.mark.slow
def test_nothing_is_laid_out_or_copied_between_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    turns, laid = Turns(), []
    turns.train(0, 1)
    lay_out = BucketOptimizers.lay_out
    monkeypatch.setattr(BucketOptimizers, "lay_out", lambda *args: laid.append(args) or lay_out(*args))
    before = [parameter.data_ptr() for parameter in turns.model.parameters()]
    turns.train(0, 1, 0, 1)
    assert laid == [] and [parameter.data_ptr() for parameter in turns.model.parameters()] == before
    turns.close()


@pytest.mark.slow
def test_closing_one_leaves_the_other() -> None:
    turns = Turns()
    turns.train(0, 1)
    turns.steps[0].close()
    turns.steps[0].close()
    turns.train(1)
    turns.on_both(own_step)
    turns.train(1)
    turns.steps[0] = turns.another_step(LOSSES[0])
    turns.train(0, 1)
    with pytest.warns(UserWarning, match="found no gradients and did nothing") as caught:
        turns.optimizer.step()
    assert len(caught) == 1
    turns.close()
    own_step(turns.model, turns.optimizer)
    turns.on_both(load)
    turns.steps = [turns.another_step(loss) for loss in LOSSES]  # all others are closed
    turns.follow()
    turns.train(0, 1)
    turns.close()


def test_a_failure_in_one_leaves_the_other_whole() -> None:
    """Before the commit nothing has changed; after it, the next step of either has the same parameters on all replicas."""
    turns = Turns(disable=["share-parameters"])
    turns.train(0, 1)
    with pytest.raises((ExecutionError, mirrorc.CaptureError, RuntimeError)):
        turns.steps[0](torch.randn(6, 5).double(), target=torch.randn(6, 3).double())
    turns.train(1, 0)

    def fail(*_: Any) -> None:
        raise RuntimeError("a hook fails")

    hook = turns.optimizer.register_step_post_hook(fail)
    with pytest.raises(ExecutionError, match="It had committed"):
        turns.steps[0](torch.randn(6, 4).double(), target=torch.randn(6, 3).double())
    hook.remove()
    turns.follow()
    turns.train(1, 0)
    turns.close()


@pytest.mark.slow
def test_two_threads_cannot_run_them_at_once() -> None:
    entered, released = threading.Event(), threading.Event()
    turns = Turns()

    def hook(*_: Any) -> None:
        entered.set()
        released.wait(30)

    turns.train(0, 1)
    handle = turns.optimizer.register_step_pre_hook(hook)
    x, target = torch.randn(6, 4).double(), torch.randn(6, 3).double()
    thread = threading.Thread(target=lambda: turns.steps[0](x, target=target))
    thread.start()
    assert entered.wait(30)
    with pytest.raises(ExecutionError, match="another step over the same parameters is running in another thread"):
        turns.steps[1](x, target=target)
    turns.steps[1].close()  # waits for nothing
    released.set()
    thread.join(30)
    handle.remove()
    turns.follow()
    turns.train(0)
    turns.close()


def test_each_has_its_own_counts_and_losses() -> None:
    """A skipped step counts where it was skipped, and a loss with parameters that are not trained joins the variables."""

    class Weighted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("weight", torch.tensor(2.0).double())

        def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.weight * F.mse_loss(output, target)

    turns = Turns()
    turns.model[1].eval()
    weighted = turns.another_step(Weighted(), check_finite="skip")
    x, target = torch.randn(4, 4).double(), torch.randn(4, 3).double()
    expected = 2 * F.mse_loss(turns.model(x), target).detach()
    torch.testing.assert_close(weighted(x, target=target), expected)
    weighted(x / 0, target=target)
    assert (weighted.num_skipped, turns.steps[0].num_skipped) == (1, 0)
    turns.follow()
    turns.train(0, 1)
    weighted.close()
    turns.close()
