"""How many examples Hypothesis tries: a few in every run, many where MIRRORC_FUZZING says so (make test-all)."""

import os
from typing import Any

from hypothesis import settings

FACTOR = int(os.environ.get("MIRRORC_FUZZING", "1"))


def fuzzed(examples: int, **more: Any) -> settings:
    """Settings of a test that tries so many examples, as many times as MIRRORC_FUZZING says; no example has a deadline."""
    return settings(max_examples=examples * FACTOR, deadline=None, **more)
