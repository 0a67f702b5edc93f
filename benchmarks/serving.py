"""The side of a contender: it makes a step in a process of its own, then runs as many as it is told, line by line.

Its standard output carries the answers: first the seconds to the end of the first step, then for every number of steps that it
reads, the seconds of each, as JSON. This file needs nothing but Python, so that contenders may have environments of their own.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from typing import Any

StepFunction = Callable[[], Any]


def serve(make_step: Callable[[], StepFunction]) -> None:
    """Makes a step, answers requests, and returns when there are no more."""
    answers = os.fdopen(os.dup(sys.stdout.fileno()), "w")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # what libraries print is no answer
    started = time.perf_counter()
    step = make_step()
    step()
    print(json.dumps(time.perf_counter() - started), file=answers, flush=True)
    for line in sys.stdin:
        seconds = []
        for _ in range(int(line)):
            begun = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begun)
        print(json.dumps(seconds), file=answers, flush=True)
