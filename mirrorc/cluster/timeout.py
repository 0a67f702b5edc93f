"""Limits of the time that workers wait for each other."""

from __future__ import annotations

import sys
from datetime import timedelta


def seconds_of(timeout: float | timedelta) -> float:
    if isinstance(timeout, timedelta):
        return timeout.total_seconds()
    return float(max(0, min(timeout, sys.float_info.max)))  # a larger int is no float
