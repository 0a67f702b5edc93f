"""Checks of ``compression=``, by which workers send sums in a narrower dtype, a part of them, or a payload of one's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mirrorc.compression import Payload
from mirrorc.ir.devices import Device
from mirrorc.ir.workers import Workers
from mirrorc.passes import compressing


def check_compression(workers: Workers, devices: Sequence[Device], asked: Mapping[str, Any]) -> None:
    """Refuses options that cannot be kept together with ``compression``. One worker on its own sends nothing, as a remark says.

    Args:
        workers: of the step.
        devices: of this worker.
        asked: the arguments of `mirrorc.compile`, by name.

    Raises:
        TypeError: the class of a payload is not complete.
        ValueError: says which, why, and the remedy.
    """
    compression = asked["compression"]
    if compression is None:
        return
    if isinstance(compression, Payload):
        _check_payload(type(compression))
    (compiler_pass,) = compressing(compression)
    if asked["passes"] is not None:
        raise ValueError(
            f"compression={compression!r} has no part in a pipeline given with passes=: put "
            f"mirrorc.passes.{compiler_pass!r} behind ReduceOverWorkers() there, or leave compression out"
        )
    if compiler_pass.name in asked["disable_passes"]:
        raise ValueError(
            f"compression={compression!r} asks for the pass {compiler_pass.name!r}, which disable_passes leaves "
            "out: leave out one of them"
        )
    if asked["exact_order"]:
        raise ValueError(
            f"compression={compression!r} cannot be used with exact_order=True: {compiler_pass.changes_bits}; leave out "
            "one of them"
        )
    if not workers.are_several:
        return
    if devices[0].torch_device.type != "cpu":
        raise ValueError(
            f"compression={compression!r} cannot be used on devices of the type {devices[0].torch_device.type!r} yet: what is "
            "sent there in another form has not been tried; leave it out"
        )
    if asked["shard_optimizer"]:
        raise ValueError(
            f"compression={compression!r} cannot be used with shard_optimizer=True yet: workers send each other parts of sums "
            "there, which are not compressed; leave out one of them"
        )


def _check_payload(kind: type[Payload]) -> None:
    """Refuses a class by whose instances workers could not tell whether they send alike, or that sends nothing."""
    if "__dataclass_params__" not in vars(kind) or not kind.__dataclass_params__.frozen:  # type: ignore[attr-defined]
        raise TypeError(
            f"compression is an instance of {kind.__qualname__}, which is no frozen dataclass: workers compare the texts of "
            "their payloads, which are to say all of them; put @dataclass(frozen=True) before the class"
        )
    for method in ("num_bytes", "exchange"):
        if getattr(kind, method) is getattr(Payload, method):
            raise TypeError(
                f"compression is an instance of {kind.__qualname__}, which has no {method}() of its own: define it as "
                "mirrorc.compression.Payload says"
            )
