"""Options of communication under TensorFlow's names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

from mirrorc.passes.all_reduce import ALGORITHMS

_MIB = 2**20


@dataclass(frozen=True)
class CommunicationOptions:
    """Communication of gradients, with the names of ``tf.distribute.experimental.CommunicationOptions``.

    Each field sets options of `mirrorc.compile`, which must not be given as well.

    Args:
        bytes_per_pack: the cap of every bucket in bytes: a gradient that would exceed it starts the next bucket. 0 keeps
            the default, see ``bucket_cap_mb``.
        timeout_seconds: the longest wait of a device for another one; None keeps the default.
        implementation: "auto" keeps the default; "nccl" is ``link="nccl"``; "ring", or any other value of
            ``all_reduce=``, is that algorithm. Case does not matter.

    Raises:
        TypeError, ValueError: a value is of the wrong kind, negative, or no implementation.
    """

    bytes_per_pack: int = 0
    timeout_seconds: float | None = None
    implementation: str = "auto"

    def __post_init__(self) -> None:
        size = self.bytes_per_pack
        if isinstance(size, bool) or not isinstance(size, int) or size < 0:
            raise ValueError(
                f"bytes_per_pack is {size!r}: give a number of bytes, or 0 to leave bucket sizes as they are"
            )
        seconds = self.timeout_seconds
        if seconds is not None and (isinstance(seconds, bool) or not isinstance(seconds, Real) or not seconds > 0):
            raise ValueError(f"timeout_seconds is {seconds!r}: give a positive number of seconds, or None")
        if not isinstance(self.implementation, str):
            raise TypeError(f"implementation is {self.implementation!r}: give a name, such as 'auto', 'ring' or 'nccl'")
        name = self.implementation.lower().partition("{")[0]
        if name not in ("auto", "nccl", *ALGORITHMS):
            known = ", ".join(map(repr, dict.fromkeys(("auto", "nccl", *ALGORITHMS))))
            raise ValueError(f"implementation is {self.implementation!r}: give one of {known}")

    def options(self) -> dict[str, Any]:
        """The equivalent arguments of `mirrorc.compile`, by name."""
        options: dict[str, Any] = {}
        if self.bytes_per_pack:
            options |= {"bucket_cap_mb": self.bytes_per_pack / _MIB, "first_bucket_mb": self.bytes_per_pack / _MIB}
        if self.timeout_seconds is not None:
            options["timeout_seconds"] = self.timeout_seconds
        name = self.implementation.lower()
        if name == "nccl":
            options["link"] = name
        elif name != "auto":
            options["all_reduce"] = name
        return options


def with_communication_options(asked: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of `mirrorc.compile`, with those that ``communication_options`` sets.

    Raises:
        TypeError: ``communication_options`` is no `CommunicationOptions`.
        ValueError: an argument that it sets is given, too.
    """
    hints = asked["communication_options"]
    if hints is None:
        return dict(asked)
    if not isinstance(hints, CommunicationOptions):
        raise TypeError(
            f"communication_options is {hints!r}: give mirrorc.CommunicationOptions(bytes_per_pack=..., timeout_seconds=..., "
            "implementation=...)"
        )
    for name, value in hints.options().items():
        if asked[name] != defaults[name]:
            raise ValueError(
                f"{name}={asked[name]!r} and {hints} say different things of {name}, which is {value!r} there: leave out one of "
                "them"
            )
    return {**asked, **hints.options()}
