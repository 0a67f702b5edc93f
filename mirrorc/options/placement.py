"""The option that says where parameters are and which device updates them, and what cannot be asked for together with it."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch

from mirrorc.capture.model.model_state import ModelState
from mirrorc.errors import PassError
from mirrorc.ir.devices import Device
from mirrorc.ir.links import why_memory_is_not_shared
from mirrorc.ir.workers import Workers
from mirrorc.messages.wording import listed
from mirrorc.packing import may_cut
from mirrorc.passes import CACHED, CENTRAL, LEAST_LOADED, PlaceVariables
from mirrorc.pipeline.protocol import Pass

REST = "*"
"""The key of a dict of owners whose value is the rule for all variables that it does not name."""

_SHARING, _PLACING, _LEAVING = "share-parameters", "place-variables", "update-at-owner"


def placing(model: ModelState, workers: Workers, devices: Sequence[Device], asked: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `mirrorc.passes.default_pipeline` that place parameters.

    Args:
        model: the variables of the step.
        workers: of the step.
        devices: of this worker.
        asked: the arguments of `mirrorc.compile`, by name.

    Raises:
        ValueError: a name is that of no parameter or no device, or an option cannot be kept together with it; says why, and the
            remedy.
    """
    placement = asked["placement"]
    if placement == "auto":
        return {}
    if asked["passes"] is not None:
        raise ValueError(
            f"placement={placement!r} has no part in a pipeline given with passes=: put mirrorc.passes.ShareParameters() there, "
            "or PlaceVariables() behind PlanBuckets() and UpdateAtOwner() behind ScheduleOverlap(), or use add_passes and "
            "disable_passes in place of passes"
        )
    has_owners = placement not in ("mirrored", "shared")
    needed = (_PLACING, _LEAVING) if has_owners else (_SHARING,) if placement == "shared" else ()
    for name in needed:
        if name in asked["disable_passes"]:
            raise ValueError(
                f"placement={placement!r} asks for the pass {name!r}, which disable_passes leaves out: leave out one of them"
            )
    why = why_memory_is_not_shared(devices) if placement == "shared" and len(devices) > 1 else ""
    if why:
        names = listed(device.name for device in devices)
        raise ValueError(f"placement='shared' is not possible on {names}: {why}; use 'mirrored', or 'auto'")
    if placement == "mirrored" and workers.are_several and len(devices) > 1:
        raise ValueError(
            f"placement='mirrored' cannot be used over several workers where one has {len(devices)} devices yet: these need to "
            "share their parameters, so that a worker sends each sum once; leave it out, or give each worker one device"
        )
    given = {"placement": placement}
    if has_owners:
        _check_owned(placement, workers, asked)
        if isinstance(placement, Mapping):
            given = _named(placement, model, devices)
    return given


def _check_owned(placement: Any, workers: Workers, asked: Mapping[str, Any]) -> None:
    """Refuses what a placement with owners cannot be used with."""
    reasons = {
        "workers": (
            workers.are_several,
            "an owner updates for the devices of its own process, and each of several workers updates for itself; use "
            "shard_optimizer=True, which deals the update out to workers, and leave placement out",
        ),
        "packing": (
            asked["packing"] is not None and may_cut(asked["packing"]),
            "packs end within gradients there, whose parts would go to owners apart; give a plan of whole gradients",
        ),
    }
    for option, (is_asked, why) in reasons.items():
        if is_asked:
            raise ValueError(f"placement={placement!r} cannot be used with {option}= as it is given: {why}")


def _named(placement: Mapping[str, str | torch.device], model: ModelState, devices: Sequence[Device]) -> dict[str, Any]:
    """The rule and the owners that a dict says; tied parameters may be named by any of their names."""
    known = [device.name for device in devices]
    owners: dict[str, str] = {}
    for name, given in placement.items():
        if name == REST:
            continue
        device = _device_name(given)
        variable = model.names.get(f"model.{name}", model.names.get(name, name))
        if variable not in model.parameters:
            close = difflib.get_close_matches(str(name), list(model.parameters), n=1, cutoff=0.0)
            hint = f"; the closest name is {close[0]!r}" if close else ""
            raise ValueError(
                f"placement names {name!r}, which is no parameter of the model{hint} ({REST!r} stands for all others)"
            )
        if device not in known:
            raise ValueError(
                f"placement gives {name!r} to {given!r}, which is none of the devices: name one of {', '.join(known)}"
            )
        if owners.setdefault(variable, device) != device:
            raise ValueError(
                f"placement gives {name!r} to {device!r} and {variable!r} to {owners[variable]!r}, which are one parameter: "
                "name one device for it"
            )
    given = placement.get(REST, LEAST_LOADED)
    rule = _device_name(given)
    if rule not in (CENTRAL, LEAST_LOADED, CACHED, *known):
        raise ValueError(
            f"placement gives {REST!r}, all parameters that are not named, to {given!r}: say {CENTRAL!r}, "
            f"{LEAST_LOADED!r}, {CACHED!r} or one of the devices {', '.join(known)}"
        )
    return {"placement": rule, "owners": tuple(owners.items())}


def _device_name(given: Any) -> Any:
    """The name of a device that is given as one of torch's; anything else as it is."""
    return f"{given.type}:{given.index or 0}" if isinstance(given, torch.device) else given


def check_owned_names(pipeline: Sequence[Pass], known: Collection[str]) -> None:
    """Refuses a pipeline whose pass 'place-variables' names what a step has nowhere; a call may leave out what it names.

    Args:
        pipeline: the passes of the step.
        known: the names of its parameters, and of the variables of the program that is compiled.

    Raises:
        PassError: says which name.
    """
    for name in (name for one in pipeline if isinstance(one, PlaceVariables) for name, _ in one.owners):
        if name not in known:
            raise PassError(f"pass 'place-variables' names {name!r}, which is no variable of the step")
