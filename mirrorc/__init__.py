"""mirrorc: a data-parallel compiler for PyTorch models, whose schedule you can read, prove and replay."""

import importlib
import importlib.metadata
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mirrorc.interface import *  # noqa: F403
    from mirrorc.interface import __all__ as __all__

    __version__: str
else:  # with a visible __getattr__, type checkers accept any name
    _FORMER = {
        "PowerSGD": "its place is examples/power_sgd.py, a payload of one's own for Communication(compression=); copy it",
        "CommunicationOptions": "give mirrorc.Communication(buckets=bytes_per_pack / 2**20, timeout=..., algorithm='ring')",
    }

    def __getattr__(name: str) -> Any:
        """Imports the interface at the first use of a name, so that `mirrorc --help` needs no torch."""
        if name == "__version__":
            return importlib.metadata.version("mirrorc")
        if name in _FORMER:
            raise AttributeError(f"mirrorc.{name} is no part of mirrorc any more: {_FORMER[name]}")
        if not name.startswith("__") or name == "__all__":  # tools look for others in every module
            interface = importlib.import_module("mirrorc.interface")
            names = getattr(interface, "__all__", ())  # none while it imports our modules
            globals().update({"__all__": names} if names else {}, **{each: getattr(interface, each) for each in names})
            if name in globals():
                return globals()[name]
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

    def __dir__() -> list[str]:
        return sorted({*globals(), *__getattr__("__all__")})
