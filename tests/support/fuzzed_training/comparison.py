"""Whether two trainings agree, and whether a refused call has left everything as it was."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

TOLERANCE = 1e-7  # relative to the largest entry
FLOOR = 1e-6  # entries smaller than this are noise of additions in another order


@dataclass
class Side:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    schedulers: list[Any]

    def parameters(self) -> dict[str, nn.Parameter]:
        """The parameters by the first of their names."""
        return dict(self.model.named_parameters())

    def state(self) -> dict[str, Any]:
        """All that a step may change, by name; tensors are the present ones, not copies."""
        found: dict[str, Any] = {}
        for name, tensor in (*self.model.named_parameters(), *self.model.named_buffers()):
            found[name] = tensor.detach()
            for key, value in self.optimizer.state.get(tensor, {}).items():
                found[f"{name}'s {key} in the optimizer"] = value.detach() if isinstance(value, torch.Tensor) else value
        for i, group in enumerate(self.optimizer.param_groups):
            for key, value in group.items():
                if key == "params":
                    names = {id(p): name for name, p in self.model.named_parameters()}
                    value = [names.get(id(p), "none of the model's") for p in value]
                found[f"{key} of group {i}"] = value
        found["calls"] = getattr(self.model, "kept", {}).get("calls")
        return found


def differences(actual: dict[str, Any], expected: dict[str, Any], tolerance: float = TOLERANCE) -> list[str]:
    found = [f"{name} is missing" for name in expected.keys() - actual.keys()]
    found += [f"there is a {name}" for name in actual.keys() - expected.keys()]
    for name in expected.keys() & actual.keys():
        own, wanted = actual[name], expected[name]
        if isinstance(wanted, torch.Tensor) and isinstance(own, torch.Tensor):
            error = _error(own, wanted)
            if not error <= tolerance:
                found.append(f"{name}: relative error {error:.3g}: {own.tolist()} is not {wanted.tolist()}")
        elif float_or(own) != float_or(wanted):
            found.append(f"{name} is {own!r}, not {wanted!r}")
    return sorted(found)


def float_or(value: Any) -> Any:
    is_number = isinstance(value, torch.Tensor) and value.numel() == 1
    return value.item() if is_number else value


def is_close(actual: float, expected: float, tolerance: float = TOLERANCE) -> bool:
    return abs(actual - expected) <= tolerance * max(abs(expected), FLOOR)


def _error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    if actual.shape != expected.shape:
        return float("inf")
    if not expected.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    if expected.numel() == 0:
        return 0.0
    scale = max(expected.abs().max().item(), FLOOR)
    return (actual.double() - expected.double()).abs().max().item() / scale


class Snapshot:
    """The bits of a side and of torch's generator, to see later whether anything has changed."""

    def __init__(self, side: Side) -> None:
        self._side = side
        self._state = copy.deepcopy(side.state())
        self._generator = torch.random.get_rng_state()

    def changes(self) -> list[str]:
        now, found = self._side.state(), []
        for name in {**self._state, **now}:
            own, before = now.get(name), self._state.get(name)
            both = isinstance(own, torch.Tensor) and isinstance(before, torch.Tensor)
            if not (torch.equal(own, before) if both else own == before):
                found.append(f"{name} was {before} and is {own}")
        if not torch.equal(self._generator, torch.random.get_rng_state()):
            found.append("torch's generator was drawn from")
        return found

    def assert_unchanged(self, after: str) -> None:
        found = self.changes()
        assert not found, "\n  ".join([f"{after} has changed something:", *found])
