"""The owners of parameters from ``placement=``."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from mirrorc.capture.model.model_state import ModelState
from mirrorc.errors import PassError
from mirrorc.ir.devices import Device
from mirrorc.messages.problem import problem
from mirrorc.messages.wording import guess
from mirrorc.passes import CACHED, CENTRAL, LEAST_LOADED, PlaceVariables
from mirrorc.pipeline.protocol import Pass

REST = "*"
"""The key of the rule for all other variables, in a dict of owners."""


def placing(model: ModelState, devices: Sequence[Device], placement: Any) -> dict[str, Any]:
    """Arguments of `mirrorc.passes.default_pipeline` for the placement of parameters."""
    if placement == "auto":
        return {}
    return _named(placement, model, devices) if isinstance(placement, Mapping) else {"placement": placement}


def _named(placement: Mapping[str, str | torch.device], model: ModelState, devices: Sequence[Device]) -> dict[str, Any]:
    known = [device.name for device in devices]
    owners: dict[str, str] = {}
    for name, owner in placement.items():
        if name == REST:
            continue
        device = _device_name(owner)
        variable = model.names.get(f"model.{name}", model.names.get(name, name))
        if variable not in model.parameters:
            close = difflib.get_close_matches(str(name), list(model.parameters), n=1, cutoff=0.0)
            hint = f"; the closest name is {close[0]!r}" if close else ""
            raise problem(
                ValueError,
                f"MC1505: placement names {name!r}, which is no parameter of the model{hint}",
                f"{REST!r} stands for all others",
                "[name for name, _ in model.named_parameters()], which lists the names",
            )
        if device not in known:
            raise problem(
                ValueError,
                f"MC1505: placement gives {name!r} to {owner!r}, which is none of the devices",
                fix=f"name one of {', '.join(known)}",
            )
        if owners.setdefault(variable, device) != device:
            raise problem(
                ValueError,
                f"MC1505: placement gives one shared parameter two devices: {name!r} {device!r}, and {variable!r} "
                f"{owners[variable]!r}",
                "both names are of the same tensor",
                f"placement={{{name!r}: {owners[variable]!r}, ...}}, one device for both",
            )
    owner = placement.get(REST, LEAST_LOADED)
    rule = _device_name(owner)
    if rule not in (CENTRAL, LEAST_LOADED, CACHED, *known):
        raise problem(
            ValueError,
            f"MC1505: placement[{REST!r}] is {owner!r}, which is neither a rule nor a device of this step",
            f"{REST!r} stands for all parameters that placement does not name",
            f"give {CENTRAL!r}, {LEAST_LOADED!r}, {CACHED!r} or one of the devices {', '.join(known)}",
        )
    return {"placement": rule, "owners": tuple(owners.items())}


def _device_name(device: Any) -> Any:
    return f"{device.type}:{device.index or 0}" if isinstance(device, torch.device) else device


def check_owned_names(pipeline: Sequence[Pass], known: Collection[str]) -> None:
    """Raises PassError if 'place-variables' has an owner for a variable not among ``known``."""
    for name in (name for entry in pipeline if isinstance(entry, PlaceVariables) for name, _ in entry.owners):
        if name not in known:
            raise problem(
                PassError,
                f"MC1505: the placement names {name!r}, which is no parameter or buffer of the model",
                fix=guess(name, known, "take names of model.named_parameters()"),
            )
