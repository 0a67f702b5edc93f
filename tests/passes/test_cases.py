"""Passes tested by texts, which are in `cases`: here is only that none is forgotten."""

import re
from pathlib import Path

from mirrorc.passes import PASSES


def test_each_pass_has_a_case() -> None:
    runs = [
        line.removeprefix("# RUN:")
        for path in (Path(__file__).parent / "cases").rglob("*.mirror")
        for line in path.read_text(encoding="utf-8").split("\n")
        if line.startswith("# RUN:")
    ]
    assert set(PASSES) <= {name for run in runs for name in re.findall(r"[\w:-]+", re.sub(r"\{.*?\}", "", run))}
