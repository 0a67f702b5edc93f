"""Warns at the line of the user's code that led to the warning."""

from __future__ import annotations

import sys
import warnings

_PASSED_OVER = ("mirrorc", "torch", *sys.stdlib_module_names)


def warn_user(message: str) -> None:
    """Issues a warning at the innermost line that is neither mirrorc's nor torch's nor the standard library's."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and str(frame.f_globals.get("__name__")).partition(".")[0] in _PASSED_OVER:
        frame, level = frame.f_back, level + 1
    warnings.warn(message, stacklevel=level)
