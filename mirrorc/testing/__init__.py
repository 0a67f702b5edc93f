"""Tests your own programs: `check`, and the pytest fixture ``mirror_snapshot`` (``pip install mirrorc[testing]``)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mirrorc.testing.file_check import check

if TYPE_CHECKING:
    from mirrorc.testing.snapshots import ProgramSnapshot

__all__ = ["ProgramSnapshot", "check"]


def __getattr__(name: str) -> Any:
    """Imports `ProgramSnapshot`, the fixture's type, at its first use, because `check` does not need syrupy."""
    if name != "ProgramSnapshot":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        from mirrorc.testing.snapshots import ProgramSnapshot
    except ModuleNotFoundError as error:
        raise ImportError(
            f"MC7201: ProgramSnapshot needs {error.name}, which is not installed: pip install 'mirrorc[testing]'"
        ) from error
    return ProgramSnapshot
