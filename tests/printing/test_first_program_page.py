"""docs/start/first-program.md shows the program that its first block prints."""

import contextlib
import io
import re
from pathlib import Path

TEXT = (Path(__file__).parents[2] / "docs" / "start" / "first-program.md").read_text(encoding="utf-8")


def test_the_parts_of_the_program_are_those_that_are_printed() -> None:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", TEXT, flags=re.DOTALL | re.MULTILINE)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(blocks[0][1], {})
    shown = "".join(block for language, block in blocks if not language)
    assert shown.splitlines() == [line for line in printed.getvalue().splitlines() if line]
