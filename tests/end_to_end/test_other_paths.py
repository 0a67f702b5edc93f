"""A parameter or buffer is the variable that it is, whatever path it is read by; one that is none of the model's is spoken of."""

import operator
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from references import train_step, unchanged
from small_modules import Parts, module_of
from torch import nn
from twins import compiled_step

import mirrorc

Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class Net(nn.Module):
    def __init__(self, uses: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.layer, self.extra = nn.Linear(3, 4), nn.Linear(4, 4)
        self.scale, self.log_variance = nn.Parameter(torch.ones(4)), nn.Parameter(torch.zeros(()))
        self.register_buffer("count", torch.zeros(1))
        self.norm = nn.BatchNorm1d(4)
        self.tied, self.uses = self.layer.weight, uses

    def hold_elsewhere(self) -> None:
        """Makes the other paths; a conversion to another dtype would have replaced buffers."""
        self.listed = [self.scale, self.layer.weight, self.tied]
        self.modules_by_name = {"extra": self.extra, "norm": self.norm}
        self.parents = [self]
        self.add_one = _adds_one_to(self.count)
        self.__dict__["hidden"] = self.norm

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.uses(self, self.layer(x))


def _adds_one_to(buffer: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    def scaled(y: torch.Tensor) -> torch.Tensor:
        buffer.add_(1.0)
        return y * buffer

    return scaled


class Uncertain:
    def __init__(self, log_variance: torch.Tensor) -> None:
        self.log_variance = log_variance

    def __call__(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, target) * torch.exp(-self.log_variance) + self.log_variance


def _penalty(parameters: list[nn.Parameter]) -> Loss:
    return lambda y, target: F.mse_loss(y, target) + sum(0.1 * p.square().sum() for p in parameters)


def _same_output(net: Net, y: torch.Tensor) -> torch.Tensor:
    return y


def _multiplied(net: Net, y: torch.Tensor) -> torch.Tensor:
    for parameter in net.listed:
        y = y * parameter.sum()
    return y


USES: dict[str, Callable[[Any, torch.Tensor], torch.Tensor]] = {
    "a list of parameters, one of them tied": _multiplied,
    "a dict of modules": lambda net, y: net.modules_by_name["extra"](y),
    "an attribute that is not registered": lambda net, y: net.hidden(y),
    "a child that knows its parent": lambda net, y: y * net.parents[0].scale,
    "the same parameter by two paths": lambda net, y: y * net.scale + net.listed[0],
    "a buffer that a closure writes": lambda net, y: net.add_one(y),
    "a parameter that is looked up without a gradient": lambda net, y: y * net.listed[0].detach(),
}

LOSSES: dict[str, Callable[[Net], Loss]] = {
    "an attribute of the loss": lambda net: Uncertain(net.log_variance),
    "a closure": lambda net: Uncertain(net.log_variance).__call__,
    "a list in a closure": lambda net: _penalty([net.scale, net.layer.weight, *net.extra.parameters()]),
    "a buffer of the model in the loss": lambda net: Uncertain(net.count),
    "parameters that change places": lambda net: _penalty(net.listed),
}


def _made(uses: Callable[[Any, torch.Tensor], torch.Tensor], loss: Callable[[Net], Loss]) -> tuple[Net, Loss, Any]:
    torch.manual_seed(0)
    net = Net(uses).double()
    net.norm.eval()
    net.hold_elsewhere()
    return net, loss(net), torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)


@pytest.mark.parametrize("devices", [2, 1])
def test_a_parameter_or_buffer_is_the_models_by_whatever_path_it_is_read(devices: int) -> None:
    ordinary: Callable[[Net], Loss] = lambda net: F.mse_loss  # noqa: E731
    cases = [(name, uses, ordinary) for name, uses in USES.items()]
    cases += [(name, _same_output, loss) for name, loss in LOSSES.items()]
    for name, uses, loss in cases:
        batches = [
            {"input": torch.randn(6, 3, dtype=torch.float64), "target": torch.randn(6, 4, dtype=torch.float64)}
            for _ in range(4)
        ]
        plain, plain_loss, plain_optimizer = _made(uses, loss)
        expected = []
        for i, batch in enumerate(batches):
            if i == 2:
                plain.listed[:] = [plain.extra.bias, plain.scale]
            value = train_step(plain, plain_optimizer, {"x": batch["input"], "target": batch["target"]}, plain_loss)
            expected.append((value, {key: tensor.clone() for key, tensor in plain.state_dict().items()}))
        net, net_loss, optimizer = _made(uses, loss)
        with compiled_step(net, net_loss, devices, optimizer=optimizer) as step:
            for i, batch in enumerate(batches):
                if i == 2:
                    net.listed[:] = [net.extra.bias, net.scale]
                found = step(batch["input"], target=batch["target"]).item()
                value, state = expected[i]
                assert abs(found - value) < 1e-9 * (1 + abs(value)), f"{name}, step {i}"
                for key, tensor in net.state_dict().items():
                    difference = f"{name}, step {i}: {key} is not that of plain PyTorch"
                    torch.testing.assert_close(tensor, state[key], msg=difference)
            assert set(step.program.variables) <= set(net.state_dict()), name


@pytest.mark.fast
def test_statistics_that_are_reached_by_another_path_are_each_replicas_own() -> None:
    """A BatchNorm in train mode takes other statistics on each replica: it is compared with itself, reached as usual."""
    batches = [(torch.randn(6, 3).double(), torch.randn(6, 4).double()) for _ in range(3)]
    states = []
    for uses in (lambda net, y: net.norm(y), lambda net, y: net.modules_by_name["norm"](y)):
        net, loss, optimizer = _made(uses, lambda net: F.mse_loss)
        net.norm.train()
        with compiled_step(net, loss, optimizer=optimizer) as step:
            losses = [step(x, target=y).item() for x, y in batches]
            values = [value.clone() for value in step.variables["norm.running_mean"].values]
        states.append([torch.tensor(losses), *values, *(tensor.clone() for tensor in net.state_dict().values())])
        assert net.norm.num_batches_tracked == 3 and not torch.equal(*values)
    for ordinary, other in zip(*states, strict=True):
        torch.testing.assert_close(ordinary, other, rtol=1e-12, atol=0.0)


def test_statistics_stay_each_replicas_own_where_other_weights_are_loaded() -> None:
    """BatchNorm loads its counter from itself where a state_dict lacks it: that counts a write, but nothing was written."""
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4)).double()
    with compiled_step(model, F.mse_loss, optimizer=torch.optim.SGD(model.parameters(), lr=0.05)) as step:
        step(torch.randn(6, 3).double(), target=torch.randn(6, 4).double())
        own = [value.clone() for value in step.variables["1.running_mean"].values]
        assert not torch.equal(*own)
        kept = {name: value + 1 for name, value in model.state_dict().items() if name.startswith("0.")}
        model.load_state_dict(kept, strict=False)
        step(torch.randn(3, 3).double(), target=torch.randn(3, 4).double())  # replica 1 has no examples
        assert torch.equal(step.variables["1.running_mean"].values[1], own[1])


def test_what_requires_a_gradient_and_is_not_the_models_is_spoken_of() -> None:
    teacher, weight, made = (
        module_of(lambda self, y: self.layer(y), layer=nn.Linear(4, 4)).double(),
        nn.Parameter(torch.ones(4).double()),
        torch.ones(4).double(),
    )
    made = made.requires_grad_() * 2
    losses: dict[str, tuple[Loss, str]] = {
        "a parameter": (
            lambda y, target: F.mse_loss(y * weight, target),
            "MC3305: .* depends on weight, to which this step gives no gradient",
        ),
        "a module": (
            lambda y, target: F.mse_loss(teacher(y), target),
            r"on teacher\.layer\.weight, teacher\.layer\.bias, to which",
        ),
        "a result": (
            lambda y, target: F.mse_loss(y * made, target),
            r"MC2305: .* reads made, .*\n  at: .*y \* made.*\n  why: .*MulBackward0",
        ),
        **{
            name: (
                lambda y, target, write=write: F.mse_loss(_written(y, write), target),
                "depends on weight, to which this step gives no gradient",
            )
            for name, write in {
                "by a mask": lambda z: z.__setitem__(z > 0, weight[0]),
                "a row": lambda z: z.__setitem__(0, weight),
                "a view": lambda z: z[:, 1:].view(-1, 3).mul_(weight[:3]),
                "augmented": lambda z: operator.iadd(z[:, 0], weight[0]),
                "by a function": lambda z: F.hardtanh(z.mul_(weight), inplace=True),
            }.items()
        },
        "written without a gradient": (
            lambda y, target: F.mse_loss(_written(y, lambda z: z.mul_(weight.detach())), target),
            "",
        ),
        "written too late": (lambda y, target: (z := y * 1).mean() + 0 * z.mul_(weight).detach().sum(), ""),
        "no gradient": (lambda y, target: F.mse_loss(y, target + weight.detach().sum() + made.detach()), ""),
        "switched off": (lambda y, target: F.mse_loss(y, _without_gradient(teacher, target)), ""),
    }
    for name, (loss, text) in losses.items():
        net, loss, optimizer = _made(_same_output, lambda net, loss=loss: loss)  # type: ignore[misc]
        with warnings.catch_warnings(record=True) as caught, compiled_step(net, loss, optimizer=optimizer) as step:
            warnings.simplefilter("always")
            said = []
            try:
                step(torch.ones(4, 3).double(), target=torch.ones(4, 4).double())
            except mirrorc.CaptureError as error:
                said.append(str(error))
        said += [str(w.message) for w in caught if w.filename == __file__]
        assert len(said) == bool(text) and all(re.search(text, s) for s in said), f"{name}: {said}"


def _written(y: torch.Tensor, write: Callable[[torch.Tensor], object]) -> torch.Tensor:
    z = y * 1
    write(z)
    return z


def _without_gradient(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return module(x)


class Leaving(Parts):
    def __init__(self) -> None:
        super().__init__(layer=nn.Linear(3, 4), auxiliary=0.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        self.auxiliary = y.square().mean()
        return y


class Collecting(Parts):
    def __init__(self, model: nn.Module) -> None:
        super().__init__(model=model)

    def forward(self, y: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return F.mse_loss(y, target) + self.model.auxiliary


@pytest.mark.fast
def test_an_attribute_that_forward_assigns_is_not_read_by_another_way() -> None:
    model = Leaving().double()
    x, target = torch.randn(4, 3, dtype=torch.float64), torch.randn(4, 4, dtype=torch.float64)

    def compiled(loss_fn: Loss) -> mirrorc.Step:
        return compiled_step(model, loss_fn, capture="autograd")

    def auxiliary() -> Any:  # a function that the loss calls keeps the user's model
        return model.auxiliary

    with compiled(lambda y, t: F.mse_loss(y, t) + auxiliary()) as step:
        told = "'auxiliary', which forward sets, is read .*\n.*test_other_paths(?s:.*)make the loss a module that holds"
        with unchanged(model), pytest.raises(mirrorc.CaptureError, match=told):
            step(x, target=target)
    assert type(model) is Leaving and model.auxiliary == 0.0
    for loss_fn in (Collecting(model), lambda y, t: F.mse_loss(y, t) + model.auxiliary):
        with compiled(loss_fn) as step, pytest.warns(match="MC3304: forward of .* sets attributes of modules"):
            y = model.layer(x)
            assert step(x, target=target).item() == pytest.approx((F.mse_loss(y, target) + y.square().mean()).item())
